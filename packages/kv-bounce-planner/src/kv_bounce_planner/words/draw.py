"""A plan as a picture: source ranks on the left, the target on the right, painted in its writers' colours.

The scene is computed once, as plain boxes, bands and cells, and rendered by two small writers: SVG as text, with nothing but
the standard library, and PNG by matplotlib where it is installed.

With the target's layout and block table the target is a map: a row per layer and factor (K, V), a column per KV head, tokens
from left to right within it; each cell has the colour of the one writer whose ranges hold its bytes, looked up by address, so
nothing can seem to be written twice. Without them it is a column to scale in bytes (not in addresses: pools lie terabytes
apart), painted line by line; bands are drawn only while each is a run of its own, because a band over several runs would cover
what others write in between.
"""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kv_bounce_planner._errors import LayoutError, TransportError
from kv_bounce_planner.layout.model import KVLayout, LayerGroup, RequestBlocks, TokenRange
from kv_bounce_planner.planning.plan import TransferPlan
from kv_bounce_planner.planning.tier import TierChoice
from kv_bounce_planner.words.explain import _bytes

#: Bands drawn per writer at most; beyond it none is drawn, and the painted target says whose is what.
BANDS_MAX = 48
#: Rows, columns and token cells of the map at most (counts): beyond, every n-th is shown.
ROWS_MAX, COLUMNS_MAX, TOKENS_MAX = 64, 16, 64
_WIDTH, _TOP, _HEIGHT, _BOX = 860.0, 64.0, 460.0, 190.0
_COLOURS = ("#3b6fb6", "#c8553d", "#4a8f5a", "#8a5aa8", "#b8862b", "#4a9aa5", "#a54a72", "#6b6b6b")


@dataclass(frozen=True)
class _Band:
    top: float
    bottom: float
    target_top: float
    target_bottom: float


@dataclass(frozen=True)
class _Cell:
    """A painted piece of the target."""

    left: float
    top: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class _Label:
    left: float
    top: float
    text: str


@dataclass(frozen=True)
class _Writer:
    rank: int
    colour: str
    top: float
    bottom: float
    lines: tuple[str, ...]
    bands: tuple[_Band, ...]


@dataclass(frozen=True)
class Scene:
    """What is drawn: boxes, bands and words, in pixels from the top left."""

    title: str
    subtitle: str
    writers: tuple[_Writer, ...]
    target_lines: tuple[str, ...]
    cells: tuple[_Cell, ...] = ()
    labels: tuple[_Label, ...] = ()


@dataclass(frozen=True)
class DrawnTarget:
    """What a map of the target needs: as given to ``plan_destination``."""

    layout: KVLayout
    blocks: RequestBlocks
    tokens: TokenRange


def scene(
    plan: TransferPlan, choices: Mapping[int, TierChoice] | None = None, target: DrawnTarget | None = None
) -> Scene:
    """Lay the plan out; ``choices`` adds each writer's tier and reason, ``target`` the map."""
    total = max(plan.total_bytes, 1)
    ranks = list(plan.writers)
    order = np.argsort(
        np.concatenate([plan.writers[r].target_addresses for r in ranks]) if ranks else np.empty(0, np.int64),
        kind="stable",
    )
    sizes = np.concatenate([plan.writers[r].sizes for r in ranks]) if ranks else np.empty(0, np.int64)
    starts = np.empty(len(sizes), np.float64)
    starts[order] = np.cumsum(sizes[order]) - sizes[order]
    scale = _HEIGHT / total
    drawn: list[_Writer] = []
    at, first = _TOP, 0
    for number, rank in enumerate(ranks):
        writer = plan.writers[rank]
        mine = starts[first : first + writer.range_count]
        first += writer.range_count
        height = writer.total_bytes * scale
        choice = (choices or {}).get(rank)
        lines = [f"writer {rank}", f"{_bytes(writer.total_bytes)}, {writer.range_count} ranges"]
        if choice is not None:
            lines.append(f"{choice.tier.value}: {choice.reason.value}")
        drawn.append(
            _Writer(
                rank,
                _COLOURS[number % len(_COLOURS)],
                at,
                at + height,
                tuple(lines),
                tuple(_bands(at, mine, writer.sizes, scale)),
            )
        )
        at += height
    colours = {writer.rank: writer.colour for writer in drawn}
    if target is not None:
        drawn = [replace(writer, bands=()) for writer in drawn]
        cells, labels = _map(plan, colours, target)
    else:
        cells, labels = _column(plan, colours), []
    return Scene(
        title=f"target rank {plan.target_rank}: {_bytes(plan.total_bytes)} from {len(ranks)} writer(s)",
        subtitle=f"plan {plan.digest.hex()}",
        writers=tuple(drawn),
        target_lines=(f"rank {plan.target_rank}", plan.memory_kind, f"{plan.block_count} blocks"),
        cells=tuple(cells),
        labels=tuple(labels),
    )


def _owners(plan: TransferPlan) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(starts, ends, writer ranks) of all ranges, ascending."""
    if not plan.writers:
        empty = np.empty(0, np.int64)
        return empty, empty, empty
    starts = np.concatenate([writer.target_addresses for writer in plan.writers.values()])
    sizes = np.concatenate([writer.sizes for writer in plan.writers.values()])
    ranks = np.concatenate([np.full(writer.range_count, rank, np.int64) for rank, writer in plan.writers.items()])
    order = np.argsort(starts, kind="stable")
    return starts[order], starts[order] + sizes[order], ranks[order]


def _column(plan: TransferPlan, colours: Mapping[int, str]) -> list[_Cell]:
    """The target's bytes from top to bottom; each line of pixels has the colour of the writer of its middle byte."""
    starts, ends, ranks = _owners(plan)
    lines = int(_HEIGHT)
    if not len(starts):
        return []
    sums = np.cumsum(ends - starts)
    middles = (np.arange(lines) + 0.5) * (float(sums[-1]) / lines)
    owners = ranks[np.searchsorted(sums, middles, side="right").clip(max=len(sums) - 1)]
    cuts = np.concatenate(([0], np.flatnonzero(owners[1:] != owners[:-1]) + 1, [lines]))
    left = _WIDTH - 40.0 - _BOX
    return [
        _Cell(left, _TOP + begin, _BOX, end - begin, colours[int(owners[begin])])
        for begin, end in itertools.pairwise(cuts.tolist())
    ]


def _map(plan: TransferPlan, colours: Mapping[int, str], target: DrawnTarget) -> tuple[list[_Cell], list[_Label]]:
    """A row per layer and factor, a column per head, tokens within it."""
    rows = [
        (group, layer, factor)
        for group in target.layout.groups
        for layer in group.layer_ids
        for factor in range(group.kv_factor)
    ]
    rows = rows[:: -(-len(rows) // ROWS_MAX) or 1]
    owners = _owners(plan)
    left, right = 40.0 + _BOX + 90.0, _WIDTH - 40.0
    top, height = _TOP + 14.0, (_HEIGHT - 14.0) / max(len(rows), 1)
    cells: list[_Cell] = []
    labels: list[_Label] = []
    for number, (group, layer, factor) in enumerate(rows):
        y = top + number * height
        name = "state" if group.opaque else ("latent" if group.kv_factor == 1 else "KV"[factor])
        labels.append(_Label(left - 80.0, y + height / 2 + 4, f"layer {layer} {name}"))
        heads = list(range(group.first_head, group.first_head + group.head_count))
        heads = heads[:: -(-len(heads) // COLUMNS_MAX) or 1]
        width = (right - left) / len(heads)
        for column, head in enumerate(heads):
            if number == 0:
                labels.append(_Label(left + column * width + 2, _TOP + 8, f"head {head}"))
            cells += _row(
                group, layer, factor, head, target, owners, colours, left + column * width, y, width - 3, height - 1
            )
    labels.append(
        _Label(
            left,
            _TOP + _HEIGHT + 16,
            f"tokens {target.tokens.start} … {target.tokens.end - 1}, left to right in each cell",
        )
    )
    return cells, labels


def _row(
    group: LayerGroup,
    layer: int,
    factor: int,
    head: int,
    target: DrawnTarget,
    owners: tuple[np.ndarray[Any, Any], ...],
    colours: Mapping[int, str],
    left: float,
    top: float,
    width: float,
    height: float,
) -> list[_Cell]:
    starts, ends, ranks = owners
    table = target.blocks.tables[group.group_id]
    if group.opaque:
        positions, ids, slots = (
            np.arange(len(table.block_ids)),
            table.block_ids,
            np.zeros(len(table.block_ids), np.int64),
        )
    else:
        share = group.token_share  # the tokens that this rank holds, by their own count
        first, end = share.count_below(target.tokens.start), share.count_below(target.tokens.end)
        positions = np.arange(first, end)[:: -(-(end - first) // TOKENS_MAX) or 1]
        index, slots = np.divmod(positions - table.first_token, group.block_tokens)
        ids = table.block_ids[index]
    base = (group.value_bases if factor else group.key_bases)[group.layer_ids.index(layer)]
    addresses = (
        base
        + ids * group.block_stride_bytes
        + slots * group.token_stride_bytes
        + (head - group.first_head) * group.head_stride_bytes
    )
    at = np.searchsorted(starts, addresses, side="right") - 1
    held = (ids >= 0) & (at >= 0)
    held[held] &= addresses[held] < ends[at[held]]
    owner = np.where(held, ranks[at.clip(min=0)] if len(ranks) else -1, -1)
    cuts = np.concatenate(([0], np.flatnonzero(owner[1:] != owner[:-1]) + 1, [len(owner)]))
    step = width / max(len(positions), 1)
    return [
        _Cell(left + begin * step, top, (end - begin) * step, height, colours.get(int(owner[begin]), "#e8e8e8"))
        for begin, end in itertools.pairwise(cuts.tolist())
    ]


def _bands(top: float, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], scale: float) -> list[_Band]:
    """Ranges that lie side by side in the target's byte order are one band; none at all beyond BANDS_MAX."""
    cuts = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    groups = np.concatenate(([0], cuts, [len(sizes)]))
    if len(groups) - 1 > BANDS_MAX:
        return []
    offsets = np.cumsum(sizes) - sizes
    bands = []
    for begin, end in itertools.pairwise(groups.tolist()):
        bands.append(
            _Band(
                top + float(offsets[begin]) * scale,
                top + float(offsets[end - 1] + sizes[end - 1]) * scale,
                _TOP + float(starts[begin]) * scale,
                _TOP + float(starts[end - 1] + sizes[end - 1]) * scale,
            )
        )
    return bands


def _fitting(writer: _Writer) -> tuple[str, ...]:
    """The lines that a small box has room for."""
    return writer.lines[: int((writer.bottom - writer.top - 4) // 15)]


def _svg(picture: Scene) -> str:
    left, right = 40.0 + _BOX, _WIDTH - 40.0 - _BOX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{_TOP + _HEIGHT + 36:g}" '
        f'viewBox="0 0 {_WIDTH:g} {_TOP + _HEIGHT + 36:g}" font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(picture.title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="40" y="28" font-size="16">{html.escape(picture.title)}</text>',
        f'<text x="40" y="46" fill="#666666">{html.escape(picture.subtitle)}</text>',
    ]
    middle = (left + right) / 2
    for writer in picture.writers:
        for band in writer.bands:
            parts.append(
                f'<path d="M{left:.1f} {band.top:.2f} C{middle:.1f} {band.top:.2f} {middle:.1f} {band.target_top:.2f} '
                f"{right:.1f} {band.target_top:.2f} L{right:.1f} {band.target_bottom:.2f} C{middle:.1f} "
                f"{band.target_bottom:.2f} {middle:.1f} {band.bottom:.2f} {left:.1f} {band.bottom:.2f} Z"
                f'" fill="{writer.colour}" fill-opacity="0.45"/>'
            )
    for writer in picture.writers:
        parts.append(
            f'<rect x="40" y="{writer.top:.2f}" width="{_BOX:g}" height="{max(writer.bottom - writer.top - 2, 1):.2f}" '
            f'fill="{writer.colour}"/>'
        )
        for i, line in enumerate(_fitting(writer)):
            parts.append(f'<text x="48" y="{writer.top + 16 + 15 * i:.2f}" fill="#ffffff">{html.escape(line)}</text>')
    for cell in picture.cells:
        parts.append(
            f'<rect x="{cell.left:.2f}" y="{cell.top:.2f}" width="{cell.width:.2f}" height="{cell.height:.2f}" '
            f'fill="{cell.colour}"/>'
        )
    for label in picture.labels:
        parts.append(f'<text x="{label.left:.1f}" y="{label.top:.1f}" font-size="10">{html.escape(label.text)}</text>')
    if not picture.labels:
        parts.append(
            f'<rect x="{right:g}" y="{_TOP:g}" width="{_BOX:g}" height="{_HEIGHT:g}" fill="none" stroke="#333333"/>'
        )
    parts.append(f'<text x="{right:g}" y="46" fill="#666666">{html.escape(", ".join(picture.target_lines))}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _png(picture: Scene) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import PathPatch, Rectangle
        from matplotlib.path import Path as Curve
    except ImportError as error:
        raise TransportError("PNG needs matplotlib; SVG needs nothing") from error
    height = _TOP + _HEIGHT + 36
    figure = Figure(figsize=(_WIDTH / 100, height / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(height, 0)
    axes.axis("off")
    left, right = 40.0 + _BOX, _WIDTH - 40.0 - _BOX
    middle = (left + right) / 2
    axes.text(40, 28, picture.title, fontsize=12)
    axes.text(40, 46, picture.subtitle, fontsize=8, color="#666666")
    codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
    for writer in picture.writers:
        for band in writer.bands:
            points = [
                (left, band.top),
                (middle, band.top),
                (middle, band.target_top),
                (right, band.target_top),
                (right, band.target_bottom),
                (middle, band.target_bottom),
                (middle, band.bottom),
                (left, band.bottom),
                (left, band.top),
            ]
            axes.add_patch(PathPatch(Curve(points, codes), facecolor=writer.colour, alpha=0.45, linewidth=0))
        axes.add_patch(
            Rectangle((40, writer.top), _BOX, max(writer.bottom - writer.top - 2, 1), facecolor=writer.colour)
        )
        for i, line in enumerate(_fitting(writer)):
            axes.text(48, writer.top + 16 + 15 * i, line, fontsize=9, color="#ffffff")
    for cell in picture.cells:
        axes.add_patch(Rectangle((cell.left, cell.top), cell.width, cell.height, facecolor=cell.colour, linewidth=0))
    for label in picture.labels:
        axes.text(label.left, label.top, label.text, fontsize=7)
    if not picture.labels:
        axes.add_patch(Rectangle((right, _TOP), _BOX, _HEIGHT, fill=False, edgecolor="#333333"))
    axes.text(right, 46, ", ".join(picture.target_lines), fontsize=8, color="#666666")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def draw(
    plan: TransferPlan,
    path: str | Path | None = None,
    *,
    format: Literal["svg", "png"] | None = None,
    choices: Mapping[int, TierChoice] | None = None,
    target: tuple[KVLayout, RequestBlocks, TokenRange] | None = None,
) -> bytes:
    """Draw who writes what where.

    Args:
        plan: The plan.
        path: Where to write the picture as well; None only returns it.
        format: "svg" or "png"; None takes it from the path's ending, or "svg".
        choices: Tier and reason by writer rank.
        target: Layout, block table and tokens as given to ``plan_destination``: then layers, heads and tokens are shown.

    Returns:
        The picture's bytes. Equal plans give equal SVG.

    Raises:
        LayoutError: An unknown format.
        TransportError: PNG without matplotlib.
    """
    kind: str = format or (Path(path).suffix.lstrip(".").lower() if path is not None else "svg")
    if kind not in ("svg", "png"):
        raise LayoutError(f'format is "svg" or "png", not {kind!r}')
    picture = scene(plan, choices, None if target is None else DrawnTarget(*target))
    data = _svg(picture).encode() if kind == "svg" else _png(picture)
    if path is not None:
        Path(path).write_bytes(data)
    return data
