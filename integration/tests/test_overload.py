"""More clients than the service may have descriptors: each is answered or told to come later, and nothing is ill afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import ssl
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(300)]

#: Requests, by so many clients that all begin at once (count).
REQUESTS, CLIENTS = 900, 600
#: What the clients themselves need besides (descriptors).
BESIDES = 128


def settings(run_dir: Path) -> dict[str, Any]:
    """Two stages, two ranks, without a model."""
    pool = {"tokens_per_block": 16, "max_tokens": 16384}
    return {
        "port": 0,
        "run_dir": str(run_dir),
        "engine": {"kind": "synthetic", "synthetic": {"step_ms": 4.0, "layer_count": 8}},
        "context_servers": {"pipeline_parallel_size": 2, "kv_cache_config": pool},
        "generation_servers": {"tensor_parallel_size": 2, "enable_attention_dp": True, "kv_cache_config": pool},
    }


async def ask_all(url: str, model: str) -> Counter[str]:
    """What became of each request."""
    outcomes: Counter[str] = Counter()
    left = list(range(REQUESTS))
    # One for all: making it takes longer than a request.
    context = ssl.create_default_context()

    async def client() -> None:
        async with httpx.AsyncClient(timeout=120.0, trust_env=False, verify=context) as http:
            while left:
                body = {"model": model, "prompt": f"abc{left.pop()}", "max_tokens": 4, "ignore_eos": True}
                try:
                    answer = await http.post(f"{url}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    outcomes[repr(error)] += 1
                    continue
                if answer.status_code == 200:
                    whole = json.loads(answer.content)["usage"]["completion_tokens"] == 4
                    outcomes["answered" if whole else answer.text] += 1
                else:
                    later = answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                    outcomes["later" if later else f"{answer.status_code} {answer.text}"] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return outcomes


@pytest.mark.parametrize("descriptors", [256, 1024])
def test_with_few_descriptors_each_request_is_answered_or_told_to_come_later(
    short_folder: Path, tmp_path: Path, descriptors: int
) -> None:
    """No connection ends without an answer, nobody blames an instance that is well, and the drain proves itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CLIENTS + BESIDES:
        pytest.skip(f"NO COVERAGE: {CLIENTS} clients need {CLIENTS + BESIDES} descriptors, the hard limit is {hard}")
    config = tmp_path / "service.yaml"
    config.write_text(yaml.safe_dump(settings(short_folder / "o")))
    limited = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", sys.executable, "-m", "meta_executor", "up"]
    with subprocess.Popen([*limited, str(config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        try:
            assert up.stdout is not None
            lines: list[str] = []
            url = None
            for line in up.stdout:
                lines.append(line)
                if ready := re.search(r"front: ready at (\S+)", line):
                    url = ready[1]
                    break
            assert url is not None, lines
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, CLIENTS + BESIDES), hard))
            model = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"]
            outcomes = asyncio.run(ask_all(url, model))
            print(f"{descriptors} descriptors: {dict(outcomes)}")
            assert set(outcomes) == {"answered", "later"} and sum(outcomes.values()) == REQUESTS, outcomes
            assert httpx.get(f"{url}/health", timeout=30, trust_env=False).status_code == 200
            up.send_signal(signal.SIGTERM)
            rest, _ = up.communicate(timeout=60)
            assert up.returncode == 0, rest
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if up.poll() is None:
                os.kill(up.pid, signal.SIGKILL)
