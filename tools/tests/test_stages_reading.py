"""Test lists, stage tables, waivers and comments: what is read, what is refused, and that the message says where."""

import pytest

from stages.__main__ import parser
from stages.comment import arguments_of_comment
from stages.errors import ListError, StageError
from stages.lists import parse_line, read_list
from stages.table import read_table, select_by_name
from stages.waivers import read_waivers


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("unittest/some/dir", {"target": "unittest/some/dir", "timeout_min": 60}),
        ("a/test_x.py::TestX::test_y[id-1]", {"target": "a/test_x.py::TestX::test_y[id-1]", "path": "a/test_x.py"}),
        ("a/test_x.py::test_y[-gpt-80]", {"target": "a/test_x.py::test_y[-gpt-80]"}),
        ("a/test_x.py::test_y[x,a=1/b:c+d.e---f]", {"target": "a/test_x.py::test_y[x,a=1/b:c+d.e---f]"}),
        ('unittest/x.py -k "a and not b"', {"keyword": "a and not b"}),
        ("unittest/x.py -k 'TIMEOUT or ISOLATION'", {"keyword": "TIMEOUT or ISOLATION", "isolated": False}),
        ('unittest/x.py -m "part0" -k "y"', {"mark": "part0", "keyword": "y"}),
        ("unittest/x.py -m part0", {"mark": "part0"}),
        ("a/test_x.py::test_y TIMEOUT (90)", {"timeout_min": 90}),
        ("a/test_x.py::test_y TIMEOUT(90)", {"timeout_min": 90}),
        ("a/test_x.py::test_y ISOLATION", {"isolated": True}),
        ("a/test_x.py::test_y ISOLATION,TIMEOUT (90)", {"isolated": True, "timeout_min": 90}),
        ("a/test_x.py::test_y TIMEOUT (90),ISOLATION", {"isolated": True, "timeout_min": 90}),
        ("a/test_x.py::test_y TIMEOUT (90), ISOLATION", {"isolated": True, "timeout_min": 90}),
        ("a/test_x.py::test_y XFAIL (slow on this card)", {"markers": {"XFAIL": "slow on this card"}}),
        ("a/test_x.py::test_y SKIP", {"markers": {"SKIP": ""}}),
        ("a/test_x.py::test_y SKIP (see (a) and (b))", {"markers": {"SKIP": "see (a) and (b)"}}),
        ("a/test_x.py::test_y # why it is here", {"target": "a/test_x.py::test_y"}),
        ("a/test_x.py::test_y TIMEOUT (30) # TIMEOUT (90)", {"timeout_min": 30}),
        ("full:A10/a/test_x.py::test_y", {"hardware_prefix": "A10", "target": "a/test_x.py::test_y"}),
        ("a/test_x.py SKIP (it's broken)", {"markers": {"SKIP": "it's broken"}}),
        ("a/test_x.py SKIP (#123)", {"markers": {"SKIP": "#123"}}),
        ("a/test_x.py SKIP (https://bugs/x/y#z) # more", {"markers": {"SKIP": "https://bugs/x/y#z"}}),
        ('a/test_x.py UNSTABLE (say "why")', {"markers": {"UNSTABLE": 'say "why"'}}),
        ("full:l40s/a/test_x.py", {"identity": "full:l40s/a/test_x.py", "selects": ("a/test_x.py", None, None)}),
        ("a/test_x.py TIMEOUT (60)", {"timeout_min": 60, "timeout_given": True}),
        ('a.py -m "gpu and not slow"', {"needs_gpu": True}),
        ('a.py -m "gpu and gpus(count=2)"', {"needs_gpu": True}),
        ('a.py -m "gpu or slow"', {"needs_gpu": False}),
        ('a.py -m "not slow and not gpu"', {"needs_gpu": False}),
        ("full:l40s/a/test_x.py SKIP (x)", {"hardware_prefix": "l40s", "target": "a/test_x.py"}),
    ],
)
def test_a_line_is_read(text, wanted):
    """The field's lines read as they are: targets of every shape, expressions, markers in any order, comments."""
    line = parse_line(text)
    for name, value in wanted.items():
        assert getattr(line, name) == value


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "no test"),
        ("# only a comment", "no test"),
        ("TIMEOUT (90)", "no test"),
        ('-k "x"', "no test"),
        ("a.py -k", "without an expression"),
        ('a.py -k "a" -k "b"', "two -k"),
        ('a.py -k "open', "unbalanced"),
        ("a.py TIMEOUT", "minutes in parentheses"),
        ("a.py TIMEOUT (long)", "minutes in parentheses"),
        ("a.py TIMEOUT (0)", "minutes in parentheses"),
        ("a.py TIMOUT (3)", "did you mean TIMEOUT?"),
        ("a.py b.py", "'b.py' is not a marker"),
        ("a.py SKIP (x) SKIP (y)", "twice"),
        ("full:/a.py", "full:<hardware>/<test>"),
        ("a.py TIMEOUT (90", "is not closed"),
        ("a.py SKIP (why (really)", "is not closed"),
        ("a.py TIMEOUT (90) (91)", "'(91)' is not a marker"),
        ("a.py TIMEOUT (90) TIMEOUT (91)", "twice"),
        ("a.py TIMEOUT (\u00b2)", "minutes in parentheses"),
        ("a.py TIMEOUT (\u0664)", "minutes in parentheses"),
        ("a.py TIMEOUT (99999)", "1 to 9999"),
        ("a.py TIMEOUT ()", "minutes in parentheses"),
        ("a.py ISOLATION (x)", "ISOLATION takes nothing in parentheses"),
        ("a.py ISOLATION ISOLATION", "twice"),
        ("a.py (x)", "'(x)' is not a marker"),
        ('a.py -k ""', "without an expression"),
        ("a.py -k # x", "without an expression"),
        ("TIMEOUT(90)", "no test"),
    ],
)
def test_a_bad_line_is_refused_where_it_stands(text, part):
    """File and line, then what is wrong."""
    with pytest.raises(ListError) as error:
        parse_line(text, "l0_x.yml", 7)
    assert str(error.value).startswith("l0_x.yml:7: ")
    assert part in str(error.value)


GOOD = """version: 0.0.1
l0_x:
- condition:
    ranges:
      system_gpu_count: {gte: 1, lte: 1}
    wildcards:
      gpu: ['*a10*']
      linux_distribution_name: ubuntu*
    terms:
      stage: pre_merge
      backend: "pytorch"
      supports_fp8: true
  tests:
  - unittest/dir
  - unittest/x.py -k "y" TIMEOUT (90) # slow
- tests: []
"""


def test_a_list_is_read_with_its_lines(tmp_path):
    """Conditions in all three forms, quoted or not; a block without a condition; where each line stands."""
    path = tmp_path / "l0_x.yml"
    path.write_text(GOOD)
    test_list = read_list(path)
    first, second = test_list.blocks
    assert first.condition.terms == {"stage": "pre_merge", "backend": "pytorch", "supports_fp8": "true"}
    assert first.condition.ranges == {"system_gpu_count": (1, 1)}
    assert first.condition.wildcards == {"gpu": ("*a10*",), "linux_distribution_name": ("ubuntu*",)}
    assert [line.line for line in first.tests] == [14, 15]
    assert second.tests == ()


@pytest.mark.parametrize(
    ("change", "line", "part"),
    [
        (("lte: 1", "lt: 1"), 5, "'lt'; did you mean lte"),
        (("ranges:", "range:"), 4, "'range'; did you mean ranges?"),
        (("wildcards:", "wildcard:"), 6, "did you mean wildcards?"),
        (("  tests:\n  - u", "  test:\n  - u"), 13, "did you mean tests?"),
        (("gte: 1,", "gte: one,"), 5, "whole numbers"),
        (("gte: 1,", "gte: 2,"), 5, "nothing can match"),
        (("['*a10*']", "[3]"), 7, "want a pattern"),
        (("version: 0.0.1", "version: 0.0.2"), 1, "only 0.0.1"),
        (("version: 0.0.1\n", ""), 1, "version is missing"),
        (("l0_x:", "l0_y:"), 1, "named 'l0_x'"),
        (("- tests: []", "- tests: x"), 16, "want a list"),
        (("  - unittest/dir", "  - 3"), 14, "want text"),
        (("stage: pre_merge", "stage: [a]"), 10, "want one value"),
        (("      backend: ", "      stage: "), 11, "twice"),
        (("stage: pre_merge", "stage: !x pre_merge"), 10, "not a plain value"),
        (("  - unittest/dir", "  - !!timestamp nonsense"), 14, "not a plain value"),
    ],
)
def test_a_bad_list_is_refused_where_it_stands(tmp_path, change, line, part):
    """Misspelt keys, wrong types, impossible ranges, the wrong context: file, line, and the nearest key."""
    path = tmp_path / "l0_x.yml"
    assert change[0] in GOOD
    path.write_text(GOOD.replace(*change, 1))
    with pytest.raises(ListError) as error:
        read_list(path)
    assert str(error.value).startswith(f"{path}:{line}: "), str(error.value)
    assert part in str(error.value)


TABLE = """version: 0.0.1
hardware: {cpu: {}, a10: {gpu: A10, needs: [torch]}, a100x: {gpu: A100}, h100: {gpu: H100}}
families:
  - {name: A10-PyTorch, hardware: a10, list: l0_a10.yml, shards: 3}
  - {name: A100X-PyTorch-Post-Merge, hardware: a100x, list: l0_a100x.yml}
  - {name: CPU-Generic, hardware: cpu, list: l0_cpu.yml}
  - {name: "X-[a]-PyTorch", hardware: h100, list: l0_h100.yml, on_demand: true}
"""


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "stages.yml"
    path.write_text(TABLE)
    return read_table(path)


def test_a_table_gives_stages(table):
    """Shards count from one; GPUs default by the hardware; names say when, what and with which backend."""
    assert [s.name for s in table] == [
        "A10-PyTorch-1", "A10-PyTorch-2", "A10-PyTorch-3", "A100X-PyTorch-Post-Merge-1", "CPU-Generic-1", "X-[a]-PyTorch-1",
    ]  # fmt: skip
    assert [s.gpus for s in table] == [1, 1, 1, 1, 0, 1]
    assert [s.post_merge for s in table] == [False] * 3 + [True, False, False]
    assert table[0].backend == "pytorch"
    assert table[0].gpu_type == "A10"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("hardware: a10,", "hardware: a11,"), "did you mean a10"),
        (("shards: 3", "shards: 0"), "at least 1"),
        (("shards: 3", "shard: 3"), "did you mean shards"),
        (("name: CPU-Generic", "name: A10-PyTorch"), "twice"),
        (("name: CPU-Generic", "name: CPU Generic"), "letters"),
        (("on_demand: true", "on_demand: 3"), "true or false"),
        ((", list: l0_cpu.yml", ""), "list is missing"),
        (("hardware: {cpu", "hardwar: {cpu"), "did you mean hardware"),
        (("a10: {gpu: A10", "a10: {gpu: '['"), "is not a regular expression"),
        (("a10: {gpu: A10", "a10: {gpu: 3"), "is not a regular expression"),
        (("needs: [torch]", "needs: torch"), "want a list of Python modules"),
        (("needs: [torch]", "neds: [torch]"), "did you mean needs"),
        (("shards: 3", "shards: !x 3"), "not a plain value"),
    ],
)
def test_a_bad_table_is_refused(tmp_path, change, part):
    """Every entry is checked before anything runs."""
    path = tmp_path / "stages.yml"
    path.write_text(TABLE.replace(*change, 1))
    with pytest.raises(ListError, match=str(path)) as error:
        read_table(path)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("A10-PyTorch-2", ["A10-PyTorch-2"]),
        (" A10-PyTorch-3 , A10-PyTorch-1 ", ["A10-PyTorch-1", "A10-PyTorch-3"]),
        ("A10-*", ["A10-PyTorch-1", "A10-PyTorch-2", "A10-PyTorch-3"]),
        ("*Post-Merge*", ["A100X-PyTorch-Post-Merge-1"]),
        ("X-[a]-PyTorch-1", ["X-[a]-PyTorch-1"]),
        ("A10-PyTorch-1,A10-PyTorch-1", ["A10-PyTorch-1"]),
    ],
)
def test_stages_are_selected_by_name(table, wanted, names):
    """Comma lists, blanks trimmed; * stands for anything, brackets for themselves; each stage once, in table order."""
    assert [s.name for s in select_by_name(table, wanted)] == names


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ("A10-PyTorh-1", ["'A10-PyTorh-1'", "did you mean A10-PyTorch-1"]),
        ("A10-PyTorch-1,Nope-9,Nada", ["'Nope-9'", "'Nada'", "stages: A10-PyTorch-1"]),
        ("A10-PyTorch-?", ["unknown stage"]),
        ("a10-PyTorch-1", ["did you mean A10-PyTorch-1"]),
        ("", ["names no stage"]),
        (" , ", ["names no stage"]),
    ],
)
def test_unknown_stages_are_errors_with_the_nearest(table, wanted, parts):
    """Every unknown name is reported, with what it may have meant and all there is."""
    with pytest.raises(StageError) as error:
        select_by_name(table, wanted)
    for part in parts:
        assert part in str(error.value)


def test_waivers_have_reasons(tmp_path):
    """One per line, comments and blanks between them; a missing file waives nothing."""
    path = tmp_path / "waives.txt"
    assert read_waivers(path) == ()
    path.write_text('\n# known\na.py::test_b SKIP (https://bugs/1)\nfull:A10/c.py -m "x" SKIP (slow)\n')
    first, second = read_waivers(path)
    assert (first.test.target, first.reason, first.line) == ("a.py::test_b", "https://bugs/1", 3)
    assert (second.test.hardware_prefix, second.test.mark) == ("A10", "x")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a.py\n", "says SKIP"),
        ("a.py SKIP\n", "has a reason"),
        ("a.py SKIP # why\n", "has a reason"),
        ("a.py SKIP (x)\na.py SKIP (y)\n", "also waived in line 1"),
        ("this test is broken somehow\n", "is not a marker"),
        ("full:sm100/a b c d SKIP\n", "is not a marker"),
    ],
)
def test_bad_waivers_are_refused(tmp_path, text, part):
    """No reason, a reason outside the parentheses, a sentence pasted as an entry, the same test twice."""
    path = tmp_path / "waives.txt"
    path.write_text(text)
    with pytest.raises(ListError) as error:
        read_waivers(path)
    assert part in str(error.value)
    assert str(error.value).startswith(f"{path}:")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/bot run --disable-fail-fast", ["--disable-fail-fast"]),
        ('Please test.\n\n/bot run --stage-list "A-1, B-2"\nThanks', ["--stage-list", "A-1, B-2"]),
        ("/bot run", []),
    ],
)
def test_a_comment_gives_the_same_run(text, wanted):
    """The words after /bot run are the runner's own options, wherever the line stands."""
    assert arguments_of_comment(text) == wanted


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("hello", "no /bot line"),
        ("/bot run --stage-list A\n/bot help", "2 /bot lines in one comment"),
        ("/bot", "wants a command"),
        ("/bot rn", "did you mean run?"),
        ('/bot run --stage-list "A', "No closing quotation"),
        ("/botrun x", "did you mean /bot run?"),
        ("/bot skip", "wants --comment and a reason"),
        ("/bot skip --comment ' '", "wants --comment and a reason"),
        ("/bot help now", "takes nothing more"),
        ("/bot kill", "a run ends with Ctrl-C"),
        ("/bot run --stage-lst A", "takes no --stage-lst; did you mean --stage-list"),
        ("/bot run --results /tmp", "takes no --results"),
        ("/bot run --lists=/tmp", "takes no --lists"),
        ("/bot run --store-durations", "takes no --store-durations"),
    ],
)
def test_a_comment_that_is_no_run_is_refused(text, part):
    """Unknown commands and options with the nearest; options that name paths, and those that have nothing to act on."""
    with pytest.raises(StageError) as error:
        arguments_of_comment(text)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/bot skip --comment 'only docs'", ["--skip-test=only docs"]),
        ("/bot reuse-pipeline", ["--reuse-pipeline"]),
        ("/bot help", ["--help"]),
        *(
            (f"/bot run {option}", [option])
            for option in (
                "--reuse-test", "--disable-reuse-test", "--skip-test", "--add-multi-gpu-test", "--only-multi-gpu-test",
                "--disable-multi-gpu-test", "--post-merge", "--detailed-log",
            )
        ),
        ("/bot run --reuse-test 20260101T000000Z-abc", ["--reuse-test", "20260101T000000Z-abc"]),
        ('/bot run --gpu-type "A30, H100_PCIe" --test-backend "pytorch, cpp" --extra-stage "A-1"',
         ["--gpu-type", "A30, H100_PCIe", "--test-backend", "pytorch, cpp", "--extra-stage", "A-1"]),
    ],
)  # fmt: skip
def test_every_command_and_option_of_a_comment_is_the_runners(text, wanted):
    """What it gives is what the command line takes; a comment has one such line."""
    assert arguments_of_comment(text) == wanted
    if wanted != ["--help"]:
        parser().parse_args(wanted)
