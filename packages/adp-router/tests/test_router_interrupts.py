"""An exception before any bytecode of a call: the router made the call, or did not."""

import sys

import pytest

from adp_router import RankState, Router, RouterConfig, RouteRequest


def interrupts(body, *, every):
    """Run a body again and again, with an interrupt at one bytecode of this package each time; stop when none is left.

    Args:
        body: Called with a function that it is to run under the interrupt.
        every: Distance of the bytecodes tried.
    """
    point = 0
    done = False
    while not done:
        point += every
        count = 0

        def trace(frame, event, arg, point=point):
            nonlocal count
            if "adp_router/_" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                count += 1
                if count == point:
                    raise KeyboardInterrupt
            return trace

        def shielded(step):
            nonlocal done
            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
            sys.settrace(trace)
            try:
                step()
                done = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)

        body(shielded)
    return point // every


def busy_call(number):
    """Targets, starving ones, conversations new and old, one that fits nowhere now, a rank that drains or comes back."""
    ranks = [
        RankState(0, 5, 1, 2), RankState(1, 0, 0, 4), RankState(2, draining=number % 2 == 0), RankState(3, 9, 2, 0),
    ]  # fmt: skip
    requests = [
        RouteRequest(10 * number + i, 7 + i, 1 if i == 2 else None, child_count=9 * (i == 4), conversation_id=f"c{i + number}",
                     waited_rounds=20 * (i in (3, 4)))
        for i in range(6)
    ]  # fmt: skip
    return requests, ranks


@pytest.mark.parametrize("policy", ["balanced", "round_robin", "prefix", "conversation"])
def test_an_interrupt_at_any_bytecode_leaves_a_call_whole_or_not_made(policy):
    """Afterwards the router is one that made the call, or one that did not: digest, homes and counts, for calls on end."""
    config = RouterConfig(starvation_rounds=3, conversations_max=5)

    def twin(calls):
        router = Router(policy, config=config)
        for number in range(calls):
            router.route(*busy_call(number))
        return router

    def story(router):
        found = [router.statistics(), [router.home_of(f"c{i}") for i in range(12)]]
        return found + [router.route(*busy_call(number)).digest for number in (5, 6, 7)] + [router.statistics()]

    before, after = story(twin(2)), story(twin(3))
    seen = set()

    def body(shielded):
        router = twin(2)
        shielded(lambda: router.route(*busy_call(2)))
        found = story(router)
        assert found in (before, after)
        seen.add(found == after)

    assert interrupts(body, every=53) > 25
    assert seen == {True, False}


def test_an_interrupt_while_homes_are_written_loses_none():
    """The notes of the call before are written by the next one, from the start, however often that is interrupted."""
    plain = Router("conversation", config=RouterConfig(conversations_max=5))
    for number in range(3):
        plain.route(*busy_call(number))
    wanted = [plain.home_of(f"c{i}") for i in range(12)]

    def body(shielded):
        router = Router("conversation", config=RouterConfig(conversations_max=5))
        for number in range(3):
            router.route(*busy_call(number))
        shielded(lambda: router.home_of("c0"))
        assert [router.home_of(f"c{i}") for i in range(12)] == wanted
        assert list(router._memory.homes._table.items()) == list(plain._memory.homes._table.items())

    assert interrupts(body, every=3) > 20
