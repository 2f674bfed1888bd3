"""A line of a list is the unit: what one line does not know, another one cannot cover up."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stage_project import CPU_LIST, TABLE, make_project, run, run_here, table_of, verdicts
from stages import __main__ as command
from stages import checking, needs
from stages.hardware import Hardware, lacking
from stages.plan import Options, make_plan
from stages.table import read_table
from stages.verdicts import Verdict

TOOLS = Path(__file__).resolve().parents[1]
ROOT = TOOLS.parent
#: Each runs several pytest processes, one after the other; the limit is for what hangs.
pytestmark = pytest.mark.timeout(600)
ONE = Options(stage_list="CPU-Generic-1", fail_fast=False)
SKIPS = "import pytest\n\n@pytest.mark.skip(reason='no device')\ndef test_b():\n    pass\n"


@pytest.fixture
def project(tmp_path):
    """One CPU stage that holds every line of its list."""
    make_project(tmp_path)
    (tmp_path / "lists" / "stages.yml").write_text(TABLE.replace(", shards: 2", ""))
    return tmp_path


def lines(project, *texts):
    body = "".join(f"  - {text}\n" for text in texts)
    (project / "lists" / "l0_cpu.yml").write_text(f"version: 0.0.1\nl0_cpu:\n- tests:\n{body}")


def write_tests(project, **bodies):
    for name, body in bodies.items():
        (project / "t" / f"test_{name}.py").write_text(body)


def only(project, workers=1):
    return run_here(project, ONE, workers=workers)[1]["CPU-Generic-1"]


def line_verdicts(result):
    return {line.line.identity: line.verdict.value for line in result.lines}


NOTHING = {
    "expression": ("-k nothing_like_it", "def test_b():\n    pass\n", "selects no test"),
    "mark": ("-m slow", "def test_b():\n    pass\n", "selects no test"),
    "skips": ("", SKIPS, "every test was skipped (no device)"),
    "module": ("", "import pytest\n\npytest.importorskip('nothing_here')\n\ndef test_b():\n    pass\n", "nothing_here"),
    "xfail": ("", "import pytest\n\n@pytest.mark.xfail\ndef test_b():\n    assert 0\n", "every test was skipped"),
    "empty": ("", "# nothing\n", "selects no test"),
}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_line_that_covers_nothing_is_no_coverage_whatever_else_passed(project, workers):
    """It selects nothing or only skips: so is its stage, exit 3, however many other tests are green."""
    write_tests(project, **{name: body for name, (_, body, _) in NOTHING.items()})
    lines(
        project, "t/test_good.py", *(f"t/test_{name}.py {expression}" for name, (expression, _, _) in NOTHING.items())
    )
    result = only(project, workers)
    assert [line.verdict.value for line in result.lines] == ["PASSED"] + ["NO COVERAGE"] * len(NOTHING)
    for line, (_, _, reason) in zip(result.lines[1:], NOTHING.values(), strict=True):
        assert reason in line.reason, line.line.identity
    assert result.verdict is Verdict.NO_COVERAGE
    assert result.lines[1].line.identity in result.reason


LATE = "import pytest, time\n\n@pytest.mark.timeout(0.2, method={!r})\ndef test_b():\n    time.sleep(60)\n"
#: What a test does, and its line's verdict as XFAIL and as UNSTABLE.
ENDS = {
    "assertion": ("def test_b():\n    assert 1 == 2\n", "PASSED", "FLAKY"),
    "exception": ("def test_b():\n    raise KeyError(3)\n", "PASSED", "FLAKY"),
    "passes": ("def test_b():\n    pass\n", "FAILED", "PASSED"),
    "missing": ("def test_c():\n    pass\n", "FAILED", "FAILED"),
    "exits": ("import os\n\ndef test_b():\n    os._exit(9)\n", "FAILED", "FAILED"),
    "killed": ("import os, signal\n\ndef test_b():\n    os.kill(os.getpid(), 9)\n", "FAILED", "FAILED"),
    "imports": ("import nothing_here\n\ndef test_b():\n    pass\n", "FAILED", "FAILED"),
    "fixture": ("def test_b(no_fixture):\n    pass\n", "FAILED", "FAILED"),
    "late": (LATE.format("signal"), "FAILED", "FAILED"),
    "late_thread": (LATE.format("thread"), "FAILED", "FAILED"),
}


@pytest.mark.parametrize(
    "ends", [("assertion", "passes", "missing", "killed", "late"), pytest.param(tuple(ENDS), marks=pytest.mark.slow)]
)
def test_a_marker_covers_what_a_test_raises_and_nothing_else(project, ends):
    """A test that does not exist, cannot be set up, crashed or ran out of time fails its line, marked or not."""
    write_tests(project, **{name: ENDS[name][0] for name in ends})
    targets = [(name, marker) for name in ends for marker in ("XFAIL", "UNSTABLE")]
    copies = {name: (project / "t" / f"test_{name}.py").read_text() for name in ends}
    for name, body in copies.items():
        (project / "t" / f"test_{name}_UNSTABLE.py").write_text(body)
        (project / "t" / f"test_{name}.py").rename(project / "t" / f"test_{name}_XFAIL.py")
    lines(project, *(f"t/test_{name}_{marker}.py::test_b {marker} (known)" for name, marker in targets))
    found = [line.verdict.value for line in only(project).lines]
    wanted = [verdict for name in ends for verdict in ENDS[name][1:]]
    assert dict(zip(targets, found, strict=True)) == dict(zip(targets, wanted, strict=True))


def test_one_misspelt_name_costs_its_own_line(project):
    """Named as what it is; the lines beside it run."""
    lines(project, "t/test_good.py", "t/test_other.py::test_z", "t/test_other.py::test_b")
    result = only(project)
    assert list(line_verdicts(result).values()) == ["PASSED", "FAILED", "PASSED"]
    (problem,) = [case for case in result.cases if case.failed]
    assert problem.message.startswith("no such test: ")
    assert "test_other.py::test_z" in problem.message


def test_two_lines_results_are_not_attempts_of_one_test(project):
    """A crash in one line and a pass of the same test in another: the crash stands."""
    write_tests(
        project,
        good="import os\n\n\ndef test_a(request):\n    if request.config.option.keyword:\n        os._exit(9)\n",
    )
    lines(project, "t/test_good.py -k test_a", "t/test_good.py")
    result = only(project)
    assert list(line_verdicts(result).values()) == ["FAILED", "PASSED"]
    assert [case.attempts for case in result.cases] == [("unfinished",), ("passed",)]
    assert result.verdict is Verdict.FAILED


def test_a_prefix_is_part_of_what_a_line_is(project):
    """full:l40s/… and full:cpu/… of one file are two lines: here the second one runs."""
    lines(project, "full:l40s/t/test_good.py", "full:cpu/t/test_good.py", "t/test_other.py")
    result = only(project)
    assert line_verdicts(result) == {"full:cpu/t/test_good.py": "PASSED", "t/test_other.py": "PASSED"}


def test_a_minutes_marker_of_sixty_is_sixty_minutes_for_the_test(project):
    """What a line says holds for its tests, also where it says what holds anyway for the line."""
    write_tests(project, good="import os\n\ndef test_a():\n    assert os.environ['PYTEST_TIMEOUT'] == '3600'\n")
    lines(project, "t/test_good.py TIMEOUT (60)")
    assert only(project).verdict is Verdict.PASSED


def test_a_message_is_the_assertion_and_a_flaky_test_keeps_its(project):
    """Not the last line that pytest prints; and what failed once says why."""
    write_tests(
        project,
        good="def check(n):\n    assert n == 2, 'wanted two'\n\n\ndef test_a():\n    check(1)\n",
        other="import pathlib\n\n\ndef test_b():\n    flag = pathlib.Path(__file__).with_name('results-b')\n"
        "    if not flag.exists():\n        flag.touch()\n        raise ValueError('only the first time')\n",
    )
    lines(project, "t/test_good.py", "t/test_other.py")
    messages = {case.id.partition("::")[2]: case.message for case in only(project).cases}
    assert messages["test_a"].startswith("AssertionError: wanted two assert 1 == 2")
    assert messages["test_b"] == "ValueError: only the first time"


# -- interrupts ---------------------------------------------------------------------------------------------------------

STOPPED = (
    "import time\n\ndef test_a():\n    assert 0\n\ndef test_b():\n    pass\n\n"
    "def test_c():\n    time.sleep(60)\n\ndef test_d():\n    pass\n"
)


def start(project, *words):
    return subprocess.Popen(
        [sys.executable, str(TOOLS / "stages"), "--root", str(project), "--lists", str(project / "lists"), "--results",
         str(project / "results"), "--workers", "1", "--kind", "cpu", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(project, test):
    """Until a test has begun."""
    text = f'"start", "id": "{test}"'
    while not any(text in path.read_text() for path in (project / "results").glob("*/*/*.jsonl")):
        time.sleep(0.02)


@pytest.mark.parametrize(("first", "code"), [("assert 0", 1), ("pass", 3)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_every_known_result(project, number, first, code):
    """What failed before it is FAILED, exit 1; else NOT RUN, exit 3; every line says what is known."""
    write_tests(project, good=STOPPED.replace("assert 0", first))
    lines(project, "t/test_good.py", "t/test_other.py")
    process = start(project)
    wait_for(project, "t/test_good.py::test_c")
    process.send_signal(number)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "Traceback" not in output
    data = json.loads(next((project / "results").glob("*/results.json")).read_text())
    (stage,) = data["stages"]
    assert not data["complete"]
    assert stage["counts"]["passed"] + stage["counts"]["failed"] == 2
    assert [line["verdict"] for line in stage["lines"]] == ["FAILED" if code == 1 else "NOT RUN", "NOT RUN"]
    assert stage["lines"][1]["reason"] == "not reached"
    assert "2 not started" in stage["reason"]


def test_a_killed_run_leaves_what_its_lines_said(project):
    """kill -9: the bundle is what was known after the last line, not complete, not green."""
    write_tests(project, other="import time\n\ndef test_b():\n    time.sleep(60)\n")
    lines(project, "t/test_good.py", "t/test_other.py")
    process = start(project)
    wait_for(project, "t/test_other.py::test_b")
    process.kill()
    process.communicate(timeout=60)
    data = json.loads(next((project / "results").glob("*/results.json")).read_text())
    assert (data["complete"], verdicts(data)) == (False, {"CPU-Generic-1": "NOT RUN"})
    assert [line["verdict"] for line in data["stages"][0]["lines"]] == ["PASSED", "NOT RUN"]


def test_what_takes_too_long_is_ended_with_its_line(project, monkeypatch):
    """A line's minutes are its own; what did not end in them is a failure, is not tried again, and the next line runs."""
    import threading

    from stages import execution

    write_tests(project, good="import time\n\ndef test_a():\n    time.sleep(60)\n")
    lines(project, "t/test_good.py TIMEOUT (1)", "t/test_other.py")
    timer = threading.Timer
    monkeypatch.setattr(execution.threading, "Timer", lambda seconds, act: timer(seconds / 20, act))
    result = only(project)
    assert list(line_verdicts(result).values()) == ["FAILED", "PASSED"]
    assert [case.outcome for case in result.cases] == ["unfinished", "passed"]


# -- other people's environments ----------------------------------------------------------------------------------------


@pytest.fixture
def foreign(tmp_path_factory, monkeypatch):
    """A folder of installed distributions with a pytest plugin in it: ``foreign(code)``."""

    def make(code):
        folder = tmp_path_factory.mktemp("site")
        info = folder / "foreign_plugin-1.0.dist-info"
        info.mkdir()
        (folder / "foreign_plugin.py").write_text(code)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[pytest11]\nforeign = foreign_plugin\n")
        monkeypatch.setenv("PYTHONPATH", str(folder))
        return folder

    return make


WARNS = "import warnings\n\ndef pytest_configure(config):\n    warnings.warn('mine', UserWarning)\n    raise SystemExit(7)\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_foreign_plugins_are_not_loaded(project, foreign, workers):
    """A plugin that nobody asked for cannot fail a stage, in the controlling process or in a worker."""
    foreign(WARNS)
    assert only(project, workers).verdict is Verdict.PASSED


def test_foreign_plugins_are_not_loaded_by_pytest_itself_here(foreign, tmp_path):
    """This repository's own configuration keeps them out, whoever starts pytest, and names those that it needs."""
    pytest.importorskip("pytest_asyncio", reason="NO COVERAGE: pytest-asyncio is not installed")
    foreign(WARNS)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--co", "-q", "tools/tests/test_tools.py", "-n", "0", "--timeout", "9"],
        cwd=ROOT, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_internal_error_of_pytest_is_named_as_that(project):
    """Neither a crash of a test nor a time-out: which plugin or hook failed stands in the result, as the machine's failure."""
    (project / "conftest.py").write_text("def pytest_runtestloop(session):\n    raise RuntimeError('a broken hook')\n")
    result = only(project)
    assert result.verdict is Verdict.FAILED
    assert {case.message for case in result.cases if case.failed} == {
        "pytest INTERNALERROR: RuntimeError: a broken hook"
    }
    _, results = run_here(project, Options(stage_list="CPU-*"))
    assert "fail-fast" not in results["CPU-Generic-1"].reason


def test_what_a_stage_needs_is_said_before_it_starts_with_what_is_missing(project):
    """Modules by name: NO COVERAGE, exit 3, and no pytest is started."""
    (project / "lists" / "stages.yml").write_text(
        TABLE.replace(", shards: 2", "").replace("{cpu: {},", "{cpu: {needs: [json, no_such_module]},")
    )
    code, output, data = run(project, "--kind", "cpu")
    assert code == 3, output
    assert "needs the Python modules json, no_such_module" in output
    assert data["stages"][0]["reason"] == f"{sys.executable} has no no_such_module"
    assert list((project / "results").glob("*/*/log.txt")) == []


def test_a_stage_of_ranks_needs_a_launcher_that_starts_them(project, monkeypatch, tmp_path):
    """None on the path; one that starts worlds of one; one that fails: each is named, and nothing is green."""
    (project / "lists" / "stages.yml").write_text(
        table_of("name: CPU-Generic, hardware: cpu, list: l0_cpu.yml, ranks: 3")
    )
    cases = {
        "no_such_program --mpi=x": "there is no program no_such_program",
        "env -u X": "does not start a world of 3 ranks",
        "false": "cannot start 3 ranks",
    }
    for setting, part in cases.items():
        needs.world.cache_clear()
        if setting.startswith("env"):
            fake = tmp_path / "fake-mpiexec"
            fake.write_text('#!/bin/sh\nshift 2\n"$@" & "$@" & "$@"; wait\n')
            fake.chmod(0o755)
            setting = str(fake)
        monkeypatch.setenv("META_EXECUTOR_MPIEXEC", setting)
        result = only(project)
        assert (result.verdict, part in result.reason) == (Verdict.NO_COVERAGE, True), result.reason
    needs.world.cache_clear()


@pytest.mark.service
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_real_launcher_starts_a_world(monkeypatch, unbuffered):
    """Whatever the ranks' writes look like when they arrive together."""
    pytest.importorskip("mpi4py", reason="NO COVERAGE: mpi4py is not installed")
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    needs.world.cache_clear()
    assert needs.world(4) is None
    needs.world.cache_clear()


@pytest.fixture
def fake_card(tmp_path, monkeypatch):
    """An nvidia-smi on PATH that lists cards: ``fake_card("NVIDIA A10, 8.6", …)``."""

    def make(*rows):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return make


def test_a_card_without_a_torch_that_can_use_it_is_no_coverage(fake_card, tmp_path):
    """This repository's A10 stages, with a card that the driver lists and torch does not see: exit 3, each with its reason."""
    pytest.importorskip("torch", reason="NO COVERAGE: torch is not installed")
    fake_card("NVIDIA A10, 8.6")
    done = subprocess.run(
        [sys.executable, str(TOOLS / "stages"), "--stage-list", "A10-*", "--results", str(tmp_path / "r")],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    data = json.loads(next((tmp_path / "r").glob("*/results.json")).read_text())
    assert list(verdicts(data).values()) == ["NO COVERAGE"] * 3
    for stage in data["stages"]:
        assert "sees 0 of 1 GPUs" in stage["reason"] or "has no" in stage["reason"], stage["reason"]


# -- hardware, names, shards --------------------------------------------------------------------------------------------


def test_another_card_is_data(project):
    """A new kind is a line of the table: selectable, checked, and refused on a machine without it."""
    (project / "lists" / "stages.yml").write_text(
        TABLE.replace("{cpu: {},", r"{cpu: {}, mi300: {gpu: '\bMI300X?\b'},").replace(
            "hardware: a10,", "hardware: mi300,"
        )
    )
    code, output, data = run(project, "--kind", "mi300")
    assert (code, verdicts(data)) == (3, {"A10-PyTorch-1": "NO COVERAGE"}), output


@pytest.mark.parametrize(
    ("hardware", "accept", "runs"),
    [
        (Hardware(gpu_names=("NVIDIA H200",) * 4, gpu_capabilities=("9.0",) * 4), None, False),
        (Hardware(gpu_names=("NVIDIA H200",) * 4, gpu_capabilities=("9.0",) * 4), "9.0", True),
        (Hardware(gpu_names=("NVIDIA H200",) * 4, gpu_capabilities=("9.0",) * 4), "any", True),
        (Hardware(gpu_names=("A", "A", "B", "B"), gpu_capabilities=("9.0", "9.0", "8.0", "8.0")), "9.0", False),
        (Hardware(gpu_names=("NVIDIA H200",) * 3, gpu_capabilities=("9.0",) * 3), "any", False),
        (Hardware(), "any", False),
    ],
)
def test_cards_are_counted_one_by_one(hardware, accept, runs):
    """By name, or by a capability that was asked for, of each card; never by the first one's."""
    stage = next(s for s in read_table(ROOT / "testlists" / "stages.yml") if s.name == "GB200-4_GPUs-PyTorch-1")
    assert (lacking(stage, hardware, accept) is None) is runs


def test_nodes_are_those_of_the_job(monkeypatch, fake_card):
    """A Slurm job's nodes count; outside of one there is one."""
    from stages.hardware import probe

    fake_card("NVIDIA GB200, 10.0", "NVIDIA GB200, 10.0")
    for value, nodes in (("4", 4), ("", 1), ("x", 1), ("0", 1)):
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", value)
        found = probe()
        assert (found.nodes, found.gpu_names, found.gpu_capabilities) == (nodes, ("NVIDIA GB200",) * 2, ("10.0",) * 2)


def test_every_shard_of_a_gpu_stage_here_needs_its_gpu():
    """And what is asked for by its number of GPUs runs on any card, by name, never by accident."""
    folder = ROOT / "testlists"
    run_plan = make_plan(folder, Options(stage_list="*"), Hardware())
    for plan in run_plan.stages:
        if plan.stage.gpus:
            assert any(line.needs_gpu for line in plan.lines), plan.stage.name
    two = make_plan(folder, Options(stage_list="GPU-2_GPUs-*"), Hardware(gpu_names=("Some Card",) * 2)).stages[0]
    assert (two.lacking, two.stage.on_demand) == (None, True)


# -- the checker --------------------------------------------------------------------------------------------------------


def add_package(project, name="new-idea"):
    folder = project / "packages" / name
    (folder / "tests").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / "tests" / "test_new.py").write_text("def test_new():\n    pass\n")


def test_a_package_that_no_stage_tests_is_a_problem(project):
    """So is a test that no stage runs; a line that covers the package ends both."""
    add_package(project)
    (problem,) = checking.check(project, project / "lists")
    assert problem.startswith("packages/new-idea: no stage tests this package")
    assert checking.report(project, project / "lists") == 1
    lines(project, "t/test_good.py", "t/test_other.py", "packages/new-idea/tests -m slow")
    assert list(checking.check(project, project / "lists")) == []
    problems = list(checking.check_parity(project, project / "lists"))
    assert any('packages/new-idea/tests -m "slow" selects no test' in text for text in problems)
    assert any("no stage runs packages/new-idea/tests/test_new.py::test_new" in text for text in problems)
    lines(project, "t/test_good.py", "t/test_other.py", "packages/new-idea/tests")
    assert list(checking.check_parity(project, project / "lists")) == []


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('t/test_good.py -k "nothing_like_it"', "selects no test"),
        ("t/test_good.py::test_aa", "selects no test; did you mean t/test_good.py::test_a"),
        ("t/test_good.py::test_a[1]", "selects no test"),
    ],
)
def test_a_line_that_selects_no_test_is_a_problem(project, line, part):
    """By pytest's own collection, under the line's own expressions, with the nearest name."""
    assert list(checking.check_parity(project, project / "lists")) == []
    (project / "lists" / "l0_cpu.yml").write_text(CPU_LIST.replace("t/test_good.py", line))
    assert any(part in problem for problem in checking.check_parity(project, project / "lists"))


def test_an_id_that_changes_with_the_process_is_a_problem(project):
    """Workers would collect different tests, and no waiver or rerun would find it again."""
    write_tests(
        project, good="import pytest\n\n@pytest.mark.parametrize('n', [object()], ids=repr)\ndef test_a(n):\n    pass\n"
    )
    (problem,) = checking.check_parity(project, project / "lists")
    assert "an address in an id changes with the process" in problem


def test_a_stage_of_several_gpus_holds_a_test_that_needs_them(project):
    """A list for two GPUs whose tests would all be content with one is a problem."""
    (project / "lists" / "stages.yml").write_text(
        TABLE.replace("name: A10-PyTorch,", "name: A10-2_GPUs-PyTorch,").replace(", shards: 2", "")
    )
    (problem,) = checking.check_parity(project, project / "lists")
    assert "A10-2_GPUs-PyTorch-1 holds no test that needs 2 GPUs" in problem
    path = project / "t" / "test_gpu.py"
    path.write_text(path.read_text() + "\n\n@pytest.mark.gpu\n@pytest.mark.gpus(count=2)\ndef test_two():\n    pass\n")
    assert list(checking.check_parity(project, project / "lists")) == []


# -- what used to be a traceback ----------------------------------------------------------------------------------------


def test_a_results_folder_that_cannot_be_written_is_exit_2(project, capsys):
    """One line, nothing run."""
    (project / "file").write_text("")
    places = ["--root", str(project), "--lists", str(project / "lists"), "--results", str(project / "file" / "r")]
    assert command.main([*places, "--kind", "cpu"]) == 2
    assert "results folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("stages.yml", "version: !x 1\n"),
        ("stages.yml", "- a\n"),
        ("stages.yml", "\x00"),
        ("l0_cpu.yml", "version: 0.0.1\nl0_cpu: !x []\n"),
        ("waives.txt", b"\xff"),
        ("durations.json", b"\xff"),
        ("stages.yml", b"\xff"),
    ],
)
def test_an_unreadable_file_is_exit_2(project, file, text, capsys):
    """Named, in one line; never a traceback."""
    (project / "lists" / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    places = ["--root", str(project), "--lists", str(project / "lists"), "--results", str(project / "results")]
    for words in (["--kind", "cpu"], ["--list"], ["--stages-of", "t"]):
        code = command.main([*words, *places])
        assert code in (0, 2)
        if words[0] == "--kind":
            assert code == 2
            assert file in capsys.readouterr().err


def test_a_stage_reused_does_not_depend_on_which_others_were_named(project):
    """Passed beside others, asked for alone, and the other way round."""
    (project / "lists" / "stages.yml").write_text(TABLE)  # as it is committed: two shards
    assert run(project, "--kind", "cpu")[0] == 0
    code, output, data = run(project, "--stage-list", "CPU-Generic-2", "--reuse-test")
    assert (code, verdicts(data)) == (0, {"CPU-Generic-2": "REUSED"}), output
