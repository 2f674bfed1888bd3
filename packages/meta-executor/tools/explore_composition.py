# ruff: noqa: T201
"""Every interleaving, at small scope, of the whole composition: agreement x sessions x scheduler x two instances.

The model is the product: real loops, desks, transceivers, sender and receiver cores, agreement cores, over in-process wires. A
transition gives one rank one iteration, or lets the outside world submit a leg or cancel a request. States are compared by a
fingerprint of everything that is not a counter, a clock or a story, and reached by replaying their shortest path, so nothing
needs to be copied. In every state the books are proved and the invariants below hold; a state that nothing can leave must be
the end: every client told once, every block back, all ranks alike.

    python packages/meta-executor/tools/explore_composition.py                # the scopes below
    python packages/meta-executor/tools/explore_composition.py --walks-only   # random paths alone, until one fails
    python packages/meta-executor/tools/explore_composition.py --states 2000 --walks 100
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import random
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import msgspec
import numpy as np

from meta_executor.engine.base import KVMemory, ModelInfo, StageSpec, StepInput, StepOutput
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.ownership import Leg, State
from meta_executor.executor.testing import Pair, PairConfig
from meta_executor.executor.transceiver import AUX_BYTES


class Memory:
    """The same arrays, in the same order, for every replay: so addresses do not tell two replays of one path apart."""

    def __init__(self) -> None:
        self._arrays: list[Any] = []
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def take(self, shape: tuple[int, ...], kind: Any) -> Any:
        while self._next < len(self._arrays):
            array = self._arrays[self._next]
            if array.shape == shape and array.dtype == kind:
                self._next += 1
                return array
            del self._arrays[self._next :]
        self._arrays.append(np.zeros(shape, kind))
        self._next += 1
        return self._arrays[-1]


MEMORY = Memory()


class HashEngine:
    """No thread, no time: tokens are a function of (request, position)."""

    def __init__(self, shape: Any, stage: StageSpec) -> None:
        self.stage = stage
        self.fail: set[int] = set()
        self.model = ModelInfo("hash", shape.layer_count, 1, 1, 1, 2, 997, 8192, "float32", 1, ())

    def allocate_kv(self, block_count: int, block_tokens: int) -> KVMemory:
        kv = MEMORY.take((self.stage.layer_count, block_count, 2, block_tokens, 1, 2), np.float32)
        base = kv.ctypes.data
        return KVMemory(
            block_count, block_tokens, tuple(base + i * kv.strides[0] for i in range(self.stage.layer_count)),
            kv.strides[1], kv.strides[2], kv.strides[4], kv.strides[3], 1, 2, 4, "DRAM", 0, ((base, kv.nbytes),), kv,
        )  # fmt: skip

    def launch(self, step: StepInput) -> HashEngine.Done:
        tokens = (3 + (7 * step.request_ids + step.ends) % 900).astype(np.int32)
        hidden = None if self.stage.is_last else np.zeros((step.token_count, 1), np.float32)
        return HashEngine.Done(StepOutput(step.step_id, hidden, tokens if self.stage.is_last else None))

    def close(self) -> None:
        pass

    @dataclass
    class Done:
        output: StepOutput

        def done(self) -> bool:
            return True

        def add_done_callback(self, call: Callable[[], None]) -> None:
            call()

        def result(self) -> StepOutput:
            return self.output


class ModelPair(Pair):
    """The composition with an engine that costs nothing."""

    def _engine(self, stage: StageSpec, block_count: int) -> Any:
        engine = HashEngine(self.model, stage)
        memory = engine.allocate_kv(block_count, self.config.block_tokens)
        self.world.add_buffer(memory.owner)
        return engine, memory

    def _aux(self, count: int) -> AuxSlots:
        aux = AuxSlots(4)
        slab = MEMORY.take((4, AUX_BYTES // 8), np.int64)
        slab[:] = -1
        aux._slab, aux._address = slab, int(slab.ctypes.data)
        self.world.add_buffer(slab)
        return aux


# -- fingerprints -----------------------------------------------------------------------------------------------------

_SKIPPED = {
    "story", "_story", "_stories", "stories", "counters", "_counters", "_counts", "log", "landed", "polls", "polled",
    "step_count", "token_count", "taken_count", "frames", "_poll_buckets", "buckets", "clock", "_clock", "_deliver",
    "_wake", "_lock", "_on_fault", "_statistics", "_buffers", "_log", "engine", "_engine", "memory", "layout", "_layout",
    "_source", "world", "network", "domain", "config", "model", "_model", "owner", "_layouts", "_taken_count", "_finished",
    "_decisions", "_router", "routed", "pre_active_peak", "_peak_count", "latency", "_latency", "_totals", "_arenas",
    "_prepared_again_count", "_core_statistics", "statistics", "rank_statistics", "_now_s", "now_s", "_tombstones",
    "_transport", "_network", "block_cache", "key_cache", "_over", "_incarnations", "_newest", "_receipts", "_loads",
    "_waiting_peak", "_slab", "_next_operation", "_high_water", "_digest", "digest", "_rescan", "_limits", "limits",
    "waited_for",
}  # fmt: skip


def fingerprint(pair: Pair) -> bytes:
    """16 bytes of everything that may decide what happens next."""
    seen: dict[int, int] = {}
    text = hashlib.blake2b(digest_size=16)

    def feed(value: Any, depth: int = 0) -> None:
        if value is None or isinstance(value, (bool, int, str, bytes)):
            text.update(repr(value).encode())
        elif isinstance(value, (float, types.ModuleType)):
            return
        elif isinstance(value, enum.Enum):
            text.update(value.name.encode())
        elif isinstance(value, np.ndarray):
            text.update(value.tobytes())
        elif isinstance(value, dict):
            text.update(b"{")
            for key, item in value.items():
                feed(key, depth + 1)
                feed(item, depth + 1)
        elif isinstance(value, (list, tuple, deque)):
            text.update(b"[")
            for item in value:
                feed(item, depth + 1)
        elif isinstance(value, (set, frozenset)):
            # An object's default repr holds its address, which no two replays share.
            told = [repr(item) for item in value]
            text.update(repr(sorted("object" if " at 0x" in t else t for t in told)).encode())
        elif callable(value) and not hasattr(value, "__dict__"):
            return
        else:
            if id(value) in seen:
                text.update(f"@{seen[id(value)]}".encode())
                return
            seen[id(value)] = len(seen)
            text.update(type(value).__name__.encode())
            for name, item in attributes(value):
                if name not in _SKIPPED and not name.endswith(("_s", "_at", "_max", "_sum", "_count_total")):
                    text.update(name.encode())
                    feed(item, depth + 1)

    for rank in pair.ranks:
        feed(rank.registry)
        feed(rank.loop)
        feed(rank.transceiver)
        feed(rank.session)
        if rank.agreement is not None:
            feed(rank.agreement)
    feed(pair.agreement_network.links)
    feed(pair.network._queues)
    feed([(w.job.operation, w.posted, w.completed, w.stopped, w.error, w.flying) for w in pair.world.writes])
    feed(pair.world.inbox)
    feed(pair.ending)
    feed([rank.session._channel.events for rank in pair.ranks])
    return text.digest()


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's state, whatever holds it."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield name, getattr(value, name)
        return
    if is_dataclass(value):
        for field in fields(value):
            yield field.name, getattr(value, field.name, None)
        return
    slots = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()) if isinstance(n, str)]
    for name in slots:
        if hasattr(value, name):
            yield name, getattr(value, name)
    yield from getattr(value, "__dict__", {}).items()


# -- scopes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """What is explored.

    Attributes:
        events: What the outside world does, each once, in any order relative to the ranks and to those events that do not
            come before it in its own list.
    """

    name: str
    config: PairConfig
    events: tuple[tuple[tuple[str, int], ...], ...]
    style: str = "generation_first"


SMALL = {"layer_count": 2, "stages": 2, "generation_ranks": 1, "block_tokens": 4, "max_num_tokens": 4, "credits": 4}
SCOPES = (
    Scope("one request", PairConfig(**SMALL), ((("gen", 1),), (("ctx", 1),))),
    Scope("one request, three stages", PairConfig(**{**SMALL, "stages": 3, "layer_count": 3}), ((("gen", 1), ("ctx", 1)),)),
    Scope("one request, cancelled by its client", PairConfig(**SMALL), ((("gen", 1), ("ctx", 1)), (("cancel", 1),))),
    Scope("one request, its context leg cancelled", PairConfig(**SMALL), ((("gen", 1), ("ctx", 1)), (("cancel-ctx", 1),))),
    Scope("one request, its generation leg cancelled", PairConfig(**SMALL), ((("gen", 1), ("ctx", 1)), (("cancel-gen", 1),))),
    Scope(
        "two requests, opposite orders, window 1, room for one",
        PairConfig(**SMALL, pre_active_requests=1, max_batch_size=1, context_blocks=2, generation_blocks=2),
        ((("gen", 1), ("gen", 2)), (("ctx", 2), ("ctx", 1))),
    ),
    Scope(
        "two requests, one cancelled, window 1",
        PairConfig(**SMALL, pre_active_requests=1, max_batch_size=1),
        ((("gen", 1), ("ctx", 1), ("gen", 2), ("ctx", 2)), (("cancel", 1),)),
    ),
    Scope("context-first, cancelled", PairConfig(**SMALL), ((("ctx", 1),), (("cancel-ctx", 1),)), style="context_first"),
    Scope(
        "one request, results and activations late",
        PairConfig(**SMALL),
        ((("gen", 1), ("ctx", 1)), (("hold-link", 0), ("let-link", 0))),
    ),
    Scope(
        "two requests, room for one, a stage that hears decisions late",
        PairConfig(**{**SMALL, "stages": 3, "layer_count": 3}, context_blocks=2),
        ((("gen", 1), ("ctx", 1), ("gen", 2), ("ctx", 2)), (("hold-decisions", 0), ("let-decisions", 0))),
    ),
    Scope(
        "two requests, room for one, leases expire",
        PairConfig(**SMALL, context_blocks=2, lease_timeout_s=0.5),
        ((("gen", 1), ("ctx", 1), ("gen", 2), ("ctx", 2)), (("lapse", 0), ("lapse", 0))),
    ),
    Scope(
        "two requests, a full pipeline, leases expire, results late",
        PairConfig(**{**SMALL, "max_num_tokens": 2}, lease_timeout_s=0.5),
        (
            (("gen", 1), ("ctx", 1), ("gen", 2), ("ctx", 2)),
            (("hold-link", 0), ("lapse-unheard", 0), ("let-link", 0), ("let-aborts", 0)),
        ),
    ),
    Scope(
        "two requests, room for one, leases expire, one is cancelled",
        PairConfig(**SMALL, context_blocks=2, lease_timeout_s=0.5),
        ((("gen", 1), ("ctx", 1), ("gen", 2), ("ctx", 2)), (("lapse", 0),), (("cancel", 2),)),
    ),
    Scope("a drain beside a request", PairConfig(**SMALL), ((("gen", 1), ("ctx", 1)), (("drain", 0),))),
)  # fmt: skip

PROMPT = [5, 6, 7, 8, 9, 10]


class Violation(Exception):
    """An invariant does not hold; carries the path."""


def apply_event(pair: Pair, event: tuple[str, int], style: str) -> None:
    kind, request_id = event
    if kind == "gen":
        pair.submit_generation(request_id, PROMPT, max_tokens=2, style=style)  # type: ignore[arg-type]
    elif kind == "ctx":
        pair.submit_context(request_id, PROMPT, max_tokens=2, style=style)  # type: ignore[arg-type]
    elif kind in ("hold-link", "let-link"):
        world = pair.context.ranks[0].loop._link._world
        link = (len(pair.context.ranks) - 1, 0)
        (world.held.add if kind == "hold-link" else world.held.discard)(link)
    elif kind in ("hold-decisions", "let-decisions"):
        network, last = pair.agreement_network, len(pair.context.ranks) - 1
        (network.hold if kind == "hold-decisions" else network.release)(last, 1)
    elif kind in ("lapse", "lapse-unheard"):
        pair.now_s += 2.0 * (pair.config.lease_timeout_s or 0.0)
        if kind == "lapse-unheard":
            pair.agreement_network.hold(len(pair.context.ranks) - 1, 0)
    elif kind == "let-aborts":
        pair.agreement_network.release(len(pair.context.ranks) - 1, 0)
    elif kind == "drain":
        pair.context.desk.drain(pair.now_s + 1e6)
        pair.generation.desk.drain(pair.now_s + 1e6)
    else:
        if kind in ("cancel", "cancel-ctx"):
            pair.context.desk.abort(request_id, "gone")
        if kind in ("cancel", "cancel-gen"):
            pair.generation.desk.abort(request_id, "gone")


Path = tuple[int, ...]


def enabled(scope: Scope, done: list[int], index: int) -> bool:
    """Whether the next event of a list may happen: a client cancels, and an operator drains, what was submitted."""
    events = scope.events[index]
    if done[index] >= len(events):
        return False
    kind, request_id = events[done[index]]
    if kind in ("gen", "ctx") or kind.startswith(("hold", "let", "lapse")):
        return True
    submitted = {e for taken, own in zip(done, scope.events) for e in own[:taken]}
    wanted = {(k, r) for own in scope.events for k, r in own if k in ("gen", "ctx") and request_id in (0, r)}
    return wanted <= submitted


#: Iterations of one turn (count): a rank goes on until nothing moves, as the driver does between two waits.
TURN_MAX = 8


def turn(pair: Pair, rank: Any) -> None:
    """One rank's turn."""
    for _ in range(TURN_MAX):
        if not pair.step(rank):
            return


def replay(scope: Scope, path: Path) -> tuple[Pair, list[int]]:
    """The pair after a path, and how far each event list has come. Choice < ranks: that rank; else: that event list."""
    MEMORY.restart()
    pair = ModelPair(scope.config)
    done = [0] * len(scope.events)
    ranks = pair.ranks
    for choice in path:
        if choice < len(ranks):
            turn(pair, ranks[choice])
        else:
            index = choice - len(ranks)
            apply_event(pair, scope.events[index][done[index]], scope.style)
            done[index] += 1
    return pair, done


_QUIET = {State.QUIESCENT}


def check_invariants(pair: Pair, scope: Scope) -> None:
    """What must hold in every state."""
    pair.validate()
    ranks = pair.context.ranks
    for request_id in (1, 2):
        records = [rank.registry.get(request_id) for rank in ranks]
        committed = [r.registry.is_finished(request_id) for r in ranks]
        activated = [bool(s and s.last_step_id >= 0 and Leg.COMPUTE in s.legs) for s in records]
        if any(committed):
            for rank, record in enumerate(records):
                # COMMIT (or the end of an aborted attempt) anywhere: nobody computes or transfers any more.
                if record is not None and record.legs:
                    raise Violation(f"request {request_id} ended on a rank while rank {rank} has legs {record.legs}")
                if record is not None and record.state not in (State.QUIESCENT, State.ABORTED, State.WAITING):
                    raise Violation(f"request {request_id} ended on a rank while rank {rank} has {record.state}")
        if any(activated[1:]) and not committed[0]:
            head = records[0]
            if head is None or head.last_step_id < 0:
                raise Violation(f"request {request_id} was activated by a follower before rank 0")
    window = ranks[0].loop.compute._limits.pre_active_max
    if ranks[0].transceiver.pre_active_count > window:
        raise Violation(
            f"{ranks[0].transceiver.pre_active_count} requests wait before activation, the window is {window}"
        )
    if len(ranks[0].loop.compute._active) > ranks[0].loop.compute._limits.active_max:
        raise Violation("more requests compute than the cap")


def check_end(pair: Pair, scope: Scope) -> None:
    """What must hold where nothing can happen any more, when the patience of those who wait for a dead leg has ended."""
    for _ in range(3):
        pair.now_s += 100.0
        for _ in range(60):
            for rank in pair.ranks:
                pair.step(rank)
    if not pair.idle():
        raise Violation("nothing can happen, and requests are live:\n" + pair.story())
    wanted: dict[str, set[int]] = {"ctx": set(), "gen": set()}
    drained = False
    for events in scope.events:
        for kind, request_id in events:
            if kind in wanted:
                wanted[kind].add(request_id)
            drained |= kind == "drain"
    for instance, kind in ((pair.context, "ctx"), (pair.generation, "gen")):
        for request_id in wanted[kind]:
            answers = instance.answers.get(request_id, [])
            ends = [a for a in answers if a.finish_reason] if kind == "gen" else answers
            if len(ends) != 1 and not drained:
                raise Violation(f"{kind} client of request {request_id} was told {len(ends)} times:\n{pair.story()}")
        for rank in instance.ranks:
            if rank.blocks.free_count != rank.blocks.block_count:
                raise Violation(f"{instance.name}: blocks did not come back")
    cores = [rank.agreement.statistics().core for rank in pair.context.ranks if rank.agreement]
    if len({(c.admitted, c.committed, c.closed, c.digest, c.activation_digest) for c in cores}) != 1:
        raise Violation("ranks differ at the end")
    if any(c.committed + c.closed != c.admitted for c in cores):
        raise Violation("not everything was decided")
    if drained and not all(rank.loop.drained for rank in pair.ranks):
        raise Violation("the drain has not ended")


@dataclass
class Outcome:
    """What an exploration saw."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    complete: bool = True
    violation: str = ""
    path: Path = ()


def explore(scope: Scope, *, states_max: int, limit_s: float) -> Outcome:
    """Breadth first over fingerprints."""
    outcome = Outcome()
    began_s = time.monotonic()
    pair, _ = replay(scope, ())
    first = fingerprint(pair)
    frontier: deque[tuple[Path, bytes]] = deque([((), first)])
    known = {(first, (0,) * len(scope.events))}
    outcome.states = 1
    choices = len(pair.ranks) + len(scope.events)
    while frontier:
        if outcome.states >= states_max or time.monotonic() - began_s > limit_s:
            outcome.complete = False
            break
        path, before = frontier.popleft()
        moved = False
        for choice in range(choices):
            try:
                pair, done = replay(scope, path)
                ranks = pair.ranks
                if choice < len(ranks):
                    if ranks[choice].loop.left:
                        continue
                    turn(pair, ranks[choice])
                else:
                    index = choice - len(ranks)
                    if not enabled(scope, done, index):
                        continue
                    apply_event(pair, scope.events[index][done[index]], scope.style)
                    done[index] += 1
                outcome.transitions += 1
                check_invariants(pair, scope)
            except Exception as error:  # noqa: BLE001 - a refusal by any core is a violation of the composition
                outcome.violation = f"{type(error).__name__}: {error}"
                outcome.path = (*path, choice)
                return outcome
            after = fingerprint(pair)
            moved |= choice >= len(ranks) or after != before
            key = (after, tuple(done))
            if key not in known:
                known.add(key)
                outcome.states += 1
                frontier.append(((*path, choice), after))
        if not moved:
            pair, done = replay(scope, path)
            try:
                if all(n == len(e) for n, e in zip(done, scope.events)):
                    check_end(pair, scope)
                    outcome.ends += 1
            except Violation as error:
                outcome.violation, outcome.path = str(error), path
                return outcome
    # Every state that was reached leads to a good end when everybody goes on.
    for path, _ in list(frontier)[:: max(1, len(frontier) // 40)]:
        problem = finish(scope, path)
        if problem:
            outcome.violation, outcome.path = problem, path
            return outcome
    return outcome


def finish(scope: Scope, path: Path) -> str:
    """From a state, let everything happen in turn until all ranks are idle; what is wrong with the end, or nothing."""
    try:
        pair, done = replay(scope, path)
        for index, events in enumerate(scope.events):
            for event in events[done[index] :]:
                apply_event(pair, event, scope.style)
        quiet = 0
        for _ in range(400):
            for rank in pair.ranks:
                pair.step(rank)
            check_invariants(pair, scope)
            quiet = quiet + 1 if pair.idle() else 0
            if quiet == 30:
                break
        check_end(pair, scope)
    except Exception as error:  # noqa: BLE001 - see explore
        return f"{type(error).__name__}: {error}"
    return ""


def walk(scope: Scope, seed: int) -> tuple[str, int]:
    """One random path to the end. Returns what is wrong, or nothing, and its transitions."""
    chance = random.Random(seed)  # noqa: S311 - replayable, not secret
    pair, done = replay(scope, ())
    ranks, path = pair.ranks, []
    waits = chance.choice((2, 10, 40))
    try:
        quiet = 0
        while len(path) < 2000 and quiet < 30:
            lists = [i for i in range(len(scope.events)) if enabled(scope, done, i)]
            if lists and chance.randrange(waits) == 0:
                index = chance.choice(lists)
                path.append(len(ranks) + index)
                apply_event(pair, scope.events[index][done[index]], scope.style)
                done[index] += 1
            else:
                path.append(chance.randrange(len(ranks)))
                pair.step(ranks[path[-1]])
            check_invariants(pair, scope)
            over = all(n == len(e) for n, e in zip(done, scope.events))
            quiet = quiet + 1 if over and pair.idle() else 0
        check_end(pair, scope)
    except Exception as error:  # noqa: BLE001 - see explore
        return f"{type(error).__name__}: {error}", len(path)
    return "", len(path)


def walk_all(scopes: list[Scope], walks: int) -> int:
    """Random paths alone, every scope in turn; 1 at the first violation."""
    for seed in range(walks):
        for scope in scopes:
            problem, _ = walk(scope, seed)
            if problem:
                print(f"VIOLATION: {scope.name}, walk {seed}: {problem.splitlines()[0][:120]}")
                return 1
    print(f"{len(scopes)} scopes, {walks} walks each, 0 violations")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Explore; exit 1 on a violation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--states", type=int, default=3000, help="states per scope, at most")
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds per scope, at most")
    parser.add_argument("--walks", type=int, default=40, help="random paths per scope, each to its end")
    parser.add_argument("--scope", default="", help="only scopes whose name contains this")
    parser.add_argument("--walks-only", action="store_true", help="no exhaustive exploration")
    options = parser.parse_args(arguments)
    scopes = [scope for scope in SCOPES if options.scope in scope.name]
    failed = False
    if options.walks_only:
        return walk_all(scopes, options.walks)
    total = Outcome()
    for scope in scopes:
        began_s = time.monotonic()
        outcome = explore(scope, states_max=options.states, limit_s=options.seconds)
        for seed in range(options.walks if not outcome.violation else 0):
            problem, steps = walk(scope, seed)
            outcome.transitions += steps
            if problem:
                outcome.violation, outcome.path = f"walk {seed}: {problem}", ()
                break
        kind = "complete" if outcome.complete else "bounded"
        print(f"{scope.name}: {outcome.states} states, {outcome.transitions} transitions, {outcome.ends} ends, {kind}, "
              f"{time.monotonic() - began_s:.1f} s")  # fmt: skip
        total.states += outcome.states
        total.transitions += outcome.transitions
        if outcome.violation:
            failed = True
            print(f"  VIOLATION after {outcome.path}: {outcome.violation}")
    print(f"{len(scopes)} scopes, {total.states} states, {total.transitions} transitions, "
          f"{'violations' if failed else '0 violations'}")  # fmt: skip
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
