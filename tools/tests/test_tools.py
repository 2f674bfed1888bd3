"""The repository's own tools: what they refuse, and that they cannot be green for nothing."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent
ROOT = TOOLS.parent


def load(name):
    """A tool as a module."""
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run_tests = load("run_tests")
check = load("check_repository")
bench = load("bench")
new_package = load("new_package")


JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="x"/></testcase>
<testcase classname="a" name="broken"><error message="x"/></testcase>
<testcase classname="a" name="absent"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_results_are_counted_from_the_file(tmp_path):
    """Failures and errors count as failed; skips are listed with their reason, never as passed."""
    path = tmp_path / "r.xml"
    path.write_text(JUNIT)
    tally = run_tests.read_junit(path)
    assert (tally.passed, tally.failed, tally.skipped) == (1, 2, 1)
    assert "not covered: a::absent: no GPU" in tally.reasons


@pytest.mark.parametrize("text", [None, "", "<testsuites>"])
def test_a_missing_or_broken_result_file_is_a_failure(tmp_path, text):
    """A run that was cut short is not a run without failures."""
    path = tmp_path / "r.xml"
    if text is not None:
        path.write_text(text)
    assert run_tests.read_junit(path).failed == 1


@pytest.mark.parametrize(
    ("body", "passed", "failed"),
    [
        ("def test_a():\n    pass\n", 1, 0),
        ("def test_a():\n    raise ValueError\n", 0, 1),
        ("", 0, 1),
        ("import nothing_here\n", 0, 1),
    ],
)
def test_a_group_fails_on_a_failure_and_on_nothing(tmp_path, body, passed, failed):
    """One passing test is green; a failing one, an empty file and one that cannot be imported are red."""
    (tmp_path / "test_it.py").write_text(body)
    tally = run_tests.run_group(
        "it", ["-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(tmp_path)], tmp_path / "r.xml"
    )
    assert (tally.passed, tally.failed) == (passed, failed)


def test_a_group_may_be_empty_where_only_some_paths_were_asked_for(tmp_path):
    """Nothing was run and nothing failed: whether anything ran at all is asked of all groups together."""
    (tmp_path / "test_it.py").write_text("")
    arguments = ["-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(tmp_path)]
    tally = run_tests.run_group("it", arguments, tmp_path / "r.xml", may_be_empty=True)
    assert (tally.passed, tally.failed, tally.reasons) == (0, 0, [])


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("packages/adp-router/src/adp_router/_x.py", "import pp_agreement\n", "only meta-executor may import"),
        ("packages/adp-router/src/adp_router/_x.py", "import zmq\n", "outside of its adapter"),
        ("packages/adp-router/src/adp_router/_zmq.py", "import zmq\n", None),
        ("packages/meta-executor/src/meta_executor/front/x.py", "import torch\n", "torch is imported outside"),
        (
            "packages/meta-executor/src/meta_executor/front/x.py",
            "import meta_executor.executor.loop\n",
            "HTTP only",
        ),
        (
            "packages/meta-executor/src/meta_executor/engine/x.py",
            "from meta_executor.executor import loop\n",
            "stands above",
        ),
        ("packages/meta-executor/src/meta_executor/executor/x.py", "from meta_executor.engine import base\n", None),
    ],
)
def test_layering(tmp_path, monkeypatch, name, text, complaint):
    """Siblings, adapters and rooms are kept apart."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    problems = list(check.check_layering([write(tmp_path, name, text)]))
    assert bool(problems) == (complaint is not None), problems
    if complaint:
        assert complaint in problems[0]
        assert problems[0].startswith(f"{name}:1:")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import httpx\nhttpx.get('http://x')\n", ["httpx.get"]),
        ("import httpx as h\nh.AsyncClient(trust_env=True)\n", ["httpx.AsyncClient"]),
        ("from httpx import post as send\nsend('http://x')\n", ["httpx.post"]),
        ("import httpx\nhttpx.Client(trust_env=False).get('/')\nhttpx.Limits()\n", []),
    ],
)
def test_every_client_refuses_proxies_of_the_environment(tmp_path, monkeypatch, text, said):
    """Whatever name httpx goes by; ``trust_env`` must be the literal False."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(text)
    problems = list(check.check_environment_proxies([path]))
    assert [problem.split(" ")[1] for problem in problems] == said


@pytest.mark.parametrize(
    ("name", "text", "check_name"),
    [
        ("a.py", "x = 1 \n", "check_whitespace"),
        ("a.py", "x = 1", "check_whitespace"),
        ("a.yml", "a: 1\na: 2\n", "check_yaml"),
        ("a.yml", "a: [\n", "check_yaml"),
        ("packages/p/src/p/a.py", "t = torch.empty(3, pin_memory=True)\n", "check_pinned_memory"),
        ("NOTES.md", "to be mended\n", "check_top_level"),
    ],
)
def test_each_rule_finds_its_breach(tmp_path, monkeypatch, name, text, check_name):
    """Whitespace, YAML with a key twice, pinned memory outside of its module, what lies where it does not belong."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert list(getattr(check, check_name)([write(tmp_path, name, text)]))


def test_a_figure_without_a_key_is_refused():
    """Every figure says what it is compared with and whether the goal was met."""
    good = '{"name":"a","value":1,"unit":"s","baseline":2,"ratio":0.5,"goal":"x","met":true}'
    assert bench.figures_of(f"table\n{good}\n")[0]["ratio"] == 0.5
    with pytest.raises(ValueError, match="met"):
        bench.figures_of('{"name":"a","value":1,"unit":"s","baseline":2,"ratio":0.5,"goal":"x"}')


@pytest.mark.parametrize("name", ["Bad", "a b", "-x", "x-", "adp-router"])
def test_a_new_package_needs_a_free_distribution_name(name):
    """A name that is none, or is taken, is refused before a file is written."""
    with pytest.raises(ValueError, match=r"want lower-case|exists"):
        new_package.make(name, "S", ROOT / "packages", ROOT / "LICENSE")


def test_a_new_package_passes_as_it_is(tmp_path):
    """Formatted, typed, tested: without an edit."""
    for checker in ("ruff", "mypy"):
        pytest.importorskip(checker, reason=f"NO COVERAGE: {checker} is not installed")
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)  # its ruff settings are found from the folder upwards
    folder = new_package.make("fresh-idea", "Something new", tmp_path, ROOT / "LICENSE")
    for arguments in (
        ["-m", "ruff", "check", str(folder)],
        ["-m", "mypy", "--strict", str(folder / "src")],
        ["-m", "pytest", "-q", "-c", "/dev/null", "--import-mode=importlib", str(folder / "tests")],
    ):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True,
            env={"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(p.read_text() for p in folder.rglob("*") if p.suffix in (".py", ".md", ".toml"))
    assert not {"MODULE", "NAME", "SUMMARY"} & set(text.split())


@pytest.mark.parametrize(
    "secret",
    [
        "-----BEGIN RSA PRIVATE " + "KEY-----",
        "AKIA" + "A1B2" * 4,
        "ghp_" + "a1B2" * 9,
        "github_pat_" + "a1B2c" * 10,
        "glpat-" + "a1B2c" * 4,
        "hf_" + "a" * 34,
        "pypi-AgE" + "a1B2c" * 10,
        "sk-proj-" + "a1B2c" * 8,
        "sk-" + "a1B2c" * 8,
        "xoxb-" + "1234-" * 4,
        "AIza" + "a1B2c" * 7,
        "postgres://admin:correct" + "horse@db",
    ],
)
def test_a_secret_is_found_and_not_shown(tmp_path, monkeypatch, secret):
    """Every form, in any kind of file; what has no such form is let pass."""
    monkeypatch.setattr(check, "ROOT", tmp_path)
    bad, good = tmp_path / "bad.bin", tmp_path / "good.md"
    bad.write_bytes(b"\xff\x00\nx = '" + secret.encode() + b"'\n")
    good.write_text("sk-x, http://user@host:1, key: AKIA, http://[::1]:8000, alice-key-0123456789abcdef\n")
    (problem,) = check.check_secrets([bad, good])
    assert problem.startswith("bad.bin:2: this looks like ")
    assert secret not in problem
