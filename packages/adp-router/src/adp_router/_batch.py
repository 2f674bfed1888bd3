"""A batch as columns: what the core works on. A column that is None has its default for every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adp_router._types import RouteRequest


@dataclass(frozen=True, eq=False)
class RouteBatch:
    """Requests as columns of equal length, in order of arrival; see :class:`RouteRequest` for each column's meaning.

    Engines that keep arrays build this directly and pay for no object per request. Entries are plain integers.

    Attributes:
        request_ids, token_counts: Always there.
        target_ranks: -1 or None where there is no target.
    """

    request_ids: Sequence[int]
    token_counts: Sequence[int]
    target_ranks: Sequence[int | None] | None = None
    strict: Sequence[bool] | None = None
    child_counts: Sequence[int] | None = None
    kv_block_counts: Sequence[int] | None = None
    conversation_ids: Sequence[str | None] | None = None
    prefix_matches: Sequence[tuple[int, ...]] | None = None
    waited_rounds: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.request_ids)

    @staticmethod
    def of(requests: Sequence[RouteRequest]) -> RouteBatch:
        """Columns of request objects; columns in which nothing was said stay None."""

        def column(name: str, default: object) -> list[object] | None:
            values = [getattr(r, name) for r in requests]
            return None if all(v == default for v in values) else values

        return RouteBatch(
            [r.request_id for r in requests],
            [r.token_count for r in requests],
            column("target_rank", None),  # type: ignore[arg-type]
            column("strict", False),  # type: ignore[arg-type]
            column("child_count", 0),  # type: ignore[arg-type]
            column("kv_block_count", 0),  # type: ignore[arg-type]
            column("conversation_id", None),  # type: ignore[arg-type]
            column("prefix_matches", ()),  # type: ignore[arg-type]
            column("waited_rounds", 0),  # type: ignore[arg-type]
        )
