"""A service on three hosts that meet in an etcd: network namespaces of this machine, KV over UCX's tcp."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import yaml

from demo import PROMPTS
from hosts import INTERFACE, Network, Unavailable
from meta_executor import wire
from meta_executor.config import EngineConfig
from meta_executor.engine.base import SamplingParams, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.tokenizer import Tokenizer

ETCD = shutil.which("etcd")
pytestmark = [
    pytest.mark.service,
    pytest.mark.etcd,
    pytest.mark.timeout(300),
    pytest.mark.skipif(ETCD is None, reason="NO COVERAGE: no etcd binary (Debian: apt-get install etcd-server)"),
]

#: A client hears of what cannot be finished within this time (s): a link's silence, and how long it may be away, 5 and 30.
TOLD_WITHIN_S = 45.0
#: Requests sent from a host: (address, bodies on stdin) to what came of each, on stdout.
CLIENT = """
import concurrent.futures, json, sys, time
import httpx

def ask(body):
    began = time.monotonic()
    try:
        answer = httpx.post(sys.argv[1] + "/v1/completions", json=body, timeout=120.0, trust_env=False)
        told = {"status": answer.status_code, **answer.json()}
    except httpx.HTTPError as error:
        told = {"status": 0, "error": repr(error)}
    return told | {"took_s": time.monotonic() - began}

bodies = json.load(sys.stdin)
with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
    json.dump(list(pool.map(ask, bodies)), sys.stdout)
"""

#: What an instance shows to who has the key: (address, name of the header, key), on stdout.
LOOK = """
import sys
import httpx

address, name, key = sys.argv[1:]
sys.stdout.write(httpx.get(address, headers={name: key}, timeout=30.0, trust_env=False).raise_for_status().text)
"""


class Part:
    """A command on a host, and what it says."""

    def __init__(self, command, environment=None):
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.said = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.process.stderr as told:
            for line in told:
                with self._news:
                    self.said.append(line)
                    self._news.notify_all()
        with self._news:
            self.said.append("")
            self._news.notify_all()

    def address(self, owner):
        """Where it answers, as soon as it does."""
        words = f"{owner}: ready at "
        with self._news:
            while True:
                for line in self.said:
                    if line.startswith(words):
                        return line.split()[3]
                assert self.said[-1:] != [""], "".join(self.said)
                self._news.wait()

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        code = self.process.wait()
        self._reader.join()
        return code


class Site:
    """A network, an etcd in it, and the parts of a service."""

    def __init__(self, network, folder):
        self.network = network
        self.folder = folder
        self.parts = []
        self.etcd = None
        key = folder / "key"
        key.write_text(secrets.token_hex(32))
        key.chmod(0o600)
        self.key = key.read_text()

    def start_etcd(self):
        client, peer = (f"http://{self.network.address('front')}:{port}" for port in (2379, 2380))
        with (self.folder / "etcd.log").open("ab") as log:
            self.etcd = subprocess.Popen(
                self.network.command(
                    "front", ETCD, "--data-dir", str(self.folder / "etcd"), "--listen-client-urls", client,
                    "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", f"default={peer}",
                ),
                stdout=log, stderr=log,
            )  # fmt: skip
        return client

    def kill_etcd(self):
        self.etcd.kill()
        self.etcd.wait()
        self.etcd = None

    def configured(self, **more):
        """One configuration for all parts."""
        pool = {"tokens_per_block": 16, "max_tokens": 16384}
        transceiver = {"transport": "tcp"}
        settings = {
            "port": 0,
            "key_file": str(self.folder / "key"),
            "served_model_name": "any",
            "discovery": {"store": self.start_etcd(), "lease_s": 3.0},
            "context_servers": {
                "hostname": self.network.address("ctx"),
                "pipeline_parallel_size": 2,
                "kv_cache_config": pool,
                "cache_transceiver_config": {
                    **transceiver,
                    "enable_async_terminal_agreement": True,
                    "enable_async_readiness_agreement": True,
                },
            },
            "generation_servers": {
                "hostname": self.network.address("gen"),
                "tensor_parallel_size": 1,
                "kv_cache_config": pool,
                "cache_transceiver_config": transceiver,
            },
            **more,
        }
        for name in ("ctx", "gen", "front"):
            text = yaml.safe_dump(settings | {"run_dir": str(self.folder / name)})
            (self.folder / f"{name}.yaml").write_text(text)

    def start(self, name, *words):
        command = self.network.command(
            name, sys.executable, "-m", "meta_executor", *words, str(self.folder / f"{name}.yaml")
        )
        self.parts.append(Part(command, {"UCX_NET_DEVICES": INTERFACE}))
        return self.parts[-1]

    def serve(self):
        """Start everything. Returns where the front answers, on its own host."""
        instances = [self.start("ctx", "serve", "context"), self.start("gen", "serve", "generation")]
        self.urls = [part.address(owner) for part, owner in zip(instances, ("ctx-0", "gen-0"))]
        self.front = self.start("front", "front").address("front")
        return self.front

    def ask(self, *bodies):
        """What came of these requests, all sent at once from the front's host."""
        return self.asking(*bodies)()

    def asking(self, *bodies):
        """Send these requests. Returns what waits for what came of them."""
        client = subprocess.Popen(
            self.network.command("front", sys.executable, "-c", CLIENT, self.front), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        client.stdin.write(json.dumps(bodies))
        client.stdin.close()

        def result():
            with client.stdout:
                told = client.stdout.read()
            assert client.wait() == 0
            return json.loads(told)

        return result

    def statistics(self, url):
        words = (sys.executable, "-c", LOOK, f"{url}/internal/statistics", wire.KEY_HEADER, self.key)
        told = subprocess.run(self.network.command("front", *words), capture_output=True, text=True, check=True)
        return json.loads(told.stdout)

    def blocks_used(self):
        """KV blocks of each rank that are not free."""
        return [rank["kv_blocks_used_now"] for url in self.urls for rank in self.statistics(url)["ranks"]]

    def end(self):
        """Everything leaves by itself, the newest first."""
        codes = [part.end() for part in reversed(self.parts)]
        assert codes == [0] * len(codes), ["".join(part.said) for part in self.parts]
        self.parts.clear()

    def remove(self):
        """What a failed test has left."""
        for part in self.parts:
            part.process.kill()
            part.end()
        if self.etcd is not None:
            self.kill_etcd()


@pytest.fixture
def site():
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    try:
        with Network(("ctx", "gen", "front")) as network:
            made = Site(network, folder)
            try:
                yield made
            finally:
                made.remove()
    except Unavailable as error:
        pytest.skip(f"NO COVERAGE: network namespaces cannot be made here: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def body(prompt, max_tokens=16):
    return {"model": "any", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}


def answers_of_one_process(prompts, tokens):
    """The same engine in one process, one thread, one prompt at a time."""
    config = EngineConfig(model="smollm2", threads=1)
    info = model_info(config)
    runner = SequenceRunner(create_engine(config, StageSpec.split(info.layer_count, 1)[0]), block_count=64)
    tokenizer = Tokenizer.for_model(config.model)
    found = [generate(runner, tokenizer, prompt, SamplingParams(max_tokens=tokens)) for prompt in prompts]
    runner.close()
    return found


def test_three_hosts_answer_the_demos_prompts_as_one_process_does(site):
    """Token for token; the instances know nothing of each other and the front of neither but what stands in the etcd."""
    tokens = 12
    site.configured(engine={"kind": "llama", "model": "smollm2", "threads": 1})
    site.serve()
    reference = answers_of_one_process(PROMPTS, tokens)
    told = site.ask(*(body(prompt, tokens) | {"return_token_ids": True} for prompt in PROMPTS))
    assert [one["status"] for one in told] == [200] * len(PROMPTS), told
    assert [one["choices"][0]["token_ids"] for one in told] == [list(one.token_ids) for one in reference]
    context, generation = (site.statistics(url)["ranks"] for url in site.urls)
    assert all(rank["bytes_sent"] > 0 for rank in context) and generation[0]["bytes_received"] > 0
    assert all(site.network.address(name) in url for name, url in zip(("ctx", "gen"), site.urls))
    site.end()


def test_serving_goes_on_without_the_etcd_and_an_instance_that_starts_again_is_found_when_it_is_back(site):
    """The front keeps what it knew; when the store is back, registrations are renewed and new ones are heard of."""
    site.configured(engine={"kind": "synthetic"})
    site.serve()
    expected = site.ask(body("abcdefgh"))[0]["choices"][0]["text"]
    site.kill_etcd()
    began = time.monotonic()
    while time.monotonic() - began < 5.0:  # longer than a lease
        told = site.ask(body("abcdefgh"))[0]
        assert told["status"] == 200 and told["choices"][0]["text"] == expected, told
    site.start_etcd()
    generation = site.parts.pop(1)
    assert generation.end() == 0, "".join(generation.said)
    again = site.start("gen", "serve", "generation")
    assert again.address("gen-0") != site.urls[1]
    deadline = time.monotonic() + 30.0
    while (told := site.ask(body("abcdefgh"))[0])["status"] != 200:
        assert time.monotonic() < deadline, told
    assert told["choices"][0]["text"] == expected
    site.end()


def nothing_used(site, until_s: float) -> None:
    """Blocks are counted now and then: right after an answer some may still be called used."""
    while any(site.blocks_used()):
        assert time.monotonic() < until_s, site.blocks_used()
        time.sleep(0.1)


def test_a_link_that_is_cut_in_the_middle_of_transfers_frees_nothing_unproven_and_serves_again_when_healed(site):
    """Between the instances nothing passes any more: clients are told, destinations stay owned; afterwards all comes back."""
    site.configured(
        engine={"kind": "synthetic", "synthetic": {"layer_count": 8, "kv_head_count": 8, "head_dim": 32}},
        conditional_disagg_config={"max_local_prefill_length": 0},
    )
    site.serve()
    prompts = [f"{name} " * 400 for name in ("one", "two", "three")]
    expected = [one["choices"][0]["text"] for one in site.ask(*map(body, prompts))]
    nothing_used(site, time.monotonic() + 30.0)
    site.network.slow("gen", 20.0)
    before = site.network.received_bytes("gen")
    result = site.asking(*map(body, prompts))
    while site.network.received_bytes("gen") - before < 1 << 20:
        time.sleep(0.01)
    site.network.cut("ctx", "gen")
    told = result()
    assert [one["status"] for one in told] == [502] * len(prompts), told
    assert max(one["took_s"] for one in told) < TOLD_WITHIN_S, told
    assert max(site.blocks_used()) > 0, "a destination was given back that a peer may still write to"
    site.network.fast("gen")
    site.network.heal()
    deadline = time.monotonic() + 60.0
    while True:
        told = site.ask(*map(body, prompts))
        if [one["status"] for one in told] == [200] * len(prompts):
            break
        assert time.monotonic() < deadline, told
    assert [one["choices"][0]["text"] for one in told] == expected
    nothing_used(site, deadline)
    site.end()
