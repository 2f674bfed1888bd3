"""Which service ``explain`` and ``top`` ask when nobody names one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from meta_executor.cli import main
from meta_executor.supervise import find_run


def start(folder: Path, pid: int, url: str | None) -> Path:
    """What a front leaves to be found: a process with its run folder, and there its address once it answers."""
    run = folder / f"run-{pid}"
    run.mkdir()
    if url is not None:
        (run / find_run.FRONT_URL).write_text(url)
    process = folder / "proc" / str(pid)
    process.mkdir(parents=True)
    words = ["python", "-m", "meta_executor.front", "--run-dir", str(run)]
    (process / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    return run


def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What ``top --once`` says where nothing answers."""
    monkeypatch.setattr(sys, "argv", ["meta-executor", "top", "--once", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (1, 2)
    return capsys.readouterr().err


def test_the_one_front_of_this_user_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None: the usual port here; one: that one; several: they are named and none is asked; a name goes before all of it."""
    proc = tmp_path / "proc"
    (proc / "17").mkdir(parents=True)  # a process that has left
    found = find_run.fronts
    monkeypatch.setattr(find_run, "fronts", lambda **_: found(proc=proc))
    monkeypatch.delenv("META_EXECUTOR_URL", raising=False)
    assert "http://127.0.0.1:8000" in asked(monkeypatch, capsys)
    start(tmp_path, 20, None)  # not ready yet
    one = start(tmp_path, 21, "http://127.0.0.1:1")
    assert found(proc=proc) == {"http://127.0.0.1:1": one}
    assert find_run.run_folder_of("http://localhost:1/", proc=proc) == one
    assert "http://127.0.0.1:8000" not in (said := asked(monkeypatch, capsys)) and "run.json" in said
    start(tmp_path, 22, "http://127.0.0.1:2")
    said = asked(monkeypatch, capsys)
    assert "--url: 2 fronts" in said and "http://127.0.0.1:1, http://127.0.0.1:2" in said
    assert "http://127.0.0.1:9" in asked(monkeypatch, capsys, "--url", "http://127.0.0.1:9")
    monkeypatch.setenv("META_EXECUTOR_URL", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in asked(monkeypatch, capsys)
