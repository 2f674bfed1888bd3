"""Which tier a transfer takes: the planner's cost model, gated by the configuration; the reason is kept for the statistics."""

from __future__ import annotations

from dataclasses import dataclass

from kv_bounce_planner.planning import DEFAULT_MODELS, CostModel, Tier, TierLimits, WriterPlan, choose_tier


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """Chooses per writer.

    Attributes:
        model: Costs of the transport at hand.
        limits: Gates from the configuration (bounce off, too small, larger than the arena).
    """

    model: CostModel
    limits: TierLimits

    @staticmethod
    def configured(*, enable_bounce: bool, bounce_bytes_min: int, arena_bytes: int, transport_key: str) -> TierPolicy:
        """The policy of one rank. An unknown transport uses the model of the slowest known one."""
        model = DEFAULT_MODELS.get(transport_key) or DEFAULT_MODELS["tcp"]
        limits = TierLimits(enabled=enable_bounce, bytes_min=bounce_bytes_min, bounce_bytes_max=arena_bytes)
        return TierPolicy(model, limits)

    def choose(self, plan: WriterPlan) -> tuple[Tier, str]:
        """Tier and reason code for one writer's part."""
        choice = choose_tier(plan, self.model, self.limits)
        return choice.tier, choice.reason.value
