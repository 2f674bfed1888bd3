"""Random programs of calls with exceptions before random bytecodes, in both forms; most whose root waits for nobody.

Two to four ranks without threads; a random one makes the next step. What is looked for: a rank that waits for ever, a wrong
value, a value of an exchange that others were told had failed, and a failure that is not told to every rank exactly once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from broadcast_injection import Fault, Injector, Stop, same
from broadcast_values import Poison, Unpicklable

from comm_broadcast import (
    BroadcastConfig,
    BroadcastConfigError,
    Broadcaster,
    BroadcastError,
    BroadcastTimeoutError,
    BytesCodec,
    CallMismatchError,
    ClosedError,
    Handle,
    LocalProtocolError,
)
from comm_broadcast.testing import FakeWorld

#: Steps of a program, far more than any takes (count).
STEPS_MAX = 6000
#: What a rank says that refused poison; small frames cut it.
REFUSED = "ValueError: cannot be de"
INJECTED = (KeyboardInterrupt, Fault, Stop)
BYTES = BytesCodec()
#: "drop": a broadcast whose handle is dropped; "brief": one that waits for no time; "progress": no exchange.
OPERATIONS = {"broadcast": 6.0, "gather": 1.0, "allgather": 1.0, "drop": 1.0, "brief": 1.0, "progress": 1.0}
#: What a call gives, and how often. Ranks above 0 refuse to decode what is poison.
PAYLOADS = {
    "small": 4.0, "none": 1.0, "pieces": 2.0, "large": 2.0, "poison": 2.0, "bytes": 0.5, "unpicklable": 0.5,
    "interrupting": 0.3,
}  # fmt: skip

Outcome = tuple[Any, ...]


def make(payload: str, rank: int) -> Any:
    values: dict[str, Callable[[], Any]] = {
        "small": lambda: ("value", rank),
        "none": lambda: None,
        "pieces": lambda: [bytes([rank]) * 9000, list(range(2000))],
        "large": lambda: [np.full(3000, rank), "text", np.full(2500, rank + 1), b"y" * 5000],
        "poison": lambda: "poison",
        "bytes": lambda: b"b" * 50,
        "unpicklable": lambda: Unpicklable(ValueError("cannot be encoded")),
        "interrupting": lambda: Unpicklable(KeyboardInterrupt("while it is encoded")),
    }
    return values[payload]()


class Rank:
    """Makes a program's calls, a step at a time, each with an exception now and then."""

    def __init__(
        self, broadcaster: Broadcaster, calls: list[tuple[str, str]], rng: random.Random, share: float
    ) -> None:
        self.broadcaster = broadcaster
        self.calls = calls
        self.is_closed = False
        self.hits = 0
        #: By exchange: the call, what it gave, and what came of it. Of an exchange that nobody waited for: ("dropped",).
        self.made: dict[int, tuple[str, str, Any]] = {}
        self.got: dict[int, Outcome] = {}
        #: Causes of failures that closing told, and whether a call was told that another rank closed.
        self.told: list[tuple[int, str]] = []
        self.was_closed = False
        self._rng = rng
        self._share = share
        self._handle: Handle[Any] | None = None

    def _under(self, body: Callable[[], Any]) -> Any:
        if self._rng.random() >= self._share:
            return body()
        injector = Injector(int(self._rng.expovariate(1 / 250)) + 1, self._rng.choice(INJECTED))
        try:
            return injector.call(body)
        finally:
            self.hits += injector.has_raised

    def step(self) -> None:
        if self._handle is not None:
            self._poll(self._handle)
        elif self.calls and self.calls[0][0] != "close":
            self._begin(*self.calls[0])
        else:
            self._close()

    def _begin(self, operation: str, payload: str) -> None:
        broadcaster = self.broadcaster
        if operation == "progress":
            self.calls.pop(0)
            try:
                self._under(broadcaster.progress)
            except INJECTED:
                pass
            return
        before, value = broadcaster.begun, make(payload, broadcaster.rank)
        verb = "broadcast" if operation in ("drop", "brief") else operation
        codec = BYTES if payload == "bytes" else None
        handle, outcome = None, None
        try:
            if operation == "brief":
                outcome = self._outcome(
                    lambda: self._under(lambda: broadcaster.broadcast(value, codec=codec, timeout_s=0)), INJECTED
                )
            else:
                handle = self._under(lambda: getattr(broadcaster, f"start_{verb}")(value, codec=codec))
        except LocalProtocolError:
            self.calls.pop(0)  # another rank has closed
            return
        except (*INJECTED, BroadcastConfigError):
            if broadcaster.begun == before:
                return  # it has not begun: again
        self.calls.pop(0)
        self.made[broadcaster.begun] = (verb, payload, value)
        self.got[broadcaster.begun] = outcome or ("dropped",)
        self._handle = None if operation == "drop" else handle

    def _poll(self, handle: Handle[Any]) -> None:
        try:
            has_ended = self._under(handle.test)
        except INJECTED:
            return
        if has_ended:
            self.got[max(self.made)] = self._outcome(handle.result, ())
        if has_ended or self._rng.random() < 0.01:
            self._handle = None

    def _outcome(self, get: Callable[[], Any], passes: tuple[type[BaseException], ...]) -> Outcome | None:
        """What a call came to; None: nothing yet. ``passes``: what is raised on."""
        try:
            return "value", get()
        except passes:
            raise
        except BroadcastTimeoutError:
            return None
        except BroadcastError as error:
            return "failed", error.failures
        except CallMismatchError as error:
            return "mismatch", error.earlier
        except ClosedError as error:
            self.was_closed = True
            self.told += [(f.rank, f.cause) for f in error.failures]
            return "closed", error.rank
        except LocalProtocolError:
            return ("too late",)  # an exchange before it, which nobody waited for, was told that a rank closed
        except INJECTED:
            return ("interrupted",)

    def _close(self) -> None:
        try:
            self._under(lambda: self.broadcaster.close(timeout_s=0))
        except (TimeoutError, *INJECTED):
            return
        except (BroadcastError, CallMismatchError) as error:
            last = error if isinstance(error, BroadcastError) else error.__cause__
            if isinstance(last, BroadcastError):
                self.told += [(f.rank, f.cause) for f in last.failures]
        self.is_closed = True


def run(seed: int) -> int:
    """One program; exceptions that hit (count).

    Raises:
        AssertionError: What must not happen did; says the seed.
    """
    rng = random.Random(seed)
    size, share = rng.choice([2, 3, 3, 4]), rng.choice([0.0, 0.0, 0.05, 0.2])
    root = rng.choice([0, 0, size - 1])
    config = BroadcastConfig(
        frame_bytes=rng.choice([256, 512, 4096]), chunk_bytes=4096, gather_bytes_max=rng.choice([0, 16_384]),
        ahead_max=rng.choice([0, 1, 1, 2, 3, 5]), shared_slot_bytes=rng.choice([0, 0, 20_000]),
    )  # fmt: skip
    made: list[Any] = FakeWorld(size).run(
        lambda comm: Broadcaster(comm, root, config=config, codec=Poison(comm.rank > 0))
    )
    common = [(_any(rng, OPERATIONS), _any(rng, PAYLOADS)) for _ in range(rng.randrange(1, 9))]
    ranks = []
    for broadcaster in made:
        calls = [
            (rng.choice(["broadcast", "gather", "allgather", "close"]), payload) if rng.random() < 0.05 else (name, payload)
            for name, payload in common
        ]  # fmt: skip
        ranks.append(Rank(broadcaster, calls, random.Random(rng.random()), share))
    weights = [rng.choice([1, 1, 10]) for _ in ranks]
    story = f"seed {seed}, {size} ranks, {config}: {[rank.calls for rank in ranks]}"
    for _ in range(STEPS_MAX):
        rng.choices(ranks, weights)[0].step()
        if all(rank.is_closed for rank in ranks):
            break
    else:
        raise AssertionError(f"{story}: hangs; closed: {[rank.is_closed for rank in ranks]}")
    for number in range(1, max((max(rank.made, default=0) for rank in ranks), default=0) + 1):
        _check_exchange(f"{story}, exchange {number}", ranks, root, number)
    # With an exception in a codec a failure is another one; what nobody waited for was told to nobody.
    if not share and ("dropped",) not in [outcome for rank in ranks for outcome in rank.got.values()]:
        _check_told(story, ranks)
    return sum(rank.hits for rank in ranks)


def _any(rng: random.Random, choices: dict[str, float]) -> str:
    return rng.choices(list(choices), list(choices.values()))[0]


def _check_exchange(story: str, ranks: list[Rank], root: int, number: int) -> None:
    """Values are right, and nobody has one of an exchange that the root was told of."""
    given = [rank.made.get(number) for rank in ranks]
    for rank in ranks:
        outcome, call = rank.got.get(number, ("none",)), rank.made.get(number)
        if outcome[0] != "value" or call is None:
            continue
        sources = [root] if call[0] == "broadcast" else list(range(len(ranks)))
        values = [outcome[1]] if call[0] == "broadcast" else outcome[1] or []
        for source, value in zip(sources, values, strict=bool(values)):
            wanted = given[source]
            value = bytes(value) if isinstance(value, memoryview) else value
            if wanted is None or not same(wanted[2], value):
                raise AssertionError(f"{story}: rank {rank.broadcaster.rank} got {value!r:.200} of rank {source}")
    outcome = ranks[root].got.get(number, ("none",))
    is_own = outcome[0] == "failed" and {(f.rank, f.earlier) for f in outcome[1]} == {(root, False)}
    is_gather = given[root] is not None and given[root][0] != "broadcast"  # type: ignore[index]
    if outcome[0] in ("failed", "mismatch") and not (is_own and is_gather):
        for rank in ranks:
            if rank.got.get(number, ("none",))[0] == "value":
                raise AssertionError(f"{story}: the root was told {outcome}, rank {rank.broadcaster.rank} has a value")


def _check_told(story: str, ranks: list[Rank]) -> None:
    """Each rank's failures to decode are told to all, each once. One may be lost to a rank that was told of a closing first."""
    for failed in ranks:
        mine = failed.broadcaster.rank
        own = [
            f for outcome in failed.got.values() if outcome[0] == "failed" for f in outcome[1]
            if f.rank == mine and not f.earlier and f.cause.startswith(REFUSED)
        ]  # fmt: skip
        for rank in ranks:
            told = [f for outcome in rank.got.values() if outcome[0] == "failed" for f in outcome[1]]
            count = sum(f.rank == mine and f.earlier for f in told) + sum(
                r == mine and cause.startswith(REFUSED) for r, cause in rank.told
            )
            if count != len(own) and not (rank.was_closed and count == len(own) - 1):
                raise AssertionError(
                    f"{story}: rank {mine} failed {len(own)} times, {count} told to {rank.broadcaster.rank}"
                )
