"""A trial's service: a configuration, or the default topology, with the trial's knobs turned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meta_executor.config import ServiceConfig, apply_environment, service_config

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


def trial_service(
    base: ServiceConfig | None,
    environ: Mapping[str, str],
    *,
    schedule: str | None = None,
    engine: str | None = None,
    window: int | None = None,
    compute_cap: int | None = None,
    gen_blocks: int | None = None,
    opposite: bool = False,
    requests: int = 256,
) -> ServiceConfig:
    """The configuration of a trial.

    Raises:
        ConfigError: The knobs do not go together; names the field.
    """
    if base is None:
        base = apply_environment(service_config(_DEFAULT), environ)
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
        engine=replace(base.engine, kind=engine) if engine else base.engine,
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
