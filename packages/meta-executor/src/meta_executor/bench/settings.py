"""A trial's service: a configuration, or the default topology, with the trial's knobs turned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meta_executor.bench.lengths import longest
from meta_executor.bench.load import LoadConfig
from meta_executor.config import ConfigError, EngineConfig, ServiceConfig, apply_environment, service_config

#: Of each rank's loop a trial keeps the newest so many turns (count): minutes of a loaded one.
RECORDED_TURNS = 200_000
#: Of every so many context legs the last goes first in a trial of opposite orders (count).
OPPOSITE_GROUP = 16
#: The service of a trial that is given none.
_DEFAULT: dict[str, Any] = {
    "port": 0,
    "start_timeout_s": 300.0,
    "drain_timeout_s": 300.0,
    "front": {"request_timeout_s": 3600.0},
    "context_servers": {
        "pipeline_parallel_size": 4,
        "kv_cache_config": {"max_tokens": 65536},
        "cache_transceiver_config": {
            "enable_async_terminal_agreement": True,
            "enable_async_readiness_agreement": True,
            "enable_bounce": True,
            "transfer_timeout_s": 600.0,
        },
    },
    "generation_servers": {
        "tensor_parallel_size": 2,
        "enable_attention_dp": True,
        "max_batch_size": 64,
        "kv_cache_config": {"max_tokens": 65536},
        "cache_transceiver_config": {"enable_bounce": True, "transfer_timeout_s": 600.0},
    },
}


def proxy_service(concurrency: int, tokens: int, *, ranks: int = 1) -> dict[str, Any]:
    """A generation instance alone, with room for that many requests of so many tokens each, which computes prompts itself."""
    rows = -(-concurrency // ranks)
    return {
        "drain_timeout_s": 300.0,
        # The time of a step is its device's; the answer does not depend on what is in the KV memory.
        "engine": {"kind": "synthetic", "synthetic": {"layer_count": 1, "kv_head_count": 1, "head_dim": 2,
                                                      "context_tokens_max": max(8192, tokens), "kv_check": "off"}},
        "generation_servers": {
            "tensor_parallel_size": ranks,
            "enable_attention_dp": ranks > 1,
            "max_batch_size": rows + 256,
            # Prompts behind the rows: as many as old requests end in a step, and more.
            "max_num_tokens": rows + 64 * tokens,
            "max_queue_size": 2 * concurrency,
            "kv_cache_config": {"max_tokens": (rows + 64) * (tokens + 16)},
        },
    }  # fmt: skip


def front_service(concurrency: int, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
    """Four context ranks and two generation ranks on the synthetic engine, with room for that many requests of that length at
    once, and steps of the context instance that read as many prompts as answers end."""
    rows, tokens = -(-concurrency // 2), prompt_tokens + answer_tokens
    prompts = max(8, -(-2 * rows // answer_tokens))
    pool = {"max_tokens": (rows + 64) * (tokens + 16)}
    return {
        **{key: value for key, value in _DEFAULT.items() if not key.endswith("_servers")},
        # The answer depends on a few words of the KV, so a wrong transfer shows and the host's time is not the check's.
        "engine": {"kind": "synthetic", "synthetic": {"context_tokens_max": max(8192, tokens), "kv_check": "sampled"}},
        "context_servers": {
            **_DEFAULT["context_servers"],
            "max_batch_size": prompts,
            "max_num_tokens": prompts * prompt_tokens,
            "max_queue_size": max(4096, 2 * concurrency),
            "kv_cache_config": {"max_tokens": max(131_072, 16 * prompts * (prompt_tokens + 16))},
        },
        "generation_servers": {
            **_DEFAULT["generation_servers"],
            "max_batch_size": rows + 64,
            "max_num_tokens": 2 * rows + 64,
            "max_queue_size": max(4096, 2 * concurrency),
            "kv_cache_config": pool,
        },
    }


def _engine(engine: EngineConfig, kind: str | None, synthetic: Mapping[str, float | None]) -> EngineConfig:
    replace = msgspec.structs.replace
    if kind is not None:
        engine = replace(engine, kind=kind)
    given = {name: value for name, value in synthetic.items() if value is not None}
    if given and engine.kind != "synthetic":
        raise ConfigError(
            f"engine.synthetic.{next(iter(given))}", f"is of the synthetic engine; this one is {engine.kind}"
        )
    return replace(engine, synthetic=replace(engine.synthetic, **given)) if given else engine


def base_service(drive: str, load: LoadConfig, environ: Mapping[str, str], *, synthetic: bool = False) -> ServiceConfig:
    """The service of a trial that is given none; ``synthetic``: with the engine of that name, sized for the load.

    Raises:
        ConfigError: An environment variable holds something else than its type.
    """
    data = _DEFAULT
    prompt_tokens, answer_tokens = longest(load.prompt_tokens), longest(load.answer_tokens)
    concurrency = load.concurrency or load.requests
    if drive == "proxy":
        data = proxy_service(concurrency, prompt_tokens + answer_tokens)
    elif synthetic:
        data = front_service(concurrency, prompt_tokens, answer_tokens)
    return apply_environment(service_config(data), environ)


def trial_service(
    base: ServiceConfig,
    *,
    schedule: str | None = None,
    engine: str | None = None,
    window: int | None = None,
    compute_cap: int | None = None,
    gen_blocks: int | None = None,
    opposite: bool = False,
    requests: int = 256,
    record_turns_max: int = 0,
    step_ms: float | None = None,
    stagger_ms: float | None = None,
) -> ServiceConfig:
    """A service with a trial's knobs turned.

    Raises:
        ConfigError: The knobs do not go together; names the field.
    """
    replace = msgspec.structs.replace
    context, generation, http = base.context_servers, base.generation_servers, base.front.http
    if window is not None:
        transceiver = replace(context.cache_transceiver_config, max_num_generation_first_pre_active_requests=window)
        context = replace(context, cache_transceiver_config=transceiver)
    if compute_cap is not None:
        context = replace(context, max_batch_size=compute_cap)
    if gen_blocks is not None:
        pool = generation.kv_cache_config
        pool = replace(pool, max_tokens=gen_blocks * pool.tokens_per_block)
        generation = replace(generation, kv_cache_config=pool)
    made = replace(
        base,
        schedule_style=schedule.replace("-", "_") if schedule else base.schedule_style,
        engine=_engine(base.engine, engine, {"step_ms": step_ms, "stagger_ms": stagger_ms}),
        record_turns_max=record_turns_max,
        front=replace(
            base.front,
            context_leg_group=min(OPPOSITE_GROUP, requests) if opposite else base.front.context_leg_group,
            max_requests=max(base.front.max_requests, requests),
            # The load comes from one address.
            max_requests_per_client=max(base.front.requests_per_client_max, requests),
            http=replace(
                http,
                connections_max=max(http.connections_max, 2 * requests),
                connections_per_client_max=max(http.connections_per_client_max, 2 * requests),
            ),
        ),
        context_servers=context,
        generation_servers=generation,
    )
    # What was put together by hand is checked like a file.
    return service_config(msgspec.to_builtins(made))
