"""The exchanges: broadcast, gather, allgather, each as steps that wait for requests and never block.

The same steps serve the blocking calls, the handles and every adapter. What keeps ranks together:

- Every rank joins the first frame of every exchange, whatever happened to it: a rank that could not encode sends its error
  there, so nobody waits for bytes that will not come, and the next exchange starts level.
- Sizes, chunks and kinds come from the sender's frame, never from a rank's own settings.
- What a value could make fail is done before the first frame. A root that is interrupted while it copies a block of which
  pieces are under way sends the rest of it all the same, and its trailer says so.
- A rank that cannot decode or allocate has still taken part in every transfer of the exchange. With ``agree`` the results are
  compared at once. Otherwise it keeps its failure for the next frame that it contributes itself (gathers), and reports it to
  the root outside of any exchange, for the root's next frame; whichever comes first tells everybody, once.
- An exchange that its caller gave up is finished before the next one begins.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np

from comm_broadcast import _block
from comm_broadcast._codec import Codec, PickleCodec, Segment
from comm_broadcast._comm import Comm, Request
from comm_broadcast._config import HEADER_BYTES, BroadcastConfig
from comm_broadcast._errors import BroadcastError, LocalProtocolError
from comm_broadcast._frame import VERSION, Frame, Kind, Status, pack_text, unpack_text
from comm_broadcast._handle import Handle, Steps, Wait, after
from comm_broadcast._pool import BufferPool
from comm_broadcast._settings import compare
from comm_broadcast._window import SharedWindow, open_window

T = TypeVar("T")

_REPORT_BYTES = 512
_REPORT_HEADER_BYTES = 12
#: Pieces of a block under way at once (count): all of them, unless chunks are tiny.
_PIECES_MAX = 32
_DEFAULTS = BroadcastConfig()


@dataclass(frozen=True)
class BroadcastStatistics:
    """Counts since construction.

    Attributes:
        exchanges: Begun on this rank.
        inline, shared: Broadcasts of this rank whose payload fitted in the first frame, or went through the window.
        large_buffers: Buffers sent from where they lay.
        bytes_sent, bytes_received: Payload (bytes).
        failures: Exchanges that raised ``BroadcastError`` here.
        abandoned: Exchanges that the caller gave up and a later one finished.
        allocations: Blocks that were not found in the pool.
    """

    exchanges: int
    inline: int
    shared: int
    large_buffers: int
    bytes_sent: int
    bytes_received: int
    failures: int
    abandoned: int
    allocations: int


@dataclass(frozen=True)
class _Failure:
    """What went wrong on a rank, in which exchange."""

    rank: int
    sequence: int
    cause: str
    details: str

    @staticmethod
    def of(rank: int, sequence: int, error: BaseException) -> _Failure:
        text = str(error)
        cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return _Failure(rank, sequence, cause, "".join(traceback.format_exception(error)))

    def error(self, *, earlier: bool = False) -> BroadcastError:
        return BroadcastError(self.rank, self.cause, self.details, earlier=earlier)


class Broadcaster:
    """Moves objects between the ranks of a communicator; all of them succeed, or all of them raise.

    Construction is collective, and so is :meth:`close`: at start-up one small exchange compares root, settings and codec (two
    more set up the shared window, where one is asked for), after the adapter's own (``MpiComm`` duplicates its communicator).
    Nothing else is collective but the exchanges themselves. One exchange at a time; not for several threads.

    Args:
        comm: An adapter (``MpiComm``, ``TorchComm``, ``testing.FakeComm``) of which this object becomes the only user.
        root: The rank that broadcasts.
        config: See :class:`BroadcastConfig`.
        codec: How values become bytes; default: pickle.

    Raises:
        BroadcastConfigError: A rank's settings cannot be used, or ranks disagree: on every rank, naming what and who.
        TransportError: The communicator failed.
    """

    def __init__(
        self, comm: Comm, root: int = 0, *, config: BroadcastConfig | None = None, codec: Codec | None = None
    ) -> None:
        self.config = config or BroadcastConfig()
        self._comm = comm
        self._root = root
        self._codec: Codec = codec or PickleCodec()
        self._sequence = 0
        self._current: Handle[Any] | None = None
        self._closed = False
        self._broken: BaseException | None = None
        self._window: SharedWindow | None = None
        #: A failure of this rank that the others do not know of; the root's knowledge of others' failures; what was told.
        self._untold: _Failure | None = None
        self._reported: dict[int, _Failure] = {}
        self._told: dict[int, int] = {}
        self._report: tuple[Request, int] | None = None
        self.moving_bytes = 0
        self.spin_s = _DEFAULTS.spin_s
        self._counts = dict.fromkeys(
            (
                "exchanges", "inline", "shared", "large_buffers", "bytes_sent", "bytes_received", "failures", "abandoned",
            ),
            0,
        )  # fmt: skip
        Handle(self, self._agree_on_settings()).wait()
        self.spin_s = self.config.spin_s
        self._agree = self.config.agree or not comm.reports
        self._frame = bytearray(self.config.frame_bytes)
        self._pool = BufferPool(self.config.pool_bytes_max)
        if self.config.shared_slot_bytes and comm.size > 1:
            self._window = Handle(self, open_window(comm, self.config.shared_slot_bytes, root)).wait()

    # -- public --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Ranks (count)."""
        return self._comm.size

    @property
    def root(self) -> int:
        """The rank that broadcasts."""
        return self._root

    def start_broadcast(self, value: Any = None) -> Handle[Any]:
        """Begin a broadcast of the root's ``value`` (others' is ignored). The root's result is the very object it gave.

        The root must not change the value before its handle is done: large buffers are sent from where they are.

        Raises:
            LocalProtocolError: Another exchange has not ended, or the object is closed or broken. Nothing was sent.
        """
        return self._start(lambda sequence: self._broadcast(sequence, value))

    def broadcast(self, value: Any = None, *, wait: Wait | None = None) -> Any:
        """Broadcast and wait.

        Raises:
            BroadcastError: On every rank, when one failed. The next exchange works.
            RemoteProtocolError: The ranks' calls do not match.
            TransportError: The communicator failed.
        """
        return self.start_broadcast(value).wait(wait)

    def start_gather(self, value: Any) -> Handle[list[Any] | None]:
        """Begin to gather one value per rank at the root: a list in rank order there, None elsewhere."""
        return self._start(lambda sequence: self._gather(sequence, value, everywhere=False))

    def gather(self, value: Any, *, wait: Wait | None = None) -> list[Any] | None:
        """Gather and wait; errors as :meth:`broadcast`."""
        return self.start_gather(value).wait(wait)

    def start_allgather(self, value: Any) -> Handle[list[Any]]:
        """Begin to gather one value per rank everywhere; this rank's own is the very object it gave."""
        return self._start(lambda sequence: self._gather(sequence, value, everywhere=True))  # type: ignore[arg-type,return-value]

    def allgather(self, value: Any, *, wait: Wait | None = None) -> list[Any]:
        """Gather everywhere and wait; errors as :meth:`broadcast`."""
        return self.start_allgather(value).wait(wait)

    def statistics(self) -> BroadcastStatistics:
        """A frozen snapshot."""
        return BroadcastStatistics(**self._counts, allocations=self._pool.allocations)

    def close(self) -> None:
        """Release the communicator (collective). Values and views stay valid. A second call does nothing.

        An abandoned exchange is finished first. A broken object only forgets its communicator: the ranks are not level.

        Raises:
            LocalProtocolError: An exchange has not ended.
        """
        if self._closed:
            return
        if self._current is not None:
            if not self._current.abandoned:
                raise LocalProtocolError("close: an exchange has not ended")
            try:
                self._current.wait()
            except BroadcastError:
                # Raised everywhere by the exchange; its caller gave it up.
                pass
        self._closed = True
        self._window = None
        if self._broken is None:
            self._comm.free()

    # -- one exchange at a time ----------------------------------------------------------------------------------------

    def _start(self, begin: Callable[[int], Steps[T]]) -> Handle[T]:
        if self._closed:
            raise LocalProtocolError("the broadcaster is closed")
        if self._broken is not None:
            raise LocalProtocolError(f"the broadcaster is broken: {self._broken}") from self._broken
        before = self._current
        if before is not None and not before.abandoned:
            raise LocalProtocolError("an exchange has not ended: one at a time per broadcaster")
        self._sequence += 1
        self._counts["exchanges"] += 1
        steps = begin(self._sequence)
        if before is not None:
            self._counts["abandoned"] += 1
            steps = after(before, steps)
        handle = Handle(self, steps)
        self._current = handle
        handle.test()
        return handle

    def ended(self, handle: Handle[Any], error: BaseException | None) -> None:
        """A handle's exchange has ended. Only a ``BroadcastError`` leaves the ranks level."""
        if isinstance(error, BroadcastError):
            self._counts["failures"] += 1
        elif error is not None:
            self._broken = error
        if self._current is handle:
            self._current = None

    def _agree_on_settings(self) -> Steps[None]:
        c = self.config
        problem = c.problem() if isinstance(c, BroadcastConfig) else f"config must be a BroadcastConfig, got {c!r}"
        if problem is None and not (type(self._root) is int and 0 <= self._root < self.size):
            problem = f"root must be a rank of 0..{self.size - 1}, got {self._root!r}"
        settings: dict[str, object] = {"version": VERSION, "size": self.size}
        if problem is None:
            settings |= {
                "root": self._root, "frame_bytes": c.frame_bytes, "agree": c.agree,
                "shared_slot_bytes": c.shared_slot_bytes, "codec": self._codec.name,
            }  # fmt: skip
        yield from compare(self._comm, settings, problem)

    # -- what others must learn ----------------------------------------------------------------------------------------

    def _fail(self, failure: _Failure, error: BaseException) -> BroadcastError:
        """This rank could not take in what came: tell the others when there is an occasion, raise here."""
        self._untold = failure
        self._send_report()
        raised = failure.error()
        raised.__cause__ = error
        return raised

    def _send_report(self) -> None:
        """Tell the root, outside of any exchange; one report is under way at a time."""
        failure = self._untold
        if failure is None or self.rank == self._root or not self._comm.reports:
            return
        if self._report is not None and (self._report[1] == failure.sequence or not self._report[0].test()):
            return
        buffer = bytearray(_REPORT_BYTES)
        buffer[:4] = failure.rank.to_bytes(4, "little")
        buffer[4:_REPORT_HEADER_BYTES] = failure.sequence.to_bytes(8, "little")
        pack_text(memoryview(buffer)[_REPORT_HEADER_BYTES:], failure.cause, failure.details)
        self._report = (self._comm.report(buffer, self._root), failure.sequence)

    def _news(self) -> _Failure | None:
        """The failure of an earlier exchange that this rank's next frame has to tell."""
        self._send_report()
        if self.rank == self._root and self._comm.reports:
            while (report := self._comm.poll_report(_REPORT_BYTES)) is not None:
                rank = int.from_bytes(report[:4], "little")
                sequence = int.from_bytes(report[4:_REPORT_HEADER_BYTES], "little")
                if sequence > self._told.get(rank, 0):
                    text = memoryview(report[_REPORT_HEADER_BYTES:].rstrip(b"\0"))
                    self._reported[rank] = _Failure(rank, sequence, *unpack_text(text))
        if self._untold is not None:
            return self._untold
        return self._reported[min(self._reported)] if self._reported else None

    def _was_told(self, rank: int, sequence: int) -> None:
        """Everybody knows now; a report that is still on its way adds nothing."""
        self._told[rank] = max(sequence, self._told.get(rank, 0))
        if rank in self._reported and self._reported[rank].sequence <= sequence:
            del self._reported[rank]
        if self._untold is not None and rank == self.rank and self._untold.sequence <= sequence:
            self._untold = None

    def _failure_frame(self, view: memoryview, sequence: int, status: Status, failure: _Failure) -> Frame:
        length = pack_text(view[HEADER_BYTES:], failure.cause, failure.details)
        frame = Frame(sequence, status, rank=failure.rank, payload_bytes=length, about=failure.sequence)
        frame.pack_into(view)
        return frame

    def _raise_told(self, view: memoryview, frame: Frame) -> BroadcastError:
        cause, details = unpack_text(view[HEADER_BYTES : HEADER_BYTES + frame.payload_bytes])
        earlier = frame.status is Status.FAILED_EARLIER
        if earlier:
            self._was_told(frame.rank, frame.about)
        return BroadcastError(frame.rank, cause, details, earlier=earlier)

    # -- broadcast -----------------------------------------------------------------------------------------------------

    def _broadcast(self, sequence: int, value: Any) -> Steps[Any]:
        if self.rank != self._root:
            return (yield from self._receive(sequence))
        yield from self._send(sequence, value)
        return value

    def _send(self, sequence: int, value: Any) -> Steps[None]:
        """The root's part: everything that can fail is done before the first frame says that it has not."""
        view = memoryview(self._frame)
        news = self._news()
        if news is not None:
            frame = self._failure_frame(view, sequence, Status.FAILED_EARLIER, news)
            yield self._post_frame(view, self._root)
            raise self._raise_told(view, frame)
        slot: int | None = None
        head = 0
        try:
            segments = self._codec.encode(value)
            size, entries, large = _block.plan(segments, self.config)
            if size <= self.config.inline_bytes_max and not large:
                kind, block = Kind.INLINE, view[HEADER_BYTES : HEADER_BYTES + size]
            else:
                if self._window is not None and size <= self.config.shared_slot_bytes:
                    slot = self._window.free_slot()
                if slot is not None and self._window is not None:
                    kind, block = Kind.SHARED, self._window.write(slot, size, sequence).data
                else:
                    kind, block = Kind.STREAMED, self._pool.take(size + _block.TRAILER_BYTES).data
                    head = _block.head_bytes(segments, self.config.inline_bytes_max - 8 * len(large))
            _block.prepare(block, segments, entries)
            copying = _block.copy(block, segments, entries)
            early = kind is Kind.STREAMED and not self.config.check_round_trip
            ready = 0
            while ready < (head if early else size):
                ready = next(copying, size)
            if self.config.check_round_trip:
                self._check_round_trip(value, block[:size], segments, large)
        except BaseException as error:
            # The other ranks wait for this frame whatever happened.
            if slot is not None and self._window is not None:
                self._window.withdraw(slot)
            failure = _Failure.of(self.rank, sequence, error)
            self._failure_frame(view, sequence, Status.FAILED, failure)
            yield self._post_frame(view, self._root)
            raise failure.error() from error
        Frame(
            sequence, Status.GOOD, kind, size, self.config.chunk_bytes, len(large), self.rank, head, slot or 0
        ).pack_into(view)
        if large:
            _block.write_sizes(view[HEADER_BYTES:], [segments[i].nbytes for i in large])
        if head:
            start = HEADER_BYTES + 8 * len(large)
            view[start : start + head] = block[:head]
        if kind is Kind.STREAMED:
            yield from self._stream(sequence, self._post_frame(view, self._root), block, head, ready, copying)
        else:
            yield self._post_frame(view, self._root)
        for index in large:
            source = segments[index].source()
            yield from self._chunks(source, segments[index].nbytes, self.config.chunk_bytes, self._to_all(self._root))
        self._counts["inline"] += kind is Kind.INLINE
        self._counts["shared"] += kind is Kind.SHARED
        self._counts["large_buffers"] += len(large)
        self._counts["bytes_sent"] += size + sum(segments[i].nbytes for i in large)
        if self._agree:
            yield from self._compare_results(sequence, None)

    def _stream(
        self, sequence: int, frame: Request, block: memoryview, head: int, ready: int, copying: Iterator[int]
    ) -> Steps[None]:
        """Send a block's pieces after its frame, each as soon as it is copied: the others take it in meanwhile."""
        size = len(block) - _block.TRAILER_BYTES
        trailer = block[size:]
        posted: deque[Request] = deque([frame])
        interrupt: BaseException | None = None
        start = head
        for end in _block.piece_ends(head, size, self.config.chunk_bytes):
            try:
                while ready < end:
                    ready = next(copying, size)
            except BaseException as error:  # noqa: BLE001 - the transfers are announced and go on
                interrupt, ready = error, size
            if end == size:
                if interrupt is None:
                    Frame(sequence).pack_into(trailer)
                else:
                    self._failure_frame(trailer, sequence, Status.FAILED, _Failure.of(self.rank, sequence, interrupt))
                end = len(block)
            self.moving_bytes = end - start
            posted.append(self._comm.ibcast(block[start:end], self._root))
            start = end
            if posted[0].test():
                posted.popleft()
            elif len(posted) > _PIECES_MAX:
                yield posted.popleft()
        yield from posted
        self.moving_bytes = 0
        if interrupt is not None:
            raise _Failure.of(self.rank, sequence, interrupt).error() from interrupt

    def _receive(self, sequence: int) -> Steps[Any]:
        view = memoryview(self._frame)
        self._send_report()
        yield self._post_frame(view, self._root)
        frame = Frame.unpack(view, sequence, self._root)
        if frame.status is not Status.GOOD:
            raise self._raise_told(view, frame)
        value, failure, error = None, None, None
        try:
            value = yield from self._take_in(view, frame, sequence, self._to_all(self._root))
        except _NotTaken as refused:
            error = refused.error
            failure = _Failure.of(self.rank, sequence, error)
        if self._agree:
            yield from self._compare_results(sequence, failure, error)
        elif failure is not None and error is not None:
            raise self._fail(failure, error)
        return value

    def _take_in(
        self, view: memoryview, frame: Frame, sequence: int, move: Callable[[memoryview], Request]
    ) -> Steps[Any]:
        """A sender's block and large buffers, decoded. Takes part in every transfer, whatever fails.

        Raises:
            _NotTaken: This rank could not allocate or decode.
        """
        sizes = _block.read_sizes(view[HEADER_BYTES:], frame.large_count)
        error: BaseException | None = None
        block: memoryview | None = None
        value: Any = None
        decoded = False
        try:
            if frame.kind is Kind.INLINE:
                # The frame is overwritten by the next exchange.
                block = memoryview(bytearray(view[HEADER_BYTES : HEADER_BYTES + frame.block_bytes]))
            elif frame.kind is Kind.SHARED:
                block = self._read_shared(frame, sequence)
            elif frame.kind is Kind.STREAMED:
                whole = self._pool.take(frame.block_bytes + _block.TRAILER_BYTES).data
                block = whole[: frame.block_bytes]
                head = view[HEADER_BYTES + 8 * len(sizes) :][: frame.payload_bytes]
                block[: frame.payload_bytes] = head
                if frame.payload_bytes and not sizes and self._codec.head_only:
                    # While the first piece is on its way.
                    value, decoded = self._codec.decode(_block.split(block, [])), True
        except BaseException as raised:  # noqa: BLE001 - the transfers that follow are joined all the same
            error = raised
        if frame.kind is Kind.FOLLOWS:
            block, error = yield from self._fetch(frame.block_bytes, frame.chunk_bytes, move, error)
        elif frame.kind is Kind.STREAMED:
            yield from self._take_stream(None if block is None else whole, frame, sequence, move)
        large: list[memoryview] = []
        for size in sizes:
            buffer, error = yield from self._fetch(size, frame.chunk_bytes, move, error)
            if buffer is not None:
                large.append(buffer)
        self._counts["bytes_received"] += frame.block_bytes + sum(sizes)
        if error is None and block is not None:
            if decoded:
                return value
            try:
                return self._codec.decode(_block.split(block, large))
            except BaseException as raised:  # noqa: BLE001 - the others must learn of it whatever it is
                error = raised
        raise _NotTaken(error or MemoryError("no block"))

    def _take_stream(
        self, block: memoryview | None, frame: Frame, sequence: int, move: Callable[[memoryview], Request]
    ) -> Steps[None]:
        """Receive a streamed block's pieces, into a sink without a block, and look at its trailer.

        Raises:
            BroadcastError: The sender says that it did not write all of it: every rank raises this.
        """
        ends = _block.piece_ends(frame.payload_bytes, frame.block_bytes, frame.chunk_bytes)
        if not ends:
            return
        starts = [frame.payload_bytes, *ends[:-1]]
        ends[-1] += _block.TRAILER_BYTES
        longest = max(end - start for start, end in zip(starts, ends, strict=True))
        sink = None if block is not None else np.empty(longest, np.uint8).data
        for start, end in zip(starts, ends, strict=True):
            part = block[start:end] if block is not None else sink[: end - start]  # type: ignore[index]
            self.moving_bytes = end - start
            yield move(part)
        self.moving_bytes = 0
        trailer = part[-_block.TRAILER_BYTES :]
        last = Frame.unpack(trailer, sequence, self._root)
        if last.status is not Status.GOOD:
            raise self._raise_told(trailer, last)

    def _read_shared(self, frame: Frame, sequence: int) -> memoryview:
        if self._window is None:
            raise LocalProtocolError("the root used a shared window that this rank has not")
        array = self._window.read(frame.slot, frame.block_bytes, sequence)
        if self._codec.views:
            return array.data.toreadonly()
        # What is decoded may be written to by its owner: not in memory that other ranks read.
        copy = self._pool.take(frame.block_bytes)
        copy[:] = array
        return copy.data

    def _fetch(
        self, size: int, chunk_bytes: int, move: Callable[[memoryview], Request], error: BaseException | None
    ) -> Steps[tuple[memoryview | None, BaseException | None]]:
        buffer: memoryview | None = None
        if error is None:
            try:
                buffer = self._pool.take(size).data
            except BaseException as raised:  # noqa: BLE001 - the transfer is joined all the same
                error = raised
        yield from self._chunks(buffer, size, chunk_bytes, move)
        return buffer, error

    def _chunks(
        self, buffer: memoryview | None, size: int, chunk_bytes: int, move: Callable[[memoryview], Request]
    ) -> Steps[None]:
        """Move a buffer chunk by chunk; without a buffer one chunk's memory takes it all, so that the ranks stay in step."""
        sink = None if buffer is not None else np.empty(min(size, chunk_bytes), np.uint8).data
        for start in range(0, size, chunk_bytes):
            count = min(chunk_bytes, size - start)
            part = buffer[start : start + count] if buffer is not None else sink[:count]  # type: ignore[index]
            self.moving_bytes = count
            yield move(part)
        self.moving_bytes = 0

    def _post_frame(self, view: memoryview, source: int) -> Request:
        self.moving_bytes = 0
        return self._comm.ibcast(view, source)

    def _to_all(self, source: int) -> Callable[[memoryview], Request]:
        return lambda part: self._comm.ibcast(part, source)

    def _compare_results(
        self, sequence: int, failure: _Failure | None, error: BaseException | None = None
    ) -> Steps[None]:
        """Everybody's result, everywhere: the lowest rank that failed is raised by all."""
        send = bytearray(_REPORT_BYTES)
        if failure is not None:
            send[0] = 1
            pack_text(memoryview(send)[1:], failure.cause, failure.details)
        receive = bytearray(_REPORT_BYTES * self.size)
        yield self._comm.iallgather(send, receive)
        for rank in range(self.size):
            part = memoryview(receive)[rank * _REPORT_BYTES : (rank + 1) * _REPORT_BYTES]
            if part[0]:
                cause, details = unpack_text(memoryview(bytes(part[1:]).rstrip(b"\0")))
                raise BroadcastError(rank, cause, details) from (error if rank == self.rank else None)

    def _check_round_trip(self, value: Any, block: memoryview, segments: list[Segment], large: list[int]) -> None:
        copies = [memoryview(bytearray(segments[i].source() or b"")) for i in large]
        again = self._codec.decode(_block.split(memoryview(bytearray(block)), copies))
        if not _equal(value, again):
            raise ValueError(f"the value does not survive its codec: {type(value).__name__} came back different")

    # -- gather --------------------------------------------------------------------------------------------------------

    def _gather(self, sequence: int, value: Any, *, everywhere: bool) -> Steps[list[Any] | None]:
        """One first frame from each rank to all; what did not fit in it follows, rank by rank."""
        size_frame = self.config.frame_bytes
        send = bytearray(size_frame)
        view = memoryview(send)
        segments: list[Segment] = []
        large: list[int] = []
        block = memoryview(b"")
        own_error: BaseException | None = None
        news = self._news()
        if news is not None:
            self._failure_frame(view, sequence, Status.FAILED_EARLIER, news)
        else:
            try:
                segments = self._codec.encode(value)
                size, entries, large = _block.plan(segments, self.config)
                inline = size <= self.config.inline_bytes_max and not large
                block = view[HEADER_BYTES : HEADER_BYTES + size] if inline else self._pool.take(size).data
                _block.write(block, segments, entries)
                if self.config.check_round_trip:
                    self._check_round_trip(value, block, segments, large)
                kind = Kind.INLINE if inline else Kind.FOLLOWS
                Frame(sequence, Status.GOOD, kind, size, self.config.chunk_bytes, len(large), self.rank).pack_into(view)
                if large:
                    _block.write_sizes(view[HEADER_BYTES:], [segments[i].nbytes for i in large])
            except BaseException as error:  # noqa: BLE001 - the other ranks wait for this frame whatever happened
                own_error = error
                self._failure_frame(view, sequence, Status.FAILED, _Failure.of(self.rank, sequence, error))
        receive = bytearray(size_frame * self.size)
        self.moving_bytes = 0
        yield self._comm.iallgather(send, receive)
        views = [memoryview(receive)[r * size_frame : (r + 1) * size_frame] for r in range(self.size)]
        frames = [Frame.unpack(v, sequence, r) for r, v in enumerate(views)]
        told = {r: self._raise_told(views[r], f) for r, f in enumerate(frames) if f.status is not Status.GOOD}
        if told:
            first = min(told)
            raise told[first] from (own_error if first == self.rank else None)
        found: list[Any] = []
        failure: BaseException | None = None
        for r, frame in enumerate(frames):
            mine = r == self.rank
            if not everywhere and self.rank != self._root and not mine:
                # Between that rank and the root.
                continue
            if mine:
                move = None if not everywhere and mine and self.rank == self._root else self._away(everywhere)
                if move is not None and frame.kind is Kind.FOLLOWS:
                    yield from self._chunks(block, frame.block_bytes, frame.chunk_bytes, move)
                    for i in large:
                        yield from self._chunks(segments[i].source(), segments[i].nbytes, frame.chunk_bytes, move)
                found.append(value)
                continue
            try:
                found.append((yield from self._take_in(views[r], frame, sequence, self._from(r, everywhere))))
            except _NotTaken as refused:
                failure = failure or refused.error
        self._counts["bytes_sent"] += frames[self.rank].block_bytes + sum(segments[i].nbytes for i in large)
        mishap = None if failure is None else _Failure.of(self.rank, sequence, failure)
        if self._agree:
            yield from self._compare_results(sequence, mishap, failure)
        elif mishap is not None and failure is not None:
            raise self._fail(mishap, failure)
        return found if everywhere or self.rank == self._root else None

    def _away(self, everywhere: bool) -> Callable[[memoryview], Request]:
        if everywhere:
            return self._to_all(self.rank)
        return lambda part: self._comm.isend(part, self._root)

    def _from(self, source: int, everywhere: bool) -> Callable[[memoryview], Request]:
        if everywhere:
            return self._to_all(source)
        return lambda part: self._comm.irecv(part, source)


class _NotTaken(Exception):
    """This rank could not take in what came; the exchange itself went on."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        # A token list comes back as a vector.
        same = (
            not isinstance(first, np.ndarray)
            or not isinstance(second, np.ndarray)
            or first.dtype.kind == second.dtype.kind
        )
        return first is not None and second is not None and same and np.array_equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_equal(v, second[k]) for k, v in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, msgspec.Struct):
        return all(_equal(getattr(first, n), getattr(second, n)) for n in first.__struct_fields__)
    return bool(first == second)
