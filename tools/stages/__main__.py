"""Run stages: ``python tools/stages --stage-list "A10-PyTorch-1,A100X-*"``, or a comment: ``python tools/stages --comment
'/bot run --disable-fail-fast --stage-list "..."'``.

Exit codes: 0 PASSED, REUSED or FLAKY; 1 FAILED; 2 unknown stage, bad list or empty selection, nothing was run; 3 NO COVERAGE
or NOT RUN. The worst stage decides.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "stages"

from stages import checking, matrix
from stages.bundle import Bundle, bundle_folder, provenance, reusable_stage
from stages.comment import REFUSED, arguments_of_comment
from stages.errors import StageError, nearest
from stages.execution import Runner, StageResult
from stages.hardware import probe, usable_cores, workers_of
from stages.plan import Options, RunPlan, make_plan, stages_of
from stages.sharding import read_durations
from stages.table import read_table
from stages.verdicts import EXIT_CODES, Verdict

ROOT = Path(__file__).resolve().parents[2]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        hint = nearest(unknown, self._option_string_actions) if unknown.startswith("--") else ""
        raise StageError(f"{message}{hint}")


class _Refuse(argparse.Action):
    """An option of the field that has nothing to act on here."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        raise StageError(f"{option_string}: {REFUSED[str(option_string)]}")


def parser() -> argparse.ArgumentParser:
    """The options; a comment line has the same."""
    made = _Parser(prog="stages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                   allow_abbrev=False)  # fmt: skip
    made.add_argument("--stage-list", metavar="A,B-*", help="only these stages; * stands for anything")
    made.add_argument("--extra-stage", metavar="A,B", help="these stages, too")
    made.add_argument("--kind", metavar="a10", help="only the stages of a hardware kind, as stages.yml has them")
    made.add_argument("--gpu-type", metavar="A10,…", help="only stages whose name begins with one of these words")
    made.add_argument("--test-backend", metavar="pytorch,…", help="only stages of these backends, or of none")
    made.add_argument("--post-merge", action="store_true", help="post-merge stages, too")
    made.add_argument(
        "--disable-fail-fast", dest="fail_fast", action="store_false", help="go on after a stage has failed"
    )
    reuse = made.add_mutually_exclusive_group()
    reuse.add_argument(
        "--reuse-test", nargs="?", const="", metavar="RUN",
        help="take over stages that passed at this very commit, in any earlier run or in the one of that name",
    )  # fmt: skip
    reuse.add_argument("--disable-reuse-test", action="store_true", help="take nothing over (the default)")
    reuse.add_argument(
        "--reuse-pipeline", action="store_true", help="run nothing: take over what passed at this commit"
    )
    several = made.add_mutually_exclusive_group()
    for word, name, text in (
        ("only", "--only-multi-gpu-test", "only stages that take several GPUs"),
        ("without", "--disable-multi-gpu-test", "no stage that takes several GPUs"),
        ("add", "--add-multi-gpu-test", "stages that take several GPUs beside those that the filters leave"),
    ):
        several.add_argument(name, dest="multi_gpu", action="store_const", const=word, help=text)
    made.add_argument(
        "--skip-test", nargs="?", const="no tests were asked for", metavar="REASON",
        help="run nothing: every stage is NOT RUN, for that reason",
    )  # fmt: skip
    made.add_argument("--detailed-log", action="store_true", help="every test by name, with what it printed")
    for name in REFUSED:
        made.add_argument(name, nargs="*", action=_Refuse, help=argparse.SUPPRESS)
    made.add_argument(
        "--accept-capability", metavar="9.0", help="any GPU of this compute capability will do; any: any GPU at all"
    )
    made.add_argument("--dry-run", action="store_true", help="print each stage's tests and run nothing")
    made.add_argument("--list", action="store_true", help="print the stages and leave")
    made.add_argument("--stages-of", metavar="TEST", help="print the stages that run a test, file or folder and leave")
    made.add_argument("--comment", metavar="TEXT", help="take the options from a /bot line")
    made.add_argument("--lists", type=Path, default=ROOT / "testlists", help=argparse.SUPPRESS)
    made.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    made.add_argument("--results", type=Path, default=ROOT / "results", help="folder for result bundles")
    made.add_argument(
        "--workers",
        type=_count,
        default=workers_of(usable_cores()),
        help="processes for tests that are safe in parallel",
    )
    made.add_argument("--store-durations", action="store_true", help="write the lines' durations for the next shards")
    made.add_argument("--check", action="store_true", help="validate table, lists and waivers and leave")
    made.add_argument("--parity", action="store_true", help="with --check: also against pytest's collection")
    made.add_argument("--matrix", action="store_true", help="print the hosted CI's workflow and leave")
    return made


def _count(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,3}", text):
        raise argparse.ArgumentTypeError(f"want a whole number of at least 1, got {text!r}")
    return int(text)


def print_plan(run: RunPlan) -> None:
    """A dry run's output."""
    for plan in run.stages:
        print(f"{plan.stage.name}: " + (f"NO COVERAGE: {plan.lacking}" if plan.lacking else f"{len(plan.lines)} lines"))
        for line in plan.lines:
            print(f"  {line.identity}" + (" ISOLATION" if line.isolated else ""))
        for line, waiver in plan.waived:
            print(f"  waived: {line.identity} ({waiver.reason})")


def run_stages(arguments: argparse.Namespace) -> int:
    """Plan and run; the exit code is the worst stage's."""
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    hardware = probe()
    run = make_plan(arguments.lists, options, hardware)
    for warning in run.warnings:
        print(f"warning: {warning}", flush=True)
    if arguments.dry_run:
        print_plan(run)
        return 0
    origin = provenance(arguments.root, run, hardware)
    wanted = "" if options.reuse_pipeline else options.reuse_test
    earlier = earlier_runs(arguments.results, wanted) if wanted is not None else []
    folder = bundle_folder(arguments.results, origin["commit"])
    bundle = Bundle(folder, run, origin)
    runner = Runner(
        arguments.root, say=lambda text: print(f"== {text}", flush=True), workers=arguments.workers,
        detailed_log=options.detailed_log,
    )  # fmt: skip
    # Whoever stops the run, however often, gets a bundle that says what is known. Both by hand: whoever started this in the
    # background may have left them ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: runner.interrupt())
    results: list[StageResult] = runner.run(
        run,
        folder,
        reusable=lambda plan: reusable_stage(earlier, plan, origin),
        after=lambda known: bundle.write(known, complete=False) and None,
    )
    verdict = bundle.write(results, complete=True)
    if arguments.store_durations:
        store_durations(arguments.lists, results)
    print(f"\n{(folder / 'summary.md').read_text('utf-8')}")
    print(f"bundle: {folder}")
    failed = sum(case.failed for result in results for case in result.cases)
    passed = sum(result.count("passed") for result in results)
    partly = " (Partly Tested)" if run.partly else ""
    print(f"{verdict.value}{partly}")
    print(f"{passed} passed, {failed} failed", flush=True)
    return EXIT_CODES[verdict]


def earlier_runs(results: Path, wanted: str) -> list[Path]:
    """Bundles to take results from: the one of that name, or all."""
    found = sorted(path.parent for path in results.glob("*/results.json"))
    if wanted and wanted not in {path.name for path in found}:
        raise StageError(f"no run {wanted!r} in {results}{nearest(wanted, [path.name for path in found])}")
    return [results / wanted] if wanted else found


def store_durations(folder: Path, results: list[StageResult]) -> None:
    """Remember how long lines took; lines that were not run keep what is known about them."""
    path = folder / "durations.json"
    known = read_durations(path)
    known |= {line.line.identity: line.seconds for result in results for line in result.lines if line.seconds}
    rounded = {identity: round(seconds, 1) for identity, seconds in known.items()}
    path.write_text(json.dumps(rounded, indent=1, sort_keys=True) + "\n", "utf-8")


def main(words: list[str] | None = None) -> int:
    """The command line."""
    words = sys.argv[1:] if words is None else words
    try:
        arguments = parser().parse_args(words)
        if arguments.comment is not None:
            arguments = parser().parse_args(arguments_of_comment(arguments.comment), arguments)
        if arguments.stages_of is not None:
            for stage, line in stages_of(arguments.lists, arguments.stages_of):
                print(f"{stage.name:36} {line.identity}")
            return 0
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
    except KeyboardInterrupt:
        print("stages: interrupted before a stage was begun", file=sys.stderr)
        return EXIT_CODES[Verdict.NOT_RUN]


if __name__ == "__main__":
    sys.exit(main())
