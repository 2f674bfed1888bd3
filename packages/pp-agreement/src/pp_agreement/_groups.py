"""Who belongs to which group: members of a domain that are several ranks each, like those of one stage with TP or CP."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from pp_agreement._config import RANKS_MAX, U32_MAX, Domain, within
from pp_agreement._errors import ConfigurationError

OUTSIDE = -1
"""Position of a scheduling rank that is not among the members: it is in another group."""


class GroupDomain(Domain):
    """The domain inside a group of the scheduling rank: a commit carries a reason of each group, not of each member."""

    __slots__ = ("_voices",)
    _voices: int

    @classmethod
    def of(cls, groups: Groups, row: tuple[int, ...]) -> GroupDomain:
        """The domain inside one of the groups: its first rank leads it, and coordinates."""
        number = groups.domain_id + 1 + groups.groups.index(row)
        domain = cls(number, row, row[0], row[0], groups.epoch)
        object.__setattr__(domain, "_voices", len(groups.groups))
        return domain

    @property
    def voices(self) -> int:
        """How many groups there are."""
        return self._voices


class FollowingDomain(GroupDomain):
    """The domain inside any other group: nobody in it admits first, revokes or is released to."""

    __slots__ = ()

    @property
    def scheduler_index(self) -> int:
        """Not a member."""
        return OUTSIDE


@dataclass(frozen=True, slots=True)
class Groups:
    """A domain whose members are groups of ranks; the first rank of each leads it.

    Args:
        domain_id: Names the domain of the leaders on the wire; the groups' own domains have the ids that follow, so
            ``domain_id .. domain_id + len(groups)`` are taken, all within 0..2**32-1.
        groups: Ranks of each group in pipeline order of the groups: 1..64 groups of 1..64 ranks, all distinct.
        scheduling_rank: The authority; leads its group. Default: the first group's leader.
        coordinator_rank: The author of decisions; leads its group. Default: the last group's leader.
        epoch: Incarnation of the domain, 0..2**32-1.

    Raises:
        ConfigurationError: A field is out of range; its name is in ``field``.
    """

    domain_id: int
    groups: tuple[tuple[int, ...], ...]
    scheduling_rank: int | None = None
    coordinator_rank: int | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        given: object = self.groups
        if not isinstance(given, Iterable):
            raise ConfigurationError("groups", f"{given!r} is not a sequence of groups")
        rows = tuple(given)
        for row in rows:
            if not isinstance(row, Iterable):
                raise ConfigurationError("groups", f"{row!r} is not a group of ranks")
        object.__setattr__(self, "groups", tuple(tuple(row) for row in rows))
        within("groups", len(self.groups), 1, RANKS_MAX)
        for row in self.groups:
            within("groups", len(row), 1, RANKS_MAX)
            for rank in row:
                within("groups", rank, 0, 65_535)
        if len(set(self.ranks)) != len(self.ranks):
            raise ConfigurationError("groups", f"a rank stands twice in {self.groups}")
        within("domain_id", self.domain_id, 0, U32_MAX - len(self.groups))
        for name, default in (("scheduling_rank", self.groups[0][0]), ("coordinator_rank", self.groups[-1][0])):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            if getattr(self, name) not in self.leaders:
                raise ConfigurationError(name, f"{getattr(self, name)!r} does not lead one of {self.groups}")
        within("epoch", self.epoch, 0, U32_MAX)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them, group by group."""
        return tuple(rank for row in self.groups for rank in row)

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank of each group, in their order."""
        return tuple(row[0] for row in self.groups)

    @property
    def outer(self) -> Domain:
        """The domain of the leaders."""
        return Domain(self.domain_id, self.leaders, self.scheduling_rank, self.coordinator_rank, self.epoch)

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group that ``rank`` belongs to.

        Raises:
            ConfigurationError: ``rank`` belongs to none.
        """
        for row in self.groups:
            if rank in row:
                return row
        raise ConfigurationError("rank", f"{rank} is not a member of {self.groups}")

    def inner(self, rank: int) -> Domain:
        """The domain inside the group of ``rank``; its leader coordinates."""
        row = self.group_of(rank)
        kind = GroupDomain if row[0] == self.scheduling_rank else FollowingDomain
        return kind.of(self, row)

    def domains(self, rank: int) -> tuple[Domain, ...]:
        """The domains that ``rank`` is a member of: its group's, and for a leader also that of the leaders."""
        return (self.inner(rank), self.outer) if rank in self.leaders else (self.inner(rank),)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that differ where anything here differs: a fact for ``contribution(topology=…)``."""
        told = (self.domain_id, self.epoch, self.scheduling_rank, self.coordinator_rank, self.groups)
        return blake2b(repr(told).encode(), digest_size=16).hexdigest()
