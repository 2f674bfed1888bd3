"""meta-executor with the oldest and with the newest siblings that its metadata allow: the tests of their seams in both.

    nox -s siblings             # exit 0: both passed
    nox -s siblings -- --list   # which versions these are

The newest are those of the checkout. The oldest are built from the packages' release tags; where the oldest version that is
allowed has no tag it is the checkout's own if the versions are equal, and otherwise NO COVERAGE by name (exit 3).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
COMPOSER = "meta-executor"
#: What looks at the siblings through meta-executor: its rank without a world, its door, its discovery.
SEAMS = (
    "packages/meta-executor/tests/executor",
    "packages/meta-executor/tests/api",
    "packages/meta-executor/tests/front/test_discovery.py",
)


@dataclass(frozen=True)
class Sibling:
    """A package that meta-executor asks for.

    Attributes:
        name: The distribution.
        wanted: What the metadata ask for.
        here: The checkout's version.
        tags: Version of each release → its tag.
    """

    name: str
    wanted: Requirement
    here: Version
    tags: dict[Version, str]

    @property
    def oldest(self) -> tuple[Version, str | None] | None:
        """The oldest version that is allowed and its tag, None for the checkout's own; None: there is none to be had."""
        floor = min(
            (Version(part.version) for part in self.wanted.specifier if part.operator in (">=", "==", "~=")),
            default=None,
        )
        allowed = sorted(version for version in self.tags if self.wanted.specifier.contains(version, prereleases=True))
        if allowed:
            return allowed[0], self.tags[allowed[0]]
        return (self.here, None) if floor in (None, self.here) else None


def siblings(root: Path = ROOT) -> list[Sibling]:
    """All of them, by name."""
    project = tomllib.loads((root / "packages" / COMPOSER / "pyproject.toml").read_text("utf-8"))["project"]
    tags = subprocess.run(["git", "tag"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    found = []
    for text in project["dependencies"]:
        wanted = Requirement(text)
        folder = root / "packages" / wanted.name
        if not folder.is_dir():
            continue
        about = (folder / "src" / wanted.name.replace("-", "_") / "__about__.py").read_text("utf-8")
        here = re.search(r'^__version__ = "([^"]+)"', about, re.MULTILINE)
        if here is None:
            raise SystemExit(f"{wanted.name} has no version")
        released = {
            Version(tag.removeprefix(f"{wanted.name}-v")): tag
            for tag in tags
            if re.fullmatch(rf"{re.escape(wanted.name)}-v[0-9][0-9a-z.]*", tag)
        }
        found.append(Sibling(wanted.name, wanted, Version(here[1]), released))
    return sorted(found, key=lambda sibling: sibling.name)


def install(tag: str | None, name: str, target: Path) -> None:
    """One package without its dependencies: of a tag, or of the checkout."""
    with tempfile.TemporaryDirectory(prefix="sibling-") as scratch:
        folder = ROOT / "packages" / name
        if tag is not None:
            archive = Path(scratch, "source.tar")
            subprocess.run(["git", "archive", "--output", str(archive), tag, f"packages/{name}"], cwd=ROOT, check=True)
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            folder = Path(scratch, "packages", name)
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", scratch], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        (wheel,) = Path(scratch).glob("*.whl")
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
        subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)


def try_with(chosen: dict[str, str | None]) -> int:
    """The seams' tests with these (name → tag; None: the checkout's), installed as wheels before everything else."""
    with tempfile.TemporaryDirectory(prefix="siblings-") as scratch:
        for name, tag in chosen.items():
            install(tag, name, Path(scratch))
        path = os.pathsep.join([scratch, str(ROOT / "packages" / COMPOSER / "src")])
        modules = [name.replace("-", "_") for name in chosen]
        probe = f"import {', '.join(modules)}\nfor one in ({', '.join(modules)}): print(one.__file__)"
        environment = {**os.environ, "PYTHONPATH": path}
        where = subprocess.run(
            [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True
        )
        if not all(line.startswith(scratch) for line in where.stdout.splitlines()):
            raise SystemExit(f"the siblings that were installed are not the ones that are imported: {where.stdout}")
        program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m",
                   "not slow and not gpu and not mpi and not service and not etcd", *SEAMS]  # fmt: skip
        return subprocess.run(program, cwd=ROOT, env=environment).returncode


def main() -> int:
    """Exit 0 when both passed, 3 when an oldest version is not to be had, 1 when tests failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say the versions and leave")
    options = parser.parse_args()
    found = siblings()
    oldest = {sibling.name: sibling.oldest for sibling in found}
    for sibling in found:
        old = oldest[sibling.name]
        told = "NO COVERAGE: no such release" if old is None else f"{old[0]}" + ("" if old[1] else " (this checkout)")
        print(f"{sibling.wanted}: oldest {told}, newest {sibling.here} (this checkout)", flush=True)
    if options.list:
        return 0
    newest: dict[str, str | None] = {sibling.name: None for sibling in found}
    failed = try_with(newest) != 0
    known = {name: old[1] for name, old in oldest.items() if old is not None}
    if len(known) == len(found):
        if known != newest:
            failed = try_with(known) != 0 or failed
        else:
            print("the oldest are the newest: nothing was released yet", flush=True)
    if failed:
        return 1
    return 0 if len(known) == len(found) else 3


if __name__ == "__main__":
    sys.exit(main())
