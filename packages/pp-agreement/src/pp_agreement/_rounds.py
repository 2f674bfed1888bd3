"""The open rounds of one core: opening, holding back, retiring; who was heard of, and what each has been through."""

from __future__ import annotations

from pp_agreement._context import Context, Violation
from pp_agreement._events import REQUEST_ID_MAX, FaultCode
from pp_agreement._round import Round
from pp_agreement._streams import Streams
from pp_agreement._timers import NEVER_S, Timers


class Rounds:
    """See the module."""

    def __init__(self, context: Context, streams: Streams) -> None:
        self.context = context
        self.streams = streams
        self.timers = Timers(context.config)
        self.credits = context.config.credits
        self.story_max = 3 * context.config.story_entries_max
        self.open: dict[int, Round] = {}
        self.by_request: dict[int, tuple[int, ...]] = {}  # an index: open incarnations of a request id, oldest first
        self.blocked: list[int] = []
        self.heard = 0
        self.last: int | None = None  # the last incarnation that will be admitted, once a drain has said so
        self.open_count = 0
        self.open_max = 0
        self.stale = 0

    def new(self, request_id: int, incarnation: int, *, blocked: bool = False) -> Round:
        """Open a round."""
        round_ = Round(request_id, incarnation, self.context.is_coordinator)
        self.open[incarnation] = round_
        siblings = self.by_request.get(request_id)
        self.by_request[request_id] = (incarnation,) if siblings is None else (*siblings, incarnation)
        round_.touched_s = now_s = self.context.elapsed_s
        if self.timers.idle_due_s == NEVER_S:
            self.timers.opened(now_s)
        if blocked:
            round_.blocked = True
            round_.held = []
            self.blocked.append(incarnation)
        else:
            self.open_count += 1
            if self.open_count > self.open_max:
                self.open_max = self.open_count
        return round_

    def retire(self, round_: Round) -> None:
        """The final decision: the round is over, and its credit free."""
        incarnation = round_.incarnation
        del self.open[incarnation]
        siblings = self.by_request.pop(round_.request_id)
        if len(siblings) > 1:
            self.by_request[round_.request_id] = tuple([i for i in siblings if i != incarnation])
        self.open_count -= 1
        own = round_.own
        if own.doubt_at_s is not None or own.leased_at_s is not None:
            self.timers.retired(incarnation)
        if self.blocked:
            self._unblock()

    def _unblock(self) -> None:
        for incarnation in tuple(self.blocked):
            if self.open_count >= self.credits:
                return
            round_ = self.open[incarnation]
            if self.by_request[round_.request_id][0] != incarnation:
                continue
            self.blocked.remove(incarnation)
            round_.blocked = False
            self.open_count += 1  # never more than before: a round has just been retired
            held, round_.held = round_.held or (), None
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
        return self.new(request_id, incarnation)

    def note(self, round_: Round, what: str, source: int) -> None:
        """Progress of a round: an entry of its story, and its time without progress starts anew."""
        context, story = self.context, round_.story
        round_.touched_s = context.elapsed_s
        if len(story) < self.story_max:
            story += (context.now_s, what, source)
        elif story:
            oldest = min(12, self.story_max - 3)  # of those after the first four
            del story[oldest : oldest + 3]
            story += (context.now_s, what, source)

    def copy(self, context: Context, streams: Streams) -> Rounds:
        """An independent copy, for explorers."""
        twin = Rounds.__new__(Rounds)
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams = context, streams
        twin.timers = self.timers.copy()
        twin.open = {i: r.copy() for i, r in self.open.items()}
        twin.by_request = dict(self.by_request)
        twin.blocked = list(self.blocked)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """All that decides the future, without times and stories."""
        return (
            self.heard, self.last, self.open_count, tuple(self.blocked),
            tuple([r.fingerprint() for _i, r in sorted(self.open.items())]), self.timers.armed(),
        )  # fmt: skip
