"""The exchanges: broadcast, gather, allgather, each as steps that wait for requests and never block.

A step is a generator that yields the request it waits for; a handle advances it as far as completed requests allow. The same
steps serve the blocking calls (poll politely), the handles (the caller polls) and every adapter. What keeps ranks together:

- Every rank joins the first frame of every exchange, whatever happened to it: a rank that could not encode sends its error
  there, so nobody waits for bytes that will not come, and the next exchange starts level.
- Sizes, chunks and kinds come from the sender's frame, never from a rank's own settings.
- A rank that cannot decode or allocate has still taken part in every transfer of the exchange. With ``agree`` the results are
  compared at once; otherwise it reports to the root outside of any exchange, and the root's next frame tells everybody.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from comm_broadcast import _block
from comm_broadcast._codec import Codec, PickleCodec
from comm_broadcast._comm import Comm, Request, Window
from comm_broadcast._config import HEADER_BYTES, BroadcastConfig
from comm_broadcast._errors import BroadcastConfigError, BroadcastError, LocalProtocolError
from comm_broadcast._frame import Frame, Kind, Status, pack_text, unpack_text

T = TypeVar("T")
Steps = Generator[Request, None, T]
#: Called between polls with the longest time to wait (s); may return early.
Wait = Callable[[float], object]

_REPORT_BYTES = 512
_SETTINGS_BYTES = 512


class Handle(Generic[T]):
    """An exchange under way on this rank.

    Poll it with :meth:`test`, or give :meth:`wait` a way to wait. A handle that is dropped half-way leaves the other ranks
    waiting: finish it.
    """

    def __init__(self, owner: Broadcaster, steps: Steps[T]) -> None:
        self._owner = owner
        self._steps = steps
        self._request: Request | None = None
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Make progress; whether the exchange has ended on this rank. Never blocks, never raises the exchange's error."""
        while not self._done:
            if self._request is not None and not self._request.test():
                return False
            try:
                self._request = next(self._steps)
            except StopIteration as stop:
                self._finish(stop.value, None)
            except BaseException as error:  # noqa: BLE001 - kept for result(), where it is raised
                self._finish(None, error)
        return True

    def _finish(self, value: T | None, error: BaseException | None) -> None:
        self._done, self._value, self._error = True, value, error
        self._owner._ended(self)

    def result(self) -> T:
        """The exchange's value.

        Raises:
            BroadcastError: A rank failed; see there.
            LocalProtocolError: It has not ended.
        """
        if not self._done:
            raise LocalProtocolError("result: the exchange has not ended; poll test() or wait()")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def wait(self, wait: Wait | None = None) -> T:
        """Poll until the exchange ends; between polls ``wait(timeout_s)`` is called (default: spin shortly, then sleep)."""
        spin_end = time.perf_counter() + self._owner.config.spin_s
        pause_s = 20e-6
        while not self.test():
            if wait is not None:
                wait(pause_s)
            elif time.perf_counter() >= spin_end:
                time.sleep(pause_s)
            else:
                continue
            pause_s = min(2 * pause_s, 1e-3)
        return self.result()


@dataclass(frozen=True)
class BroadcastStatistics:
    """Counts since construction."""

    exchanges: int
    inline: int
    shared: int
    large_buffers: int
    bytes_sent: int
    bytes_received: int
    failures: int


class Broadcaster:
    """Moves objects between the ranks of a communicator; all of them succeed, or all of them raise.

    Construction is collective: the ranks compare root, settings and codec once, in one exchange.

    Args:
        comm: An adapter (``MpiComm``, ``TorchComm``, ``testing.FakeComm``) of which this object becomes the only user.
        root: The rank that broadcasts.
        config: See :class:`BroadcastConfig`.
        codec: How values become bytes; default: pickle.

    Raises:
        BroadcastConfigError: Ranks disagree, on every rank, naming what and who; or the root is no rank.
    """

    def __init__(
        self, comm: Comm, root: int = 0, *, config: BroadcastConfig | None = None, codec: Codec | None = None
    ) -> None:
        self.config = config or BroadcastConfig()
        self._comm = comm
        self._root = root
        self._codec: Codec = codec or PickleCodec()
        self._agree = self.config.agree or not comm.reports
        self._sequence = 0
        self._current: Handle[Any] | None = None
        self._closed = False
        self._frame = bytearray(self.config.frame_bytes)
        #: Reused blocks: what was received two exchanges ago may still be looked at, what is older is not.
        self._blocks: list[np.ndarray[Any, Any]] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]
        self._turn = 0
        self._pending: tuple[int, str, str] | None = None
        self._report: tuple[Request, bytes] | None = None
        self._window: Window | None = None
        self._counts = dict.fromkeys(
            ("exchanges", "inline", "shared", "large_buffers", "bytes_sent", "bytes_received", "failures"), 0
        )
        Handle(self, self._compare_settings()).wait()
        if self.config.shared_slot_bytes:
            self._window = comm.shared_window(self.config.shared_slot_bytes)

    # -- public --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Ranks (count)."""
        return self._comm.size

    def start_broadcast(self, value: Any = None) -> Handle[Any]:
        """Begin a broadcast of the root's ``value`` (others' is ignored). The root's result is the very object it gave."""
        return self._start(self._broadcast(value))

    def broadcast(self, value: Any = None, *, wait: Wait | None = None) -> Any:
        """Broadcast and wait.

        Raises:
            BroadcastError: On every rank, when one failed.
        """
        return self.start_broadcast(value).wait(wait)

    def start_gather(self, value: Any) -> Handle[list[Any] | None]:
        """Begin to gather one value per rank at the root: a list in rank order there, None elsewhere."""
        return self._start(self._gather(value, everywhere=False))

    def gather(self, value: Any, *, wait: Wait | None = None) -> list[Any] | None:
        """Gather and wait."""
        return self.start_gather(value).wait(wait)

    def start_allgather(self, value: Any) -> Handle[list[Any]]:
        """Begin to gather one value per rank everywhere; this rank's own is the very object it gave."""
        return self._start(self._gather(value, everywhere=True))  # type: ignore[arg-type]

    def allgather(self, value: Any, *, wait: Wait | None = None) -> list[Any]:
        """Gather everywhere and wait."""
        return self.start_allgather(value).wait(wait)

    def statistics(self) -> BroadcastStatistics:
        """A frozen snapshot."""
        return BroadcastStatistics(**self._counts)

    def close(self) -> None:
        """Release communicator and window (collective). A second call does nothing."""
        if self._closed:
            return
        if self._current is not None:
            raise LocalProtocolError("close: an exchange has not ended")
        self._closed = True
        if self._window is not None:
            self._window.free()
        self._comm.free()

    def _start(self, steps: Steps[T]) -> Handle[T]:
        if self._closed:
            raise LocalProtocolError("the broadcaster is closed")
        if self._current is not None:
            raise LocalProtocolError("an exchange has not ended: one at a time per broadcaster")
        self._sequence += 1
        self._counts["exchanges"] += 1
        handle = Handle(self, steps)
        self._current = handle
        handle.test()
        return handle

    def _ended(self, handle: Handle[Any]) -> None:
        if self._current is handle:
            self._current = None

    # -- construction --------------------------------------------------------------------------------------------------

    def _compare_settings(self) -> Steps[None]:
        c = self.config
        mine = {
            "root": self._root, "frame_bytes": c.frame_bytes, "agree": self._agree, "shared_slot_bytes": c.shared_slot_bytes,
            "codec": self._codec.name, "size": self.size,
        }  # fmt: skip
        text = "\n".join(f"{key}={value}" for key, value in mine.items()).encode()[: _SETTINGS_BYTES - 1]
        send = bytearray(text.ljust(_SETTINGS_BYTES, b"\0"))
        receive = bytearray(_SETTINGS_BYTES * self.size)
        yield self._comm.iallgather(send, receive)
        if not 0 <= self._root < self.size:
            raise BroadcastConfigError(f"root must be a rank of 0..{self.size - 1}, got {self._root!r}")
        texts = [
            bytes(receive[r * _SETTINGS_BYTES : (r + 1) * _SETTINGS_BYTES]).rstrip(b"\0").decode()
            for r in range(self.size)
        ]
        for rank, other in enumerate(texts):
            if other != texts[0]:
                for theirs, first in zip(other.splitlines(), texts[0].splitlines(), strict=False):
                    if theirs != first:
                        raise BroadcastConfigError(f"ranks disagree: rank 0 has {first}, rank {rank} has {theirs}")

    # -- broadcast -----------------------------------------------------------------------------------------------------

    def _broadcast(self, value: Any) -> Steps[Any]:
        if self._report is not None and self._report[0].test():
            self._report = None
        if self.rank == self._root:
            yield from self._send(value)
            return value
        return (yield from self._receive())

    def _send(self, value: Any) -> Steps[None]:
        """The root's part: everything that can fail is done before the first frame says that it has not."""
        if self._comm.reports and self._pending is None:
            report = self._comm.poll_report(_REPORT_BYTES)
            if report is not None:
                rank, text = int.from_bytes(report[:4], "little"), report[4:].rstrip(b"\0")
                self._pending = (rank, *unpack_text(memoryview(text)))
        view = memoryview(self._frame)
        if self._pending is not None:
            rank, cause, details = self._pending
            self._pending = None
            yield from self._send_failure(view, Status.FAILED_EARLIER, rank, cause, details)
        try:
            segments = self._codec.encode(value)
            size, entries, large = _block.plan(segments, self.config)
            slot = None
            if size <= self.config.inline_bytes_max and not large:
                kind, block = Kind.INLINE, view[HEADER_BYTES : HEADER_BYTES + size]
            elif self._window is not None and size <= self.config.shared_slot_bytes:
                slot = self._sequence % 2
                # Everybody has moved past what this slot held two exchanges ago.
                while self._window.acknowledged() < self._sequence - 1:
                    yield _POLL
                kind, block = Kind.SHARED, self._window.slot(slot)[:size]
            else:
                kind, block = Kind.FOLLOWS, self._reused(size).data[:size]
            _block.write(block, segments, entries)
            if self.config.check_round_trip:
                self._check_round_trip(value, block, segments, large)
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this frame whatever happened
            cause, details = _describe(error)
            self._counts["failures"] += 1
            try:
                yield from self._send_failure(view, Status.FAILED, self.rank, cause, details)
            except BroadcastError as failure:
                raise failure from error
        frame = Frame(
            self._sequence, Status.GOOD, kind, size, self.config.chunk_bytes, len(large), self.rank, slot=slot or 0
        )
        frame.pack_into(view)
        if large:
            _block.write_sizes(view[HEADER_BYTES:], [segments[i].nbytes for i in large])
        yield self._comm.ibcast(view, self._root)
        if kind is Kind.FOLLOWS:
            yield from self._transfer(block, self.config.chunk_bytes)
        for index in large:
            yield from self._transfer(segments[index].source(), self.config.chunk_bytes)
        self._counts["inline"] += kind is Kind.INLINE
        self._counts["shared"] += kind is Kind.SHARED
        self._counts["large_buffers"] += len(large)
        self._counts["bytes_sent"] += size + sum(segments[i].nbytes for i in large)
        if self._window is not None:
            self._window.acknowledge(self._sequence)
        if self._agree:
            yield from self._compare_results(None)

    def _send_failure(self, view: memoryview, status: Status, rank: int, cause: str, details: str) -> Steps[None]:
        length = pack_text(view[HEADER_BYTES:], cause, details)
        Frame(self._sequence, status, rank=rank, text_bytes=length).pack_into(view)
        yield self._comm.ibcast(view, self._root)
        if self._window is not None:
            self._window.acknowledge(self._sequence)
        raise BroadcastError(rank, cause, details, earlier=status is Status.FAILED_EARLIER)

    def _receive(self) -> Steps[Any]:
        view = memoryview(self._frame)
        if self._window is not None:
            # What this rank still looks at is the exchange before: the slot of the one before that is free.
            self._window.acknowledge(self._sequence - 1)
        yield self._comm.ibcast(view, self._root)
        frame = Frame.unpack(view, self._sequence, self._root)
        if frame.status is not Status.GOOD:
            self._counts["failures"] += 1
            cause, details = unpack_text(view[HEADER_BYTES : HEADER_BYTES + frame.text_bytes])
            raise BroadcastError(frame.rank, cause, details, earlier=frame.status is Status.FAILED_EARLIER)
        failure: BaseException | None = None
        value = None
        sizes = _block.read_sizes(view[HEADER_BYTES:], frame.large_count)
        try:
            if frame.kind is Kind.INLINE:
                block = view[HEADER_BYTES : HEADER_BYTES + frame.block_bytes]
                if self._codec.views:
                    # The frame is overwritten by the next exchange; views may live one longer.
                    block = self._copy_to_reused(block)
            elif frame.kind is Kind.SHARED:
                if self._window is None:
                    raise LocalProtocolError("the root used a shared window that this rank has not")
                block = self._window.slot(frame.slot)[: frame.block_bytes]
                if not self._codec.views:
                    block = memoryview(bytearray(block))
            else:
                block = self._room(frame.block_bytes)
        except MemoryError as error:
            failure, block = error, memoryview(b"")
        if frame.kind is Kind.FOLLOWS:
            if failure is None:
                yield from self._transfer(block, frame.chunk_bytes)
            else:
                yield from self._discard(frame.block_bytes, frame.chunk_bytes)
        large: list[memoryview] = []
        for size in sizes:
            buffer = None
            try:
                buffer = np.empty(size, np.uint8).data if failure is None else None
            except MemoryError as error:
                failure = error
            if buffer is None:
                yield from self._discard(size, frame.chunk_bytes)
            else:
                yield from self._transfer(buffer, frame.chunk_bytes)
                large.append(buffer)
        self._counts["bytes_received"] += frame.block_bytes + sum(b.nbytes for b in large)
        if failure is None:
            try:
                value = self._codec.decode(_block.split(block, large))
            except BaseException as error:  # noqa: BLE001 - the others must learn of it whatever it is
                failure = error
        if self._agree:
            yield from self._compare_results(failure)
        elif failure is not None:
            cause, details = _describe(failure)
            self._counts["failures"] += 1
            self._send_report(cause, details)
            raise BroadcastError(self.rank, cause, details) from failure
        return value

    def _transfer(self, buffer: memoryview | None, chunk_bytes: int) -> Steps[None]:
        view = memoryview(b"") if buffer is None else buffer
        for start in range(0, view.nbytes, chunk_bytes):
            yield self._comm.ibcast(view[start : start + chunk_bytes], self._root)

    def _discard(self, size: int, chunk_bytes: int) -> Steps[None]:
        """Take part in a transfer whose whole this rank has no memory for, chunk by chunk: the ranks stay in step."""
        for start in range(0, size, chunk_bytes):
            yield self._comm.ibcast(bytearray(min(chunk_bytes, size - start)), self._root)

    def _send_report(self, cause: str, details: str) -> None:
        """Tell the root, outside of any exchange. One report is under way at most; a later one adds nothing new to know."""
        if self._report is not None and not self._report[0].test():
            return
        buffer = bytearray(_REPORT_BYTES)
        buffer[:4] = self.rank.to_bytes(4, "little")
        pack_text(memoryview(buffer)[4:], cause, details)
        self._report = (self._comm.report(buffer, self._root), bytes(buffer))

    def _compare_results(self, failure: BaseException | None) -> Steps[None]:
        """Everybody's result, everywhere: the lowest rank that failed is raised by all."""
        send = bytearray(_REPORT_BYTES)
        if failure is not None:
            send[0] = 1
            pack_text(memoryview(send)[1:], *_describe(failure))
        receive = bytearray(_REPORT_BYTES * self.size)
        yield self._comm.iallgather(send, receive)
        for rank in range(self.size):
            part = memoryview(receive)[rank * _REPORT_BYTES : (rank + 1) * _REPORT_BYTES]
            if part[0]:
                self._counts["failures"] += 1
                cause, details = unpack_text(memoryview(bytes(part[1:]).rstrip(b"\0")))
                error = BroadcastError(rank, cause, details)
                if rank == self.rank and failure is not None:
                    raise error from failure
                raise error

    def _check_round_trip(self, value: Any, block: memoryview, segments: list[Any], large: list[int]) -> None:
        copies = [memoryview(bytes(segments[i].source())) for i in large]
        again = self._codec.decode(_block.split(memoryview(bytearray(block)), copies))
        if not _equal(value, again):
            raise ValueError(f"the value does not survive its codec: {type(value).__name__} came back different")

    # -- gather --------------------------------------------------------------------------------------------------------

    def _gather(self, value: Any, *, everywhere: bool) -> Steps[list[Any] | None]:
        """One first frame from each rank to all; what did not fit in it follows, rank by rank."""
        size_frame = self.config.frame_bytes
        send = bytearray(size_frame)
        view = memoryview(send)
        segments: list[Any] = []
        large: list[int] = []
        block = memoryview(b"")
        cause_error: BaseException | None = None
        pending = self._pending
        try:
            if pending is None:
                segments = self._codec.encode(value)
                size, entries, large = _block.plan(segments, self.config)
                inline = size <= self.config.inline_bytes_max and not large
                block = view[HEADER_BYTES : HEADER_BYTES + size] if inline else memoryview(bytearray(size))
                _block.write(block, segments, entries)
                kind = Kind.INLINE if inline else Kind.FOLLOWS
                frame = Frame(self._sequence, Status.GOOD, kind, size, self.config.chunk_bytes, len(large), self.rank)
            else:
                self._pending = None
                length = pack_text(view[HEADER_BYTES:], pending[1], pending[2])
                frame = Frame(self._sequence, Status.FAILED_EARLIER, rank=pending[0], text_bytes=length)
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this frame whatever happened
            cause_error = error
            self._counts["failures"] += 1
            length = pack_text(view[HEADER_BYTES:], *_describe(error))
            frame = Frame(self._sequence, Status.FAILED, rank=self.rank, text_bytes=length)
        frame.pack_into(view)
        if large:
            _block.write_sizes(view[HEADER_BYTES:], [segments[i].nbytes for i in large])
        receive = bytearray(size_frame * self.size)
        yield self._comm.iallgather(send, receive)
        views = [memoryview(receive)[r * size_frame : (r + 1) * size_frame] for r in range(self.size)]
        frames = [Frame.unpack(v, self._sequence, r) for r, v in enumerate(views)]
        for r, f in enumerate(frames):
            if f.status is not Status.GOOD:
                cause, details = unpack_text(views[r][HEADER_BYTES : HEADER_BYTES + f.text_bytes])
                told = BroadcastError(f.rank, cause, details, earlier=f.status is Status.FAILED_EARLIER)
                raise told from (cause_error if r == self.rank else None)
        blocks: list[memoryview | None] = [None] * self.size
        followers: list[list[memoryview]] = [[] for _ in frames]
        failure: BaseException | None = None
        for r, f in enumerate(frames):
            if f.kind is Kind.INLINE:
                blocks[r] = views[r][HEADER_BYTES : HEADER_BYTES + f.block_bytes]
                continue
            mine = r == self.rank
            sizes = _block.read_sizes(views[r][HEADER_BYTES:], f.large_count)
            if everywhere:
                mover: Callable[[memoryview, int, int], Steps[None]] = self._chunks
            elif mine and self.rank != self._root:
                mover = self._push
            elif self.rank == self._root and not mine:
                mover = self._pull
            else:
                # The root's own, or another rank's on its way to the root.
                continue
            parts = [block, *(segments[i].source() for i in large)] if mine else [
                np.empty(n, np.uint8).data for n in (f.block_bytes, *sizes)
            ]  # fmt: skip
            for part in parts:
                yield from mover(part, f.chunk_bytes, r)
            blocks[r], followers[r] = parts[0], parts[1:]
        self._counts["bytes_sent"] += frame.block_bytes
        found: list[Any] | None = None
        if everywhere or self.rank == self._root:
            found = []
            try:
                for r, one in enumerate(blocks):
                    if r == self.rank:
                        found.append(value)
                    elif one is not None:
                        found.append(self._codec.decode(_block.split(one, followers[r])))
                        self._counts["bytes_received"] += one.nbytes + sum(b.nbytes for b in followers[r])
            except BaseException as error:  # noqa: BLE001 - the others must learn of it whatever it is
                failure = error
        if self._agree:
            yield from self._compare_results(failure)
        elif failure is not None:
            cause, details = _describe(failure)
            self._counts["failures"] += 1
            if self.rank == self._root:
                self._pending = (self.rank, cause, details)
            else:
                self._send_report(cause, details)
            raise BroadcastError(self.rank, cause, details) from failure
        return found

    def _chunks(self, buffer: memoryview, chunk_bytes: int, source: int) -> Steps[None]:
        for start in range(0, buffer.nbytes, chunk_bytes):
            yield self._comm.ibcast(buffer[start : start + chunk_bytes], source)

    def _push(self, buffer: memoryview, chunk_bytes: int, _source: int) -> Steps[None]:
        for start in range(0, buffer.nbytes, chunk_bytes):
            yield self._comm.isend(buffer[start : start + chunk_bytes], self._root)

    def _pull(self, buffer: memoryview, chunk_bytes: int, source: int) -> Steps[None]:
        for start in range(0, buffer.nbytes, chunk_bytes):
            yield self._comm.irecv(buffer[start : start + chunk_bytes], source)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _reused(self, size: int) -> np.ndarray[Any, Any]:
        """One of two buffers in turn, grown as needed: touching new pages costs more than filling them."""
        self._turn ^= 1
        if self._blocks[self._turn].nbytes < size:
            self._blocks[self._turn] = np.empty(max(size, 1 << 16), np.uint8)
        return self._blocks[self._turn]

    def _room(self, size: int) -> memoryview:
        """Memory for a received block: reused when the codec hands out views with a stated life, else of its own."""
        if self._codec.views:
            return self._reused(size).data[:size]
        return np.empty(size, np.uint8).data

    def _copy_to_reused(self, block: memoryview) -> memoryview:
        room = self._reused(block.nbytes).data[: block.nbytes]
        room[:] = block
        return room


class _Poll:
    """Not an operation: lets the caller poll again."""

    def test(self) -> bool:
        return self._flip()

    def __init__(self) -> None:
        self._state = False

    def _flip(self) -> bool:
        self._state = not self._state
        return not self._state


_POLL = _Poll()


def _describe(error: BaseException) -> tuple[str, str]:
    text = str(error)
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return cause, "".join(traceback.format_exception(error))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and first.dtype == second.dtype and np.array_equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(v, second[k]) for k, v in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)
