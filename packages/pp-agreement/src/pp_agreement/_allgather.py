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
from pp_agreement._errors import LocalProtocolError, TransportError
from pp_agreement._events import AgreementEvent, FaultCode, Record, SendFrame
from pp_agreement._machine import EXCHANGE

_RECORD = struct.Struct("<BBBBIQQ")
_HEAD = struct.Struct("<IIII")  # marker, domain id, epoch, 0
_MARK, _POISON = 0x50504C53, 0xDEADBEEF


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

    ``poll``, ``drain`` and ``close`` are collective: every rank calls them equally often (lockstep). A rank that cannot
    go on contributes poison in the next poll, which stops the domain everywhere; none hangs for it.

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
        super().__init__(domain, rank, config or AgreementConfig(), clock, replicated=True)
        self._comm = comm
        self._exchange: Exchange | None = comm if hasattr(comm, "exchange") else None
        self._outgoing: tuple[Record, ...] = ()
        self._poisoned = False
        self._bytes_sent = 0
        self._bytes_received = 0

    def open(self) -> None:
        """Get ready; collective over the members when ``comm`` is a communicator."""
        if self._opened:
            raise LocalProtocolError("opened twice", rank=self.rank)
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

    def _transmit(self, effect: SendFrame) -> None:
        self._outgoing = effect.frame.records

    def poll(self) -> tuple[AgreementEvent, ...]:
        """One exchange: blocks until every rank has called it as often. After a fault: one poisoned exchange, then ().

        Returns:
            Events in order, each once.
        """
        began_s = self._begin_poll()
        if self._core.fault is not None and self._poisoned:
            return self._take()
        poison = self._core.fault is not None
        self._poisoned = poison
        self._outgoing = ()
        if not poison:
            self._keep(self._core.step(ev.SlotFreed(EXCHANGE, 0), began_s))
        head = _HEAD.pack(_POISON if poison else _MARK, self.domain.domain_id, self.domain.epoch, 0)
        outgoing: tuple[Record, ...] = self._outgoing  # set by _transmit
        payload = head + b"".join([_RECORD.pack(*record) for record in outgoing])
        self._bytes_sent += len(payload)
        if self._exchange is None:
            raise LocalProtocolError("poll before open()", rank=self.rank)
        try:
            contributions = self._exchange.exchange(payload)
        except TransportError as error:
            self._poisoned = True
            self.fail(str(error), FaultCode.TRANSPORT)
        else:
            decoded = tuple(self._decode(data) for data in contributions)
            self._bytes_received += sum(len(data) for data in contributions)
            if not poison:
                self._apply(ev.ExchangeCompleted(decoded))
                if self._core.fault is not None and any(d is None for d in decoded):
                    self._poisoned = True  # everybody saw the poison in this exchange
                self._keep(self._core.step(ev.SweepCompleted(0), began_s))
        self._end_poll(began_s)
        return self._take()

    def _decode(self, data: bytes) -> tuple[Record, ...] | None:
        if len(data) < _HEAD.size or (len(data) - _HEAD.size) % RECORD_BYTES:
            return None
        mark, domain_id, epoch, _zero = _HEAD.unpack_from(data)
        if mark != _MARK or (domain_id, epoch) != (self.domain.domain_id, self.domain.epoch):
            return None
        return tuple(_RECORD.iter_unpack(memoryview(data)[_HEAD.size :]))

    def busy(self, max_s: float, reason: str = "") -> bool:
        """Nothing to declare: the others wait in their poll anyway."""
        self._apply(ev.BusyDeclared(max_s))
        self.busy_reason = reason
        return True

    def peer_died(self, rank: int, evidence: str) -> None:
        """Stops this rank; the others stop with the next exchange, if there can be one."""
        self._keep(self._core.step(ev.PeerDied(self.domain.index_of(rank), evidence), self._clock()))

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """Collective after a proven drain (one exchange); otherwise leaves at once.

        Returns:
            True after a proven drain on every rank.
        """
        if self._ended:
            return self._clean
        if self._opened and self._exchange is not None:
            if self._core.drained and self._core.fault is None:
                self._apply(ev.CloseRequested())
                self._events[:0] = self.poll()
            self._clean = self._core.closed and self._core.fault is None
            self._exchange.close(self._clean)
        self._ended = True
        return self._clean
