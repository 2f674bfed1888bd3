"""Why each leg went to the instance it went to: what the directory knew at the moment of the choice.

The front keeps its own choices; where a request went inside an instance is asked of that instance, over HTTP, when somebody
wants to see it. Nothing is asked while requests are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from endpoint_lifecycle import AsyncEndpointDirectory, AsyncReservation, ServerStatus
from meta_executor import wire
from meta_executor.front.leg import LegError
from meta_executor.front.legs import LegClient
from meta_executor.front.routers import Hint, Routers
from meta_executor.front.servers import Servers
from meta_executor.recent import Recent


class Choices:
    """The front's last choices.

    Args:
        directory: Knows loads and who can be picked.
        servers: Instances of both roles.
        legs: HTTP to them.
        routers: How one of several instances of a role is chosen.
        clock: Monotonic time (s).
    """

    def __init__(
        self,
        directory: AsyncEndpointDirectory,
        servers: Servers,
        legs: LegClient,
        routers: Routers,
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._servers = servers
        self._legs = legs
        self._routers = routers
        self._clock = clock
        self._recent: Recent[tuple[float, wire.LegDecision]] = Recent(wire.ROUTING_SHOWN_MAX)

    def chosen(
        self,
        request_id: int,
        reservation: AsyncReservation,
        weight: int,
        hint: Hint,
        excluded: Collection[str],
    ) -> None:
        """A leg was given to an instance; its claim is on the instance's load already."""
        role, server = reservation.role, reservation.server
        load = self._directory.load(server)
        decision = wire.LegDecision(
            request_id=request_id,
            role=role,
            owner_id=self._servers.owner_of(server),
            why=self._why(role, hint, excluded),
            weight=weight,
            load_weight=load.weight - weight,
            load_requests=load.count - 1,
        )
        self._recent.add((self._clock(), decision))

    def _why(self, role: str, hint: Hint, excluded: Collection[str]) -> str:
        pickable = [
            server
            for server in self._directory.servers(role)
            if server not in excluded and self._directory.status(server) is ServerStatus.READY
        ]
        if len(pickable) <= 1:
            why = "the only one that can be picked"
        else:
            why = self._routers.why(role, hint, len(pickable))
        if excluded:
            names = ", ".join(self._servers.owner_of(server) for server in excluded)
            why += f"; {names} could not be reached"
        return why

    async def shown(self, count_max: int) -> wire.ServiceRouting:
        """What ``/debug/routing`` answers: at most so many decisions here and of each instance, with their ages."""
        servers = tuple(self._servers)  # one may come or go meanwhile
        answers = await asyncio.gather(
            *(self._legs.routing(server.url, count_max) for server in servers), return_exceptions=True
        )
        instances: list[wire.InstanceRouting] = []
        unknown: dict[str, str] = {}
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, LegError):
                unknown[server.owner_id] = f"{answer.code}: {answer.message}"
            elif isinstance(answer, BaseException):
                raise answer
            else:
                # Under the name that it has here: instances of several runs may call themselves the same.
                instances.append(msgspec.structs.replace(answer, owner_id=server.owner_id))
        decided, held = self._recent.last(count_max)
        now_s = self._clock()
        return wire.ServiceRouting(
            policy=" and ".join(dict.fromkeys(self._routers.name(role) for role in ("context", "generation"))),
            decided=decided,
            decisions=[msgspec.structs.replace(d, age_s=max(now_s - at_s, 0.0)) for at_s, d in held],
            instances=instances,
            unknown=unknown,
        )
