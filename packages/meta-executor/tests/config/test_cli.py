"""The command line: every error that a person can make, its text and its exit code."""

import os
import socket
import subprocess
import sys

import pytest

from meta_executor.config import ConfigError, service_config
from meta_executor.preflight import check_model, check_port, check_service


def run(*arguments, env=None, cwd=None):
    """The command, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "meta_executor", *map(str, arguments)], capture_output=True, text=True,
        timeout=60, env={**os.environ, **(env or {})}, cwd=cwd,
    )  # fmt: skip


def config(tmp_path, text):
    path = tmp_path / "service.yaml"
    path.write_text(text)
    return path


def failed(done, code, *parts):
    assert done.returncode == code, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("meta-executor: error: ")
    for part in parts:
        assert part in lines[0]


def test_help_teaches():
    """The first page says what it is, shows commands to try, and the exit codes; each command has its own page."""
    text = run("--help").stdout
    for part in ("disaggregated", "meta-executor up", "Exit codes", "generate", "evidence"):
        assert part in text
    assert "Ctrl-C" in run("up", "--help").stdout


def test_up_prints_what_starts_the_parts_elsewhere(tmp_path):
    """Nothing is started; without a configuration that every host reads there is nothing to print."""
    text = "key_file: /k\ndiscovery: {store: 'http://etcd:2379'}\ncontext_servers: {hostname: node1}\n"
    path = config(tmp_path, text)
    done = run("up", path, "--print-launch")
    assert done.returncode == 0 and done.stderr == ""
    assert f"mpiexec -host node1 -n 1 meta-executor serve context {path}" in done.stdout
    assert f"--nodelist=localhost --nodes=1 --ntasks=1 --overlap meta-executor front {path}" in done.stdout
    failed(run("up", "--print-launch"), 2, "--print-launch", "CONFIG")


def test_unknown_commands_and_options_are_usage_errors():
    """Exit 2, and the nearest help."""
    assert run("upp").returncode == 2
    assert run("up", "--restart", "always").returncode == 2


def test_a_misspelt_key(tmp_path):
    """Names the key and the nearest right one."""
    failed(run("up", config(tmp_path, "contxt_servers: {}\n")), 2, "contxt_servers", "did you mean context_servers?")


def test_a_missing_configuration(tmp_path):
    """Names the file."""
    failed(run("up", tmp_path / "none.yaml"), 2, "none.yaml", "No such file")


def test_a_port_in_use(tmp_path):
    """Names host and port before anything is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed(run("up", config(tmp_path, f"port: {port}\n")), 2, "port:", str(port), "in use")
        with pytest.raises(ConfigError, match=rf"context_servers\.port.*{port}"):
            check_service(service_config({"port": 0, "context_servers": {"port": port}}), with_front=True)


@pytest.mark.parametrize(
    ("content", "part"),
    [(None, "no file or folder"), (b"PK\x03\x04" + bytes(100), "not a GGUF file"), (b"GGUF", "cut short")],
)
def test_a_missing_or_broken_model(tmp_path, content, part):
    """Names the field, the file and what is wrong with it."""
    model = tmp_path / "model.gguf"
    if content is not None:
        model.write_bytes(content)
    failed(run("up", config(tmp_path, f"port: 0\nengine: {{model: {model}}}\n")), 2, "engine.model", str(model), part)


def test_a_folder_that_is_no_model(tmp_path):
    """A Hugging Face folder has a config.json."""
    with pytest.raises(ConfigError, match=r"without config\.json"):
        check_model(str(tmp_path))


def test_no_mpiexec(tmp_path, monkeypatch):
    """Names where it was looked for and how to get it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install mpich"):
        check_service(service_config({"port": 0}), with_front=True)


def test_an_unresolvable_host():
    """Names the host."""
    with pytest.raises(ConfigError, match="hostname"):
        check_port("port", "no.such.host.invalid", 1)


def test_a_bad_environment_variable(tmp_path):
    """Names the variable and the value."""
    done = run("up", config(tmp_path, "port: 0\n"), env={"TLLM_RPC_LOCAL_FASTPATH": "on"})
    failed(done, 2, "TLLM_RPC_LOCAL_FASTPATH", "'on'")


@pytest.mark.parametrize("command", ["explain", "top"])
def test_a_service_that_does_not_answer_is_one_line(command):
    """Exit 1 and the address; no traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        failed(run(command, "--url", url), 1, url, "cannot be asked")
    failed(run(command, "--url", "nonsense"), 1, "nonsense", "cannot be asked")


def test_top_as_json_is_one_frame():
    """--json without --once is a usage error."""
    done = run("top", "--json")
    assert done.returncode == 2 and "--once" in done.stderr
