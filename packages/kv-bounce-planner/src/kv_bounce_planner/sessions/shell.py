"""What Receiver and Sender share: the channel's queues, introductions, quarantine, callbacks."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kv_bounce_planner._errors import ChannelError, KVTransferError, RemoteProtocolError, WouldBlock
from kv_bounce_planner.copies.gather import Copier, HostCopier
from kv_bounce_planner.sessions.config import SessionConfig, SessionResources
from kv_bounce_planner.sessions.events import (
    FatalDiagnosis,
    MemoryReleased,
    PeerEvidence,
    SessionEvent,
    SourceReleased,
)
from kv_bounce_planner.sessions.identity import PeerId
from kv_bounce_planner.sessions.ledgers import QuarantineLedger
from kv_bounce_planner.sessions.messages import PROTOCOL_VERSION, Hello, Message, decode_message, encode_message
from kv_bounce_planner.sessions.proof import Evidence
from kv_bounce_planner.sessions.reports import PlannerReports, Reports
from kv_bounce_planner.transports.interface import AgentInfo, MemoryKind

#: Identities of ended transfers and requests that are remembered, so that a repetition is recognised (count).
OVER_MAX: Final = 262_144


def bound(records: OrderedDict[Any, Any], maximum: int) -> None:
    """Drop the oldest records beyond a maximum."""
    while len(records) > maximum:
        records.popitem(last=False)


class Shell:
    """What Receiver and Sender share: the channel's queues, introductions, quarantine, callbacks."""

    def __init__(
        self,
        self_id: PeerId,
        resources: SessionResources,
        config: SessionConfig | None,
        on_memory: Callable[[Any], None] | None,
    ) -> None:
        self.self_id = self_id
        self.config = config if config is not None else SessionConfig()
        self._transport = resources.transport
        self._channel = resources.channel
        self._clock = resources.clock
        self._arena = resources.arena
        self._copier: Copier = resources.copier if resources.copier is not None else HostCopier()
        idle = resources.copier_errors_prove_idle
        self._errors_prove_idle = resources.copier is None if idle is None else idle
        self._reports: Reports = resources.reports if resources.reports is not None else PlannerReports()
        self._memory_kind: MemoryKind = resources.memory_kind
        self._device_id = resources.device_id
        self._on_memory = on_memory
        self._lock = threading.RLock()
        self._outbox: dict[PeerId, deque[Message]] = {}
        self._introduced: set[PeerId] = set()
        self._agents: dict[PeerId, str] = {}
        self._incompatible: dict[PeerId, str] = {}
        self._events: list[SessionEvent] = []
        self._undelivered: deque[SessionEvent] = deque()
        self._quarantine = QuarantineLedger(self.config.quarantine_bytes_max)
        self._counters: Counter[str] = Counter()
        self._fatal = ""
        self._closed = False

    # -- introductions

    def introduce(self, peers: Sequence[PeerId]) -> None:
        """Make agents and queue the first frame for these peers now, rather than at the first transfer.

        Making an agent can take tens of milliseconds: call it at startup.
        """
        for peer in peers:
            self._introduce(peer, is_reply=False)

    def _introduce(self, peer: PeerId, *, is_reply: bool) -> None:
        if peer in self._introduced and not is_reply:
            return
        info = self._transport.agent_info(peer)
        self._introduced.add(peer)
        hello = Hello(
            PROTOCOL_VERSION,
            PROTOCOL_VERSION,
            self.self_id,
            self._transport.transport_class.key,
            info.name,
            info.metadata,
            is_reply,
        )
        with self._lock:
            self._queue(peer, hello)

    def _hello(self, peer: PeerId, hello: Hello) -> None:
        if hello.peer != peer:
            self._counters["foreign"] += 1
            return
        if not hello.version_min <= PROTOCOL_VERSION <= hello.version_max:
            self._incompatible[peer] = f"peer speaks versions {hello.version_min}..{hello.version_max}"
        elif hello.transport_key != self._transport.transport_class.key:
            self._incompatible[peer] = (
                f"peer's transport is {hello.transport_key!r}, ours {self._transport.transport_class.key!r}"
            )
        else:
            self._incompatible.pop(peer, None)
            try:
                self._transport.connect(peer, AgentInfo(hello.agent_name, hello.agent_metadata))
            except KVTransferError as error:
                self._incompatible[peer] = f"peer's agent was refused: {error}"
            else:
                self._agents[peer] = hello.agent_name
        if not hello.is_reply:
            self._introduce(peer, is_reply=True)

    # -- frames

    def _queue(self, peer: PeerId, message: Message) -> None:
        self._outbox.setdefault(peer, deque()).append(message)

    def _flush(self) -> None:
        """Hand queued frames to the channel; the lock is not held while it sends."""
        for peer in list(self._outbox):
            while True:
                with self._lock:
                    queue = self._outbox.get(peer)
                    if not queue:
                        self._outbox.pop(peer, None)
                        break
                    message = queue[0]
                try:
                    self._channel.send(peer, encode_message(message))
                except WouldBlock:
                    self._counters["blocked"] += 1
                    if len(queue) > self.config.frames_queued_max:
                        self._unreachable(peer, f"{len(queue)} frames wait for it")
                    break
                except ChannelError as error:
                    # It may have left: whatever it exposed stays exposed.
                    self._counters["channel_errors"] += 1
                    with self._lock:
                        if queue and queue[0] is message:
                            queue.popleft()
                    self._unreachable(peer, str(error))
                    break
                with self._lock:
                    if queue and queue[0] is message:
                        queue.popleft()
                self._counters["frames_sent"] += 1

    def _unreachable(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            queue = self._outbox.pop(peer, None)
            self._introduced.discard(peer)
            if queue:
                self._counters["frames_dropped"] += len(queue)
        self._peer_in_doubt(peer, f"control channel: {reason}")

    def _receive(self) -> None:
        for peer, frame in self._channel.poll(self.config.frames_per_poll_max):
            self._counters["frames_received"] += 1
            try:
                message = decode_message(frame)
            except RemoteProtocolError:
                self._counters["malformed"] += 1
                continue
            if isinstance(message, Hello):
                self._hello(peer, message)
            else:
                self._take(peer, message)

    # -- memory

    def _charge(self, byte_count: int, story: tuple[str, ...]) -> None:
        if not self._quarantine.charge(byte_count) and not self._fatal:
            self._fatal = (
                f"{self._quarantine.byte_count} bytes are quarantined, the budget is {self._quarantine.bytes_max}"
            )
            self._events.append(FatalDiagnosis(self._fatal, story))

    def _settle(self, event: SessionEvent) -> None:
        """Queue a physical end; it is delivered once, retried until the callback took it."""
        self._undelivered.append(event)

    def _deliver(self) -> None:
        """Deliver physical ends in order; one that its callback refuses does not hold up the others."""
        for _ in range(len(self._undelivered)):
            event = self._undelivered.popleft()
            if self._fatal and isinstance(event, MemoryReleased | SourceReleased):
                # Nothing more is released after a fatal diagnosis: the event stays undelivered, the memory owned.
                self._undelivered.append(event)
                continue
            if self._on_memory is not None:
                try:
                    self._on_memory(event)
                except Exception as error:  # noqa: BLE001 - a user's callback may raise anything; it is retried, never lost
                    self._counters["callback_retries"] += 1
                    self._last_callback_error = error
                    self._undelivered.append(event)
                    continue
            self._events.append(event)

    # -- to be provided

    def _take(self, peer: PeerId, message: Message) -> None:
        raise NotImplementedError

    def _peer_in_doubt(self, peer: PeerId, reason: str) -> None:
        raise NotImplementedError

    def _evidence(self, peer: PeerId, evidence: Evidence) -> None:
        raise NotImplementedError

    def _peers(self) -> set[PeerId]:
        raise NotImplementedError

    # -- peers

    def peer_died(self, peer: PeerId, evidence: str) -> None:
        """A peer's process ended, or can no longer be heard.

        Its operations are in doubt. ``PROCESS_REAPED`` is recorded as evidence: whether it proves anything depends on the
        transport's class (K2, K3).
        """
        if evidence not in (PeerEvidence.PROCESS_REAPED, PeerEvidence.CONNECTION_LOST):
            raise ValueError(f"unknown evidence {evidence!r}")
        with self._lock:
            self._outbox.pop(peer, None)
        self._peer_in_doubt(peer, f"peer {peer}: {evidence}")
        if evidence == PeerEvidence.PROCESS_REAPED:
            self._evidence(peer, Evidence.PEER_REAPED)

    def retire_peer(self, instance_id: str, generation: str) -> None:
        """Destroy the agent kept for that instance: every operation with it ends, and what its class allows is proven.

        Raises:
            TransportError: The agent could not be destroyed; nothing is proven, retry.
        """
        instance = (instance_id, generation)
        peers = [peer for peer in self._peers() if peer.instance == instance]
        for peer in peers:
            self._peer_in_doubt(peer, "peer retired")
        self._transport.destroy_agent(instance)
        for peer in peers:
            self._evidence(peer, Evidence.AGENT_DESTROYED)
        for peer in [each for each in self._introduced if each.instance == instance]:
            self._introduced.discard(peer)
            self._agents.pop(peer, None)

    def statistics(self) -> dict[str, int]:
        """Counters since construction; a copy."""
        with self._lock:
            return dict(self._counters) | {
                "quarantined_bytes": self._quarantine.byte_count,
                "quarantined_count": self._quarantine.count,
                "undelivered": len(self._undelivered),
                "frames_waiting": sum(len(queue) for queue in self._outbox.values()),
                "fatal": int(bool(self._fatal)),
            }

    @property
    def healthy(self) -> bool:
        return not self._fatal
