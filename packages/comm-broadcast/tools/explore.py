"""Exceptions before every bytecode of every call, and small programs of calls against an oracle, exhaustively.

    python tools/explore.py                     # fakes: every bytecode; programs; then MPI on 2 and 4 ranks
    python tools/explore.py --fakes | --programs | --random | --mpi 2 4 [--count 2000]
    python tools/explore.py --mpi 4 --forms level --verbs gather     # one part of it, to run several at once

Prints a line per part; exit 1 when a rank would wait for ever, differ from the others, or not work afterwards.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT.parents[1] / "tools")]

import broadcast_injection as injection  # noqa: E402
import broadcast_programs as programs  # noqa: E402
import broadcast_random  # noqa: E402

from worlds import launcher  # noqa: E402


def fakes(form: str, verbs: list[str], sizes: list[int], stride: int) -> None:
    """Every bytecode of each call, both ways to wait, small and large payloads."""
    for size in sizes:
        for verb in verbs:
            count = 0
            for victim in (0, 1):
                for payload in injection.PAYLOADS:
                    for way in ("block", "handle"):
                        # A payload's steps repeat: its bytecodes are sampled, a small value's all taken.
                        step = stride if payload == "small" else 7 * stride
                        count += injection.sweep(form, size, victim, verb, payload, way, stride=step)
            print(f"fakes, {form}, {size} ranks, {verb}: {count} injections, 0 hangs, 0 silent breaks", flush=True)
        count = sum(injection.sweep_close(form, size, victim, stride) for victim in (0, 1))
        print(f"fakes, {form}, {size} ranks, close: {count} injections, 0 hangs", flush=True)


def over_mpi(size: int, forms: list[str], verbs: list[str], count: int) -> None:
    """One world of ranks for all calls; its first rank prints."""
    options = ["--rank", "--count", str(count), "--forms", *forms, "--verbs", *verbs]
    program = [sys.executable, "-m", "mpi4py", __file__, *options]
    subprocess.run(launcher.find_launcher().command(size, program), check=True, timeout=3600)


#: A call has about so many bytecodes, polls apart; what lies beyond them does not hit.
BYTECODES = {"small": 1200, "pieces": 2400, "large": 3200}
#: Injections of one pass over them (count); the next pass begins one bytecode later.
PASS = 50


def rank_main(forms: list[str], verbs: list[str], count: int) -> None:
    """One rank of :func:`over_mpi`."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for form, verb in itertools.product(forms, verbs):
        hits = 0
        for first in itertools.count(1):
            if hits >= count:
                break
            for victim, payload in itertools.product((0, comm.size - 1), injection.PAYLOADS):
                stride = BYTECODES[payload] // PASS
                found = injection.on_ranks(comm, form, verb, payload, victim, first, PASS, stride)
                hits += comm.bcast(found, root=victim)
        if comm.rank == 0:
            print(f"MPI, {form}, {comm.size} ranks, {verb}: {hits} injections, 0 hangs, 0 silent breaks", flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fakes", action="store_true")
    parser.add_argument("--programs", action="store_true")
    parser.add_argument("--random", action="store_true", help="random programs with exceptions, --count of them")
    parser.add_argument("--mpi", type=int, nargs="+", default=[])
    parser.add_argument("--count", type=int, default=2000, help="injections per call over MPI, random programs (count)")
    parser.add_argument("--stride", type=int, default=1, help="fakes: every so many bytecodes")
    parser.add_argument("--forms", nargs="+", choices=list(injection.FORMS), default=list(injection.FORMS))
    parser.add_argument("--verbs", nargs="+", choices=injection.VERBS, default=list(injection.VERBS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="fakes: ranks (count)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.forms, options.verbs, options.count)
        return
    everything = not (options.fakes or options.programs or options.random or options.mpi)
    if options.programs or everything:
        for form in programs.FORMS:
            print(
                f"programs of two calls on two ranks, {form}: {programs.explore(form)} runs as the oracle says",
                flush=True,
            )
    if options.fakes or everything:
        for form in options.forms:
            fakes(form, options.verbs, options.sizes, options.stride)
    if options.random or everything:
        hits = sum(map(broadcast_random.run, range(options.count)))
        print(f"random programs: {options.count}, {hits} injections, 0 hangs, 0 silent breaks", flush=True)
    for size in options.mpi or ((2, 4) if everything else ()):
        over_mpi(size, options.forms, options.verbs, options.count)


if __name__ == "__main__":
    main()
