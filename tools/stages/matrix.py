"""The hosted CI's workflow, generated from the stage table; a test fails when the committed one drifts from it."""

from __future__ import annotations

from .table import Stage

#: Where the generated workflow is kept, from the repository's root.
PATH = ".github/workflows/stages.yml"
#: What lets post-merge stages run before a merge.
APPROVAL = "ci: post-merge approved"
_HEADER = """\
# Generated from testlists/stages.yml by `python tools/stages --matrix`; a test fails when it differs. Do not edit.
name: stages

on:
  pull_request:
    types: [opened, synchronize, reopened, labeled]
  push:
    branches: [main]
  workflow_dispatch:

permissions:
  contents: read

# A change that is pushed or labelled again ends the run of what it was before.
concurrency:
  group: stages-${{ github.ref }}
  cancel-in-progress: ${{ github.event_name == 'pull_request' }}

jobs:
"""
#: A change of this repository itself: the code of a fork never reaches a machine of ours.
_OURS = "github.event_name != 'pull_request' || github.event.pull_request.head.repo.full_name == github.repository"
_APPROVED = f"github.event_name != 'pull_request' || contains(github.event.pull_request.labels.*.name, '{APPROVAL}')"
_SETUP = """\
    steps:
      - uses: actions/checkout@v4
        with:
          persist-credentials: false
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
"""


def workflow(stages: tuple[Stage, ...]) -> str:
    """The workflow's text: lint, types and docs, then a job per hardware kind with its stages as the matrix; GPU kinds on
    runners labelled by kind, and those for changes of this repository only.

    Post-merge stages are jobs of their own: before a merge the whole job is skipped, and shown so, unless it was approved. A
    step that is skipped would leave a green job that ran nothing.
    """
    jobs = [_check("lint"), _check("types"), _check("docs")]
    for kind in dict.fromkeys(stage.hardware for stage in stages):
        for post_merge in (False, True):
            mine = [s for s in stages if s.hardware == kind and s.post_merge is post_merge and not s.on_demand]
            if mine:
                jobs.append(_job(kind, mine, post_merge=post_merge, hosted=mine[0].gpu_pattern is None))
    return _HEADER + "\n".join(jobs)


def _check(session: str) -> str:
    return (
        f"  {session}:\n    runs-on: ubuntu-latest\n    timeout-minutes: 30\n{_SETUP}"
        f"      - run: python3 tools/bootstrap.py -s {session}\n"
    )


def _job(kind: str, stages: list[Stage], *, post_merge: bool, hosted: bool) -> str:
    conditions = [_APPROVED] if post_merge else []
    conditions += [] if hosted else [_OURS]
    condition = " && ".join(f"({text})" for text in conditions)
    return (
        f"  {kind}{'-post-merge' if post_merge else ''}:\n"
        + (f'    if: "${{{{ {condition} }}}}"\n' if condition else "")
        + f"    runs-on: {'ubuntu-latest' if hosted else f'[self-hosted, {kind}]'}\n"
        "    timeout-minutes: 90\n"
        "    strategy:\n"
        "      fail-fast: false\n"
        "      matrix:\n"
        "        stage:\n"
        + "".join(f'          - "{stage.name}"\n' for stage in stages)
        + _SETUP
        + '      - run: python3 tools/bootstrap.py -s stages -- --stage-list "${{ matrix.stage }}"\n'
        "      - if: always()\n"
        "        uses: actions/upload-artifact@v4\n"
        "        with:\n"
        "          name: results-${{ matrix.stage }}-${{ github.run_attempt }}\n"
        "          path: results\n"
        "          if-no-files-found: error\n"
    )
