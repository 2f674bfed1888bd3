"""Run stages: ``python tools/stages --stage-list "A10-PyTorch-1,A100X-*"``, or a comment: ``python tools/stages --comment
'/bot run --disable-fail-fast --stage-list "..."'``.

Exit codes: 0 PASSED, REUSED or FLAKY; 1 FAILED; 2 unknown stage, bad list or empty selection, nothing was run; 3 NO COVERAGE
or NOT RUN. The worst stage decides.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "stages"

from stages import checking, matrix
from stages.bundle import Bundle, provenance, reusable_stage
from stages.comment import arguments_of_comment
from stages.errors import StageError
from stages.execution import Runner, StageResult
from stages.hardware import probe, read_hardware
from stages.plan import Options, RunPlan, make_plan
from stages.table import HARDWARE, read_table
from stages.verdicts import EXIT_CODES

ROOT = Path(__file__).resolve().parents[2]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise StageError(message)


def parser() -> argparse.ArgumentParser:
    """The options; a comment line has the same."""
    made = _Parser(prog="stages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--stage-list", metavar="A,B-*", help="only these stages; * stands for anything")
    made.add_argument("--extra-stage", metavar="A,B", help="these stages, too")
    made.add_argument("--kind", choices=sorted(HARDWARE), help="only the stages of a hardware kind")
    made.add_argument("--gpu-type", metavar="A10,…", help="only stages whose name begins with one of these words")
    made.add_argument("--test-backend", metavar="pytorch,…", help="only stages of these backends, or of none")
    made.add_argument("--post-merge", action="store_true", help="post-merge stages, too")
    made.add_argument("--disable-fail-fast", action="store_true", help="go on after a stage has failed")
    made.add_argument("--reuse-test", action="store_true", help="take over stages that passed at this very commit")
    made.add_argument("--accept-capability", metavar="9.0", help="any GPU of this compute capability will do")
    made.add_argument(
        "--hardware", type=Path, metavar="FILE", help="describe the machine instead of probing it (dry runs)"
    )
    made.add_argument("--dry-run", action="store_true", help="print each stage's tests and run nothing")
    made.add_argument("--list", action="store_true", help="print the stages and leave")
    made.add_argument("--comment", metavar="TEXT", help="take the options from a /bot run line")
    made.add_argument("--lists", type=Path, default=ROOT / "testlists", help=argparse.SUPPRESS)
    made.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    made.add_argument("--results", type=Path, default=ROOT / "results", help="folder for result bundles")
    made.add_argument("--workers", type=int, default=2, help="processes for tests that are safe in parallel")
    made.add_argument("--store-durations", action="store_true", help="write the lines' durations for the next shards")
    made.add_argument("--check", action="store_true", help="validate table, lists and waivers and leave")
    made.add_argument("--parity", action="store_true", help="with --check: also against pytest's collection")
    made.add_argument("--matrix", action="store_true", help="print the hosted CI's workflow and leave")
    return made


def print_plan(run: RunPlan) -> None:
    """A dry run's output."""
    for plan in run.stages:
        print(f"{plan.stage.name}: " + (f"NO COVERAGE: {plan.lacking}" if plan.lacking else f"{len(plan.lines)} lines"))
        for line in plan.lines:
            print(f"  {line.identity}" + (" ISOLATION" if line.isolated else ""))
        for line, waiver in plan.waived:
            print(f"  waived: {line.identity} ({waiver.reason})")
    for warning in run.warnings:
        print(f"warning: {warning}")


def run_stages(arguments: argparse.Namespace) -> int:
    """Plan and run; the exit code is the worst stage's."""
    options = Options(
        stage_list=arguments.stage_list,
        kind=arguments.kind,
        extra_stage=arguments.extra_stage,
        gpu_type=arguments.gpu_type,
        test_backend=arguments.test_backend,
        post_merge=arguments.post_merge,
        fail_fast=not arguments.disable_fail_fast,
        reuse=arguments.reuse_test,
        accept_capability=arguments.accept_capability,
    )
    if arguments.hardware is not None and not arguments.dry_run:
        raise StageError("--hardware describes another machine: it goes with --dry-run only")
    hardware = read_hardware(arguments.hardware) if arguments.hardware else probe()
    run = make_plan(arguments.lists, options, hardware)
    if arguments.dry_run:
        print_plan(run)
        return 0
    for warning in run.warnings:
        print(f"warning: {warning}", flush=True)
    origin = provenance(arguments.root, run, hardware)
    earlier = [path.parent for path in arguments.results.glob("*/results.json")]
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    folder = arguments.results / f"{stamp}-{origin['commit'][:8] or 'uncommitted'}"
    number = 1
    while folder.exists():
        number += 1
        folder = arguments.results / f"{stamp}-{origin['commit'][:8] or 'uncommitted'}-{number}"
    bundle = Bundle(folder, run, origin)
    # A terminated run ends like an interrupted one: with a bundle that says so. SIGINT, too, by hand: whoever started this in
    # the background may have left it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    runner = Runner(arguments.root, say=lambda text: print(f"== {text}", flush=True), workers=arguments.workers)
    results: list[StageResult] = runner.run(
        run,
        folder,
        reusable=lambda plan: reusable_stage(earlier, plan.stage.name, origin) if options.reuse else None,
        after=lambda known: bundle.write(known, complete=False) and None,
    )
    verdict = bundle.write(results, complete=True)
    if arguments.store_durations:
        store_durations(arguments.lists / "durations.json", results)
    print(f"\n{(folder / 'summary.md').read_text('utf-8')}")
    print(f"bundle: {folder}")
    failed = sum(case.failed for result in results for case in result.cases)
    passed = sum(result.count("passed") for result in results)
    partly = " (Partly Tested)" if run.partly else ""
    print(f"{verdict.value}{partly}")
    print(f"{passed} passed, {failed} failed", flush=True)
    return EXIT_CODES[verdict]


def store_durations(path: Path, results: list[StageResult]) -> None:
    """Remember how long each line took; lines that were not run keep what is known about them."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for result in results:
        for identity, seconds in result.line_seconds.items():
            if " + " not in identity:
                known[identity] = round(seconds, 1)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")


def main(words: list[str] | None = None) -> int:
    """The command line."""
    words = sys.argv[1:] if words is None else words
    try:
        arguments = parser().parse_args(words)
        if arguments.comment is not None:
            arguments = parser().parse_args([*words_without_comment(words), *arguments_of_comment(arguments.comment)])
        if arguments.list:
            for stage in read_table(arguments.lists / "stages.yml"):
                print(f"{stage.name:36} {stage.hardware:6} {stage.gpus} GPUs  {stage.ranks} ranks  {stage.list_file}")
            return 0
        if arguments.matrix:
            print(matrix.workflow(read_table(arguments.lists / "stages.yml")), end="")
            return 0
        if arguments.check:
            return checking.report(arguments.root, arguments.lists, parity=arguments.parity)
        return run_stages(arguments)
    except StageError as error:
        print(f"stages: error: {error}", file=sys.stderr)
        return 2


def words_without_comment(words: list[str]) -> list[str]:
    """The command line's own options beside ``--comment TEXT``."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == "--comment":
            skip = True
        elif not word.startswith("--comment="):
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(main())
