"""The explorer itself: it finds the asyncio mistakes that this package is built to avoid, and is complete or says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from endpoint_lifecycle import LocalProtocolError
from endpoint_lifecycle.testing import (
    Deadlock,
    ExplorationLimit,
    Explorer,
    FakeClock,
    Scenario,
    ScheduleFailed,
    StepLimit,
    cancel_target,
    explore,
    explore_faults,
    fire_timer,
    run_virtual,
)


def test_virtual_time_costs_nothing_and_is_exact() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return loop.time() - started_s

    assert run_virtual(main()) == 7205


def test_all_orders_of_three_tasks_are_run() -> None:
    orders: set[tuple[int, ...]] = set()

    def make() -> Scenario:
        order: list[int] = []

        async def one(number: int) -> None:
            order.append(number)

        async def main(explorer: Explorer) -> None:
            tasks = [explorer.loop.create_task(one(n)) for n in range(3)]
            for task in tasks:
                await task
            orders.add(tuple(order))

        return Scenario(main)

    report = explore(make)
    assert len(orders) == 6
    assert report.runs >= 6


def test_choices_of_the_scenario_are_all_tried() -> None:
    seen: set[tuple[str, int]] = set()

    def make() -> Scenario:
        async def main(explorer: Explorer) -> None:
            seen.add((explorer.choose("a", "b"), explorer.choose(1, 2, 3)))

        return Scenario(main)

    assert explore(make).runs == 6
    assert len(seen) == 6
    seen.clear()
    explore_faults(make, [[]])
    assert len(seen) == 6


def test_lost_update_is_found_and_its_schedule_repeats_it() -> None:
    """Read, await, write: the classical race. Some order loses an update; the schedule in the error makes it again."""

    def make() -> Scenario:
        box = {"value": 0}

        async def add() -> None:
            value = box["value"]
            await asyncio.sleep(0)
            box["value"] = value + 1

        async def main(explorer: Explorer) -> None:
            tasks = [explorer.loop.create_task(add()) for _ in range(2)]
            for task in tasks:
                await task
            assert box["value"] == 2

        return Scenario(main)

    with pytest.raises(ScheduleFailed) as caught:
        explore(make)
    with pytest.raises(ScheduleFailed) as again:
        explore(make, schedule=caught.value.schedule)
    assert again.value.schedule == caught.value.schedule


def release_in(kind: str) -> Any:
    """A release written the wrong way (``except Exception``) or the right one (``finally``)."""

    def make() -> Scenario:
        books = {"held": 0}

        async def wrong() -> None:
            books["held"] += 1
            try:
                await asyncio.sleep(1)
            except Exception:
                books["held"] -= 1
                raise
            books["held"] -= 1

        async def right() -> None:
            books["held"] += 1
            try:
                await asyncio.sleep(1)
            finally:
                books["held"] -= 1

        async def main(explorer: Explorer) -> None:
            await asyncio.gather(explorer.aim(wrong() if kind == "wrong" else right()), return_exceptions=True)
            assert books["held"] == 0

        return Scenario(main, {"cancel": cancel_target})

    return make


def test_release_in_except_exception_is_found() -> None:
    explore_faults(release_in("right"), [["cancel"], ["cancel", "cancel"]])
    with pytest.raises(ScheduleFailed) as caught:
        explore_faults(release_in("wrong"), [["cancel"]])
    assert caught.value.plan[0][1] == "cancel"


def test_awaited_cleanup_lost_to_a_second_cancel_is_found() -> None:
    """One cancel is survived; only the pair shows the fault."""

    def make() -> Scenario:
        books = {"held": 0}

        async def request() -> None:
            books["held"] += 1
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                await asyncio.sleep(0.01)
                books["held"] -= 1
                raise
            books["held"] -= 1

        async def main(explorer: Explorer) -> None:
            await asyncio.gather(explorer.aim(request()), return_exceptions=True)
            assert books["held"] == 0

        return Scenario(main, {"cancel": cancel_target})

    explore_faults(make, [["cancel"]])
    with pytest.raises(ScheduleFailed):
        explore_faults(make, [["cancel", "cancel"]])


def test_task_that_was_cancelled_before_its_first_step_is_tried() -> None:
    def make() -> Scenario:
        books = {"held": 1}

        async def request() -> None:
            try:
                await asyncio.sleep(1)
            finally:
                books["held"] = 0

        async def main(explorer: Explorer) -> None:
            await asyncio.gather(explorer.aim(request()), return_exceptions=True)
            assert books["held"] == 0

        return Scenario(main, {"cancel": cancel_target})

    with pytest.raises(ScheduleFailed) as caught:
        explore_faults(make, [["cancel"]])
    assert caught.value.points == ["(not started)"]


def test_tasks_left_behind_and_untaken_errors_fail_a_run() -> None:
    def leaving() -> Scenario:
        async def main(explorer: Explorer) -> None:
            explorer.loop.create_task(asyncio.sleep(10), name="forgotten")

        return Scenario(main)

    with pytest.raises(ScheduleFailed) as caught:
        explore(leaving)
    assert "forgotten" in str(caught.value.__cause__)

    def raising() -> Scenario:
        async def main(explorer: Explorer) -> None:
            explorer.loop.call_soon(lambda: 1 / 0)
            await asyncio.sleep(0)

        return Scenario(main)

    with pytest.raises(ScheduleFailed) as caught:
        explore(raising)
    assert "division" in str(caught.value.__cause__)


def test_deadlock_and_spinning_are_verdicts() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtual(stuck())

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StepLimit):
        run_virtual(spin(), steps_max=1000)


def test_incomplete_exploration_is_an_error() -> None:
    def make() -> Scenario:
        async def main(explorer: Explorer) -> None:
            for _ in range(10):
                explorer.choose(*range(10))

        return Scenario(main)

    with pytest.raises(ExplorationLimit):
        explore(make, runs_max=50)
    with pytest.raises(ExplorationLimit):
        explore_faults(make, [[]], runs_max=50)


def test_scenario_that_is_not_deterministic_is_refused() -> None:
    count = {"runs": 0}

    def make() -> Scenario:
        count["runs"] += 1
        options = 3 if count["runs"] <= 2 else 2

        async def main(explorer: Explorer) -> None:
            explorer.choose(*range(options))

        return Scenario(main)

    with pytest.raises(ScheduleFailed) as caught:
        explore(make)
    assert isinstance(caught.value.__cause__, LocalProtocolError)


def test_timers_can_be_fired_while_others_are_ready() -> None:
    """A deadline may pass at any moment, not only when nothing else is to be done."""
    outcomes: set[str] = set()

    def make() -> Scenario:
        async def request() -> str:
            try:
                async with asyncio.timeout(5):
                    for _ in range(3):
                        await asyncio.sleep(0)
            except TimeoutError:
                return "timeout"
            return "done"

        async def main(explorer: Explorer) -> None:
            outcomes.add(await explorer.aim(request()))

        return Scenario(main, {"timeout": fire_timer})

    explore_faults(make, [["timeout"]])
    assert outcomes == {"timeout", "done"}


def test_generators_left_half_way_are_closed() -> None:
    closed: list[bool] = []

    async def main() -> None:
        async def items() -> Any:
            try:
                yield 1
                yield 2
            finally:
                closed.append(True)

        generator = items()
        await anext(generator)
        main.kept = generator  # type: ignore[attr-defined]

    run_virtual(main())
    assert closed == [True]


def test_clock_moves_when_told() -> None:
    clock = FakeClock(5.0)
    assert clock() == 5.0
    assert clock.advance(1.5) == clock() == 6.5
    with pytest.raises(LocalProtocolError):
        clock.advance(-1)
