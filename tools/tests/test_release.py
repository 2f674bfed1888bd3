"""A release in a small repository: once, again, broken off, refused; and which siblings are the oldest."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import release
import siblings
from release import NotReleased, Release, Version
from siblings import Requirement

#: What makes changelogs and distributions: of the shared environment, not of every machine that runs the tests.
MISSING = [name for name in ("towncrier", "hatchling", "twine") if importlib.util.find_spec(name) is None]
needs_tools = pytest.mark.skipif(bool(MISSING), reason=f"NO COVERAGE: {', '.join(MISSING)} not installed")

ROOT = Path(__file__).resolve().parents[2]
NAME = "small-thing"


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One package with one fragment, committed."""
    root = tmp_path / "checkout"
    folder = root / "packages" / NAME
    (folder / "src" / "small_thing").mkdir(parents=True)
    (folder / "changes").mkdir()
    (root / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "towncrier.toml", root / "tools")
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copy(ROOT / "tools" / "template" / "CHANGELOG.md", folder)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{NAME}"\ndescription = "Small"\nreadme = "README.md"\nlicense = "Apache-2.0"\n'
        'license-files = ["LICENSE"]\nrequires-python = ">=3.11"\ndynamic = ["version"]\n'
        '[tool.hatch.version]\npath = "src/small_thing/__about__.py"\n'
        '[tool.hatch.build.targets.sdist]\ninclude = ["/src", "/README.md", "/CHANGELOG.md", "/LICENSE"]\n'
    )
    (folder / "README.md").write_text("# small-thing\n\nIt is small.\n")
    (folder / "src" / "small_thing" / "__init__.py").write_text('"""Small."""\n')
    (folder / "src" / "small_thing" / "__about__.py").write_text('__version__ = "0.1.0"\n')
    (folder / "changes" / "README.md").write_text("Fragments.\n")
    (folder / "changes" / "+first.added.md").write_text("It is there.\n")
    (root / ".gitignore").write_text("/dist/\n")
    git(tmp_path, "init", "--quiet", "-b", "main", str(root))
    git(root, "config", "user.name", "A Person")
    git(root, "config", "user.email", "person@example.org")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "-m", "First")
    return root


@needs_tools
def test_a_release_is_whole_and_a_second_run_changes_nothing(checkout: Path) -> None:
    """Version, changelog, sign-off, tag and distributions; again: the same commit, tag and bytes."""
    dist = Release(checkout, NAME, "0.2.0").run()
    commit = git(checkout, "rev-parse", f"{NAME}-v0.2.0^{{commit}}")
    assert commit == git(checkout, "rev-parse", "HEAD")
    assert "Signed-off-by: A Person" in git(checkout, "log", "-1", "--format=%B")
    assert "## 0.2.0 - " in (checkout / "packages" / NAME / "CHANGELOG.md").read_text()
    assert [path.name for path in (checkout / "packages" / NAME / "changes").iterdir()] == ["README.md"]
    bytes_of = {path.name: path.read_bytes() for path in dist.iterdir()}
    assert set(bytes_of) == {"small_thing-0.2.0-py3-none-any.whl", "small_thing-0.2.0.tar.gz"}
    Release(checkout, NAME, "0.2.0").run()
    assert git(checkout, "rev-parse", "HEAD") == commit and not git(checkout, "status", "--porcelain")
    assert {path.name: path.read_bytes() for path in dist.iterdir()} == bytes_of


@needs_tools
def test_a_release_that_was_broken_off_goes_on(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the commit and before the tag: the commit is not made again."""
    with monkeypatch.context() as broken:
        broken.setattr(Release, "_distributions", lambda self, commit: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Release(checkout, NAME, "0.2.0").run()
    commit = git(checkout, "rev-parse", "HEAD")
    assert not git(checkout, "tag")
    Release(checkout, NAME, "0.2.0").run()
    assert git(checkout, "rev-parse", "HEAD", f"{NAME}-v0.2.0^{{commit}}").split() == [commit, commit]


@needs_tools
def test_what_breaks_before_the_commit_leaves_the_tree_as_it_was(checkout: Path) -> None:
    (checkout / "tools" / "towncrier.toml").write_text("[tool.towncrier\n")
    git(checkout, "commit", "--quiet", "--all", "-m", "Broken")
    with pytest.raises(NotReleased, match="towncrier"):
        Release(checkout, NAME, "0.2.0").run()
    assert (
        not git(checkout, "status", "--porcelain") and '"0.1.0"' in Release(checkout, NAME, "0.2.0").about.read_text()
    )


@needs_tools
def test_a_dry_run_changes_nothing(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And shows the changelog's new section."""
    before = git(checkout, "for-each-ref")
    release.dry_run(NAME, "0.2.0", checkout)
    assert git(checkout, "for-each-ref") == before and not git(checkout, "status", "--porcelain")
    assert not (checkout / "dist").exists()
    assert "+## 0.2.0 - " in capsys.readouterr().out


def test_what_is_not_released(checkout: Path) -> None:
    """Another form, no such package, a dirty tree, no newer version, nothing to say."""
    for name, version, words in (("other", "0.2.0", "no package"), (NAME, "2", "form"), (NAME, "v0.2.0", "form")):
        with pytest.raises(NotReleased, match=words):
            Release(checkout, name, version)
    (checkout / "note").write_text("")
    with pytest.raises(NotReleased, match="not clean"):
        Release(checkout, NAME, "0.2.0").run()
    (checkout / "note").unlink()
    git(checkout, "tag", f"{NAME}-v0.3.0")
    with pytest.raises(NotReleased, match=r"0\.2\.0 is not newer"):
        Release(checkout, NAME, "0.2.0").run()
    git(checkout, "rm", "--quiet", f"packages/{NAME}/changes/+first.added.md")
    git(checkout, "commit", "--quiet", "-m", "No fragment")
    with pytest.raises(NotReleased, match="no fragment"):
        Release(checkout, NAME, "0.4.0").run()


@needs_tools
def test_wheels_that_differ_are_refused(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sdist lacks, the wheel that is built from it lacks."""
    project = checkout / "packages" / NAME / "pyproject.toml"
    (checkout / "packages" / NAME / "src" / "small_thing" / "more.py").write_text("")
    only = '["/src/small_thing/__init__.py", "/src/small_thing/__about__.py"'
    project.write_text(project.read_text().replace('["/src"', only))
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "-m", "An sdist that lacks a file")
    with pytest.raises(NotReleased, match=r"small_thing/more\.py is only in one of the wheels"):
        Release(checkout, NAME, "0.2.0").run()
    assert not git(checkout, "tag")


@needs_tools
def test_the_wheel_says_the_version(checkout: Path) -> None:
    wheel = Release(checkout, NAME, "0.2.0rc1").run() / "small_thing-0.2.0rc1-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert "Version: 0.2.0rc1\n" in archive.read("small_thing-0.2.0rc1.dist-info/METADATA").decode()


@pytest.mark.parametrize(
    ("wanted", "here", "released", "oldest"),
    [
        ("x>=0.1", "0.1.0", [], "0.1.0"),
        ("x>=0.1", "0.2.0", [], None),
        ("x>=0.1", "0.3.0", ["0.1.0", "0.2.0"], "0.1.0"),
        ("x>=0.2", "0.3.0", ["0.1.0", "0.2.0", "0.2.1"], "0.2.0"),
        ("x>=0.2,<0.4", "0.3.0", ["0.1.0", "0.2.1"], "0.2.1"),
        ("x", "0.3.0", [], "0.3.0"),
    ],
)
def test_the_oldest_sibling_that_is_allowed(wanted: str, here: str, released: list[str], oldest: str | None) -> None:
    """The oldest release that the metadata allow; without releases the checkout's own, if that is the oldest allowed."""
    tags = {Version(version): f"x-v{version}" for version in released}
    found = siblings.Sibling("x", Requirement(wanted), Version(here), tags).oldest
    assert (None if found is None else str(found[0])) == oldest
    assert found is None or found[1] == tags.get(found[0])


def test_every_sibling_is_one_of_the_checkout() -> None:
    """All seven, with versions that meta-executor's metadata allow."""
    found = siblings.siblings()
    assert len(found) == 7
    assert all(sibling.wanted.specifier.contains(sibling.here) for sibling in found)


@pytest.mark.parametrize("missing", [None, "adp_router", "rpc_local_registry"])
def test_a_sibling_that_is_imported_from_elsewhere_is_found(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them: its tests would be those of the checkout's own."""
    chosen: dict[str, str | None] = {sibling.name: None for sibling in siblings.siblings()}
    run = subprocess.run

    def installed(tag: str | None, name: str, target: Path) -> None:
        if (module := name.replace("-", "_")) != missing:
            (target / module).mkdir()
            (target / module / "__init__.py").write_text("")

    def without_tests(command: list[str], **options: object) -> object:
        return subprocess.CompletedProcess(command, 0) if "pytest" in command else run(command, **options)

    monkeypatch.setattr(siblings, "install", installed)
    monkeypatch.setattr(subprocess, "run", without_tests)
    if missing is None:
        assert siblings.try_with(chosen) == 0
    else:
        with pytest.raises((SystemExit, subprocess.CalledProcessError)) as left:
            siblings.try_with(chosen)
        assert missing in str(left.value) or "not the ones that are imported" in str(left.value)
