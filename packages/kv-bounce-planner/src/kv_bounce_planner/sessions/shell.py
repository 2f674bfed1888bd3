"""What Receiver and Sender share: peers and their introductions, the channel's queues, jobs, quarantine, callbacks.

Theory. A session object is one life: it draws a number when it is made, and every frame names the number of the session that
wrote it and of the one that it is meant for. A peer is known once both sides have each other's number (Hello), and what is
published is bound to that life of the peer: another session under the same name is another life, whatever made it, and both
sides learn of it with the first frame that reaches the wrong one.

A link that breaks is not a life that ends. While a link is away nothing new is published on it; when frames come through again,
both sides show their numbers first, and the receiver asks again for whatever it has not seen the end of: every message may
be repeated without harm. Only a link that stays away longer than its time puts the open operations in doubt.

A process that ended may still be heard: its last frames arrive after it was reported dead and its records are gone. So its name
is remembered with the number of its session. A hello under that name counts only if it is another session's and names ours,
after it was asked (``Stranger``, or our hello): so it heard us since, and is alive.

Memory that was registered after a peer was introduced is announced to it before the first message that names any of it
(``MemoryChanged``): the transport's version says when.

What is not ours (callbacks, copiers, transports, codecs, channels) may raise anything at any call. An error ends at most the
operation that it belongs to; an interrupt leaves its item in the queue and goes up. Deadlines are looked at in every poll,
whatever else failed in it. No callback of the host runs under the session's lock.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from kv_bounce_planner._errors import (
    ChannelError,
    KVTransferError,
    LocalProtocolError,
    RemoteProtocolError,
    TransfersOutstanding,
    WouldBlock,
)
from kv_bounce_planner.copies.gather import Copier, HostCopier
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions.config import SessionConfig, SessionResources
from kv_bounce_planner.sessions.events import (
    DrainReport,
    FatalDiagnosis,
    LinkLost,
    LinkRestored,
    MemoryReleased,
    PeerEvidence,
    PeerIntroduced,
    PeerRefused,
    PeerReplaced,
    SessionEvent,
    SourceReleased,
)
from kv_bounce_planner.sessions.identity import NO_SESSION, OperationIdentity, PeerId, draw_session
from kv_bounce_planner.sessions.ledgers import QuarantineLedger
from kv_bounce_planner.sessions.messages import (
    PROTOCOL_VERSION,
    Beat,
    BounceGrant,
    Doubt,
    Drained,
    Frame,
    Hello,
    MemoryChanged,
    Message,
    ReadOffer,
    ReadOver,
    ReceiveRequest,
    Refused,
    Sealed,
    Stranger,
    VersionMismatch,
    decode_frame,
    encode_message,
)
from kv_bounce_planner.sessions.proof import Evidence, TransportClass
from kv_bounce_planner.sessions.reports import PlannerReports, Reports
from kv_bounce_planner.sessions.states import IllegalTransition, ReceiveState, SendState
from kv_bounce_planner.transports.interface import (
    AgentInfo,
    ArrivedMark,
    JobProgress,
    LinkedChannel,
    LinkEvent,
    MemoryKind,
    TransferJob,
)

if TYPE_CHECKING:
    from kv_bounce_planner.planning.plan import WriterTransfer

#: Identities of ended transfers and requests that are remembered, so that a repetition is recognised (count).
OVER_MAX: Final = 262_144
#: Frames that were meant for another session are answered once per writer; so many writers are remembered (count).
STRANGERS_MAX: Final = 4096
#: Names of processes that ended, whose late frames are told from a new life's (count).
GONE_MAX: Final = 4096
#: Last words about operations that are kept, to be said again (count).
RECEIPTS_MAX: Final = 262_144

#: Messages that name memory of ours.
_NAMES_MEMORY = (ReceiveRequest, BounceGrant, ReadOffer)
#: States in which an operation waits for its plan.
_UNPLANNED = (SendState.HELD, ReceiveState.ASKED)
#: By the identity of a transport or channel: the session that polls it, the latest that was made over it (and keeps it alive).
_OWNERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
#: What is said about an operation's end.
LastWord = Sealed | Drained | Doubt | ReadOver

ItemT = TypeVar("ItemT")


class Open(Protocol):
    """Shell state of one transfer or request: around its core."""

    @property
    def core(self) -> shared.Core[Any, Any, Any]: ...

    @property
    def transfers(self) -> dict[OperationIdentity, WriterTransfer]: ...

    @property
    def begun(self) -> set[OperationIdentity]:
        """Whose jobs were, or were about to be, handed to the transport."""
        ...


OpenT = TypeVar("OpenT", bound=Open)


def bound(records: OrderedDict[Any, Any], maximum: int) -> None:
    """Drop the oldest records beyond a maximum."""
    while len(records) > maximum:
        records.popitem(last=False)


class PeerState(enum.StrEnum):
    INTRODUCING = "introducing"  # our Hello is on its way
    READY = "ready"
    REFUSED = "refused"  # one of the two sides does not talk to the other
    LOST = "lost"  # the link is away; the life on its other side may well go on


@dataclass(eq=False)
class PeerLife:
    """One life of a peer: what was published to it is bound to this object."""

    peer: PeerId
    state: PeerState = PeerState.INTRODUCING
    session: bytes = NO_SESSION
    agent: str = ""
    reason: str = ""
    outbox: deque[bytes] = field(default_factory=deque)
    #: The link was away: what was under way must be asked for again.
    relinked: bool = False
    lost_until_s: float | None = None
    #: The host said that its process is gone: nothing is tried on this life any more.
    dead: bool = False
    silent_s: float = 0.0
    #: What it reaches us over, given where it runs.
    transport: TransportClass | None = None
    #: Its agent's metadata as we loaded it (digest), and the version of our memory that it was told of.
    loaded: bytes = b""
    told_memory: int = -1

    @property
    def ready(self) -> bool:
        return self.state is PeerState.READY


@dataclass
class _Gone:
    """A name whose process ended: the session that it had (none, if it was never heard).

    ``asked``: something that only a living process can answer left since; if that was an answer to a hello, it is waited for
    until ``answer_until_s``, and then nothing stays of the link.
    """

    session: bytes
    asked: bool = False
    answer_until_s: float | None = None


class Shell(ABC, Generic[OpenT]):
    """Base of ``Receiver`` and ``Sender``."""

    def __init__(
        self,
        self_id: PeerId,
        resources: SessionResources,
        config: SessionConfig | None,
        on_memory: Callable[[Any], None] | None,
    ) -> None:
        self.self_id = self_id
        self.session = draw_session()
        self.config = config if config is not None else SessionConfig()
        self._transport = resources.transport
        self._channel = resources.channel
        self._links = resources.channel if isinstance(resources.channel, LinkedChannel) else None
        self._handshake = resources.handshake
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
        self._lives: dict[PeerId, PeerLife] = {}
        self._gone: OrderedDict[PeerId, _Gone] = OrderedDict()
        self._inbox: deque[tuple[PeerId, bytes]] = deque()
        self._link_news: deque[LinkEvent] = deque()
        self._lost: deque[PeerId] = deque()
        self._jobs: deque[JobProgress] = deque()
        self._marks: deque[ArrivedMark] = deque()
        self._resolves: deque[tuple[OpenT, OperationIdentity]] = deque()
        self._unfinished: deque[OpenT] = deque()  # what is being stepped, and what an interrupt left
        self._receipts: OrderedDict[OperationIdentity, LastWord] = OrderedDict()
        self._strangers: OrderedDict[tuple[PeerId, bytes], None] = OrderedDict()
        self._events: list[SessionEvent] = []
        self._undelivered: deque[SessionEvent] = deque()
        self._quarantine = QuarantineLedger(self.config.quarantine_bytes_max)
        self._counters: Counter[str] = Counter()
        self._fatal = ""
        self._closed = False
        self._polling = False
        self._beat_at_s: float | None = None
        #: The last error of something foreign that a poll contained, for logs and health pages.
        self.last_error: BaseException | None = None
        for resource in (resources.transport, resources.channel):
            _OWNERS[id(resource)] = self

    # -- one poll, and the end

    def poll(self) -> tuple[SessionEvent, ...]:
        """Progress everything, within bounds. Call it in every turn of the loop."""
        return self._run(self._phases)

    def close(self) -> None:
        """Admit nothing more and leave the channel.

        Raises:
            TransfersOutstanding: Memory is still owned; admission stays closed, everything else goes on; retry.
        """
        self._closed = True
        report = self.drain()
        if report.open:
            raise TransfersOutstanding(f"{len(report.open)} still own memory: {report.open[:3]}", report.open)
        self._channel.close()

    def _run(self, phases: Sequence[Callable[[], None]]) -> tuple[SessionEvent, ...]:
        if self._polling:
            raise LocalProtocolError("poll was called from a callback of this session's own poll")
        for resource in (self._transport, self._channel):
            if _OWNERS.get(id(resource)) is not self:
                raise LocalProtocolError(
                    f"a session that was made later works with the same {type(resource).__name__}: "
                    "what one of two sessions takes from it, the other never sees; each wants its own"
                )
        self._polling = True
        bug: IllegalTransition | None = None
        try:
            for phase in (self._perform_left, *phases):
                try:
                    phase()
                except IllegalTransition as error:  # ours: told after the other phases ran
                    bug = bug or error
                except Exception as error:  # noqa: BLE001 - see the theory: nothing foreign stops the other phases
                    self._contain(error)
            self._deliver()
        finally:
            self._polling = False
        if bug is not None:
            raise bug
        with self._lock:
            events, self._events = tuple(self._events), []
        return events

    def _contain(self, error: BaseException) -> None:
        self._counters["errors_contained"] += 1
        self.last_error = error

    def _guarded(self, call: Callable[[ItemT], object], item: ItemT) -> None:
        """Something foreign for one of several: its error does not keep the others waiting."""
        try:
            call(item)
        except Exception as error:  # noqa: BLE001 - see the theory
            self._contain(error)

    def _each(self, queue: deque[ItemT], limit: int, handle: Callable[[ItemT], None]) -> None:
        """Handle items in order; an error ends its item. An interrupt goes up and leaves it where it was: order is kept."""
        if not queue:
            return
        for _ in range(min(len(queue), limit)):
            item = queue[0]
            try:
                handle(item)
            except IllegalTransition:
                queue.popleft()
                raise
            except Exception as error:  # noqa: BLE001 - see the theory
                self._contain(error)
            queue.popleft()

    # -- introductions

    def introduce(self, peers: Sequence[PeerId]) -> None:
        """Make agents and queue the first frame for these peers now, rather than at the first transfer.

        Making an agent can take tens of milliseconds: call it at startup. ``PeerIntroduced`` says when both sides know each
        other.

        Raises:
            TransportError: No agent could be made.
        """
        for peer in peers:
            self._introduce(peer)

    def _introduce(self, peer: PeerId) -> PeerLife:
        life = self._lives.get(peer)
        if life is not None and life.state in (PeerState.READY, PeerState.INTRODUCING):
            return life
        if life is not None and life.state is PeerState.LOST and (self._links is not None or life.dead):
            return life  # the channel says when the link is back
        if life is None or life.state is PeerState.REFUSED:
            life = PeerLife(peer)
        else:
            life.state = PeerState.INTRODUCING
        frame = self._hello_frame(life, NO_SESSION, is_reply=False)
        with self._lock:
            self._lives[peer] = life
            life.outbox.append(frame)
            if peer in self._gone:
                self._gone[peer].asked = True
        return life

    def _hello_frame(self, life: PeerLife, target: bytes, *, is_reply: bool) -> bytes:
        version = self._transport.memory_version
        info = self._transport.agent_info(life.peer)
        life.told_memory = version
        ours = self._handshake
        hello = Hello(
            PROTOCOL_VERSION,
            PROTOCOL_VERSION,
            self.self_id,
            self._transport.transport_class.key,
            info.name,
            info.metadata,
            is_reply,
            ours.model,
            ours.dtype,
            ours.layer_total,
            ours.layout,
            self._transport.transport_class.host,
        )
        return encode_message(hello, self.session, target)

    def update_layout(self, layout: bytes) -> None:
        """This side's memory has another layout from now on: blocks were added, a pool was registered late.

        Peers learn the fingerprint with the first message that names any of it; one that plans with another refuses then.
        Register the memory with the transport before.

        Raises:
            ValueError: More than 32 bytes.
        """
        with self._lock:
            self._handshake = dataclasses.replace(self._handshake, layout=layout)
            for life in self._lives.values():
                life.told_memory = -1

    def _tell_memory(self, life: PeerLife) -> None:
        """Announce memory that came since the last time: on the same link, so before what names it."""
        version = self._transport.memory_version
        if life.told_memory == version:
            return
        info = self._transport.agent_info(life.peer)
        message = MemoryChanged(info.metadata, self._handshake.layout)
        life.outbox.append(encode_message(message, self.session, life.session))
        life.told_memory = version

    def _memory_changed(self, life: PeerLife, message: MemoryChanged) -> None:
        reason = self._objects_to_layout(life.peer, message.layout) or self._connect(
            life, AgentInfo(life.agent, message.agent_metadata)
        )
        if reason:
            self._refuse(life, reason)

    def _hello(self, peer: PeerId, frame: Frame, hello: Hello) -> None:
        if hello.peer != peer or frame.source == NO_SESSION:
            self._counters["foreign"] += 1
            return
        if peer in self._gone and not self._lives_again(peer, frame):
            return
        life = self._lives.get(peer)
        if frame.target not in (NO_SESSION, self.session):
            # It answers another session of our name: made before us, or living beside us.
            self._counters["other_session"] += 1
            if life is not None and life.session == frame.source:
                self._replaced(life, "it now talks to another session of this name")
            return
        known = life is not None and life.session == frame.source
        if life is not None and not known and life.session != NO_SESSION:
            self._replaced(life, "another session of its name has introduced itself")
            life = None
        if life is None:
            life = self._lives[peer] = PeerLife(peer)
        again = life.relinked or (known and not hello.is_reply)
        try:
            reason = self._objection(hello, life if known else None)
            if not reason:
                reason = self._connect(life, AgentInfo(hello.agent_name, hello.agent_metadata))
            reply = b"" if reason or hello.is_reply else self._hello_frame(life, frame.source, is_reply=True)
        except Exception as error:  # noqa: BLE001 - a host's look-up or a library: refused by name, tried again when it is wanted
            self._contain(error)
            reason, reply = f"it could not be introduced: {type(error).__name__}: {error}", b""
        life.session = frame.source
        if reason:
            self._refuse(life, reason)
            return
        life.agent = hello.agent_name
        life.transport = self._transport.transport_class.towards(hello.host)
        was, life.state, life.reason = life.state, PeerState.READY, ""
        life.lost_until_s, life.relinked, life.silent_s = None, False, 0.0
        if not hello.is_reply:
            if again:
                life.outbox.clear()  # what waited is asked for again below
            life.outbox.append(reply)
        with self._lock:
            if again:
                self._counters["links_restored"] += 1
                if was is not PeerState.READY:
                    self._events.append(LinkRestored(peer))
                self._ask_again(life)
            elif was is not PeerState.READY:
                self._events.append(PeerIntroduced(peer))
                self._met(life)

    def _lives_again(self, peer: PeerId, frame: Frame) -> bool:
        """Whether a hello under the name of a process that ended is a new life's. One that has not heard us is asked."""
        gone = self._gone[peer]
        if frame.source == gone.session:
            self._counters["of_the_dead"] += 1
            self._forget_link(peer)
            return False
        if frame.target != self.session or not gone.asked:
            self._counters["of_the_dead"] += 1
            gone.asked, gone.answer_until_s = True, self._clock() + self.config.introduction_timeout_s
            self._strangers.pop((peer, frame.source), None)  # asked each time: an answer may be lost with its link
            if not self._answer_stranger(peer, frame.source):
                self._forget_link(peer)
            return False
        del self._gone[peer]
        life = self._lives.get(peer)
        if life is not None and life.dead:
            self._replaced(life, "another process has taken its name")
        return True

    def _connect(self, life: PeerLife, info: AgentInfo) -> str:
        """Learn the peer's agent, or what is new of it. Returns why not, or nothing."""
        digest = hashlib.blake2b(info.name.encode() + b"\0" + info.metadata, digest_size=16).digest()
        if digest == life.loaded:
            return ""
        try:
            self._transport.connect(life.peer, info)
        except Exception as error:  # noqa: BLE001 - a library's, in any shape: this peer is refused by name
            return f"its agent was refused: {type(error).__name__}: {error}"
        life.loaded = digest
        return ""

    def _objection(self, hello: Hello, known: PeerLife | None) -> str:
        """Why this peer cannot be talked to, or nothing."""
        ours, peer = self._handshake, hello.peer
        if not hello.version_min <= PROTOCOL_VERSION <= hello.version_max:
            return f"versions {hello.version_min}..{hello.version_max} there, {PROTOCOL_VERSION} here"
        if not self._transport.transport_class.meets(hello.transport_key):
            return f"transport {hello.transport_key!r} there, {self._transport.transport_class.key!r} here"
        for name in ("model", "dtype", "layer_total"):
            theirs, mine = getattr(hello, name), getattr(ours, name)
            if theirs and mine and theirs != mine:
                return f"{name} is {theirs!r} there and {mine!r} here"
        different = self._objects_to_layout(peer, hello.layout)
        if different:
            return different
        if known is not None and known.agent and known.agent != hello.agent_name:
            return f"it claims the agent {hello.agent_name!r}, it was introduced with {known.agent!r}"
        return ""

    def _objects_to_layout(self, peer: PeerId, layout: bytes) -> str:
        expected = self._handshake.layouts(peer) if self._handshake.layouts is not None else b""
        if expected and layout and expected != layout:
            return f"its layout is {layout.hex()}, this side plans with {expected.hex()}"
        return ""

    def _refuse(self, life: PeerLife, reason: str) -> None:
        """Both sides know: nothing is published to it, and it is told why."""
        self._counters["peers_refused"] += 1
        with self._lock:
            life.outbox.clear()
            life.outbox.append(encode_message(Refused(reason[:500]), self.session, life.session))
        self._refused(life, reason)

    def _refused(self, life: PeerLife, reason: str) -> None:
        was_open = life.state is not PeerState.REFUSED
        life.state, life.reason = PeerState.REFUSED, reason
        with self._lock:
            if was_open:
                self._events.append(PeerRefused(life.peer, reason))
        self._peer_in_doubt(life.peer, f"peer {life.peer} is refused: {reason}")

    def _replaced(self, life: PeerLife, reason: str) -> None:
        """That life is over for us. What was published to it is in doubt; nothing it says any more counts."""
        self._counters["peers_replaced"] += 1
        with self._lock:
            if self._lives.get(life.peer) is life:
                del self._lives[life.peer]
            life.outbox.clear()
            self._events.append(PeerReplaced(life.peer, reason))
        self._peer_in_doubt(life.peer, f"peer {life.peer}: {reason}")

    # -- frames

    def _queue(self, peer: PeerId, message: Message) -> None:
        """Queue a message for a peer's present life. Without one, or while that shows itself again, it is dropped: its link's
        return asks again, in order. A message that went ahead would be newer than requests that were lost with the link.

        Raises:
            ValueError: The message is too large for a frame.
        """
        life = self._lives.get(peer)
        if life is None or life.session == NO_SESSION or life.state is not PeerState.READY:
            self._counters["frames_dropped"] += 1
            return
        if isinstance(message, _NAMES_MEMORY):
            self._tell_memory(life)
        life.outbox.append(encode_message(message, self.session, life.session))

    def _reply(self, peer: PeerId, message: LastWord) -> None:
        """Say how an operation ended, and keep it: it is said again to who asks again."""
        self._receipts[message.operation] = message
        bound(self._receipts, RECEIPTS_MAX)
        self._queue(peer, message)

    def _flush(self) -> None:
        """Hand queued frames to the channel; the lock is not held while it sends."""
        for life in list(self._lives.values()):
            while life.outbox:
                frame = life.outbox[0]
                try:
                    self._channel.send(life.peer, frame)
                except WouldBlock:
                    self._counters["blocked"] += 1
                    if len(life.outbox) > self.config.frames_queued_max:
                        self._link_lost(life, f"{len(life.outbox)} frames wait for it")
                    break
                except Exception as error:  # noqa: BLE001 - a ChannelError, or worse: it may have left, so what it exposed stays so
                    self._counters["channel_errors"] += 1
                    if not isinstance(error, ChannelError):
                        self._contain(error)
                    self._link_lost(life, str(error))
                    break
                with self._lock:
                    if life.outbox and life.outbox[0] is frame:
                        life.outbox.popleft()
                self._counters["frames_sent"] += 1

    def _receive(self) -> None:
        room = self.config.frames_per_poll_max - len(self._inbox)
        # What was taken from the channel stands in a queue before anything else can raise: it is there only once.
        self._inbox.extend(self._channel.poll(room) if room > 0 else ())
        if self._links is not None:
            self._link_news.extend(self._links.link_events())
        # A break is told before the frames of the link that came after it.
        self._each(self._link_news, len(self._link_news), self._link_event)
        self._each(self._inbox, self.config.frames_per_poll_max, self._take_frame)

    def _take_frame(self, item: tuple[PeerId, bytes]) -> None:
        peer, data = item
        self._counters["frames_received"] += 1
        try:
            frame = decode_frame(data)
        except VersionMismatch as error:
            self._counters["malformed"] += 1
            life = self._lives.get(peer)
            if life is not None and life.state is PeerState.INTRODUCING:
                self._refused(life, f"it speaks protocol version {error.version}, this side {PROTOCOL_VERSION}")
            return
        except RemoteProtocolError:
            self._counters["malformed"] += 1
            return
        message = frame.message
        if isinstance(message, Hello):
            self._hello(peer, frame, message)
            return
        life = self._lives.get(peer)
        if frame.target != self.session:
            self._counters["other_session"] += 1
            if frame.target != NO_SESSION and peer not in self._gone:
                self._answer_stranger(peer, frame.source)
        elif isinstance(message, Stranger):
            self._strange(life, frame.source)
        elif isinstance(message, Refused) and life is not None and life.session in (NO_SESSION, frame.source):
            self._refused(life, f"it refuses this side: {message.reason}")
        elif life is None or life.session != frame.source:
            # A life that is over, or that was never introduced: nothing it says counts.
            self._counters["other_session"] += 1
        else:
            life.silent_s = 0.0
            self._take_known(life, message)

    def _take_known(self, life: PeerLife, message: Message) -> None:
        match message:
            case Beat(asks):
                if asks:
                    with self._lock:
                        self._queue(life.peer, Beat(False))
            case MemoryChanged() if life.ready:
                self._memory_changed(life, message)
            case _ if life.ready:
                self._take(life, message)
            case _:
                self._counters["unexpected"] += 1

    def _strange(self, life: PeerLife | None, source: bytes) -> None:
        """We wrote to a session that is not there any more, or as one that is not believed to be alive."""
        if life is None:
            return
        if life.session not in (NO_SESSION, source):
            self._replaced(life, "another session lives there now")
        elif life.state is PeerState.INTRODUCING:
            frame = self._hello_frame(life, source, is_reply=False)  # names its number: we heard it
            with self._lock:
                life.outbox.append(frame)

    def _answer_stranger(self, peer: PeerId, source: bytes) -> bool:
        """Tell a session that does not know this one of it, once. Returns whether it was told."""
        if source == NO_SESSION or (peer, source) in self._strangers:
            return source != NO_SESSION
        self._strangers[(peer, source)] = None
        bound(self._strangers, STRANGERS_MAX)
        try:
            self._channel.send(peer, encode_message(Stranger(), self.session, source))
        except BaseException as error:
            self._strangers.pop((peer, source), None)  # not told: told at its next frame
            if not isinstance(error, WouldBlock | ChannelError):
                raise
            return False
        return True

    # -- links

    def _link_event(self, event: LinkEvent) -> None:
        life = self._lives.get(event.peer)
        if life is None:
            return
        if not event.up:
            self._link_lost(life, event.reason)
        elif life.state in (PeerState.LOST, PeerState.INTRODUCING):
            try:
                frame = self._hello_frame(life, life.session, is_reply=False)
            except Exception:
                # Up, and of no use without our introduction: given up, so that its return is told again.
                if self._links is not None:
                    self._links.reset(life.peer)
                raise
            life.state = PeerState.INTRODUCING
            with self._lock:
                life.outbox.clear()
                life.outbox.append(frame)

    def _link_lost(self, life: PeerLife, reason: str) -> None:
        """Frames may be lost. What is open stays open: its end may still come, and is asked for when the link is back."""
        with self._lock:
            self._counters["frames_dropped"] += len(life.outbox)
            life.outbox.clear()
            if life.state in (PeerState.LOST, PeerState.REFUSED):
                return
            again = life.state is PeerState.INTRODUCING and life.relinked
            life.state, life.reason = PeerState.LOST, reason
            if again:
                return  # another attempt that failed: told before
            self._counters["links_lost"] += 1
            life.relinked = life.session != NO_SESSION
            life.lost_until_s = self._clock() + self.config.link_timeout_s
            self._events.append(LinkLost(life.peer, reason))
        if self._links is None:
            # Nothing says that it will come back: the operations are in doubt now. If it does, they are asked for again.
            life.lost_until_s = None
            self._peer_in_doubt(life.peer, f"control channel: {reason}")

    def _watch_links(self) -> None:
        """Silence, and links that stay away."""
        now_s = self._clock()
        for life in list(self._lives.values()):
            if life.lost_until_s is not None and now_s >= life.lost_until_s:
                self._peer_in_doubt(
                    life.peer, f"the control link was away for {self.config.link_timeout_s:g} s: {life.reason}"
                )
                life.lost_until_s = None
        if self._beat_at_s is None:
            self._beat_at_s = now_s
        if now_s - self._beat_at_s < self.config.heartbeat_s:
            return
        self._beat_at_s = now_s
        for peer, gone in self._gone.items():
            if gone.answer_until_s is not None and now_s >= gone.answer_until_s:
                gone.answer_until_s = None
                self._forget_link(peer)
        interested = self._interested()
        for life in list(self._lives.values()):
            if life.state is PeerState.LOST and self._links is None and not life.dead and life.peer in interested:
                self._guarded(self._try_again, life)
            if not life.ready or life.peer not in interested or self.config.lease_s is None:
                life.silent_s = 0.0
                continue
            # At most one interval a poll: a process that stood still does not take its own pause for the peer's silence.
            life.silent_s += self.config.heartbeat_s
            if life.silent_s > self.config.lease_s:
                self._link_lost(life, f"nothing was heard from it for {self.config.lease_s:g} s")
                if self._links is not None:
                    self._guarded(self._links.reset, life.peer)
            else:
                with self._lock:
                    self._queue(life.peer, Beat(True))

    def _forget_link(self, peer: PeerId) -> None:
        """Nothing of a peer stays that nobody answers for."""
        for key in [each for each in self._strangers if each[0] == peer]:
            del self._strangers[key]
        if self._links is not None:
            self._guarded(self._links.disconnect, peer)

    def _try_again(self, life: PeerLife) -> None:
        """A channel that does not say when a link is back: show ourselves again, and see."""
        frame = self._hello_frame(life, life.session, is_reply=False)
        with self._lock:
            life.state = PeerState.INTRODUCING
            life.outbox.append(frame)

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
        """Deliver physical ends in order, outside the lock; one that its callback refuses does not hold up the others.

        An interrupt in the callback goes up and the end stays queued: it is delivered again by a later poll.
        """
        for _ in range(len(self._undelivered)):
            event = self._undelivered[0]
            if self._fatal and isinstance(event, MemoryReleased | SourceReleased):
                # Nothing more is released after a fatal diagnosis: the event stays undelivered, the memory owned.
                self._undelivered.rotate(-1)
                continue
            if self._on_memory is not None:
                try:
                    self._on_memory(event)
                except Exception as error:  # noqa: BLE001 - a user's callback may raise anything; it is retried, never lost
                    self._counters["callback_retries"] += 1
                    self.last_error = error
                    self._undelivered.rotate(-1)
                    continue
                except BaseException:
                    self._counters["callback_retries"] += 1
                    self._undelivered.rotate(-1)
                    raise
            with self._lock:
                self._undelivered.popleft()
                self._events.append(event)

    # -- jobs and planners

    def _step(self, record: OpenT, event: Any) -> None:
        """One event into a core, and its effects, in order; under the lock."""
        self._unfinished.append(record)  # until its effects were performed; the next poll does what an interrupt left
        record.core.step(event, self._clock())
        self._perform_all(record)
        self._unfinished.pop()

    def _perform_all(self, record: OpenT) -> None:
        core = record.core
        while (found := core.next_effect()) is not None:
            effect, told = found
            once = isinstance(effect, self._once)
            if once:  # ticked off before: what an interrupt breaks off in the middle of it is not performed again
                core.told = told
            error: Exception | None = None
            try:
                self._perform(record, effect)
            except Exception as raised:  # noqa: BLE001 - a foreign error in one effect does not lose the others
                error = raised
            if not once:
                core.told = told
            if isinstance(error, LocalProtocolError):
                raise error
            if error is not None:
                self._contain(error)

    def _perform_left(self) -> None:
        with self._lock:
            while self._unfinished:
                self._perform_all(self._unfinished[0])
                self._unfinished.popleft()

    def _step_all(self, event: Any) -> None:
        with self._lock:
            for record in list(self._open()):
                self._step(record, event)

    def _progress(self) -> None:
        """What the transport says once stands in queues before anything else can raise."""
        progress = self._transport.poll()
        self._counters["malformed"] += progress.malformed
        self._jobs.extend(progress.jobs)
        self._marks.extend(progress.marks)
        self._lost.extend(progress.lost)
        self._each(self._jobs, len(self._jobs), self._job_progressed)
        self._each(self._marks, len(self._marks), self._mark)
        self._each(self._lost, len(self._lost), lambda peer: self._peer_in_doubt(peer, "transport lost the peer"))

    def _job_progressed(self, progress: JobProgress) -> None:
        with self._lock:
            record = self._of(progress.operation)
            if record is not None:
                self._step(record, shared.Progressed(progress))
            if progress.state in ("done", "stopped"):
                self._transport.forget(progress.operation)  # last: whatever the library says, the operation has ended

    def _begin(
        self, record: OpenT, operation: OperationIdentity, state: enum.Enum, build: Callable[[], TransferJob]
    ) -> None:
        """Hand a job to the transport, outside the lock: what builds it may be the user's."""
        if operation in record.begun and (
            record.core.state_of(operation) is not state or operation in self._transport.active()
        ):
            return  # an interrupt came between handing it over and noting that
        if record.core.state_of(operation) is not state:
            self._never_begun(record, operation, "stopped", "stopped before it began")
            return
        record.begun.add(operation)
        try:
            self._transport.start(build())
        except Exception as error:  # noqa: BLE001 - a codec's or a library's: nothing of this job was handed over
            self._never_begun(record, operation, "error", f"{type(error).__name__}: {error}")

    def _never_begun(self, record: OpenT, operation: OperationIdentity, state: Any, detail: str) -> None:
        with self._lock:
            self._step(record, shared.Progressed(JobProgress(operation, 0, 0, 1, state, detail)))

    def _resolve(self) -> None:
        """The host's planner, outside the lock."""
        self._each(self._resolves, len(self._resolves), self._resolve_one)

    def _resolve_one(self, item: tuple[OpenT, OperationIdentity]) -> None:
        record, operation = item
        if record.core.state_of(operation) not in _UNPLANNED:
            return  # it is over: the host may have taken back what a planner would look at
        reason, wants = "", False
        try:
            wants = self._plan(record, operation)
        except Exception as error:  # noqa: BLE001 - a planner's failure of any kind ends this operation, nothing begun
            reason = str(error) if isinstance(error, _AnotherPlan) else f"{type(error).__name__}: {error}"
            self._counters["resolve_failed"] += not isinstance(error, _AnotherPlan)
        with self._lock:
            self._step(record, shared.Resolved(operation, wants, reason))

    def _keep_plan(self, record: OpenT, request: ReceiveRequest, transfer: WriterTransfer) -> None:
        """Take a plan in, if it is the one that the receiver asked for. After publication a doubt fails, never adapts."""
        if transfer.total_bytes != request.byte_count:
            raise _AnotherPlan(
                f"the plan moves {transfer.total_bytes} bytes, the receiver expects {request.byte_count}"
            )
        if request.plan_digest and transfer.writer.digest != request.plan_digest:
            raise _AnotherPlan("the two sides derived different plans")
        record.transfers[request.operation] = transfer

    # -- to be provided

    #: Effects that are not performed twice (some step their core again); the others change nothing the second time, or say
    #: the same once more.
    _once: tuple[type, ...] = ()

    @property
    @abstractmethod
    def _phases(self) -> tuple[Callable[[], None], ...]:
        """What one poll does, in order."""

    @abstractmethod
    def drain(self) -> DrainReport:
        """What is still owned."""

    @abstractmethod
    def _perform(self, record: OpenT, effect: Any) -> None:
        """Do what that record's core wants; under the lock."""

    @abstractmethod
    def _open(self) -> Iterable[OpenT]:
        """Every transfer or request that has a record."""

    @abstractmethod
    def _of(self, operation: OperationIdentity) -> OpenT | None:
        """The record that has this operation."""

    @abstractmethod
    def _plan(self, record: OpenT, operation: OperationIdentity) -> bool:
        """Ask the planner and keep its answer. Returns whether a bounce region is wanted."""

    def _mark(self, arrived: ArrivedMark) -> None:
        """A notification came in: only receivers believe any."""

    @abstractmethod
    def _take(self, life: PeerLife, message: Message) -> None:
        """A message of a life that was introduced."""

    def _ask_again(self, life: PeerLife) -> None:
        """A link is back: whoever exposed memory asks what became of it."""
        self._step_all(shared.LinkReturned(life.peer))

    def _met(self, life: PeerLife) -> None:
        """A life of a peer was introduced that was not known before."""

    @abstractmethod
    def _interested(self) -> set[PeerId]:
        """Peers of which an end is awaited."""

    def _peer_in_doubt(self, peer: PeerId, reason: str) -> None:
        with self._lock:
            self._counters["peers_in_doubt"] += 1
            self._step_all(shared.PeerInDoubt(peer, reason))

    def _peer_gone(self, peer: PeerId, reason: str) -> None:
        """Whatever waits to be published to that peer waits in vain."""

    def _evidence(self, peer: PeerId, evidence: Evidence) -> None:
        try:
            self._progress()  # an error that the agent's end caused comes before the proof that it is over
        except Exception as error:  # noqa: BLE001 - a library's; the proof stands all the same
            self._contain(error)
        self._step_all(shared.PeerEvidenced(peer, evidence))

    @abstractmethod
    def _peers(self) -> set[PeerId]:
        """Every peer that has a life here, or an operation."""

    def _peer_retired(self, instance: tuple[str, str]) -> None:
        """Drop what is remembered about the peers of an instance."""

    # -- peers

    def peer_died(self, peer: PeerId, evidence: str) -> None:
        """A peer's process ended, or can no longer be heard.

        Its operations are in doubt. ``PROCESS_REAPED`` is recorded as evidence: whether it proves anything depends on the
        transport's class. Where the class needs our agent's end as well (tcp, RDMA), ``retire_peer`` brings it.
        """
        if evidence not in (PeerEvidence.PROCESS_REAPED, PeerEvidence.CONNECTION_LOST):
            raise ValueError(f"unknown evidence {evidence!r}")
        with self._lock:
            life = self._lives.get(peer)
            if life is not None:
                life.outbox.clear()
                life.relinked = life.session != NO_SESSION
                life.state, life.reason, life.lost_until_s = PeerState.LOST, evidence, None
                life.dead = evidence == PeerEvidence.PROCESS_REAPED
            if evidence == PeerEvidence.PROCESS_REAPED:
                self._gone[peer] = _Gone(life.session if life is not None else NO_SESSION)
                self._gone.move_to_end(peer)
                bound(self._gone, GONE_MAX)
        self._peer_in_doubt(peer, f"peer {peer}: {evidence}")
        if evidence == PeerEvidence.PROCESS_REAPED:
            self._peer_gone(peer, f"peer {peer} has died")
            self._evidence(peer, Evidence.PEER_REAPED)

    def retire_peer(self, instance_id: str, generation: str) -> None:
        """Destroy the agent kept for that instance: every operation with it ends, and what its class allows is proven.

        Nothing of these peers stays: agent, link, queues, records. A peer that comes back is introduced anew.

        Raises:
            TransportError: The agent could not be destroyed; nothing is proven, retry.
        """
        instance = (instance_id, generation)
        peers = [peer for peer in self._peers() if peer.instance == instance]
        for peer in peers:
            self._peer_in_doubt(peer, "peer retired")
            self._peer_gone(peer, f"peer {peer} is retired")
        evidences = self._transport.destroy_agent(instance)
        for peer in peers:
            for evidence in sorted(evidences):
                self._evidence(peer, evidence)
        with self._lock:
            for peer in [each for each in self._lives if each.instance == instance]:
                del self._lives[peer]
            for key in [each for each in self._strangers if each[0].instance == instance]:
                del self._strangers[key]
            self._peer_retired(instance)
        if self._links is not None:
            for peer in peers:
                self._guarded(self._links.disconnect, peer)

    def statistics(self) -> dict[str, int]:
        """Counters since construction; a copy."""
        with self._lock:
            return dict(self._counters) | {
                "quarantined_bytes": self._quarantine.byte_count,
                "quarantined_count": self._quarantine.count,
                "undelivered": len(self._undelivered),
                "frames_waiting": sum(len(life.outbox) for life in self._lives.values()),
                "peers": len(self._lives),
                "fatal": int(bool(self._fatal)),
            }

    @property
    def healthy(self) -> bool:
        return not self._fatal

    def peers(self) -> dict[PeerId, str]:
        """The peers that are known, and how things stand with each: ``PeerState`` and why, for health pages."""
        return {
            life.peer: f"{life.state.value}: {life.reason}" if life.reason else life.state.value
            for life in self._lives.values()
        }


class _AnotherPlan(KVTransferError):
    """A plan that is not the one that was asked for: told in its own words."""


__all__ = ["KVTransferError", "PeerLife", "PeerState", "Shell", "bound"]
