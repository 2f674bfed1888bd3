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

# A change that is pushed again ends the run of what it was before.
concurrency:
  group: stages-${{ github.ref }}
  cancel-in-progress: ${{ github.event_name == 'pull_request' }}

jobs:
"""
#: What lets post-merge stages run before a merge.
APPROVAL = "ci: post-merge approved"


def workflow(stages: tuple[Stage, ...]) -> str:
    """The workflow's text: one job per hardware kind, its stages as the matrix; GPU kinds on runners labelled by kind.

    Post-merge stages are jobs of their own: before a merge the whole job is skipped, and shown so, unless it was approved. A
    step that is skipped would leave a green job that ran nothing.
    """
    jobs = []
    for kind, pattern in HARDWARE.items():
        for post_merge in (False, True):
            mine = [s for s in stages if s.hardware == kind and s.post_merge is post_merge and not s.on_demand]
            if mine:
                jobs.append(_job(kind, mine, post_merge=post_merge, hosted=pattern is None))
    return _HEADER + "\n".join(jobs)


def _job(kind: str, stages: list[Stage], *, post_merge: bool, hosted: bool) -> str:
    condition = (
        "    if: \"${{ github.event_name != 'pull_request' || "
        f"contains(github.event.pull_request.labels.*.name, '{APPROVAL}') }}}}\"\n"
    )
    return (
        f"  {kind}{'-post-merge' if post_merge else ''}:\n"
        + (condition if post_merge else "")
        + f"    runs-on: {'ubuntu-latest' if hosted else f'[self-hosted, {kind}]'}\n"
        "    timeout-minutes: 90\n"
        "    strategy:\n"
        "      fail-fast: false\n"
        "      matrix:\n"
        "        stage:\n" + "".join(f"          - {stage.name}\n" for stage in stages) + "    steps:\n"
        "      - uses: actions/checkout@v4\n"
        "      - uses: actions/setup-python@v5\n"
        "        with:\n"
        '          python-version: "3.11"\n'
        '      - run: python3 tools/bootstrap.py -s stages -- --stage-list "${{ matrix.stage }}"\n'
        "      - if: always()\n"
        "        uses: actions/upload-artifact@v4\n"
        "        with:\n"
        "          name: results-${{ matrix.stage }}-${{ github.run_attempt }}\n"
        "          path: results\n"
        "          if-no-files-found: error\n"
    )
