"""etcd is brought by the system's package client, once, or its absence is named."""

import os
import stat

import pytest

import fetch_etcd


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A PATH with a package client of our own that notes its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "mkdir", "touch", "chmod"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("META_EXECUTOR_OFFLINE", raising=False)
    unpack = "cd $3; mkdir -p usr/bin; touch usr/bin/etcd; chmod +x usr/bin/etcd"
    program(folder, "dpkg", f"echo dpkg >> {tmp_path}/calls; {unpack}")
    program(folder, "apt-get", f"echo $1 >> {tmp_path}/calls; touch etcd-server_1_x.deb")
    return folder


def calls(tmp_path):
    path = tmp_path / "calls"
    return path.read_text().split() if path.exists() else []


def test_it_is_downloaded_once_and_unpacked(system, tmp_path):
    """No installation: download, unpack; the second time it is there."""
    cache = tmp_path / "cache"
    assert fetch_etcd.bring(cache) == cache / "usr" / "bin" / "etcd"
    assert fetch_etcd.bring(cache) == cache / "usr" / "bin" / "etcd"
    assert calls(tmp_path) == ["download", "dpkg"]
    assert not list(cache.glob("*.deb"))


def test_one_on_the_path_is_taken(system, tmp_path):
    """An installed one wins."""
    program(system, "etcd", "exit 0")
    assert fetch_etcd.bring(tmp_path / "cache") == system / "etcd"
    assert calls(tmp_path) == []


def test_root_refreshes_empty_lists(system, tmp_path, monkeypatch):
    """Only root may; others get the client's own words."""
    fresh = tmp_path / "fresh"
    program(system, "apt-get", "\n".join((
        f"echo $1 >> {tmp_path}/calls",
        f"if test $1 = update; then touch {fresh}; exit 0; fi",
        f"if test ! -e {fresh}; then echo 'Unable to locate package' >&2; exit 100; fi",
        "touch etcd-server_1_x.deb",
    )))  # fmt: skip
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(fetch_etcd.Unavailable, match="Unable to locate"):
        fetch_etcd.bring(tmp_path / "cache")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert fetch_etcd.bring(tmp_path / "cache").exists()
    assert calls(tmp_path) == ["download", "download", "update", "download", "dpkg"]


def test_absence_is_named(system, tmp_path, monkeypatch, capsys):
    """Offline, another system, a package without it: exit 3 and why."""
    monkeypatch.setattr("sys.argv", ["fetch_etcd.py", str(tmp_path / "cache")])
    monkeypatch.setenv("META_EXECUTOR_OFFLINE", "1")
    assert fetch_etcd.main() == 3
    assert "no etcd: META_EXECUTOR_OFFLINE=1 forbids" in capsys.readouterr().out
    monkeypatch.delenv("META_EXECUTOR_OFFLINE")
    program(system, "dpkg", "exit 0")
    assert fetch_etcd.main() == 3
    assert "holds no etcd" in capsys.readouterr().out
    (system / "apt-get").unlink()
    assert fetch_etcd.main() == 3
    assert "apt-get is not here" in capsys.readouterr().out
