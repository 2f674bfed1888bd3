"""Run every verb × every outcome on every path, print the table, and fail where two paths disagree without a reason."""

from __future__ import annotations

import argparse
import logging
import sys

from rpc_local_registry.testing import matrix_differences, matrix_table, run_matrix


def main() -> int:
    """Print and compare."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    logging.getLogger("rpc_local_registry").setLevel(logging.CRITICAL)
    cells = run_matrix()
    wrong = matrix_differences(cells)
    sys.stdout.write(matrix_table(cells) + "\n")
    sys.stdout.write(f"{len(cells)} cells on 3 paths; {len(wrong)} disagree without a documented reason\n")
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
