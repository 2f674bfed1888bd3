"""Stable reason codes: why a transfer was planned, chosen, refused or failed as it was.

The values are part of the public interface (logs, metrics and tests match on them): never change one, only add. ``when``
says on which side of the advertisement a code can appear.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

When = Literal["choice", "fail_open", "fail_closed"]


class Reason(StrEnum):
    """A code; its value is what logs and metrics carry."""

    # A choice between tiers.
    OK = "ok"
    FASTER_BOUNCE = "faster_bounce"
    FASTER_DIRECT = "faster_direct"
    FASTER_MERGED = "faster_merged"
    NOTHING_TO_TRANSFER = "nothing_to_transfer"
    # Before the reservation: every doubt falls back to direct writes.
    DISABLED = "disabled"
    MIN_BYTES = "min_bytes"
    MIN_BLOCKS = "min_blocks"
    OVERSIZE = "oversize"
    NO_SPACE = "no_space"
    LAYOUT_MISMATCH = "layout_mismatch"
    RANK_METADATA_MISSING = "rank_metadata_missing"
    WRITER_COHORT_UNKNOWN = "writer_cohort_unknown"
    BLOCK_OUT_OF_RANGE = "block_out_of_range"
    BLOCK_TABLE_SHORT = "block_table_short"
    BLOCK_TABLE_MISSING = "block_table_missing"
    SOURCE_BLOCK_MISSING = "source_block_missing"
    RECURRENT_STATE_SPLIT = "recurrent_state_split"
    OVERLAP = "overlap"
    NOT_EXACT_COVER = "not_exact_cover"
    NOT_CANONICAL = "not_canonical"
    OUTSIDE_SLOTS = "outside_slots"
    TOO_MANY_FRAGMENTS = "too_many_fragments"
    PLAN_COUNT = "plan_count"
    PLAN_BYTES = "plan_bytes"
    KEY_LIVE = "key_live"
    CLOSING = "closing"
    # After the advertisement: the request fails and nothing is released.
    TRUNCATED = "truncated"
    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    BAD_CHECKSUM = "bad_checksum"
    BAD_FIELD = "bad_field"
    TOO_LARGE = "too_large"
    NO_REPORT = "no_report"
    WRONG_OPERATION = "wrong_operation"
    WRONG_RANK = "wrong_rank"
    WRONG_BASE = "wrong_base"
    WRONG_BYTES = "wrong_bytes"
    WRONG_PLAN = "wrong_plan"
    OUTSIDE_PLAN = "outside_plan"
    DUPLICATE = "duplicate"
    BYTES_MISSING = "bytes_missing"

    @property
    def when(self) -> When:
        """Side of the advertisement on which this code appears."""
        return REASONS[self].when

    @property
    def text(self) -> str:
        """One line for people."""
        return REASONS[self].text


@dataclass(frozen=True)
class ReasonText:
    """What a code means and when it can appear."""

    when: When
    text: str


REASONS: dict[Reason, ReasonText] = {
    Reason.OK: ReasonText("choice", "as asked"),
    Reason.FASTER_BOUNCE: ReasonText("choice", "one large write with gather and scatter is predicted to be fastest"),
    Reason.FASTER_DIRECT: ReasonText("choice", "writing each fragment in place is predicted to be fastest"),
    Reason.FASTER_MERGED: ReasonText("choice", "writing the merged fragments in place is predicted to be fastest"),
    Reason.NOTHING_TO_TRANSFER: ReasonText("choice", "the target already holds every token of the range"),
    Reason.DISABLED: ReasonText("fail_open", "bounce is switched off"),
    Reason.MIN_BYTES: ReasonText("fail_open", "fewer bytes than the configured gate"),
    Reason.MIN_BLOCKS: ReasonText("fail_open", "fewer blocks than the configured gate"),
    Reason.OVERSIZE: ReasonText("fail_open", "larger than the whole bounce arena (permanent)"),
    Reason.NO_SPACE: ReasonText("fail_open", "no bounce space now (transient)"),
    Reason.LAYOUT_MISMATCH: ReasonText("fail_open", "the two layouts hold different things"),
    Reason.RANK_METADATA_MISSING: ReasonText("fail_open", "a source rank's layout is not known here"),
    Reason.WRITER_COHORT_UNKNOWN: ReasonText("fail_open", "which attention-DP rank will write is not known"),
    Reason.BLOCK_OUT_OF_RANGE: ReasonText("fail_open", "a block id lies outside its pool"),
    Reason.BLOCK_TABLE_SHORT: ReasonText("fail_open", "a block table does not reach over the token range"),
    Reason.BLOCK_TABLE_MISSING: ReasonText("fail_open", "a layer group has no block table"),
    Reason.SOURCE_BLOCK_MISSING: ReasonText("fail_open", "the source evicted a block that the target wants"),
    Reason.RECURRENT_STATE_SPLIT: ReasonText("fail_open", "recurrent state is sharded differently on the two sides"),
    Reason.OVERLAP: ReasonText("fail_open", "two fragments would write the same byte"),
    Reason.NOT_EXACT_COVER: ReasonText("fail_open", "the writers together do not cover exactly the request's slots"),
    Reason.NOT_CANONICAL: ReasonText("fail_open", "fragments are not in ascending target order, or have no bytes"),
    Reason.OUTSIDE_SLOTS: ReasonText("fail_open", "a fragment lies outside the request's slots"),
    Reason.TOO_MANY_FRAGMENTS: ReasonText("fail_open", "more fragments than the planner's bound"),
    Reason.PLAN_COUNT: ReasonText("fail_open", "the number of plans differs from the number of writers"),
    Reason.PLAN_BYTES: ReasonText("fail_open", "a plan's bytes differ from those reserved"),
    Reason.KEY_LIVE: ReasonText("fail_open", "this request already holds a reservation"),
    Reason.CLOSING: ReasonText("fail_open", "the transport is closing"),
    Reason.TRUNCATED: ReasonText("fail_closed", "the message ends too early or too late"),
    Reason.BAD_MAGIC: ReasonText("fail_closed", "not a message of this kind"),
    Reason.BAD_VERSION: ReasonText("fail_closed", "a version that is not spoken here"),
    Reason.BAD_CHECKSUM: ReasonText("fail_closed", "the bytes were changed on the way"),
    Reason.BAD_FIELD: ReasonText("fail_closed", "a field has a value that no encoder writes"),
    Reason.TOO_LARGE: ReasonText("fail_closed", "more entries or bytes than the bound"),
    Reason.NO_REPORT: ReasonText("fail_closed", "success without the report that a bounce write owes"),
    Reason.WRONG_OPERATION: ReasonText("fail_closed", "a report of another operation"),
    Reason.WRONG_RANK: ReasonText("fail_closed", "a report of a writer that this plan is not bound to"),
    Reason.WRONG_BASE: ReasonText("fail_closed", "the bytes were written to another base than the bound one"),
    Reason.WRONG_BYTES: ReasonText("fail_closed", "another number of bytes than the plan's"),
    Reason.WRONG_PLAN: ReasonText("fail_closed", "derived from another plan"),
    Reason.OUTSIDE_PLAN: ReasonText("fail_closed", "a fragment lies outside this writer's ranges"),
    Reason.DUPLICATE: ReasonText("fail_closed", "a byte is reported twice"),
    Reason.BYTES_MISSING: ReasonText("fail_closed", "a byte of the plan is not reported"),
}


@dataclass(frozen=True)
class Refusal:
    """A fail-open answer as a value: false in a condition, so that ``if plan:`` reads well.

    Attributes:
        reason: The code.
        detail: What was found, for people.
    """

    reason: Reason
    detail: str = ""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}" if self.detail else self.reason.value
