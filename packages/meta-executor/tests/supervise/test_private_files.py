"""Run folders, copies and their removal beside a neighbour that plants links, folders and modes."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from meta_executor.config import ConfigError, service_config
from meta_executor.private_files import (
    NotPrivateError,
    copy_files,
    open_folder,
    open_own_file,
    open_own_folder,
    write_file,
)
from meta_executor.supervise import rundir
from meta_executor.supervise.launch import Launcher
from meta_executor.supervise.rundir import RunDirectory, default_base, remove_stale_runs


@pytest.fixture
def tmp_path():
    """A short folder: socket paths have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def another_user(monkeypatch):
    """Call it, and whatever is on the disk belongs to somebody else than this process."""
    real = os.getuid()
    return lambda: monkeypatch.setattr(os, "getuid", lambda: real + 1)


def dead_run(base, name="dead"):
    """What a killed launcher leaves."""
    run = RunDirectory.create(base, name)
    os.close(run._lock_descriptor)
    return run.path


def treasure(folder):
    """A folder that looks like a dead run, somewhere else, which must live."""
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(0o600)
    (folder / "precious").write_text("data")
    return folder


# -- removal ----------------------------------------------------------------------------------------------------------


def test_a_planted_link_removes_nothing(tmp_path):
    """A link named like a run, a lock that is a link, links inside a dead run: only the run's own entries go."""
    elsewhere = treasure(tmp_path / "elsewhere")
    base = tmp_path / "base"
    dead = dead_run(base)
    (dead / "tmp" / "link").symlink_to(elsewhere)
    (dead / "ipc" / "file").symlink_to(elsewhere / "precious")
    (base / "run-link").symlink_to(elsewhere)
    with_link = base / "run-lock"
    with_link.mkdir(mode=0o700)
    (with_link / "lock").symlink_to(elsewhere / "lock")
    assert remove_stale_runs(base) == (dead,)
    assert (elsewhere / "precious").read_text() == "data"
    assert {path.name for path in base.iterdir()} == {"run-link", "run-lock"}


@pytest.mark.parametrize("use", [remove_stale_runs, lambda base: RunDirectory.create(base, "x")])
@pytest.mark.parametrize("what", ["link", "group", "world", "foreign"])
def test_a_base_that_others_control_is_refused(tmp_path, another_user, use, what):
    """Nothing in it is removed, nothing is made in it, and the error says why."""
    base = tmp_path / "base"
    dead = dead_run(base)
    words = {"link": "symbolic link", "group": "0770", "world": "0777", "foreign": "another user"}[what]
    if what == "link":
        base = tmp_path / "link"
        base.symlink_to(dead.parent)
    elif what == "foreign":
        another_user()
    else:
        base.chmod(int(words, 8))
    with pytest.raises(ConfigError, match=words) as failure:
        use(base)
    assert failure.value.field == "run_dir"
    assert list(dead.parent.iterdir()) == [dead]


def test_a_sticky_base_is_good(tmp_path):
    """Others may add entries there, not rename or remove ours."""
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(0o1777)
    dead = dead_run(base)
    assert remove_stale_runs(base) == (dead,)


@pytest.mark.parametrize("spoil", ["mode", "lock mode", "lock pipe", "foreign"])
def test_a_run_folder_that_is_not_ours_stays(tmp_path, monkeypatch, another_user, spoil):
    """One that others may enter, whose lock others may write, whose lock is a pipe, or that has another owner."""
    base = tmp_path / "base"
    dead = dead_run(base)
    if spoil == "mode":
        dead.chmod(0o755)
    elif spoil == "lock mode":
        (dead / "lock").chmod(0o666)
    elif spoil == "lock pipe":
        (dead / "lock").unlink()
        os.mkfifo(dead / "lock", 0o600)
    else:
        held = open_own_folder(base)
        monkeypatch.setattr(rundir, "_open_base", lambda *_, **__: held)
        another_user()
    assert remove_stale_runs(base) == ()
    assert (dead / "key").is_file()


def test_the_runtime_folder_is_used_where_it_is_the_users(tmp_path, monkeypatch):
    """A folder of the user's with mode 0700; not a link, not an open one, not a relative or too long path."""
    fallback = Path(tempfile.gettempdir(), f"meta-executor-{os.getuid()}")
    good = tmp_path / "runtime"
    good.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(good))
    assert default_base() == good / "meta-executor"
    (tmp_path / "link").symlink_to(good)
    (tmp_path / ("l" * 80)).mkdir(mode=0o700)
    for bad in (tmp_path / "link", tmp_path / "absent", tmp_path / ("l" * 80), Path("relative"), Path()):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(bad))
        assert default_base() == fallback
    good.chmod(0o750)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(good))
    assert default_base() == fallback


# -- copies -----------------------------------------------------------------------------------------------------------


def copied(source, target):
    descriptor = open_folder(target, create=True)
    try:
        copy_files(source, descriptor)
    finally:
        os.close(descriptor)


def test_copies_follow_no_link_and_are_private(tmp_path):
    """A link in the target is replaced, one in the source is left out, an old file is overwritten; 0700 and 0600."""
    source, target, victim = tmp_path / "source", tmp_path / "a" / "target", tmp_path / "victim"
    victim.write_text("mine")
    copied_names = {"ctx-0.log": "first", "gen-0.log": "second"}
    source.mkdir()
    copied(source, target)
    for name, text in copied_names.items():
        (source / name).write_text(text)
        (source / name).chmod(0o644)
    (source / "link").symlink_to(victim)
    (source / "folder").mkdir()
    (target / "ctx-0.log").symlink_to(victim)
    (target / "gen-0.log").write_text("of an earlier run, and longer")
    copied(source, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == copied_names
    assert victim.read_text() == "mine"
    assert {stat.S_IMODE(path.lstat().st_mode) for path in target.iterdir()} == {0o600}
    assert stat.S_IMODE(target.stat().st_mode) == 0o700


def test_a_copy_that_fails_leaves_no_part(tmp_path, monkeypatch):
    """A full disk in the middle: the older file stays as it was, and no part lies beside it."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "a").write_text("new")
    (target / "a").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        copied(source, target)
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [("a", "old")]


def test_a_link_is_replaced_by_what_is_written(tmp_path):
    """``write_file`` keeps what a planted link leads to."""
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run.json").symlink_to(tmp_path / "victim")
    write_file(tmp_path / "run.json", b"{}")
    assert (tmp_path / "victim").read_text() == "mine"
    assert (tmp_path / "run.json").read_bytes() == b"{}"
    assert stat.S_IMODE((tmp_path / "run.json").lstat().st_mode) == 0o600


@pytest.mark.parametrize("field", ["evidence_dir", "log_dir"])
@pytest.mark.parametrize("what", ["link", "file"])
def test_a_folder_for_copies_that_cannot_be_used_is_said_before_the_start(tmp_path, field, what):
    """Nothing is started for a run whose files could not be kept."""
    target = tmp_path / "kept"
    if what == "link":
        target.symlink_to(tmp_path)
    else:
        target.touch()
    service = service_config({field: str(target), "run_dir": str(tmp_path / "r")})
    with pytest.raises(ConfigError) as failure, Launcher(service, say=print).started():
        pass
    assert failure.value.field == field
    assert not (tmp_path / "r").exists()


# -- what others wrote ------------------------------------------------------------------------------------------------


def test_files_of_others_are_refused(tmp_path, another_user):
    """Links, pipes, modes and owners, each named."""
    path = tmp_path / "file"
    path.touch(0o600)
    os.close(open_own_file(path))
    path.chmod(0o620)
    with pytest.raises(NotPrivateError, match="0620"):
        open_own_file(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        open_own_file(tmp_path / "link")
    with pytest.raises(NotPrivateError, match="plain file"):
        open_own_file(tmp_path)
    path.chmod(0o600)
    another_user()
    with pytest.raises(NotPrivateError, match="another user"):
        open_own_file(path)
