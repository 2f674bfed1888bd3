"""Plans, choices and refusals in words: text for people, JSON for tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from kv_bounce_planner._errors import LayoutError
from kv_bounce_planner._reasons import Reason, Refusal
from kv_bounce_planner.planning.plan import TransferPlan, WriterPlan, WriterTransfer
from kv_bounce_planner.planning.slices import SlicedPlan
from kv_bounce_planner.planning.tier import TierChoice

#: What a log line begins with when writers were coalesced; tests of whole services look for it.
COALESCED_PREFIX = "[kv-bounce] coalesced"
#: What a log line begins with when a transfer was written in place.
IN_PLACE_PREFIX = "[kv-bounce] in-place"

Explained = SlicedPlan | TransferPlan | WriterPlan | WriterTransfer | TierChoice | Refusal


def coalesced_marker(block_count: int, total_bytes: int, writer_count: int) -> str:
    """The line that says that a bounce transfer really was one."""
    return (
        f"{COALESCED_PREFIX} {block_count} blocks / {total_bytes / (1 << 20):g}MiB into one region "
        f"across {writer_count} writer(s)"
    )


def in_place_marker(reason: Reason) -> str:
    """The line that says why a transfer was written in place."""
    return f"{IN_PLACE_PREFIX}: {reason.value}"


def explain(
    subject: Explained,
    format: Literal["text", "json"] = "text",
    *,
    ranges_max: int = 4,
    choices: Mapping[int, TierChoice] | None = None,
) -> str:
    """Say who writes what where, or which way and why.

    Args:
        subject: A plan (either side's view, whole or in slices), a choice or a refusal.
        format: "text" for people, "json" for tools (one object with a "kind"; keys are stable).
        ranges_max: Ranges shown per writer in the text; JSON carries the first so many as well and the count.
        choices: Each writer's tier and reason, shown with a plan.

    Returns:
        Text without a final newline.
    """
    described = describe(subject, ranges_max=ranges_max, choices=choices)
    if format == "json":
        return json.dumps(described, sort_keys=True)
    if format != "text":
        raise LayoutError(f'format is "text" or "json", not {format!r}')
    return "\n".join(_lines(described))


def describe(
    subject: Explained, *, ranges_max: int = 4, choices: Mapping[int, TierChoice] | None = None
) -> dict[str, Any]:
    """What :func:`explain` says, as plain data."""
    if isinstance(subject, SlicedPlan):
        return {
            "kind": "sliced",
            "total_bytes": subject.total_bytes,
            "digest": subject.digest.hex(),
            "slices": [
                {
                    "first_token": each.tokens.start,
                    "end_token": each.tokens.end,
                    "layers": None if each.layers is None else [each.layers.start, each.layers.stop],
                    "plan": describe(plan, ranges_max=ranges_max, choices=choices),
                }
                for each, plan in zip(subject.slices, subject.plans, strict=True)
            ],
        }
    if isinstance(subject, TransferPlan):
        chosen = choices or {}
        return {
            "kind": "plan",
            "target_rank": subject.target_rank,
            "memory_kind": subject.memory_kind,
            "device_id": subject.device_id,
            "block_count": subject.block_count,
            "total_bytes": subject.total_bytes,
            "digest": subject.digest.hex(),
            "writers": [
                describe(subject.transfers.get(rank, writer), ranges_max=ranges_max)
                | ({"choice": describe(chosen[rank])} if rank in chosen else {})
                for rank, writer in subject.writers.items()
            ],
        }
    if isinstance(subject, WriterPlan):
        return _describe_writer(subject, ranges_max)
    if isinstance(subject, WriterTransfer):
        described = _describe_writer(subject.writer, ranges_max)
        described["kind"] = "transfer"
        described["raw_count"] = subject.raw_count
        described["merged_count"] = subject.merged_count
        described["pairs"] = [
            {"source": source, "target": target, "bytes": size}
            for source, target, size in zip(
                subject.source_addresses[:ranges_max].tolist(),
                subject.target_addresses[:ranges_max].tolist(),
                subject.sizes[:ranges_max].tolist(),
                strict=True,
            )
        ]
        return described
    if isinstance(subject, TierChoice):
        return {
            "kind": "choice",
            "tier": subject.tier.value,
            "reason": subject.reason.value,
            "reason_text": subject.reason.text,
            "predicted_s": {tier.value: seconds for tier, seconds in subject.predicted_s.items()},
            "fragment_count": subject.fragment_count,
            "range_count": subject.range_count,
            "total_bytes": subject.total_bytes,
        }
    if isinstance(subject, Refusal):
        return {
            "kind": "refusal",
            "reason": subject.reason.value,
            "reason_text": subject.reason.text,
            "detail": subject.detail,
        }
    raise LayoutError(f"cannot explain a {type(subject).__name__}")


def _describe_writer(writer: WriterPlan, ranges_max: int) -> dict[str, Any]:
    sizes = writer.sizes
    return {
        "kind": "writer",
        "rank": writer.rank,
        "total_bytes": writer.total_bytes,
        "range_count": writer.range_count,
        "fragment_count": writer.fragment_count,
        "block_count": writer.block_count,
        "range_bytes_min": int(sizes.min()),
        "range_bytes_median": int(np.median(sizes)),
        "range_bytes_max": int(sizes.max()),
        "digest": writer.digest.hex(),
        "ranges": [
            {"target": address, "bytes": size}
            for address, size in zip(
                writer.target_addresses[:ranges_max].tolist(), sizes[:ranges_max].tolist(), strict=True
            )
        ],
    }


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def _lines(described: dict[str, Any], indent: str = "") -> list[str]:
    kind = described["kind"]
    if kind == "sliced":
        lines = [f"{indent}{_bytes(described['total_bytes'])} in {len(described['slices'])} slice(s)"]
        for index, each in enumerate(described["slices"]):
            layers = "all layers" if each["layers"] is None else "layers {} … {}".format(*each["layers"])
            lines.append(f"{indent}  slice {index}: tokens {each['first_token']} … {each['end_token']}, {layers}")
            lines.extend(_lines(each["plan"], indent + "    "))
        return lines
    if kind == "plan":
        lines = [
            f"{indent}target rank {described['target_rank']} ({described['memory_kind']}): "
            f"{_bytes(described['total_bytes'])} into {described['block_count']} blocks from "
            f"{len(described['writers'])} writer(s), plan {described['digest'][:8]}"
        ]
        for writer in described["writers"]:
            lines.extend(_lines(writer, indent + "  "))
        return lines
    if kind in ("writer", "transfer"):
        pieces = f"{described['range_count']} ranges"
        if described["range_bytes_min"] == described["range_bytes_max"]:
            pieces += f" of {_bytes(described['range_bytes_min'])}"
        else:
            pieces += f" of {_bytes(described['range_bytes_min'])} … {_bytes(described['range_bytes_max'])}"
        if kind == "transfer":
            pieces += f"; {described['raw_count']} fragments, {described['merged_count']} after joining"
        else:
            pieces += f"; at most {described['fragment_count']} fragments if written in place"
        lines = [
            f"{indent}writer {described['rank']}: {_bytes(described['total_bytes'])} into {pieces}, "
            f"{described['block_count']} blocks, plan {described['digest'][:8]}"
        ]
        if "choice" in described:
            lines.extend(_lines(described["choice"], indent + "  "))
        shown = described.get("pairs") or described["ranges"]
        for entry in shown:
            origin = f"{entry['source']:#x} -> " if "source" in entry else ""
            lines.append(f"{indent}  {origin}{entry['target']:#x} +{entry['bytes']}")
        hidden = described["merged_count" if kind == "transfer" else "range_count"] - len(shown)
        if hidden > 0:
            lines.append(f"{indent}  … {hidden} more")
        return lines
    if kind == "choice":
        predicted = ", ".join(f"{tier} {1e3 * s:.3f} ms" for tier, s in sorted(described["predicted_s"].items()))
        return [
            f"{indent}{described['tier']} ({described['reason']}: {described['reason_text']}); "
            f"{_bytes(described['total_bytes'])} as {described['fragment_count']} fragments, "
            f"{described['range_count']} ranges" + (f"; predicted {predicted}" if predicted else "")
        ]
    detail = f" ({described['detail']})" if described["detail"] else ""
    return [f"{indent}refused: {described['reason']}: {described['reason_text']}{detail}"]
