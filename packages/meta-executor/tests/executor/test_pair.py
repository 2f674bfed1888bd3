"""Scenarios of two whole instances in one process, with exact effects: schedules, windows, cancels, failures, drains."""

from __future__ import annotations

import numpy as np
import pytest

from kv_bounce_planner.planning import TransportError
from kv_bounce_planner.sessions import PeerId
from kv_bounce_planner.sessions.proof import Evidence, WriteExecutor
from kv_bounce_planner.testing import FakeWorld
from meta_executor.executor import decode
from meta_executor.executor.messages import Status, Stop
from meta_executor.executor.ownership import Outcome, State
from meta_executor.executor.testing import Pair, PairConfig
from meta_executor.executor.transceiver_generation import PUBLISHED_PER_TURN_MAX

PROMPT = [3 + (7 * i) % 900 for i in range(21)]


def make(pairs: list[Pair], config: PairConfig | None = None, **kwargs: object) -> Pair:
    pairs.append(Pair(config or PairConfig(), **kwargs))  # type: ignore[arg-type]
    return pairs[-1]


def start_generation_first(pair: Pair, request_id: int, prompt: list[int] = PROMPT, max_tokens: int = 4) -> None:
    pair.submit_generation(request_id, prompt, max_tokens=max_tokens, style="generation_first")
    pair.submit_context(request_id, prompt, max_tokens=max_tokens, style="generation_first")


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("bounce", [False, True])
@pytest.mark.parametrize("style", ["context_first", "generation_first"])
def test_output_equals_the_reference(pairs: list[Pair], style: str, bounce: bool, reuse: bool) -> None:
    """Both schedules, bounce and prefix cache on and off: tokens equal a whole engine's, token for token."""
    pair = make(pairs, PairConfig(bounce=bounce, reuse=reuse))
    prompts = {i: [*PROMPT[: 8 + 3 * i], 5, i] for i in range(1, 5)}
    for request_id, prompt in prompts.items():
        if style == "context_first":
            assert pair.serve(request_id, prompt, max_tokens=5) == pair.reference(prompt, 5)
        else:
            start_generation_first(pair, request_id, prompt, 5)
            pair.run(lambda r=request_id: bool(pair.generation.finish(r)))
            assert pair.generation.tokens(request_id) == pair.reference(prompt, 5)
    pair.run(pair.idle)
    pair.validate()
    hits = sum(r.blocks.pool.statistics().prefix_hit_tokens for r in pair.generation.ranks)
    assert (hits > 0) == reuse
    bounced = sum(r.transceiver.counters.coalesced for r in pair.generation.ranks)
    assert bounced == 0 if not bounce else bounced >= 0


@pytest.mark.parametrize("style", ["context_first", "generation_first", "alone"])
def test_what_is_told_of_a_prompt_comes_with_its_first_token(pairs: list[Pair], style: str) -> None:
    """Of all its tokens behind the first, from several chunks (on several stages), and although its prefix is in the cache."""
    pair = make(pairs, PairConfig(reuse=True, max_num_tokens=8, generation_ranks=1))
    instance = pair.generation if style == "alone" else pair.context
    for request_id, wanted in ((1, None), (2, 1), (3, 0), (4, None)):
        if style == "alone":
            pair.submit_alone(request_id, PROMPT, prompt_logprobs=wanted)
        elif style == "generation_first":
            pair.submit_generation(request_id, PROMPT, style=style)
            pair.submit_context(request_id, PROMPT, style=style, prompt_logprobs=wanted)
        else:
            pair.submit_context(request_id, PROMPT, max_tokens=1, prompt_logprobs=wanted)
        pair.run(lambda r=request_id: bool(instance.tokens(r)))
        first = instance.answers[request_id][0]
        told = first.prompt_logprobs
        assert len(told) == (0 if wanted is None else len(PROMPT) - 1)
        assert [one.top[0][0] for one in told if one.top] == (PROMPT[1:] if wanted else [])
        assert (first.cached_tokens > 0) == (request_id == 4)
        pair.run(pair.idle)
        assert not any(one.prompt_logprobs for one in instance.answers[request_id][1:])
    pair.validate()


def test_a_cached_prefix_is_not_transferred_again(pairs: list[Pair]) -> None:
    """The second request with the same 16 first tokens moves only what is missing."""
    pair = make(pairs, PairConfig(reuse=True, generation_ranks=1))
    pair.serve(1, PROMPT)
    pair.run(pair.idle)
    (rank,) = pair.generation.ranks
    first = rank.transceiver.counters.bytes_moved
    pair.serve(2, [*PROMPT[:16], 9, 8, 7, 6, 5])
    pair.run(pair.idle)
    second = rank.transceiver.counters.bytes_moved - first
    assert second * 21 == first * 5


def test_one_token_answers_need_no_generation_leg(pairs: list[Pair]) -> None:
    """Context-first with max_tokens 1: the answer ends at the first token and the KV is given back at once."""
    pair = make(pairs)
    assert pair.serve(1, PROMPT, max_tokens=1) == pair.reference(PROMPT, 1)
    assert pair.context.finish(1) == "length"
    pair.run(pair.idle)
    assert [r.agreement.statistics().core.outcomes[0] for r in pair.context.ranks] == [1] * 4


def test_an_iteration_publishes_few_destinations(pairs: list[Pair]) -> None:
    """Requests that come together own blocks over several iterations: no step waits for all their plans."""
    pair = make(pairs, PairConfig(generation_ranks=1))
    (rank,) = pair.generation.ranks
    count = 2 * PUBLISHED_PER_TURN_MAX + 1
    for request_id in range(1, count + 1):
        start_generation_first(pair, request_id)
    opened = []
    while rank.transceiver.counters.opened < count and len(opened) < 50:
        pair.step(rank)
        opened.append(rank.transceiver.counters.opened)
    assert opened[-3:] == [PUBLISHED_PER_TURN_MAX, 2 * PUBLISHED_PER_TURN_MAX, count]
    pair.run(pair.idle)


def test_a_stop_after_the_last_word_changes_nothing(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is complete and its blocks are not back yet: the client hears no second word, and it stays completed."""
    pair = make(pairs, PairConfig(generation_ranks=1))
    monkeypatch.setattr(decode, "GIVEN_BACK_PER_TURN_MAX", 0)
    start_generation_first(pair, 1)
    pair.run(lambda: bool(pair.generation.finish(1)))
    (rank,) = pair.generation.ranks
    assert rank.registry.require(1).state is State.ENDING
    rank.loop._work.publish([Stop(1, Outcome.CANCELLED, "its client has gone", "", -1)])
    pair.settle()
    assert rank.registry.require(1).outcome is Outcome.COMPLETED
    monkeypatch.setattr(decode, "GIVEN_BACK_PER_TURN_MAX", 4)
    pair.run(pair.idle)
    assert [notice.finish_reason for notice in pair.generation.answers[1] if notice.finish_reason] == ["length"]
    assert rank.registry.statistics().completed == 1


def test_nothing_is_given_back_before_every_rank_has_voted(pairs: list[Pair]) -> None:
    """One late rank keeps the blocks of all of them; time proves nothing."""
    pair = make(pairs)
    pair.submit_context(1, PROMPT)
    pair.run(lambda: bool(pair.context.answers.get(1)))
    pair.submit_generation(1, PROMPT, first_token=pair.context.tokens(1)[0])
    late = pair.context.ranks[2]
    others = [rank for rank in pair.ranks if rank is not late]
    held = [rank.blocks.free_count for rank in pair.context.ranks]
    for _ in range(300):
        for rank in others:
            pair.step(rank)
    assert not pair.generation.finish(1), "the late rank has not written its share"
    assert [rank.blocks.free_count for rank in pair.context.ranks] == held
    pair.now_s += 50.0
    for rank in others:
        pair.step(rank)
    assert [rank.blocks.free_count for rank in pair.context.ranks] == held
    pair.run(pair.idle)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.context.ranks)


def test_the_window_bounds_metadata_and_keeps_the_rest_queued(pairs: list[Pair]) -> None:
    """Window 2, compute cap 4: at most two requests are admitted and not activated at any moment, and all complete."""
    pair = make(pairs, PairConfig(pre_active_requests=2, max_batch_size=1, credits=64))
    for request_id in range(1, 25):
        start_generation_first(pair, request_id)
    peak = 0

    def done() -> bool:
        nonlocal peak
        peak = max(peak, pair.context.ranks[0].transceiver.pre_active_count)
        return all(pair.generation.finish(r) for r in range(1, 25))

    pair.run(done, rounds_max=20_000)
    assert peak <= 2
    assert pair.context.desk.statistics().waiting_peak > 2
    pair.run(pair.idle)


def test_a_wide_window_does_not_widen_compute(pairs: list[Pair]) -> None:
    """64 wait as metadata; no more than stages x batch are activated and unfinished."""
    pair = make(pairs, PairConfig(pre_active_requests=64, max_batch_size=1, generation_blocks=512))
    for request_id in range(1, 33):
        start_generation_first(pair, request_id, PROMPT[:5])
    peaks = [0, 0]

    def done() -> bool:
        rank = pair.context.ranks[0]
        peaks[0] = max(peaks[0], rank.transceiver.pre_active_count)
        peaks[1] = max(peaks[1], len(rank.loop.compute._active))
        return all(pair.generation.finish(r) for r in range(1, 33))

    pair.run(done, rounds_max=20_000)
    assert peaks[0] > 8 and peaks[1] <= 4


def test_opposite_orders_and_scarce_blocks_on_both_sides_complete(pairs: list[Pair]) -> None:
    """Without the rule that only requests whose destination is here are admitted, this would wait for ever."""
    pair = make(pairs, PairConfig(pre_active_requests=1, max_batch_size=1, context_blocks=8, generation_blocks=8))
    for request_id in range(1, 13):
        pair.submit_generation(request_id, PROMPT, style="generation_first")
    for request_id in range(12, 0, -1):
        pair.submit_context(request_id, PROMPT, style="generation_first")
    pair.run(lambda: all(pair.generation.finish(r) for r in range(1, 13)), rounds_max=20_000)
    pair.run(pair.idle)


def phase_waiting(pair: Pair) -> bool:
    return any(s.state is State.WAITING for s in pair.context.ranks[0].registry)


def phase_prepared(pair: Pair) -> bool:
    return any(s.state is State.PREPARED for s in pair.context.ranks[0].registry)


def phase_activated(pair: Pair) -> bool:
    return any(s.state in (State.ACTIVATED, State.COMPUTING) for s in pair.context.ranks[0].registry)


def phase_transferring(pair: Pair) -> bool:
    return any(s.state is State.TRANSFERRING for s in pair.context.ranks[3].registry)


def phase_decoding(pair: Pair) -> bool:
    return any(s.state is State.COMPUTING for r in pair.generation.ranks for s in r.registry)


@pytest.mark.parametrize("phase", [phase_waiting, phase_prepared, phase_activated, phase_transferring, phase_decoding])
@pytest.mark.parametrize("legs", ["context", "generation", "both"])
def test_a_cancel_in_any_phase_ends_both_legs_and_returns_every_block(pairs: list[Pair], phase, legs: str) -> None:
    """The client hears one end; the other leg ends with it (by its own cancel, or by its peer's)."""
    pair = make(pairs, PairConfig(max_num_tokens=4))
    start_generation_first(pair, 1, max_tokens=30)
    pair.run(lambda: phase(pair))
    if legs in ("context", "both"):
        pair.context.desk.abort(1, "client has gone")
    if legs in ("generation", "both"):
        pair.generation.desk.abort(1, "client has gone")
    pair.run(pair.idle)
    pair.validate()
    assert pair.generation.finish(1) in ("cancelled", "error", "length")
    if legs != "context":
        assert pair.generation.finish(1) == "cancelled"
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.ranks)
    cores = [rank.agreement.statistics().core for rank in pair.context.ranks]
    assert len({(c.admitted, c.committed, c.closed, c.digest) for c in cores}) == 1
    assert all(c.committed + c.closed == c.admitted for c in cores)


def test_cancelling_more_than_the_window_holds_frees_every_place(pairs: list[Pair]) -> None:
    """Overflow: of 20 queued behind a window of 1, all but the last are cancelled; the last completes."""
    pair = make(pairs, PairConfig(pre_active_requests=1, max_batch_size=1))
    for request_id in range(1, 21):
        start_generation_first(pair, request_id)
    for _ in range(5):
        for rank in pair.ranks:
            pair.step(rank)
    for request_id in range(1, 20):
        pair.context.desk.abort(request_id, "client has gone")
        pair.generation.desk.abort(request_id, "client has gone")
    pair.run(lambda: bool(pair.generation.finish(20)))
    assert pair.generation.tokens(20) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.ranks)


def test_a_deadline_cancels_like_a_client(pairs: list[Pair]) -> None:
    """The context leg's deadline passes while its peer never asks: everything comes back, the code says why."""
    pair = make(pairs)
    prompt = np.asarray(PROMPT, np.int32)
    pair.submit_context(1, list(prompt), style="generation_first", deadline_s=0.5)
    pair.settle(10)
    assert not pair.context.finish(1)
    pair.now_s += 1.0
    pair.run(lambda: bool(pair.context.finish(1)))
    assert pair.context.answers[1][-1].error_code == "DEADLINE"


def test_a_transfer_that_takes_too_long_fails_and_a_younger_one_goes_on(pairs: list[Pair]) -> None:
    """Each by its own age, in whatever order they end; memory follows by the writers' words."""
    pair = make(pairs, PairConfig(generation_ranks=1))

    def ask(request_id: int) -> None:
        pair.submit_generation(request_id, PROMPT, style="generation_first")
        pair.run(lambda: opened() == request_id)

    def opened() -> int:
        return sum(rank.transceiver.counters.opened for rank in pair.generation.ranks)

    ask(1)
    pair.now_s += 40.0
    ask(2)
    pair.settle(10)
    assert not pair.generation.finish(1)
    pair.now_s += 21.0
    pair.run(lambda: bool(pair.generation.finish(1)))
    assert "did not end within 60 s" in pair.generation.answers[1][-1].message
    pair.settle(10)
    assert not pair.generation.finish(2)
    pair.submit_context(2, PROMPT, style="generation_first")
    pair.run(lambda: pair.generation.finish(2) == "length")
    assert pair.generation.tokens(2) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)
    pair.validate()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_fails_on_one_stage_ends_its_requests_on_every_rank(pairs: list[Pair], stage: int) -> None:
    """The step's requests fail with the engine's words; the next request is served."""
    pair = make(pairs)
    pair.context.ranks[stage].engine.fail.add(0)
    pair.submit_context(1, PROMPT)
    pair.run(lambda: bool(pair.context.finish(1)))
    (answer,) = pair.context.answers[1]
    assert (answer.finish_reason, answer.error_code) == ("error", "ENGINE_FAILED")
    assert f"rank {stage}" in answer.message
    pair.run(pair.idle)
    assert pair.serve(2, PROMPT) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)
    assert all(r.agreement.statistics().core.outcomes == (1, 1, 0) for r in pair.context.ranks)


def test_kv_that_nobody_fetches_is_given_up_and_sealed(pairs: list[Pair]) -> None:
    """After the transfer timeout the request fails on every rank; a receiver that comes too late learns it."""
    pair = make(pairs)
    pair.submit_context(1, PROMPT)
    pair.run(lambda: bool(pair.context.answers.get(1)))
    pair.settle(5)
    pair.now_s += 61.0
    pair.settle(5)
    pair.now_s += 61.0
    pair.run(lambda: all(len(r.registry) == 0 for r in pair.context.ranks))
    pair.submit_generation(1, PROMPT, first_token=pair.context.tokens(1)[0])
    pair.run(lambda: bool(pair.generation.finish(1)))
    assert pair.generation.answers[1][-1].error_code == "TRANSFER_FAILED"
    pair.run(pair.idle)


def test_the_same_id_twice_is_told_and_the_first_goes_on(pairs: list[Pair]) -> None:
    """The second owner gets DUPLICATE_REQUEST; the first one's tokens are right."""
    pair = make(pairs)
    pair.submit_context(1, PROMPT)
    pair.submit_context(1, PROMPT[:5])
    pair.run(lambda: len(pair.context.answers.get(1, [])) == 2)
    codes = {a.error_code for a in pair.context.answers[1]}
    assert codes == {"", "DUPLICATE_REQUEST"}
    assert pair.context.tokens(1) == pair.reference(PROMPT, 1)


def test_a_drain_proves_n_of_n_before_anybody_leaves(pairs: list[Pair]) -> None:
    """No rank leaves before all have decided all; queued requests are told, running ones finish."""
    pair = make(pairs, PairConfig(pre_active_requests=1, max_batch_size=1))
    for request_id in range(1, 9):
        start_generation_first(pair, request_id)
    pair.run(lambda: bool(pair.generation.finish(1)))
    pair.context.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: pair.context.desk.live_count == 0)
    finished = {r: pair.context.finish(r) or "answered" for r in range(1, 9)}
    for request_id, how in finished.items():
        if how in ("error", "cancelled"):
            pair.generation.desk.abort(request_id, "the context leg has failed")
    pair.generation.desk.drain(pair.now_s + 100.0)
    while not all(rank.loop.left for rank in pair.ranks):
        for rank in pair.ranks:
            pair.step(rank)
            if rank.loop.left and rank in pair.context.ranks:
                for other in pair.context.ranks:
                    core = other.agreement.statistics().core
                    assert core.committed + core.closed == core.admitted
                    assert len(other.registry) == 0
    assert all(rank.loop.drained for rank in pair.ranks)
    reports = [rank.agreement.drain_state() for rank in pair.context.ranks]
    assert all(r.drained for r in reports) and len({r.digest for r in reports}) == 1


def test_a_drain_whose_deadline_passes_says_that_it_proved_nothing(pairs: list[Pair]) -> None:
    """A write that never ends: the ranks leave undrained, and nothing of the transfer was given back."""
    world = FakeWorld(landing=lambda job, part: "hold")
    pair = make(pairs, world=world)
    pair.submit_context(1, PROMPT)
    pair.run(lambda: bool(pair.context.answers.get(1)))
    pair.submit_generation(1, PROMPT, first_token=pair.context.tokens(1)[0])
    pair.settle(100)
    for desk in (pair.context.desk, pair.generation.desk):
        desk.drain(pair.now_s + 1.0)
    pair.settle(20)
    pair.now_s += 2.0
    pair.run(lambda: all(rank.loop.left for rank in pair.ranks))
    assert not any(rank.loop.drained for rank in pair.context.ranks)
    assert any(rank.blocks.free_count < rank.blocks.block_count for rank in pair.generation.ranks)
    assert all(rank.blocks.free_count < rank.blocks.block_count for rank in pair.context.ranks)


def leave_before_hearing(pair: Pair) -> None:
    """The context instance drains and goes away while a receive request for each of its ranks is on its way."""
    pair.settle(10)
    context = [PeerId("ctx", "g1", rank) for rank in range(pair.config.stages)]
    for receiver in [PeerId("gen", "h1", rank) for rank in range(pair.config.generation_ranks)]:
        for peer in context:
            pair.network.hold(receiver, peer)
    pair.submit_generation(1, PROMPT, style="generation_first")
    pair.settle(5)
    pair.context.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: all(rank.loop.left for rank in pair.context.ranks))


@pytest.mark.parametrize("executor", [WriteExecutor.RECEIVER, WriteExecutor.SENDER])
def test_memory_comes_back_when_an_instance_left_before_it_heard(pairs: list[Pair], executor: WriteExecutor) -> None:
    """Nobody answers the receive request any more: the end of the processes and of our agent for them prove the memory."""
    pair = make(pairs, world=FakeWorld(executor=executor))
    transports = [rank.session._transport for rank in pair.generation.ranks]
    destroy = [transport.destroy_agent for transport in transports]
    for transport in transports:
        transport.destroy_agent = refuse
    leave_before_hearing(pair)
    pair.now_s += 1.0
    pair.settle(5)
    assert pair.generation.finish(1) == "error"
    free = all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.generation.ranks)
    assert free is (executor is WriteExecutor.SENDER), "receiver-executed writes may land while our agent lives"
    for transport, how in zip(transports, destroy):
        transport.destroy_agent = how
    pair.now_s += 1.0
    pair.settle(5)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.generation.ranks) and pair.idle()
    pair.validate()


def refuse(_instance: tuple[str, str]) -> frozenset[Evidence]:
    raise TransportError("not now")


def test_a_request_for_an_instance_that_is_gone_fails_by_name(pairs: list[Pair]) -> None:
    """It ends alone: the rank goes on, and owns nothing for it."""
    pair = make(pairs)
    leave_before_hearing(pair)
    for _ in range(2):
        pair.now_s += 1.0
        pair.settle(5)
    pair.submit_generation(2, PROMPT, style="generation_first")
    pair.settle(5)
    assert pair.generation.finish(2) == "error" and "ctx/g1 is gone" in pair.generation.answers[2][-1].message
    assert pair.idle()
    pair.generation.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: all(rank.loop.left and rank.loop.drained for rank in pair.generation.ranks))


def test_a_late_status_frame_changes_nothing(pairs: list[Pair]) -> None:
    """A rank that reports a request which ended meanwhile is ignored."""
    pair = make(pairs)
    pair.serve(1, PROMPT)
    pair.run(pair.idle)
    pair.context.ranks[2].loop._link.send(0, Status(2, b"", ((1, "late"),)))
    pair.settle(5)
    pair.validate()
    assert pair.serve(2, PROMPT) == pair.reference(PROMPT, 4)


@pytest.mark.parametrize("rounds", range(1, 14))
def test_a_drain_at_any_moment_of_readiness_revokes_and_never_activates_what_it_revoked(
    pairs: list[Pair], rounds: int
) -> None:
    """The lease is revoked in the call that starts the drain, its abort comes later: in between nothing may be scheduled."""
    pair = make(pairs, PairConfig(max_batch_size=1))
    start_generation_first(pair, 1)
    for _ in range(rounds):
        for rank in pair.ranks:
            pair.step(rank)
    pair.context.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: pair.context.desk.live_count == 0)
    if pair.context.finish(1) in ("error", "cancelled"):
        pair.generation.desk.abort(1, "the context leg has failed")
    pair.generation.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: all(rank.loop.left for rank in pair.ranks))
    assert all(rank.loop.drained and not rank.faults for rank in pair.ranks)
    assert pair.generation.finish(1) in ("length", "cancelled", "error")


# -- leases that expire -------------------------------------------------------------------------------------------------

LEASE_S = 0.5


def leased_and_waiting(pair: Pair, *, selected: bool) -> None:
    """Request 2 has every rank's lease and cannot be scheduled: there are no blocks for it, or (selected) its blocks are set
    aside and the pipeline is full of request 1, whose results do not come back."""
    rank = pair.context.ranks[0]
    if selected:
        rank.loop._link._world.held.add((3, 0))
        start_generation_first(pair, 1)
    else:
        pair.submit_context(1, PROMPT)
        pair.run(lambda: bool(pair.context.answers.get(1)))
    start_generation_first(pair, 2)
    pair.run(lambda: 2 in (rank.loop.compute._active if selected else rank.transceiver._candidates))
    pair.settle(20)
    record = rank.registry.require(2)
    assert record.state is State.PREPARED and bool(record.block_ids) == selected
    assert not pair.context.finish(2)


def let_request_1_end(pair: Pair, *, selected: bool) -> None:
    if selected:
        pair.context.ranks[0].loop._link._world.held.clear()
    else:
        pair.submit_generation(1, PROMPT, first_token=pair.context.tokens(1)[0])


def lease_config(*, selected: bool, lease_timeout_s: float | None = LEASE_S) -> PairConfig:
    """Of the 21 tokens of a prompt six blocks; steps of four tokens, five of them in flight."""
    return PairConfig(
        context_blocks=64 if selected else 6, max_num_tokens=4 if selected else 16, lease_timeout_s=lease_timeout_s
    )


@pytest.mark.parametrize("selected", [False, True])
def test_a_lease_that_is_not_scheduled_in_time_is_revoked_and_its_clients_are_told(
    pairs: list[Pair], selected: bool
) -> None:
    """Both clients hear why, once; every rank finalises it without another attempt; the request before it is untouched."""
    pair = make(pairs, lease_config(selected=selected))
    leased_and_waiting(pair, selected=selected)
    pair.now_s += LEASE_S
    pair.run(lambda: bool(pair.context.finish(2)))
    (answer,) = pair.context.answers[2]
    assert (answer.finish_reason, answer.error_code, pair.context.tokens(2)) == ("error", "LEASE_EXPIRED", [])
    assert answer.message == "not scheduled within 0.5 s after every rank was ready for it"
    assert 2 not in pair.context.ranks[0].loop.compute._active
    pair.run(lambda: bool(pair.generation.finish(2)))
    (told,) = pair.generation.answers[2]
    assert told.finish_reason == "error" and "not scheduled within 0.5 s" in told.message
    let_request_1_end(pair, selected=selected)
    pair.run(lambda: bool(pair.generation.finish(1)))
    pair.run(pair.idle)
    tokens = pair.generation.tokens(1)
    assert (tokens if selected else [*pair.context.tokens(1), *tokens]) == pair.reference(PROMPT, 4)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.ranks)
    cores = [rank.agreement.statistics().core for rank in pair.context.ranks]
    assert {(c.admitted, c.committed, c.closed) for c in cores} == {(2, 1, 1)}
    assert len({c.digest for c in cores}) == 1
    assert [rank.transceiver.counters.leases_expired for rank in pair.context.ranks] == [1] * 4
    assert pair.context.desk.statistics().failed == 1 and len(pair.context.answers[2]) == 1
    assert pair.serve(3, PROMPT) == pair.reference(PROMPT, 4), "the next request finds everything free"


def test_what_a_revoked_lease_had_set_aside_comes_back_when_every_rank_has_let_go(pairs: list[Pair]) -> None:
    """The client is told at once; the blocks stay until the last rank has acknowledged, however long that takes, and in
    between results come back and the pipeline has room: it is not scheduled any more."""
    pair = make(pairs, lease_config(selected=True))
    leased_and_waiting(pair, selected=True)
    rank = pair.context.ranks[0]
    pair.agreement_network.hold(3, 2)
    pair.now_s += LEASE_S
    pair.run(lambda: bool(pair.context.finish(2)))
    let_request_1_end(pair, selected=True)
    pair.settle(200)
    assert rank.registry.get(1) is None, "the other request ends meanwhile"
    assert rank.registry.require(2).state is State.ABORTED
    assert rank.blocks.free_count == rank.blocks.block_count - 6, "no abort has reached rank 2: its six blocks stay"
    assert rank.registry.require(2).last_step_id == -1, "it was named by a schedule"
    assert not pair.generation.finish(2)
    pair.agreement_network.release(3, 2)
    pair.run(pair.idle)
    assert pair.generation.finish(2) == "error"
    assert all(r.blocks.free_count == r.blocks.block_count for r in pair.ranks)


def test_a_lease_that_was_scheduled_does_not_expire(pairs: list[Pair]) -> None:
    """Activation is the point of no return: its results may take longer than any lease."""
    pair = make(pairs, lease_config(selected=True))
    pair.context.ranks[0].loop._link._world.held.add((3, 0))
    start_generation_first(pair, 1)
    pair.run(lambda: phase_activated(pair))
    pair.now_s += 5 * LEASE_S
    pair.settle(50)
    let_request_1_end(pair, selected=True)
    pair.run(lambda: bool(pair.generation.finish(1)))
    assert pair.generation.tokens(1) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)
    assert [rank.transceiver.counters.leases_expired for rank in pair.context.ranks] == [0] * 4


def test_without_a_lease_timeout_a_request_waits_for_as_long_as_it_must(pairs: list[Pair]) -> None:
    """The default: nothing is revoked, and it is served when there is room."""
    pair = make(pairs, lease_config(selected=True, lease_timeout_s=None))
    leased_and_waiting(pair, selected=True)
    for _ in range(20):
        pair.now_s += 1.0
        pair.settle(5)
    let_request_1_end(pair, selected=True)
    pair.run(lambda: bool(pair.generation.finish(2)))
    assert pair.generation.tokens(2) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cancel_beside_an_expiring_lease_tells_each_client_once(pairs: list[Pair], when: str, selected: bool) -> None:
    """Whichever comes first names the end; the other changes nothing."""
    pair = make(pairs, lease_config(selected=selected))
    leased_and_waiting(pair, selected=selected)
    desks = (pair.context.desk, pair.generation.desk)
    if when == "before":
        for desk in desks:
            desk.abort(2, "client has gone")
        pair.step(pair.context.ranks[0])
    pair.now_s += LEASE_S
    pair.step(pair.context.ranks[0])
    if when == "after":
        for desk in desks:
            desk.abort(2, "client has gone")
    let_request_1_end(pair, selected=selected)
    pair.run(lambda: bool(pair.generation.finish(1)))
    pair.run(pair.idle)
    (answer,) = pair.context.answers[2]
    assert answer.error_code == ("CANCELLED" if when == "before" else "LEASE_EXPIRED")
    assert len([a for a in pair.generation.answers[2] if a.finish_reason]) == 1
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.ranks)
    pair.validate()


def test_a_request_that_a_drain_revokes_is_told_that_the_instance_drains(pairs: list[Pair]) -> None:
    """Code DRAINING, as one that was not admitted yet; not a bare cancellation."""
    pair = make(pairs, lease_config(selected=True, lease_timeout_s=None))
    leased_and_waiting(pair, selected=True)
    pair.context.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: bool(pair.context.finish(2)))
    (answer,) = pair.context.answers[2]
    assert (answer.finish_reason, answer.error_code) == ("error", "DRAINING")
    let_request_1_end(pair, selected=True)
    pair.run(lambda: bool(pair.generation.finish(1)))
    pair.generation.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: all(rank.loop.left for rank in pair.ranks))
    assert all(rank.loop.drained for rank in pair.ranks)


def every_link(pair: Pair, do: str) -> None:
    for context_rank in range(pair.config.stages):
        for generation_rank in range(pair.config.generation_ranks):
            getattr(pair, do)(context_rank, generation_rank)


@pytest.mark.parametrize("phase", [phase_waiting, phase_prepared, phase_activated, phase_transferring, phase_decoding])
@pytest.mark.parametrize("bounce", [False, True])
def test_a_control_link_that_comes_back_costs_nobody_an_answer(pairs: list[Pair], phase, bounce: bool) -> None:
    """Both ends live: what was under way is asked for again, and what comes later is served as before."""
    pair = make(pairs, PairConfig(max_num_tokens=4, bounce=bounce))
    start_generation_first(pair, 1)
    pair.run(lambda: phase(pair))
    every_link(pair, "sever")
    start_generation_first(pair, 2)
    pair.settle(30)
    assert all(rank.transceiver.links_away_count for rank in pair.ranks)
    every_link(pair, "heal")
    for request_id in (1, 2):
        pair.run(lambda r=request_id: bool(pair.generation.finish(r)))
        assert pair.generation.tokens(request_id) == pair.reference(PROMPT, 4)
    assert pair.serve(3, PROMPT) == pair.reference(PROMPT, 4)
    pair.run(pair.idle)
    assert all(rank.transceiver.links_away_count == 0 for rank in pair.ranks)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.ranks)
    pair.validate()


@pytest.mark.parametrize("taken_back", [True, False], ids=["taken back", "silent"])
def test_a_stage_that_nobody_comes_to_ends_although_rank_0_was_served(pairs: list[Pair], taken_back: bool) -> None:
    """The receiver's request to the last stage is lost with its link: its cancel, or that stage's own patience, ends it."""
    pair = make(pairs, PairConfig(stages=3, generation_ranks=1))
    pair.submit_context(1, PROMPT)
    pair.run(lambda: bool(pair.context.answers.get(1)))
    receiver, last = PeerId("gen", "h1", 0), PeerId("ctx", "g1", 2)
    pair.network.hold(receiver, last)
    pair.submit_generation(1, PROMPT, first_token=pair.context.tokens(1)[0])
    first = pair.context.ranks[0].registry
    pair.run(lambda: first.require(1).state is State.QUIESCENT)
    if taken_back:
        pair.network._queues[receiver, last].clear()
        pair.generation.desk.abort(1, "gone")
        pair.settle(5)
        pair.network.let(receiver, last)
    else:
        pair.now_s += 1.0
        pair.settle(5)  # from here on its patience is counted
        pair.now_s += 100.0
    before_s = pair.now_s
    pair.run(lambda: all(len(rank.registry) == 0 for rank in pair.context.ranks))
    assert pair.now_s - before_s < 5.0
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.context.ranks)
    pair.network.let(receiver, last)
    pair.run(pair.idle)
    assert pair.serve(2, PROMPT) == pair.reference(PROMPT, 4)
    pair.validate()


@pytest.mark.parametrize("executor", [WriteExecutor.RECEIVER, WriteExecutor.SENDER])
@pytest.mark.parametrize("phase", [phase_waiting, phase_prepared, phase_activated, phase_transferring])
def test_the_death_of_a_generation_instance_is_an_event_for_the_context_ranks(
    pairs: list[Pair], phase, executor: WriteExecutor
) -> None:
    """Without a word of the front, and long before a time-out: its requests end, every block is back, nothing of it stays."""
    pair = make(pairs, PairConfig(max_num_tokens=4), world=FakeWorld(executor=executor))
    start_generation_first(pair, 1)
    pair.run(lambda: phase(pair))
    for rank in pair.generation.ranks:
        pair.kill(rank)
    killed_s = pair.now_s
    pair.run(lambda: all(len(rank.registry) == 0 for rank in pair.context.ranks))
    assert pair.now_s - killed_s < 5.0
    if phase is not phase_transferring:  # else its context leg had ended
        (told,) = pair.context.answers[1]
        assert told.finish_reason == "cancelled" and "has died" in told.message
    pair.settle(20)
    assert all(rank.blocks.free_count == rank.blocks.block_count for rank in pair.context.ranks)
    assert [rank.session.statistics()["peers"] for rank in pair.context.ranks] == [0] * pair.config.stages
    assert [rank.transceiver.links_away_count for rank in pair.context.ranks] == [0] * pair.config.stages
    assert all(rank.agreement.statistics().core.quarantined == 0 for rank in pair.context.ranks)
    pair.context.desk.drain(pair.now_s + 100.0)
    pair.run(lambda: all(rank.loop.left and rank.loop.drained for rank in pair.context.ranks))


def test_the_death_of_one_generation_rank_ends_what_it_asked_for_alone(pairs: list[Pair]) -> None:
    """The requests of the other rank go on; the links of the dead one's instance are kept while a process of it lives."""
    pair = make(pairs, PairConfig(max_num_tokens=4))
    start_generation_first(pair, 1)
    start_generation_first(pair, 2)
    pair.run(lambda: all(len(rank.registry) == 2 for rank in pair.context.ranks) and phase_activated(pair))
    (victim,) = [rank for rank in pair.generation.ranks[1:] if len(rank.registry)]
    (asked,) = [sequence.request_id for sequence in victim.registry]
    pair.kill(victim)
    other = 3 - asked
    pair.run(lambda: bool(pair.generation.finish(other)))
    assert pair.generation.tokens(other) == pair.reference(PROMPT, 4)
    pair.run(lambda: all(len(rank.registry) == 0 for rank in pair.context.ranks))
    assert "rank 1 has died" in pair.context.answers[asked][-1].message
    assert all(rank.session.statistics()["peers"] for rank in pair.context.ranks)
