"""Explore every interleaving of the small worlds over the real core: states and transitions are printed."""

# ruff: noqa: T201, PT
from __future__ import annotations

import argparse
import sys
import time

from pp_agreement.testing import CI_WORLDS, NIGHTLY_WORLDS, Explorer


def main() -> int:
    """Exit code 0: every world complete, without a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="worlds; without a name those of CI")
    parser.add_argument("--nightly", action="store_true", help="the larger worlds as well")
    parser.add_argument("--states-max", type=int, default=6_000_000)
    options = parser.parse_args()
    worlds = {**CI_WORLDS, **NIGHTLY_WORLDS}
    unknown = [n for n in options.names if n not in worlds]
    if unknown:
        parser.error(f"no such world: {', '.join(unknown)}; there are {', '.join(worlds)}")
    names = options.names or [*CI_WORLDS, *(NIGHTLY_WORLDS if options.nightly else ())]
    bad = 0
    print(f"{'world':36} {'states':>9} {'transitions':>11} {'cores':>7} {'executed':>8} {'ends':>6} {'s':>6}")
    for name in names:
        began_s = time.monotonic()
        found = Explorer(worlds[name], states_max=options.states_max).run()
        spent_s = time.monotonic() - began_s
        verdict = found.violation or ("" if found.complete else "not complete")
        print(
            f"{name:36} {found.states:9} {found.transitions:11} {found.cores:7} {found.executed:8} {found.finished:6} "
            f"{spent_s:6.1f} {verdict}",
            flush=True,
        )
        if verdict:
            bad += 1
            print("    " + " | ".join(found.trace))
    print(f"{len(names) - bad} of {len(names)} worlds complete without a violation")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
