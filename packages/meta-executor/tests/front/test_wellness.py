"""What instances say of their health is asked again and again, and decides with the directory whether a role can be served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meta_executor.front import wellness
from meta_executor.front.wellness import Wellness


class Directory:
    """Two instances of one role."""

    can_pick = True

    def servers(self, role: str | None = None) -> tuple[str, ...]:
        return ("a", "b") if role in (None, "context") else ()

    def ready(self, **minimum: int) -> bool:
        return self.can_pick


class Legs:
    """Answers of instances; an exception stands for one that is none."""

    def __init__(self) -> None:
        self.says = {"a": "", "b": ""}
        self.asked = 0

    async def condition(self, server: str) -> str:
        self.asked += 1
        return self.says[server]


@pytest.mark.asyncio
async def test_a_role_is_served_while_one_of_its_instances_is_well() -> None:
    """And only while the directory would pick one."""
    directory, legs = Directory(), Legs()
    followed: Any = Wellness(directory, legs)  # type: ignore[arg-type]
    await followed.ask()
    assert followed.serves("context") and followed.unwell == {} and not followed.serves("generation")
    legs.says["a"] = "rank 1 was not heard for 7 s"
    await followed.ask()
    assert followed.serves("context") and followed.unwell == {"a": "rank 1 was not heard for 7 s"}
    legs.says["b"] = "no answer"
    await followed.ask()
    assert not followed.serves("context")
    legs.says["a"] = ""
    await followed.ask()
    assert followed.serves("context")
    directory.can_pick = False
    assert not followed.serves("context")


@pytest.mark.asyncio
async def test_it_is_asked_again_and_again_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on afterwards."""
    monkeypatch.setattr(wellness, "ASK_EVERY_S", 0.001)
    legs = Legs()
    followed = Wellness(Directory(), legs)  # type: ignore[arg-type]
    async with followed.followed():
        while legs.asked < 6:
            await asyncio.sleep(0.001)
    asked = legs.asked
    await asyncio.sleep(0.02)
    assert legs.asked == asked
