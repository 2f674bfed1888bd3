"""Every command of every README and guide runs as it is printed, or is known to the tool that it names.

A command is a line of a block of shell, or a span of code that begins with a program. What only stands for something (CONFIG,
DIR, PORT, ``…``) is filled in; an environment variable makes installations dry runs. By night ``tools/printed.py`` runs
those of the READMEs that are only looked at here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from meta_executor.mpi_launcher import find_launcher
from printed import PROGRAMS, Printed, printed_in

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PACKAGES = sorted(p.parent.name for p in (ROOT / "packages").glob("*/pyproject.toml"))
#: Commands that are wrong, which its own test tries; and what the code prints of itself.
_TRIED_ELSEWHERE = {
    ROOT / "packages" / "meta-executor" / "docs" / "mistakes.md",
    *(ROOT / "docs" / "reference").glob("*.md"),
}
DOCUMENTS = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(path for name in PACKAGES for path in (ROOT / "packages" / name).glob("README.md")),
        *(path for name in PACKAGES for path in (ROOT / "packages" / name / "docs").rglob("*.md")),
    }
    - _TRIED_ELSEWHERE
)
ALL = printed_in(DOCUMENTS)


def those(*programs: str) -> list[Printed]:
    """Of these programs."""
    return [one for one in ALL if one.program in programs]


def environment(**more: str) -> dict[str, str]:
    """With this environment's programs in front."""
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


def ran(
    words: list[str], cwd: Path, timeout_s: float = 120, codes: tuple[int, ...] = (0,), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run to its end with one of these exit codes."""
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode in codes, f"{words}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def test_every_command_is_of_a_kind_that_is_tried_here() -> None:
    """A document that names another program fails until somebody tries it."""
    tried = {*PROGRAMS, "bootstrap.py"}
    unknown = [str(one) for one in ALL if one.program not in tried]
    assert len(ALL) > 30 and not unknown, unknown
    assert {one.document.name for one in ALL} >= {"README.md", "CONTRIBUTING.md", "stages.md"}
    assert not those("apt-get", "hatch") or all(
        one.document.name in ("CONTRIBUTING.md", "stages.md") for one in those("apt-get", "hatch")
    )


# -- what only has to be known -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    """The names of nox's sessions."""
    told = ran([sys.executable, "-m", "nox", "--list"], ROOT, NO_COLOR="1").stdout
    return {line.split()[1] for line in told.splitlines() if line.startswith(("* ", "- "))}


def named_sessions(words: list[str]) -> list[str]:
    """Behind ``-s`` or ``-e``."""
    begin = next((place for place, word in enumerate(words) if word in ("-s", "-e", "-rs")), None)
    if begin is None:
        return []
    names = []
    for word in words[begin + 1 :]:
        if word.startswith("-"):
            break
        names.append(word)
    return names


@pytest.mark.parametrize("one", [*those("nox"), *[p for p in those("python3") if "bootstrap.py" in p.command]], ids=str)
def test_every_session_that_is_named_is_there(one: Printed, sessions: set[str]) -> None:
    """And the package behind it, where it wants one."""
    names = named_sessions(one.words)
    for name in names:
        pattern = re.escape(name).replace("NAME", "[a-z-]+").replace("N", "[0-9]+")
        assert any(re.fullmatch(pattern, full) for full in sessions), name
    if "-l" in one.words:
        return
    assert names, one.command
    behind = one.words[one.words.index("--") + 1 :] if "--" in one.words else []
    if behind and names[0] in ("bench", "fuzz", "mutants", "simulate", "explore"):
        assert behind[0] in (*PACKAGES, "NAME"), behind


TOOLS = [p for p in those("python", "python3") if any(word.endswith(".py") and "/" in word for word in p.words)]


@pytest.mark.parametrize("one", [p for p in TOOLS if "bootstrap.py" not in p.command], ids=str)
def test_every_tool_that_is_named_knows_its_options(one: Printed) -> None:
    """It is there, from the document's package or the root, and its help has each option."""
    words = one.words
    script = next(word for word in words if word.endswith(".py"))
    package = one.document.parents[1] if one.document.parent.name == "docs" else one.document.parent
    folder = next((base for base in (package, ROOT) if (base / script).is_file()), None)
    assert folder is not None, f"{script} is neither in {package} nor at the root"
    options = [word.split("=")[0] for word in words[words.index(script) + 1 :] if word.startswith("--")]
    told = ran([sys.executable, script, "--help"], folder).stdout
    assert all(option in told for option in options), (options, told)


# -- installations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", those("pip"), ids=str)
def test_every_installation_resolves(one: Printed, tmp_path: Path) -> None:
    """As printed, from a checkout, as a dry run without the index: what is named builds, or is there already."""
    words = one.words
    if words[:2] == ["pip", "install"] and words[2:] == ["./packages/meta-executor"]:
        # Printed because it fails: its siblings are not published.
        told = ran(words, ROOT, codes=(1,), PIP_NO_INDEX="1", PIP_DRY_RUN="1", PIP_IGNORE_INSTALLED="1",
                   PIP_NO_BUILD_ISOLATION="0").stderr  # fmt: skip
        assert "No matching distribution found" in told
        return
    ran(["bash", "-c", one.command], ROOT, 300, PIP_NO_INDEX="1", PIP_DRY_RUN="1", PIP_NO_DEPS="1",
        PIP_NO_BUILD_ISOLATION="0", PIP_DISABLE_PIP_VERSION_CHECK="1")  # fmt: skip


# -- ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.service
@pytest.mark.parametrize("one", those("mpiexec"), ids=str)
def test_every_mpiexec_runs_the_program_beside_it(one: Printed, tmp_path: Path) -> None:
    """``example.py`` is the document's program for ranks."""
    ranks = int(one.words[one.words.index("-n") + 1])
    blocks = re.finditer(
        r"^```python mpi(?P<ranks>\d*)\n(?P<code>.*?)^```", one.document.read_text("utf-8"), re.M | re.S
    )
    (code,) = [block["code"] for block in blocks if int(block["ranks"] or 2) == ranks]
    (tmp_path / "example.py").write_text(code)
    launcher = find_launcher()
    if launcher.command(1, ["x"])[0].rpartition("/")[2] not in ("mpiexec", "mpiexec.hydra", "mpirun"):
        pytest.skip("no mpiexec here")
    ran(["bash", "-c", one.command], tmp_path)


# -- the service --------------------------------------------------------------------------------------------------------


class Running:
    """A command that goes on until Ctrl-C."""

    def __init__(self, words: list[str], cwd: Path, **more: str) -> None:
        self._words = words
        self.process = subprocess.Popen(
            words, cwd=cwd, env=environment(**more), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        self.said: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """What it says, up to a line of this form."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"{self._words} ended\n" + "".join(self.said))

    def end(self) -> None:
        """Ctrl-C; it leaves with 0."""
        self.process.send_signal(signal.SIGINT)
        _, rest = self.process.communicate(timeout=90)
        assert self.process.returncode == 0, f"{self._words}\n" + "".join(self.said) + rest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: socket paths have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="mx"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def running() -> Iterator[list[Running]]:
    """What a failed test leaves is killed."""
    made: list[Running] = []
    yield made
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def service_commands() -> dict[str, list[Printed]]:
    """The service's own program, by its command."""
    found: dict[str, list[Printed]] = {}
    for one in those("meta-executor"):
        found.setdefault(one.words[1], []).append(one)
    return found


def started() -> list[Printed]:
    """Each ``up`` that starts something."""
    return [one for one in service_commands()["up"] if len(one.words) > 2 and "--print-launch" not in one.words]


def base_of(one: Printed) -> Path:
    """Where its configuration is found from: the document's folder, or the root of a checkout."""
    (config,) = [word for word in one.words[2:] if word.endswith(".yaml")]
    return next(folder for folder in (one.document.parent, ROOT) if (folder / config).is_file())


def filled(one: Printed, **values: str) -> list[str]:
    """Its words; what stands for something replaced; the environment's programs wherever they are."""
    words = [values.get(word, word) for word in one.words]
    return [str(BIN / words[0].rpartition("/")[2]), *words[1:]]


def test_every_command_of_the_service_is_tried() -> None:
    """In one of the tests below."""
    told = {"up", "serve", "front", "generate", "explain", "top", "evidence", "bench", "ab"}
    assert set(service_commands()) == told


@pytest.mark.parametrize("one", [p for p in service_commands()["up"] if "--print-launch" in p.words], ids=str)
def test_the_lines_that_start_each_part_are_printed(one: Printed, tmp_path: Path) -> None:
    """For each launcher and part; nothing is started."""
    config = tmp_path / "two-hosts.yaml"
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    settings = {
        "key_file": str(key),
        "discovery": {"store": "http://10.77.0.1:2379"},
        "context_servers": {"hostname": "10.77.0.1"},
    }
    config.write_text(yaml.safe_dump(settings))
    told = ran(filled(one, **{"CONFIG": str(config), "two-hosts.yaml": str(config)}), tmp_path).stdout
    assert all(word in told for word in ("mpiexec", "mpirun", "srun", "serve context", "serve generation", "front")), (
        told
    )


def answered(question: Printed, url: str) -> None:
    """As printed, with the port that was said."""
    told = ran(["bash", "-c", question.command.replace("PORT", url.rpartition(":")[2])], ROOT).stdout
    assert json.loads(told)["choices"][0]["message"]["content"], told


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(240)
@pytest.mark.parametrize("one", started(), ids=str)
def test_the_service_starts_and_answers_the_printed_question(
    one: Printed, folder: Path, running: list[Running]
) -> None:
    """``up`` with the example, then each ``curl`` with the port that was said, then Ctrl-C."""
    up = Running(filled(one), base_of(one), TMPDIR=str(folder), XDG_RUNTIME_DIR="")
    running.append(up)
    url = up.until(r"serving (\S+)/v1")[1]
    for question in those("curl"):
        answered(question, url)
    up.end()


@pytest.mark.service
@pytest.mark.timeout(240)
def test_parts_that_are_started_apart_are_looked_at(folder: Path, running: list[Running]) -> None:
    """``serve``, ``front``, each ``curl``, ``explain``, ``top`` and, when all have left, ``evidence verify``, with one CONFIG.

    The questions are the example's, whose model they name; by night its own service is asked them.
    """
    commands = service_commands()
    key = next(one for one in those("openssl"))
    (folder / "key").write_text(ran(key.words, folder).stdout)
    (folder / "key").chmod(0o600)
    config = folder / "config.yaml"
    evidence = folder / "evidence"
    config.write_text(
        yaml.safe_dump(
            {
                "port": 0,
                "key_file": str(folder / "key"),
                "run_dir": str(folder / "r"),
                "evidence_dir": str(evidence),
                "engine": {"kind": "synthetic"},
                "served_model_name": "smollm2",
                "discovery": {"store": str(folder / "store")},
                "context_servers": {"pipeline_parallel_size": 1},
                "generation_servers": {"tensor_parallel_size": 1},
            }
        )
    )
    for one in {tuple(filled(one, CONFIG=str(config))): None for one in commands["serve"]}:
        running.append(Running(list(one), ROOT))
        running[-1].until(r"ready at http")
    (front,) = {tuple(filled(one, CONFIG=str(config))) for one in commands["front"] if "CONFIG" in one.words}
    running.append(Running(list(front), ROOT))
    url = running[-1].until(r"serving (\S+)/v1")[1]
    questions = those("curl")
    for one in questions:
        answered(one, url)
    for one in commands["explain"]:
        assert "ctx-0" in ran(filled(one), ROOT, META_EXECUTOR_URL=url).stdout
    for one in commands["top"]:
        told = live(filled(one), url)
        assert "ctx-0" in told and "gen-0" in told, told
    for one in reversed(running):
        one.end()
    for one in commands["evidence"]:
        told = ran(filled(one, DIR=str(evidence)), ROOT).stdout
        assert f"gen-0: {len(questions)} request" in told, told


def live(words: list[str], url: str) -> str:
    """A command on a terminal until it has drawn something, then Ctrl-C, which it takes for its end."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(META_EXECUTOR_URL=url, COLUMNS="160", LINES="50"),
    )
    os.close(theirs)
    told = b""
    interrupted = False
    try:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:
                break
            if not data:
                break
            told += data
            if not interrupted and b"gen-0" in told:
                interrupted = True
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0, told
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)
    return told.decode("utf-8", "replace")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("one", [p for p in service_commands()["generate"] if len(p.words) > 2], ids=str)
def test_one_prompt_in_this_process(one: Printed) -> None:
    """It answers."""
    assert "Paris" in ran(filled(one), ROOT, 200).stdout


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.timeout(240)
def test_a_trial_and_a_comparison_end_with_their_figures(folder: Path) -> None:
    """As printed; of the comparison one round, which concludes nothing and says so."""
    commands = service_commands()
    for one in commands["bench"]:
        assert json.loads(ran(filled(one), folder).stdout)["result"] == "PASS"
    for one in commands["ab"]:
        told = ran([*filled(one), "--rounds", "1", "--requests", "64"], folder).stdout
        assert "| tokens per second (1/s) |" in told and "no conclusion: " in told
