"""Which instances there are: ``/server_info`` answers as records of endpoint-lifecycle, and what they allow.

The directory of endpoint-lifecycle does the work (single-flight refreshes, reservations, probing); here are only the two
things that it cannot know: how to fetch a record from our instances, and how to read one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from endpoint_lifecycle import AsyncEndpointDirectory, DirectoryConfig
from meta_executor import wire
from meta_executor.front.legs import LegClient
from meta_executor.front.routers import Routers

_SERVER_INFO = msgspec.json.Decoder(wire.ServerInfo)
#: A reservation outlives its request's own deadline by this much; its expiry is a backstop, counted as a defect (s).
_RESERVATION_GRACE_S = 60.0


@dataclass(frozen=True)
class FrontServer:
    """An instance as this run names it.

    Attributes:
        owner_id: Slot, such as ``ctx-0``.
        role: ``context`` or ``generation``.
        url: Where it answers, without a slash at the end.
        elsewhere: It was started apart, and has in its own run a name of its own.
    """

    owner_id: str
    role: str
    url: str
    elsewhere: bool = False


def record_of(body: bytes) -> Mapping[str, Any]:
    """A ``/server_info`` answer in the directory's form.

    Raises:
        msgspec.DecodeError: It is none of ours.
        ValueError: Another version of the wire.
    """
    info = _SERVER_INFO.decode(body)
    if info.wire_version != wire.WIRE_VERSION:
        raise ValueError(f"wire_version {info.wire_version}, this front speaks {wire.WIRE_VERSION}")
    limits = {} if info.limits is None else msgspec.to_builtins(info.limits)
    scope_ranks = max(1, info.world_size // max(1, info.attention_dp_size * info.pipeline_parallel_size))
    return {
        "ready": info.ready,
        "role": info.role,
        "owner_id": info.owner_id,
        "instance_id": info.instance_id,
        "generation": info.generation,
        "state": info.state.lower(),
        "control_addresses": info.control_addresses,
        "profile": {
            "layout_fingerprint": info.profile,
            "dp_size": info.attention_dp_size,
            "pp_size": info.pipeline_parallel_size,
            "tp_size": scope_ranks,
            "limits": limits,
            "details": {"model": info.model, "vocab_size": info.vocab_size},
        },
    }


def make_directory(
    servers: Sequence[FrontServer], legs: LegClient, *, request_timeout_s: float, routers: Routers
) -> AsyncEndpointDirectory:
    """A directory of these instances; its background work runs inside its ``async with``."""

    async def fetch(server: str) -> Mapping[str, Any]:
        return record_of(await legs.server_info(server))

    directory = AsyncEndpointDirectory(
        fetch,
        DirectoryConfig(reservation_ttl_s=request_timeout_s + _RESERVATION_GRACE_S),
        policy=routers.pick,
    )
    for server in servers:
        directory.add_server(server.url, server.role, owner_id=None if server.elsewhere else server.owner_id)
    return directory


@dataclass(frozen=True)
class TokenLimits:
    """What one request may have, by the tightest of all instances that are known now (tokens).

    Attributes:
        total: Prompt and answer together.
        prompt: Prompt alone: what a context instance's KV pool holds.
    """

    total: int
    prompt: int


def limits_of(
    directory: AsyncEndpointDirectory, servers: Sequence[FrontServer], context_tokens_max: int
) -> TokenLimits:
    """The tightest limits.

    Args:
        directory: Knows the records.
        servers: Instances of both roles.
        context_tokens_max: The model's own limit.
    """
    total = prompt = context_tokens_max
    for server in servers:
        record = directory.record(server.url)
        if record is None:
            continue
        limits = record.profile.limits
        total = min(total, limits.get("max_seq_len", total))
        if server.role == "context":
            prompt = min(prompt, limits.get("kv_tokens", prompt))
        else:
            total = min(total, limits.get("kv_tokens", total))
    return TokenLimits(total, prompt)
