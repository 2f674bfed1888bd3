"""A short run of ``tools/fuzz.py``, and that it would find something."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[1] / "tools" / "fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("meta_executor_fuzz", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(PATH.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(PATH.parent))
    logging.disable(logging.CRITICAL)
    yield module
    logging.disable(logging.NOTSET)
    del sys.modules[spec.name]


NAMES = ["chat", "completions", "tokenizing", "paths", "instance", "wire_bytes", "key_file", "launcher", "etcd_records",
         "etcd_watch", "gguf", "safetensors", "folder_files", "templates"]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_from_outside_raises_what_is_not_named(fuzz: Any, name: str) -> None:
    """Some inputs are refused, some are not, none is a finding. The same ones each time: new ones are the nightly's."""
    found: list[str] = []
    result = fuzz.fuzz(name, count=60, seed=5, seconds=0.4, say=found.append)
    assert result["findings"] == 0, "\n".join(found)
    assert result["inputs"] > 0


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_a_third_of_the_requests_at_least_are_answered(fuzz: Any, name: str) -> None:
    """What is refused before it is answered says nothing of the answers."""
    result = fuzz.fuzz(name, count=60, seed=5)
    assert result["findings"] == 0
    assert 0 < result["refused"] <= 40


def test_an_answer_that_breaks_off_is_found(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has begun with status 200: its end says that it failed."""
    from meta_executor.front.answers import AnswerText

    def push(self: AnswerText, *_: object) -> str:
        raise KeyError("broken")

    monkeypatch.setattr(AnswerText, "push", push)
    told: list[str] = []
    assert fuzz.fuzz("completions", count=20, seed=5, say=told.append)["findings"] > 0
    assert "internal" in "\n".join(told)


def test_every_target_has_its_short_run(fuzz: Any) -> None:
    """A new one must be named here."""
    assert list(fuzz.TARGETS) == NAMES


def test_what_it_must_find(fuzz: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception, and an input that takes too long; each is named with the seed that replays it."""

    def read(data: bytes) -> None:
        if data[:1] == b"h":
            while True:
                pass
        if data[:1] == b"c":
            raise KeyError(data)
        raise fuzz.Refused

    @contextlib.contextmanager
    def target() -> Iterator[Any]:
        yield [b"crash", b"hang", b"fine"], lambda seeds, draw: draw.choice(seeds), read

    monkeypatch.setitem(fuzz.TARGETS, "broken", target)
    told: list[str] = []
    result = fuzz.fuzz("broken", count=20, limit_s=0.05, say=told.append)
    assert result["findings"] + result["refused"] == 20 and result["refused"] > 0
    text = "\n".join(told)
    assert "KeyError" in text and "Hang" in text and "FINDING: broken --seed " in text
    assert json.dumps(result)


@pytest.mark.parametrize("grows", [False, True])
def test_growth_is_what_inputs_leave_behind(fuzz: Any, monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    """Memory that a target's making or its first input takes is no growth, also of a run that its time cuts short."""
    held_kib = 0

    def read(data: bytes) -> None:
        nonlocal held_kib
        held_kib += 65536 if grows or not held_kib else 0

    @contextlib.contextmanager
    def target() -> Iterator[Any]:
        yield [b""], lambda seeds, draw: b"", read

    monkeypatch.setattr(fuzz, "_peak_kib", lambda: held_kib)
    monkeypatch.setitem(fuzz.TARGETS, "broken", target)
    told: list[str] = []
    result = fuzz.fuzz("broken", count=20, say=told.append)
    assert (result["inputs"], result["rss_growth_mib"]) == (20, 19 * 64 if grows else 0)
    assert result["findings"] == len(told) == grows, "growth beyond its bound is a finding"
