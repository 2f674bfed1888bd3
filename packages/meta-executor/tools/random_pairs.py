# ruff: noqa: T201
"""Many random interleavings of two in-process instances: ``python packages/meta-executor/tools/random_pairs.py --count N``.

Prints what was run; exit 1 with the seed of the first failure, which replays it alone (``--seed S --count 1``).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import traceback
from pathlib import Path


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200, help="runs per schedule style")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--style", choices=("context_first", "generation_first", "both"), default="both")
    options = parser.parse_args()
    path = Path(__file__).resolve().parents[1] / "tests" / "executor" / "test_pair_random.py"
    spec = importlib.util.spec_from_file_location("pair_random", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    styles = ("context_first", "generation_first") if options.style == "both" else (options.style,)
    started_s = time.monotonic()
    totals = {"completed": 0, "cancelled": 0, "expired": 0}
    for seed in range(options.seed, options.seed + options.count):
        for style in styles:
            try:
                # Leases belong to the generation-first schedule; every other run has short ones.
                leases = style == "generation_first" and seed % 2 == 1
                counts = module.drive_randomly(seed, style=style, leases=leases)
            except BaseException:  # noqa: BLE001 - any failure is reported with its seed
                traceback.print_exc()
                print(f"FAILED: --style {style} --seed {seed} --count 1")
                return 1
            for name, count in counts.items():
                totals[name] += count
    runs = options.count * len(styles)
    print(f"{runs} runs, {totals['completed']} requests completed, {totals['cancelled']} cancelled or failed "
          f"({totals['expired']} of them by their lease), 0 failures, {time.monotonic() - started_s:.1f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
