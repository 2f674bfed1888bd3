"""The fuzzer itself: it runs, it reports what it ran, and it finds a planted fault."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load_fuzz() -> ModuleType:
    name = "kv_bounce_planner_tools_fuzz"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[1] / "tools" / "fuzz.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def test_a_short_run_of_every_kind_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """300 of each."""
    assert load_fuzz().main(["--count", "300", "--seed", "77"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["pairs", "slices", "doubts", "bytes", "reports"]
    assert all("300 from seed 77" in line for line in lines)


FAULTS = {
    "pairs": ("kv_bounce_planner.planning.plan", "_join_pairs", lambda s, t, n: (s, t, n - (n > 1))),
    "slices": ("kv_bounce_planner.planning.slices", "overlaps", lambda a, n: len(a) > 1),
    "doubts": (
        "kv_bounce_planner.planning.plan",
        "overlaps",
        lambda a, n: (_ for _ in ()).throw(IndexError("planted")),
    ),
    "bytes": ("kv_bounce_planner.planning.codec._Reader", "finish", lambda self: None),
    "reports": ("kv_bounce_planner.planning.report", "join_ranges", lambda a, n: (a, n)),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_planted_fault_is_found(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fuzzer that cannot fail proves nothing: one fault per kind, found within 2,000 tries, with the seed named."""
    where, name, fault = FAULTS[kind]
    module = where.removesuffix("._Reader")
    owner = sys.modules[module]
    if where.endswith("_Reader"):
        owner = owner._Reader
    monkeypatch.setattr(owner, name, fault)
    assert load_fuzz().main(["--count", "2000", "--kind", kind]) == 1
    assert f"FOUND {kind} --seed " in capsys.readouterr().out
