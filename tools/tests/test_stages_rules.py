"""The rules of the field's lists, stages, shards and waivers, one by one, without running a test."""

import ast
import functools
import json
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from stage_project import CPU_LIST, TABLE, make_project, table_of
from stages import __main__ as command
from stages import checking, matrix
from stages.bundle import reusable_stage
from stages.comment import REFUSED
from stages.errors import ListError, StageError
from stages.execution import reruns_allowed
from stages.hardware import Hardware, workers_of
from stages.junit import CaseResult
from stages.lists import Condition, covers, parse_line, read_list
from stages.plan import Options, choose, make_plan, stages_of
from stages.selecting import (
    collisions,
    mismatch,
    prefix_holds,
    query_of_stage,
    select,
    unknown_keys,
)
from stages.sharding import shard
from stages.table import Stage, read_table, select_by_name
from stages.waivers import parse_waivers, read_waivers, waived, waived_tests
from stages.words import WORDS

ROOT = Path(__file__).resolve().parents[2]
A10 = Stage("A10-PyTorch", "a10", "l0_a10.yml", 1, 1, 1)
H100 = Stage("DGX_H100-PyTorch", "h100", "l0_h100.yml", 1, 1, 1)
GB200 = Stage("GB200-4_GPUs-PyTorch", "gb200", "l0_gb200.yml", 1, 1, 4)
CPU = Stage("CPU-Generic", "cpu", "l0_cpu.yml", 1, 1)


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path)


def write_list(folder, blocks, name="l0_cpu"):
    path = folder / f"{name}.yml"
    path.write_text(f"version: 0.0.1\n{name}:\n{blocks}")
    return path


# -- lists and conditions -----------------------------------------------------------------------------------------------


def test_condition_keys_of_the_field_are_known_and_others_are_doubted(tmp_path):
    """A key that no stage has constrains nothing; most likely it is a slip, and selection says so."""
    known = dict.fromkeys((*WORDS.keys, "host_mem_free_gib"), "x")
    assert unknown_keys(Condition(terms=known)) == []
    assert "terms.stge" in unknown_keys(Condition(terms={"stge": "x"}))[0]
    assert "did you mean stage" in unknown_keys(Condition(terms={"stge": "x"}))[0]
    path = write_list(tmp_path, "- condition: {wildcards: {gpus: ['*a10*']}}\n  tests: [a.py]\n")
    found = select(read_list(path), {"stage": "pre_merge"})
    assert [line.target for line in found.lines] == ["a.py"]
    assert any("l0_cpu.yml:3: wildcards.gpus" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("pattern", "other"), [("*a10*", "A100"), ("*b200*", "GB200"), ("*h200*", "GH200"), ("*b300*", "GB300")]
)
def test_every_colliding_wildcard_is_warned_about(tmp_path, pattern, other):
    """It matches the other card, as the field's rule says, and selection warns of it by file and line."""
    condition = Condition(wildcards={"gpu": (pattern,)})
    assert mismatch(condition, {"gpu": other.lower()}) is None
    assert other in collisions(condition)[0]
    path = write_list(tmp_path, f"- condition: {{wildcards: {{gpu: ['{pattern}']}}}}\n  tests: [a.py]\n")
    assert f"also matches {other}" in select(read_list(path), {"gpu": other.lower()}).warnings[0]


def test_colliding_cards_are_told_apart_by_their_cpu(tmp_path):
    """*b200* on x86_64 and on aarch64 are two blocks; on a machine of which nothing is known both hold."""
    blocks = "".join(
        f"- condition: {{wildcards: {{gpu: ['*b200*'], cpu: {cpu}}}}}\n  tests: [{name}.py]\n"
        for cpu, name in (("x86_64", "b200"), ("aarch64", "gb200"))
    )
    test_list = read_list(write_list(tmp_path, blocks))
    for hardware, wanted in (
        (Hardware(cpu="x86_64"), ["b200.py"]),
        (Hardware(cpu="aarch64"), ["gb200.py"]),
        (None, ["b200.py", "gb200.py"]),
    ):
        assert [line.target for line in select(test_list, query_of_stage(GB200, hardware)).lines] == wanted


@pytest.mark.parametrize("gpus", [0, 1, 8, 1024])
def test_a_range_of_everything_always_holds(gpus):
    """gte 0, lte 1024: lists that any machine runs."""
    assert mismatch(Condition(ranges={"system_gpu_count": (0, 1024)}), {"system_gpu_count": str(gpus)}) is None


def test_a_list_may_have_any_name_that_is_its_own(project):
    """Not only l0_*: what the table names is read, checked and run."""
    lists = project / "lists"
    (lists / "stages.yml").write_text(TABLE.replace("l0_cpu.yml", "infra_dry_run.yml"))
    (lists / "l0_cpu.yml").rename(lists / "infra_dry_run.yml")
    with pytest.raises(ListError, match="want exactly one context named 'infra_dry_run'"):
        make_plan(lists, Options(kind="cpu"), Hardware())
    (lists / "infra_dry_run.yml").write_text(CPU_LIST.replace("l0_cpu:", "infra_dry_run:"))
    assert list(checking.check(project, lists)) == []
    assert len(make_plan(lists, Options(kind="cpu"), Hardware()).stages) == 2


def test_a_list_that_can_only_be_empty_is_an_error_with_its_query(project):
    """tests: [] reads, and selects nothing: exit 2, not a stage that is green for nothing."""
    (project / "lists" / "l0_cpu.yml").write_text("version: 0.0.1\nl0_cpu:\n- tests: []\n")
    with pytest.raises(StageError, match=r"CPU-Generic-1: l0_cpu\.yml selects nothing for .*stage=pre_merge"):
        make_plan(project / "lists", Options(kind="cpu"), Hardware())


def test_a_stage_of_another_machine_is_asked_for_by_its_name_alone():
    """Without a machine only what the name says is in the query: what a node alone knows is absent, and matches."""
    query = query_of_stage(Stage("GB200-8_GPUs-2_Nodes-PyTorch", "gb200", "l", 1, 1, 4, 2))
    assert set(query) == {"stage", "backend", "gpu", "system_gpu_count", "auto_trigger", "orchestrator"}
    ubuntu = Condition(wildcards={"linux_distribution_name": ("ubuntu*",), "cpu": ("aarch64",)})
    assert mismatch(ubuntu, query) is None


def test_a_line_that_two_blocks_hold_runs_once_and_the_first_counts(tmp_path):
    """The field lets the last one's markers win in silence and selects the test twice."""
    blocks = "- tests:\n  - a.py TIMEOUT (5)\n- tests:\n  - a.py TIMEOUT (9)\n"
    found = select(read_list(write_list(tmp_path, blocks)), {})
    assert [(line.target, line.timeout_min) for line in found.lines] == [("a.py", 5)]
    assert "a.py is also in line 4" in found.warnings[0]


# -- test lines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "a.py::t[x#y]",
        "a.py::t[two words]",
        "a.py::t[it's]",
        'a.py::t["x" or y]',
        "a.py::t[enable_concurrency-]",
        "a.py::t[x-False-1---False-y]",
        "a.py::t[x[0]-y]",
        "a.py::t[-k]",
    ],
)
def test_an_id_is_taken_whole(target):
    """What stands in an id's brackets belongs to it: #, blanks, quotes, empty parts; what follows is read as ever."""
    line = parse_line(f'{target} -k "z" TIMEOUT (9) # why')
    assert (line.target, line.keyword, line.timeout_min) == (target, "z", 9)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a.py::t[x", "not closed"),
        ("a.py::t[x #y", "not closed"),
        ("a.py::t SKIP broken", "'broken' is not a marker"),
        ("a.py::t TIMEOUT 90", "minutes in parentheses"),
        ("a.py::t TIMEOUT (1.5)", "minutes in parentheses"),
        ("a.py::t ${skipIf(x)}", "is not a marker"),
        ("% if gpu:", "is not a marker"),
        ("a.py::t skipIf(gpu, 'x')", "is not a marker"),
    ],
)
def test_what_no_line_says_is_refused(text, part):
    """A cut id, a reason or minutes without parentheses, a template: there are no templates, conditions select."""
    with pytest.raises(ListError) as error:
        parse_line(text)
    assert part in str(error.value)


def test_a_folder_line_stays_what_it_is():
    """unittest/dir is a target like any other: nothing is rewritten into a test that runs tests."""
    line = parse_line('unittest/some/dir -m "part0"')
    assert (line.target, line.identity) == ("unittest/some/dir", 'unittest/some/dir -m "part0"')


@pytest.mark.parametrize(
    ("prefix", "stage", "runs"),
    [
        (None, A10, True),
        ("A10", A10, True),
        ("a10", A10, True),
        ("A100", A10, False),
        ("H100", H100, True),
        ("DGX_H100", H100, True),
        ("sm90", H100, True),
        ("sm90", A10, False),
        ("sm86", A10, True),
        ("sm100", GB200, True),
        ("H100", Stage("H100_PCIe-PyTorch", "h100", "l", 1, 1, 1), True),
        ("A10", CPU, False),
    ],
)
def test_a_prefix_names_a_stage_a_family_or_an_architecture(prefix, stage, runs):
    """full:DGX_H100/, full:H100/ and full:sm90/ hold on the same stages; sm names follow from the family."""
    assert prefix_holds(prefix, stage) is runs


# -- stages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("A100X-[Post-Merge]-PyTorch", "stage", "post_merge"),
        ("A100X-PyTorch-Post-Merge", "stage", "post_merge"),
        ("A100X-PyTorch", "stage", "pre_merge"),
        ("X-PyTorch", "backend", "pytorch"),
        ("X-CPP", "backend", "cpp"),
        ("X-Triton", "backend", "triton"),
        ("X-FMHA", "backend", "fmha"),
        ("X-Generic", "backend", "generic"),
        ("X-Verl", "backend", "verl"),
        ("X-PyTorchish", "backend", None),
        ("X", "backend", None),
        ("X-PyTorch-DeepSeek", "auto_trigger", "deepseek"),
        ("X-PyTorch-GptOss", "auto_trigger", "gpt_oss"),
        ("X-TensorRT", "backend", "tensorrt"),
        ("X-AutoDeploy", "backend", "autodeploy"),
        ("X-PyTorch", "auto_trigger", "others"),
        ("X-PyTorch-Ray", "orchestrator", "ray"),
        ("X-PyTorch", "orchestrator", "mpi"),
        ("H100_PCIe-PyTorch", "gpu", "h100_pcie"),
    ],
)
def test_every_word_of_a_name_has_its_meaning(family, key, value):
    """A name without a backend's word has no backend in its query, and so matches them all."""
    assert query_of_stage(Stage(family, "h100", "l", 1, 1, 1)).get(key) == value


@pytest.mark.parametrize(
    ("entry", "gpus", "nodes", "ranks"),
    [
        ("name: A10-PyTorch, hardware: a10, list: l.yml", 1, 1, 1),
        ("name: GB200-4_GPUs-PyTorch, hardware: gb200, list: l.yml", 4, 1, 1),
        ("name: GB200-8_GPUs-2_Nodes-PyTorch, hardware: gb200, list: l.yml", 4, 2, 1),
        ("name: MPI-4_Ranks-Agreement, hardware: mpi, list: l.yml", 0, 1, 4),
        ("name: CPU-Generic, hardware: cpu, list: l.yml", 0, 1, 1),
    ],
)
def test_a_name_says_its_counts(tmp_path, entry, gpus, nodes, ranks):
    """N_GPUs are those of all nodes together; one GPU where the name says nothing, none where the kind has none."""
    path = tmp_path / "stages.yml"
    path.write_text(table_of(entry))
    (stage,) = read_table(path)
    assert (stage.gpus, stage.nodes, stage.ranks) == (gpus, nodes, ranks)
    assert query_of_stage(stage)["system_gpu_count"] == str(gpus * nodes)


@pytest.mark.parametrize("more", ["gpus: 2", "gpus: 4, nodes: 2", "ranks: 0"])
def test_a_name_and_its_entry_must_agree(tmp_path, more):
    """A stage called 4_GPUs that takes two would be told a lie by its own list."""
    path = tmp_path / "stages.yml"
    path.write_text(table_of(f"name: GB200-4_GPUs-PyTorch, hardware: gb200, list: l.yml, {more}"))
    with pytest.raises(ListError, match=rf"{path}:4: "):
        read_table(path)


# -- shards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", range(1, 9))
def test_shards_are_disjoint_complete_and_stable(shards):
    """Whatever order the lines come in, each is in exactly one shard, and always in the same one, in the list's order."""
    rng = random.Random(shards)
    for _ in range(40):
        lines = [parse_line(f"t/test_{i}.py") for i in range(rng.randrange(1, 40))]
        # Few different durations: ties must not be broken by the order either.
        durations = {line.identity: rng.choice([0.0, 1.0, 1.0, 30.0]) for line in lines if rng.random() < 0.7}
        first = shard(lines, shards, durations)
        assert len(first) == shards
        assert sorted(x.identity for s in first for x in s) == sorted(x.identity for x in lines)
        shuffled = rng.sample(lines, len(lines))
        again = shard(shuffled, shards, durations)
        assert [{x.identity for x in s} for s in first] == [{x.identity for x in s} for s in again]
        for part in again:
            assert [x for x in shuffled if x in part] == list(part)


@pytest.mark.parametrize("shards", range(1, 9))
def test_a_reordered_list_file_gives_every_stage_the_same_lines(project, shards):
    """From the file on: blocks and lines in another order, isolated ones among them, change no stage."""
    rng = random.Random(shards)
    (project / "lists" / "stages.yml").write_text(TABLE.replace("shards: 2", f"shards: {shards}"))
    blocks = [[f"t/d{b}/test_{i}.py{' ISOLATION' if i % 3 == 0 else ''}" for i in range(5)] for b in range(3)]
    (project / "lists" / "durations.json").write_text(json.dumps({f"t/d0/test_{i}.py": 7.0 * i for i in range(5)}))
    seen = set()
    for _ in range(4):
        text = "".join(
            "- tests:\n" + "".join(f"  - {line}\n" for line in rng.sample(block, 5)) for block in rng.sample(blocks, 3)
        )
        write_list(project / "lists", text)
        run = make_plan(project / "lists", Options(kind="cpu"), Hardware())
        parts = [frozenset(line.target for line in plan.lines) for plan in run.stages]
        assert sum(map(len, parts)) == len(frozenset.union(*parts)) == 15
        seen.add(tuple(parts))
    assert len(seen) == 1


@pytest.mark.parametrize("shards", range(1, 5))
def test_no_shard_is_left_empty_while_there_are_lines(shards):
    """One very long line does not swallow the shards after it, and lines that take no time spread, too."""
    lines = [parse_line(f"t/test_{i}.py") for i in range(4)]
    for durations in ({"t/test_0.py": 100.0}, {line.identity: 0.0 for line in lines}):
        assert all(shard(lines, shards, durations))


def test_a_folder_is_one_unit_and_foreign_durations_move_nothing():
    """What other names took, from another root or a list that is gone, neither repeats a line nor loses one."""
    lines = [parse_line("unittest/dir"), parse_line("unittest/dir/sub.py"), parse_line("t/test_1.py")]
    plain = shard(lines, 2, {})
    assert [len(part) for part in plain] == [2, 1]
    foreign = {"/elsewhere/t/test_1.py": 500.0, "unittest": 70.0, "t/test_10.py": 9.0}
    assert shard(lines, 2, foreign) == plain


# -- which stages -------------------------------------------------------------------------------------------------------

FULL_TABLE = table_of(
    "name: CPU-Generic, hardware: cpu, list: l0_cpu.yml",
    "name: A10-PyTorch, hardware: a10, list: l0_a10.yml",
    "name: A100X-PyTorch, hardware: a100x, list: l0_a100x.yml",
    "name: A100X-PyTorch-Post-Merge, hardware: a100x, list: l0_a100x.yml",
    "name: DGX_H100-Sanity, hardware: h100, list: l0_h100.yml",
    "name: DGX_H100-CPP, hardware: h100, list: l0_h100.yml, on_demand: true",
    "name: GB200-4_GPUs-PyTorch, hardware: gb200, list: l0_gb200.yml",
    "name: GB200-4_GPUs-PyTorch-Post-Merge, hardware: gb200, list: l0_gb200.yml",
)
EVERYDAY = ["CPU-Generic-1", "A10-PyTorch-1", "A100X-PyTorch-1", "DGX_H100-Sanity-1", "GB200-4_GPUs-PyTorch-1"]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "stages.yml"
    path.write_text(FULL_TABLE)
    return read_table(path)


@pytest.mark.parametrize(
    ("options", "names", "partly"),
    [
        ({}, EVERYDAY, None),
        ({"post_merge": True}, [*EVERYDAY, "A100X-PyTorch-Post-Merge-1", "GB200-4_GPUs-PyTorch-Post-Merge-1"], None),
        ({"gpu_type": "A10"}, ["A10-PyTorch-1"], "GPU type"),
        ({"gpu_type": "A10, GB200"}, ["A10-PyTorch-1", "GB200-4_GPUs-PyTorch-1"], "GPU type"),
        ({"test_backend": "generic"}, ["CPU-Generic-1", "DGX_H100-Sanity-1"], "backend"),
        ({"test_backend": "PyTorch, cpp"}, EVERYDAY[1:], "backend"),
        ({"multi_gpu": "only"}, ["GB200-4_GPUs-PyTorch-1"], "only stages of several GPUs"),
        ({"multi_gpu": "without"}, EVERYDAY[:-1], "no stage of several GPUs"),
        ({"multi_gpu": "add"}, EVERYDAY, None),
        ({"multi_gpu": "add", "gpu_type": "A10"}, ["A10-PyTorch-1", "GB200-4_GPUs-PyTorch-1"], "GPU type"),
        ({"extra_stage": "DGX_H100-CPP-1"}, [*EVERYDAY, "DGX_H100-CPP-1"], None),
        ({"gpu_type": "A10", "extra_stage": "CPU-*"}, ["CPU-Generic-1", "A10-PyTorch-1"], "GPU type"),
        ({"stage_list": "A10-*"}, ["A10-PyTorch-1"], "stage list"),
        ({"skip_test": "docs"}, EVERYDAY, "skipping all tests (docs)"),
    ],
)
def test_options_choose_stages(table, options, names, partly):
    """Each filter alone and together; narrowing is said, adding narrows nothing."""
    stages, narrowed, warnings = choose(table, Options(**options))
    assert sorted(s.name for s in stages) == sorted(names)
    assert [s.name for s in stages] == [s.name for s in table if s.name in names]
    assert (narrowed is None) == (partly is None)
    assert partly is None or partly in narrowed
    assert warnings == ()


def test_a_star_names_every_stage_and_needs_no_approval(table):
    """Post-merge and on-demand ones too: whoever owns the machine decides. The hosted CI has its own approval."""
    assert select_by_name(table, "*") == table
    assert [s.name for s in choose(table, Options(stage_list="*Post-Merge*"))[0]] == [
        "A100X-PyTorch-Post-Merge-1", "GB200-4_GPUs-PyTorch-Post-Merge-1",
    ]  # fmt: skip


def test_a_stage_list_overrides_the_filters_and_says_so(table):
    """Nothing is ignored in silence."""
    options = Options(
        stage_list="A10-PyTorch-1",
        gpu_type="GB200",
        test_backend="cpp",
        post_merge=True,
        multi_gpu="without",
        kind="cpu",
    )
    stages, _, warnings = choose(table, options)
    assert [s.name for s in stages] == ["A10-PyTorch-1"]
    assert [text.split()[0] for text in warnings] == [
        "--kind", "--gpu-type", "--test-backend", "--post-merge", "--disable-multi-gpu-test",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"gpu_type": "a10"}, "unknown GPU type 'a10'; did you mean A10?"),
        ({"gpu_type": "H100"}, "unknown GPU type 'H100'"),
        ({"gpu_type": " , "}, "is empty"),
        ({"test_backend": "torch"}, "did you mean pytorch"),
        ({"gpu_type": "CPU", "multi_gpu": "only"}, "nothing is left"),
        ({"stage_list": ""}, "names no stage"),
        ({"stage_list": "A10-PyTorch-1,B-1", "extra_stage": None}, "unknown stage 'B-1'"),
    ],
)
def test_what_matches_no_stage_is_an_error(table, options, part):
    """A GPU type is the first word, exactly; no stage at all is an error, never a green nothing."""
    with pytest.raises(StageError) as error:
        choose(table, Options(**options))
    assert part in str(error.value)


def test_names_are_checked_against_every_kind(project):
    """A stage of a card that is not here is known by name: it is no typo, it has no coverage here."""
    run = make_plan(project / "lists", Options(stage_list="A10-PyTorch-1"), Hardware())
    assert run.stages[0].lacking == "needs 1 × A10, this machine has no GPU"


@pytest.mark.parametrize("option", [*REFUSED])
def test_options_with_nothing_to_act_on_are_refused_by_name(project, option, capsys):
    """Exit 2, the option and the reason in one line, nothing run: never accepted and ignored."""
    folder = project / "results"
    for words in ([option], [option, "x"], ["--kind", "cpu", option]):
        assert command.main([*words, "--root", str(project), "--results", str(folder)]) == 2
        assert f"stages: error: {option}: {REFUSED[option]}" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--reuse-test", "--disable-reuse-test"], "not allowed with"),
        (["--only-multi-gpu-test", "--disable-multi-gpu-test"], "not allowed with"),
        (["--stage-lst", "x"], "did you mean --stage-list"),
        (["--stage", "x"], "unrecognized arguments: --stage"),
        (["--workers", "0"], "want a whole number of at least 1"),
        (["--workers", "\u00b2"], "want a whole number of at least 1"),
        (["--kind", "a11"], "unknown hardware kind 'a11'; did you mean a10"),
        (["--comment", "/bot run --debug"], "--debug: no container is kept"),
        (["--kind", "cpu", "--reuse-test", "20260101T000000Z-abc"], "no run '20260101T000000Z-abc'"),
        (["--stages-of", "t/test_goood.py"], "did you mean t/test_good.py"),
    ],
)
def test_words_that_cannot_be_meant_run_nothing(project, words, part, capsys):
    """Exit 2 in one line: options that contradict each other, typos, short forms, runs and tests that there are not."""
    places = ["--root", str(project), "--lists", str(project / "lists"), "--results", str(project / "results")]
    assert command.main([*words, *places]) == 2
    assert part in capsys.readouterr().err
    assert list((project / "results").iterdir()) == []


def test_a_test_is_mapped_to_its_stages(project, capsys):
    """A test, a file or a folder: every stage that runs some of it, with the line it does it by."""
    (project / "lists" / "waives.txt").write_text("t/test_good.py SKIP (x)\n")
    lists = project / "lists"
    assert [(s.name, line.target) for s, line in stages_of(lists, "t/test_good.py::test_a")] == [
        ("CPU-Generic-1", "t/test_good.py"),
    ]
    assert len(stages_of(lists, "t")) == 3
    assert command.main(["--stages-of", "t/test_other.py", "--lists", str(lists)]) == 0
    assert capsys.readouterr().out.split() == ["CPU-Generic-2", "t/test_other.py"]


def test_two_runs_in_one_second_have_bundles_of_their_own(tmp_path, monkeypatch):
    """Nothing that was written is written over."""
    script = f"import pathlib, stages.bundle as b; b.bundle_folder(pathlib.Path({str(tmp_path)!r}), 'abcdef0123')"
    here = {"cwd": ROOT / "tools", "check": True}
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tools"))
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], **here)
    assert len({path.name for path in tmp_path.glob("*-abcdef01-*")}) == 3


# -- waivers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waiver", "line", "stage", "whole", "part"),
    [
        ("t/a.py", "t/a.py", A10, True, False),
        ("t", "t/a.py", A10, True, False),
        ("t/a.py::test_b", "t/a.py::test_b[1]", A10, True, False),
        ("t/a.py", "t", A10, False, True),
        ("t/sub", "t", A10, False, True),
        ("t/a.py::test_b", "t/a.py", A10, False, True),
        ("t/a.py::test_b", "t/a.py::test_bc", A10, False, False),
        ("t/a", "t/ab/c.py", A10, False, False),
        ('t/a.py -m "x"', 't/a.py -m "x"', A10, True, False),
        ('t/a.py -m "x"', 't/a.py -m "y"', A10, False, False),
        ('t/a.py -k "x"', "t/a.py", A10, False, False),
        ('t/a.py::test_b -k "x"', "t/a.py", A10, False, False),
        ("t/a.py", 't/a.py -m "x"', A10, True, False),
        ("full:A10/t/a.py", "t/a.py", A10, True, False),
        ("full:A10/t/a.py", "t/a.py", H100, False, False),
        ("full:sm90/t/a.py::test_b", "t/a.py", H100, False, True),
    ],
)
def test_a_waiver_holds_for_what_it_names(waiver, line, stage, whole, part):
    """At or below its target, on its hardware; with expressions exactly that line; a name's beginning is no name."""
    waivers = parse_waivers(f"{waiver} SKIP (known)", "w")
    assert (waived(waivers, parse_line(line), stage) is not None) is whole
    assert bool(waived_tests(waivers, parse_line(line), stage)) is part


def test_the_last_waiver_counts_without_a_newline(tmp_path):
    """And an id that has been cut is refused."""
    path = tmp_path / "waives.txt"
    path.write_text("a.py SKIP (x)\nb.py SKIP (y)")
    assert [w.test.target for w in read_waivers(path)] == ["a.py", "b.py"]
    with pytest.raises(ListError, match=r"w:1: .*was it cut short"):
        parse_waivers("a.py::t[x-1 SKIP (y)", "w")
    with pytest.raises(ListError, match="is not a marker"):
        parse_waivers("a.py b.py c.py d.py e.py f.py g.py h.py i.py j.py SKIP (ten)", "w")


# -- reruns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "seconds", "message", "reruns"),
    [
        ("failed", 1.0, "assert 1 == 2", 2),
        ("failed", 300.0, "assert 1 == 2", 2),
        ("failed", 301.0, "assert 1 == 2", 1),
        ("failed", 600.0, "assert 1 == 2", 1),
        ("failed", 601.0, "assert 1 == 2", 0),
        ("error", 1.0, "fixture", 2),
        ("unfinished", 1.0, "began and did not end", 0),
        ("passed", 1.0, "", 0),
        ("skipped", 1.0, "", 0),
    ],
)
def test_how_often_a_test_is_tried_again(outcome, seconds, message, reruns):
    """By its own duration; a very long one never, nor what did not finish."""
    assert reruns_allowed(CaseResult("a.py::test_b", outcome, seconds, message)) == reruns


# -- the checker --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "change", "part"),
    [
        ("l0_cpu.yml", ("- t/test_other.py", "- t"), ":5: t/test_good.py is run by line 6, too (t)"),
        ("l0_cpu.yml", ("t/test_other.py", "t/test_good.py::test_a"), ":6: t/test_good.py::test_a is run by line 5"),
        ("l0_cpu.yml", ("t/test_other.py", "t/test_other.py XFAIL (x) SKIP (y)"), "contradict each other"),
        ("l0_cpu.yml", ("t/test_other.py", "t/test_other.py TIMEOUT (60)"), "is what holds without it"),
        (
            "l0_cpu.yml",
            ("t/test_other.py", "full:A1O/t/test_other.py"),
            "full:A1O/ is no stage's hardware; did you mean A10",
        ),
        ("l0_cpu.yml", ("t/test_other.py", "full:A10/t/test_other.py"), "CPU-Generic-2 holds no line"),
        ("l0_cpu.yml", ("{stage: pre_merge}", "{stge: pre_merge}"), "terms.stge: no stage has such a key"),
        ("l0_cpu.yml", ("{stage: pre_merge}", "{backend: pytorch}"), "no stage reaches this block (terms.backend"),
        ("l0_cpu.yml", ("{stage: pre_merge}", "{backend: pytorch}"), "stages.yml: CPU-Generic-1 selects nothing"),
        ("l0_cpu.yml", ("tests:\n  - t/test_good.py\n  - t/test_other.py\n", "tests: []\n"), "the block holds no test"),
        ("stages.yml", ("shards: 2", "shards: 3"), "CPU-Generic-3 holds no line: 3 shards of 2"),
        ("waives.txt", (None, "t/test_good.py SKIP (x)\nt/test_good.py::test_a SKIP (y)\n"), "also waived by line 1"),
        ("waives.txt", (None, "full:l4Os/t/test_good.py SKIP (x)\n"), "full:l4Os/ is no stage's hardware"),
        ("waives.txt", (None, 't/test_good.py -m "x" SKIP (x)\n'), "is in no list: nothing to waive"),
        ("stages.yml", ("A10-PyTorch", "A10-Pytorch"), "'Pytorch' of A10-Pytorch has no meaning; did you mean PyTorch"),
        ("stages.yml", ("A10-PyTorch", "A10-TensorRt-GPTOSS"), "'GPTOSS' of A10-TensorRt-GPTOSS has no meaning"),
        ("l0_a10.yml", (" -m gpu", ""), "A10-PyTorch-1 holds no line that needs its GPU"),
        ("l0_a10.yml", (" -m gpu", " -m 'not slow and not gpu'"), "A10-PyTorch-1 holds no line that needs its GPU"),
    ],
)
def test_the_checker_finds_what_others_let_through(project, file, change, part):
    """Overlaps, contradictions, prefixes, keys, empty stages and shards, waivers that waive nothing new."""
    path = project / "lists" / file
    old, new = change
    if old is not None:
        assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1) if old else new)
    problems = list(checking.check(project, project / "lists"))
    assert any(part in problem for problem in problems), problems


def test_the_checker_does_not_import_what_it_checks(project):
    """A test file that may not be imported here is read all the same."""
    (project / "t" / "test_good.py").write_text("raise SystemExit('imported')\n\n\ndef test_a():\n    pass\n")
    done = subprocess.run(
        [sys.executable, str(command.ROOT / "tools" / "stages"), "--check", "--root", str(project), "--lists",
         str(project / "lists")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "test lists hold\n", "")


def test_covering_goes_by_whole_names():
    """test_1 is not test_10, a folder is not the one whose name it begins."""
    assert covers("t/a.py::test_1", "t/a.py::test_1[x]")
    assert covers("t/", "t/a.py")
    assert not covers("t/a.py::test_1", "t/a.py::test_10")
    assert not covers("t/a", "t/ab/x.py")
    assert not covers("t/a.py", "t")


# -- the hosted CI ------------------------------------------------------------------------------------------------------


def test_the_hosted_workflow_is_complete_and_keeps_forks_out(table):
    """Lint, types, docs and every kind; post-merge jobs wait for a label, and the label starts them; no fork's code on our
    machines."""
    text = matrix.workflow(table)
    data = yaml.safe_load(text)
    jobs = data["jobs"]
    assert set(jobs) == {
        "lint",
        "types",
        "docs",
        "cpu",
        "a10",
        "a100x",
        "a100x-post-merge",
        "h100",
        "gb200",
        "gb200-post-merge",
    }
    assert "labeled" in data[True]["pull_request"]["types"]  # YAML takes the key `on` for true
    assert "pull_request_target" not in text
    for name, job in jobs.items():
        gate = job.get("if", "")
        hosted = job["runs-on"] == "ubuntu-latest"
        assert hosted or "head.repo.full_name == github.repository" in gate, name
        assert (f"'{matrix.APPROVAL}'" in gate) == name.endswith("post-merge")
        (run,) = [step for step in job["steps"] if "run" in step]
        assert set(run) == {"run"}
        if name in ("lint", "types", "docs"):
            assert run["run"] == f"python3 tools/bootstrap.py -s {name}"
            continue
        assert "tools/bootstrap.py -s stages" in run["run"]
        for stage in job["strategy"]["matrix"]["stage"]:
            assert ("Post-Merge" in stage) == name.endswith("post-merge")
    assert "DGX_H100-CPP-1" not in jobs["h100"]["strategy"]["matrix"]["stage"]
    assert "group: stages-${{ github.ref }}" in text
    assert "cancel-in-progress: ${{ github.event_name == 'pull_request' }}" in text
    assert "name: results-${{ matrix.stage }}-${{ github.run_attempt }}" in text
    assert "if-no-files-found: error" in text


# -- reuse --------------------------------------------------------------------------------------------------------------


def machine(**fields):
    return json.loads(json.dumps(asdict(Hardware(**fields))))


def origin(**changes):
    return {"commit": "c" * 40, "dirty": False, "versions": {"pytest": "9"}, "python": "3.11.7", "mpi": "m",
            "accept_capability": None, "hardware": machine(cpu="x86_64", gpu_names=("NVIDIA A10",)),
            **changes}  # fmt: skip


@pytest.mark.parametrize(
    ("earlier", "now", "verdict", "reused"),
    [
        ({}, {}, "PASSED", True),
        ({}, {"commit": "d" * 40}, "PASSED", False),
        ({}, {"dirty": True}, "PASSED", False),
        ({"dirty": True}, {}, "PASSED", False),
        ({}, {"versions": {"pytest": "8"}}, "PASSED", False),
        ({}, {"python": "3.12.1"}, "PASSED", False),
        ({}, {"mpi": "another"}, "PASSED", False),
        ({}, {"accept_capability": "9.0"}, "PASSED", False),
        ({}, {"hardware": machine(cpu="aarch64", gpu_names=("NVIDIA A10",))}, "PASSED", False),
        ({}, {"hardware": machine(gpu_names=("NVIDIA A100X",))}, "PASSED", False),
        ({}, {}, "FLAKY", False),
        ({}, {}, "REUSED", False),
        ({}, {}, "FAILED", False),
        ({}, {"commit": ""}, "PASSED", False),
    ],
)
def test_only_a_pass_of_the_very_same_is_reused(project, earlier, now, verdict, reused):
    """The same commit, clean, lines, versions, Python, MPI and hardware, and it passed then by running."""
    one, other = make_plan(project / "lists", Options(kind="cpu"), Hardware()).stages
    folder = project / "20260101T000000Z-cccccccc"
    folder.mkdir()
    entry = {"name": one.stage.name, "verdict": verdict, "fingerprint": one.fingerprint}
    (folder / "results.json").write_text(json.dumps({**origin(**earlier), "stages": [entry]}))
    assert bool(reusable_stage([folder], one, origin(**now))) is reused
    assert reusable_stage([folder], other, origin(**now)) is None


def test_what_a_stage_runs_is_its_own(project):
    """A stage's fingerprint follows its lines, their markers and their waivers, whichever other stages were named beside it."""
    lists = project / "lists"

    def fingerprints(names="CPU-*"):
        run = make_plan(lists, Options(stage_list=names), Hardware())
        return {plan.stage.name: plan.fingerprint for plan in run.stages}

    first = fingerprints()
    assert (
        fingerprints("*")["CPU-Generic-1"] == fingerprints("CPU-Generic-1")["CPU-Generic-1"] == first["CPU-Generic-1"]
    )
    seen = {first["CPU-Generic-1"]}
    for name, text in (
        ("waives.txt", "t/test_good.py::test_a SKIP (x)\n"),
        ("l0_cpu.yml", CPU_LIST.replace("test_good.py", "test_good.py TIMEOUT (5)")),
        ("l0_cpu.yml", CPU_LIST.replace("test_good.py", "test_good.py UNSTABLE (x)")),
        ("stages.yml", TABLE.replace("{cpu: {},", "{cpu: {needs: [json]},")),
        ("durations.json", '{"t/test_good.py": 1, "t/test_other.py": 9}'),
    ):
        (lists / name).write_text(text)
        now = fingerprints()
        assert now["CPU-Generic-1"] not in seen, name
        seen.add(now["CPU-Generic-1"])
    assert fingerprints("A10-*")["A10-PyTorch-1"] == fingerprints("*")["A10-PyTorch-1"]


@functools.cache
def imported(path):
    """Top-level modules that a file imports when it is loaded."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_what_the_tests_of_a_stage_import_is_what_it_needs():
    """A library that is missing is stated before the stage starts, not found as an error of collection."""
    ours = {path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py")} | {"packages", "integration"}
    ours |= {path.stem for folder in ("tools", "packages/*/tests", "integration/*", "packages/*/tests/*")
             for path in ROOT.glob(f"{folder}/*.py")} | {path.name for path in (ROOT / "tools").iterdir()}  # fmt: skip
    missing = set()
    for stage in read_table(ROOT / "testlists" / "stages.yml"):
        for line in select(read_list(ROOT / "testlists" / stage.list_file), query_of_stage(stage), stage).lines:
            path = ROOT / line.path
            for file in [path] if path.is_file() else path.rglob("test_*.py"):
                found = imported(file) - ours - set(sys.stdlib_module_names) - set(stage.needs)
                missing |= {(stage.hardware, str(file.relative_to(ROOT)), name) for name in found}
    assert not missing


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 3), (3, 4), (4, 4), (128, 4)])
def test_workers_are_one_more_than_cores_within_a_bound(cores, workers):
    """Many tests wait; every worker holds what its tests share."""
    assert workers_of(cores) == workers
