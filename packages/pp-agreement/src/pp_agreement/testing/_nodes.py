"""What the explorer moves: a rank of a flat domain, which is a core, or of a group, where a leader is two of them joined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pp_agreement import _events as ev
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import LocalProtocolError
from pp_agreement._events import (
    AgreementEvent,
    Answer,
    Disposition,
    Effect,
    FaultCode,
    Frame,
    Key,
    Outcome,
    Reason,
    Record,
    SendFrame,
)
from pp_agreement._groups import Groups
from pp_agreement._machine import AgreementCore
from pp_agreement._relay import Bridge, GroupCore, OuterCore
from pp_agreement._state import Kind
from pp_agreement._validate import InvariantViolation
from pp_agreement.testing._monitor import PropertyViolation

DEADLINE_S = 1.0
HEARTBEAT_S = 0.5
FrameRecords = tuple[Record, ...]


def later_s(core: AgreementCore) -> float:
    """A reading of the clock at which everything that is armed is due."""
    return core.context.now_s + 2 * DEADLINE_S


class FlatNodes:
    """Ranks that are members themselves."""

    def __init__(self, domain: Domain, config: AgreementConfig, lazy: Sequence[Kind]) -> None:
        self.domain = domain
        self.config = config
        self.lazy = lazy

    def new(self, rank: int) -> Any:
        """One rank before anything has happened."""
        return AgreementCore(self.domain, rank, self.config)

    def perform(self, node: Any, given: Any) -> tuple[Effect, ...]:
        """What the host calls, a sweep at which all deadlines have passed, or one of these tuples:

        ("frame", member, records); ("slot", member); ("exchange", contributions); ("silence", members whose links are empty).
        """
        if isinstance(given, ev.SweepCompleted):
            return tuple(node.step(given, later_s(node)))
        if isinstance(given, tuple) and given[0] == "silence":
            effects: list[Effect] = []
            for _ in range(4):
                effects += node.step(ev.SweepCompleted(given[1]), node.context.now_s + HEARTBEAT_S)
            return tuple(effects)
        if isinstance(given, tuple) and given[0] == "frame":
            _tag, source, records = given
            given = ev.FrameReceived(source, Frame(node.streams.expected[source], 0, records))
        elif isinstance(given, tuple) and given[0] == "slot":
            given = ev.SlotFreed(given[1], 0)
        elif isinstance(given, tuple) and given[0] == "exchange":
            given = ev.ExchangeCompleted(given[1])
        return tuple(node.step(given, 0.0))

    def sent(self, _node: Any, effects: Sequence[Effect]) -> list[tuple[int, FrameRecords]]:
        """(member, records) of the frames among the effects."""
        return [(e.peer, e.frame.records) for e in effects if isinstance(e, SendFrame)]

    def flush(self, node: Any) -> list[tuple[int, FrameRecords]]:
        """What leaves at once: what the coordinator says, and what no later record may replace."""
        return self.flush_core(node)

    def flush_core(self, core: AgreementCore) -> list[tuple[int, FrameRecords]]:
        """The same for one core, by its own members."""
        frames: list[tuple[int, FrameRecords]] = []
        for peer in core.peers:
            while self._leaves(core, peer):
                sent = core.step(ev.SlotFreed(peer, 0), 0.0)
                frames += [(e.peer, e.frame.records) for e in sent if isinstance(e, SendFrame)]
        return frames

    def _leaves(self, core: AgreementCore, peer: int) -> bool:
        if core.is_coordinator:
            return bool(core.streams.queues[peer])
        return bool(core.streams.intents) and not any(r[0] in self.lazy for r in core.streams.intents.values())

    def waiting(self, node: Any) -> list[int]:
        """Members for whom something waits, and leaves when the explorer says so."""
        return self.waiting_core(node)

    def waiting_core(self, core: AgreementCore) -> list[int]:
        """The same for one core, by its own members."""
        if core.is_coordinator:
            return [peer for peer, queue in core.streams.queues.items() if queue]
        return [core.context.coordinator] if core.streams.intents else []

    def is_armed(self, node: Any) -> bool:
        """Whether anything can become due."""
        watched = self.config.round_timeout_s is not None and bool(node.rounds.open)
        return watched or any(node.rounds.timers.armed())


class ReplicatedNodes(FlatNodes):
    """The blocking baseline: every rank counts, and all hear the same exchange."""

    def new(self, rank: int) -> Any:
        """See :class:`FlatNodes`."""
        return AgreementCore(self.domain, rank, self.config, replicated=True)


class _Calls:
    """A voice's local calls, as inputs of its core."""

    def __init__(self, rise: Callable[[ev.Input], Any]) -> None:
        self._rise = rise

    def publish_ready(self, key: Key) -> object:
        return self._rise(ev.ReadyPublished(key))

    def withdraw(self, key: Key, reason: Reason = Reason.CANCELLED) -> object:
        return self._rise(ev.WithdrawRequested(key, reason))

    def acknowledge_prepare(self, key: Key) -> bool:
        return bool(self._rise(ev.PrepareAcknowledged(key)))

    def acknowledge_abort(self, key: Key) -> None:
        self._rise(ev.AbortAcknowledged(key))

    def activate(self, keys_in_schedule_order: Iterable[Key]) -> int:
        return int(self._rise(ev.ScheduleActivated(tuple(keys_in_schedule_order))) or 0)

    def revoke(self, key: Key, reason: Reason = Reason.CANCELLED) -> object:
        return self._rise(ev.RevokeRequested(key, reason))

    def recall(self, key: Key, reason: Reason = Reason.CANCELLED) -> bool:
        return bool(self._rise(ev.RecallRequested(key, reason)))

    def doubt(self, key: Key, reason: Reason = Reason.DOUBT) -> bool:
        return bool(self._rise(ev.DoubtRaised(key, reason)))

    def vote_terminal(
        self,
        key: Key,
        outcome: Outcome,
        disposition: Disposition = Disposition.RELEASE,
        reason: Reason = Reason.NONE,
    ) -> bool:
        return bool(self._rise(ev.TerminalVoted(key, outcome, disposition, reason)))

    def fail(self, detail: str, code: FaultCode = FaultCode.HOST) -> None:
        self._rise(ev.HostFailed(code, detail))


class GroupNode:
    """One rank of a group; looks to the explorer like a core of a flat domain of all ranks."""

    def __init__(self, groups: Groups, ranks: tuple[int, ...], rank: int, config: AgreementConfig) -> None:
        self.groups = groups
        self.rank = rank
        self.me = ranks.index(rank)
        self.group = GroupCore(groups, rank, config)
        self.voice = OuterCore(groups, rank, config) if rank in groups.leaders else None
        self._join()

    def _join(self) -> None:
        self.now_s = 0.0
        self.effects: list[Effect] = []
        self.events: list[AgreementEvent] = []
        self.bridge = None if self.voice is None else Bridge(self.group, self.voice, _Calls(self._rise), self._fall)

    # -- what the bridge performs -----------------------------------------------------------------------------------

    def _rise(self, event: ev.Input) -> Any:
        if self.voice is None:
            raise AssertionError("only a leader has a voice")
        try:
            return self._keep(self.voice.step(event, self.now_s))
        except LocalProtocolError as error:
            raise PropertyViolation(f"rank {self.rank}: what the group says is refused outside: {error}") from error

    def _fall(self, method: Any, *arguments: Any) -> None:
        method(*arguments, self.now_s)

    def _keep(self, effects: Sequence[Effect]) -> Any:
        self.events += [e for e in effects if isinstance(e, AgreementEvent)]
        return next((e.value for e in effects if isinstance(e, Answer)), None)

    def _take(self) -> tuple[AgreementEvent, ...]:
        events, self.events = self.events, []
        return (*events, *self.voice.take()) if self.voice is not None else ()

    # -- inputs -----------------------------------------------------------------------------------------------------

    def step(self, given: ev.Input, now_s: float) -> tuple[Effect, ...]:
        """What the host calls, or evidence of a death."""
        self.now_s = now_s
        self.effects = []
        admitted = isinstance(given, ev.RequestAdmitted)
        if admitted and self.voice is not None:
            self._keep(self.voice.step(given, now_s))  # refused outside: nothing has changed
        self.effects.extend(self.group.step(given, now_s))
        if isinstance(given, ev.DrainRequested) and self.voice is not None and self.group.is_scheduler:
            if self.bridge is not None:
                self.bridge.speak()  # what the drain ends is said before it
            self._rise(given)
        return self._joined()

    def take(self, core: AgreementCore, given: ev.Input, now_s: float) -> tuple[Effect, ...]:
        """An input of one of the two cores."""
        self.now_s = now_s
        self.effects = []
        effects = core.step(given, now_s)
        if core is self.voice:
            self._keep(effects)
            self.effects.extend(e for e in effects if isinstance(e, SendFrame))
        else:
            self.effects.extend(effects)
        return self._joined()

    def _joined(self) -> tuple[Effect, ...]:
        if self.bridge is not None:
            self.bridge.join(self._take)
        return (*self.effects, *self.group.take())

    # -- what the explorer looks at ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Everything that a host sees is the group's core's: ``rounds``, ``heard``, ``fault``, ``streams``, …"""
        if name.startswith("__") or name == "group":
            raise AttributeError(name)
        return getattr(self.group, name)

    def fingerprint(self, *, digests: bool = True) -> tuple[object, ...]:
        """All that decides the future."""
        asked = tuple(sorted((i, int(k), r) for (i, k), r in self.group.coordinator.asked.items()))
        own = (self.group.fingerprint(digests=digests), asked, tuple(self.group.coordinator.unsettled))
        return own if self.voice is None else (*own, self.voice.fingerprint(digests=digests))

    def copy(self) -> GroupNode:
        """An independent copy."""
        twin = GroupNode.__new__(GroupNode)
        twin.groups, twin.rank, twin.me = self.groups, self.rank, self.me
        twin.group = self.group.copy()  # type: ignore[assignment]
        twin.voice = None if self.voice is None else self.voice.copy()  # type: ignore[assignment]
        twin._join()
        return twin

    def validate(self) -> None:
        """Each core, and what a leader's two have to share."""
        self.group.validate()
        voice = self.voice
        if voice is None:
            return
        voice.validate()
        if voice.fault is not None or self.group.fault is not None:
            return
        inside, outside = self.group.member, voice.member
        shared = (
            (inside.digest, outside.digest), (inside.committed, outside.committed),
            (self.group.heard, voice.heard),
            ({i for i, r in self.group.rounds.open.items() if r.heard}, {i for i, r in voice.rounds.open.items() if r.heard}),
        )  # fmt: skip
        for mine, theirs in shared:
            if mine != theirs:
                raise InvariantViolation(f"rank {self.rank}: its group has {mine!r}, its voice {theirs!r}")


class GroupNodes(FlatNodes):
    """Ranks of groups. Members are numbered over all groups, as in the flat domain that they make together."""

    def __init__(self, domain: Domain, sizes: Sequence[int], config: AgreementConfig, lazy: Sequence[Kind]) -> None:
        super().__init__(domain, config, lazy)
        rows, first = [], 0
        for size in sizes:
            rows.append(tuple(domain.ranks[first : first + size]))
            first += size
        self.groups = Groups(1, tuple(rows), domain.scheduling_rank, domain.coordinator_rank)

    def new(self, rank: int) -> GroupNode:
        """See :class:`FlatNodes`."""
        return GroupNode(self.groups, self.domain.ranks, rank, self.config)

    def _core(self, node: GroupNode, member: int) -> tuple[AgreementCore, int]:
        """The core that speaks with a member, and that one's number there."""
        rank = self.domain.ranks[member]
        core: AgreementCore | None = node.group if rank in node.group.domain.ranks else node.voice
        if core is None:
            raise AssertionError(f"rank {node.rank} does not speak with rank {rank!r}")
        return core, core.domain.index_of(rank)

    def _are_linked(self, node: GroupNode, member: int) -> bool:
        rank = self.domain.ranks[member]
        return rank in node.group.domain.ranks or (node.voice is not None and rank in node.groups.leaders)

    def perform(self, node: GroupNode, given: Any) -> tuple[Effect, ...]:
        """See :class:`FlatNodes`."""
        if isinstance(given, ev.SweepCompleted):
            effects = node.take(node.group, given, later_s(node.group))
            return effects if node.voice is None else (*effects, *node.take(node.voice, given, later_s(node.voice)))
        if isinstance(given, ev.PeerDied):
            if not self._are_linked(node, given.peer):
                return node.step(ev.HostFailed(FaultCode.DEATH, f"rank {given.peer} died"), 0.0)
            core, peer = self._core(node, given.peer)
            return node.take(core, ev.PeerDied(peer, given.evidence), 0.0)
        if isinstance(given, tuple) and given[0] == "frame":
            _tag, source, records = given
            core, peer = self._core(node, source)
            return node.take(core, ev.FrameReceived(peer, Frame(core.streams.expected[peer], 0, records)), 0.0)
        if isinstance(given, tuple) and given[0] == "slot":
            core, peer = self._core(node, given[1])
            return tuple(self._numbered(core, e) for e in core.step(ev.SlotFreed(peer, 0), 0.0))
        return node.step(given, 0.0)

    def _numbered(self, core: AgreementCore, effect: Effect) -> Effect:
        if not isinstance(effect, SendFrame):
            return effect
        return SendFrame(self.domain.index_of(core.domain.ranks[effect.peer]), effect.frame)

    def flush(self, node: GroupNode) -> list[tuple[int, FrameRecords]]:
        """See :class:`FlatNodes`."""
        frames: list[tuple[int, FrameRecords]] = []
        for core in (node.group, node.voice):
            if core is not None:
                ranks = core.domain.ranks
                frames += [(self.domain.index_of(ranks[p]), records) for p, records in self.flush_core(core)]
        return frames

    def waiting(self, node: GroupNode) -> list[int]:
        """See :class:`FlatNodes`."""
        return [
            self.domain.index_of(core.domain.ranks[peer])
            for core in (node.group, node.voice)
            if core is not None
            for peer in self.waiting_core(core)
        ]

    def is_armed(self, node: GroupNode) -> bool:
        """See :class:`FlatNodes`."""
        return super().is_armed(node.group)


def nodes_of(
    domain: Domain, groups: Sequence[int], config: AgreementConfig, lazy: Sequence[Kind], *, replicated: bool
) -> FlatNodes:
    """The nodes of a world."""
    if replicated:
        return ReplicatedNodes(domain, config, lazy)
    return GroupNodes(domain, groups, config, lazy) if groups else FlatNodes(domain, config, lazy)
