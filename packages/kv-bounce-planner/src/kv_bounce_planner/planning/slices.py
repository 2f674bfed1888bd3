"""One request's transfer in slices: each a range of tokens, of all layers or some, that may move before the rest is computed.

Theory. A plan is a set of bytes; slices partition it. Each slice is planned as a request of its own would be, from the same
shares and the same block tables, so it is canonical and has its own digest, and every writer's part of it is numbered from
zero: a slice is merged, written or bounced by itself. That the slices are a partition is proven, not assumed: all their ranges
together are compared with the whole request's, which are derived without any of them.

Recurrent state is of no token: it moves with the slices that reach the request's end, because only then is it final.

Both sides plan all slices in one call: the sender needs the receiver's block table and the cuts once, not once per slice.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from kv_bounce_planner._errors import LayoutError, PlanRefused
from kv_bounce_planner._reasons import Reason
from kv_bounce_planner.layout.model import InstanceLayout, KVLayout, RequestBlocks, TokenRange
from kv_bounce_planner.planning.plan import (
    TransferPlan,
    WriterTransfer,
    _all_pieces,
    _destination,
    _writer,
    join_ranges,
    overlaps,
    request_ranges,
    sort_ranges,
)

#: Slices of one request, at most: an operation's identity names its slice in 16 bits.
SLICES_MAX: Final = 1 << 16


@dataclass(frozen=True)
class Slice:
    """What may move together, as soon as the source has computed it.

    Attributes:
        tokens: Positions; the source has computed the slice when it has computed ``tokens.end``.
        layers: Layers of the whole model, by their ids; None: all.
    """

    tokens: TokenRange
    layers: range | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and (self.layers.step != 1 or not self.layers):
            raise LayoutError(f"layers want an ascending range that is not empty, got {self.layers}")


def cut_slices(
    tokens: TokenRange, slice_tokens: int, *, layers: Sequence[range] = (), last_tokens_min: int = 1
) -> tuple[Slice, ...]:
    """Slices that end at multiples of ``slice_tokens``, in the order in which a prefill computes them.

    The cuts are positions of the prompt, not of the range: a prefix that is there already moves no cut, and a cut at a multiple
    of both block sizes splits no block.

    Args:
        tokens: Positions to move.
        slice_tokens: From one cut to the next, >= 1 (tokens).
        layers: Layers that move together, ascending; empty: all.
        last_tokens_min: A last slice of fewer tokens is joined to the one before it, >= 1.

    Raises:
        LayoutError: A number is out of bounds, or there would be more than 65,536 slices.
    """
    if slice_tokens < 1 or last_tokens_min < 1:
        raise LayoutError(f"slice_tokens and last_tokens_min are at least 1, got {slice_tokens} and {last_tokens_min}")
    first = (tokens.start // slice_tokens + 1) * slice_tokens
    parts = tuple(layers) or (None,)
    if (max(tokens.end - first, 0) // slice_tokens + 2) * len(parts) > SLICES_MAX:
        raise LayoutError(f"slices of {slice_tokens} tokens would be more than {SLICES_MAX}")
    cuts = list(range(first, tokens.end, slice_tokens))
    if cuts and tokens.end - cuts[-1] < last_tokens_min:
        cuts.pop()
    ends = [tokens.start, *cuts, tokens.end]
    return tuple(Slice(TokenRange(start, end), part) for start, end in itertools.pairwise(ends) for part in parts)


def choose_slice_count(*, compute_s: float, transfer_s: float, slice_cost_s: float, count_max: int) -> int:
    """How many equal slices pay best; 1: do not slice.

    With n slices of ``transfer_s / n + slice_cost_s`` each, moved one after the other, the last lands that long after the
    prompt's end if the transfer keeps up with the compute, and later by what it falls behind if it does not. What the slices
    cost is work of both hosts, though it is hidden behind the compute: it counts as much as waiting does.

    Args:
        compute_s: What is left to compute when the destination is known, >= 0; 0: everything is computed by then.
        transfer_s: All of the request's bytes in one transfer, >= 0 (``TierChoice.predicted_s``).
        slice_cost_s: What each transfer costs however small it is, >= 0.
        count_max: The most that may be answered, in 1..65,536.

    Returns:
        The smallest count with the least sum of wait and added work.

    Raises:
        LayoutError: A number is out of bounds.
    """
    if not 1 <= count_max <= SLICES_MAX:
        raise LayoutError(f"count_max is in 1..{SLICES_MAX}, got {count_max}")
    if not all(0 <= each < math.inf for each in (compute_s, transfer_s, slice_cost_s)):
        raise LayoutError(f"durations are at least 0 and finite, got {compute_s}, {transfer_s} and {slice_cost_s}")
    counts = np.arange(1, count_max + 1)
    one_s = transfer_s / counts + slice_cost_s
    behind_s = compute_s / counts + counts * one_s - compute_s
    return int(np.argmin(np.maximum(one_s, behind_s) + counts * slice_cost_s)) + 1


@dataclass(frozen=True, eq=False)
class SlicedPlan:
    """Who writes which bytes of one target rank's request, slice by slice.

    Attributes:
        slices: In the order given.
        plans: Of each slice; a slice whose blocks were all evicted has no writer.
    """

    slices: tuple[Slice, ...]
    plans: tuple[TransferPlan, ...] = field(repr=False)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all slices."""
        return sum(plan.total_bytes for plan in self.plans)

    @property
    def writer_ranks(self) -> tuple[int, ...]:
        """Ranks that write some slice, ascending."""
        return tuple(sorted({rank for plan in self.plans for rank in plan.writers}))

    def counts(self) -> dict[int, int]:
        """Slices by the rank that writes them."""
        return {rank: sum(rank in plan.writers for plan in self.plans) for rank in self.writer_ranks}

    @cached_property
    def digest(self) -> bytes:
        """16 bytes over every slice's plan, in order."""
        state = hashlib.sha256(b"kv-sliced-plan.1")
        for plan in self.plans:
            state.update(plan.digest)
        return state.digest()[:16]


def plan_slices(
    source: InstanceLayout,
    target: KVLayout,
    target_blocks: RequestBlocks,
    tokens: TokenRange,
    slices: Sequence[Slice],
    *,
    source_adp_rank: int | None = None,
) -> SlicedPlan:
    """Derive, at the receiver, what each writer writes of each slice.

    Args:
        source, target, target_blocks, tokens, source_adp_rank: As of ``plan_destination``.
        slices: A partition of the request; ``cut_slices`` makes one.

    Returns:
        Canonical plans. Proven before return: within each slice as ``plan_destination`` does, and every byte of the request is
        in exactly one slice.

    Raises:
        PlanRefused: As ``plan_destination``; ``OVERLAP`` or ``NOT_EXACT_COVER`` when the slices are no partition.
        LayoutError: A block table does not start at a block, or a slice reaches outside the request.

    Source: docs/design.md#slices; oracle in ``kv_bounce_planner`` tests.
    """
    plans = []
    for each in _checked(tokens, slices):
        pieces = _all_pieces(target, target_blocks, each.tokens, states=each.tokens.end == tokens.end)
        plans.append(_destination(source, target, pieces, source_adp_rank, each.layers))
    plan = SlicedPlan(tuple(slices), tuple(plans))
    ranges = [each.ranges() for each in plans]
    addresses, sizes = sort_ranges(
        np.concatenate([each[0] for each in ranges]), np.concatenate([each[1] for each in ranges])
    )
    if overlaps(addresses, sizes):
        raise PlanRefused(Reason.OVERLAP, "two slices would write the same byte")
    have, have_sizes = join_ranges(addresses, sizes)
    wanted, wanted_sizes = request_ranges(target, target_blocks, tokens)
    if not (np.array_equal(have, wanted) and np.array_equal(have_sizes, wanted_sizes)):
        raise PlanRefused(
            Reason.NOT_EXACT_COVER,
            f"slices cover {int(have_sizes.sum())} B, the request has {int(wanted_sizes.sum())} B",
        )
    return plan


def plan_writer_slices(
    source: InstanceLayout,
    rank: int,
    source_blocks: RequestBlocks,
    target: KVLayout,
    target_blocks: RequestBlocks,
    tokens: TokenRange,
    slices: Sequence[Slice],
    *,
    source_adp_rank: int | None = None,
) -> tuple[WriterTransfer | None, ...]:
    """Derive, at one sender, the address pairs of every slice; None where this rank has nothing to write.

    The source's blocks must be there, not yet computed: a plan says where bytes will lie.

    Args:
        source, rank, source_blocks: As of ``plan_writer``.
        target, target_blocks, tokens, slices, source_adp_rank: As the receiver gave them.

    Raises:
        PlanRefused: As ``plan_writer``.
        LayoutError: A block table does not start at a block, or a slice reaches outside the request.
    """
    return tuple(
        _writer(
            source,
            rank,
            source_blocks,
            target,
            _all_pieces(target, target_blocks, each.tokens, states=each.tokens.end == tokens.end),
            source_adp_rank,
            each.layers,
        )
        for each in _checked(tokens, slices)
    )


def _checked(tokens: TokenRange, slices: Sequence[Slice]) -> Sequence[Slice]:
    if not 1 <= len(slices) <= SLICES_MAX:
        raise LayoutError(f"{len(slices)} slices are outside 1..{SLICES_MAX}")
    for each in slices:
        if each.tokens.start < tokens.start or each.tokens.end > tokens.end:
            raise LayoutError(f"{each} reaches outside {tokens}")
    return slices
