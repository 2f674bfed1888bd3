"""Processes of peers are looked for while their link is away, and an instance without any is told."""

from __future__ import annotations

from kv_bounce_planner.planning import KVTransferError
from kv_bounce_planner.sessions import PeerId
from meta_executor.executor.peer_watch import LOOK_EVERY_S, PeerWatch

ONE, TWO, OTHER = PeerId("a", "g", 0), PeerId("a", "g", 1), PeerId("b", "g", 0)


def test_a_process_is_looked_for_while_its_link_is_away() -> None:
    """Not before, not any more when the link is back, and not again at once."""
    asked: list[str] = []
    gone: set[str] = set()

    def is_gone(process: str) -> bool:
        asked.append(process)
        return process in gone

    watch = PeerWatch(is_gone)
    watch.know(ONE, "p1")
    gone.add("p1")
    assert watch.ended(1.0) == [] and asked == [] and not watch.looking
    watch.away(ONE, "reset")
    assert watch.looking and watch.away_count == 1
    watch.back(ONE)
    assert watch.ended(1.0) == [] and asked == [] and watch.away_count == 0
    gone.clear()
    watch.away(ONE, "reset")
    assert watch.ended(1.0) == [] and asked == ["p1"]
    gone.add("p1")
    assert watch.ended(1.0 + LOOK_EVERY_S / 2) == [] and asked == ["p1"]
    assert watch.ended(1.0 + LOOK_EVERY_S) == [ONE]
    assert watch.ended(9.0) == [], "told once"


def test_an_instance_is_gone_with_its_last_process() -> None:
    """One process that lives, or that is on another host, keeps it; another instance's end is its own."""
    gone = {"p1", "p3"}
    watch = PeerWatch(gone.__contains__)
    for peer, process in ((ONE, "p1"), (TWO, "p2"), (OTHER, "p3")):
        watch.know(peer, process)
        watch.away(peer, "reset")
    assert watch.ended(1.0) == [ONE, OTHER] and watch.gone == {OTHER.instance}
    gone.add("p2")
    assert watch.ended(2.0) == [TWO] and watch.gone == {ONE.instance, OTHER.instance}
    assert watch.looking
    for instance in (ONE.instance, OTHER.instance):
        watch.forget(instance)
    assert not watch.looking and watch.away_count == 0


def test_a_process_that_nobody_named_proves_nothing() -> None:
    """Its link may be away for ever: nothing to look for."""
    watch = PeerWatch(lambda process: True)
    watch.know(ONE, "")
    watch.away(ONE, "reset")
    assert not watch.looking and watch.ended(1.0) == [] and watch.gone == set()
    watch.forget(ONE.instance)
    assert watch.away_count == 0


def test_an_agent_that_cannot_be_destroyed_now_is_tried_again() -> None:
    """Said in the log; the instance is forgotten once it is retired, and retired no more after that."""
    said: list[str] = []
    asked: list[tuple[str, str]] = []
    errors = [KVTransferError("busy")]

    def retire(instance_id: str, generation: str) -> None:
        asked.append((instance_id, generation))
        if errors:
            raise errors.pop()

    watch = PeerWatch(lambda process: True, said.append)
    watch.know(ONE, "p1")
    watch.away(ONE, "reset")
    assert watch.ended(1.0) == [ONE]
    watch.retire_gone(retire)
    assert watch.gone == {ONE.instance} and watch.looking
    assert "reset" in said[0] and "tried again: busy" in said[1]
    watch.retire_gone(retire)
    assert watch.gone == set() and not watch.looking
    watch.retire_gone(retire)
    assert asked == [ONE.instance, ONE.instance] and len(said) == 2
