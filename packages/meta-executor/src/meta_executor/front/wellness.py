"""Which instances say of themselves, now, that they can serve: asked again and again, so that ``/health`` follows what happens.

The directory knows what an instance is and whether it can be reached. That a process in it stands still, or a link between two
instances is away, the instance knows; and one that does not answer soon cannot serve either. Nor can one that answers as
another lifetime than the directory's: requests would be sent to the one that is gone. The answer proves that it is gone, so
the directory hears of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from endpoint_lifecycle import AsyncEndpointDirectory, EndpointError, EndpointRecord, ServerStatus
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
        # The directory is asked for the role, too, because one that is closed serves nobody, whatever it last knew.
        return self._directory.ready(**{role: 1}) and any(
            server not in self.unwell and self._directory.status(server) is ServerStatus.READY
            for server in self._directory.servers(role)
        )

    async def ask(self) -> None:
        """Ask every instance once."""
        # As the records are before the questions: whoever answers as another lifetime came later.
        known = {server: self._directory.record(server) for server in self._directory.servers()}
        answers = await asyncio.gather(*(self._ask(server, record) for server, record in known.items()))
        self.unwell = {server: why for server, why in zip(known, answers, strict=True) if why}

    async def _ask(self, server: str, known: EndpointRecord | None) -> str:
        """Why requests to an instance would not be served now; "" while they would."""
        condition = await self._legs.condition(server)
        if condition.why or condition.generation is None or known is None:
            return condition.why
        try:
            record = self._directory.record(server)
            if record is not None and record.generation != condition.generation:
                record = await self._directory.refresh(server, proven_stale=known.generation)
        except EndpointError as error:
            return f"it was replaced, and its new record is not here yet: {error}"
        replaced = record is None or record.generation != condition.generation
        return "it was replaced while it was asked" if replaced else ""

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
