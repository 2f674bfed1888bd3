"""One seed: its shape and chance, the links, the fabric that moves KV, and the instances at their addresses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_bounce_planner.sessions import BounceArena, PeerId
from kv_bounce_planner.sessions.proof import WriteExecutor
from kv_bounce_planner.testing import FakeNetwork, FakeWorld
from meta_executor.config import SyntheticConfig
from simulation.instance import Instance, Rank


@dataclass(frozen=True)
class Shape:
    """What a seed builds."""

    style: str
    contexts: int
    generations: int
    stages: int
    generation_ranks: int
    context_blocks: int
    generation_blocks: int
    block_tokens: int
    bounce: bool
    reuse: bool
    lease_s: float | None
    executor: WriteExecutor
    faults: int

    @staticmethod
    def of(chance: random.Random) -> Shape:
        return Shape(
            style=chance.choice(("context_first", "generation_first")),
            contexts=chance.choice((1, 1, 2)),
            generations=chance.choice((1, 1, 2)),
            stages=chance.choice((1, 2, 3)),
            generation_ranks=chance.choice((1, 2)),
            context_blocks=chance.choice((12, 24, 64)),
            generation_blocks=chance.choice((16, 32, 64)),
            block_tokens=4,
            bounce=chance.random() < 0.3,
            reuse=chance.random() < 0.4,
            lease_s=chance.choice((None, None, 0.05)),
            executor=chance.choice((WriteExecutor.RECEIVER, WriteExecutor.SENDER)),
            faults=chance.choice((0, 1, 2, 4)),
        )


class _Network(FakeNetwork):
    """Control links; who gets a frame is woken."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    def _send(self, source: PeerId, target: PeerId, frame: bytes) -> None:
        super()._send(source, target, frame)
        self.log.clear()
        self._site.rank_of[target].ring()


class Site:
    """What a seed decides on, and what its instances stand in."""

    def __init__(self, seed: int, say: Callable[[str], object]) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - replayable, not secret
        self.shape = Shape.of(self.chance)
        self.model = SyntheticConfig(layer_count=3, kv_head_count=1, head_dim=2, vocab_size=997)
        self.late = self.chance.choice((0.0, 0.0, 0.05))
        self.world = FakeWorld(executor=self.shape.executor, landing=self._landing)
        self.network = _Network(self)
        self.gone: set[str] = set()
        self.rank_of: dict[PeerId, Rank] = {}
        self.at: dict[str, Instance] = {}
        self.everyone: list[Instance] = []
        self.severed: set[tuple[PeerId, PeerId]] = set()
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self._say = say
        self._lifetimes: Counter[str] = Counter()
        self._arenas: list[Any] = []
        self._landing_at: dict[tuple[Any, int], float] = {}
        self.broken: list[BaseException] = []
        self._loop = asyncio.get_running_loop()

    # -- what the parts ask for

    def now_s(self) -> float:
        return self._loop.time()

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now_s():9.4f} {what}")
        self._say(self.story[-1])

    def delay(self) -> float:
        """One way between the front and an instance (s)."""
        return self.chance.uniform(0.0001, 0.002) if self.chance.random() > 0.02 else self.chance.uniform(0.01, 0.3)

    def agreement_delay(self, _source: int, _target: int) -> float:
        return self.chance.uniform(0.0, 0.0005) if self.chance.random() > 0.03 else self.chance.uniform(0.001, 0.05)

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        self._loop.call_later(delay_s, call)

    def later(self, end: Callable[[], None]) -> None:
        """A step ends after a while; who waits for it is woken by its own callback."""
        self.after(self.chance.uniform(0.0002, 0.004), end)

    def arena(self) -> BounceArena | None:
        if not self.shape.bounce:
            return None
        buffer = np.zeros(1 << 16, np.uint8)
        self._arenas.append(buffer)
        return BounceArena(self.world.add_buffer(buffer), buffer.nbytes)

    def connect(self, receiver: PeerId) -> Callable[[PeerId, str], None]:
        """Links to processes that have ended already are never made."""

        def connect(peer: PeerId, _address: str) -> None:
            if self.rank_of[peer].process in self.gone:
                self.sever(receiver, peer)

        return connect

    def _landing(self, job: Any, part: int) -> str:
        """Late in a seed's own measure: a part lands when its time has come."""
        if not self.late:
            return "land"
        key = (job.operation, part)
        due_s = self._landing_at.setdefault(key, self.now_s() + self.chance.uniform(0.0, self.late))
        return "land" if self.now_s() >= due_s else "hold"

    def driven(self, task: asyncio.Task[None]) -> None:
        """A rank's loop raises nothing: that is a bug of the product."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.broken.append(error)

    # -- instances, and the links between them

    def begin(self, owner_id: str, role: str) -> Instance:
        """The next lifetime of an instance, at its address."""
        instance = Instance(self, owner_id, role, self._lifetimes[owner_id])
        self._lifetimes[owner_id] += 1
        self.at[f"http://{owner_id}"] = instance
        self.everyone.append(instance)
        return instance

    def sever(self, one: PeerId, other: PeerId) -> None:
        key = (min(one, other), max(one, other))
        if key not in self.severed:
            self.severed.add(key)
            self.network.sever(one, other)
            self.rank_of[one].ring()
            self.rank_of[other].ring()

    def heal(self, one: PeerId, other: PeerId) -> None:
        key = (min(one, other), max(one, other))
        if key in self.severed and not {self.rank_of[one].process, self.rank_of[other].process} & self.gone:
            self.severed.discard(key)
            self.network.heal(one, other)
            self.rank_of[one].ring()
            self.rank_of[other].ring()
