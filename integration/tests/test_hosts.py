"""A service on three hosts that meet in an etcd: network namespaces of this machine, KV over UCX's tcp."""

from __future__ import annotations

import shutil
import time

import pytest

from demo import PROMPTS
from meta_executor.config import EngineConfig
from meta_executor.engine.base import SamplingParams, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.tokenizer import Tokenizer
from service_on_hosts import body

pytestmark = [
    pytest.mark.service,
    pytest.mark.etcd,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        shutil.which("etcd") is None, reason="NO COVERAGE: no etcd binary (Debian: apt-get install etcd-server)"
    ),
]


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
