"""Explore the real cores exhaustively for small scopes: every interleaving of writers, parts, cancel, failure, death, time.

Two models, of pushed transfers (``push_model.py``) and of pulled ones (``pull_model.py``), and one explorer (``explorer.py``).
After every step of every interleaving:

- no byte lands in memory, or is taken from a source, after that was released;
- released or quarantined at most once, never both, and quarantined only after a deadline; an outcome never changes;
- a terminal snapshot never changes, is never COMPLETED with a quarantine or with a part missing;
- when nothing can happen any more, nothing is left owned that a proof exists for.

Run: ``python tools/explore.py [--scope NAME] [--states-max N]``. Exit code 1 with the shortest story on a violation.
"""

# ruff: noqa: T201 - a command prints

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from kv_bounce_planner.sessions.proof import WriteExecutor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from explorer import Scope, Violation, search
from pull_model import PullWorld
from push_model import PushWorld

SCOPES = (
    Scope("direct, cancel"),
    Scope("direct, cancel and abort, two writers", writers=2, parts=1, fail=True),
    Scope("direct, errors and death, receiver-executed", kill=True, errors=True, retire=True),
    Scope(
        "direct, errors and death, sender-executed", kill=True, errors=True, retire=True, executor=WriteExecutor.SENDER
    ),
    Scope("direct, time", parts=1, errors=True, time=True),
    Scope("bounce, cancel", bounce=True, parts=1),
    Scope("bounce, cancel and abort, two parts", bounce=True, fail=True, parts=2),
    Scope("bounce, two writers", bounce=True, writers=2, parts=1),
    Scope("bounce, errors and death", bounce=True, parts=1, kill=True, errors=True, retire=True),
    Scope("bounce, time", bounce=True, parts=1, errors=True, time=True, fail=True),
    Scope("bounce, gathered ahead", bounce=True, ahead=True, parts=1, fail=True),
    Scope(
        "bounce, gathered ahead, errors and death",
        bounce=True,
        ahead=True,
        parts=1,
        kill=True,
        errors=True,
        retire=True,
    ),
    Scope("bounce, gathered ahead, time", bounce=True, ahead=True, parts=1, time=True, fail=True),
    Scope("direct, a link breaks", parts=1, sever=True, fail=True),
    Scope("direct, a link breaks, two parts", parts=2, sever=True),
    Scope("bounce, a link breaks", bounce=True, parts=1, sever=True),
    Scope("bounce, gathered ahead, a link breaks", bounce=True, ahead=True, parts=1, sever=True, cancel=False),
    Scope("direct, time-outs", parts=1, timeouts=True, time=True, errors=True),
    Scope("bounce, time-outs", bounce=True, parts=1, timeouts=True, time=True),
    Scope("direct, errors and death, NIC-executed", kill=True, errors=True, retire=True, executor=WriteExecutor.NIC),
    Scope("pull, cancel and abort", pull=True, fail=True),
    Scope("pull, two senders", pull=True, writers=2, parts=1),
    Scope("pull, errors and death, receiver-executed", pull=True, parts=1, kill=True, errors=True, retire=True),
    Scope(
        "pull, errors and death, sender-executed",
        pull=True,
        parts=1,
        kill=True,
        errors=True,
        retire=True,
        executor=WriteExecutor.SENDER,
    ),
    Scope(
        "pull, errors and death, NIC-executed",
        pull=True,
        parts=1,
        kill=True,
        errors=True,
        retire=True,
        executor=WriteExecutor.NIC,
    ),
    Scope("pull, the reader dies", pull=True, parts=1, fail=True, reader_dies=True, retire=True),
    Scope("pull, sources retire a living reader", pull=True, parts=1, fail=True, retire_sources=True),
    Scope(
        "pull, sources retire a living reader, sender-executed",
        pull=True,
        parts=1,
        fail=True,
        retire_sources=True,
        executor=WriteExecutor.SENDER,
    ),
    Scope("pull, a link breaks", pull=True, parts=1, fail=True, sever=True),
    Scope("pull, a link breaks, two parts", pull=True, parts=2, sever=True),
    Scope("pull, time-outs", pull=True, parts=1, timeouts=True, time=True, errors=True),
    Scope("pull, errors and death, two parts", pull=True, parts=2, fail=True, kill=True, errors=True, retire=True),
    Scope("pull, two senders, one dies", pull=True, writers=2, parts=1, cancel=False, kill=True, errors=True),
    Scope(
        "pull, a link breaks while reads end in errors",
        pull=True,
        parts=2,
        fail=True,
        sever=True,
        errors=True,
        retire=True,
    ),
    Scope(
        "pull, the reader dies behind a broken link",
        pull=True,
        parts=1,
        fail=True,
        sever=True,
        reader_dies=True,
        retire=True,
    ),
    Scope("pull, a link breaks and time passes", pull=True, parts=1, fail=True, sever=True, errors=True, time=True),
    Scope("slices, cancel and abort", parts=1, slices=2, fail=True),
    Scope("slices, two writers", writers=2, parts=1, slices=2, cancel=False),
    Scope("slices, errors and death, receiver-executed", parts=1, slices=2, kill=True, errors=True, retire=True),
    Scope(
        "slices, errors and death, sender-executed",
        parts=1,
        slices=2,
        kill=True,
        errors=True,
        retire=True,
        executor=WriteExecutor.SENDER,
    ),
    Scope("slices, bounce, cancel and abort", bounce=True, parts=1, slices=2, fail=True),
    Scope("slices, a link breaks", parts=1, slices=2, sever=True),
    Scope("slices, bounce, a link breaks", bounce=True, parts=1, slices=2, sever=True, cancel=False),
    Scope("slices, time", parts=1, slices=2, errors=True, time=True, cancel=False),
    Scope("slices, three of them", parts=1, slices=3),
    Scope("bounce, a bad report", bounce=True, parts=1, lies=True, retire=True, time=True),
)
#: The scopes of the smoke test: the smaller ones.
SMOKE = ("direct, cancel", "direct, errors and death, sender-executed", "bounce, cancel", "direct, time")


def explore(scope: Scope, *, states_max: int = 2_000_000) -> tuple[int, int]:
    """Every interleaving of a scope. Returns (states, transitions).

    Raises:
        Violation: With the shortest story that leads to it.
    """
    return search(PullWorld(scope) if scope.pull else PushWorld(scope), states_max=states_max)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", action="append", help="explore only this scope (repeatable)")
    parser.add_argument("--smoke", action="store_true", help="the smaller scopes only")
    parser.add_argument("--states-max", type=int, default=2_000_000)
    options = parser.parse_args(arguments)
    wanted = options.scope or (SMOKE if options.smoke else [scope.name for scope in SCOPES])
    unknown = set(wanted) - {scope.name for scope in SCOPES}
    if unknown:
        parser.error(f"unknown scopes {sorted(unknown)}; known: {[scope.name for scope in SCOPES]}")
    for scope in SCOPES:
        if scope.name not in wanted:
            continue
        began = time.monotonic()
        try:
            states, transitions = explore(scope, states_max=options.states_max)
        except Violation as violation:
            print(f"VIOLATION {violation}")
            return 1
        print(f"{scope.name}: {states} states, {transitions} transitions, {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
