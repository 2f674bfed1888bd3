"""Selection, shards, verdicts, runs and bundles: nothing is green that did not run."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from stage_project import CPU_LIST, TABLE, make_project, run, verdicts
from stages import __main__ as command
from stages import checking, matrix
from stages.errors import StageError
from stages.hardware import Hardware, lacking, parse_nvidia_smi
from stages.junit import CaseResult, cause_of, merge
from stages.lists import Condition, parse_line
from stages.selecting import collisions, mismatch, query_of_stage
from stages.sharding import read_durations, shard
from stages.table import Stage, read_table
from stages.verdicts import EXIT_CODES, Verdict, worst

TOOLS = Path(__file__).resolve().parents[1]
ROOT = TOOLS.parent

#: Each runs several pytest processes, one after the other; the limit is for what hangs.
pytestmark = pytest.mark.timeout(600)
QUERY = {"stage": "pre_merge", "gpu": "a10", "system_gpu_count": "1", "backend": "pytorch"}


@pytest.mark.parametrize(
    ("condition", "matches"),
    [
        (Condition(), True),
        (Condition(terms={"stage": "pre_merge"}), True),
        (Condition(terms={"stage": "post_merge"}), False),
        (Condition(terms={"backend": "triton"}), False),
        (Condition(terms={"unheard_of": "x"}), True),
        (Condition(ranges={"system_gpu_count": (1, 1)}), True),
        (Condition(ranges={"system_gpu_count": (2, None)}), False),
        (Condition(ranges={"system_gpu_count": (None, 4)}), True),
        (Condition(ranges={"gpu": (0, 9)}), False),
        (Condition(wildcards={"gpu": ("*A10*",)}), True),
        (Condition(wildcards={"gpu": ("*h100*", "a1?")}), True),
        (Condition(wildcards={"gpu": ("*h100*",)}), False),
        (Condition(wildcards={"linux_distribution_name": ("ubuntu*",)}), True),
        (Condition(terms={"stage": "pre_merge"}, wildcards={"gpu": ("*h100*",)}), False),
    ],
)
def test_conditions_match_as_the_field_expects(condition, matches):
    """All must hold; a key that the query lacks holds; wildcards ignore case; a range needs a whole number."""
    assert (mismatch(condition, QUERY) is None) == matches


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (Stage("A10-PyTorch", "a10", "l", 1, 3, 1), {"stage": "pre_merge", "backend": "pytorch", "gpu": "a10"}),
        (Stage("A100X-PyTorch-Post-Merge", "a100x", "l", 1, 1, 1), {"stage": "post_merge", "gpu": "a100x"}),
        (Stage("GB200-8_GPUs-2_Nodes-PyTorch", "gb200", "l", 1, 1, 4, 2), {"system_gpu_count": "8"}),
        (Stage("CPU-Generic", "cpu", "l", 1, 1), {"system_gpu_count": "0", "auto_trigger": "others"}),
        (Stage("DGX_H100-PyTorch-DeepSeek", "h100", "l", 1, 1, 1), {"auto_trigger": "deepseek", "orchestrator": "mpi"}),
        (Stage("DGX_H100-PyTorch-Ray", "h100", "l", 1, 1, 1), {"orchestrator": "ray"}),
    ],
)
def test_a_query_follows_from_the_name(stage, expected):
    """When, backend, GPU and counts; all GPUs of all nodes together."""
    query = query_of_stage(stage)
    assert {key: query[key] for key in expected} == expected
    assert ("gpu" in query) == (stage.gpus > 0)


def test_wildcards_that_catch_other_cards_are_warned_about():
    """*a10* also matches A100; *a100* spells a family and catches A100X; a plain name catches nothing else."""
    assert "A100" in collisions(Condition(wildcards={"gpu": ("*a10*",)}))[0]
    assert "GB200" in collisions(Condition(wildcards={"gpu": ("*b200*",)}))[0]
    assert collisions(Condition(wildcards={"gpu": ("a10",)})) == []


def test_nvidia_smi_is_read():
    """Names with blanks, one line per GPU."""
    text = "NVIDIA H100 80GB HBM3, 9.0\nNVIDIA H100 80GB HBM3, 9.0\n"
    assert parse_nvidia_smi(text) == (("NVIDIA H100 80GB HBM3",) * 2, ("9.0", "9.0"))
    assert parse_nvidia_smi("") == ((), ())


@pytest.mark.parametrize(
    ("stage", "names", "accept", "missing"),
    [
        (Stage("A10-PyTorch", "a10", "l", 1, 1, 1), ("NVIDIA A10",), None, None),
        (Stage("A10-PyTorch", "a10", "l", 1, 1, 1), ("NVIDIA A100-SXM4-80GB",), None, "needs 1 × A10"),
        (Stage("A100X-PyTorch", "a100x", "l", 1, 1, 1), ("NVIDIA A100X",), None, None),
        (Stage("DGX_H100-PyTorch", "h100", "l", 1, 1, 1), ("NVIDIA H200",), None, "1 × NVIDIA H200"),
        (Stage("DGX_H100-PyTorch", "h100", "l", 1, 1, 1), ("NVIDIA H200",), "9.0", None),
        (Stage("GB200-4_GPUs-PyTorch", "gb200", "l", 1, 1, 4), ("NVIDIA GB200",) * 3, None, "needs 4 × GB200"),
        (Stage("GB200-4_GPUs-PyTorch", "gb200", "l", 1, 1, 4), ("NVIDIA B200",) * 4, None, "needs 4 × GB200"),
        (Stage("A10-PyTorch", "a10", "l", 1, 1, 1), (), None, "no GPU"),
        (Stage("CPU-Generic", "cpu", "l", 1, 1), (), None, None),
    ],
)
def test_what_a_machine_lacks_is_said(stage, names, accept, missing):
    """The kind by the GPU's own name, the count, or any card of a capability when that was asked for."""
    patterns = {"a10": r"\bA10\b", "a100x": r"\bA100X?\b", "h100": r"\bH100\b", "gb200": r"\bGB200\b"}
    stage = replace(stage, gpu_pattern=patterns.get(stage.hardware))
    found = lacking(stage, Hardware(gpu_names=names, compute_capability="9.0" if names else ""), accept)
    assert (found is None) == (missing is None), found
    if missing:
        assert missing in found


def test_shards_balance_durations():
    """One long line does not share its shard with the short ones."""
    lines = [parse_line(f"t/test_{i}.py") for i in range(5)]
    parts = shard(lines, 2, {lines[0].identity: 100.0, **{line.identity: 10.0 for line in lines[1:]}})
    assert sorted(map(len, parts)) == [1, 4]


@pytest.mark.parametrize("text", ["[", "[]", '{"a": "long"}', '{"a": -1}'])
def test_bad_durations_are_refused(tmp_path, text):
    """Numbers of seconds by line, nothing else."""
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(StageError, match=r"d\.json"):
        read_durations(path)


def test_the_worst_verdict_wins():
    """A failure outweighs missing hardware, which outweighs green; an empty run did not run."""
    assert worst([Verdict.PASSED, Verdict.NO_COVERAGE]) is Verdict.NO_COVERAGE
    assert worst([Verdict.NO_COVERAGE, Verdict.FAILED, Verdict.NOT_RUN]) is Verdict.FAILED
    assert worst([Verdict.REUSED, Verdict.FLAKY]) is Verdict.FLAKY
    assert worst([]) is Verdict.NOT_RUN
    assert [EXIT_CODES[v] for v in (Verdict.PASSED, Verdict.FLAKY, Verdict.FAILED, Verdict.NO_COVERAGE)] == [0, 0, 1, 3]


def test_reruns_keep_both_results():
    """The last outcome counts and every attempt stays; a flaky pass is not a plain pass."""
    first = (
        CaseResult("a", "failed", attempts=("failed",), details="trace"),
        CaseResult("b", "passed", attempts=("passed",)),
    )
    merged = merge(first, (CaseResult("a", "passed", attempts=("passed",)),))
    assert merged[0].flaky
    assert merged[0].attempts == ("failed", "passed")
    assert merged[0].details == "trace"
    assert cause_of(merged[0]) == "flaky"
    assert cause_of(CaseResult("c", "failed", message="OSError: No space left on device")) == "infrastructure"
    assert cause_of(CaseResult("c", "failed", message="assert 1 == 2")) == "product"


@pytest.fixture
def project(tmp_path):
    """A small repository with a table, two lists and two test files."""
    return make_project(tmp_path)


def test_a_green_run_says_what_it_tested(project):
    """Exit 0; the bundle holds commit, dirtiness, list hash, hardware, versions; JUnit per stage; one closing line."""
    code, output, data = run(project, "--kind", "cpu")
    assert code == 0, output
    assert verdicts(data) == {"CPU-Generic-1": "PASSED", "CPU-Generic-2": "PASSED"}
    assert data["complete"]
    assert data["partly_tested"] == "hardware kind cpu"
    assert not data["dirty"]
    assert len(data["commit"]) == 40
    assert data["versions"]["pytest"]
    assert output.strip().splitlines()[-1] == "2 passed, 0 failed"
    bundle = next((project / "results").iterdir())
    assert 'tests="1"' in (bundle / "CPU-Generic-1" / "junit.xml").read_text()
    assert "(Partly Tested)" in (bundle / "summary.md").read_text()


def test_one_failing_test_makes_exactly_its_stage_red(project):
    """Exit 1; without fail-fast the other stage still runs."""
    (project / "t" / "test_other.py").write_text("def test_b():\n    raise ValueError('broken')\n")
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 1
    assert sorted(verdicts(data).values()) == ["FAILED", "PASSED"], output
    problem = next(p for stage in data["stages"] for p in stage["problems"])
    assert problem["attempts"] == ["failed", "failed", "failed"]
    assert problem["cause"] == "product"
    assert data["dirty"]


def test_fail_fast_leaves_the_rest_not_run(project):
    """The first failure stops the run; what was not reached says so."""
    for name in ("good", "other"):
        (project / "t" / f"test_{name}.py").write_text("def test_b():\n    raise ValueError('broken')\n")
    code, output, data = run(project, "--kind", "cpu")
    assert code == 1
    assert verdicts(data) == {"CPU-Generic-1": "FAILED", "CPU-Generic-2": "NOT RUN"}, output


def test_a_flaky_test_is_shown(project):
    """Fails once, passes again: FLAKY, exit 0, both results kept."""
    (project / "t" / "test_other.py").write_text(
        "import pathlib\n\ndef test_b():\n    flag = pathlib.Path(__file__).with_name('results-flag')\n"
        "    if not flag.exists():\n        flag.touch()\n        raise ValueError\n"
    )
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 0, output
    assert sorted(verdicts(data).values()) == ["FLAKY", "PASSED"]
    assert next(p["attempts"] for s in data["stages"] for p in s["problems"]) == ["failed", "passed"]


def test_missing_hardware_is_no_coverage(project):
    """Exit 3 with what is missing; never green, never a product failure."""
    code, output, data = run(project, "--stage-list", "A10-PyTorch-1")
    assert code == 3, output
    assert verdicts(data) == {"A10-PyTorch-1": "NO COVERAGE"}
    assert data["stages"][0]["reason"] == "needs 1 × A10, this machine has no GPU"


@pytest.mark.parametrize(
    "body",
    ["import pytest\n\n@pytest.mark.skip(reason='later')\ndef test_b():\n    pass\n", "# nothing\n"],
)
def test_a_stage_in_which_nothing_ran_is_not_green(project, body):
    """All skipped, or no test at all: NO COVERAGE."""
    for name in ("good", "other"):
        (project / "t" / f"test_{name}.py").write_text(body)
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 3, output
    assert set(verdicts(data).values()) == {"NO COVERAGE"}


def test_a_typo_runs_nothing(project):
    """Exit 2 and the nearest names; no bundle is written."""
    code, output, data = run(project, "--stage-list", "CPU-Generc-1")
    assert code == 2
    assert "did you mean CPU-Generic-1" in output
    assert data is None


def test_a_list_that_selects_nothing_prints_its_query(project):
    """Exit 2: the query, and why each block was passed over."""
    path = project / "lists" / "l0_cpu.yml"
    path.write_text(CPU_LIST.replace("pre_merge", "post_merge"))
    code, output, data = run(project, "--kind", "cpu")
    assert code == 2
    assert "selects nothing for" in output
    assert "stage=pre_merge" in output
    assert "l0_cpu.yml:3: terms.stage: wants post_merge, is pre_merge" in output
    assert data is None


def test_a_pass_at_this_commit_can_be_reused(project):
    """Same commit, lists and versions: REUSED; a change since then: run again."""
    assert run(project, "--kind", "cpu")[0] == 0
    code, output, data = run(project, "--kind", "cpu", "--reuse-test")
    assert code == 0, output
    assert set(verdicts(data).values()) == {"REUSED"}
    (project / "t" / "test_good.py").write_text("def test_a():\n    assert True is True\n")
    assert set(verdicts(run(project, "--kind", "cpu", "--reuse-test")[2]).values()) == {"PASSED"}


@pytest.mark.parametrize(
    ("body", "marker", "verdict"),
    [
        ("raise ValueError", "XFAIL (known)", "PASSED"),
        ("pass", "XFAIL (known)", "FAILED"),
        ("raise ValueError", "UNSTABLE (load)", "FLAKY"),
        ("raise ValueError", "SKIP (known)", "PASSED"),
        ("raise ValueError", "ISOLATION", "FAILED"),
        ("pass", "ISOLATION,TIMEOUT (1)", "PASSED"),
    ],
)
def test_markers_do_what_they_say(project, body, marker, verdict):
    """XFAIL is strict, UNSTABLE may fail, SKIP is waived, ISOLATION runs alone; a plain passing test keeps the stage green."""
    (project / "lists" / "stages.yml").write_text(TABLE.replace(", shards: 2", ""))
    (project / "lists" / "l0_cpu.yml").write_text(CPU_LIST.replace("t/test_other.py", f"t/test_other.py {marker}"))
    (project / "t" / "test_other.py").write_text(f"def test_b():\n    {body}\n")
    _, output, data = run(project, "--kind", "cpu")
    assert verdicts(data) == {"CPU-Generic-1": verdict}, output
    assert bool(data["stages"][0]["waived"]) == marker.startswith("SKIP")


def test_single_tests_are_waived_by_node_id(project):
    """The waived test is not run and not counted; its neighbours are."""
    (project / "t" / "test_other.py").write_text("def test_b():\n    raise ValueError\n\n\ndef test_c():\n    pass\n")
    (project / "lists" / "waives.txt").write_text("t/test_other.py::test_b SKIP (known)\n")
    code, output, _ = run(project, "--kind", "cpu")
    assert code == 0, output


def test_a_comment_runs_the_same(project):
    """/bot run with a stage list, as people write it under a change."""
    text = 'LGTM\n/bot run --disable-fail-fast --stage-list "CPU-Generic-1, A10-PyTorch-1"'
    code, output, data = run(project, "--comment", text)
    assert code == 3, output
    assert verdicts(data) == {"CPU-Generic-1": "PASSED", "A10-PyTorch-1": "NO COVERAGE"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--gpu-type", "A11"], "did you mean A10"),
        (["--test-backend", "pytorh"], "did you mean pytorch"),
        (["--no-such-option"], "unrecognized"),
        (["--gpu-type", "A10", "--test-backend", "generic"], "nothing is left"),
    ],
)
def test_bad_options_run_nothing(project, arguments, part):
    """Exit 2, said in one line."""
    code, output, data = run(project, *arguments)
    assert code == 2
    assert part in output
    assert data is None


def test_a_dry_run_shows_the_shards(project):
    """Each stage's tests, those of other machines too; nothing is run."""
    code, output, data = run(project, "--dry-run", "--stage-list", "*")
    assert code == 0
    assert "CPU-Generic-1: 1 lines\n  t/test_good.py\n" in output
    assert "A10-PyTorch-1: NO COVERAGE: needs 1 × A10, this machine has no GPU\n  t/test_gpu.py" in output
    assert data is None


@pytest.mark.parametrize(
    ("file", "change", "part"),
    [
        ("l0_cpu.yml", ("t/test_good.py", "t/test_god.py"), "did you mean test_good.py"),
        ("l0_cpu.yml", ("t/test_other.py", "t/test_good.py"), "is also in line"),
        ("l0_cpu.yml", ("stage: pre_merge", "stage: post_merge"), "no stage reaches this block"),
        ("stages.yml", ("l0_a10.yml", "l0_a11.yml"), "missing"),
        ("stages.yml", ("  - {name: A10-PyTorch, hardware: a10, list: l0_a10.yml}\n", ""), "no stage names this list"),
        ("waives.txt", (None, "t/test_gone.py SKIP (x)\n"), "does not exist"),
        ("waives.txt", (None, "pyproject.toml SKIP (x)\n"), "nothing to waive"),
    ],
)
def test_the_checker_finds_it_without_importing(project, file, change, part):
    """Files, duplicates, unreachable blocks, lists without stages, stale waivers."""
    path = project / "lists" / file
    old, new = change
    path.write_text(path.read_text().replace(old, new, 1) if old else new)
    problems = list(checking.check(project, project / "lists"))
    assert any(part in problem for problem in problems), problems


SEED_RERUN = (
    "A10-PyTorch-2,A10-PyTorch-3,DGX_H100-PyTorch-1,DGX_H100-PyTorch-2,DGX_H100-PyTorch-3,DGX_H100-PyTorch-4,"
    "DGX_H100-PyTorch-5,DGX_H100-PyTorch-6"
)


@pytest.mark.parametrize("stages", [SEED_RERUN, "GB200-4_GPUs-PyTorch-1,A100X-PyTorch-Post-Merge-1"])
def test_this_repository_reruns_without_gpus_are_no_coverage(tmp_path, stages, capsys, monkeypatch):
    """The reruns that people asked for, on a machine without a GPU: each stage NO COVERAGE, exit 3, a bundle."""
    monkeypatch.setattr(command, "probe", lambda: Hardware(cores=2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = command.main(["--disable-fail-fast", "--stage-list", stages, "--results", str(tmp_path)])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 3
    data = json.loads(next(tmp_path.glob("*/results.json")).read_text())
    assert set(verdicts(data).values()) == {"NO COVERAGE"}
    assert list(verdicts(data)) == [
        s.name for s in read_table(ROOT / "testlists" / "stages.yml") if s.name in stages.split(",")
    ]
    assert all(stage["reason"].endswith("this machine has no GPU") for stage in data["stages"])


def test_this_repository_lists_hold():
    """Every line of every list exists, every block is reached, every waiver waives."""
    assert list(checking.check(ROOT, ROOT / "testlists")) == []


def test_the_hosted_matrix_is_the_tables():
    """The committed workflow is what the table generates."""
    wanted = matrix.workflow(read_table(ROOT / "testlists" / "stages.yml"))
    assert (ROOT / matrix.PATH).read_text() == wanted


def test_on_demand_stages_run_only_when_named(project):
    """Not in a default run, not by kind; by name they do."""
    table = project / "lists" / "stages.yml"
    table.write_text(TABLE.replace("list: l0_cpu.yml, shards: 2", "list: l0_cpu.yml, on_demand: true"))
    code, output, data = run(project)
    assert code == 3, output
    assert list(verdicts(data)) == ["A10-PyTorch-1"]
    code, output, data = run(project, "--stage-list", "CPU-Generic-1")
    assert code == 0, output
    assert verdicts(data) == {"CPU-Generic-1": "PASSED"}


def test_post_merge_stages_wait_for_the_option_or_their_name(project):
    """A default run leaves them out; --post-merge, --extra-stage or their name brings them in."""
    table = project / "lists" / "stages.yml"
    table.write_text(TABLE.replace("A10-PyTorch,", "A10-PyTorch-Post-Merge,"))
    assert all("Post-Merge" not in name for name in verdicts(run(project)[2]))
    assert "A10-PyTorch-Post-Merge-1" in verdicts(run(project, "--post-merge", "--disable-fail-fast")[2])
    assert "A10-PyTorch-Post-Merge-1" in verdicts(
        run(project, "--extra-stage", "*Post-Merge*", "--disable-fail-fast")[2]
    )


def test_a_shard_without_a_line_is_not_green(project):
    """More shards than lines: the empty ones say so, and are NOT RUN."""
    table = project / "lists" / "stages.yml"
    table.write_text(TABLE.replace("shards: 2", "shards: 3"))
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 3, output
    assert sorted(verdicts(data).values()) == ["NOT RUN", "PASSED", "PASSED"]
    assert any("holds no line" in stage["reason"] for stage in data["stages"])


def test_a_stage_whose_every_line_is_waived_is_not_green(project):
    """Waived is not passed."""
    (project / "lists" / "waives.txt").write_text("t/test_good.py SKIP (x)\nt/test_other.py SKIP (y)\n")
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 3, output
    assert set(verdicts(data).values()) == {"NOT RUN"}
    assert [w["reason"] for stage in data["stages"] for w in stage["waived"]] in (["x", "y"], ["y", "x"])


def test_several_expressions_on_one_path_are_lines_of_their_own(project):
    """Two -k lines of one file are two units with results of their own; the last line counts without a newline, too."""
    (project / "t" / "test_good.py").write_text("def test_a():\n    pass\n\n\ndef test_b():\n    raise ValueError\n")
    text = CPU_LIST.replace(
        "  - t/test_good.py\n  - t/test_other.py\n", '  - t/test_good.py -k "test_a"\n  - t/test_good.py -k "test_b"'
    )
    (project / "lists" / "l0_cpu.yml").write_text(text)
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 1, output
    assert sorted(verdicts(data).values()) == ["FAILED", "PASSED"]


def test_too_many_failures_are_not_tried_again(project):
    """More than five failed tests are a broken stage, not a flaky one: one attempt each."""
    body = "\n\n".join(f"def test_{i}():\n    raise ValueError\n" for i in range(6))
    (project / "t" / "test_other.py").write_text(body)
    _, _, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert [p["attempts"] for stage in data["stages"] for p in stage["problems"]] == [["failed"]] * 6


def test_a_crashing_test_is_unfinished_and_not_tried_again(project):
    """The process died under it: a failure of likely infrastructure, with the test's name."""
    (project / "t" / "test_other.py").write_text("import os\n\n\ndef test_b():\n    os._exit(9)\n")
    code, output, data = run(project, "--kind", "cpu", "--disable-fail-fast")
    assert code == 1, output
    problem = next(p for stage in data["stages"] for p in stage["problems"])
    assert problem["id"].endswith("test_b")
    assert problem["attempts"] == ["unfinished"]
    assert problem["cause"] == "infrastructure"


def test_a_prefix_keeps_a_line_to_its_hardware(project):
    """full:A10/ runs on A10 stages only; elsewhere the line does not exist."""
    (project / "lists" / "l0_cpu.yml").write_text(CPU_LIST.replace("t/test_other.py", "full:A10/t/test_other.py"))
    (project / "lists" / "stages.yml").write_text(TABLE.replace(", shards: 2", ""))
    code, output, data = run(project, "--kind", "cpu")
    assert code == 0, output
    assert [line["line"] for line in data["stages"][0]["lines"]] == ["t/test_good.py"]
