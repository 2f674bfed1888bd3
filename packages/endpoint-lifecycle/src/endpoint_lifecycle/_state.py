"""States of one owner lifetime.

Theory of operation. Building a service takes two runtimes: a throw-away one whose peak memory is measured, transfer
registration and bounce buffers included, and the final one that is sized with the result. Both open listeners. Only an
object that reached FINAL is ever given the capability to publish, so the address of the throw-away one cannot leak: there
is no code path from it to a record. Each publication mints a generation, an opaque name of that lifetime. Everything that
comes later (retiring, expiry, a peer's message) names the generation it means and is a no-op or a refusal when that is not
the live one. A new lifetime is a new object; RETIRED and FAILED lead nowhere.

The table below is the whole truth: the owner looks up (state, event) and nothing else decides. The figure in
docs/design.md is drawn from it.
"""

from __future__ import annotations

import enum
from types import MappingProxyType


class OwnerState(enum.StrEnum):
    """Where an owner's lifetime stands."""

    NEW = "new"
    ESTIMATING = "estimating"
    ESTIMATED = "estimated"
    FINAL = "final"
    PUBLISHED = "published"
    DRAINING = "draining"
    RETIRED = "retired"
    FAILED = "failed"


class OwnerEvent(enum.StrEnum):
    """What can happen to an owner."""

    ESTIMATION_BEGAN = "begin_estimation"
    ESTIMATION_CLOSED = "estimation_closed"
    FINALIZED = "finalize"
    PUBLISHED = "publish"
    DRAINING_STARTED = "start_draining"
    RETIRED = "retire"
    FAILED = "fail"


_S, _E = OwnerState, OwnerEvent

#: (state, event) -> next state. A pair that is not here raises InvalidTransition with the story.
TRANSITIONS: MappingProxyType[tuple[OwnerState, OwnerEvent], OwnerState] = MappingProxyType(
    {
        (_S.NEW, _E.ESTIMATION_BEGAN): _S.ESTIMATING,
        (_S.NEW, _E.FINALIZED): _S.FINAL,
        (_S.NEW, _E.FAILED): _S.FAILED,
        (_S.ESTIMATING, _E.ESTIMATION_CLOSED): _S.ESTIMATED,
        (_S.ESTIMATING, _E.FAILED): _S.FAILED,
        (_S.ESTIMATED, _E.ESTIMATION_BEGAN): _S.ESTIMATING,
        (_S.ESTIMATED, _E.FINALIZED): _S.FINAL,
        (_S.ESTIMATED, _E.FAILED): _S.FAILED,
        (_S.FINAL, _E.PUBLISHED): _S.PUBLISHED,
        (_S.FINAL, _E.FAILED): _S.FAILED,
        (_S.PUBLISHED, _E.DRAINING_STARTED): _S.DRAINING,
        (_S.PUBLISHED, _E.FAILED): _S.FAILED,
        (_S.DRAINING, _E.RETIRED): _S.RETIRED,
        (_S.DRAINING, _E.FAILED): _S.FAILED,
    }
)

TERMINAL = frozenset({OwnerState.RETIRED, OwnerState.FAILED})
#: States in which a record can be read.
VISIBLE = frozenset({OwnerState.PUBLISHED, OwnerState.DRAINING})


def render_mermaid() -> str:
    """The state figure for the documentation, drawn from TRANSITIONS."""
    lines = ["stateDiagram-v2", "    [*] --> NEW"]
    for (state, event), target in TRANSITIONS.items():
        lines.append(f"    {state.name} --> {target.name}: {event.value}")
    lines.extend(f"    {state.name} --> [*]" for state in OwnerState if state in TERMINAL)
    return "\n".join(lines)
