"""Plant one defect at a time in a copy of the package and see a test fail for it.

Each mutant breaks one rule in the source. It is killed when the named tests fail; one that survives, or whose text is no
longer in the source, fails the run.

Run: ``python tools/mutants.py [--only TEXT] [--list] [--nightly]``. Exit code 0 if every mutant was killed.
"""

# ruff: noqa: T201, E501 - a command prints; planted text stands as the source has it

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
LIMIT_S = 300


@dataclass(frozen=True)
class Mutant:
    """``old`` stands exactly once in ``file`` and becomes ``new``; ``tests`` are tried in this order."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


OWNER = ("owner", "invariants", "hazards")
CORE = ("directory", "directory_random", "invariants", "hazards")
LOOP = ("asyncio_directory", "every_await_point", "peer_bugs", "hazards")
STORE = ("discovery", "peer_bugs", "hazards")

MUTANTS = (
    # -- owner side
    Mutant(
        "estimation publishes",
        "_owner.py",
        "raise NotFinal(owner.owner_id, owner.state.value, OwnerEvent.PUBLISHED.value, story=owner.story())",
        "return owner._publish(tuple(control_addresses), EndpointProfile())  # type: ignore[arg-type]",
        OWNER,
    ),
    Mutant(
        "final with an open estimation",
        "_owner.py",
        "if self._state is OwnerState.ESTIMATING and self._runtime is not None:",
        "if False:",
        OWNER,
    ),
    Mutant(
        "estimation closes without proof",
        "_owner.py",
        "            if self._open:\n                raise EstimationNotClosed",
        "            if False:\n                raise EstimationNotClosed",
        OWNER,
    ),
    Mutant(
        "capability given twice",
        "_owner.py",
        "            if self._capability is not None:\n                raise AlreadyOwned(f",
        "            if False:\n                raise AlreadyOwned(f",
        OWNER,
    ),
    Mutant(
        "retire without comparing",
        "_owner.py",
        "if generation is None or generation != self._generation or self._state in TERMINAL:",
        "if generation is None or self._state in TERMINAL:",
        OWNER,
    ),
    Mutant(
        "slot deletes any generation",
        "_owner.py",
        "if generation is None or self._generation != generation:\n                return False\n            self._generation = None",
        "if generation is None:\n                return False\n            self._generation = None",
        OWNER,
    ),
    Mutant(
        "two published in one slot",
        "_owner.py",
        "                if current.state == PUBLISHED:",
        "                if False:",
        OWNER,
    ),
    Mutant(
        "account forgets the peak",
        "_owner.py",
        "owner._peak_bytes = max(owner._peak_bytes, sum(self._open.values()))",
        "owner._peak_bytes = sum(self._open.values())",
        OWNER,
    ),
    Mutant(
        "stale generation admitted",
        "_owner.py",
        "if expected is not None and expected != self._generation:",
        "if expected is not None and False:",
        (*OWNER, "http"),
    ),
    Mutant(
        "draining takes new work",
        "_owner.py",
        "if new_work and self._state is OwnerState.DRAINING:",
        "if False:",
        (*OWNER, "http"),
    ),
    Mutant(
        "another record under the same generation",
        "_owner.py",
        "if self._published != (addresses, encoded_profile):",
        "if False:",
        OWNER,
    ),
    Mutant("failed lifetime stays in the slot", "_owner.py", "            self.slot.delete(self._generation)\n", "", OWNER),
    Mutant(
        "retired with work in flight",
        "_owner.py",
        "if self._in_flight and not abandon:",
        "if False:",
        OWNER,
    ),
    # -- records
    Mutant("newline in a name", "_record.py", "if not _PRINTABLE.fullmatch(value):", "if not _PRINTABLE.match(value):", ("record",)),
    Mutant("wildcard host", "_record.py", "    if host.lower() in _WILDCARD_HOSTS:", "    if False:", ("record",)),
    Mutant("duplicate address", "_record.py", "if reason is None and address in seen:", "if False:", ("record",)),
    Mutant("address count", "_record.py", "    if len(addresses) != wanted:", "    if False:", ("record",)),
    # -- refreshing
    Mutant(
        "prover given the value it proved stale",
        "_slots.py",
        "return self.proven_stale is None or record.generation != self.proven_stale or began > self._proof",
        "return True",
        CORE,
    ),
    Mutant(
        "prover never satisfied by the same generation",
        "_slots.py",
        "return self.proven_stale is None or record.generation != self.proven_stale or began > self._proof",
        "return self.proven_stale is None or record.generation != self.proven_stale",
        CORE,
    ),
    Mutant(
        "result applied over a change",
        "_directory.py",
        "        if slot.version != flight._version:\n            self._n[\"results_dropped\"]",
        "        if False:\n            self._n[\"results_dropped\"]",
        CORE,
    ),
    Mutant(
        "stale result applied",
        "_directory.py",
        "if proof is not None and proof >= flight._began:",
        "if False:",
        CORE,
    ),
    Mutant(
        "dropped result answers its prover",
        "_directory.py",
        "self._settle(flight, slot.record, -1, now_s, effects)",
        "self._settle(flight, slot.record, self._sequence, now_s, effects)",
        CORE,
    ),
    Mutant(
        "second flight for one server",
        "_directory.py",
        "        flight = slot.flight\n        if flight is None:\n            flight = self._new_flight",
        "        flight = None\n        if flight is None:\n            flight = self._new_flight",
        CORE,
    ),
    Mutant(
        "stale server stays in the pick set",
        "_directory.py",
        "                self._set_status(slot, ServerStatus.UNPREPARED, effects)\n                slot.note(self._next(), \"proven stale\"",
        "                slot.note(self._next(), \"proven stale\"",
        CORE,
    ),
    Mutant(
        "error cached for ever",
        "_directory.py",
        "slot.error_until_s = now_s + self.config.negative_ttl_s * (1.0 - 0.5 * self._random())",
        "slot.error_until_s = float(\"inf\")",
        CORE,
    ),
    Mutant(
        "waiters without bound",
        "_directory.py",
        "if len(flight._tickets) >= self.config.waiters_max:",
        "if False:",
        CORE,
    ),
    Mutant(
        "attempts without bound",
        "_directory.py",
        "if flight.attempts < self.config.attempts and delay_s < remaining_s:",
        "if delay_s < remaining_s:",
        CORE,
    ),
    # -- superseding
    Mutant(
        "late delete removes the successor",
        "_directory.py",
        "if slot is None or (generation is not None and slot.generation != generation):",
        "if slot is None:",
        CORE,
    ),
    Mutant(
        "late set brings the predecessor back",
        "_directory.py",
        "if record.generation is not None and record.generation in slot.superseded:",
        "if False:",
        CORE,
    ),
    Mutant(
        "same generation with another record accepted",
        "_directory.py",
        "if msgspec.structs.replace(old, state=record.state) != record:",
        "if False:",
        CORE,
    ),
    Mutant("draining undone by late news", "_directory.py", "            if old.state == DRAINING:\n", "            if False:\n", CORE),
    Mutant(
        "epoch does not rise",
        "_directory.py",
        "                self._epoch += 1\n",
        "",
        CORE,
    ),
    # -- reserving
    Mutant(
        "counter shared over lifetimes",
        "_directory.py",
        "                slot.load = self._counter(slot.server, record.generation)\n",
        "                slot.load = self._counter(slot.server, None)\n",
        CORE,
    ),
    Mutant("weight not released", "_directory.py", "        counter.weight -= reservation.weight\n        slot = reservation._slot\n", "        slot = reservation._slot\n", CORE),
    Mutant(
        "released twice",
        "_directory.py",
        "        if self._reservations.get(reservation.key) is not reservation:\n            self._n[\"releases_repeated\"] += 1\n            return False\n        del",
        "        del",
        CORE,
    ),
    Mutant(
        "same key counted twice",
        "_directory.py",
        "            self._take_off(replaced, ReservationState.RELEASED, \"replaced\")\n",
        "            pass\n",
        CORE,
    ),
    Mutant(
        "dispatch to a superseded lifetime",
        "_directory.py",
        "if slot.load is not reservation._counter or slot.generation in slot.stale:",
        "if slot.generation in slot.stale:",
        CORE,
    ),
    Mutant(
        "dispatch to a draining server",
        "_directory.py",
        "        if slot.status is ServerStatus.DRAINING:\n            raise Draining(f\"{slot.server} is draining\", story=tuple(slot.story))\n        if slot.status is not ServerStatus.READY:\n            raise NotReady(f\"{slot.server} is {slot.status.value}\", story=tuple(slot.story))\n        reservation.state",
        "        reservation.state",
        CORE,
    ),
    Mutant("renewal does not put off", "_directory.py", "        reservations.move_to_end(reservation.key)\n", "", CORE),
    Mutant("heap entry not renewed on release", "_directory.py", "        if slot.load is counter and slot.entry is not None:\n            slot.pool.changed(slot)\n            return\n", "        if slot.load is counter and slot.entry is not None:\n            return\n", CORE),
    Mutant("equal loads do not take turns", "_slots.py", "        self._turn += 1\n        load = slot.load\n        slot.entry = entry = (load.weight, load.count, self._turn, slot)", "        self._turn += 1\n        load = slot.load\n        slot.entry = entry = (load.weight, load.count, -self._turn, slot)", CORE),
    # -- the loop
    Mutant(
        "release only for exceptions",
        "_asyncio.py",
        "        self._leave(error)\n\n    async def acquire",
        "        if error is None or isinstance(error, Exception):\n            self._leave(error)\n\n    async def acquire",
        LOOP,
    ),
    Mutant(
        "failed revalidation keeps the claim",
        "_asyncio.py",
        "            except BaseException as error:\n                self._leave(error)\n                raise\n        return self",
        "            except BaseException:\n                raise\n        return self",
        LOOP,
    ),
    Mutant(
        "cancelled revalidation keeps the claim",
        "_asyncio.py",
        "            except BaseException as error:\n                self._leave(error)\n                raise\n        return self",
        "            except Exception as error:\n                self._leave(error)\n                raise\n        return self",
        LOOP,
    ),
    Mutant(
        "waiter not taken off",
        "_asyncio.py",
        "            timer.cancel()\n            self._perform(self.core.leave(outcome))",
        "            timer.cancel()",
        LOOP,
    ),
    Mutant(
        "waiters timer left armed",
        "_asyncio.py",
        "            timer.cancel()\n            self._perform(self.core.leave(outcome))",
        "            self._perform(self.core.leave(outcome))",
        LOOP,
    ),
    Mutant(
        "task of a flight forgotten in a finally",
        "_asyncio.py",
        "            task.add_done_callback(functools.partial(self._flight_ended, flight))\n",
        "",
        LOOP,
    ),
    Mutant(
        "stream that was not started keeps the claim",
        "_asyncio.py",
        "        self._release(\"disconnected\")\n        await self._close_source()",
        "        await self._close_source()",
        LOOP,
    ),
    Mutant(
        "fetch without a bound",
        "_asyncio.py",
        "async with asyncio.timeout(self.config.attempt_timeout_s):",
        "async with asyncio.timeout(None):",
        (*LOOP, "invariants"),
    ),
    Mutant(
        "fetches without a common bound",
        "_asyncio.py",
        "        async with self._fetch_slots:\n            if flight.ended:",
        "        if True:\n            if flight.ended:",
        LOOP,
    ),
    Mutant(
        "revalidation does not bind to what is live",
        "_asyncio.py",
        "        await self._directory.refresh(reservation.server, timeout_s=self._timeout_s)\n        self._directory.core.rebind(",
        "        await self._directory.refresh(reservation.server, timeout_s=self._timeout_s)\n        (lambda *_: None)(",
        LOOP,
    ),
    Mutant(
        "record without generation is fetched",
        "_asyncio.py",
        "if self._revalidate and self._reservation.generation is not None:",
        "if self._revalidate:",
        LOOP,
    ),
    Mutant("expiry never runs by itself", "_asyncio.py", "            self._expiry = loop.call_later(self.config.reservation_ttl_s, self._expire)", "            pass", LOOP),
    # -- discovery
    Mutant("listing removes nothing", "_discovery.py", "            elif key not in self._suspects:\n                self._delete(key)", "            elif key not in self._suspects:\n                pass", STORE),
    Mutant("forgetful store removes at once", "_discovery.py", "forgetful = snapshot.revision < self._revision", "forgetful = False", STORE),
    Mutant("watch from now instead of the listing", "_asyncio_discovery.py", "await self._follow(snapshot.revision)", "await self._follow(snapshot.revision + 1)", STORE),
    Mutant("bad entry ends the following", "_discovery.py", "        except EndpointError as error:\n            # The last good", "        except ZeroDivisionError as error:\n            # The last good", STORE),
    Mutant("withdrawal without comparing", "_asyncio_discovery.py", "        if old is None or old[1] != revision:\n            return False", "        if old is None:\n            return False", STORE),
    Mutant("lost lease is not noticed", "_asyncio_discovery.py", "if not await self._store.keep_alive(self._lease):", "if not await self._store.keep_alive(self._lease) and False:", STORE),
    Mutant("retries in step", "_asyncio_discovery.py", "self._retry_in_s = limit_s * (0.5 + 0.5 * self._random())", "self._retry_in_s = limit_s", STORE),
    # -- idle and ids
    Mutant("notification lost before the wait", "_backoff.py", "if self._seen == self._notifications and wait_s > 0.0:", "if wait_s > 0.0:", ("backoff",)),
    Mutant("sleep beyond the cap", "_backoff.py", "self._next_s = min(2 * wait_s, self.cap_s) if wait_s else self.first_s", "self._next_s = 2 * wait_s if wait_s else self.first_s", ("backoff", "invariants")),
    Mutant("counter wraps into the same millisecond", "_ids.py", "                self._enter(self._time + 1)\n            value", "                self._counter = 0\n            value", ("ids",)),
    Mutant("restart before the written window", "_ids.py", "super().__init__(node_id, end_ms + 1,", "super().__init__(node_id, 0,", ("ids", "hazards")),
    Mutant("window used before it is written", "_ids.py", "        if millisecond <= self._reserved:\n            return\n        end", "        if True:\n            return\n        end", ("ids", "hazards")),
    Mutant("async notification lost", "_asyncio.py", "        if self._seen == self._notifications:\n            if wait_s == 0.0:", "        if True:\n            if wait_s == 0.0:", ("backoff", "invariants")),
)  # fmt: skip


def killed(mutant: Mutant) -> tuple[bool, str]:
    """Plant it in a copy and run its tests; (whether one failed, which)."""
    with tempfile.TemporaryDirectory(prefix="endpoint-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(PACKAGE / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "endpoint_lifecycle" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return False, f"its text stands {text.count(mutant.old)} times in {mutant.file}"
        path.write_text(text.replace(mutant.old, mutant.new))
        environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        for name in mutant.tests:
            command = [
                *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"),
                *("-m", "not slow and not etcd and not service", "-o", "timeout=60", "--no-header"),
                str(PACKAGE / "tests" / f"test_{name}.py"),
            ]
            try:
                done = subprocess.run(
                    command, env=environment, cwd=PACKAGE, capture_output=True, text=True, timeout=LIMIT_S
                )
            except subprocess.TimeoutExpired:
                return True, f"test_{name} (no end)"
            if done.returncode not in (0, 1) and "Timeout" not in done.stdout + done.stderr:
                return False, f"pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
            if done.returncode != 0:
                failed = next(
                    (line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))),
                    "FAILED (no end)",
                )
                return True, failed.removeprefix("FAILED ").split(" - ")[0].rpartition("::")[2]
    return False, "all its tests passed"


def main() -> int:
    """Run the mutants; 0 if every one was killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--nightly", action="store_true", help="all of them, as without")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.list or not chosen:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0 if chosen else 1
    survivors = []
    started_s = time.monotonic()
    for mutant in chosen:
        dead, by = killed(mutant)
        print(f"{'killed  ' if dead else 'SURVIVED'} {mutant.name}: {by}", flush=True)
        if not dead:
            survivors.append(mutant.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed in {time.monotonic() - started_s:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
