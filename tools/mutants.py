"""Plant each known fault in a copy of a package and see one of the package's own checks fail for it.

    nox -s mutants -- pp-agreement                     # every fault of one package; of several; of all without a name
    nox -s mutants -- pp-agreement --only withdraw     # faults whose name contains this
    nox -s mutants -- pp-agreement --list              # what there is
    nox -s mutants -- pp-agreement --show --only X     # what is planted, as a difference of the normalised source
    nox -s mutants -- --seconds 900 --shuffle monday   # as many as that allows, in an order that the word draws
    nox -s mutants -- --check                          # plant everything, run nothing (lint does this)

A package declares its faults in ``packages/NAME/faults.txt``, one line each:

    check machine: pytest tests/test_machine.py        a command; exit 1 means that it noticed
    check worlds: python tools/explore.py "2 ranks"    "pytest" and "python" are this interpreter's; run in the package

    [machine worlds]                                   for what follows: the checks, tried in this order
    [machine] needs cryptography                       likewise; where this module is not, these checks say nothing
    release without the last lease | _release | round_.acks == self.all_mask => True
    a failed send is forgotten     | _send    | self._failed(...) => !drop
    table READY_TRANSITIONS                            every row removed, every row retargeted
    table RULES default Rule.FAULT                     rows with what a missing row means anyway are only retargeted
    harmless READY_TRANSITIONS: _S.A _I.B removed: REASON      a generated fault that changes nothing that matters

The second column is the name of the function, class or module where the fault is (as much of it as is unique), the third
what is looked for and what it becomes, by syntax: see ``planting.py`` for patterns and operators. `` && `` joins two changes
into one fault. The name of a generated fault is shown by ``--list``.

A fault counts as killed by the first check that exits 1, dies of a signal, or takes ten times as long as without a fault. A
fault that cannot be planted, or a check that does not run (any other exit code), is an error and never a kill. The package
without a fault has to pass all the checks first. NO COVERAGE: what would notice the fault needs a module that is not installed
here. Exit 0: every fault that was tried was killed, and one was; 1: a survivor or an error; 2: the declarations cannot be read;
3: no survivor and no error, but faults without coverage. What time did not allow is counted and said.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import functools
import importlib.util
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from planting import Edit, PlantingError, Sources, check, plant, plant_row, rows_of

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist")
#: A check with a fault may take this many times what it takes without, and at least so long (seconds).
SLOWER_MAX, LIMIT_MIN_S, BASELINE_LIMIT_S = 10, 60.0, 600.0
#: Verdict on a fault that nothing could notice here.
UNCOVERED = "NO COVERAGE"


class DeclarationError(ValueError):
    """A line of a faults.txt cannot be read."""


@dataclass(frozen=True)
class Fault:
    """One fault: the checks that are tried, how to plant it (the new text by module), and modules that the checks need."""

    name: str
    checks: tuple[str, ...]
    plant: Callable[[], dict[str, str]]
    needs: tuple[str, ...] = ()

    @property
    def lacks(self) -> str:
        """The modules that it needs and that are not installed here, in words."""
        return ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)


@dataclass
class Declared:
    """What a package declares."""

    package: str
    source: Path
    sources: Sources
    checks: dict[str, list[str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def path_of(self, module: str, source: Path) -> Path:
        """The file of a module under a source folder."""
        return source / self.source.name / Path(*module.split(".")).with_suffix(".py")


def read(folder: Path) -> Declared:
    """Read a package's faults.txt and plant every fault in memory; what cannot be planted is in ``errors``.

    Raises:
        DeclarationError: A line cannot be read; named by file and line.
    """
    file = folder / "faults.txt"
    [source] = [p for p in (folder / "src").iterdir() if (p / "__init__.py").exists()]
    paths = sorted(source.rglob("*.py"))
    texts = {".".join(p.relative_to(source).with_suffix("").parts): p.read_text("utf-8") for p in paths}
    declared = Declared(folder.name, source, Sources(texts))
    chosen: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    harmless: dict[str, str] = {}
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        text = line.strip()
        try:
            if not text or text.startswith("#"):
                continue
            elif text.startswith("check "):
                name, _, command = text.removeprefix("check ").partition(": ")
                declared.checks[name] = _command(command)
            elif text.startswith("["):
                chosen, needs = _section(text)
                if not chosen or set(chosen) - set(declared.checks):
                    raise DeclarationError(f"{text} names a check that is not declared above")
            elif text.startswith("harmless "):
                name, _, reason = text.removeprefix("harmless ").rpartition(": ")
                harmless[name] = reason
            elif not chosen:
                raise DeclarationError("a fault stands before the first [checks]")
            elif text.startswith("table "):
                place, _, default = text.removeprefix("table ").partition(" default ")
                for row in rows_of(declared.sources, place, default):
                    planted = functools.partial(plant_row, declared.sources, place, row)
                    declared.faults.append(Fault(f"{place}: {row}", chosen, planted, needs))
            else:
                name, edits = _edits(text)
                check(declared.sources, edits)
                planted = functools.partial(plant, declared.sources, edits)
                declared.faults.append(Fault(name, chosen, planted, needs))
        except PlantingError as error:
            declared.errors.append(f"{file.relative_to(folder.parent)}:{number}: {error}")
        except DeclarationError as error:
            raise DeclarationError(f"{file.relative_to(folder.parent)}:{number}: {error}") from None
    names = [fault.name for fault in declared.faults]
    declared.errors += [f"{folder.name}: two faults are called {n!r}" for n in sorted(set(names)) if names.count(n) > 1]
    declared.errors += [f"{folder.name}: no generated fault is called {n!r}" for n in harmless if n not in names]
    declared.faults = [fault for fault in declared.faults if fault.name not in harmless]
    return declared


def _command(text: str) -> list[str]:
    words = shlex.split(text)
    if not words or words[0] not in ("pytest", "python"):
        raise DeclarationError(f"{text!r} does not begin with pytest or python")
    return [sys.executable, *(PYTEST if words[0] == "pytest" else ()), *words[1:]]


def _section(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The checks of ``[CHECK ...]`` or ``[CHECK ...] needs MODULE ...``, and the modules."""
    names, bracket, rest = text[1:].partition("]")
    word, *modules = rest.split() or [""]
    if not bracket or word not in ("", "needs") or bool(word) != bool(modules):
        raise DeclarationError("want: [CHECK ...], or [CHECK ...] needs MODULE ...")
    if not all(module.isidentifier() for module in modules):
        raise DeclarationError(f"needs the names of whole modules, got {' '.join(modules)}")
    return tuple(names.split()), tuple(modules)


def _edits(text: str) -> tuple[str, tuple[Edit, ...]]:
    name, bar, rest = text.partition(" | ")
    edits = []
    for change in rest.split(" && "):
        place, bar, what = change.partition(" | ")
        pattern, arrow, replacement = what.partition(" => ")
        if not bar or not arrow:
            raise DeclarationError("want: NAME | PLACE | PATTERN => REPLACEMENT")
        edits.append(Edit(place.strip(), pattern.strip(), replacement.strip()))
    return name.strip(), tuple(edits)


# -- running ------------------------------------------------------------------------------------------------------------

_RUNNING: set[subprocess.Popen[str]] = set()


def _run(command: list[str], declared: Declared, copy: Path, limit_s: float) -> tuple[int | None, str]:
    """Exit code (None: stopped at the limit) and output of one check over a copy of the sources."""
    environment = {
        **os.environ,
        # First the copy; what was there before stays, it may name where libraries are.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(copy), str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        command, cwd=declared.source.parents[1], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    _RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        _stop(process)
        _RUNNING.discard(process)
        if process.stdout is not None:
            process.stdout.close()


def _stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _killer(name: str, code: int | None, output: str) -> str:
    if code is None:
        return f"{name}: it does not end"
    if code < 0:
        return f"{name}: died of signal {-code}"
    lines = [line for line in output.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    return (
        f"{name}: {failed[0].split(' - ')[0].rpartition('::')[2] if failed else lines[-1][:90] if lines else 'exit 1'}"
    )


@dataclass(frozen=True)
class Baseline:
    """How a check went without a fault: how long it may take with one, and its tests here (None: not counted)."""

    limit_s: float
    passed: int | None = None
    skipped: int = 0


def _tests(output: str) -> tuple[int | None, int]:
    """Tests that passed and that were skipped, by pytest's last line; (None, 0) where that is none."""
    last = (output.strip().splitlines() or [""])[-1]
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|xfailed|deselected)", last)}
    return (found.get("passed", 0), found.get("skipped", 0)) if found else (None, 0)


def judge(fault: Fault, declared: Declared, base: Path, baselines: dict[str, Baseline]) -> tuple[str, str]:
    """("killed", by what), ("SURVIVED", what was skipped), (UNCOVERED, what is missing) or ("ERROR", why)."""
    if fault.lacks:
        return UNCOVERED, f"needs {fault.lacks}, which is not installed here"
    checks = [name for name in fault.checks if baselines[name].passed != 0]
    if not checks:
        return UNCOVERED, f"every test of {' and of '.join(fault.checks)} is skipped here"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "s"
        shutil.copytree(base, copy)
        try:
            texts = fault.plant()
        except PlantingError as error:
            return "ERROR", str(error)
        for module, text in texts.items():
            path = declared.path_of(module, copy)
            path.write_text(text, "utf-8")
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()
        for name in checks:
            code, output = _run(declared.checks[name], declared, copy, baselines[name].limit_s)
            if code == 1 or code is None or code < 0:
                return "killed", _killer(name, code, output)
            if code != 0:
                lines = output.strip().splitlines() or [""]
                return "ERROR", f"{name} did not run (exit {code}): {lines[-1][:200]}"
    skipped = [f"{baselines[name].skipped} of {name}" for name in fault.checks if baselines[name].skipped]
    return "SURVIVED", f"tests skipped here: {', '.join(skipped)}" if skipped else ""


def _since(began_s: float) -> str:
    return f"{time.monotonic() - began_s:.0f} s"


def run_package(declared: Declared, chosen: list[Fault], jobs: int, until_s: float = math.inf) -> Counter[str]:
    """Print a line per fault; how many there are by verdict.

    Args:
        until_s: No fault is begun later than this (s, of ``time.monotonic``).
    """
    began_s = time.monotonic()
    used = list(dict.fromkeys(name for fault in chosen if not fault.lacks for name in fault.checks))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        base = Path(folder) / "s"
        shutil.copytree(declared.source.parent, base, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(base, quiet=2)
        code, output = _run(
            [sys.executable, "-c", f"import {declared.source.name} as p; print(p.__file__)"], declared, base, 60.0
        )
        if code != 0 or not output.strip().startswith(str(base)):
            print(f"ERROR {declared.package}: its copy is not what is imported: {output.strip()[-200:]}")
            return Counter(ERROR=len(chosen))

        def unplanted(name: str) -> tuple[str, int | None, str, float]:
            start_s = time.monotonic()
            code, output = _run(declared.checks[name], declared, base, BASELINE_LIMIT_S)
            return name, code, output, time.monotonic() - start_s

        try:
            baselines = {}
            for name, code, output, took_s in pool.map(unplanted, used):
                tests = _tests(output) if PYTEST[1] in declared.checks[name] else (None, 0)
                baselines[name] = Baseline(max(LIMIT_MIN_S, SLOWER_MAX * took_s), *tests)
                if code != 0:
                    print(
                        f"ERROR {declared.package}: check {name} fails without a fault (exit {code})\n{output[-2000:]}"
                    )
                    return Counter(ERROR=len(chosen))
            print(
                f"{declared.package}: {len(used)} checks pass without a fault, {time.monotonic() - began_s:.0f} s",
                flush=True,
            )

            def judged(fault: Fault) -> tuple[str, str] | None:
                return judge(fault, declared, base, baselines) if time.monotonic() < until_s else None

            verdicts: Counter[str] = Counter()
            for fault, known in zip(chosen, pool.map(judged, chosen), strict=True):
                if known is not None:
                    word, by = known
                    verdicts[word] += 1
                    print(f"{word:8} {fault.name}{': ' if by else ''}{by}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):
                _stop(process)
            raise
    print(f"{declared.package}: {verdicts['killed']} of {verdicts.total()} faults killed, {_since(began_s)}")
    if verdicts[UNCOVERED]:
        print(f"{declared.package}: {verdicts[UNCOVERED]} faults without coverage here")
    if left := len(chosen) - verdicts.total():
        print(f"{declared.package}: {left} of {len(chosen)} faults were not tried: the time was over")
    return verdicts


def show(fault: Fault, declared: Declared) -> None:
    """Print what a fault changes."""
    print(f"# {fault.name}")
    for module, text in fault.plant().items():
        before = ast.unparse(declared.sources.trees[module])
        print("\n".join(difflib.unified_diff(before.splitlines(), text.splitlines(), module, "planted", "", "", 2, "")))


def main(arguments: list[str] | None = None) -> int:
    """See the module's text for what the exit codes mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="packages, or folders of packages; all that declare faults without")
    parser.add_argument("--only", action="append", default=[], help="only faults whose name contains this (repeatable)")
    parser.add_argument("--list", action="store_true", help="the names, without running anything")
    parser.add_argument("--show", action="store_true", help="what is planted, without running anything")
    parser.add_argument(
        "--check", action="store_true", help="see that everything can be planted, without running anything"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="faults at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no fault after so long (s)")
    parser.add_argument("--shuffle", metavar="WORD", help="try them in an order that this word draws")
    options = parser.parse_args(arguments)
    until_s = time.monotonic() + options.seconds
    names = options.packages or sorted(p.parent.name for p in (ROOT / "packages").glob("*/faults.txt"))
    verdicts: Counter[str] = Counter()
    bad = count = 0
    for name in names:
        folder = Path(name).resolve() if os.sep in name else ROOT / "packages" / name
        if not (folder / "faults.txt").is_file():
            parser.error(f"{name} declares no faults: there is no {folder.name}/faults.txt")
        try:
            declared = read(folder)
        except DeclarationError as error:
            parser.error(str(error))
        for error in declared.errors:
            print(f"ERROR {error}")
        chosen = [f for f in declared.faults if not options.only or any(text in f.name for text in options.only)]
        if options.shuffle is not None:
            random.Random(options.shuffle).shuffle(chosen)
        bad, count = bad + len(declared.errors), count + len(chosen)
        if options.check:
            print(f"{declared.package}: {len(chosen)} faults can be planted")
        elif options.list:
            print("\n".join(f"{fault.name}  [{' '.join(fault.checks)}]" for fault in chosen))
        elif options.show:
            for fault in chosen:
                show(fault, declared)
        elif chosen:
            verdicts += run_package(declared, chosen, options.jobs, until_s)
    if not count and not bad:
        parser.error("no fault has such a name")
    if options.check or options.list or options.show:
        return 1 if bad else 0
    bad += verdicts["SURVIVED"] + verdicts["ERROR"]
    if not verdicts and not bad:
        print("ERROR no fault was tried: the time was over before the first")
        return 1
    return 1 if bad else 3 if verdicts[UNCOVERED] else 0


if __name__ == "__main__":
    sys.exit(main())
