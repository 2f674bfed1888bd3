"""The real model in other modes than the example's: every combination's tokens equal one process's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from meta_executor.config import apply_environment, load_service_config
from meta_executor.engine.base import SamplingParams, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.evidence.verify import verify_folder
from meta_executor.supervise.launch import Launcher

EXAMPLE = Path(__file__).resolve().parents[2] / "packages" / "meta-executor" / "examples" / "smollm2.yaml"

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = "The tide came in and the tide went out, and each time the keeper of the light wrote down the hour. "
#: The same long beginning three times, so that a prefix cache has something to find; short ones between.
PROMPTS = (
    "A",
    LONG * 12 + "In short,",
    "The capital of France is",
    LONG * 12 + "At night,",
    "Once upon a time",
    LONG * 12 + "In short,",
)
TOKENS = 24


@pytest.fixture(scope="module")
def reference():
    """One engine, one thread, one prompt at a time."""
    config = load_service_config(EXAMPLE).engine
    info = model_info(config)
    runner = SequenceRunner(create_engine(config, StageSpec.split(info.layer_count, 1)[0]), block_count=64)
    tokenizer = Tokenizer.for_model(config.model)
    found = [list(generate(runner, tokenizer, p, SamplingParams(max_tokens=TOKENS)).token_ids) for p in PROMPTS]
    runner.close()
    return found


def configured(schedule, *, fast, batch, agree, bounce, reuse, proxy):
    """The example with each knob turned."""
    replace = msgspec.structs.replace
    service = apply_environment(load_service_config(EXAMPLE), {})

    def turned(instance):
        transceiver = instance.cache_transceiver_config
        context = instance is service.context_servers
        return replace(
            instance,
            proxy=proxy,
            rpc=replace(instance.rpc, local_fastpath=fast, submit_batch_max=batch),
            kv_cache_config=replace(instance.kv_cache_config, enable_block_reuse=reuse),
            cache_transceiver_config=replace(
                transceiver,
                enable_bounce=bounce,
                enable_async_terminal_agreement=agree and context,
                enable_async_readiness_agreement=agree and context,
            ),
        )

    return replace(
        service,
        schedule_style=schedule,
        context_servers=turned(service.context_servers),
        generation_servers=turned(service.generation_servers),
    )


@pytest.mark.parametrize(
    ("schedule", "knobs"),
    [
        (
            "generation_first",
            {"fast": True, "batch": 8, "agree": True, "bounce": True, "reuse": True, "proxy": "thread"},
        ),
        (
            "generation_first",
            {"fast": False, "batch": 1, "agree": False, "bounce": False, "reuse": False, "proxy": "spawn"},
        ),
        ("context_first", {"fast": True, "batch": 1, "agree": False, "bounce": True, "reuse": True, "proxy": "spawn"}),
        (
            "context_first",
            {"fast": False, "batch": 8, "agree": True, "bounce": False, "reuse": True, "proxy": "thread"},
        ),
    ],
)
def test_every_mode_gives_the_references_tokens(short_folder, reference, schedule, knobs):
    """Schedule, fast path, batching, agreement, bounce, prefix cache and place of the API server, each on and off."""
    name = f"{schedule[:3]}-{knobs['proxy']}"
    service = msgspec.structs.replace(
        configured(schedule, **knobs),
        run_dir=str(short_folder / name),
        evidence_dir=str(short_folder / f"{name}-evidence"),
    )
    launcher = Launcher(service, say=print)
    with launcher.started():
        model = httpx.get(f"{launcher.front_url}/v1/models", trust_env=False).json()["data"][0]["id"]

        def ask(prompt):
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": TOKENS,
                "temperature": 0.0,
                "return_token_ids": True,
            }
            answer = httpx.post(f"{launcher.front_url}/v1/completions", json=body, timeout=300.0, trust_env=False)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"], answer.json()["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]

        with ThreadPoolExecutor(3) as pool:
            first = list(pool.map(ask, PROMPTS))
        again = ask(PROMPTS[1])
    assert [ids for ids, _ in first] == reference
    assert again[0] == reference[1]
    assert (again[1] > 0) == knobs["reuse"]
    assert verify_folder(short_folder / f"{name}-evidence").ok
