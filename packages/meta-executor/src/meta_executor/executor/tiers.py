"""Which tier a transfer takes: the planner's cost model, gated by the configuration; the reason is kept for the statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_bounce_planner.planning import DEFAULT_MODELS, CostModel, Tier, TierLimits, WriterPlan, choose_tier

#: Shapes of a writer's part whose choice is remembered (count): requests of equal lengths have the same ones.
_REMEMBERED_MAX = 4096


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """Chooses per writer.

    Attributes:
        model: Costs of the transport at hand.
        limits: Gates from the configuration (bounce off, too small, larger than the arena).
    """

    model: CostModel
    limits: TierLimits
    #: By (fragments, ranges, bytes, blocks), which is all that a choice looks at.
    _chosen: dict[tuple[int, int, int, int], tuple[Tier, str]] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def configured(*, enable_bounce: bool, bounce_bytes_min: int, arena_bytes: int, transport_key: str) -> TierPolicy:
        """The policy of one rank. An unknown transport uses the model of the slowest known one."""
        model = DEFAULT_MODELS.get(transport_key) or DEFAULT_MODELS["tcp"]
        limits = TierLimits(enabled=enable_bounce, bytes_min=bounce_bytes_min, bounce_bytes_max=arena_bytes)
        return TierPolicy(model, limits)

    def choose(self, plan: WriterPlan) -> tuple[Tier, str]:
        """Tier and reason code for one writer's part."""
        shape = plan.fragment_count, plan.range_count, plan.total_bytes, plan.block_count
        chosen = self._chosen.get(shape)
        if chosen is None:
            if len(self._chosen) >= _REMEMBERED_MAX:
                self._chosen.clear()
            choice = choose_tier(plan, self.model, self.limits)
            chosen = self._chosen[shape] = choice.tier, choice.reason.value
        return chosen
