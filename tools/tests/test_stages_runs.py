"""What the runner does with crashes, reruns, waivers, machines that fail and runs that run nothing, on small projects."""

import json
import os
from dataclasses import replace

import pytest

from stage_project import TABLE, commit, make_project, run, run_here, table_of, verdicts
from stages.bundle import Bundle, provenance
from stages.execution import LineResult, StageResult
from stages.hardware import Hardware
from stages.junit import CaseResult
from stages.plan import Options, make_plan
from stages.verdicts import Verdict

#: Each runs several pytest processes, one after the other; the limit is for what hangs.
pytestmark = pytest.mark.timeout(600)
ONE = Options(stage_list="CPU-Generic-1", fail_fast=False)


@pytest.fixture
def project(tmp_path):
    """One CPU stage that holds every line of its list."""
    make_project(tmp_path)
    (tmp_path / "lists" / "stages.yml").write_text(TABLE.replace(", shards: 2", ""))
    return tmp_path


def lines(project, *texts, waivers=""):
    body = "".join(f"  - {text}\n" for text in texts)
    (project / "lists" / "l0_cpu.yml").write_text(f"version: 0.0.1\nl0_cpu:\n- tests:\n{body}")
    (project / "lists" / "waives.txt").write_text(waivers)


def write_tests(project, **bodies):
    for name, body in bodies.items():
        (project / "t" / f"test_{name}.py").write_text(body)


def only(project, options=ONE, **more):
    """The one stage's result."""
    return run_here(project, options, **more)[1]["CPU-Generic-1"]


def outcomes(result):
    return {case.id.partition("::")[2] or case.id: case.attempts for case in result.cases}


#: Fails as long as no file of this name lies beside it.
ONCE = """
import pathlib


def test_{name}():
    flag = pathlib.Path(__file__).with_name("results-{name}")
    if not flag.exists():
        flag.touch()
        {act}
"""


def test_tests_that_a_crash_left_unbegun_are_begun_once(project):
    """The one that crashed never again; those after it once, in a process of their own; the stage is red all the same."""
    write_tests(
        project,
        good="import os\n\ndef test_a():\n    pass\n\ndef test_b():\n    os._exit(9)\n\ndef test_c():\n    pass\n",
    )
    lines(project, "t/test_good.py")
    result = only(project)
    assert result.verdict is Verdict.FAILED
    assert outcomes(result) == {"test_a": ("passed",), "test_b": ("unfinished",), "test_c": ("passed",)}


def test_what_never_began_is_counted(project):
    """A second crash is not followed by a third start: what is left is said."""
    crash = "import os\n\n" + "\n".join(f"def test_{i}():\n    os._exit(9)\n" for i in range(4))
    write_tests(project, good=crash)
    lines(project, "t/test_good.py")
    result = only(project)
    assert list(outcomes(result)) == ["test_0", "test_1"]
    assert "2 not started" in result.reason


def test_a_file_that_cannot_be_imported_does_not_take_the_others_along(project):
    """pytest runs nothing when one file cannot be collected; the other lines' tests are run after all."""
    write_tests(project, good="import nothing_like_it\n")
    result = only(project)
    assert result.verdict is Verdict.FAILED
    assert [c.outcome for c in result.cases if c.id.endswith("test_good.py")] == ["error"]
    assert outcomes(result)["test_b"] == ("passed",)


def test_more_than_five_failures_are_counted_over_the_whole_stage(project):
    """Three in each of two lines: no rerun; with two and three there is one."""
    bodies = {name: "\n".join(f"def test_{name}{i}():\n    raise ValueError\n" for i in range(3)) for name in "ab"}
    write_tests(project, good=bodies["a"], other=bodies["b"])
    lines(project, 't/test_good.py -k "a"', 't/test_other.py -k "b"')
    assert set(outcomes(only(project)).values()) == {("failed",)}
    write_tests(project, other="def test_b0():\n    raise ValueError\n")
    assert set(outcomes(only(project)).values()) == {("failed",) * 3}


def test_a_failure_in_parallel_is_tried_again_alone(project):
    """Two workers, then none: what only fails beside others is flaky, and both results stay."""
    write_tests(
        project,
        good="def test_a(request):\n    assert not hasattr(request.config, 'workerinput')\n",
        other="def test_b():\n    pass\n",
    )
    result = only(project, workers=2)
    assert result.verdict is Verdict.FLAKY
    assert outcomes(result) == {"test_a": ("failed", "passed"), "test_b": ("passed",)}


def test_a_worker_that_dies_leaves_an_unfinished_test(project):
    """In parallel, too: named, a failure, not tried again; the others' results stand."""
    write_tests(project, good="import os\n\ndef test_a():\n    os._exit(9)\n", other="def test_b():\n    pass\n")
    result = only(project, workers=2)
    assert result.verdict is Verdict.FAILED
    assert outcomes(result) == {"test_a": ("unfinished",), "test_b": ("passed",)}


def test_a_minutes_marker_is_what_one_test_may_take(project):
    """pytest-timeout reads it from there; a line without the marker leaves the project's own limit."""
    write_tests(
        project,
        good="import os\n\ndef test_a():\n    assert os.environ['PYTEST_TIMEOUT'] == '300'\n",
        other="import os\n\ndef test_b():\n    assert 'PYTEST_TIMEOUT' not in os.environ\n",
    )
    lines(project, "t/test_good.py TIMEOUT (5)", "t/test_other.py")
    old = os.environ.pop("PYTEST_TIMEOUT", None)
    try:
        assert only(project).verdict is Verdict.PASSED
    finally:
        if old is not None:
            os.environ["PYTEST_TIMEOUT"] = old


def test_waived_tests_are_taken_out_by_their_whole_name(project):
    """test_b is, test_bc is not; the waiver is reported with its reason, and is no pass."""
    write_tests(project, other="def test_b():\n    raise ValueError\n\n\ndef test_bc():\n    pass\n")
    lines(project, "t/test_other.py", waivers="t/test_other.py::test_b SKIP (known)\n")
    result = only(project)
    assert result.verdict is Verdict.PASSED
    assert outcomes(result) == {"test_bc": ("passed",)}
    assert result.waived == [("t/test_other.py::test_b", "known")]


def test_a_line_of_worlds_starts_no_workers(project):
    """Its expression says that all of it runs alone: one process, in which it ran."""
    (project / "t" / "test_w.py").write_text("import pytest\n\n@pytest.mark.service\ndef test_b():\n    pass\n")
    lines(project, 't/test_w.py -m "not slow and service"')
    result = only(project, workers=2)
    assert [case.outcome for case in result.cases] == ["passed"]
    log = next((project / "results").rglob("log.txt")).read_text()
    assert log.count("$ ") == 1 and "xdist" not in log


#: A file of two tests of a service, which waits until another one's first test has begun, and stays in one process.
SERVICE = """
import os, pathlib, time
import pytest

pytestmark = pytest.mark.service({arguments})
HERE = pathlib.Path(__file__)


def test_{name}1():
    HERE.with_name("results-{name}").write_text(str(os.getpid()))
    end = time.monotonic() + 100
    while not HERE.with_name("results-{other}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_{name}2():
    assert HERE.with_name("results-{name}").read_text() == str(os.getpid())
    {more}
"""


def test_files_of_services_run_two_at_a_time_and_worlds_alone(project):
    """What says that it takes longest begins first, beside the next one; one file is one worker's; the rest has no worker."""
    alone = "\n".join(
        f"@pytest.mark.{marks[0]}\n@pytest.mark.{marks[1]}\ndef test_{name}(request):\n"
        "    assert not hasattr(request.config, 'workerinput')\n"
        for name, marks in {"world": ("mpi", "slow"), "card": ("service", "gpu")}.items()
    )
    write_tests(
        project,
        good=SERVICE.format(arguments="", name="a", other="b", more="assert HERE.with_name('results-c').exists()"),
        b=SERVICE.format(arguments="seconds=5", name="b", other="c", more="pass"),
        c=SERVICE.format(arguments="seconds=9", name="c", other="b", more="pass"),
        d="import pytest\n\n" + alone,
    )
    (project / "t" / "test_gpu.py").unlink()
    lines(project, "t")
    result = only(project, workers=3)
    assert result.verdict is Verdict.PASSED, result.reason
    assert outcomes(result) == dict.fromkeys(
        ("test_a1", "test_a2", "test_b1", "test_b2", "test_c1", "test_c2", "test_world", "test_card"), ("passed",)
    ) | {"test_b": ("passed",)}
    log = next((project / "results").rglob("log.txt")).read_text()
    assert [line.partition("xdist ")[2] for line in log.splitlines() if line.startswith("$ ")] == [
        "-n 3 --dist worksteal", "-n 2 --dist loadfile --no-loadscope-reorder", "",
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_a_waived_file_below_a_folder_is_taken_out(project, workers):
    """Also in every worker; parameters of a waived test with it."""
    (project / "t" / "test_gpu.py").unlink()
    write_tests(
        project,
        good="import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_a(n):\n    raise ValueError\n",
        other="def test_b():\n    pass\n",
    )
    lines(project, "t", waivers="t/test_good.py::test_a SKIP (known)\n")
    result = only(project, workers=workers)
    assert (result.verdict, outcomes(result)) == (Verdict.PASSED, {"test_b": ("passed",)})
    assert [test for test, _ in result.waived] == ["t/test_good.py::test_a[1]", "t/test_good.py::test_a[2]"]
    # Warnings are errors there: what the runner's own plugin leaves open would fail a test that is collected after it.
    write_tests(project, other="import gc\n\ndef test_b():\n    gc.collect()\n\ndef test_c():\n    pass\n")
    lines(project, "t", waivers="t/test_good.py SKIP (all of it)\n")
    result = only(project, workers=workers)
    assert (result.verdict, outcomes(result)) == (Verdict.PASSED, {"test_b": ("passed",), "test_c": ("passed",)})
    assert {reason for _, reason in result.waived} == {"all of it"}


def test_a_line_whose_every_test_is_waived_is_neither_green_nor_misspelt(project):
    """NOT RUN: nothing of it ran, and that is known to be meant."""
    lines(project, "t/test_good.py", waivers="t/test_good.py::test_a SKIP (known)\n")
    result = only(project)
    assert (result.verdict, result.cases) == (Verdict.NOT_RUN, ())
    assert result.reason == "0 passed, 1 waived"


def test_a_machines_failure_stops_no_other_stage(project):
    """Fail-fast is for the product: stages that a broken machine would have taken along still run; no coverage stops none."""
    (project / "lists" / "stages.yml").write_text(TABLE)
    (project / "lists" / "durations.json").write_text('{"t/test_good.py": 9, "t/test_other.py": 1}')
    write_tests(project, good="import os\n\ndef test_a():\n    os._exit(9)\n")
    _, results = run_here(project, Options(stage_list="CPU-*"))
    assert {n: r.verdict for n, r in results.items()} == {
        "CPU-Generic-1": Verdict.FAILED, "CPU-Generic-2": Verdict.PASSED,
    }  # fmt: skip
    (project / "lists" / "stages.yml").write_text(
        table_of(
            "name: A10-PyTorch, hardware: a10, list: l0_a10.yml", "name: CPU-Generic, hardware: cpu, list: l0_cpu.yml"
        )
    )
    write_tests(project, good="def test_a():\n    pass\n")
    _, results = run_here(project, Options(stage_list="*"))
    assert [r.verdict for r in results.values()] == [Verdict.NO_COVERAGE, Verdict.PASSED]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--skip-test"], "skipped: no tests were asked for"),
        (["--comment", "/bot skip --comment 'only docs'"], "skipped: only docs"),
    ],
)
def test_skipping_is_said_and_is_not_green(project, words, reason):
    """Nothing runs, every stage says why, the bundle is there, the tally is printed: exit 3."""
    code, output, data = run(project, *words)
    assert code == 3, output
    assert {stage["reason"] for stage in data["stages"]} == {reason}
    assert set(verdicts(data).values()) == {"NOT RUN"}
    assert data["partly_tested"].startswith("skipping all tests")
    assert output.strip().splitlines()[-2:] == ["NOT RUN (Partly Tested)", "0 passed, 0 failed"]
    assert list((project / "results").glob("*/*/log.txt")) == []


def test_a_pipeline_is_reused_for_what_passed_and_runs_nothing(project):
    """What passed at this commit is REUSED, what did not is NOT RUN; a new commit has nothing to take over."""
    (project / "lists" / "stages.yml").write_text(TABLE)
    write_tests(project, other="def test_b():\n    raise ValueError\n")
    commit(project)
    first = run(project, "--stage-list", "CPU-*", "--disable-fail-fast")
    assert sorted(verdicts(first[2]).values()) == ["FAILED", "PASSED"], first[1]
    name = next(path.parent.name for path in (project / "results").glob("*/results.json"))
    code, output, data = run(project, "--stage-list", "CPU-*", "--comment", "/bot reuse-pipeline")
    assert code == 3, output
    wanted = {"PASSED": "REUSED", "FAILED": "NOT RUN"}
    assert verdicts(data) == {stage: wanted[verdict] for stage, verdict in verdicts(first[2]).items()}
    assert any(name in stage["reason"] for stage in data["stages"])
    # A run by its name, with the rest run again.
    code, output, data = run(project, "--stage-list", "CPU-*", "--disable-fail-fast", "--reuse-test", name)
    assert (code, sorted(verdicts(data).values())) == (1, ["FAILED", "REUSED"]), output
    write_tests(project, good="def test_a():\n    assert True\n")
    commit(project)
    code, output, data = run(project, "--stage-list", "CPU-*", "--comment", "/bot reuse-pipeline")
    assert (code, set(verdicts(data).values())) == (3, {"NOT RUN"}), output


def test_a_detailed_log_shows_what_passing_tests_printed(project, capfd):
    """And every test by its name; a run without it stays short."""
    write_tests(project, good="def test_a():\n    print('by the way')\n")
    lines(project, "t/test_good.py")
    only(project)
    assert "by the way" not in capfd.readouterr().out
    only(project, replace(ONE, detailed_log=True))
    output = capfd.readouterr().out
    assert "by the way" in output
    assert "t/test_good.py::test_a PASSED" in output


def test_a_summary_names_each_failure_by_its_own_stage(project):
    """Two stages with a failure each, a flaky one among them: stage, test and attempts stand in one line."""
    (project / "lists" / "stages.yml").write_text(TABLE)
    plan = make_plan(project / "lists", Options(kind="cpu"), Hardware())
    failed = CaseResult("t/test_good.py::test_a", "failed", 1.0, "boom", "trace", ("failed", "failed"))
    flaky = CaseResult("t/test_other.py::test_b", "passed", 1.0, "", "", ("failed", "passed"))
    results = [
        StageResult(name, verdict, lines=[LineResult(plan.stages[0].lines[0], cases=(case,), begun=True)])
        for name, verdict, case in (
            ("CPU-Generic-1", Verdict.FAILED, failed),
            ("CPU-Generic-2", Verdict.FLAKY, flaky),
        )
    ]
    folder = project / "results" / "b"
    Bundle(folder, plan, provenance(project, plan, Hardware())).write(results, complete=True)
    text = (folder / "summary.md").read_text()
    assert "- CPU-Generic-1: `t/test_good.py::test_a` (failed, failed): boom" in text
    assert "- CPU-Generic-2: `t/test_other.py::test_b` (failed, passed)" in text
    assert "attempts: failed, passed" in (folder / "CPU-Generic-2" / "junit.xml").read_text()


def test_a_stage_without_a_result_has_no_result_file(project):
    """No file with no test in it; the bundle's JSON names every stage all the same."""
    plan = make_plan(project / "lists", Options(stage_list="*"), Hardware())
    folder = project / "results" / "b"
    results = [StageResult("CPU-Generic-1", Verdict.NOT_RUN)]
    Bundle(folder, plan, provenance(project, plan, Hardware())).write(results, complete=False)
    assert list(folder.glob("*/junit.xml")) == []
    data = json.loads((folder / "results.json").read_text())
    assert verdicts(data) == {"CPU-Generic-1": "NOT RUN", "A10-PyTorch-1": "NOT RUN"}
    assert not data["complete"]
