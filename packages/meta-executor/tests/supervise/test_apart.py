"""Instances and front that are started apart and belong together by their key."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from meta_executor.config import ConfigError
from meta_executor.supervise.rundir import read_key


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: socket paths have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="mx"))
    yield path
    shutil.rmtree(path)


def test_a_key_is_this_users_alone_and_whole(folder: Path) -> None:
    """What others may read, a link, another length and what is no number are refused by name."""
    path = folder / "key"
    key = secrets.token_bytes(32)
    path.write_text(key.hex() + "\n")
    path.chmod(0o600)
    assert read_key(str(path)) == key
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"key_file.*chmod 600"):
        read_key(str(path))
    path.chmod(0o600)
    (folder / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="key_file"):
        read_key(str(folder / "link"))
    with pytest.raises(ConfigError, match=r"key_file.*none: No such file"):
        read_key(str(folder / "none"))
    for text in ("", key.hex()[:-2], key.hex() + "ab", "x" * 64, "ż" * 32):
        path.write_text(text, "utf-8")
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            read_key(str(path))


class Command:
    """``meta-executor WORDS``, until it says that something answers at an address."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meta_executor", *words], stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        self.said: list[str] = []

    def address(self, owner: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith(f"{owner}: ready at "):
                return line.split()[3]
        raise AssertionError("".join(self.said))

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        _, rest = self.process.communicate(timeout=60)
        self.said.append(rest)
        return self.process.returncode


class Commands:
    """Those that a test runs, and their configurations in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.running: list[Command] = []

    def start(self, *words: str) -> Command:
        self.running.append(Command(*words))
        return self.running[-1]

    def configured(self, name: str, config: object) -> str:
        (self._folder / name).write_text(yaml.safe_dump(config))
        return str(self._folder / name)

    def end(self) -> None:
        """The newest first; each leaves by itself."""
        assert [c.end() for c in reversed(self.running)] == [0] * len(self.running), [c.said for c in self.running]
        self.running.clear()


@pytest.fixture
def commands(folder: Path) -> Iterator[Commands]:
    """What a failed test leaves running is killed."""
    made = Commands(folder)
    yield made
    for command in made.running:
        command.process.kill()
        command.process.wait()


@pytest.mark.service
@pytest.mark.timeout(120)
def test_two_instances_and_a_front_started_apart_serve_together(folder: Path, commands: Commands) -> None:
    """The front finds both by their addresses, KV moves between them, each drains for itself; another key is a stranger's."""
    for name in ("key", "other"):
        (folder / name).write_text(secrets.token_hex(32))
        (folder / name).chmod(0o600)
    base = {
        "port": 0,
        "run_dir": str(folder / "r"),
        "key_file": str(folder / "key"),
        "engine": {"kind": "synthetic"},
        "conditional_disagg_config": {"max_local_prefill_length": 4},
        "context_servers": {"pipeline_parallel_size": 1},
        "generation_servers": {"tensor_parallel_size": 1},
    }

    commands.start("serve", "context", commands.configured("both.yaml", base))
    commands.start("serve", "generation", str(folder / "both.yaml"))
    urls = [command.address(owner) for command, owner in zip(commands.running, ("ctx-0", "gen-0"))]
    apart = {
        **base,
        "context_servers": {"urls": urls[:1]},
        "generation_servers": {"urls": urls[1:]},
    }
    url = commands.start("front", commands.configured("front.yaml", apart)).address("front")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    texts = set()
    for prompt in ("abcdefgh", "abc"):  # with a context leg, and without
        whole = client.completions.create(model="synthetic", prompt=prompt, max_tokens=8, temperature=0)
        stream = client.completions.create(model="synthetic", prompt=prompt, max_tokens=8, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
        texts.add(whole.choices[0].text)
    assert len(texts) == 2
    metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert "conditional_disagg_requests_total 2.0" in metrics and "ctx_completed_requests_total 2.0" in metrics
    stranger = {**apart, "key_file": str(folder / "other"), "start_timeout_s": 3.0}
    refused = commands.start("front", commands.configured("stranger.yaml", stranger))
    _, said = refused.process.communicate(timeout=60)
    assert refused.process.returncode == 1 and "not ready within 3 s" in said
    commands.running.remove(refused)
    client.close()
    commands.end()


@pytest.mark.service
@pytest.mark.timeout(180)
def test_instances_at_two_addresses_with_a_folder_each_answer_as_one_run(
    folder: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One configuration for all parts: they meet in the store, and nothing of one stands in the run folder of another."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # an instance at every address would leave it open
    (folder / "key").write_text(secrets.token_hex(32))
    (folder / "key").chmod(0o600)
    base = {
        "port": 0,
        "key_file": str(folder / "key"),
        "engine": {"kind": "synthetic"},
        "discovery": {"store": str(folder / "store")},
        "context_servers": {"pipeline_parallel_size": 2, "hostname": "0.0.0.0", "advertised_host": "127.0.0.2"},
        "generation_servers": {"tensor_parallel_size": 1, "hostname": "127.0.0.3"},
    }
    one = {name: base[name] for name in ("port", "engine")} | {
        "run_dir": str(folder / "one"),
        "context_servers": {"pipeline_parallel_size": 2},
        "generation_servers": {"tensor_parallel_size": 1},
    }

    def answers(url: str) -> list[str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            made = [
                client.completions.create(model="synthetic", prompt=prompt, max_tokens=12, temperature=0)
                for prompt in ("abcdefgh", "a longer prompt, of several blocks: " * 4)
            ]
        return [completion.choices[0].text for completion in made]

    expected = answers(commands.start("up", commands.configured("one.yaml", one)).address("front"))
    commands.end()
    commands.start("serve", "context", commands.configured("ctx.yaml", base | {"run_dir": str(folder / "c")}))
    commands.start("serve", "generation", commands.configured("gen.yaml", base | {"run_dir": str(folder / "g")}))
    urls = [command.address(owner) for command, owner in zip(commands.running, ("ctx-0", "gen-0"))]
    assert [url.rpartition(":")[0] for url in urls] == ["http://127.0.0.2", "http://127.0.0.3"]
    front = commands.start("front", commands.configured("front.yaml", base | {"run_dir": str(folder / "f")})).address(
        "front"
    )
    assert answers(front) == expected and all(expected)
    metrics = httpx.get(f"{front}/metrics", trust_env=False).text
    assert "ctx_completed_requests_total 2.0" in metrics
    key = {"x-meta-executor-key": (folder / "key").read_text()}
    info = httpx.get(f"{urls[0]}/server_info", headers=key, trust_env=False).json()
    called = [*info["control_addresses"], info["service_address"]]
    cluster = httpx.get(f"{front}/cluster_info", trust_env=False).text
    assert all(url in cluster for url in urls) and "127.0.0.1" not in cluster, cluster
    assert len(called) == 3 and all(address.startswith("tcp://127.0.0.2:") for address in called), called
    (context,) = (folder / "c").glob("run-*")
    assert not [path for path in (context / "ipc").iterdir() if path.suffix in (".c", ".s")]
    commands.end()
