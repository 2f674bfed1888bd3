"""The hosted CI's workflow, generated from the stage table; a test fails when the committed one drifts from it."""

from __future__ import annotations

from .table import HARDWARE, Stage

#: Where the generated workflow is kept, from the repository's root.
PATH = ".github/workflows/stages.yml"
_HEADER = """\
# Generated from testlists/stages.yml by `python tools/stages --matrix`; a test fails when it differs. Do not edit.
name: stages

on:
  pull_request:
  push:
    branches: [main]
  workflow_dispatch:

permissions:
  contents: read

jobs:
"""


def workflow(stages: tuple[Stage, ...]) -> str:
    """The workflow's text: one job per hardware kind, its stages as the matrix; GPU kinds on runners labelled by kind."""
    jobs = []
    for kind, pattern in HARDWARE.items():
        mine = [stage for stage in stages if stage.hardware == kind and not stage.on_demand]
        if not mine:
            continue
        runner = "ubuntu-latest" if pattern is None else f"[self-hosted, {kind}]"
        entries = "".join(
            f"          - stage: {stage.name}\n            post_merge: {str(stage.post_merge).lower()}\n"
            for stage in mine
        )
        jobs.append(
            f"  {kind}:\n"
            f"    runs-on: {runner}\n"
            "    timeout-minutes: 90\n"
            "    strategy:\n"
            "      fail-fast: false\n"
            "      matrix:\n"
            f"        include:\n{entries}"
            "    steps:\n"
            "      - uses: actions/checkout@v4\n"
            "      - uses: actions/setup-python@v5\n"
            "        with:\n"
            '          python-version: "3.11"\n'
            "      - if: ${{ !matrix.post_merge || github.event_name != 'pull_request' }}\n"
            '        run: python3 tools/bootstrap.py -s stages -- --stage-list "${{ matrix.stage }}"\n'
            "      - if: always()\n"
            "        uses: actions/upload-artifact@v4\n"
            "        with:\n"
            "          name: results-${{ matrix.stage }}-${{ github.run_attempt }}\n"
            "          path: results\n"
            "          if-no-files-found: ignore\n"
        )
    return _HEADER + "\n".join(jobs)
