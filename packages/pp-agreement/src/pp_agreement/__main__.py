"""Command line: ``pp-agreement verify FILE...`` and ``pp-agreement figures``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pp_agreement.__about__ import __version__
from pp_agreement._figures import figures
from pp_agreement._verify import read_evidence, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: equal and complete; 1: something differs; 2: cannot be read."""
    parser = argparse.ArgumentParser(prog="pp-agreement", description="Agreement of pipeline ranks: tools.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="compare the evidence files of all ranks of one lifetime")
    command.add_argument("files", nargs="+", type=Path, metavar="FILE")
    commands.add_parser("figures", help="print the state diagrams and the message table, drawn from the tables")
    options = parser.parse_args(arguments)
    if options.command == "figures":
        print(figures())
        return 0
    records = []
    for path in options.files:
        try:
            records.extend(read_evidence(path))
        except (OSError, ValueError) as error:
            print(f"cannot read: {error}", file=sys.stderr)
            return 2
    found = verify(records)
    for difference in found:
        print(difference)
    if not found:
        first = records[0]
        print(
            f"{len(records)} ranks agree: {first['committed']} committed + {first['closed']} closed of "
            f"{first['admitted']} admitted, mode {first['mode']}, digest {first['digest']}"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
