"""One exchange on one rank, as a script that can be begun again.

An exception can come between any two bytecodes. A script that it ends is begun again at the next call, from its first line, and
comes by the same way to where it was, because

- an operation that was started is listed by the adapter (:class:`Comm`) and not started a second time;
- whatever foreign code did (a codec, an allocation) is noted in this object by one assignment, its failure as well as its
  result, before anything depends on it, and is not done a second time;
- everything else is computed from these two and changes nothing else, or the same thing in the same way;
- the script's end is one value, :class:`Ended`, with all that the next exchange needs to know of this one.

What keeps ranks together: every rank contributes a first frame to every exchange, whatever happened to it, in one and the same
operation for all calls. All ranks see the same frames and come to the same verdict. A rank that cannot allocate or decode takes
part in every transfer all the same, and says so in the results (``agree``) or in its next frame.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from comm_broadcast import _block
from comm_broadcast._codec import BufferSegment, Segment
from comm_broadcast._comm import Buffer, Comm, Run
from comm_broadcast._config import HEADER_BYTES, BroadcastConfig
from comm_broadcast._errors import (
    BroadcastError,
    CallMismatchError,
    ClosedError,
    CommBroadcastError,
    LocalProtocolError,
    RankFailure,
    RemoteProtocolError,
    TransportError,
)
from comm_broadcast._failure import Failure
from comm_broadcast._frame import (
    Call,
    Frame,
    Kind,
    Operation,
    Status,
    failure_in,
    pack_failure,
    pack_text,
    unpack_text,
    verdict,
)
from comm_broadcast._pool import BufferPool, ByteArray, Sink
from comm_broadcast._settings import ChosenCodec
from comm_broadcast._window import SharedWindow

#: What a rank contributes to the comparison of results (bytes).
RESULT_BYTES = 512
#: Pieces of a block under way at once (count): all of them, unless chunks are tiny.
_PIECES_MAX = 32

Steps = Generator[None, None, Any]
#: An adapter's operation on one buffer, and its other rank.
Move = tuple[Callable[[Buffer, int], None], int]


class Totals(NamedTuple):
    """Counts over all exchanges that have ended."""

    inline: int = 0
    shared: int = 0
    large_buffers: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    failures: int = 0
    abandoned: int = 0


class Kept(NamedTuple):
    """An operation that an exchange left under way.

    Attributes:
        sequence: The exchange's number.
        status: What it gathers from all ranks, if it gathers.
    """

    sequence: int
    status: bytearray | None = None


class Ended(NamedTuple):
    """An exchange's end on this rank: its result, and what the next one begins with.

    Attributes:
        sequence: Its number: exchanges ended so far (count).
        value, error: Its result.
        untold: A failure of this rank that the others do not know of.
        broken: Why the object cannot be used any more.
        closed: Who closed it.
        totals: Counts up to here.
        kept: What is under way still, in order: the last operations of the adapter's list.
        reports: Root: what all ranks have to be told.
        told: What closing was told, in order, for when it is done.
    """

    sequence: int = 0
    value: Any = None
    error: BaseException | None = None
    untold: Failure | None = None
    broken: CommBroadcastError | None = None
    closed: ClosedError | None = None
    totals: Totals = Totals()
    kept: tuple[Kept, ...] = ()
    reports: tuple[CommBroadcastError, ...] = ()
    told: tuple[BroadcastError | CallMismatchError, ...] = ()


#: What is left of a script that an exception has ended.
_DEAD = Ended()


class Owner(Protocol):
    """What an exchange uses of its broadcaster."""

    comm: Comm
    config: BroadcastConfig
    pool: BufferPool
    sink: Sink
    window: SharedWindow | None
    #: How the exchange before this one ended.
    last: Ended


@dataclass
class Outgoing:
    """This rank's first frame, complete, and what follows it."""

    frame: bytearray
    kind: Kind = Kind.NONE
    size: int = 0
    block: memoryview = field(default_factory=lambda: memoryview(b""))
    segments: list[Segment] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    #: Segments that travel from where they are, by index.
    large: dict[int, memoryview] = field(default_factory=dict)
    head: int = 0
    slot: int | None = None
    failure: Failure | None = None

    @property
    def bytes(self) -> int:
        """All that this rank sends beside its frame's header."""
        return self.size + sum(buffer.nbytes for buffer in self.large.values())


@dataclass
class Incoming:
    """What a rank's block and buffers are received into, and what became of them."""

    failure: Failure | None = None
    #: The block's memory, with its trailer where it is streamed; of the window where it is shared.
    memory: ByteArray | None = None
    block: memoryview | None = None
    large: dict[int, memoryview] = field(default_factory=dict)
    sink: memoryview | None = None
    result: tuple[Any] | None = None


class Exchange:
    """See the module.

    Args:
        owner: The broadcaster.
        call: What all ranks must have called.
        value: What this rank gives.
        chosen: How values become bytes.
    """

    def __init__(self, owner: Owner, call: Call, value: Any, chosen: ChosenCodec) -> None:
        self._owner = owner
        self.call = call
        self._value = value
        self._codec, self._views, self._head_only = chosen.codec, chosen.views, chosen.head_only
        #: Set once, by one assignment.
        self.ended: Ended | None = None
        #: Nobody wants its value: it only takes part.
        self.given_up = False
        #: It was given up when its value came: there is none.
        self.skipped = False
        #: Who holds it: a handle, or a blocking call while it runs.
        self.handle: weakref.ref[Any] | None = None
        self.blocking: Generator[Any, None, None] | None = None
        #: Bytes of the transfer at hand, and operations completed, for whoever waits.
        self.moving_bytes = 0
        self.completed = 0
        self._steps: Generator[Ended | None, None, None] | None = None
        self._out: Outgoing | None = None
        self._received: bytearray | None = None
        self._copying: Iterator[int] | None = None
        self._ready = 0
        self._copy_failure: Failure | None = None
        self._in: dict[int, Incoming] = {}
        self._results: tuple[bytearray, bytearray] | None = None
        self._raised = False

    # -- driven by the broadcaster -------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for its result."""
        if self.ended is not None or self.given_up:
            return False
        if self.handle is not None:
            return self.handle() is not None
        return is_running(self.blocking)

    @property
    def is_running(self) -> bool:
        """Whether a step of it is being made, further up on somebody's stack."""
        return is_running(self._steps)

    def step(self) -> bool:
        """Make progress; False: something has to be waited for. An exception leaves the exchange where it was."""
        if self._steps is None:
            self._steps = self._script()
        elif is_running(self._steps):
            raise LocalProtocolError("called from within the exchange itself")
        item = next(self._steps, _DEAD)
        if item is _DEAD:
            # An exception ended it: from the beginning, over what has been done.
            self._steps = self._script()
            return True
        self.ended = item
        return item is not None

    def release(self) -> None:
        """Forget all memory but the result; it has ended."""
        self._value = self._out = self._received = self._copying = self._results = self._steps = self.blocking = None
        self._in = {}

    # -- the script ----------------------------------------------------------------------------------------------------

    def _script(self) -> Generator[Ended | None, None, None]:
        """None for each wait, then the end: an item, since a ``StopIteration`` may be anybody's."""
        before = self._owner.last
        if before.closed is not None or before.broken is not None:
            ended = self._too_late(before)
        else:
            try:
                ended = yield from self._exchange(Run(self._owner.comm, len(before.kept)), before)
            except (TransportError, RemoteProtocolError) as error:
                ended = self._end(before, error=error, broken=error)
        yield ended

    def _too_late(self, before: Ended) -> Ended:
        """The exchange before this one ended the object."""
        if before.closed is None:
            error = LocalProtocolError(f"the broadcaster is broken: {before.broken}")
        elif self.call.operation is Operation.CLOSE:
            return before._replace(value=None, error=None)
        else:
            error = LocalProtocolError(f"the broadcaster is closed: {before.closed}")
        return before._replace(value=None, error=error)

    def _end(
        self,
        before: Ended,
        *,
        value: Any = None,
        error: BaseException | None = None,
        untold: Failure | None = None,
        broken: CommBroadcastError | None = None,
        closed: ClosedError | None = None,
        moved: bool = False,
        kept: tuple[Kept, ...] = (),
        reports: tuple[CommBroadcastError, ...] = (),
    ) -> Ended:
        """The one value that the script comes to; ``moved``: the payload was transferred."""
        inline, shared, large, sent, received, failures, abandoned = before.totals
        out = self._out
        if moved:
            received += self._bytes_received
            if out is not None and out.kind is not Kind.NONE:
                sent += out.bytes
                if self.call.operation is Operation.BROADCAST:
                    inline += out.kind is Kind.INLINE
                    shared += out.kind is Kind.SHARED
                    large += len(out.large)
        totals = Totals(
            inline,
            shared,
            large,
            sent,
            received,
            failures + isinstance(error, BroadcastError),
            abandoned + self.given_up,
        )
        told = before.told
        if self.call.operation is Operation.CLOSE:
            if isinstance(error, (BroadcastError, CallMismatchError)):
                told = (*told, error)
            if closed is not None and closed.failures:
                told = (*told, BroadcastError.of(closed.failures))
        return Ended(before.sequence + 1, value, error, untold, broken, closed, totals, kept, reports, told)

    def _exchange(self, run: Run, before: Ended) -> Steps:
        """Frames of all ranks, their verdict, and the payload."""
        comm, sequence = run.comm, before.sequence + 1
        out = self._out
        if out is None:
            out = self._out = self._outgoing(sequence, before.untold)
        received = self._received
        if received is None:
            received = self._received = bytearray(len(out.frame) * comm.size)
        self.moving_bytes = 0
        first = run.start(comm.iallgather, out.frame, received)
        self._interrupt(out.failure)
        ends: list[int] = []
        if out.kind is Kind.STREAMED:
            ends = _block.piece_ends(out.head, out.size, self._owner.config.chunk_bytes)
            if ends:
                self._copy_until(out, ends[0])
        yield from self._wait(run, first)
        size = len(out.frame)
        whole = memoryview(received)
        views = [whole[r * size : (r + 1) * size] for r in range(comm.size)]
        frames = self._frames(views, sequence)
        error = verdict(frames, views)
        if error is not None:
            return self._stopped(error, before, out)
        if self.call.operation is Operation.BROADCAST:
            return (yield from self._broadcast(run, before, out, frames, views, ends))
        return (yield from self._gather(run, before, out, frames, views))

    def _frames(self, views: list[memoryview], sequence: int) -> list[Frame]:
        """All ranks' frames. The others' in a broadcast are one and the same, unless something is wrong: it is decoded once."""
        if self.call.operation is not Operation.BROADCAST:
            return [Frame.unpack(view, sequence, r) for r, view in enumerate(views)]
        root = self.call.root
        nothing = Frame(sequence, Status.GOOD, Kind.NONE, rank=root, call=self.call)
        header = nothing.header()
        return [
            nothing if view[:HEADER_BYTES] == header else Frame.unpack(view, sequence, r)
            for r, view in enumerate(views)
        ]

    def _stopped(self, error: CommBroadcastError, before: Ended, out: Outgoing) -> Ended:
        """The verdict ends the exchange for everybody; nothing moves."""
        if out.slot is not None and self._owner.window is not None:
            self._owner.window.withdraw(out.slot, before.sequence + 1)
        if isinstance(error, ClosedError):
            own = self.call.operation is Operation.CLOSE
            return self._end(before, error=None if own else error, closed=error)
        if isinstance(error, CallMismatchError):
            return self._end(before, error=error, untold=before.untold)
        return self._end(before, error=self._own(error, out.failure))

    def _own(self, error: CommBroadcastError, failure: Failure | None) -> BaseException:
        """What this rank raises of an error that all ranks raise: its own failure's exception is the cause, or stays itself."""
        if failure is None:
            return error
        if failure.is_interrupt:
            return failure.error
        error.__cause__ = failure.error
        return error

    def _interrupt(self, failure: Failure | None) -> None:
        """Raise an interrupt in the call that it hit, once the others are being told."""
        if failure is not None and failure.is_interrupt and not self._raised:
            self._raised = True
            raise failure.error

    def _wait(self, run: Run, index: int) -> Steps:
        test = run.comm.test
        while not test(index):
            yield
        self.completed = max(self.completed, index + 1)

    # -- what this rank gives ------------------------------------------------------------------------------------------

    def _outgoing(self, sequence: int, untold: Failure | None) -> Outgoing:
        """This rank's frame: everything that a value could make fail is done here, before anybody is told of it."""
        owner, comm = self._owner, self._owner.comm
        out = Outgoing(bytearray(owner.config.frame_bytes))
        view = memoryview(out.frame)
        if untold is not None:
            told = Frame(sequence, Status.FAILED_EARLIER, Kind.NONE, rank=comm.rank, call=self.call)
            pack_failure(view, told, untold.cause, untold.details)
            return out
        operation, root = self.call.operation, self.call.root
        if operation is Operation.CLOSE or (operation is Operation.BROADCAST and comm.rank != root):
            rank = comm.rank if operation is Operation.CLOSE else root
            Frame(sequence, Status.GOOD, Kind.NONE, rank=rank, call=self.call).pack_into(view)
            return out
        try:
            self._fill(out, view, sequence)
        except BaseException as error:  # noqa: BLE001 - the other ranks wait for this frame whatever happened
            failure = Failure.of(error)
            failed = Outgoing(bytearray(owner.config.frame_bytes), failure=failure)
            if owner.window is not None:
                owner.window.withdraw_all(sequence)
            told = Frame(sequence, Status.FAILED, Kind.NONE, rank=comm.rank, call=self.call)
            pack_failure(memoryview(failed.frame), told, failure.cause, failure.details)
            return failed
        return out

    def _fill(self, out: Outgoing, view: memoryview, sequence: int) -> None:
        """Encode the value, into the frame if it fits, and write the frame."""
        owner = self._owner
        config, broadcast = owner.config, self.call.operation is Operation.BROADCAST
        segments = out.segments = self._codec.encode(self._value)
        only = segments[0] if len(segments) == 1 else None
        if type(only) is BufferSegment and not config.check_round_trip:
            # A small value's usual way, and nothing but copies.
            source = only.source()
            out.size = _block.single_bytes(source)
            if out.size <= config.inline_bytes_max:
                out.kind = Kind.INLINE
                _block.write_single(view[HEADER_BYTES : HEADER_BYTES + out.size], source)
                Frame(sequence, block_bytes=out.size, rank=owner.comm.rank, call=self.call).pack_into(view)
                return
        size, out.entries, out.large = _block.plan(out.segments, config)
        out.size = size
        if size <= config.inline_bytes_max and not out.large:
            out.kind, block = Kind.INLINE, view[HEADER_BYTES : HEADER_BYTES + size]
        elif not broadcast:
            out.kind, block = Kind.FOLLOWS, owner.pool.take(size).data
        else:
            if owner.window is not None and size <= config.shared_slot_bytes:
                out.slot = owner.window.free_slot(sequence)
            if out.slot is not None and owner.window is not None:
                out.kind, block = Kind.SHARED, owner.window.write(out.slot, size, sequence).data
            else:
                out.kind, block = Kind.STREAMED, owner.pool.take(size + _block.TRAILER_BYTES).data
                out.head = _block.head_bytes(out.entries, config.inline_bytes_max - 8 * len(out.large))
        out.block = block
        _block.prepare(block, out.segments, out.entries)
        copying = _block.copy(block, out.segments, out.entries)
        early = out.kind is Kind.STREAMED and not config.check_round_trip
        ready = 0
        while ready < (out.head if early else size):
            ready = next(copying, size)
        if config.check_round_trip:
            self._check_round_trip(block[:size], out.large)
        self._copying, self._ready = copying, ready
        Frame(
            sequence, Status.GOOD, out.kind, size, config.chunk_bytes, len(out.large), owner.comm.rank, out.head,
            out.slot or 0, self.call,
        ).pack_into(view)  # fmt: skip
        if out.large:
            _block.write_sizes(view[HEADER_BYTES:], [buffer.nbytes for buffer in out.large.values()])
        if out.head:
            start = HEADER_BYTES + 8 * len(out.large)
            view[start : start + out.head] = block[: out.head]

    def _check_round_trip(self, block: memoryview, large: dict[int, memoryview]) -> None:
        copies = [memoryview(bytearray(buffer)) for buffer in large.values()]
        again = self._codec.decode(_block.split(memoryview(bytearray(block)), copies))
        if not _equal(self._value, again):
            raise ValueError(f"the value does not survive its codec: {type(self._value).__name__} came back different")

    def _copy_until(self, out: Outgoing, end: int) -> None:
        """Copy more of a streamed block, whose frame is under way: what fails now is told in the trailer."""
        while self._ready < end and self._copy_failure is None:
            try:
                # A copy that an exception ends is begun anew: one that is dead would look as if it were complete.
                copying, self._copying = self._copying or _block.copy(out.block, out.segments, out.entries), None
                ready = next(copying, out.size)
                self._copying, self._ready = copying, ready
            except BaseException as error:  # noqa: BLE001 - the transfers are announced and go on
                self._copy_failure = Failure.of(error)

    # -- broadcast -----------------------------------------------------------------------------------------------------

    def _broadcast(
        self,
        run: Run,
        before: Ended,
        out: Outgoing,
        frames: list[Frame],
        views: list[memoryview],
        ends: list[int],
    ) -> Steps:
        root, comm = self.call.root, run.comm
        move: Move = (comm.ibcast, root)
        if comm.rank != root:
            part = self._in.setdefault(root, Incoming())
            told = yield from self._take(run, part, views[root], frames[root], move)
            if told is not None:
                return self._end(before, error=told, moved=True)
            value = None if part.result is None else part.result[0]
            if part.failure is None and not self._owner.config.agree:
                return self._end(before, value=value, moved=True)
            return (yield from self._finish(run, before, value, part.failure))
        if out.kind is Kind.STREAMED:
            for index in (yield from self._stream(run, before, out, ends)):
                yield from self._wait(run, index)
            self.moving_bytes = 0
            if self._copy_failure is not None:
                failure = self._copy_failure
                return self._end(before, error=failure.raised(comm.rank), moved=True)
        if out.large:
            yield from self._give_large(run, out, move)
        if not self._owner.config.agree:
            return self._end(before, value=self._value, moved=True)
        return (yield from self._finish(run, before, self._value, None))

    def _stream(self, run: Run, before: Ended, out: Outgoing, ends: list[int]) -> Generator[None, None, deque[int]]:
        """Send a block's pieces, each as soon as it is copied: the others take it in meanwhile. Those still under way."""
        comm = run.comm
        under_way: deque[int] = deque()
        start = out.head
        for end in ends:
            stop = len(out.block) if end == out.size else end
            if not run.is_ahead:
                self._copy_until(out, end)
                if end == out.size:
                    self._write_trailer(before.sequence + 1, out)
            self.moving_bytes = stop - start
            under_way.append(run.start(comm.ibcast, out.block[start:stop], self.call.root))
            start = end
            if comm.test(under_way[0]):
                under_way.popleft()
            elif len(under_way) > _PIECES_MAX:
                yield from self._wait(run, under_way.popleft())
        self._interrupt(self._copy_failure)
        return under_way

    def _write_trailer(self, sequence: int, out: Outgoing) -> None:
        trailer, failure = out.block[out.size :], self._copy_failure
        mine = Frame(sequence, kind=Kind.NONE, rank=self._owner.comm.rank, call=self.call)
        if failure is None:
            mine.pack_into(trailer)
        else:
            pack_failure(trailer, mine._replace(status=Status.FAILED), failure.cause, failure.details)

    def _give_large(self, run: Run, out: Outgoing, move: Move) -> Steps:
        for buffer in out.large.values():
            yield from self._chunks(run, buffer, None, buffer.nbytes, self._owner.config.chunk_bytes, move)

    def _chunks(
        self, run: Run, buffer: memoryview | None, sink: memoryview | None, size: int, chunk_bytes: int, move: Move
    ) -> Steps:
        """Move a buffer chunk by chunk; without one the sink's memory takes it all, so that the ranks stay in step."""
        for start in range(0, size, chunk_bytes):
            count = min(chunk_bytes, size - start)
            part = buffer[start : start + count] if buffer is not None else sink[:count]  # type: ignore[index]
            self.moving_bytes = count
            yield from self._wait(run, run.start(move[0], part, move[1]))
        self.moving_bytes = 0

    # -- what others give ----------------------------------------------------------------------------------------------

    def _take(
        self, run: Run, part: Incoming, view: memoryview, frame: Frame, move: Move
    ) -> Generator[None, None, BroadcastError | None]:
        """A sender's block and large buffers, decoded. Takes part in every transfer, whatever fails.

        Returns:
            What the trailer of a streamed block says that failed: every rank raises this, and nothing follows.
        """
        sizes = _block.read_sizes(view[HEADER_BYTES:], frame.large_count) if frame.large_count else ()
        if frame.kind is Kind.INLINE:
            if part.block is None:
                # The frames of all ranks lie in one buffer, which a view would keep.
                part.block = memoryview(bytearray(view[HEADER_BYTES : HEADER_BYTES + frame.block_bytes]))
        elif frame.kind is Kind.SHARED:
            self._look(part, frame)
        elif frame.kind is Kind.STREAMED:
            told = yield from self._take_stream(run, part, view, frame, len(sizes), move)
            if told is not None:
                return told
        else:
            if self._allocate(part, frame.block_bytes):
                part.block = part.memory.data  # type: ignore[union-attr]
            yield from self._fetch(run, part, part.block, frame.block_bytes, frame.chunk_bytes, move)
        for index, size in enumerate(sizes):
            if index not in part.large and part.failure is None:
                try:
                    part.large[index] = self._owner.pool.take(size).data
                except Exception as error:  # noqa: BLE001 - the transfer is joined all the same
                    part.failure = Failure.of(error)
            yield from self._fetch(run, part, part.large.get(index), size, frame.chunk_bytes, move)
        if part.block is not None:
            self._decode(part, part.block, [part.large[i] for i in sorted(part.large)])
        return None

    def _allocate(self, part: Incoming, size: int) -> bool:
        if part.memory is None and part.failure is None:
            try:
                part.memory = self._owner.pool.take(size)
            except Exception as error:  # noqa: BLE001 - the transfers that follow are joined all the same
                part.failure = Failure.of(error)
        return part.memory is not None

    def _fetch(
        self, run: Run, part: Incoming, buffer: memoryview | None, size: int, chunk_bytes: int, move: Move
    ) -> Steps:
        if buffer is None and (part.sink is None or len(part.sink) < min(size, chunk_bytes)):
            part.sink = self._owner.sink.take(min(size, chunk_bytes))
        yield from self._chunks(run, buffer, part.sink, size, chunk_bytes, move)

    def _take_stream(
        self, run: Run, part: Incoming, view: memoryview, frame: Frame, large: int, move: Move
    ) -> Generator[None, None, BroadcastError | None]:
        """Receive a streamed block's pieces, into a sink without a block, and look at its trailer."""
        head = frame.payload_bytes
        if self._allocate(part, frame.block_bytes + _block.TRAILER_BYTES) and part.block is None:
            block = part.memory.data[: frame.block_bytes]  # type: ignore[union-attr]
            block[:head] = view[HEADER_BYTES + 8 * large :][:head]
            part.block = block
        ends = _block.piece_ends(head, frame.block_bytes, frame.chunk_bytes)
        if not ends:
            return None
        starts = [head, *ends[:-1]]
        ends[-1] += _block.TRAILER_BYTES
        whole = None if part.memory is None else part.memory.data
        if whole is None and part.sink is None:
            part.sink = self._owner.sink.take(max(end - start for start, end in zip(starts, ends, strict=True)))
        piece = memoryview(b"")
        for start, end in zip(starts, ends, strict=True):
            piece = whole[start:end] if whole is not None else part.sink[: end - start]  # type: ignore[index]
            self.moving_bytes = end - start
            index = run.start(move[0], piece, move[1])
            if start == head and head and not large and self._head_only and part.block is not None:
                # While the first piece is on its way.
                self._decode(part, part.block, [])
            yield from self._wait(run, index)
        self.moving_bytes = 0
        trailer = piece[-_block.TRAILER_BYTES :]
        last = Frame.unpack(trailer, frame.sequence, frame.rank)
        return None if last.status is Status.GOOD else BroadcastError.of((failure_in(trailer, last),))

    def _look(self, part: Incoming, frame: Frame) -> None:
        """A block in the window: it must be looked at, and let go, in any case."""
        window = self._owner.window
        if window is None:
            raise RemoteProtocolError("the root used a shared window that this rank does not have")
        if part.block is not None:
            return
        if part.memory is None:
            part.memory = window.slot(frame.slot, frame.block_bytes)
        window.watch(frame.slot, part.memory, frame.sequence)
        if part.failure is not None:
            part.memory = None
            return
        if self._views:
            part.block = part.memory.data.toreadonly()
            return
        # What is decoded may be written to by its owner: not in memory that other ranks read.
        try:
            copy = self._owner.pool.take(frame.block_bytes)
            copy[:] = part.memory
        except Exception as error:  # noqa: BLE001 - told, like any memory that is not there
            part.failure = Failure.of(error)
            return
        part.block = copy.data
        part.memory = None

    def _decode(self, part: Incoming, block: memoryview, large: list[memoryview]) -> None:
        """Make the value, unless nobody wants it or something failed before."""
        if part.result is not None or part.failure is not None:
            return
        if self.given_up:
            self.skipped = True
            return
        try:
            value = self._codec.decode(_block.split(block, large))
        except BaseException as error:  # noqa: BLE001 - the others must learn of it whatever it is
            part.failure = Failure.of(error)
        else:
            part.result = (value,)

    # -- gather --------------------------------------------------------------------------------------------------------

    def _gather(self, run: Run, before: Ended, out: Outgoing, frames: list[Frame], views: list[memoryview]) -> Steps:
        """What did not fit in the frames, rank by rank: to all, or between that rank and the root."""
        comm, root = run.comm, self.call.root
        everywhere = self.call.operation is Operation.ALLGATHER
        at_root = comm.rank == root
        values: list[Any] = []
        failure: Failure | None = None
        for r, frame in enumerate(frames):
            if r == comm.rank:
                if everywhere or not at_root:
                    move: Move = (comm.ibcast, r) if everywhere else (comm.isend, root)
                    if out.kind is Kind.FOLLOWS:
                        config = self._owner.config
                        yield from self._chunks(run, out.block, None, out.size, config.chunk_bytes, move)
                    yield from self._give_large(run, out, move)
                values.append(self._value)
            elif everywhere or at_root:
                part = self._in.setdefault(r, Incoming())
                move = (comm.ibcast, r) if everywhere else (comm.irecv, r)
                yield from self._take(run, part, views[r], frame, move)
                failure = failure or part.failure
                values.append(None if part.result is None else part.result[0])
        wanted = everywhere or at_root
        return (yield from self._finish(run, before, values if wanted else None, failure))

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, run: Run, before: Ended, value: Any, failure: Failure | None) -> Steps:
        """The payload has moved: compare results, or keep this rank's failure for its next frame."""
        comm = run.comm
        if not self._owner.config.agree:
            if failure is None:
                return self._end(before, value=value, moved=True)
            return self._end(before, error=failure.raised(comm.rank), untold=failure, moved=True)
        if self._results is None:
            send = bytearray(RESULT_BYTES)
            if failure is not None:
                send[0] = 1
                pack_text(memoryview(send)[1:], failure.cause, failure.details)
            self._results = send, bytearray(RESULT_BYTES * comm.size)
        send, receive = self._results
        index = run.start(comm.iallgather, send, receive)
        self._interrupt(failure)
        yield from self._wait(run, index)
        failures = []
        for rank in range(comm.size):
            part = memoryview(receive)[rank * RESULT_BYTES : (rank + 1) * RESULT_BYTES]
            if part[0]:
                failures.append(RankFailure(rank, *unpack_text(memoryview(bytes(part[1:]).rstrip(b"\0")))))
        if failures:
            error = self._own(BroadcastError.of(tuple(failures)), failure)
            return self._end(before, error=error, moved=True)
        return self._end(before, value=value, moved=True)

    @property
    def _bytes_received(self) -> int:
        parts = self._in.values()
        return sum(
            (0 if part.block is None else part.block.nbytes) + sum(b.nbytes for b in part.large.values())
            for part in parts
        )


def is_running(generator: Any) -> bool:
    """Whether a generator's frame is on somebody's stack now. An exception that ends it cannot leave this wrong."""
    return generator is not None and bool(generator.gi_running)


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
