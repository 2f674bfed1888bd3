"""The choice of tier: gates with codes, predictions, calibration and its cache."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    DEFAULT_MODELS,
    CostModel,
    InstanceLayout,
    KVLayout,
    LayoutError,
    Reason,
    Refusal,
    RequestBlocks,
    Tier,
    TierLimits,
    TokenRange,
    TransferPlan,
    WriterPlan,
    calibrate,
    choose_tier,
    plan_destination,
    plan_writer,
)
from kv_bounce_planner.planning.tier import CALIBRATION_ROUNDS, Affine, Phases

CMA = DEFAULT_MODELS["cma"]


def writer(fragments: int, total: int, rank: int = 0, ranges: int | None = None) -> WriterPlan:
    count = fragments if ranges is None else ranges
    size = total // count
    addresses = np.arange(count, dtype=np.int64) * 2 * size + rank * (1 << 40)
    return WriterPlan(rank, addresses, np.full(count, size, np.int64), fragments, count)


@pytest.mark.parametrize(
    ("fragments", "total", "tier", "reason"),
    [
        (32768, 4 << 20, Tier.BOUNCE, Reason.FASTER_BOUNCE),
        (4096, 4 << 20, Tier.BOUNCE, Reason.FASTER_BOUNCE),
        (1, 4 << 20, Tier.DIRECT, Reason.FASTER_DIRECT),
        (1, 64 << 20, Tier.DIRECT, Reason.FASTER_DIRECT),
        (256, 64 << 20, Tier.DIRECT, Reason.FASTER_DIRECT),
        (32768, 64 << 20, Tier.BOUNCE, Reason.FASTER_BOUNCE),
    ],
)
def test_default_model_agrees_with_the_measured_winners(fragments: int, total: int, tier: Tier, reason: Reason) -> None:
    """The clear cells of the measured table (reference §6): ratios of 2 and more, and 0.5 and less."""
    choice = choose_tier(writer(fragments, total), CMA)
    assert (choice.tier, choice.reason) == (tier, reason)
    assert choice.predicted_s[choice.tier] == min(choice.predicted_s.values())


@pytest.mark.parametrize(
    ("limits", "available", "reason"),
    [
        (TierLimits(enabled=False), True, Reason.DISABLED),
        (TierLimits(blocks_min=96), True, Reason.MIN_BLOCKS),
        (TierLimits(bytes_min=8 << 20), True, Reason.MIN_BYTES),
        (TierLimits(bounce_bytes_max=500), True, Reason.OVERSIZE),
        (TierLimits(), False, Reason.NO_SPACE),
        (TierLimits(), Refusal(Reason.RANK_METADATA_MISSING, "rank 1"), Reason.RANK_METADATA_MISSING),
        (TierLimits(), Refusal(Reason.CLOSING), Reason.CLOSING),
    ],
)
def test_gates_name_what_ruled_the_bounce_out(limits: TierLimits, available: object, reason: Reason) -> None:
    """c4, c6 and the list of fallback reasons: the code says why it was not bounced, and only where it would have been."""
    many = WriterPlan(0, np.arange(64, dtype=np.int64) * (1 << 17), np.full(64, 1 << 16, np.int64), 32768, 64)
    choice = choose_tier(many, CMA, limits, bounce_available=available)  # type: ignore[arg-type]
    assert (choice.tier, choice.reason) == (Tier.DIRECT, reason)
    assert Tier.BOUNCE not in choice.predicted_s
    one = choose_tier(writer(1, 64 << 20), CMA, limits, bounce_available=available)  # type: ignore[arg-type]
    assert one.reason is Reason.FASTER_DIRECT


@pytest.mark.parametrize("total", [4096, 64 << 20])
def test_a_forced_tier_is_taken_as_asked_within_the_gates(total: int) -> None:
    """For comparisons: prediction aside, but never past a gate, and merging only where something joins."""
    plan = writer(16, total)
    for tier in Tier:
        choice = choose_tier(plan, CMA, TierLimits(forced=tier))
        assert (choice.tier, choice.reason) == (Tier.DIRECT if tier is Tier.MERGED else tier, Reason.OK)
    gated = choose_tier(plan, CMA, TierLimits(forced=Tier.BOUNCE, bounce_bytes_max=16))
    assert (gated.tier, gated.reason) == (Tier.DIRECT, Reason.OVERSIZE)


def test_state_bytes_count_for_the_gate() -> None:
    """c30: 599 + 400 bytes stay below a gate of 1000, 600 + 400 do not."""
    for extra, passes in ((599, False), (600, True)):
        plan = WriterPlan(0, np.array([0, 5000]), np.array([400, extra]), 32768, 2)
        choice = choose_tier(plan, CMA, TierLimits(bytes_min=1000))
        assert (choice.reason is not Reason.MIN_BYTES) == passes


def test_nothing_to_transfer() -> None:
    """An empty plan is no choice at all."""
    choice = choose_tier(TransferPlan(0, {}, 0), CMA)
    assert (choice.tier, choice.reason) == (Tier.DIRECT, Reason.NOTHING_TO_TRANSFER)


def _touching(count: int) -> tuple[InstanceLayout, KVLayout, RequestBlocks]:
    def layout(base: int) -> KVLayout:
        return KVLayout.uniform(
            rank=0, first_layer=0, layer_count=1, head_total=1, head_dim=512, element_bytes=1, block_tokens=1,
            block_count=count, key_bases=[base],
        )  # fmt: skip

    return InstanceLayout.single(layout(0x1000_0000)), layout(0x9000_0000), RequestBlocks.single(range(count))


def test_merging_is_chosen_where_blocks_touch_on_both_sides() -> None:
    """4,096 touching blocks are one descriptor: the sender sees it, the receiver alone cannot know."""
    source, target, blocks = _touching(4096)
    tokens = TokenRange(0, 4096)
    transfer = plan_writer(source, 0, blocks, target, blocks, tokens)
    assert transfer is not None and (transfer.raw_count, transfer.merged_count) == (4096, 1)
    choice = choose_tier(transfer, CMA)
    assert (choice.tier, choice.reason) == (Tier.MERGED, Reason.FASTER_MERGED)
    assert choice.predicted_s[Tier.MERGED] < choice.predicted_s[Tier.DIRECT]
    alone = choose_tier(plan_destination(source, target, blocks, tokens), CMA)
    assert alone.fragment_count == 4096 and Tier.MERGED not in alone.predicted_s


def test_the_slowest_writer_decides() -> None:
    """Writers work in parallel: the prediction of a plan is its slowest writer's, not the sum."""
    plans = {0: writer(4, 1 << 20, 0), 1: writer(8192, 8 << 20, 1)}
    whole = choose_tier(TransferPlan(0, plans, 12), CMA)
    slow = choose_tier(plans[1], CMA)
    assert whole.predicted_s[Tier.BOUNCE] == slow.predicted_s[Tier.BOUNCE]
    assert whole.total_bytes == (1 << 20) + (8 << 20)


class Machine:
    """A transport with known costs and 3 % noise, which counts what is measured."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rng = rng
        self.direct = Affine(rng.uniform(2e-5, 3e-4), rng.uniform(2e-7, 8e-6), rng.uniform(5e-11, 4e-10))
        self.copy = Affine(rng.uniform(1e-6, 5e-5), rng.uniform(5e-9, 5e-8), rng.uniform(5e-11, 2e-10))
        # A bounce's write is one fragment in place, and not faster.
        first_s = self.direct.base_s + self.direct.per_piece_s
        self.wire = Affine(first_s + rng.uniform(0, 3e-4), 0.0, self.direct.per_byte_s * rng.uniform(1.0, 1.2))
        self.calls = 0

    def seconds(self, tier: Tier, total: int, count: int) -> float:
        if tier is Tier.DIRECT:
            return self.direct(count, total)
        return 2 * self.copy(count, total) + self.wire(1, total) + 2e-5

    def measure(self, tier: Tier, total_bytes: int, fragment_count: int) -> Phases:
        self.calls += 1

        def noisy(seconds: float) -> float:
            return seconds * self.rng.uniform(0.97, 1.03)

        if tier is Tier.DIRECT:
            return Phases(noisy(self.direct(fragment_count, total_bytes)))
        copy = self.copy(fragment_count, total_bytes)
        return Phases(noisy(self.wire(1, total_bytes)), noisy(copy), noisy(copy), 2e-5)


def test_calibrated_choice_is_near_the_best_on_random_machines() -> None:
    """Over 200 machines and the grid of the acceptance text: geometric mean of regret within 1.05, worst within 1.25."""
    regrets = []
    for seed in range(200):
        machine = Machine(seed)
        model = calibrate(machine, "random")
        for total in (4 << 20, 64 << 20):
            for count in (1, 256, 4096, 32768):
                choice = choose_tier(writer(count, total), model)
                best = min(machine.seconds(tier, total, count) for tier in (Tier.DIRECT, Tier.BOUNCE))
                regrets.append(machine.seconds(choice.tier, total, count) / best)
    assert math.exp(sum(map(math.log, regrets)) / len(regrets)) <= 1.05
    assert max(regrets) <= 1.25


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_a_machine_that_is_slow_for_a_while_is_measured_as_it_is_otherwise(disturbed: int) -> None:
    """One round of the grid takes up to fifty times as long, each trial by its own factor: nothing of it is in the model."""

    class Disturbed(Machine):
        def measure(self, tier: Tier, total_bytes: int, fragment_count: int) -> Phases:
            phases = super().measure(tier, total_bytes, fragment_count)
            if (self.calls - 1) * CALIBRATION_ROUNDS // 72 != disturbed:
                return phases
            return Phases(*(value * self.rng.uniform(1, 50) for value in dataclasses.astuple(phases)))

    for seed in range(20):
        machine = Disturbed(seed)
        model = calibrate(machine, "disturbed")
        assert machine.calls == 72, "the disturbance is one round of three"
        for total in (4 << 20, 64 << 20):
            for count in (1, 256, 4096, 32768):
                choice = choose_tier(writer(count, total), model)
                best = min(machine.seconds(tier, total, count) for tier in (Tier.DIRECT, Tier.BOUNCE))
                assert machine.seconds(choice.tier, total, count) <= 1.25 * best
    with pytest.raises(LayoutError, match="at least one round"):
        calibrate(Machine(0), "x", rounds=0)


def test_one_fragment_never_bounces() -> None:
    """A bounce is that very write and two copies; a model that says otherwise, from a link measured badly, is not followed."""
    copies = Affine(0.0, 0.0, 0.0)
    odd = CostModel("odd", direct=Affine(1.0, 0.0, 0.0), gather=copies, wire=copies, scatter=copies)
    assert choose_tier(writer(1, 1 << 20), odd).tier is Tier.DIRECT
    assert choose_tier(writer(2, 1 << 20), odd).tier is Tier.BOUNCE


def test_calibration_is_cached_by_transport_key() -> None:
    """Measured once per key; another key is another model."""
    cache: dict[str, CostModel] = {}
    machine = Machine(1)
    first = calibrate(machine, "tcp:host-a:host-b:DRAM", cache)
    calls = machine.calls
    assert calls > 0 and calibrate(machine, "tcp:host-a:host-b:DRAM", cache) is first and machine.calls == calls
    assert calibrate(machine, "cma:host-a:DRAM", cache) is not first and machine.calls == 2 * calls
    assert CostModel.from_json(first.to_json()) == first
    assert first.samples * CALIBRATION_ROUNDS == calls and 0 <= first.relative_error < 0.2


def test_fit_never_predicts_negative_time() -> None:
    """A transport whose cost falls with fragments (noise) still gets coefficients at least 0."""

    class Odd:
        def measure(self, tier: Tier, total_bytes: int, fragment_count: int) -> Phases:
            return Phases(1e-3 / fragment_count, 1e-4, 1e-4)

    model = calibrate(Odd(), "odd")
    for affine in (model.direct, model.gather, model.wire, model.scatter):
        assert min(affine.base_s, affine.per_piece_s, affine.per_byte_s) >= 0


def test_bad_arguments() -> None:
    """Limits are not negative; a grid has three points; a model from foreign bytes is refused as such."""
    with pytest.raises(LayoutError):
        TierLimits(bytes_min=-1)
    with pytest.raises(LayoutError):
        calibrate(Machine(0), "x", sizes=(1 << 20,), counts=(1, 2))
    for bad in (b"", b"{}", b"[1]", b"\xff"):
        with pytest.raises(LayoutError):
            CostModel.from_json(bad)
