"""Short prompts without a context leg, answers without a generation leg: which way an answer took, and that it is counted."""

from __future__ import annotations

from typing import Any

import pytest

from meta_executor import wire

pytestmark = pytest.mark.asyncio


async def counters(cluster: Any) -> dict[str, float]:
    text = (await cluster.client.get(f"{cluster.url}/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("conditional_disagg_requests", "first_token_requests", "ctx_total_requests", "gen_total_requests")
    return {name: float(values[f"{name}_total"]) for name in names}


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_up_to_the_bound_has_no_context_leg(make_cluster: Any, style: str, stream: bool) -> None:
    """At the bound yes, beyond it no, in either order of the legs; text, counts and log probabilities are right."""
    async with make_cluster(style, local_prefill_max=9) as cluster:
        short = await cluster.complete("a" * 9, logprobs=0, stream=stream, **_usage(stream))
        assert short.status_code == 200
        assert not cluster.context.received
        (body,) = cluster.generation.received
        assert (body.context, body.first_token, body.schedule_style) == (None, None, "context_first")
        if not stream:
            answer = short.json()
            assert answer["choices"][0]["text"] == "Hello, world!"
            assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == "Hello, world!"
            assert answer["usage"] == {
                "prompt_tokens": 9, "completion_tokens": 14, "total_tokens": 23,
                "prompt_tokens_details": {"cached_tokens": 2},
            }  # fmt: skip
        assert (await cluster.complete("a" * 10)).status_code == 200
        assert len(cluster.context.received) == 1 and len(cluster.generation.received) == 2
        assert cluster.context.received[0].schedule_style == style
        assert await counters(cluster) == {
            "conditional_disagg_requests": 1, "first_token_requests": 0, "ctx_total_requests": 1, "gen_total_requests": 2,
        }  # fmt: skip
        await cluster.settled()
        assert not cluster.context.aborts + cluster.generation.aborts


def _usage(stream: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if stream else {}


async def test_an_answer_of_one_token_has_no_generation_leg_and_is_counted(make_cluster: Any) -> None:
    """Context-first: the context instance's token is the answer."""
    async with make_cluster() as cluster:
        await cluster.complete(max_tokens=1)
        await cluster.complete(max_tokens=2)
        assert await counters(cluster) == {
            "conditional_disagg_requests": 0, "first_token_requests": 1, "ctx_total_requests": 2, "gen_total_requests": 1,
        }  # fmt: skip


async def test_a_replaced_instance_gets_the_prompt_once_more(make_cluster: Any) -> None:
    """Nothing was touched by the refusal, so it is sent again after one refresh; a failure inside is the client's."""
    async with make_cluster(local_prefill_max=20) as cluster:
        cluster.generation.generation = "gen-0-g2"
        assert (await cluster.complete("abc")).status_code == 200
        cluster.generation.refusals = [(wire.ENGINE_FAILED, "boom")]
        assert (await cluster.complete("abc")).status_code == 502
        cluster.generation.break_after = 1
        assert (await cluster.complete("abc")).status_code == 502
        await cluster.settled()
