"""The lines that start the parts of one service on their hosts."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from meta_executor.config import ConfigError, ServiceConfig, service_config
from meta_executor.mpi_launcher import USUAL_LAUNCHERS, find_launcher
from meta_executor.supervise.parts import launch_lines

APART = {
    "key_file": "/k",
    "hostname": "0.0.0.0",
    "discovery": {"store": "http://etcd:2379"},
    "context_servers": {"hostname": "node1", "pipeline_parallel_size": 3},
    "generation_servers": {"hostname": "0.0.0.0", "advertised_host": "10.0.0.2", "num_instances": 2},
}


def lines(**more: object) -> list[str]:
    return launch_lines(service_config(APART | more), Path("/a folder/service.yaml"))


def commands(told: list[str]) -> list[list[str]]:
    """What a shell makes of them."""
    return [words for line in told if (words := shlex.split(line, comments=True))]


def test_each_part_has_a_line_for_each_launcher_on_its_host() -> None:
    """By the name that is announced; a front that listens everywhere is started where the person is."""
    told = lines()
    wanted = [
        launcher.command_on(host, ["meta-executor", *words, "/a folder/service.yaml"])
        for host, words in (
            ("node1", ["serve", "context"]),
            ("10.0.0.2", ["serve", "generation"]),
            ("localhost", ["front"]),
        )
        for launcher in USUAL_LAUNCHERS
    ]
    assert commands(told) == wanted
    said = [line for line in told if line.startswith("#")]
    assert "context: 3 ranks, on node1" in said[0] and "2 instances of 1 ranks" in said[2]
    assert "mpiexec -n 3 (MPICH)" in said[1] and "srun" in said[1]


def test_instances_that_run_already_are_not_started() -> None:
    """Of them only their addresses are known."""
    told = lines(context_servers={"urls": ["http://node1:1"]})
    assert not [words for words in commands(told) if "context" in words] and len(commands(told)) == 6


@pytest.mark.parametrize(
    ("more", "field"),
    [({"key_file": None}, "key_file"), ({"discovery": {"store": None}}, "context_servers.urls")],
)
def test_parts_that_would_not_meet_are_refused_by_name(more: dict[str, object], field: str) -> None:
    """A key makes them one service, a store or addresses let them find each other."""
    with pytest.raises(ConfigError) as refused:
        lines(**more)
    assert refused.value.field == field


def test_the_default_configuration_is_one_machines() -> None:
    with pytest.raises(ConfigError, match="key_file"):
        launch_lines(ServiceConfig(), Path("/none"))


@pytest.mark.service
@pytest.mark.timeout(120)
def test_a_part_that_a_launcher_starts_makes_worlds_of_its_own() -> None:
    """What the outer launcher tells its one process is not for the ranks of the instance; Ctrl-C there drains."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    try:
        path = folder / "service.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "run_dir": str(folder / "r"),
                    "engine": {"kind": "synthetic"},
                    "context_servers": {"pipeline_parallel_size": 2},
                }
            )
        )
        program = [sys.executable, "-m", "meta_executor", "serve", "context", str(path)]
        command = find_launcher().command_on("localhost", program)
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as part:
            assert part.stderr is not None
            said = []
            for line in part.stderr:
                said.append(line)
                if line.startswith("ctx-0: ready at "):
                    part.send_signal(signal.SIGINT)
        assert part.returncode == 0 and "ctx-0: drained\n" in said, "".join(said)
    finally:
        shutil.rmtree(folder)
