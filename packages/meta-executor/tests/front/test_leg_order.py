"""The order of context legs: arrival, or whole groups turned round for trials."""

from __future__ import annotations

import asyncio

import pytest

from meta_executor.front.order import LegOrder

pytestmark = pytest.mark.asyncio


async def sent_in(order: LegOrder, count: int) -> list[int]:
    sent: list[int] = []

    async def leg(number: int) -> None:
        await order.turn()
        sent.append(number)

    async with asyncio.timeout(20):
        await asyncio.gather(*(leg(number) for number in range(count)))
    return sent


async def test_one_keeps_the_order_of_arrival() -> None:
    """The default waits for nobody."""
    assert await sent_in(LegOrder(1, patience_s=1000), 5) == [0, 1, 2, 3, 4]


async def test_full_groups_are_turned_round() -> None:
    """Of each group the last goes first."""
    order = LegOrder(3, patience_s=1000)
    assert await sent_in(order, 3) == [2, 1, 0]
    sent = await sent_in(order, 6)
    assert [leg for leg in sent if leg < 3] == [2, 1, 0]
    assert [leg for leg in sent if leg >= 3] == [5, 4, 3]


async def test_a_group_that_does_not_fill_goes_after_its_patience() -> None:
    """Nobody waits for ever for a group's last member."""
    assert await sent_in(LegOrder(4, patience_s=0.02), 2) == [1, 0]


async def test_a_cancelled_leg_gives_its_place_up() -> None:
    """The others of its group still go, each once."""
    order = LegOrder(3, patience_s=1000)
    gone = asyncio.create_task(order.turn())
    await asyncio.sleep(0)
    gone.cancel()
    assert await sent_in(order, 2) == [1, 0]
