"""A batch as columns: what the core works on. A column that is None has its default for every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from adp_router._errors import RouteBatchError
from adp_router._types import RouteRequest

#: In a column of targets: this request has none. (A ``RouteRequest`` says None; -1 is no rank there.)
NO_TARGET = -1

_NOTHING: tuple[int, ...] = ()
#: (field, what it is when nothing was said), of the fields that are seldom given, in the order of the columns.
_SAID: tuple[tuple[str, Any], ...] = (
    ("target_rank", None), ("strict", False), ("child_count", 0), ("conversation_id", None), ("prefix_matches", ()),
    ("waited_rounds", 0),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class RouteBatch:
    """Requests as columns of equal length, in order of arrival; see :class:`RouteRequest` for each column's meaning.

    Engines that keep arrays build this directly and pay for no object per request. Entries are plain integers; NumPy arrays
    are turned into lists once per call.

    Attributes:
        request_ids, token_counts: Always there.
        target_ranks: -1 or None where there is no target.
        minus_one_is_no_target: Whether -1 means that; otherwise it is a rank like any other, and there is none of that number.
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
    minus_one_is_no_target: bool = True

    def __len__(self) -> int:
        return len(self.request_ids)

    @staticmethod
    def of(requests: Sequence[RouteRequest]) -> RouteBatch:
        """Columns of request objects; columns in which nothing was said stay None."""

        # Column by column: rows would be thousands of short-lived tuples, which set the garbage collector going. Literal names
        # in comprehensions: twice as fast as attrgetter.
        ids = [request.request_id for request in requests]
        lengths = [request.token_count for request in requests]
        needs = [request.kv_block_count for request in requests]
        blocks = None if needs.count(0) == len(needs) else needs
        for request in requests:
            # One look at each, for most batches say no more; identity where equality costs.
            if (
                request.target_rank is not None
                or request.strict is not False
                or request.child_count != 0
                or request.conversation_id is not None
                or request.prefix_matches is not _NOTHING
                or request.waited_rounds != 0
            ):
                break
        else:
            return RouteBatch(ids, lengths, kv_block_counts=blocks, minus_one_is_no_target=False)
        said: list[Any] = []
        for name, default in _SAID:
            values = list(map(attrgetter(name), requests))
            said.append(None if values.count(default) == len(values) else values)
        targets, strict, children, conversations, matches, waited = said
        return RouteBatch(
            ids,
            lengths,
            targets,
            strict,
            children,
            blocks,
            conversations,
            matches,
            waited,
            minus_one_is_no_target=False,
        )

    def normalised(self) -> RouteBatch:
        """Arrays as lists.

        Raises:
            RouteBatchError: A column is longer or shorter than the ids; names it.
        """
        count = len(self.request_ids)
        arrays: dict[str, Any] = {}
        for name in _COLUMNS:
            column: Any = getattr(self, name)
            if column is None:
                continue
            if len(column) != count:
                raise RouteBatchError(f"{name}: want one entry per request ({count}), got {len(column)}")
            if hasattr(column, "tolist"):
                arrays[name] = column.tolist()
        return replace(self, **arrays) if arrays else self


_COLUMNS = [f.name for f in fields(RouteBatch) if f.name != "minus_one_is_no_target"]
