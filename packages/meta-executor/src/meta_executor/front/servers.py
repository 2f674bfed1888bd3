"""Which instances there are, listed or found: ``/server_info`` answers as records of endpoint-lifecycle, and what they allow.

The directory of endpoint-lifecycle does the work (single-flight refreshes, reservations, probing); here is only what it cannot
know: how to fetch a record from our instances, how to read one, and what an instance is called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from endpoint_lifecycle import AsyncEndpointDirectory, DirectoryConfig
from meta_executor import wire
from meta_executor.discovery import profile_of
from meta_executor.front.legs import LegClient
from meta_executor.front.routers import Routers

_SERVER_INFO = msgspec.json.Decoder(wire.ServerInfo)
#: A reservation outlives its request's own deadline by this much; its expiry is a backstop, counted as a defect (s).
_RESERVATION_GRACE_S = 60.0
#: Names of instances that are remembered by where they answered (count).
_OWNERS_MAX = 1024


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


@dataclass(frozen=True)
class ServerCondition:
    """What the front knows of an instance.

    Attributes:
        status: Whether it can be picked.
        generation: Of its record; None: there is none.
        legs: Of requests that are there now (count).
    """

    status: str
    generation: str | None
    legs: int


def record_of(body: bytes) -> Mapping[str, Any]:
    """A ``/server_info`` answer in the directory's form.

    Raises:
        msgspec.DecodeError: It is none of ours.
        ValueError: Another version of the wire.
    """
    info = _SERVER_INFO.decode(body)
    if info.wire_version != wire.WIRE_VERSION:
        raise ValueError(f"wire_version {info.wire_version}, this front speaks {wire.WIRE_VERSION}")
    return {
        "ready": info.ready,
        "role": info.role,
        "owner_id": info.owner_id,
        "instance_id": info.instance_id,
        "generation": info.generation,
        "state": info.state.lower(),
        "control_addresses": info.control_addresses,
        "profile": msgspec.to_builtins(profile_of(info)),
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


class Servers:
    """The instances as they are now: those that were listed, and those that have registered.

    Args:
        directory: Knows them.
        listed: Named here before anything was heard of them; instances of several runs may call themselves the same.
    """

    def __init__(self, directory: AsyncEndpointDirectory, listed: Sequence[FrontServer]) -> None:
        self._directory = directory
        self._listed = {server.url: server.owner_id for server in listed}
        #: Of those that have registered, as they call themselves.
        self._owners: OrderedDict[str, str] = OrderedDict()

    def __iter__(self) -> Iterator[FrontServer]:
        for role in ("context", "generation"):
            for url in self._directory.servers(role):
                yield FrontServer(self.owner_of(url), role, url)

    def condition(self, url: str) -> ServerCondition:
        """What is known here of the instance there."""
        record = self._directory.record(url)
        return ServerCondition(
            self._directory.status(url).value,
            None if record is None else record.generation,
            self._directory.load(url).count,
        )

    def owner_of(self, url: str) -> str:
        """The name of the instance there, also of one that has left since; its address where no name was ever heard."""
        listed = self._listed.get(url)
        if listed is not None:
            return listed
        if url in self._directory.servers() and (record := self._directory.record(url)) is not None:
            self._owners[url] = record.owner_id
            while len(self._owners) > _OWNERS_MAX:
                self._owners.popitem(last=False)
        return self._owners.get(url, url)


def limits_of(directory: AsyncEndpointDirectory, context_tokens_max: int) -> TokenLimits:
    """The tightest limits.

    Args:
        directory: Knows the instances' records.
        context_tokens_max: The model's own limit.
    """
    total = prompt = context_tokens_max
    for url in directory.servers():
        record = directory.record(url)
        if record is None:
            continue
        limits = record.profile.limits
        total = min(total, limits.get("max_seq_len", total))
        if record.role == "context":
            prompt = min(prompt, limits.get("kv_tokens", prompt))
        else:
            total = min(total, limits.get("kv_tokens", total))
    return TokenLimits(total, prompt)
