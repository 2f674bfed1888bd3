"""The state table in the docs is the state table."""

from __future__ import annotations

from pathlib import Path

from meta_executor.executor.ownership import TRANSITIONS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "executor.md"


def drawn() -> str:
    """The table as the docs show it."""
    lines = ["| from | event | to | roles | schedules |", "|---|---|---|---|---|"]
    for (state, event), edge in TRANSITIONS.items():
        lines.append(
            f"| {state.value} | {event.value} | {edge.target.value} | {', '.join(edge.roles)} | "
            f"{', '.join(style.replace('_', '-') for style in edge.styles)} |"
        )
    return "\n".join(lines)


def test_the_figure_in_the_docs_is_drawn_from_the_table() -> None:
    """Run this file as a program to draw it anew."""
    text = DOCS.read_text("utf-8")
    shown = text.split("<!-- table: begin -->")[1].split("<!-- table: end -->")[0].strip()
    assert shown == drawn()


if __name__ == "__main__":
    head, _, rest = DOCS.read_text("utf-8").partition("<!-- table: begin -->")
    tail = rest.partition("<!-- table: end -->")[2]
    DOCS.write_text(f"{head}<!-- table: begin -->\n{drawn()}\n<!-- table: end -->{tail}", "utf-8")
