"""A small repository with stages of its own, for tests of the runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.execution import Runner, StageResult
from stages.hardware import Hardware
from stages.plan import Options, RunPlan, make_plan

TABLE = """version: 0.0.1
hardware: {cpu: {}, a10: {gpu: '\\bA10\\b'}}
families:
  - {name: CPU-Generic, hardware: cpu, list: l0_cpu.yml, shards: 2}
  - {name: A10-PyTorch, hardware: a10, list: l0_a10.yml}
"""
CPU_LIST = """version: 0.0.1
l0_cpu:
- condition: {terms: {stage: pre_merge}}
  tests:
  - t/test_good.py
  - t/test_other.py
"""
A10_LIST = """version: 0.0.1
l0_a10:
- condition: {wildcards: {gpu: [a10]}}
  tests: [t/test_gpu.py -m gpu]
"""
GPU_TEST = "import pytest\n\n\n@pytest.mark.gpu\ndef test_g():\n    pass\n"
CONFIG = """[tool.pytest.ini_options]
markers = ['mpi', 'service', 'slow', 'gpu', 'gpus']
addopts = '-p timeout'
filterwarnings = ['error']
"""


def make_project(folder: Path) -> Path:
    """Table, two lists, two passing test files, committed."""
    files = {
        "pyproject.toml": CONFIG, "lists/stages.yml": TABLE, "lists/l0_cpu.yml": CPU_LIST, "lists/l0_a10.yml": A10_LIST,
        "t/test_good.py": "def test_a():\n    pass\n", "t/test_other.py": "def test_b():\n    pass\n",
        "t/test_gpu.py": GPU_TEST, "bin/nvidia-smi": "#!/bin/sh\nexit 9\n",
        ".gitignore": "results\n__pycache__\n.pytest_cache\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    (folder / "results").mkdir()
    git(folder, "init", "-q")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> str:
    """Run git there, as somebody."""
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path) -> str:
    """Commit everything; the new commit's id."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")
    return git(folder, "rev-parse", "HEAD")


def run(project: Path, *arguments: str) -> tuple[int, str, Any]:
    """The command in a process of its own, which sees no GPU: exit code, output, the newest bundle."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "STAGE_"))}
    environment["PATH"] = f"{project / 'bin'}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("stages")), "--root", str(project), "--lists", str(project / "lists"),
         "--results", str(project / "results"), "--workers", "1", *arguments],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    bundles = sorted((project / "results").glob("*/results.json"), key=lambda p: p.stat().st_mtime_ns)
    return done.returncode, done.stdout + done.stderr, json.loads(bundles[-1].read_text()) if bundles else None


def run_here(
    project: Path, options: Options | None = None, *, workers: int = 1, hardware: Hardware | None = None
) -> tuple[RunPlan, dict[str, StageResult]]:
    """Plan and run in this process, without a bundle: the plan, and each stage's result."""
    plan = make_plan(project / "lists", options or Options(kind="cpu", fail_fast=False), hardware or Hardware())
    detailed = plan.options.detailed_log
    runner = Runner(project, say=lambda _line: None, workers=workers, detailed_log=detailed)
    return plan, {result.name: result for result in runner.run(plan, project / "results" / "here")}


def table_of(*families: str) -> str:
    """A stage table of such entries, with the kinds that the tests use."""
    kinds = {
        "cpu": "",
        "mpi": "",
        "a10": r"\bA10\b",
        "a100x": r"\bA100X?\b",
        "h100": r"\bH100\b",
        "gb200": r"\bGB200\b",
    }
    hardware = ", ".join(
        f"{kind}: {{gpu: '{pattern}'}}" if pattern else f"{kind}: {{}}" for kind, pattern in kinds.items()
    )
    return f"version: 0.0.1\nhardware: {{{hardware}}}\nfamilies:\n" + "".join(f"  - {{{f}}}\n" for f in families)


def verdicts(data: Any) -> dict[str, str]:
    """A bundle's verdicts by stage."""
    return {stage["name"]: stage["verdict"] for stage in data["stages"]}
