"""One stream per peer: what waits to be sent, the frames that leave, and the identity of those that come.

A member's unsent records have places, one per round and slot, so that a newer intent replaces an older one. The coordinator
has a queue per destination, its own included, and appends each decision to all of them in one step.

A stream is a session of its sender and a sequence from 1. The session is a number drawn when an agreement is constructed, so
a restarted member is another one even under the same epoch, and is refused with its first frame. A sequence that was seen
before is a repetition only with the content that it had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from pp_agreement._context import Context, Violation
from pp_agreement._events import FaultCode, Frame, Record, new
from pp_agreement._round import Round
from pp_agreement._state import REPLACES, Kind

EXCHANGE = -1
"""The one 'peer' of a replicated core: the lockstep exchange with everybody. It takes the last place of every list by peer."""

NOBODY = -1
"""The session of a member that this rank does not speak with: no frame carries it."""

NEVER_SENT_S = float("-inf")
NO_TIME_S = float("nan")  # no time is before it, nor at it

REPEATS_KEPT = 16
"""Frames of a stream whose bytes are kept, to be compared with those of a frame that comes again; a transport repeats what
it sent last, or nothing. They are the bytes that came, not copies."""

# Slots of unsent records.
READY_SLOT, TERMINAL_SLOT, RECALL_SLOT, DOUBT_SLOT, CONTROL_SLOT = range(5)


class Streams:
    """See the module."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.limit = context.config.records_per_frame_max
        self.heartbeat_s = context.config.heartbeat_s
        self.queue_limit = context.config.queue_records_max
        size = context.size
        self.counts_own = context.is_coordinator and not context.replicated  # own records go to the own coordinator
        self.intents: dict[tuple[int, int], Record] = {}
        self.queues: dict[int, list[Record]] = {p: [] for p in context.peers} if context.is_coordinator else {}
        # What this rank's own two halves say to each other: the member to the coordinator, and the other way round.
        self.words: deque[Record] = deque()
        self.decisions: list[Record] = []
        self.next_sequence = [1] * size
        self.expected = [1] * size
        self.sessions = [0 if i in context.peers else NOBODY for i in range(size)]  # 0: not heard yet
        self.seen: list[deque[bytes]] = [deque(maxlen=REPEATS_KEPT) for _ in range(size)]
        self.last_sent_s = [NEVER_SENT_S] * size
        self.busy_pending: dict[int, int] = {}
        self.muted = False  # this rank says nothing of its own accord any more
        self.sent_kinds = [0] * 256  # by kind
        self.received_kinds = [0] * 256
        self.local_kinds = [0] * 256
        self.duplicates = 0
        self.heartbeats_sent = 0
        self.queue_max = 0

    # -- what waits -------------------------------------------------------------------------------------------------

    def say(self, round_: Round, slot: int, kind: int, outcome: int = 0, disposition: int = 0, reason: int = 0) -> None:
        """This rank says something about a round, to the coordinator."""
        request_id, incarnation, attempt = round_.key
        record = (kind, outcome, disposition, reason, attempt, request_id, incarnation)
        if round_.held is not None:
            kept = [(s, r) for s, r in round_.held if s != slot]
            kept.append((slot, record))
            round_.held = kept
        elif self.counts_own:  # as ``queue_up`` does, without the call
            self.words.append(record)
        elif slot == READY_SLOT:
            self.queue_up(slot, record)
        else:
            self.intents[slot, incarnation] = record

    def is_unsent(self, round_: Round, slot: int) -> bool:
        """Whether the record in this slot can still be replaced."""
        return round_.held is not None or (slot, round_.incarnation) in self.intents

    def queue_up(self, slot: int, record: Record) -> None:
        """Put a record of this rank where it waits."""
        if self.counts_own:
            self.words.append(record)
            return
        place = slot, record[6]
        if slot == READY_SLOT:
            older = self.intents.get(place)
            if older is not None and older[0] not in REPLACES[Kind(record[0])]:
                told = f"{Kind(record[0]).name} would replace an unsent {Kind(older[0]).name}"
                raise Violation(FaultCode.INTERNAL, told)
        self.intents[place] = record

    def control(self, kind: Kind, *, request_id: int = 0, incarnation: int = 0) -> None:
        """This rank says something about the domain, to the coordinator."""
        record = (int(kind), 0, 0, 0, 0, request_id, incarnation)
        if self.counts_own:
            self.words.append(record)
        else:
            self.intents[CONTROL_SLOT + kind, 0] = record

    def fan_out(self, record: Record) -> None:
        """The coordinator says something to everybody, itself included."""
        for queue in self.queues.values():
            queue.append(record)
        self.decisions.append(record)

    def tell_scheduler(self, record: Record) -> None:
        """The coordinator says something to the scheduling rank."""
        context = self.context
        if context.is_scheduler:
            self.decisions.append(record)
        elif context.scheduler in self.queues:  # in a group that another one schedules, nobody
            self.queues[context.scheduler].append(record)

    def stop(self, records: list[Record], survivors: frozenset[int], tell: bool) -> None:
        """The domain stops: what no longer binds is dropped, and the others are told."""
        self.words.clear()
        self.decisions.clear()
        self.intents.clear()
        if self.counts_own:
            for queue in self.queues.values():
                queue[:] = [r for r in queue if r[0] in survivors]
                queue.extend(records)
        elif tell:
            for number, record in enumerate(records):
                self.intents[CONTROL_SLOT + record[0], number] = record

    # -- what leaves ------------------------------------------------------------------------------------------------

    def wanting(self) -> tuple[Sequence[int], Sequence[int]]:
        """Peers for whom something waits, and those who are due a heartbeat and nothing else."""
        context, pending = self.context, self.busy_pending
        if not self.counts_own and (self.intents or pending):
            return context.peers, ()
        due_s = context.elapsed_s - self.heartbeat_s
        if self.muted or context.fault is not None:
            due_s = NO_TIME_S  # heartbeats are over
        sent_s = self.last_sent_s
        if self.counts_own:
            speaking, beating = [], []
            for peer, queue in self.queues.items():
                if queue or peer in pending:
                    speaking.append(peer)
                elif sent_s[peer] <= due_s:
                    beating.append(peer)
            return speaking, beating
        peers = context.peers
        return (), peers if peers and sent_s[peers[0]] <= due_s else ()

    def is_beat_due(self, peer: int) -> bool:
        """Whether the peer should hear that this rank lives. ``wanting`` asks the same without a call per peer."""
        context = self.context
        if self.muted or context.fault is not None or peer == EXCHANGE:
            return False
        return self.last_sent_s[peer] <= context.elapsed_s - self.heartbeat_s

    def fill(self, slots: Iterable[tuple[int, int]]) -> None:
        """Slots are free: to each of these peers one frame of what waits, or a heartbeat when nothing else is under way.

        Args:
            slots: A peer, and how many earlier frames it has not received yet: where something waits for it, nobody asks.
        """
        context, kinds, sequences = self.context, self.sent_kinds, self.next_sequence
        intents, counts_own, pending = self.intents, self.counts_own, self.busy_pending
        # Counted once for all to whom it is said: a decision goes to everybody in the same words.
        said: tuple[Record, ...] = ()
        times = 0
        try:
            for peer, outstanding in slots:
                if counts_own:
                    queue = self.queues[peer]
                    count = len(queue)
                    if count > self.queue_max or count > self.limit:
                        records = self._take_from_queue(peer, queue)
                    else:
                        records = tuple(queue)
                        queue.clear()
                elif len(intents) > 1:
                    records = self._take_intents()
                else:
                    records = tuple(intents.values())
                    intents.clear()
                busy_ms = pending.pop(peer, 0) if pending else 0
                if records:
                    if not counts_own:
                        for record in records:
                            kinds[record[0]] += 1
                    elif records != said:
                        for record in said:
                            kinds[record[0]] += times
                        said, times = records, 0
                    times += 1
                elif not busy_ms:
                    if outstanding or not self.is_beat_due(peer):
                        continue
                    self.heartbeats_sent += 1
                sequence = sequences[peer]
                sequences[peer] = sequence + 1
                self.last_sent_s[peer] = context.elapsed_s
                context.frames.append((peer, new(Frame, (sequence, busy_ms, records, context.session, b""))))
        finally:
            for record in said:
                kinds[record[0]] += times

    def _take_from_queue(self, peer: int, queue: list[Record]) -> tuple[Record, ...]:
        limit = self.limit
        if len(queue) > self.queue_max:
            self.queue_max = len(queue)
            if len(queue) > self.queue_limit and self.context.fault is None:
                raise Violation(FaultCode.INTERNAL, f"{len(queue)} records wait for rank {self.context.name(peer)}")
        records = tuple(queue[:limit])
        del queue[:limit]
        return records

    def _take_intents(self) -> tuple[Record, ...]:
        intents = self.intents
        if len(intents) > self.queue_max:
            self.queue_max = len(intents)
        if len(intents) > self.limit:
            return tuple([intents.pop(place) for place in list(intents)[: self.limit]])
        records = tuple(intents.values())
        intents.clear()
        return records

    @property
    def frames_sent(self) -> int:
        """How many frames were made."""
        return sum(self.next_sequence) - len(self.next_sequence)

    @property
    def frames_received(self) -> int:
        """How many frames were taken, without repetitions."""
        return sum(self.expected) - len(self.expected)

    # -- what comes -------------------------------------------------------------------------------------------------

    def accept(self, peer: int, sequence: int, session: int, content: bytes) -> bool:
        """Whether a frame is the next one of its stream although it is of another session, or out of turn; False: an exact
        repetition, ignored. A frame whose session and number are the expected ones needs no asking.
        """
        if session != self.sessions[peer]:
            self._meet(peer, sequence, session)
        if sequence != self.expected[peer]:
            self._expect_repetition(peer, sequence, content)
            return False
        return True

    def _meet(self, peer: int, sequence: int, session: int) -> None:
        """The first frame of a peer names its session; another one later is another process."""
        if self.sessions[peer] == NOBODY:
            name = self.context.name(peer)
            raise Violation(FaultCode.PROTOCOL, f"a frame from rank {name}, which is not spoken to", suspect=peer)
        if self.sessions[peer] or self.expected[peer] > 1:
            raise Violation(
                FaultCode.SEQUENCE,
                f"rank {self.context.name(peer)} speaks in another session than before: it was restarted, which needs "
                "another epoch of the domain",
                suspect=peer,
            )
        if sequence == 1:
            self.sessions[peer] = session

    def _expect_repetition(self, peer: int, sequence: int, content: bytes) -> None:
        """A frame out of turn is one that came before, byte for byte; anything else is a fault."""
        expected, seen = self.expected[peer], self.seen[peer]
        age = expected - sequence
        if 0 < age <= len(seen) and seen[-age] == content:
            self.duplicates += 1
            return
        told = (
            f"frame {sequence} of rank {self.context.name(peer)} came where {expected} was due"
            if age < 0
            else f"frame {sequence} of rank {self.context.name(peer)} came again with another content"
        )
        raise Violation(FaultCode.SEQUENCE, told, suspect=peer)

    # -- for explorers ----------------------------------------------------------------------------------------------

    def copy(self, context: Context) -> Streams:
        """An independent copy."""
        twin = Streams.__new__(Streams)
        twin.__dict__.update(self.__dict__)
        twin.context = context
        twin.queues = {i: list(v) for i, v in self.queues.items()}
        twin.words, twin.decisions = deque(self.words), list(self.decisions)
        twin.seen = [deque(one, REPEATS_KEPT) for one in self.seen]
        for name in (
            "intents", "next_sequence", "expected", "sessions", "last_sent_s", "busy_pending", "sent_kinds",
            "received_kinds", "local_kinds",
        ):  # fmt: skip
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """What waits."""
        return tuple(sorted(self.intents.items())), tuple([tuple(q) for q in self.queues.values()])
