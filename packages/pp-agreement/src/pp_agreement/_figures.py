"""Figures and tables of the protocol, drawn from the tables that the core runs on; docs/design.md holds what this prints."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from pp_agreement._state import (
    ACKNOWLEDGE_ANSWERS,
    COORDINATOR_RULES,
    FENCE,
    MEMBER_TRANSITIONS,
    MESSAGES,
    PHASE_TRANSITIONS,
    PUBLISH_ANSWERS,
    REVOKE_ANSWERS,
    SCHEDULER_TRANSITIONS,
    TERMINAL_TRANSITIONS,
    WITHDRAW_ANSWERS,
    Kind,
    Phase,
    ReadyState,
    TerminalInput,
    TerminalState,
)


def state_figure(table: Mapping[IntEnum, Mapping[IntEnum, IntEnum]], start: IntEnum) -> str:
    """One machine as a Mermaid state diagram; inputs that lead to the same state share an edge."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.name}"]
    for state, row in table.items():
        edges: dict[str, list[str]] = {}
        for given, after in row.items():
            edges.setdefault(after.name, []).append(given.name)
        lines.extend(f"    {state.name} --> {after}: {', '.join(inputs)}" for after, inputs in edges.items())
        if not row:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


def message_table() -> str:
    """Every record kind, its author and its meaning."""
    lines = ["| kind | code | phase | author | to | meaning |", "|---|---|---|---|---|---|"]
    for kind, message in MESSAGES.items():
        lines.append(
            f"| {kind.name} | {int(kind)} | {message.phase} | {message.author} | {message.to} | {message.meaning} |"
        )
    return "\n".join(lines)


def coordinator_table() -> str:
    """What the coordinator does with a member's readiness record, by phase."""
    kinds = [k for k in Kind if k <= Kind.RECALL]
    lines = ["| phase | " + " | ".join(k.name for k in kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for phase in Phase:
        rules = [COORDINATOR_RULES[phase][kind].name.lower() for kind in kinds]
        lines.append(f"| {phase.name} | " + " | ".join(rules) + " |")
    return "\n".join(lines)


def answer_table() -> str:
    """What a host's calls answer, by readiness state."""
    columns: dict[str, Mapping[ReadyState, object]] = {
        "publish_ready": PUBLISH_ANSWERS,
        "acknowledge_prepare": ACKNOWLEDGE_ANSWERS,
        "withdraw": WITHDRAW_ANSWERS,
        "revoke (scheduling rank)": REVOKE_ANSWERS,
    }
    lines = ["| state | " + " | ".join(columns) + " | vote_terminal | doubt |", "|---" * (len(columns) + 3) + "|"]
    for state in ReadyState:
        cells = []
        for answers in columns.values():
            answer = answers.get(state, "refused")
            cells.append(answer.name if isinstance(answer, IntEnum) else str(answer))
        cells += [
            "taken" if state in FENCE[given] else "refused" for given in (TerminalInput.VOTE, TerminalInput.DOUBT)
        ]
        lines.append(f"| {state.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figures() -> str:
    """The generated part of docs/design.md."""
    return "\n\n".join(
        [
            "### Readiness at every rank but the scheduling one",
            state_figure(MEMBER_TRANSITIONS, ReadyState.IDLE),  # type: ignore[arg-type]
            "### Readiness at the scheduling rank",
            state_figure(SCHEDULER_TRANSITIONS, ReadyState.IDLE),  # type: ignore[arg-type]
            "### Terminal phase at a rank",
            state_figure(TERMINAL_TRANSITIONS, TerminalState.OPEN),  # type: ignore[arg-type]
            "### Coordinator: where its decisions lead",
            state_figure(PHASE_TRANSITIONS, Phase.GATHERING),  # type: ignore[arg-type]
            "### Coordinator: a member's readiness record, by phase",
            coordinator_table(),
            "### What calls answer, by the state of the attempt that runs",
            answer_table(),
            "### Messages",
            message_table(),
        ]
    )
