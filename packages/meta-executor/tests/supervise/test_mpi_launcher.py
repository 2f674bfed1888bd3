"""Which launcher of MPI worlds is taken, how it is called, and what its ranks are told."""

import subprocess
import sys

import pytest

from meta_executor.mpi_launcher import (
    SETTING,
    LauncherError,
    MpiLauncher,
    find_launcher,
    flavour_of,
    outside_of_a_world,
    rank_of,
    world_size,
)


@pytest.fixture
def program(tmp_path):
    """An executable that answers ``--version`` with a text: ``program("bin/mpiexec", text)``; its path."""

    def make(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{text}'\n")
        path.chmod(0o755)
        return path

    return make


HYDRA, OPEN, INTEL = (
    "HYDRA build details:",
    "mpiexec (Open MPI) 5.0.11",
    "Intel(R) MPI Library for Linux* OS, Version 2021.9",
)


@pytest.mark.parametrize(
    ("text", "flavour", "options"),
    [
        (HYDRA, "MPICH", []),
        (OPEN, "Open MPI", ["--oversubscribe", "--bind-to", "none"]),
        ("mpirun (OpenRTE) 4.1.4", "Open MPI", ["--oversubscribe", "--bind-to", "none"]),
        (INTEL, "Intel MPI", []),
        ("something else", "unknown", []),
    ],
)
@pytest.mark.parametrize("user", [0, 1000])
def test_each_launcher_is_called_in_its_own_way(program, monkeypatch, text, flavour, options, user):
    """The flavour is what the launcher says itself; Open MPI is told that more ranks than cores, and root, are meant."""
    flavour_of.cache_clear()
    monkeypatch.setattr("os.geteuid", lambda: user)
    found = find_launcher({"PATH": str(program("bin/mpiexec", text).parent)}, "/nowhere/python")
    assert found.flavour == flavour
    root = ["--allow-run-as-root"] if user == 0 and flavour == "Open MPI" else []
    assert found.command(3, ["a", "b"]) == [*found.words, *options, *root, "-n", "3", "a", "b"]


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        (MpiLauncher(("mpiexec",), "MPICH"), ["-host", "node1", "-n", "1"]),
        (MpiLauncher(("mpirun",), "Open MPI"), ["--host", "node1", "-n", "1"]),
        (MpiLauncher(("srun", "--mpi=none"), "Slurm"), ["--nodelist=node1", "--nodes=1", "--ntasks=1", "--overlap"]),
    ],
)
def test_one_process_on_another_host_is_asked_for_in_each_launchers_way(launcher, options, monkeypatch):
    """Open MPI is told that root is meant, as for ranks."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert launcher.command_on("node1", ["a"]) == [*launcher.words, *options, "a"]
    monkeypatch.setattr("os.geteuid", lambda: 0)
    root = ["--allow-run-as-root"] if launcher.flavour == "Open MPI" else []
    assert launcher.command_on("node1", ["a"]) == [*launcher.words, *root, *options, "a"]


def test_where_it_is_looked_for(program, tmp_path):
    """The setting, then beside the interpreter, then the path; a file that cannot be executed is none."""
    beside, on_path, other = (
        program("venv/mpiexec", HYDRA),
        program("bin/mpiexec", OPEN),
        program("opt/srun", "slurm 23"),
    )
    python = str(tmp_path / "venv" / "python")
    environ = {"PATH": str(on_path.parent)}
    assert find_launcher(environ, python).words == (str(beside),)
    assert find_launcher(environ | {SETTING: f"{other} --mpi=pmi2"}, python) == MpiLauncher(
        (str(other), "--mpi=pmi2"), "Slurm"
    )
    beside.chmod(0o644)
    assert find_launcher(environ, python).words == (str(on_path),)
    on_path.rename(on_path.with_name("mpirun"))
    assert find_launcher(environ, python).words == (str(on_path.with_name("mpirun")),)


@pytest.mark.parametrize(
    ("environ", "part"),
    [
        ({"PATH": "/nowhere"}, "no mpiexec beside /nowhere/python nor on PATH"),
        ({"PATH": "/nowhere", SETTING: "no_such --x"}, "there is no program no_such"),
        ({"PATH": "/nowhere", SETTING: "'open"}, "No closing quotation"),
    ],
)
def test_without_one_it_is_said_where_it_was_looked_for(environ, part):
    """And what brings one."""
    with pytest.raises(LauncherError, match=part):
        find_launcher(environ, "/nowhere/python")


def test_slurm_is_told_what_is_meant():
    """More ranks than tasks, inside a job that is using its nodes, and the step ends with its first failure."""
    assert MpiLauncher(("srun",), "Slurm").command(2, ["x"]) == [
        "srun", "--overcommit", "--overlap", "--kill-on-bad-exit=1", "-n", "2", "x",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="at least 1"):
        MpiLauncher(("srun",), "Slurm").command(0, ["x"])


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({}, None, 0),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, 4, 3),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}, 2, 1),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None, 0),
        ({"PMI_SIZE": ""}, None, 0),
    ],
)
def test_what_ranks_are_told(environ, size, rank):
    """MPICH's and Open MPI's variables; a batch job that holds tasks is no world."""
    assert (world_size(environ), rank_of(environ)) == (size, rank)
    assert world_size(outside_of_a_world(environ)) is None


@pytest.mark.service
def test_a_world_starts_within_a_rank():
    """A rank that starts a world of its own gives it an environment without the outer one's."""
    # one write a line: what `print` writes in pieces the launcher may mix with another rank's
    inner = "import os; from mpi4py import MPI; os.write(1, f'inner {MPI.COMM_WORLD.size};'.encode())"
    outer = (
        "import subprocess, sys, os\nfrom meta_executor.mpi_launcher import find_launcher, outside_of_a_world\n"
        f"print(subprocess.run(find_launcher().command(2, [sys.executable, '-c', {inner!r}]),"
        " env=outside_of_a_world(os.environ), capture_output=True, text=True).stdout)"
    )
    done = subprocess.run(
        find_launcher().command(1, [sys.executable, "-c", outer]), capture_output=True, text=True, timeout=100,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stdout.count("inner 2;") == 2, done.stdout + done.stderr
