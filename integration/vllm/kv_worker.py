"""One rank's KV session in a thread of its own, as commands and results; no vLLM in here.

An engine polls its connector only in its steps, and a peer wants to be answered between them: so a thread owns session,
transport and channel. The engine's thread hands commands over and takes results. What a result says of memory is proven.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

import kv_bounce_planner as kv
from kv_bounce_planner.sessions import events

log = logging.getLogger(__name__)
#: Between two polls: with bytes under way or something just happened, with something lent or awaited, and with nothing open.
BUSY_S, WAITING_S, IDLE_S = 0.0003, 0.001, 0.005
#: Turns in which nothing happened before what is open counts as waiting (count).
STILL_TURNS = 64


class Source(msgspec.Struct, frozen=True):
    """A prefilling rank, as the answer to a prefill names it."""

    peer: kv.PeerId
    address: str
    process: kv.ProcessIdentity
    layout: bytes


class Ask(msgspec.Struct, frozen=True):
    """What a decoding rank sends in its request: ``operations`` is how many of its instance ask this source."""

    process: kv.ProcessIdentity
    operations: Annotated[int, msgspec.Meta(ge=1)]
    source: bytes
    target: bytes
    blocks: bytes


class Serve(NamedTuple):
    """Prefill is over: lend these blocks to whoever asks for this transfer."""

    request_id: str
    transfer_id: int
    blocks: tuple[int, ...]


class Fetch(NamedTuple):
    """Fill these blocks, which begin with token ``first``, with a prompt's KV up to token ``end``."""

    request_id: str
    transfer_id: int
    sources: str
    blocks: tuple[int, ...]
    first: int
    end: int


class Abandon(NamedTuple):
    """The request ended before its transfer."""

    request_id: str
    transfer_id: int


@dataclass
class Results:
    """Request ids: whose source is free, whose destination is free to use, whose KV did not come."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Settings:
    """``kv_connector_extra_config``: ``lend_timeout_s`` is how long a source waits to be asked for."""

    host: str = "127.0.0.1"
    tls: str | None = None
    bounce_bytes: int = 256 << 20
    lend_timeout_s: float = 60.0
    operation_timeout_s: float = 60.0
    link_timeout_s: float = 10.0

    def session(self) -> kv.SessionConfig:
        """Bounds of the session."""
        return kv.SessionConfig(
            introduction_timeout_s=self.link_timeout_s,
            operation_timeout_s=self.operation_timeout_s,
            link_timeout_s=self.link_timeout_s,
        )


@lru_cache(256)
def _instance(encoded: bytes) -> kv.InstanceLayout:
    return kv.InstanceLayout.from_json(encoded)


@lru_cache(256)
def _layout(encoded: bytes) -> kv.KVLayout:
    return kv.decode_layout(encoded)


def open_resources(me: kv.PeerId, layout: kv.KVLayout, key: bytes, settings: Settings) -> kv.SessionResources:
    """NIXL and ZeroMQ, the cache and a bounce region registered."""
    bounce = np.zeros(settings.bounce_bytes, np.uint8)
    transport = kv.NixlTransport(me, config=kv.NixlConfig(tls=settings.tls))
    regions = [kv.MemoryRegion(address, size) for address, size in layout.regions()]
    transport.register([*regions, kv.MemoryRegion(bounce.ctypes.data, bounce.nbytes)])
    arena = kv.BounceArena.of(bounce)
    return kv.SessionResources(transport, kv.ZmqControlChannel(me, key, f"tcp://{settings.host}:*"), arena=arena)


class KvWorker(ABC):
    """Base of both sides: ``submit`` and ``results`` from the engine's thread, ``turn`` from the session's."""

    def __init__(self, session: Any, layout: kv.KVLayout, resources: kv.SessionResources, settings: Settings) -> None:
        self.session, self.layout, self.resources, self.settings = session, layout, resources, settings
        self.me: kv.PeerId = session.self_id
        self._commands: deque[Serve | Fetch | Abandon] = deque()
        self._lock = threading.Lock()
        self._results = Results()
        self._wake, self._stopping, self._still = threading.Event(), False, 0
        self._error: BaseException | None = None
        self._process = kv.ProcessIdentity.own()
        self._keeper = kv.PeerKeeper(self.session, resources.channel)
        self._thread = threading.Thread(target=self._run, name="kv-session", daemon=True)

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def submit(self, command: Serve | Fetch | Abandon) -> None:
        """Hand a command over."""
        self._commands.append(command)
        self._wake.set()

    def results(self) -> Results:
        """What happened since the last call. Raises what ended the session's thread."""
        if self._error is not None:
            raise RuntimeError("the KV session has ended") from self._error
        with self._lock:
            found, self._results = self._results, Results()
        return found

    def stop(self) -> None:
        """End the thread, and the session unless memory is still owned: then it ends with the process."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        try:
            self.session.close()
        except kv.TransfersOutstanding as error:
            log.warning("left to the end of the process: %s", error)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self.turn()
                self._wake.wait(self.pause_s())
                self._wake.clear()
        except BaseException as error:
            log.exception("the KV session ends")
            self._error = error

    def pause_s(self) -> float:
        """How long to wait before the next turn: a prefill of seconds is not to be paid for with a third of a core."""
        if self.resources.transport.active():
            return BUSY_S
        if not self.session.drain().open:
            return IDLE_S
        return BUSY_S if self._still < STILL_TURNS else WAITING_S

    def turn(self) -> None:
        """Commands, then one poll, then what it told."""
        self._still += 1
        while self._commands:
            self._still = 0
            self._apply(self._commands.popleft())
        for event in self._keeper.poll():
            self._still = 0
            match event:
                case events.FatalDiagnosis(reason):
                    raise RuntimeError(f"no memory is given back any more: {reason}")
                case events.MemoryQuarantined(reason=reason) | events.SourceQuarantined(reason=reason):
                    log.error("blocks of request %s stay out of use: %s", event.claim, reason)
                case _:
                    self._told(event)
        self._tidy()

    def _say(self, *, sent: str | None = None, received: str | None = None, failed: str | None = None) -> None:
        with self._lock:
            for name, request_id in (("sent", sent), ("received", received), ("failed", failed)):
                if request_id is not None:
                    getattr(self._results, name).add(request_id)

    @abstractmethod
    def _apply(self, command: Any) -> None: ...

    @abstractmethod
    def _told(self, event: kv.SessionEvent) -> None: ...

    @abstractmethod
    def _tidy(self) -> None:
        """At the end of each turn."""


class Producer(KvWorker):
    """The prefilling side: writes what it is asked for, once its prefill is over."""

    session: kv.Sender

    def __init__(
        self, me: kv.PeerId, layout: kv.KVLayout, resources: kv.SessionResources, settings: Settings = Settings()
    ) -> None:
        model = kv.DEFAULT_MODELS["tcp" if settings.tls == "tcp" else "cma"]
        session = kv.Sender(
            me,
            resources,
            settings.session(),
            prefers_bounce=lambda _, transfer: kv.choose_tier(transfer, model).tier is kv.Tier.BOUNCE,
        )
        super().__init__(session, layout, resources, settings)
        self._lent_until_s: dict[kv.RequestKey, float] = {}
        self._asked: dict[kv.OperationIdentity, Ask] = {}
        self._peers: dict[kv.OperationIdentity, kv.PeerId] = {}

    def source(self) -> Source:
        """How a decoding rank finds this one."""
        return Source(self.me, self.resources.channel.address, self._process, kv.encode_layout(self.layout))

    def _apply(self, command: Serve | Abandon) -> None:
        request = kv.RequestKey(command.transfer_id)
        if isinstance(command, Abandon):
            try:
                self.session.fail(request, "the prefill was abandoned")
            except kv.KVTransferError as error:  # too many are open: whoever asks for it is told by its own time-out
                log.warning("request %s: nobody is told that it was abandoned: %s", command.request_id, error)
            return
        try:
            self.session.ready(request, partial(self._resolve, command.blocks), claim=command.request_id)
        except kv.KVTransferError as error:  # this transfer was served before, or too many are open: nothing was lent
            log.warning("request %s is not served: %s", command.request_id, error)
            self._say(sent=command.request_id)
            return
        self._lent_until_s[request] = self.resources.clock() + self.settings.lend_timeout_s

    def _resolve(self, blocks: Sequence[int], request: kv.ReceiveRequest) -> kv.WriterTransfer:
        ask = msgspec.msgpack.decode(request.payload, type=Ask)
        self._asked[request.operation] = ask
        source = _instance(ask.source)
        if source.ranks[self.me.rank] != self.layout:
            raise ValueError("this rank's memory is not what the receiver planned with")
        table, tokens = kv.decode_blocks(ask.blocks)
        held = kv.RequestBlocks({group.group_id: kv.BlockTable(np.asarray(blocks)) for group in self.layout.groups})
        transfer = kv.plan_writer(source, self.me.rank, held, _layout(ask.target), table, tokens)
        if transfer is None:
            raise ValueError("nothing is to be written")
        return transfer

    def _told(self, event: kv.SessionEvent) -> None:
        match event:
            case events.ReceiveRequested(_, operation, peer):
                self._peers[operation] = peer
            case events.OperationDone(_, operation):
                self._peers.pop(operation, None)
            case events.OperationFailed(_, operation, disposition, reason):
                log.warning("%s %s: %s", operation, disposition, reason)
                self._peers.pop(operation, None)
            case events.RequestServed(request):
                self.session.seal(request)
            case events.SourceReleased(request, request_id):
                self._lent_until_s.pop(request, None)
                self._say(sent=request_id)

    def _tidy(self) -> None:
        while self._asked:
            operation, ask = self._asked.popitem()
            self.session.expect(operation.request, ask.operations)
            if operation in self._peers:
                self._keeper.watch(self._peers[operation], ask.process)
        now_s = self.resources.clock()
        for request in [each for each, until_s in self._lent_until_s.items() if now_s >= until_s]:
            del self._lent_until_s[request]
            self.session.seal(request)


class Consumer(KvWorker):
    """The decoding side: owns blocks until what may still land in them is proven to be over.

    Args:
        head_total, ranks: Of the model and of this instance: with them a rank knows how many of its own ask one source.
    """

    session: kv.Receiver

    def __init__(
        self,
        me: kv.PeerId,
        layout: kv.KVLayout,
        resources: kv.SessionResources,
        settings: Settings = Settings(),
        *,
        head_total: int,
        ranks: int,
    ) -> None:
        super().__init__(kv.Receiver(me, resources, settings.session()), layout, resources, settings)
        self._heads, self._ranks = head_total, ranks
        self._open: dict[kv.TransferIdentity, tuple[str, float]] = {}
        #: Of the newest transfers: seconds until their memory was free to use, bytes, tiers.
        self.timings: deque[tuple[str, float, int, tuple[str, ...]]] = deque(maxlen=4096)

    def _apply(self, command: Fetch | Abandon) -> None:
        if isinstance(command, Abandon):
            self.session.cancel(self._identity(command.transfer_id), "the request was abandoned")
            return
        try:
            self._fetch(command)
        except (kv.KVTransferError, msgspec.MsgspecError, ValueError, OSError) as error:  # before anything was exposed
            log.warning("request %s gets no KV: %s", command.request_id, error)
            self._say(failed=command.request_id, received=command.request_id)

    def _identity(self, transfer_id: int) -> kv.TransferIdentity:
        return kv.TransferIdentity(transfer_id, 0, self.me.generation, self.me.rank)

    def _fetch(self, fetch: Fetch) -> None:
        sources = msgspec.json.decode(fetch.sources, type=list[Source])
        if not sources:
            raise ValueError("no source is named")
        layouts = tuple(_layout(each.layout) for each in sources)
        if not all(layout.groups for layout in layouts):
            raise ValueError("a source has no KV")
        instance = kv.InstanceLayout(sources[0].peer.instance_id, layouts, pp_size=len(layouts))
        # Whole blocks where both sides have them: beyond a prompt's end lies what nobody reads, and one piece costs less.
        sizes = (layouts[0].groups[0].block_tokens, self.layout.groups[0].block_tokens)
        tokens = kv.TokenRange(fetch.first, min(-(-fetch.end // size) * size for size in sizes))
        table = kv.BlockTable(np.asarray(fetch.blocks), fetch.first)
        blocks = kv.RequestBlocks({group.group_id: table for group in self.layout.groups})
        plan = kv.plan_destination(instance, self.layout, blocks, tokens)
        target, encoded = kv.encode_layout(self.layout), kv.encode_blocks(blocks, tokens)
        operations = []
        for rank, writer in plan.writers.items():
            peer = sources[rank].peer
            self._keeper.meet(peer, sources[rank].address, sources[rank].process)
            ask = Ask(self._process, self._askers(layouts[rank]), instance.to_json(), target, encoded)
            fits = writer.total_bytes <= self.settings.bounce_bytes
            tier, payload = "bounce" if fits else "direct", msgspec.msgpack.encode(ask)
            operations.append(kv.ExpectedOperation(peer, writer.total_bytes, payload, writer, tier))
        identity = self._identity(fetch.transfer_id)
        self.session.open(identity, operations, claim=fetch.request_id, blocks=fetch.blocks)
        self._open[identity] = fetch.request_id, self.resources.clock()

    def _askers(self, source: kv.KVLayout) -> int:
        heads = {name // 2 % self._heads for name in source.groups[0].layer_ids}
        return len({head * self._ranks // self._heads for head in heads})

    def _tidy(self) -> None:
        """Nothing is left between turns."""

    def _told(self, event: kv.SessionEvent) -> None:
        match event:
            case events.TransferSucceeded(identity, tiers, byte_count):
                request_id, began_s = self._open[identity]
                took_s = self.resources.clock() - began_s
                self.timings.append((request_id, took_s, byte_count, tuple(tier for _, tier, _ in tiers)))
            case events.TransferFailed(identity, reason):
                log.warning("request %s gets no KV: %s", self._open[identity][0], reason)
                self._say(failed=self._open[identity][0])
            case events.MemoryReleased(identity, request_id):
                del self._open[identity]
                self._say(received=request_id)
