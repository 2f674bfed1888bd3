"""The blocking baseline: the same calls and events over one lockstep exchange per poll.

Every rank contributes its records to an allgather and runs the coordinator over all contributions in member order, so
every rank reaches the same decisions in the same poll. It is what pipelines do today, kept for matched comparison:
``poll()`` waits for the slowest rank.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pp_agreement import _events as ev
from pp_agreement._agreement import BaseAgreement
from pp_agreement._config import RECORD_BYTES, AgreementConfig, Domain
from pp_agreement._errors import ConcurrentCallError, LocalProtocolError, TransportError
from pp_agreement._events import AgreementEvent, FaultCode, Record
from pp_agreement._machine import PEER, as_it_is
from pp_agreement._statistics import DrainReport
from pp_agreement._streams import EXCHANGE
from pp_agreement._words import TEXT_BYTES_MAX, text_of

_RECORD = struct.Struct("<BBBBIQQ")
_HEAD = struct.Struct("<IIIIQ")  # marker, domain id, epoch, flags, session
_MARK, _POISON = 0x50504C53, 0xDEADBEEF
_LEAVING = 1  # flag: the deadline of this rank's drain has passed


class Exchange(Protocol):
    """An allgather of bytes among a domain's members, in member order."""

    name: str

    def exchange(self, contribution: bytes) -> list[bytes]:
        """Give this member's bytes, get everybody's. Blocks until all have come.

        Raises:
            TransportError: The exchange is broken for good.
        """

    def close(self, clean: bool) -> None:
        """Let go."""


class InProcessExchange:
    """Members are threads of one process: ``InProcessExchange(domain).member(rank)`` for each."""

    def __init__(self, domain: Domain, timeout_s: float = 60.0) -> None:
        self._domain = domain
        self._slots: list[bytes] = [b""] * domain.size
        self._barrier = threading.Barrier(domain.size, timeout=timeout_s)

    def member(self, rank: int) -> _Member:
        """One member's end."""
        return _Member(self, self._domain.index_of(rank))

    def _exchange(self, me: int, contribution: bytes) -> list[bytes]:
        self._slots[me] = contribution
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise TransportError("a member left the exchange") from error
        slots = list(self._slots)
        with contextlib.suppress(threading.BrokenBarrierError):  # this exchange is complete, whoever leaves now
            self._barrier.wait()
        return slots

    def abort(self) -> None:
        """A member is gone: nobody waits any longer."""
        self._barrier.abort()


class _Member:
    name = "in-process exchange"

    def __init__(self, hub: InProcessExchange, me: int) -> None:
        self._hub = hub
        self._me = me

    def exchange(self, contribution: bytes) -> list[bytes]:
        return self._hub._exchange(self._me, contribution)

    def close(self, clean: bool) -> None:
        if not clean:
            self._hub.abort()


class AllgatherAgreement(BaseAgreement):
    """The baseline with the same interface as :class:`Agreement`.

    ``poll``, ``drain`` and ``close`` are collective: every rank calls them equally often (lockstep). A rank that cannot go
    on, or leaves ``with`` by an exception, contributes poison in the next exchange, which stops the domain everywhere;
    none hangs for it. A drain ends in the same exchange on every rank: the first deadline that passes anywhere counts for
    all. Admissions may reach the ranks before different exchanges.

    Args:
        domain, rank, config, clock: As for :class:`Agreement`.
        comm: An :class:`Exchange`, or an mpi4py communicator whose ranks ``domain.ranks`` are.
    """

    mode = "allgather"

    def __init__(
        self,
        domain: Domain,
        rank: int,
        comm: Any,
        config: AgreementConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(domain, rank, AgreementConfig() if config is None else config, clock, replicated=True)
        self._comm = comm
        self._exchange: Exchange | None = comm if hasattr(comm, "exchange") else None
        self._sessions: dict[int, int] = {}
        self._poisoned = False
        self._leaving = False
        self._somebody_leaves = False
        self._bytes_sent = 0
        self._bytes_received = 0

    def open(self) -> None:
        """Get ready; collective over the members when ``comm`` is a communicator."""
        if self._opened or self._ended:
            raise LocalProtocolError("opened twice, or after close()", rank=self.rank)
        if self._exchange is None:
            from pp_agreement._allgather_mpi import MpiExchange

            self._exchange = MpiExchange(self._comm, self.domain)
        self._opened = True

    def __enter__(self) -> AllgatherAgreement:
        self.open()
        return self

    def _transport_name(self) -> str:
        return "none" if self._exchange is None else self._exchange.name

    def _traffic(self) -> tuple[int, int, int, int]:
        return self._bytes_sent, self._bytes_received, 0, 0

    def _turn(self, now_s: float) -> None:
        """One exchange: blocks until every rank has polled as often. After a fault: one poisoned exchange, then none."""
        self._core.settle(now_s)
        if self._core.fault is None or not self._poisoned:
            self._exchange_once(now_s)

    def _exchange_once(self, began_s: float) -> None:
        poison = self._core.fault is not None
        self._poisoned = poison
        if not poison:
            self._core.fill(((EXCHANGE, 0),))
        frames, self._core.context.frames = self._core.context.frames, []
        flags = _LEAVING if self._leaving else 0
        mark = _POISON if poison else _MARK
        head = _HEAD.pack(mark, self.domain.domain_id, self.domain.epoch, flags, self._core.context.session)
        outgoing = [record for _peer, frame in frames for record in frame.records]
        said = (
            self._core.fault.detail.encode("utf-8", "replace")[:TEXT_BYTES_MAX] if self._core.fault is not None else b""
        )
        payload = head + (said if poison else b"".join([_RECORD.pack(*record) for record in outgoing]))
        self._bytes_sent += len(payload)
        if self._exchange is None:
            raise LocalProtocolError("poll before open()", rank=self.rank)
        try:
            contributions = self._exchange.exchange(payload)
        except TransportError as error:
            self._poisoned = True
            self.fail(str(error), FaultCode.TRANSPORT)
        except BaseException as error:
            self._poisoned = True  # in an exchange or out of it: no further one can be in step
            self.fail(f"broken off in an exchange: {error!r}", FaultCode.TRANSPORT)
            raise
        else:
            decoded = tuple(self._decode(member, data) for member, data in enumerate(contributions))
            self._bytes_received += sum(len(data) for data in contributions)
            if not poison:
                self._core.settle(began_s)
                self._core.notice(ev.ExchangeCompleted(decoded), self._clock())
                if self._core.fault is not None and any(d is None or isinstance(d, str) for d in decoded):
                    self._poisoned = True  # everybody saw the poison in this exchange
                self._core.call(self._core.sweep, ((), as_it_is, 0), began_s, PEER)

    def _decode(self, member: int, data: bytes) -> tuple[Record, ...] | str | None:
        """A member's records; what it said, of a failed one; None where the bytes are not this member's in this domain."""
        if len(data) < _HEAD.size:
            return None
        mark, domain_id, epoch, flags, session = _HEAD.unpack_from(data)
        if (domain_id, epoch) != (self.domain.domain_id, self.domain.epoch) or flags & ~_LEAVING:
            return None
        if mark == _POISON:
            return text_of(data[_HEAD.size :])
        if mark != _MARK or (len(data) - _HEAD.size) % RECORD_BYTES:
            return None
        if self._sessions.setdefault(member, session) != session:
            return "restarted, which needs another epoch of the domain"
        self._somebody_leaves |= flags == _LEAVING
        return tuple(_RECORD.iter_unpack(memoryview(data)[_HEAD.size :]))

    def busy(self, max_s: float, reason: str = "") -> bool:
        """Nothing to declare: the others wait in their poll anyway."""
        if not self._opened or self._ended:
            raise LocalProtocolError("busy before open() or after close()", rank=self.rank)
        self._step(self._core.busy, (max_s,), self._clock())
        self.busy_reason = str(reason)[:200]
        return True

    def drain(
        self,
        deadline_s: float,
        wait: Callable[[float], object] = time.sleep,
        on_events: Callable[[tuple[AgreementEvent, ...]], None] | None = None,
    ) -> DrainReport:
        """Collective; see :meth:`BaseAgreement.drain`. All ranks return from it after the same exchange."""
        until_s = self._clock() + self._duration(deadline_s)
        kept: list[AgreementEvent] = []
        core = self._core
        self._somebody_leaves = False
        try:
            while True:
                # Whose deadline has passed says so in the exchange: leaving alone would leave the others in the next one.
                self._leaving = self._clock() >= until_s
                events = self.poll()
                if on_events is not None:
                    if events:
                        on_events(events)
                else:
                    kept.extend(events)
                if core.drained or self._somebody_leaves or (core.fault is not None and self._poisoned):
                    return self.drain_state()
                wait(0.002)
        finally:
            self._leaving = False
            self._events[:0] = kept

    def peer_died(self, rank: int, evidence: str) -> None:
        """Stops this rank; the others stop with the next exchange, if there can be one."""
        self._core.notice(ev.PeerDied(self.domain.index_of(rank), str(evidence)[:1000]), self._clock())

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """Collective after a proven drain (one exchange); otherwise leaves at once.

        Returns:
            True after a proven drain on every rank.
        """
        if self._ended:
            return self._clean
        self._duration(deadline_s)
        if self._polling or self._core.stepping:
            raise ConcurrentCallError(f"rank {self.rank}: close while another call runs")
        clean = False
        try:
            self._core.settle(self._clock())
            if self._opened and self._core.drained and self._core.fault is None:
                self._step(self._core.ending.close, (), self._clock())
                self._events[:0] = self.poll()
            clean = self._core.closed and self._core.fault is None
        finally:
            self._end(clean)
        return clean

    def _let_go(self, clean: bool) -> None:
        if self._exchange is not None:
            self._exchange.close(clean)
