"""The seeded simulation of groups: the same hosts, weather, faults and invariants, as of one domain of all ranks."""

from __future__ import annotations

from collections.abc import Callable

from pp_agreement._agreement import Agreement
from pp_agreement._config import Domain
from pp_agreement._events import FaultCode
from pp_agreement._group_agreement import GroupAgreement
from pp_agreement._groups import Groups
from pp_agreement._lanes import Lanes
from pp_agreement._relay import Bridge
from pp_agreement.testing._simulator import SimulationResult, _Host, _Simulation, run_seed

SIZES = ((2, 2), (2, 2), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2, 2), (1, 2, 1), (3, 2), (2,), (1, 1))


class _GroupSimulation(_Simulation):
    def draw_domain(self) -> Domain:
        draw = self.random
        sizes = draw.choice(SIZES)
        ranks = draw.sample(range(12), sum(sizes))
        rows, first = [], 0
        for size in sizes:
            rows.append(tuple(ranks[first : first + size]))
            first += size
        leaders = [row[0] for row in rows]
        self.groups = Groups(
            draw.randint(0, 5),
            tuple(rows),
            scheduling_rank=draw.choice(leaders) if draw.random() < 0.4 else None,
            coordinator_rank=draw.choice(leaders) if draw.random() < 0.4 else None,
            epoch=draw.randint(0, 3),
        )
        groups = self.groups
        return Domain(groups.domain_id, tuple(ranks), groups.scheduling_rank, groups.coordinator_rank, groups.epoch)

    def agreement(self, rank: int, clock: Callable[[], float]) -> Agreement:
        carrier = self.network.transport(rank)
        domains = self.groups.domains(rank)
        lanes = Lanes(carrier, self.domain, rank, domains, window=max(1, self.network.window // len(domains)))
        return GroupAgreement(self.groups, rank, lanes.transport, self.config, clock)

    def link_to_spoil(self) -> tuple[int, int]:
        groups, index = self.groups, self.domain.index_of
        hub = groups.coordinator_rank
        pairs = [(row[0], other) for row in groups.groups for other in row[1:]]
        pairs += [(hub, leader) for leader in groups.leaders if leader != hub and hub is not None]
        a, b = self.random.choice(pairs)
        return (index(a), index(b)) if self.random.random() < 0.5 else (index(b), index(a))

    def places(self, agreement: Agreement) -> tuple[tuple[object, str], ...]:
        found = super().places(agreement)
        bridge = agreement._bridge if isinstance(agreement, GroupAgreement) else None
        return found if bridge is None else (*found, (bridge, "settle"), (bridge, "hear"))

    def is_between_steps(self, place: object) -> bool:
        return isinstance(place, Bridge)

    def observers(self, gone: int) -> list[_Host]:
        rank = self.domain.ranks[gone]
        aware = set(self.groups.group_of(rank)) | (set(self.groups.leaders) if rank in self.groups.leaders else set())
        return [h for h in self.hosts if h.me not in self.dead and h.agreement.rank in aware]

    def is_named(self, agreement: Agreement, gone: int) -> bool:
        fault = agreement.stopped
        told = f"rank {self.domain.ranks[gone]} died"
        return super().is_named(agreement, gone) or (
            fault is not None and fault.code is FaultCode.DEATH and told in fault.detail
        )


def simulate_groups(seed: int) -> SimulationResult:
    """Run one seed of groups over lanes of one network.

    Raises:
        SimulationFailure: A property broke; the message names the seed, which replays it.
    """
    return run_seed(_GroupSimulation(seed))
