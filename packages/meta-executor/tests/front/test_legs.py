"""The front's streams to instances: which lifetime they go to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from meta_executor import wire
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.request import Answers, Notice, Request, make_answers
from meta_executor.front.leg import LegError
from meta_executor.front.legs import LegClient
from rpc_local_registry import RpcPeerDead

SERVER = "http://instance"


class Lifetime:
    """An instance's lifetime: answers one token to each request until it dies."""

    def __init__(self, number: int) -> None:
        self.address = f"lifetime-{number}"
        self.info = wire.ServerInfo(
            ready=True, state="PUBLISHED", role="context", owner_id="ctx-0", instance_id=f"i{number}",
            generation=f"g{number}", service_address=self.address,
        )  # fmt: skip
        self.answered: asyncio.Queue[Answers | None] = asyncio.Queue()

    async def submit(self, subscriber: str, batch: Any) -> list[None]:
        for one in batch:
            self.answered.put_nowait(make_answers([(one.request.request_id, 7)], [Notice(one.request.request_id, "")]))
        return [None] * len(batch)

    async def answers_of(self) -> AsyncIterator[Answers]:
        while (answers := await self.answered.get()) is not None:
            yield answers
        raise RpcPeerDead("it has died")

    def answers(self, subscriber: str) -> AsyncIterator[Answers]:
        return self.answers_of()

    def close(self) -> None:
        """Nothing is held."""


class Http:
    """Shows whoever lives there now."""

    def __init__(self) -> None:
        self.now = Lifetime(1)
        self.asked = 0

    async def server_info(self, server: str) -> bytes:
        self.asked += 1
        return wire.encode_json(self.now.info)

    async def close(self) -> None:
        """Nothing is held."""


@pytest.mark.asyncio
async def test_after_a_lost_stream_whoever_lives_there_now_is_asked_where_its_stream_ends() -> None:
    """The next leg goes to the new lifetime's address, not to the dead one's, which nobody would answer at."""
    http = Http()
    lifetimes = {http.now.address: http.now}
    legs = LegClient("00" * 32, http=http, worker_at=lambda address: lifetimes[address])  # type: ignore[arg-type, return-value]

    async def ask(request_id: int, generation: str) -> int:
        request = Request(request_id=request_id, token_ids=np.array([3], np.int32), sampling=SamplingParams(1))
        return (await legs.context(SERVER, request, generation)).first_token

    assert [await ask(1, "g1"), await ask(2, "g1")] == [7, 7] and http.asked == 1
    dead, http.now = http.now, Lifetime(2)
    lifetimes = {http.now.address: http.now}
    waiting = asyncio.create_task(ask(3, "g1"))
    dead.answered.put_nowait(None)
    with pytest.raises(LegError):
        while True:
            await waiting
            waiting = asyncio.create_task(ask(4, "g1"))
    assert await ask(5, "g1") == 7 and http.asked == 2
    assert await ask(6, "g2") == 7 and http.asked == 2
    await legs.close()
