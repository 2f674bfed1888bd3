"""Plans, choices and refusals in words and as a picture; the marker lines."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    DEFAULT_MODELS,
    REASONS,
    InstanceLayout,
    KVLayout,
    LayoutError,
    Reason,
    Refusal,
    RequestBlocks,
    Slice,
    TokenRange,
    TransferPlan,
    choose_tier,
    coalesced_marker,
    draw,
    explain,
    in_place_marker,
    plan_slices,
    plan_transfer,
)


def rank(number: int, layers: range, base: int) -> KVLayout:
    return KVLayout.uniform(
        rank=number, first_layer=layers.start, layer_count=len(layers), head_total=2, head_dim=64, element_bytes=2,
        block_tokens=16, block_count=64, key_bases=[base + i * 0x100000 for i in range(len(layers))],
        value_bases=[base + 0x80000 + i * 0x100000 for i in range(len(layers))], order="HND",
    )  # fmt: skip


def plan() -> TransferPlan:
    source = InstanceLayout("s", (rank(0, range(3), 0x1000_0000), rank(1, range(3, 4), 0x2000_0000)), pp_size=2)
    return plan_transfer(
        source,
        rank(0, range(4), 0x9000_0000),
        tokens=TokenRange(4, 60),
        target_blocks=RequestBlocks.single([9, 3, 4, 30]),
        source_blocks={r: RequestBlocks.single([1, 5, 6, 0]) for r in (0, 1)},
    )


def test_slices_are_told_one_by_one() -> None:
    """Each by its tokens and layers, then its plan; all of it as data too."""
    source = InstanceLayout("s", (rank(0, range(3), 0x1000_0000), rank(1, range(3, 4), 0x2000_0000)), pp_size=2)
    cut = plan_slices(
        source,
        rank(0, range(4), 0x9000_0000),
        RequestBlocks.single([9, 3, 4, 30]),
        TokenRange(4, 60),
        [Slice(TokenRange(4, 32)), Slice(TokenRange(32, 60), range(2)), Slice(TokenRange(32, 60), range(2, 4))],
    )
    lines = explain(cut, ranges_max=0).splitlines()
    assert lines[0] == "112 KiB in 3 slice(s)"
    assert [line for line in lines if line.startswith("  slice")] == [
        "  slice 0: tokens 4 … 32, all layers",
        "  slice 1: tokens 32 … 60, layers 0 … 2",
        "  slice 2: tokens 32 … 60, layers 2 … 4",
    ]
    writers = [line.split(":")[0].strip() for line in lines if "writer " in line]
    assert writers == ["writer 0", "writer 1", "writer 0", "writer 0", "writer 1"]
    told = json.loads(explain(cut, "json"))
    assert told["kind"] == "sliced" and told["digest"] == cut.digest.hex()
    assert [each["plan"]["total_bytes"] for each in told["slices"]] == [plan.total_bytes for plan in cut.plans]
    assert told["slices"][1]["layers"] == [0, 2] and told["slices"][0]["layers"] is None


def test_markers_are_exact() -> None:
    """Services' tests look for these words; a silent fallback cannot produce the first."""
    assert (
        coalesced_marker(67, 64 << 20, 4)
        == "[kv-bounce] coalesced 67 blocks / 64MiB into one region across 4 writer(s)"
    )
    assert (
        coalesced_marker(2, 3 << 19, 1) == "[kv-bounce] coalesced 2 blocks / 1.5MiB into one region across 1 writer(s)"
    )
    assert in_place_marker(Reason.MIN_BYTES) == "[kv-bounce] in-place: min_bytes"


def test_text_says_who_writes_what_where() -> None:
    """Numbers in the text are the plan's own."""
    text = explain(plan())
    assert text.splitlines()[0].startswith("target rank 0 (DRAM): ")
    for number, writer in plan().writers.items():
        assert f"writer {number}: " in text and writer.digest.hex()[:8] in text
    first = plan().transfers[0]
    assert f"{int(first.source_addresses[0]):#x} -> {int(first.target_addresses[0]):#x} +{int(first.sizes[0])}" in text
    assert re.search(r"… \d+ more", text)
    assert not re.search(r"… \d+ more", explain(plan(), ranges_max=10_000))


def test_json_carries_the_same_numbers() -> None:
    """One object, stable keys, exact integers."""
    found = json.loads(explain(plan(), "json"))
    assert found["kind"] == "plan" and found["total_bytes"] == plan().total_bytes
    assert [w["rank"] for w in found["writers"]] == [0, 1]
    assert sum(w["total_bytes"] for w in found["writers"]) == found["total_bytes"]
    assert found["digest"] == plan().digest.hex()


def test_tiers_stand_beside_their_writers() -> None:
    """A plan with its choices says who writes what where, which way and why, in text and in JSON."""
    choices = {r: choose_tier(w, DEFAULT_MODELS["cma"]) for r, w in plan().writers.items()}
    text = explain(plan(), choices=choices).splitlines()
    for rank_number, choice in choices.items():
        at = next(i for i, line in enumerate(text) if line.startswith(f"  writer {rank_number}:"))
        assert text[at + 1].startswith(f"    {choice.tier.value} ({choice.reason.value}: ")
    found = json.loads(explain(plan(), "json", choices=choices))
    assert [w["choice"]["reason"] for w in found["writers"]] == [c.reason.value for c in choices.values()]


def test_choice_and_refusal_in_words() -> None:
    """The code and its sentence, both."""
    choice = choose_tier(plan(), DEFAULT_MODELS["cma"])
    assert choice.reason.value in explain(choice) and choice.reason.text in explain(choice)
    assert json.loads(explain(choice, "json"))["tier"] == choice.tier.value
    refusal = Refusal(Reason.RANK_METADATA_MISSING, "rank 3")
    assert explain(refusal) == "refused: rank_metadata_missing: a source rank's layout is not known here (rank 3)"
    assert json.loads(explain(refusal, "json"))["reason"] == "rank_metadata_missing"
    with pytest.raises(LayoutError):
        explain(plan(), "yaml")  # type: ignore[arg-type]
    with pytest.raises(LayoutError):
        explain(3)  # type: ignore[arg-type]


def test_every_reason_has_a_text_and_values_are_stable() -> None:
    """Codes are an interface: the list is spelled out so that a change shows as a diff."""
    assert set(REASONS) == set(Reason)
    assert all(reason.text and reason.when in ("choice", "fail_open", "fail_closed") for reason in Reason)
    assert " ".join(sorted(reason.value for reason in Reason)) == (
        "bad_checksum bad_field bad_magic bad_version block_out_of_range block_table_missing block_table_short "
        "bytes_missing closing disabled duplicate faster_bounce faster_direct faster_merged key_live layout_mismatch "
        "min_blocks min_bytes no_report no_space not_canonical not_exact_cover nothing_to_transfer ok outside_plan "
        "outside_slots overlap oversize plan_bytes plan_count rank_metadata_missing recurrent_state_split "
        "source_block_missing too_large too_many_fragments truncated writer_cohort_unknown wrong_base wrong_bytes "
        "wrong_operation wrong_plan wrong_rank"
    )


def test_drawing_is_well_formed_and_to_scale(tmp_path: Path) -> None:
    """SVG parses, is deterministic, names every writer with its tier, and a box's height is the writer's share."""
    choices = {r: choose_tier(w, DEFAULT_MODELS["cma"]) for r, w in plan().writers.items()}
    data = draw(plan(), tmp_path / "plan.svg", choices=choices)
    assert data == (tmp_path / "plan.svg").read_bytes() == draw(plan(), choices=choices)
    root = ElementTree.fromstring(data)
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"writer 0", "writer 1"} <= set(words) and any(word.startswith("rank 0, ") for word in words)
    assert sum(word.endswith(choices[0].reason.value) for word in words) == 2
    boxes = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("x") == "40"]
    heights = np.array([float(e.get("height", "0")) + 2 for e in boxes])
    shares = np.array([w.total_bytes for w in plan().writers.values()])
    assert np.allclose(heights / heights.sum(), shares / shares.sum(), atol=1e-3)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) >= 2


def test_png_and_formats(tmp_path: Path) -> None:
    """PNG by matplotlib; the ending picks the format; others are refused."""
    pytest.importorskip("matplotlib")
    data = draw(plan(), tmp_path / "plan.png")
    assert data.startswith(b"\x89PNG") and len(data) > 5000
    with pytest.raises(LayoutError):
        draw(plan(), tmp_path / "plan.gif")
    assert draw(TransferPlan(0, {}, 0)).startswith(b"<svg")


def test_a_map_of_the_target_gives_every_token_its_one_writer():
    """Layers, heads, tokens: the colours are looked up by address, evicted blocks stay grey, and nothing is painted twice."""
    from kv_bounce_planner.planning import InstanceLayout, KVLayout, RequestBlocks, TokenRange, plan_destination
    from kv_bounce_planner.words.draw import DrawnTarget, scene

    def rank(number, layers, first_head, heads, base, tokens):
        bases = [base + i * 0x100000 for i in range(len(layers))]
        return KVLayout.uniform(
            rank=number, first_layer=layers[0], layer_count=len(layers), head_total=6, first_head=first_head,
            head_count=heads, head_dim=4, element_bytes=2, block_tokens=tokens, block_count=32, key_bases=bases,
            value_bases=[at + 0x80000 for at in bases],
        )  # fmt: skip

    ranks = [
        rank(p * 2 + t, range(p * 3, p * 3 + 3), t * 3, 3, 0x10000000 * (1 + p * 2 + t), 8)
        for p in range(2)
        for t in range(2)
    ]
    source, target = InstanceLayout("ctx", tuple(ranks), pp_size=2, tp_size=2), rank(0, range(6), 2, 3, 0x7000000000, 4)
    tokens, blocks = TokenRange(3, 29), RequestBlocks.single([5, 9, -1, 3, 2, 8, 1, 12])
    plan = plan_destination(source, target, blocks, tokens)
    picture = scene(plan, None, DrawnTarget(target, blocks, tokens))
    colour = {writer.rank: writer.colour for writer in picture.writers}
    rows = sorted({cell.top for cell in picture.cells})
    assert len(rows) == 12 and len({label.text for label in picture.labels}) == 12 + 3 + 1
    for number, top in enumerate(rows):
        row = sorted((cell for cell in picture.cells if cell.top == top), key=lambda cell: cell.left)
        first = 0 if number < 6 else 2  # the stage; head 2 is its first rank's, heads 3 and 4 its second's
        expected = [colour[rank] for rank in (first, first + 1, first + 1) for _ in range(2)]
        assert [cell.colour for cell in row if cell.colour != "#e8e8e8"] == expected
        assert sum(cell.colour == "#e8e8e8" for cell in row) == 3, "the evicted block of each head"
        assert all(a.left + a.width <= b.left + 1e-6 for a, b in itertools.pairwise(row)), "cells overlap"
    assert not any(writer.bands for writer in picture.writers)
    column = scene(plan)
    assert sum(cell.height for cell in column.cells) == 460 and all(not writer.bands for writer in column.writers)
