"""A plan as a picture: source ranks on the left, the target's memory on the right, one band per run of ranges.

The scene is computed once, as plain boxes and bands, and rendered by two small writers: SVG as text, with nothing but the
standard library, and PNG by matplotlib where it is installed. The target's column is to scale in bytes (not in
addresses: pools lie terabytes apart), so a band's height is the writer's share.
"""

from __future__ import annotations

import html
import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kv_bounce_planner._errors import LayoutError, TransportError
from kv_bounce_planner.planning.plan import TransferPlan
from kv_bounce_planner.planning.tier import TierChoice
from kv_bounce_planner.words.explain import _bytes

#: Bands drawn per writer at most; neighbouring ranges are drawn together beyond it.
BANDS_MAX = 48
_WIDTH, _TOP, _HEIGHT, _BOX = 860.0, 64.0, 460.0, 190.0
_COLOURS = ("#3b6fb6", "#c8553d", "#4a8f5a", "#8a5aa8", "#b8862b", "#4a9aa5", "#a54a72", "#6b6b6b")


@dataclass(frozen=True)
class _Band:
    top: float
    bottom: float
    target_top: float
    target_bottom: float


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


def scene(plan: TransferPlan, choices: Mapping[int, TierChoice] | None = None) -> Scene:
    """Lay the plan out; ``choices`` adds each writer's tier and reason."""
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
    return Scene(
        title=f"target rank {plan.target_rank}: {_bytes(plan.total_bytes)} from {len(ranks)} writer(s)",
        subtitle=f"plan {plan.digest.hex()}",
        writers=tuple(drawn),
        target_lines=(f"rank {plan.target_rank}", plan.memory_kind, f"{plan.block_count} blocks"),
    )


def _bands(top: float, starts: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any], scale: float) -> list[_Band]:
    """Ranges that lie side by side in the target's byte order are one band; then at most BANDS_MAX."""
    cuts = np.flatnonzero(starts[1:] != starts[:-1] + sizes[:-1]) + 1
    groups = np.concatenate(([0], cuts, [len(sizes)]))
    if len(groups) - 1 > BANDS_MAX:
        groups = np.unique(np.linspace(0, len(sizes), BANDS_MAX + 1).astype(np.int64))
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
    parts.append(
        f'<rect x="{right:g}" y="{_TOP:g}" width="{_BOX:g}" height="{_HEIGHT:g}" fill="none" stroke="#333333"/>'
    )
    for i, line in enumerate(picture.target_lines):
        parts.append(f'<text x="{right + 10:g}" y="{_TOP + 18 + 15 * i:g}">{html.escape(line)}</text>')
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
    axes.add_patch(Rectangle((right, _TOP), _BOX, _HEIGHT, fill=False, edgecolor="#333333"))
    for i, line in enumerate(picture.target_lines):
        axes.text(right + 10, _TOP + 18 + 15 * i, line, fontsize=9)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def draw(
    plan: TransferPlan,
    path: str | Path | None = None,
    *,
    format: Literal["svg", "png"] | None = None,
    choices: Mapping[int, TierChoice] | None = None,
) -> bytes:
    """Draw who writes what where.

    Args:
        plan: The plan.
        path: Where to write the picture as well; None only returns it.
        format: "svg" or "png"; None takes it from the path's ending, or "svg".
        choices: Tier and reason by writer rank.

    Returns:
        The picture's bytes. Equal plans give equal SVG.

    Raises:
        LayoutError: An unknown format.
        TransportError: PNG without matplotlib.
    """
    kind: str = format or (Path(path).suffix.lstrip(".").lower() if path is not None else "svg")
    if kind not in ("svg", "png"):
        raise LayoutError(f'format is "svg" or "png", not {kind!r}')
    picture = scene(plan, choices)
    data = _svg(picture).encode() if kind == "svg" else _png(picture)
    if path is not None:
        Path(path).write_bytes(data)
    return data
