"""Which instances say of themselves, now, that they can serve: asked again and again, so that ``/health`` follows what happens.

The directory knows what an instance is and whether it can be reached. That a process in it stands still, or a link between two
instances is away, the instance knows; and one that does not answer soon cannot serve either.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from endpoint_lifecycle import AsyncEndpointDirectory
from meta_executor.front.legs import LegClient

#: Between two questions (s).
ASK_EVERY_S = 1.0


class Wellness:
    """See the module.

    Args:
        directory: Knows the instances.
        legs: Asks them.
    """

    def __init__(self, directory: AsyncEndpointDirectory, legs: LegClient) -> None:
        self._directory = directory
        self._legs = legs
        #: Instance to why it cannot serve.
        self.unwell: dict[str, str] = {}

    def serves(self, role: str) -> bool:
        """Whether one of a role can be picked and is not known to be unwell."""
        return self._directory.ready(**{role: 1}) and any(
            server not in self.unwell for server in self._directory.servers(role)
        )

    async def ask(self) -> None:
        """Ask every instance once."""
        servers = self._directory.servers()
        answers = await asyncio.gather(*(self._legs.condition(server) for server in servers))
        self.unwell = {server: why for server, why in zip(servers, answers, strict=True) if why}

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Ask again and again meanwhile."""
        task = asyncio.create_task(self._follow(), name="wellness")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _follow(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(ASK_EVERY_S)
