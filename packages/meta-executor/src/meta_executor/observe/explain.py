"""Decisions of several places as one story per request: which instance for each leg and why, which rank inside it and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from meta_executor import wire


class LegStory(msgspec.Struct, frozen=True, kw_only=True):
    """One leg: the front's choice, and what the instance decided inside. Either may be missing."""

    role: str
    owner_id: str
    #: The front's choice; None: an instance was asked alone, or the front has forgotten it.
    choice: wire.LegDecision | None = None
    #: The instance's decision; None: see ``missing``.
    inside: wire.RoutingDecision | None = None
    #: Why there is no decision of the instance; "" when there is one.
    missing: str = ""


class RequestStory(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, under the id that the client's has (behind ``cmpl-`` or ``chatcmpl-``)."""

    request_id: str
    #: Since its newest decision (s).
    age_s: float
    legs: list[LegStory]


def stories(routing: wire.ServiceRouting) -> list[RequestStory]:
    """One story per request, oldest first; legs in the order in which they were chosen."""
    inside: dict[tuple[int, str], wire.RoutingDecision] = {}
    roles: dict[str, str] = {}
    for instance in routing.instances:
        roles[instance.owner_id] = instance.role
        for decision in instance.decisions:
            inside[decision.request_id, instance.owner_id] = decision
    legs: dict[int, list[LegStory]] = {}
    for choice in routing.decisions:
        key = (choice.request_id, choice.owner_id)
        found = inside.pop(key, None)
        missing = "" if found is not None else _missing(routing, choice.owner_id)
        story = LegStory(role=choice.role, owner_id=choice.owner_id, choice=choice, inside=found, missing=missing)
        legs.setdefault(choice.request_id, []).append(story)
    for (request_id, owner_id), decision in inside.items():
        story = LegStory(role=roles[owner_id], owner_id=owner_id, inside=decision)
        legs.setdefault(request_id, []).append(story)
    told = [
        RequestStory(request_id=f"{request_id:x}", age_s=min(map(_age_s, own)), legs=own)
        for request_id, own in legs.items()
    ]
    return sorted(told, key=lambda story: -story.age_s)


def _age_s(leg: LegStory) -> float:
    return min(part.age_s for part in (leg.choice, leg.inside) if part is not None)


def _missing(routing: wire.ServiceRouting, owner_id: str) -> str:
    if owner_id in routing.unknown:
        return f"cannot be asked: {routing.unknown[owner_id]}"
    return "has not let it in, or has forgotten it"


def chosen(told: Sequence[RequestStory], wanted: Collection[str], last: int) -> tuple[list[RequestStory], list[str]]:
    """The last so many, or those that were asked for (ids in hexadecimal, also with what answers have before them).

    Returns:
        Their stories, and the ids of which nothing is known.
    """
    if not wanted:
        return list(told[-last:]) if last else [], []
    names = {name.lower().rsplit("-", 1)[-1].removeprefix("0x").lstrip("0") or "0" for name in wanted}
    found = [story for story in told if story.request_id in names]
    return found, sorted(names - {story.request_id for story in found})


def text_of(story: RequestStory) -> str:
    """A story in words."""
    lines = [f"request {story.request_id}, {_ago(story.age_s)}"]
    for leg in story.legs:
        lines.append(f"  {leg.role:<10}  {leg.owner_id}{_why_instance(leg.choice)}")
        if leg.inside is None:
            lines.append(f"  {'':<10}    {leg.owner_id} {leg.missing}")
        else:
            lines.append(f"  {'':<10}    {_why_rank(leg.inside)}")
    return "\n".join(lines)


def _why_instance(choice: wire.LegDecision | None) -> str:
    if choice is None:
        return ""
    return f": {choice.why} (it had {choice.load_weight} tokens in {_count(choice.load_requests, 'request')})"


def _why_rank(inside: wire.RoutingDecision) -> str:
    where = "all ranks" if inside.rank < 0 else f"rank {inside.rank}"
    told = f"{where}: {inside.why}"
    if inside.rank >= 0:
        told += f" (it had {inside.load_tokens} tokens in {_count(inside.load_requests, 'request')})"
    told += f"; {_count(inside.tokens, 'token')} of prompt"
    if inside.waited_for:
        told += f"; waited {inside.waited_ms:.1f} ms, last for {inside.waited_for}"
    return told


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _ago(age_s: float) -> str:
    return f"{age_s:.1f} s ago" if age_s < 120 else f"{age_s / 60:.0f} min ago"
