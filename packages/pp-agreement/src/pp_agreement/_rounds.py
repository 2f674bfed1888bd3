"""The open rounds of one core: opening, holding back, retiring; who was heard of, and what each has been through."""

from __future__ import annotations

from pp_agreement._context import Context, Violation
from pp_agreement._events import REQUEST_ID_MAX, FaultCode
from pp_agreement._round import NO_COURSE, Course, Entry, ReadyTally, Round, Tally
from pp_agreement._streams import Streams
from pp_agreement._timers import NEVER_S, Timers


class Rounds:
    """See the module."""

    def __init__(self, context: Context, streams: Streams) -> None:
        self.context = context
        self.streams = streams
        self.timers = Timers(context.config)
        self.credits = context.config.credits
        self.story_max = context.config.story_entries_max
        self.open: dict[int, Round] = {}
        self.by_request: dict[int, Round] = {}  # an index: the newest open round of a request id; see ``Round.older``
        self.held_back: list[int] = []
        self.heard = 0
        self.last: int | None = None  # the last incarnation that will be admitted, once a drain has said so
        self.open_max = 0
        self.stale = 0

    @property
    def open_count(self) -> int:
        """Open rounds without those that are held back."""
        return len(self.open) - len(self.held_back)

    def new(self, request_id: int, incarnation: int, ready: bool, held_back: bool) -> Round:
        """Open a round; one that is held back is not counted as open until ``_resume``."""
        context = self.context
        now_s = context.elapsed_s
        tally = None
        if context.is_coordinator:
            tally = ReadyTally() if ready else Tally()
        round_ = Round(request_id, incarnation, tally, Course() if ready else NO_COURSE, now_s)
        opened, by_request, held = self.open, self.by_request, self.held_back
        opened[incarnation] = round_
        if request_id in by_request:
            round_.older = by_request[request_id]
        by_request[request_id] = round_
        if self.timers.idle_due_s == NEVER_S:
            self.timers.opened(now_s)
        if held_back:
            round_.held = []
            held.append(incarnation)
        count = len(opened) - len(held)
        if count > self.open_max:
            self.open_max = count
        return round_

    def retire(self, round_: Round) -> None:
        """The final decision: the round is over, and its credit free."""
        incarnation = round_.incarnation
        del self.open[incarnation]
        newest = self.by_request.pop(round_.request_id)
        if newest is not round_ or round_.older is not None:
            self._unlink(round_, newest)
        timers = self.timers
        if timers.doubts.live or timers.leases.live:
            timers.retired(incarnation)
        if self.held_back:
            self._resume()

    def _unlink(self, round_: Round, newest: Round) -> None:
        """Take a round out of the index that is not the only one of its request."""
        if newest is round_:
            if round_.older is not None:
                self.by_request[round_.request_id] = round_.older
            return
        self.by_request[round_.request_id] = newest
        above = newest
        while above.older is not None and above.older is not round_:
            above = above.older
        above.older = round_.older

    def _resume(self) -> None:
        """A round is over: those held back that need not wait any longer, oldest first."""
        for incarnation in tuple(self.held_back):
            if self.open_count >= self.credits:
                return
            round_ = self.open[incarnation]
            if round_.older is not None:
                continue
            self.held_back.remove(incarnation)
            held, round_.held = round_.held or (), None  # no more open rounds than before: one has just been retired
            for slot, record in held:
                self.streams.queue_up(slot, record)

    def unheard(self, source: int, request_id: int, incarnation: int) -> Round | None:
        """A record for a round that is not open here: stale, inside the credit window, or a fault."""
        context, credits = self.context, self.credits
        if 1 <= incarnation <= self.heard:
            self.stale += 1
            return None
        if context.is_scheduler:
            whose = "which this rank, the authority, never admitted"
            context.blame(source, f"speaks of incarnation {incarnation}, {whose}")
        if incarnation < 1 or incarnation > self.heard + credits or request_id > REQUEST_ID_MAX:
            context.blame(
                source,
                f"speaks of incarnation {incarnation}, request {request_id}; "
                f"{self.heard} were heard of and {credits} credits exist",
            )
        if self.last is not None and incarnation > self.last:
            raise Violation(
                FaultCode.DRAIN_MISMATCH,
                f"rank {context.name(source)} speaks of incarnation {incarnation} after the drain at {self.last}",
                suspect=source,
            )
        if self.open_count >= credits:
            context.blame(source, "opens more rounds than there are credits")
        return self.new(request_id, incarnation, True, False)

    def note(self, round_: Round, what: str, source: int) -> None:
        """Progress of a round: an entry of its story, and its time without progress starts anew."""
        context, story = self.context, round_.story
        round_.touched_s = context.elapsed_s
        story.append((context.now_s, what, source))
        if len(story) > self.story_max:
            self._shorten(story)

    def _shorten(self, story: list[Entry]) -> None:
        """The first four entries stay, and the newest."""
        oldest = max(0, min(4, self.story_max - 1))
        del story[oldest : oldest + len(story) - self.story_max]

    def copy(self, context: Context, streams: Streams) -> Rounds:
        """An independent copy, for explorers."""
        twin = Rounds.__new__(Rounds)
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams = context, streams
        twin.timers = self.timers.copy()
        twin.open = {i: r.copy() for i, r in self.open.items()}
        twin.by_request = {i: twin.open[r.incarnation] for i, r in self.by_request.items()}
        for round_ in twin.open.values():
            if round_.older is not None:
                round_.older = twin.open[round_.older.incarnation]
        twin.held_back = list(self.held_back)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """All that decides the future, without times and stories."""
        return (
            self.heard, self.last, self.open_count, tuple(self.held_back),
            tuple([r.fingerprint() for _i, r in sorted(self.open.items())]), self.timers.armed(),
        )  # fmt: skip
