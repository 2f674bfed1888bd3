"""Release one package: version, changelog, commit, distributions that are checked against each other, tag.

    nox -s release -- NAME VERSION            # in the checkout; what a run before has done is not done again
    nox -s release -- NAME VERSION --dry-run  # all of it in a copy; shows what would be committed, changes nothing

Nothing is uploaded: ``dist/`` holds what ``twine upload`` takes. Exit 0: released (or could be); 1: why not, in one line.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
_FORM = re.compile(r"[0-9]{1,6}\.[0-9]{1,6}\.[0-9]{1,6}(?:(?:a|b|rc)[0-9]{1,4})?")


class NotReleased(Exception):
    """Why there is no release; the message says what to do."""


class Release:
    """One release in one checkout.

    Args:
        root: The checkout.
        name: The distribution.
        version: As in the tag, without the name.

    Raises:
        NotReleased: There is no such package, or the version is of another form.
    """

    def __init__(self, root: Path, name: str, version: str) -> None:
        self.root, self.name, self.version = root, name, version
        self.folder = root / "packages" / name
        if not (self.folder / "pyproject.toml").is_file():
            raise NotReleased(f"there is no package {name!r}")
        if not _FORM.fullmatch(version):
            raise NotReleased(f"the version has the form 1.2.3 or 1.2.3rc1, got {version!r}")
        self.module = name.replace("-", "_")
        self.about = self.folder / "src" / self.module / "__about__.py"
        self.tag = f"{name}-v{version}"

    def run(self) -> Path:
        """Everything that is not done yet; the folder of the distributions.

        Raises:
            NotReleased: Something is not as it must be. What was done stays and is found by the next run.
        """
        tagged = self._commit_of(self.tag)
        if tagged is None:
            if not self._prepared():
                self._check_before()
                self._prepare()
            commit = self._commit_of("HEAD")
        else:
            print(f"{self.tag} is there already: its distributions are built and checked again", flush=True)
            commit = tagged
        if commit is None:
            raise NotReleased("this checkout has no commit")
        folder = self._distributions(commit)
        if tagged is None:
            self._git("tag", "-a", self.tag, commit, "-m", f"{self.name} {self.version}")
            print(f"tagged {self.tag}", flush=True)
        return folder

    # -- version and changelog --------------------------------------------------------------------------------------

    def _check_before(self) -> None:
        if self._git("status", "--porcelain"):
            raise NotReleased("the working tree is not clean: commit or stash first")
        released = [Version(tag.removeprefix(f"{self.name}-v")) for tag in self._tags()]
        if released and max(released) >= Version(self.version):
            raise NotReleased(f"{self.name} {max(released)} is released already, {self.version} is not newer")
        if not [path for path in (self.folder / "changes").glob("*.md") if path.name != "README.md"]:
            raise NotReleased(f"packages/{self.name}/changes has no fragment: there is nothing to release")

    def _prepared(self) -> bool:
        """The commit of this version is the newest one of this package, and nothing was changed since."""
        log = self._git("log", "-1", "--format=%s", "--", f"packages/{self.name}")
        return log == self._subject() and not self._git("status", "--porcelain")

    def _subject(self) -> str:
        return f"{self.name} {self.version}"

    def _prepare(self) -> None:
        text = self.about.read_text("utf-8")
        changed, count = re.subn(
            r'^__version__ = "[^"\n]*"$', f'__version__ = "{self.version}"', text, flags=re.MULTILINE
        )
        if count != 1:
            raise NotReleased(f'{self.about.relative_to(self.root)} has no line __version__ = "…"')
        try:
            self.about.write_text(changed, "utf-8")
            self._run(
                sys.executable, "-m", "towncrier", "build", "--yes", "--config", str(self.root / "tools" / "towncrier.toml"),
                "--dir", str(self.folder), "--name", self.name, "--version", self.version,
            )  # fmt: skip
            self._git("add", "--all", f"packages/{self.name}")
            self._git("commit", "--signoff", "--quiet", "-m", self._subject())
        except BaseException:
            # A half-made commit would be taken for somebody's work: the tree was clean before.
            self._git("reset", "--quiet", "--hard", "HEAD")
            raise
        print(f"committed {self._subject()}", flush=True)

    # -- distributions ----------------------------------------------------------------------------------------------

    def _distributions(self, commit: str) -> Path:
        """Wheel and sdist of a commit, each checked against the other, into ``dist``."""
        with tempfile.TemporaryDirectory(prefix="release-") as scratch:
            source, built, again = Path(scratch, "source"), Path(scratch, "built"), Path(scratch, "again")
            source.mkdir()
            archive = Path(scratch, "source.tar")
            self._git("archive", "--output", str(archive), commit, f"packages/{self.name}")
            with tarfile.open(archive) as tar:
                tar.extractall(source, filter="data")
            stamp = self._git("show", "--no-patch", "--format=%ct", commit)
            self._build(source / "packages" / self.name, built, stamp)
            (wheel,), (sdist,) = sorted(built.glob("*.whl")), sorted(built.glob("*.tar.gz"))
            with tarfile.open(sdist) as tar:
                tar.extractall(Path(scratch, "unpacked"), filter="data")
            (unpacked,) = Path(scratch, "unpacked").iterdir()
            self._build(unpacked, again, stamp, "-t", "wheel")
            (second,) = again.glob("*.whl")
            self._check(wheel, sdist, unpacked, second)
            self._run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
            target = self.root / "dist"
            target.mkdir(exist_ok=True)
            for path in (wheel, sdist):
                shutil.copyfile(path, target / path.name)
                print(f"dist/{path.name}: checked", flush=True)
        return target

    def _build(self, folder: Path, target: Path, stamp: str, *options: str) -> None:
        self._run(
            sys.executable, "-m", "hatchling", "build", "-d", str(target), *options, cwd=folder, SOURCE_DATE_EPOCH=stamp
        )

    def _check(self, wheel: Path, sdist: Path, unpacked: Path, second: Path) -> None:
        with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(second) as two:
            first = {name: one.read(name) for name in one.namelist()}
            other = {name: two.read(name) for name in two.namelist()}
        # The list of files in a wheel differs because another file does: that one is named.
        for name in sorted(first.keys() | other.keys(), key=lambda name: (name.endswith("/RECORD"), name)):
            if first.get(name) != other.get(name):
                where = "differs in" if name in first and name in other else "is only in one of"
                raise NotReleased(f"{name} {where} the wheels from the checkout and from {sdist.name}")
        metadata = f"{self.module}-{self.version}.dist-info/METADATA"
        for what, text in (
            (wheel.name, first.get(metadata, b"").decode()),
            (sdist.name, (unpacked / "PKG-INFO").read_text("utf-8")),
        ):
            told = Parser().parsestr(text, headersonly=True)["Version"]
            if told != self.version:
                raise NotReleased(f"{what} says version {told}, not {self.version}")
        if f"## {self.version} " not in (unpacked / "CHANGELOG.md").read_text("utf-8"):
            raise NotReleased(f"the changelog in {sdist.name} has no section for {self.version}")

    # -- git --------------------------------------------------------------------------------------------------------

    def _tags(self) -> list[str]:
        found = []
        for tag in self._git("tag", "--list", f"{self.name}-v*").splitlines():
            try:
                Version(tag.removeprefix(f"{self.name}-v"))
            except InvalidVersion:
                continue  # not of a release
            found.append(tag)
        return found

    def _commit_of(self, name: str) -> str | None:
        done = subprocess.run(
            ["git", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"],
            cwd=self.root,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip() or None

    def _git(self, *words: str) -> str:
        return self._run("git", *words)

    def _run(self, *words: str, cwd: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            words, cwd=cwd or self.root, env={**os.environ, **environment}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise NotReleased(
                f"{' '.join(words[:4])} … ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}"
            )
        return done.stdout.strip()


def dry_run(name: str, version: str, root: Path = ROOT) -> None:
    """Release in a copy of what is committed, and show the commit."""
    with tempfile.TemporaryDirectory(prefix="release-") as scratch:
        copy = Path(scratch, "copy")
        subprocess.run(["git", "clone", "--quiet", "--shared", str(root), str(copy)], check=True)
        for setting in ("user.name", "user.email"):
            value = subprocess.run(["git", "config", setting], cwd=root, capture_output=True, text=True).stdout.strip()
            if value:
                subprocess.run(["git", "config", setting, value], cwd=copy, check=True)
        Release(copy, name, version).run()
        words = ("git", "show", "--stat", "--patch", f"{name}-v{version}", "--", f"packages/{name}")
        print(subprocess.run(words, cwd=copy, capture_output=True, text=True, check=True).stdout)
    print("dry run: nothing of this checkout was changed")


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when it is released, or could be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("version", metavar="VERSION")
    parser.add_argument("--dry-run", action="store_true", help="in a copy; shows what would be committed")
    options = parser.parse_args(arguments)
    try:
        if options.dry_run:
            dry_run(options.name, options.version)
        else:
            Release(ROOT, options.name, options.version).run()
    except NotReleased as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
