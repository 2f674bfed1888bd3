"""A frame as a terminal table, once or live. The only file that imports rich."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from meta_executor.observe.top import Frame, InstanceRow, RankRow, Sample, frame_of

#: Width where there is no terminal to ask (columns).
_WIDTH = 110
_OK = frozenset({"ok", "ready", "published"})


def print_frame(frame: Frame, file: IO[str] | None = None) -> None:
    """Print one frame; plain text where the output is no terminal."""
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=_WIDTH)
    console.print(render(frame))


def run_live(sample: Callable[[], Sample], interval_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a frame per interval until interrupted."""
    console = Console(highlight=False)
    before = sample()
    with Live(Text("one interval, please …"), console=console, auto_refresh=False, screen=True) as live:
        while True:
            sleep(interval_s)
            after = sample()
            live.update(render(frame_of(before, after)), refresh=True)
            before = after


def render(frame: Frame) -> Group:
    """The front's line, then a table of instances and their ranks."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("instance", no_wrap=True)
    table.add_column("state", no_wrap=True, max_width=32)
    for name in ("requests", "queued", "KV", "", "tokens/s", "steps/s", "p50 ms", "done", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for instance in frame.instances:
        _add_instance(table, instance)
    return Group(_headline(frame), table)


def _headline(frame: Frame) -> Text:
    front = frame.front
    if front is None:
        return Text(f"{frame.url}, one instance, rates over {frame.interval_s:.1f} s", style="bold")
    words = (
        f"front {frame.url} {front.health}: {front.running} running, {front.requests} requests "
        f"({_rate(front.requests_per_s)}/s), {front.errors} errors, {front.refused} refused, {front.left} left; "
        f"rates over {frame.interval_s:.1f} s"
    )
    return Text(words, style="bold" if front.health in _OK else "bold red")


def _add_instance(table: Table, row: InstanceRow) -> None:
    used = sum(rank.kv_blocks_used for rank in row.ranks)
    total = sum(rank.kv_blocks_total for rank in row.ranks)
    table.add_row(
        row.owner_id,
        Text(row.status, style="green" if row.status in _OK else "red"),
        str(row.requests),
        str(row.waiting),
        f"{used}/{total}",
        _share(used, total),
        _rate(row.answer_tokens_per_s),
        "",
        f"{row.step_p50_ms:.1f}",
        str(row.completed),
        str(row.failed + row.cancelled),
        style="bold",
    )
    for rank in row.ranks:
        _add_rank(table, rank)


def _add_rank(table: Table, row: RankRow) -> None:
    state = ""
    if row.quarantined_bytes:
        state = f"{row.quarantined_bytes >> 10} KiB in quarantine"
    elif row.undecided:
        state = f"{row.undecided} undecided"
    table.add_row(
        f"  rank {row.rank}",
        Text(state, style="red" if row.quarantined_bytes else ""),
        str(row.requests),
        "",
        f"{row.kv_blocks_used}/{row.kv_blocks_total}",
        _share(row.kv_blocks_used, row.kv_blocks_total),
        _rate(row.tokens_per_s),
        _rate(row.steps_per_s),
        "",
        "",
        "",
    )


def _share(used: int, total: int) -> str:
    return f"{100 * used / total:.0f} %" if total else "-"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
