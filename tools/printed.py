"""Every command of every README, run as it is printed, as somebody with a fresh clone and an empty environment would.

    python tools/printed.py                 # all that no other test and no other part of the night runs
    python tools/printed.py --list          # each command, and who runs it
    python tools/printed.py --only pip      # only commands that contain this (repeatable)
    python tools/printed.py --all-figures   # every benchmark, not only that of the day

The tree, with what is not committed yet, is cloned into a temporary folder. There each README's installations run in their
order in a virtual environment of their own (with ``constraints.txt``, or torch would be a build of gigabytes), and after them
its programs; sessions run with the clone's own ``.venv``. Benchmarks take long and go by turns: one each day. Needs the package
index. Exit 0: all of them ended as they should; 1: the named ones did not.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lifeline import Tethered

ROOT = Path(__file__).resolve().parent.parent
READMES = (ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md")))
BLOCK = re.compile(r"^```(?:sh|bash|shell)\n(?P<lines>.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("pip", "nox", "python", "python3", "meta-executor", "mpiexec", "openssl", "curl", "hatch", "apt-get")
SPAN = re.compile(r"(?<!`)`(?P<command>(?:\.venv/bin/)?(?:" + "|".join(PROGRAMS) + r")[ \n][^`]+)`(?!`)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^```python(?: mpi(?P<ranks>\d*))?\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
#: What is tried, command by command, in integration/tests/test_commands.py.
TRIED_BY_TESTS = ("meta-executor", "curl", "openssl", "mpiexec")
#: Printed because it fails: its siblings are not published.
FAILS = "pip install ./packages/meta-executor"
#: Sessions that something else runs: the part of the night, or the file that has the command.
RUN_ELSEWHERE = {"mutants": "planted faults", "tests": ".ci/run"}
#: Seconds that one command may take.
LIMIT_S = 900


@dataclass(frozen=True)
class Printed:
    """A command and where it stands."""

    document: Path
    command: str

    @property
    def words(self) -> list[str]:
        """As a shell would take it."""
        return shlex.split(self.command, comments=True)

    @property
    def program(self) -> str:
        """Its program's name."""
        return self.words[0].rpartition("/")[2]

    @property
    def session(self) -> str | None:
        """The nox session that it runs, the first of several."""
        if self.program != "nox" and not any(word.endswith("bootstrap.py") for word in self.words):
            return None
        places = [place for place, word in enumerate(self.words) if word in ("-s", "-e", "-rs")]
        return self.words[places[0] + 1] if places else None

    @property
    def is_figure(self) -> bool:
        """Whether it is a benchmark."""
        return self.session == "bench" or any("/benchmarks/" in word for word in self.words)

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {self.command}"


def printed_in(documents: Iterable[Path]) -> list[Printed]:
    """All commands, each once for each document: lines of blocks of shell, and spans of code that begin with a program."""
    found: dict[Printed, None] = {}
    for document in documents:
        text = document.read_text("utf-8")
        for block in BLOCK.finditer(text):
            for line in block["lines"].splitlines():
                if shlex.split(line, comments=True):
                    found[Printed(document, line.strip())] = None
        for span in SPAN.finditer(_CODE.sub("", text)):
            found[Printed(document, " ".join(span["command"].split()))] = None
    return list(found)


def run_by(one: Printed) -> str:
    """Who runs a command of a README: ``here``, or what else."""
    if one.program in TRIED_BY_TESTS:
        return "integration/tests/test_commands.py"
    if one.session in RUN_ELSEWHERE:
        return RUN_ELSEWHERE[one.session]
    scripts = [word for word in one.words if word.startswith("tools/") and word != "tools/bootstrap.py"]
    if scripts and one.document.parent != ROOT:
        return f"{one.document.parent.name}/{Path(scripts[0]).stem}"  # a part of the night
    return "here"


def of_the_day(commands: list[Printed], day: datetime.date) -> list[Printed]:
    """Everything but benchmarks, and of those the one whose turn it is."""
    figures = sorted({one.command for one in commands if one.is_figure})
    turn = figures[day.toordinal() % len(figures)] if figures else ""
    chosen = [one for one in commands if not one.is_figure]
    return chosen + [one for one in commands if one.command == turn][:1]


# -- running -----------------------------------------------------------------------------------------------------------


@contextmanager
def fresh_clone() -> Iterator[Path]:
    """The tree as it is here, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    try:
        clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        names = ""
        for listing in ("diff --name-only --no-renames -z HEAD", "ls-files --others --exclude-standard -z"):
            names += subprocess.check_output(["git", *listing.split()], cwd=ROOT, text=True)
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (clone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, clone / name)
            else:
                (clone / name).unlink(missing_ok=True)
        yield clone
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Reader:
    """Somebody in the clone, who runs commands and notes how they ended."""

    def __init__(self, clone: Path, limit_s: float = LIMIT_S) -> None:
        self._clone = clone
        self._limit_s = limit_s
        self.failed: list[str] = []
        self.passed = 0

    def run(self, command: str, bins: list[Path], cwd: Path | None = None, *, fails: bool = False) -> bool:
        """Run one in bash; whether it ended as it should."""
        environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
        environment |= {
            "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"]]),
            "PIP_CONSTRAINT": str(self._clone / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "META_EXECUTOR_BASE_PYTHON": os.environ.get("META_EXECUTOR_BASE_PYTHON", sys.executable),
        }
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told:
            tethered = Tethered(
                ["bash", "-c", command], cwd=cwd or self._clone, env=environment, stdin=subprocess.DEVNULL, stdout=told,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                code = tethered.process.wait(self._limit_s)
                good, how = (code == 0) is not fails, f"exit {code}"
            except subprocess.TimeoutExpired:
                good, how = False, f"not ended after {self._limit_s:.0f} s"
            finally:
                tethered.cut()
                tethered.process.wait()
            print(
                f"{'as it should' if good else 'FAILED'}: {how}, {time.monotonic() - began_s:.0f} s: {command}",
                flush=True,
            )
            if good:
                self.passed += 1
            else:
                told.seek(0)
                print(told.read()[-4000:], flush=True)
                self.failed.append(command)
        return good

    def install(self, document: Path, commands: list[Printed]) -> None:
        """A README's installations in an empty environment, then what it has to run."""
        text = document.read_text("utf-8")
        with tempfile.TemporaryDirectory(prefix="mx") as scratch:
            subprocess.run([sys.executable, "-m", "venv", f"{scratch}/env"], check=True)
            bins = [Path(scratch, "env", "bin")]
            for one in sorted(commands, key=lambda one: one.command != FAILS):
                if "--find-links dist" in one.command:
                    builder = self._clone / ".venv" / "bin" / "python"
                    tool = shlex.quote(str(builder if builder.exists() else sys.executable))
                    self.run(f"{tool} tools/build_distributions.py --no-install", [])
                self.run(one.command, bins, fails=one.command == FAILS)
            if not any("--no-deps" in one.command for one in commands):
                self.run("pip check", bins)
            if document.parent == ROOT:
                return
            for example in _EXAMPLE.finditer(text):
                if example["ranks"] is None:
                    Path(scratch, "example.py").write_text(example["code"])
                    self.run("python -W error example.py", bins, Path(scratch))
                    break


def run_all(commands: list[Printed]) -> int:
    """Run them in a clone; 0 if each ended as it should."""
    if not commands:
        return 1
    with fresh_clone() as clone:
        reader = Reader(clone)
        nox = clone / ".cache" / "nox-env" / "bin"
        others = [one for one in commands if one.program != "pip"]
        own = Path(sys.executable).parent
        if any(one.program in ("nox", "python") for one in others):
            # Whoever has `nox` has it from here; `.venv` is what its first session makes.
            reader.run("python3 tools/bootstrap.py -l", [own])
        done: set[str] = set()
        for one in others:
            if one.command not in done:
                done.add(one.command)
                bins = {"nox": nox, "python3": own}.get(one.program, clone / ".venv" / "bin")
                reader.run(one.command, [bins])
        for document in dict.fromkeys(one.document for one in commands if one.program == "pip"):
            reader.install(document, [one for one in commands if one.program == "pip" and one.document == document])
    for command in reader.failed:
        print(f"FAILED: {command}")
    print(f"{reader.passed} passed, {len(reader.failed)} failed")
    return 1 if reader.failed else 0


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="each command, and who runs it")
    parser.add_argument("--only", action="append", default=[], help="only commands that contain this (repeatable)")
    parser.add_argument("--all-figures", action="store_true", help="every benchmark, not only the day's")
    parser.add_argument("--day", type=datetime.date.fromisoformat, default=datetime.date.today(), help="as on that day")
    options = parser.parse_args(arguments)
    found = [one for one in printed_in(READMES) if not options.only or any(text in str(one) for text in options.only)]
    if options.list:
        print("\n".join(f"{run_by(one):36} {one}" for one in found))
        return 0
    here = [one for one in found if run_by(one) == "here"]
    if not here:
        parser.error("no such command is run here")
    return run_all(here if options.all_figures else of_the_day(here, options.day))


if __name__ == "__main__":
    sys.exit(main())
