"""The pure directory, step by step: each rule of its theory, exact effects, and unchanged state on refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import (
    ConfigError,
    DirectoryClosed,
    DirectoryConfig,
    Draining,
    EndpointDirectory,
    EndpointRecord,
    Load,
    LocalProtocolError,
    NoServer,
    NotReady,
    Overloaded,
    RecordInvalid,
    RefreshFailed,
    ReservationError,
    ReservationState,
    ServerGone,
    ServerStatus,
    StaleGeneration,
    Ticket,
)

MakeRecord = Callable[..., EndpointRecord]
A, B = "http://a:1", "http://b:1"


def started(directory: EndpointDirectory, server: str, now_s: float = 0.0, **kwargs: Any) -> tuple[Any, Any]:
    """Join a refresh that starts a flight, and let its first attempt leave."""
    ticket, effects = directory.join(server, now_s, **kwargs)
    assert isinstance(ticket, Ticket)
    (flight,) = effects.start
    directory.fetch_began(flight, now_s)
    return ticket, flight


def ready(directory: EndpointDirectory, server: str, record: EndpointRecord, now_s: float = 0.0) -> None:
    directory.add_server(server, record.role, now_s)
    _, flight = started(directory, server, now_s)
    directory.fetch_succeeded(flight, record, now_s)
    assert directory.status(server) is ServerStatus.READY


@pytest.fixture
def directory() -> Any:
    directory = EndpointDirectory(DirectoryConfig())
    yield directory
    directory.validate()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempt_timeout_s", 0),
        ("total_timeout_s", -1),
        ("attempts", 0),
        ("concurrent_fetches", 0),
        ("waiters_max", 0),
        ("payload_bytes_max", 10),
        ("negative_ttl_s", 0.2),
        ("reservation_ttl_s", 0),
        ("reservations_max", 0),
        ("probe_first_s", 5.0),
        ("probe_ready_s", 0),
        ("probe_failures_max", 0),
    ],
)
def test_configuration_out_of_range_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DirectoryConfig(**{field: value})
    assert caught.value.field == field


# -- joining ------------------------------------------------------------------------------------------------------------


def test_joining_callers_share_one_flight(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    directory.add_server(A, "context", 0.0)
    first, flight = started(directory, A)
    others = [directory.join(A, 0.1) for _ in range(49)]
    assert all(not effects.start for _, effects in others)
    effects = directory.fetch_succeeded(flight, make_record(), 0.3)
    assert [ticket for ticket, _ in effects.resolved] == [first, *(ticket for ticket, _ in others)]
    assert directory.statistics().fetches == 1
    _, again = directory.join(A, 0.4)
    assert len(again.start) == 1  # the slot was cleared: a later call fetches anew


def test_stale_prover_is_not_given_the_value_it_proved_stale(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    """The fetch began before the proof and brings g1: who proved g1 stale waits for another fetch, the other is served."""
    ready(directory, A, make_record("g1"))
    plain, flight = started(directory, A, 1.0)
    prover, effects = directory.join(A, 1.1, proven_stale="g1")
    assert isinstance(prover, Ticket) and not effects.start
    effects = directory.fetch_succeeded(flight, make_record("g1"), 1.2)
    assert [ticket for ticket, _ in effects.resolved] == [plain]
    assert directory.statistics().stale_joins_refused == 1
    (second,) = effects.start
    directory.fetch_began(second, 1.3)
    effects = directory.fetch_succeeded(second, make_record("g2"), 1.4)
    assert [(t, r.generation) for t, r in effects.resolved] == [(prover, "g2")]
    assert directory.record(A) == make_record("g2")


def test_stale_prover_accepts_another_generation_from_an_earlier_fetch(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    ready(directory, A, make_record("g1"))
    _, flight = started(directory, A, 1.0)
    prover, _ = directory.join(A, 1.1, proven_stale="g1")
    effects = directory.fetch_succeeded(flight, make_record("g2"), 1.2)
    assert prover in [ticket for ticket, _ in effects.resolved]
    assert not effects.start


def test_stale_prover_accepts_the_same_generation_from_a_later_fetch(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    """The server itself says so, after the proof: the proof was wrong or raced. No loop of fetches follows."""
    ready(directory, A, make_record("g1"))
    prover, flight = started(directory, A, 1.0, proven_stale="g1")
    effects = directory.fetch_succeeded(flight, make_record("g1"), 1.2)
    assert [ticket for ticket, _ in effects.resolved] == [prover]
    assert directory.status(A) is ServerStatus.READY


def test_late_prover_is_answered_from_the_cache(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    """The slot has moved on: a hundred requests that failed at g1 cost no second fetch."""
    ready(directory, A, make_record("g1"))
    _, flight = started(directory, A, 1.0, proven_stale="g1")
    directory.fetch_succeeded(flight, make_record("g2"), 1.1)
    before = directory.statistics().fetches
    for _ in range(100):
        record, effects = directory.join(A, 1.2, proven_stale="g1")
        assert isinstance(record, EndpointRecord) and record.generation == "g2"
        assert not effects.start
    assert directory.statistics().fetches == before


def test_proof_takes_the_server_out_of_the_pick_set(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    ready(directory, A, make_record("g1"))
    reservation = directory.reserve("context", 1, 1.0)
    _, flight = started(directory, A, 1.0, proven_stale="g1")
    with pytest.raises(NoServer):
        directory.reserve("context", 2, 1.0)
    with pytest.raises(StaleGeneration):
        directory.dispatched(reservation, 1.0)
    directory.fetch_succeeded(flight, make_record("g2"), 1.1)
    assert directory.rebind(reservation, 1.1).generation == "g2"
    directory.dispatched(reservation, 1.1)
    assert directory.release(reservation)


def test_waiters_are_bounded(make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig(waiters_max=2))
    directory.add_server(A, "context", 0.0)
    directory.join(A, 0.0)
    directory.join(A, 0.0)
    with pytest.raises(Overloaded):
        directory.join(A, 0.0)
    assert directory.statistics().waiters == 2


def test_leaving_waiter_touches_no_other(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    directory.add_server(A, "context", 0.0)
    first, flight = started(directory, A)
    second, _ = directory.join(A, 0.0)
    assert isinstance(second, Ticket)
    assert not directory.leave(first).cancel
    assert not directory.leave(first).cancel
    effects = directory.fetch_succeeded(flight, make_record(), 0.1)
    assert [ticket for ticket, _ in effects.resolved] == [second]


@pytest.mark.parametrize("cancel_unwatched", [False, True])
def test_last_waiter_leaving_ends_the_fetch_only_if_configured(cancel_unwatched: bool, make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig(cancel_unwatched=cancel_unwatched))
    directory.add_server(A, "context", 0.0)
    ticket, flight = started(directory, A)
    effects = directory.leave(ticket)
    assert bool(effects.cancel) is cancel_unwatched
    directory.fetch_succeeded(flight, make_record(), 0.1)
    assert (directory.record(A) is None) is cancel_unwatched
    directory.validate()


# -- failing ------------------------------------------------------------------------------------------------------------


def test_attempts_and_time_bound_a_flight(directory: EndpointDirectory) -> None:
    directory.add_server(A, "context", 0.0)
    ticket, flight = started(directory, A)
    assert directory.fetch_failed(flight, OSError("no"), 0.1).retry_in_s
    directory.fetch_began(flight, 0.2)
    assert directory.fetch_failed(flight, OSError("no"), 0.3).retry_in_s
    directory.fetch_began(flight, 0.4)
    effects = directory.fetch_failed(flight, OSError("no"), 0.5)
    assert effects.retry_in_s is None
    ((failed, error),) = effects.failed
    assert failed is ticket
    assert isinstance(error, RefreshFailed) and error.attempts == 3 and isinstance(error.__cause__, OSError)
    assert flight.ended


def test_no_retry_is_begun_that_would_pass_the_deadline(directory: EndpointDirectory) -> None:
    directory.add_server(A, "context", 0.0)
    _, flight = started(directory, A)
    assert directory.fetch_failed(flight, OSError("no"), 2.99).retry_in_s is None


def test_error_is_cached_for_a_tenth_of_a_second_and_no_longer(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.add_server(A, "context", 0.0)
    _, flight = started(directory, A)
    directory.flight_expired(flight, 3.0)
    with pytest.raises(RefreshFailed):
        directory.join(A, 3.05)
    assert directory.statistics().negative_hits == 1
    ticket, effects = directory.join(A, 3.1)
    assert isinstance(ticket, Ticket) and effects.start


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"<html>", RecordInvalid),
        (
            {"role": "context", "owner_id": "c", "instance_id": "i", "state": "estimating", "ready": False},
            NotReady,
        ),
    ],
)
def test_invalid_answer_ends_the_flight_at_once_and_takes_the_server_out(
    payload: Any, kind: type[Exception], directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    ready(directory, A, make_record())
    ticket, flight = started(directory, A, 1.0)
    effects = directory.fetch_succeeded(flight, payload, 1.1)
    ((failed, error),) = effects.failed
    assert failed is ticket and isinstance(error, kind)
    assert directory.status(A) is ServerStatus.UNPREPARED
    assert directory.ready_count("context") == 0


def test_other_role_or_owner_than_asked_for_is_refused(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    directory.add_server(A, "context", 0.0, owner_id="ctx-0")
    for record in (make_record(role="generation"), make_record(owner_id="ctx-9")):
        _, flight = started(directory, A, directory.statistics().fetches * 1.0)
        ((_, error),) = directory.fetch_succeeded(flight, record, 0.0).failed
        assert isinstance(error, RecordInvalid)
    assert directory.record(A) is None


def test_one_failed_check_does_not_take_a_ready_server_out_but_two_do(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    ready(directory, A, make_record())
    for number, status in ((1, ServerStatus.READY), (2, ServerStatus.UNPREPARED)):
        (flight,) = directory.probe(A, number * 10.0).start
        directory.fetch_began(flight, number * 10.0)
        directory.flight_expired(flight, number * 10.0 + 3)
        assert directory.status(A) is status


# -- applying -----------------------------------------------------------------------------------------------------------


def test_result_is_dropped_when_the_slot_changed_during_the_fetch(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.add_server(A, "context", 0.0)
    ticket, flight = started(directory, A)
    directory.apply_set(A, make_record("g2"), 0.1)
    effects = directory.fetch_succeeded(flight, make_record("g1"), 0.2)
    assert [(t, r.generation) for t, r in effects.resolved] == [(ticket, "g2")]
    assert directory.record(A) == make_record("g2")
    assert directory.statistics().results_dropped == 1


def test_registration_answers_waiting_provers_at_once(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    ready(directory, A, make_record("g1"))
    prover, _ = started(directory, A, 1.0, proven_stale="g1")
    effects = directory.apply_set(A, make_record("g2"), 1.1)
    assert [ticket for ticket, _ in effects.resolved] == [prover]


def test_removed_server_cancels_its_fetch_and_tells_waiters(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.add_server(A, "context", 0.0)
    ticket, flight = started(directory, A)
    effects = directory.remove_server(A, 0.1)
    assert effects.cancel == [flight]
    ((failed, error),) = effects.failed
    assert failed is ticket and isinstance(error, ServerGone)
    late = directory.fetch_succeeded(flight, make_record(), 0.2)
    assert not late.resolved and not late.roles
    directory.add_server(A, "context", 0.3)
    assert directory.record(A) is None
    with pytest.raises(ServerGone):
        directory.remove_server(B, 0.0)


def test_same_generation_with_another_record_is_refused(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    """Endpoint, generation and profile belong together: a second version of one generation is a fault of its publisher."""
    ready(directory, A, make_record("g1"))
    other = make_record("g1", control_addresses=("tcp://10.0.0.9:1",))
    _, flight = started(directory, A, 1.0)
    ((_, error),) = directory.fetch_succeeded(flight, other, 1.1).failed
    assert isinstance(error, RecordInvalid) and error.field == "generation"
    with pytest.raises(RecordInvalid):
        directory.apply_set(A, other, 1.2)
    assert directory.record(A) == make_record("g1")


def test_epoch_rises_with_every_lifetime_over_all_servers(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    seen = []
    for number in range(5):
        directory.apply_set(A, make_record(f"a{number}"), float(number))
        directory.apply_set(B, make_record(f"b{number}"), float(number))
        seen += sorted(view.epoch for view in directory.audit(0.0).servers)
        if number == 2:
            directory.remove_server(A, 2.5)
    assert seen == sorted(seen) and len(set(seen)) == len(seen)


# -- superseding --------------------------------------------------------------------------------------------------------


def test_new_generation_supersedes_at_once_and_late_deletes_are_ignored(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    old = directory.reserve("context", 1, 0.0, weight=5)
    directory.apply_set(A, make_record("g2"), 1.0)
    assert directory.load(A) == Load(0, 0)
    assert directory.load(A, "g1") == Load(1, 5)
    directory.apply_delete(A, "g1", 2.0)
    assert directory.servers() == (A,)
    new = directory.reserve("context", 2, 2.0, weight=3)
    assert new.generation == "g2"
    assert directory.release(old)
    assert directory.load(A) == Load(1, 3)
    with pytest.raises(StaleGeneration):
        directory.resolve("g1")
    directory.apply_delete(A, "g2", 3.0)
    assert directory.servers() == ()
    assert directory.release(new)
    assert directory.statistics().load_weight == 0


def test_late_registration_of_a_superseded_generation_is_ignored(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    directory.apply_set(A, make_record("g2"), 1.0)
    directory.apply_set(A, make_record("g1"), 2.0)
    assert directory.record(A) == make_record("g2")
    assert directory.statistics().sets_ignored == 1


def test_server_itself_is_believed_over_discovery(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    """A fetch that began later brings back a generation that discovery had replaced: what answers there is what is there."""
    directory.apply_set(A, make_record("g2"), 0.0)
    directory.apply_set(A, make_record("g-lagging"), 1.0)
    _, flight = started(directory, A, 2.0, proven_stale="g-lagging")
    directory.fetch_succeeded(flight, make_record("g2"), 2.1)
    assert directory.record(A) == make_record("g2")
    assert directory.resolve("g2") == make_record("g2")


def test_instance_that_moved_is_resolved_at_its_new_place(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    directory.apply_set(B, make_record("g1"), 1.0)
    assert directory.server_of("g1") == B
    directory.remove_server(A, 2.0)
    assert directory.server_of("g1") == B


# -- draining -----------------------------------------------------------------------------------------------------------


def test_draining_server_is_resolved_and_not_picked(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    running = directory.reserve("context", 1, 0.0)
    directory.dispatched(running, 0.0)
    waiting = directory.reserve("context", 2, 0.0)
    directory.apply_set(A, make_record("g1", state="draining"), 1.0)
    with pytest.raises(NoServer, match="1 draining"):
        directory.reserve("context", 3, 1.0)
    with pytest.raises(Draining):
        directory.dispatched(waiting, 1.0)
    with pytest.raises(Draining):
        directory.rebind(waiting, 1.0)
    assert directory.resolve("g1").state == "draining"
    assert directory.renew(running, 1.0)
    directory.apply_set(A, make_record("g1"), 2.0)  # late: draining is one way
    assert directory.status(A) is ServerStatus.DRAINING
    directory.apply_set(A, make_record("g2"), 3.0)
    assert directory.status(A) is ServerStatus.READY
    assert directory.release(running) and directory.release(waiting)


def test_draining_by_the_operator_lasts_for_the_lifetime(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    ready(directory, A, make_record("g1"))
    directory.start_draining(A)
    _, flight = started(directory, A, 1.0)
    directory.fetch_succeeded(flight, make_record("g1"), 1.1)
    assert directory.status(A) is ServerStatus.DRAINING
    _, flight = started(directory, A, 2.0)
    directory.fetch_succeeded(flight, make_record("g2"), 2.1)
    assert directory.status(A) is ServerStatus.READY


# -- reserving ----------------------------------------------------------------------------------------------------------


def test_least_loaded_is_picked_and_equal_ones_take_turns(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    for name in "abc":
        directory.apply_set(name, make_record(f"g-{name}"), 0.0)
    assert [directory.reserve("context", n, 0.0, weight=1).server for n in range(6)] == list("abcabc")
    heavy = directory.reserve("context", 7, 0.0, weight=100)
    picks = {directory.reserve("context", 10 + n, 0.0).server for n in range(20)}
    assert heavy.server not in picks


def test_same_key_replaces_in_one_step(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    first = directory.reserve("context", 1, 0.0, weight=5)
    second = directory.reserve("context", 1, 0.0, weight=7)
    assert (first.state, first.reason) == (ReservationState.RELEASED, "replaced")
    assert directory.load(A) == Load(1, 7)
    assert not directory.release(first)
    assert directory.release(second)
    with pytest.raises(ReservationError):
        directory.dispatched(first, 0.0)


def test_refused_reservation_changes_nothing(make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig(reservations_max=1))
    with pytest.raises(NoServer, match="none is known"):
        directory.reserve("context", 1, 0.0)
    directory.apply_set(A, make_record("g1"), 0.0)
    for weight in (-1, 1.5, True):
        with pytest.raises(LocalProtocolError):
            directory.reserve("context", 1, 0.0, weight=weight)  # type: ignore[arg-type]
    with pytest.raises(NoServer, match="excluded"):
        directory.reserve("context", 1, 0.0, exclude={A})
    directory.reserve("context", 1, 0.0)
    with pytest.raises(Overloaded):
        directory.reserve("context", 2, 0.0)
    directory.reserve("context", 1, 0.0)  # its own key is replaced, not added
    assert directory.load(A) == Load(1, 1)
    directory.validate()


def test_policy_sees_loads_and_must_return_a_candidate(make_record: MakeRecord) -> None:
    seen: list[Any] = []

    def policy(candidates: Any, request: Any) -> Any:
        seen.append(([(c.server, c.count, c.weight, c.record.generation) for c in candidates], request.affinity))
        return next(c for c in candidates if c.server == request.affinity)

    directory = EndpointDirectory(DirectoryConfig(), policy=policy)
    directory.apply_set(A, make_record("ga"), 0.0)
    directory.apply_set(B, make_record("gb"), 0.0)
    assert directory.reserve("context", 1, 0.0, weight=4, affinity=B).server == B
    assert directory.reserve("context", 2, 0.0, affinity=B).server == B
    assert seen[1] == ([(A, 0, 0, "ga"), (B, 1, 4, "gb")], B)
    bad = EndpointDirectory(DirectoryConfig(), policy=lambda candidates, request: "x")  # type: ignore[arg-type,return-value]
    bad.apply_set(A, make_record("ga"), 0.0)
    with pytest.raises(LocalProtocolError):
        bad.reserve("context", 1, 0.0)
    bad.validate()


def test_expiry_is_a_backstop_that_renewal_puts_off(make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig(reservation_ttl_s=10.0))
    directory.apply_set(A, make_record("g1"), 0.0)
    kept = directory.reserve("context", 1, 0.0)
    lost = directory.reserve("context", 2, 1.0)
    assert directory.renew(kept, 8.0)
    assert directory.expire(10.9) == ([], 11.0)
    assert directory.expire(11.0) == ([lost], 18.0)
    assert lost.state is ReservationState.EXPIRED
    assert not directory.release(lost)
    assert not directory.renew(lost, 11.0)
    assert directory.release(kept)
    assert directory.expire(100.0) == ([], float("inf"))
    statistics = directory.statistics()
    assert (statistics.reservations_expired, statistics.load_weight) == (1, 0)
    directory.validate()


def test_load_follows_a_server_that_went_and_came_back(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    """The same lifetime returns after a blip of discovery: its running requests still count on it."""
    directory.apply_set(A, make_record("g1"), 0.0)
    held = [directory.reserve("context", n, 0.0) for n in range(3)]
    directory.remove_server(A, 1.0)
    assert directory.load(A, "g1") == Load(3, 3)
    directory.apply_set(A, make_record("g1"), 2.0)
    assert directory.load(A) == Load(3, 3)
    for count, reservation in zip((2, 1, 0), held, strict=True):
        assert directory.release(reservation)
        assert directory.load(A) == Load(count, count)
        directory.validate()


def test_unreachable_server_is_out_until_a_probe_answers(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    ready(directory, A, make_record("g1"))
    reservation = directory.reserve("context", 1, 1.0)
    directory.unreachable(A, "g-other", 1.0)
    assert directory.status(A) is ServerStatus.READY
    directory.unreachable(A, "g1", 1.0)
    with pytest.raises(NotReady):
        directory.dispatched(reservation, 1.0)
    assert directory.due_probes(1.0) == ((A,), float("inf"))
    (flight,) = directory.probe(A, 1.0).start
    directory.fetch_began(flight, 1.0)
    directory.fetch_succeeded(flight, make_record("g2"), 1.1)
    assert directory.rebind(reservation, 1.2).generation == "g2"
    assert directory.release(reservation)


def test_dispatch_is_refused_to_whatever_is_not_the_live_lifetime(
    directory: EndpointDirectory, make_record: MakeRecord
) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    reservation = directory.reserve("context", 1, 0.0)
    directory.apply_set(A, make_record("g2"), 0.1)
    with pytest.raises(StaleGeneration):
        directory.dispatched(reservation, 0.2)
    directory.remove_server(A, 0.3)
    with pytest.raises(ServerGone):
        directory.dispatched(reservation, 0.4)
    with pytest.raises(ServerGone):
        directory.rebind(reservation, 0.4)
    assert directory.release(reservation)


def test_probes_back_off_while_a_server_stays_away() -> None:
    directory = EndpointDirectory(DirectoryConfig(attempts=1), random=lambda: 1.0)
    directory.add_server(A, "context", 0.0)
    now_s, waits = 0.0, []
    for _ in range(6):
        (flight,) = directory.probe(A, now_s).start
        directory.fetch_began(flight, now_s)
        directory.fetch_failed(flight, OSError("refused"), now_s)
        due, next_s = directory.due_probes(now_s)
        assert due == ()
        waits.append(round(next_s - now_s, 3))
        now_s = next_s
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_closed_directory_answers_everybody_and_holds_nothing(make_record: MakeRecord) -> None:
    directory = EndpointDirectory(DirectoryConfig())
    directory.apply_set(A, make_record("g1"), 0.0)
    directory.add_server(B, "context", 0.0)
    reservation = directory.reserve("context", 1, 0.0)
    ticket, flight = started(directory, B)
    effects = directory.close()
    assert effects.cancel == [flight] and [t for t, _ in effects.failed] == [ticket]
    assert effects.released == [reservation] and reservation.reason == "shutdown"
    for call in (
        lambda: directory.reserve("context", 2, 0.0),
        lambda: directory.join(A, 0.0),
        lambda: directory.add_server("c", "context", 0.0),
        lambda: directory.apply_set(A, make_record("g1"), 0.0),
    ):
        with pytest.raises(DirectoryClosed):
            call()
    assert not directory.close().released
    assert not directory.release(reservation)
    assert directory.statistics().load_weight == 0
    directory.validate()


def test_audit_names_a_counter_that_drifted(make_record: MakeRecord) -> None:
    """The audit recounts: a load that was tampered with does not pass."""
    directory = EndpointDirectory(DirectoryConfig())
    directory.apply_set(A, make_record("g1"), 0.0)
    directory.reserve("context", 1, 0.0, weight=2)
    assert directory.audit(1.0).faults == ()
    (view,) = directory.audit(1.5).reservations
    assert (view.age_s, view.expires_in_s, view.weight) == (1.5, 178.5, 2)
    directory._slots[A].load.weight -= 1
    assert directory.audit(1.0).faults
    with pytest.raises(AssertionError):
        directory.validate()


def test_story_tells_what_happened_to_a_server(directory: EndpointDirectory, make_record: MakeRecord) -> None:
    directory.apply_set(A, make_record("g1"), 0.0)
    directory.apply_set(A, make_record("g2"), 1.0)
    directory.apply_delete(A, "g1", 2.0)
    assert [entry.event for entry in directory.story(A)] == [
        "added",
        "applied (set)",
        "applied (set)",
        "late delete ignored",
    ]


def test_adding_under_another_role_is_refused(directory: EndpointDirectory) -> None:
    directory.add_server(A, "context", 0.0)
    directory.add_server(A, "context", 1.0)
    with pytest.raises(LocalProtocolError):
        directory.add_server(A, "generation", 1.0)
    with pytest.raises(LocalProtocolError):
        directory.add_server("", "context", 1.0)
