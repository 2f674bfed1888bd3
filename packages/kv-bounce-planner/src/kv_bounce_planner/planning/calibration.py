"""Measure a link as a session would use it: the same transport, control channel and copiers, over scratch memory.

The sending rank drives (:class:`LinkCalibration`, a ``CalibrationTransport`` for :func:`calibrate`), the receiving rank
answers (:class:`CalibrationTarget`). Both run on a transport and a channel of their own, at start-up, before any session
uses them. Scratch memory is the caller's: registered, otherwise unused, and garbage afterwards. No library is imported
here; clocks and idling are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import msgspec
import numpy as np

from kv_bounce_planner._errors import LayoutError, RemoteProtocolError, TransferTimeout, TransportError
from kv_bounce_planner.copies.gather import Copier, HostCopier
from kv_bounce_planner.layout.model import Int64Array
from kv_bounce_planner.planning.tier import Phases, Tier
from kv_bounce_planner.sessions.identity import OperationIdentity, PeerId, TransferIdentity
from kv_bounce_planner.transports.interface import AgentInfo, ControlChannel, MemoryRegion, TransferJob, Transport

#: Fragments are cut to multiples of this, so that every copier takes its widest word.
GRAIN_BYTES: Final = 16
#: One trial moves at most so many fragments.
TRIAL_FRAGMENTS_MAX: Final = 1 << 17


class _Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    agent_name: str
    metadata: bytes
    address: int
    byte_count: int
    memory_kind: str
    device_id: int


class _Trial(msgspec.Struct, frozen=True, tag="trial", array_like=True):
    number: int
    bounce: bool
    count: int
    size: int


class _Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    number: int


class _Done(msgspec.Struct, frozen=True, tag="done", array_like=True):
    number: int
    scatter_s: float


_Message = _Hello | _Trial | _Ready | _Done
_DECODER = msgspec.msgpack.Decoder(_Message)


def _decode(frame: bytes) -> _Message:
    try:
        return _DECODER.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"not a calibration message: {error}") from error


def scratch_bytes(total_bytes: int, fragment_count: int) -> int:
    """Scratch memory that one side needs for a trial: the fragments with gaps between them, and a staging region."""
    return 3 * total_bytes + 4 * GRAIN_BYTES * fragment_count


def _offsets(count: int, size: int, seed: int, *, shuffled: bool) -> Int64Array:
    """Places of fragments that never touch, at random distances; the same on both sides for one seed."""
    rng = np.random.default_rng(seed)
    gaps = GRAIN_BYTES * rng.integers(1, max(size // GRAIN_BYTES, 1) + 1, count)
    offsets = np.cumsum(gaps + size) - size
    return offsets[rng.permutation(count)] if shuffled else offsets


def trial_offsets(number: int, count: int, size: int) -> tuple[Int64Array, Int64Array]:
    """(source, target) offsets of a trial's fragments within the two scratch regions, pair by pair."""
    return _offsets(count, size, 2 * number + 1, shuffled=True), _offsets(count, size, 2 * number, shuffled=False)


def _staging(region: MemoryRegion, count: int, size: int) -> int:
    """The staging region is the end of the scratch."""
    return (region.address + region.byte_count - count * size) // GRAIN_BYTES * GRAIN_BYTES


class CalibrationTarget:
    """The receiving side: answers trials until it is dropped. One thread polls it.

    Args:
        transport: Its marks say when a trial has landed.
        channel: Replies travel here.
        scratch: Registered memory that trials may overwrite.
        copier: Scatters bounce trials.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        transport: Transport,
        channel: ControlChannel,
        scratch: MemoryRegion,
        *,
        clock: Callable[[], float],
        copier: Copier | None = None,
    ) -> None:
        self._transport, self._channel, self._scratch, self._clock = transport, channel, scratch, clock
        self._copier: Copier = copier if copier is not None else HostCopier()
        self._trial: tuple[PeerId, _Trial] | None = None
        self._landed: dict[int, set[int]] = {}
        self._trials = 0
        self._last: tuple[int, int, int] | None = None

    @property
    def last_trial(self) -> tuple[int, int, int] | None:
        """(number, fragments, bytes of each) of the last trial that landed; with :func:`trial_offsets`, what to compare.

        Until the next ``poll`` nothing overwrites it: a trial begins only with this side's answer.
        """
        return self._last

    @property
    def trials(self) -> int:
        """Trials answered so far."""
        return self._trials

    def announce(self, peer: PeerId) -> None:
        """Introduce this side to the sending rank; it waits for that. (A channel may have no way back before.)"""
        info, at = self._transport.agent_info(peer), self._scratch
        self._send(peer, _Hello(info.name, info.metadata, at.address, at.byte_count, at.memory_kind, at.device_id))

    def poll(self) -> None:
        """Answer what came in; blocks only while a scatter of a trial runs.

        Raises:
            RemoteProtocolError: A frame is no calibration message, or a trial does not fit into the scratch.
        """
        for peer, frame in self._channel.poll(16):
            message = _decode(frame)
            if isinstance(message, _Hello):
                self._transport.connect(peer, AgentInfo(message.agent_name, message.metadata))
                self._send(peer, _Ready(0))
            elif isinstance(message, _Trial):
                if (
                    not 1 <= message.count <= TRIAL_FRAGMENTS_MAX
                    or not 1 <= message.size <= self._scratch.byte_count
                    or scratch_bytes(message.count * message.size, message.count) > self._scratch.byte_count
                ):
                    raise RemoteProtocolError(f"{message} does not fit into {self._scratch.byte_count} B")
                self._trial, self._landed = (peer, message), {}
                self._send(peer, _Ready(message.number))
        for arrived in self._transport.poll().marks:
            mark = arrived.mark
            if self._trial is None or mark.operation.operation != self._trial[1].number:
                continue
            parts = self._landed.setdefault(mark.count, set())
            parts.update(range(mark.index, mark.index + mark.extent))
            if len(parts) == mark.count:
                self._finish(*self._trial)
                self._trial = None

    def _finish(self, peer: PeerId, trial: _Trial) -> None:
        took = 0.0
        if trial.bounce:
            begin = self._clock()
            at = _staging(self._scratch, trial.count, trial.size)
            staged = at + trial.size * np.arange(trial.count, dtype=np.int64)
            targets = self._scratch.address + trial_offsets(trial.number, trial.count, trial.size)[1]
            sizes = np.full(trial.count, trial.size, np.int64)
            self._copier.submit(self._copier.prepare(staged, targets, sizes)).wait()
            took = self._clock() - begin
        self._trials += 1
        self._last = (trial.number, trial.count, trial.size)
        self._send(peer, _Done(trial.number, took))

    def _send(self, peer: PeerId, message: _Message) -> None:
        self._channel.send(peer, msgspec.msgpack.encode(message))


class LinkCalibration:
    """The sending side: a ``CalibrationTransport`` over a real link. Blocks the calling thread while it measures.

    Args:
        transport, channel, peer: The link; the peer runs a :class:`CalibrationTarget`.
        scratch: Registered memory here, for the sources and the staging.
        clock: Monotonic seconds.
        copier: Gathers bounce trials.
        idle: Called whenever nothing came in; in one process, it polls the target.
        repeats: Best of so many.
        timeout_s: Longest wait for one answer.
    """

    def __init__(
        self,
        transport: Transport,
        channel: ControlChannel,
        peer: PeerId,
        scratch: MemoryRegion,
        *,
        clock: Callable[[], float],
        copier: Copier | None = None,
        idle: Callable[[], None] = lambda: None,
        repeats: int = 3,
        timeout_s: float = 30.0,
    ) -> None:
        if repeats < 1 or timeout_s <= 0:
            raise LayoutError("repeats must be at least 1 and timeout_s positive")
        self._transport, self._channel, self._peer, self._scratch = transport, channel, peer, scratch
        self._clock, self._idle, self._repeats, self._timeout_s = clock, idle, repeats, timeout_s
        self._copier: Copier = copier if copier is not None else HostCopier()
        self._remote: _Hello | None = None
        self._number = 0
        self._written = 0

    def connect(self) -> None:
        """Wait for the target's introduction, answer it, and warm both ways up.

        Raises:
            TransferTimeout: The peer did not answer.
            TransportError: The link refused.
        """
        hello = self._wait()
        if not isinstance(hello, _Hello):
            self._unexpected(hello)
        self._transport.connect(self._peer, AgentInfo(hello.agent_name, hello.metadata))
        info, at = self._transport.agent_info(self._peer), self._scratch
        self._send(_Hello(info.name, info.metadata, at.address, at.byte_count, at.memory_kind, at.device_id))
        answer = self._wait()
        if not isinstance(answer, _Ready) or answer.number != 0:
            self._unexpected(answer)
        self._remote = hello
        for tier in (Tier.DIRECT, Tier.BOUNCE):
            self._run(tier, 4, 4096)

    def measure(self, tier: Tier, total_bytes: int, fragment_count: int) -> Phases:
        """Best of several trials, judged by the sum of the phases.

        Raises:
            LayoutError: The trial does not fit into the scratch memory of either side.
            TransferTimeout: The peer did not answer.
            TransportError: A write failed.
        """
        if self._remote is None:
            self.connect()
        size = max(total_bytes // fragment_count // GRAIN_BYTES, 1) * GRAIN_BYTES
        runs = [self._run(tier, fragment_count, size) for _ in range(self._repeats)]
        return min(runs, key=lambda run: run.wire_s + run.gather_s + run.scatter_s + run.overhead_s)

    def _run(self, tier: Tier, count: int, size: int) -> Phases:
        remote = self._remote
        if remote is None:
            raise LayoutError("not connected")
        needed = scratch_bytes(count * size, count)
        if needed > min(self._scratch.byte_count, remote.byte_count) or not 1 <= count <= TRIAL_FRAGMENTS_MAX:
            raise LayoutError(f"a trial of {count} x {size} B needs {needed} B of scratch on both sides")
        self._number += 1
        number, bounce = self._number, tier is Tier.BOUNCE
        begin = self._clock()
        self._send(_Trial(number, bounce, count, size))
        answer = self._wait()
        if not isinstance(answer, _Ready) or answer.number != number:
            self._unexpected(answer)
        overhead_s = self._clock() - begin
        source_offsets, target_offsets = trial_offsets(number, count, size)
        sources, targets = self._scratch.address + source_offsets, remote.address + target_offsets
        sizes = np.full(count, size, np.int64)
        gather_s = 0.0
        begin = self._clock()
        if bounce:
            staging = _staging(self._scratch, count, size)
            staged = staging + size * np.arange(count, dtype=np.int64)
            self._copier.submit(self._copier.prepare(sources, staged, sizes)).wait()
            gather_s = self._clock() - begin
            whole = np.array([count * size], np.int64)
            region = MemoryRegion(remote.address, remote.byte_count)
            begin = self._clock()
            self._write(number, np.array([staging]), np.array([_staging(region, count, size)]), whole, remote)
        else:
            self._write(number, sources, targets, sizes, remote)
        answer = self._wait()
        elapsed = self._clock() - begin
        if not isinstance(answer, _Done) or answer.number != number:
            self._unexpected(answer)
        self._transport.forget(self._operation(number))
        if not bounce:
            return Phases(elapsed)
        return Phases(max(elapsed - answer.scatter_s, 0.0), gather_s, answer.scatter_s, overhead_s)

    def _operation(self, number: int) -> OperationIdentity:
        return OperationIdentity(TransferIdentity(number, 0, self._peer.generation, self._peer.rank), 0, number)

    def _write(self, number: int, sources: Int64Array, targets: Int64Array, sizes: Int64Array, remote: _Hello) -> None:
        self._transport.start(
            TransferJob(
                operation=self._operation(number),
                peer=self._peer,
                source_addresses=sources,
                target_addresses=targets,
                sizes=sizes,
                source_kind=self._scratch.memory_kind,
                source_device=self._scratch.device_id,
                target_kind="VRAM" if remote.memory_kind == "VRAM" else "DRAM",
                target_device=remote.device_id,
            )
        )

    def _wait(self) -> _Message:
        """The peer's next message, and for a write also its end here: its handles must be free to be forgotten."""
        deadline = self._clock() + self._timeout_s
        answer: _Message | None = None
        while True:
            for write in self._transport.poll().jobs:
                if write.state == "error":
                    raise TransportError(f"a calibration write failed: {write.detail}")
                if write.operation.operation == self._number and write.state == "done":
                    self._written = self._number
            if answer is None:
                for peer, frame in self._channel.poll(1):
                    if peer == self._peer:
                        answer = _decode(frame)
            if answer is not None and (not isinstance(answer, _Done) or self._written == self._number):
                return answer
            if self._clock() > deadline:
                raise TransferTimeout(f"{self._peer} did not answer within {self._timeout_s} s")
            self._idle()

    def _send(self, message: _Message) -> None:
        self._channel.send(self._peer, msgspec.msgpack.encode(message))

    def _unexpected(self, answer: object) -> NoReturn:
        raise RemoteProtocolError(f"{self._peer} answered {type(answer).__name__}")
