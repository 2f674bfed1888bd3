"""An exchange whose root waits for nobody (``ahead_max``): it gives its value, goes on, and looks later what came of it.

Every exchange begins with the root's frame, which says what follows. If the root gathers or closes, it is an exchange like
any other (:mod:`comm_broadcast._exchange`): all ranks wait for all. If it broadcasts, the value moves, and each rank sends
the root a *status*: what it called, and whether it failed. The root reads a status when it begins a later exchange, and waits
only for those that are ``ahead_max`` exchanges old. If one says that something went wrong, the root's next frame is a *report*,
which all ranks raise, and nothing else moves in that exchange. So the root alone decides, and all raise the same in the same
exchange.

What a root has left under way (its frame, a block's pieces, statuses) stays listed by the adapter, as the beginning of the
next script's list. Buffers that are sent from where they lie belong to the caller: the root waits until those have been taken.
"""

from __future__ import annotations

from typing import Any

from comm_broadcast import _block
from comm_broadcast._comm import Run
from comm_broadcast._errors import BroadcastError, CallMismatchError, ClosedError, CommBroadcastError
from comm_broadcast._exchange import RESULT_BYTES, Ended, Exchange, Incoming, Kept, Outgoing, Steps
from comm_broadcast._failure import Failure
from comm_broadcast._frame import (
    Frame,
    Kind,
    Operation,
    Status,
    failure_in,
    pack_failure,
    pack_report,
    problems,
    report_in,
)


class AheadExchange(Exchange):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Each set once: what of the kept operations is over, and what it says; the root's frame; this rank's status.
        self._read: tuple[int, tuple[CommBroadcastError, ...]] | None = None
        self._first: bytearray | None = None
        self._status: bytearray | None = None
        self._statuses: bytearray | None = None

    def release(self) -> None:
        """See :meth:`Exchange.release`."""
        super().release()
        self._first = self._status = self._statuses = None

    def _exchange(self, run: Run, before: Ended) -> Steps:
        """The root's frame, and what it says that follows."""
        self.moving_bytes = 0
        if run.comm.rank == self.call.root:
            return (yield from self._lead(run, before))
        return (yield from self._follow(run, before))

    # -- the root ------------------------------------------------------------------------------------------------------

    def _lead(self, run: Run, before: Ended) -> Steps:
        comm, sequence = run.comm, before.sequence + 1
        is_broadcast = self.call.operation is Operation.BROADCAST
        if self._read is None:
            count = yield from self._over(run, before, wait_for_all=not is_broadcast)
            said = before.reports + _said(before.kept[:count], comm.rank, comm.size)
            if any(isinstance(error, ClosedError) for error in said):
                # Nothing is told after that: the rest of what the ranks say comes before it.
                count = yield from self._over(run, before, wait_for_all=True)
                said = before.reports + _said(before.kept, comm.rank, comm.size)
            self._read = count, _closed_last(said)
        over, errors = self._read
        if errors:
            return (yield from self._report(run, before, over, errors))
        if not is_broadcast:
            first = self._first
            if first is None:
                first = bytearray(self._owner.config.frame_bytes)
                Frame(sequence, kind=Kind.NONE, rank=comm.rank, call=self.call).pack_into(memoryview(first))
                self._first = first
            run.start(comm.ibcast, first, comm.rank)
            yield from self._all(run)
            return (yield from super()._exchange(run, before))
        out = self._out
        if out is None:
            out = self._out = self._outgoing(sequence, before.untold)
        run.start(comm.ibcast, out.frame, comm.rank)
        self._interrupt(out.failure)
        if before.untold is not None:
            error = BroadcastError.of((before.untold.report(comm.rank, earlier=True),))
            return self._end(before, error=error, kept=self._kept(run, before, over))
        if out.failure is not None:
            return self._end(before, error=out.failure.raised(comm.rank), kept=self._kept(run, before, over))
        yield from self._give(run, before, out)
        if self._statuses is None:
            self._status = self._good_status(sequence)
            self._statuses = bytearray(RESULT_BYTES * comm.size)
        run.start(comm.igather, self._status, self._statuses, comm.rank)
        kept = self._kept(run, before, over)
        if self._copy_failure is not None:
            return self._end(before, error=self._copy_failure.raised(comm.rank), moved=True, kept=kept)
        return self._end(before, value=self._value, moved=True, kept=kept)

    def _over(self, run: Run, before: Ended, *, wait_for_all: bool) -> Any:
        """How many of the kept operations, from the first on, are over: waits for those that are too old."""
        oldest = before.sequence + 1 - self._owner.config.ahead_max
        for index, kept in enumerate(before.kept):
            while not run.comm.test(index):
                if not (wait_for_all or kept.sequence <= oldest):
                    return index
                yield
            self.completed = max(self.completed, index + 1)
        return len(before.kept)

    def _report(self, run: Run, before: Ended, over: int, errors: tuple[CommBroadcastError, ...]) -> Steps:
        """Tell all ranks what went wrong before, one thing in each exchange: they raise it, and so does the root."""
        comm, error = run.comm, errors[0]
        if self._first is None:
            first = bytearray(self._owner.config.frame_bytes)
            pack_report(memoryview(first), Frame(before.sequence + 1, rank=comm.rank, call=self.call), error)
            self._first = first
        run.start(comm.ibcast, self._first, comm.rank)
        if isinstance(error, ClosedError):
            yield from self._all(run)
            own = self.call.operation is Operation.CLOSE
            return self._end(before, error=None if own else error, closed=error)
        return self._end(
            before, error=error, untold=before.untold, kept=self._kept(run, before, over), reports=errors[1:]
        )

    def _give(self, run: Run, before: Ended, out: Outgoing) -> Steps:
        """The payload; returns when it needs nothing of the caller's any more."""
        if out.kind is Kind.STREAMED:
            ends = _block.piece_ends(out.head, out.size, self._owner.config.chunk_bytes)
            yield from self._stream(run, before, out, ends)
            self.moving_bytes = 0
        if self._copy_failure is None:
            yield from self._give_large(run, out, (run.comm.ibcast, run.comm.rank))

    # -- the others ----------------------------------------------------------------------------------------------------

    def _follow(self, run: Run, before: Ended) -> Steps:
        comm, sequence, root = run.comm, before.sequence + 1, self.call.root
        if self._first is None:
            self._first = bytearray(self._owner.config.frame_bytes)
        yield from self._wait(run, run.start(comm.ibcast, self._first, root))
        view = memoryview(self._first)
        frame = Frame.unpack(view, sequence, root)
        if frame.status is Status.REPORT:
            yield from self._all(run)
            report = report_in(view, frame)
            closed = report if isinstance(report, ClosedError) else None
            if closed is not None and self.call.operation is Operation.CLOSE:
                return self._end(before, closed=closed)
            return self._end(before, error=report, untold=before.untold, closed=closed)
        if frame.status is not Status.GOOD:
            yield from self._all(run)
            return self._end(before, error=BroadcastError.of((failure_in(view, frame),)), untold=before.untold)
        if frame.call.operation is not Operation.BROADCAST:
            yield from self._all(run)
            return (yield from super()._exchange(run, before))
        part = self._in.setdefault(root, Incoming())
        mismatch = self._mismatch(frame) if frame.call != self.call else None
        if mismatch is not None:
            # It takes part in every transfer, and in nothing else.
            part.failure = Failure("", "", mismatch)
        told = yield from self._take(run, part, view, frame, (comm.ibcast, root))
        failure = part.failure if mismatch is None and told is None else None
        status = self._status
        if status is None:
            status = self._status = self._own_status(sequence, before.untold or failure)
        run.start(comm.igather, status, None, root)
        self._interrupt(failure)
        # What could not be said now is said in the next status.
        untold = failure if before.untold is not None else None
        over = yield from self._over(run, before, wait_for_all=False)
        kept = self._kept(run, before, over)
        if over == len(before.kept):
            # All but the status has been waited for.
            kept = kept[-1:]
        raised: BaseException | None = mismatch or told
        if self.call.operation is Operation.CLOSE:
            # Not yet: the root has to learn of it.
            raised = None
        elif raised is None and failure is not None:
            raised = failure.raised(comm.rank)
        value = None if part.result is None else part.result[0]
        return self._end(before, value=value, error=raised, untold=untold, moved=True, kept=kept)

    def _mismatch(self, frame: Frame) -> CallMismatchError:
        """What this rank knows of it: its own call and the root's."""
        calls = [""] * self._owner.comm.size
        calls[frame.rank] = frame.call.text(frame.call)
        calls[self._owner.comm.rank] = self.call.text(frame.call)
        return CallMismatchError(tuple(calls))

    # -- both ----------------------------------------------------------------------------------------------------------

    def _all(self, run: Run) -> Steps:
        """Everything that was started is over."""
        for index in range(run.count):
            yield from self._wait(run, index)

    def _kept(self, run: Run, before: Ended, over: int) -> tuple[Kept, ...]:
        """What this exchange leaves under way; its last operation gathers statuses, if any does."""
        sequence, count = before.sequence + 1, run.count - len(before.kept)
        return (*before.kept[over:], *[Kept(sequence)] * (count - 1), Kept(sequence, self._statuses))

    def _good_status(self, sequence: int) -> bytearray:
        """Of a rank that has not failed: the same bytes on all that made the same call: the root looks at them all at once."""
        status = bytearray(RESULT_BYTES)
        Frame(sequence, kind=Kind.NONE, rank=self.call.root, call=self.call).pack_into(memoryview(status))
        return status

    def _own_status(self, sequence: int, failure: Failure | None) -> bytearray:
        if failure is None:
            return self._good_status(sequence)
        status = bytearray(RESULT_BYTES)
        mine = Frame(sequence, Status.FAILED, Kind.NONE, rank=self._owner.comm.rank, call=self.call)
        pack_failure(memoryview(status), mine, failure.cause, failure.details)
        return status


def _said(kept: tuple[Kept, ...], root: int, size: int) -> tuple[CommBroadcastError, ...]:
    """What the ranks' statuses say that went wrong, in order."""
    errors: list[CommBroadcastError] = []
    for sequence, statuses in kept:
        if statuses is None:
            continue
        good = statuses[root * RESULT_BYTES : (root + 1) * RESULT_BYTES]
        if statuses == good * size:
            continue
        views = [memoryview(statuses)[r * RESULT_BYTES : (r + 1) * RESULT_BYTES] for r in range(size)]
        mine = Frame.unpack(views[root], sequence, root)
        frames = [
            mine._replace(rank=r) if view == good else Frame.unpack(view, sequence, r) for r, view in enumerate(views)
        ]
        errors += problems(frames, views, earlier=True)
    return tuple(errors)


def _closed_last(errors: tuple[CommBroadcastError, ...]) -> tuple[CommBroadcastError, ...]:
    """The same, and at last, once, that somebody closed."""
    closed = [error for error in errors if isinstance(error, ClosedError)]
    return (*(error for error in errors if not isinstance(error, ClosedError)), *closed[:1])
