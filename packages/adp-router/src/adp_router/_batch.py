"""A batch as columns: what the core works on. A column that is None has its default for every request."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from adp_router._errors import RouteBatchError
from adp_router._plain import plain_flag
from adp_router._text import shown
from adp_router._types import RouteRequest

#: In a column of targets: this request has none. (A ``RouteRequest`` says None; -1 is no rank there.)
NO_TARGET = -1

_ZERO = 0
_NOTHING: tuple[int, ...] = ()
#: (field, what it is when nothing was said), of the fields that are seldom given, in the order of the columns.
_SAID: tuple[tuple[str, Any], ...] = (
    ("target_rank", None), ("strict", False), ("child_count", _ZERO), ("conversation_id", None),
    ("prefix_matches", _NOTHING), ("waited_rounds", _ZERO),
)  # fmt: skip


class PlainIntegers(tuple[int, ...]):
    """A column whose entries were seen to be plain integers. Nobody can change it, so nobody has to look again."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class RouteBatch:
    """Requests as columns of equal length, in order of arrival; see :class:`RouteRequest` for each column's meaning.

    Engines that keep arrays build this directly and pay for no object per request. Columns are read once per call: a list, a
    NumPy array (``tolist``) or another sequence; NumPy's scalars count as the numbers that they are.

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
        """Columns of request objects; columns in which nothing was said stay None.

        Raises:
            RouteBatchError: Something in it is not a request, or cannot be read; names its place.
        """
        requests = listed("requests", requests)
        try:
            return RouteBatch._of(requests)
        except Exception as error:
            for place, request in enumerate(requests):
                if not isinstance(request, RouteRequest):
                    raise RouteBatchError(f"requests[{place}]: not a RouteRequest, got {shown(request)}") from None
                _look_at(place, request)
            raise RouteBatchError(f"requests: cannot be read: {shown(error)}") from error

    @staticmethod
    def _of(requests: list[RouteRequest]) -> RouteBatch:
        # Column by column: rows would be thousands of short-lived tuples, which set the garbage collector going. Literal names
        # in comprehensions: twice as fast as attrgetter. Identity: a value may have an equality of its own, which costs
        # or fails; a column that is kept without need is dropped when it is checked.
        ids = [request.request_id for request in requests]
        lengths = [request.token_count for request in requests]
        blocks = [request.kv_block_count for request in requests]
        for request in requests:
            if (
                request.target_rank is not None
                or request.strict is not False
                or request.child_count is not _ZERO
                or request.conversation_id is not None
                or request.prefix_matches is not _NOTHING
                or request.waited_rounds is not _ZERO
            ):
                break
        else:
            return RouteBatch(ids, lengths, kv_block_counts=blocks, minus_one_is_no_target=False)
        said: list[Any] = []
        for name, default in _SAID:
            values = list(map(attrgetter(name), requests))
            said.append(values if any(value is not default for value in values) else None)
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

    def columns(self) -> tuple[dict[str, list[Any]], bool]:
        """The columns that are there, as lists, by name; and whether -1 means no target.

        Raises:
            RouteBatchError: A column is not a sequence, or is longer or shorter than the ids, or the flag is not one; names it.
        """
        columns: dict[str, list[Any]] = {}
        for name in _COLUMNS:
            column: Any = getattr(self, name)
            if column is None and name not in ("request_ids", "token_counts"):
                continue
            columns[name] = values = listed(name, column)
            if len(values) != len(columns["request_ids"]):
                raise RouteBatchError(
                    f"{name}: want one entry per request ({len(columns['request_ids'])}), got {len(values)}"
                )
        flag = plain_flag(self.minus_one_is_no_target)
        if flag is None:
            raise RouteBatchError(
                f"minus_one_is_no_target: want True or False, got {shown(self.minus_one_is_no_target)}"
            )
        return columns, flag


def _look_at(place: int, request: RouteRequest) -> None:
    """Complain of the first field of a request that cannot be read."""
    for field in fields(RouteRequest):
        try:
            getattr(request, field.name)
        except Exception as error:
            raise RouteBatchError(f"requests[{place}].{field.name}: cannot be read: {shown(error)}") from error


def holds_integers(column: Any) -> bool:
    """Whether a column's type says that every entry is an integer, and no truth value: as an array's of Python or of NumPy."""
    kind = type(column)
    if kind is PlainIntegers:
        return True
    if kind is array:
        return column.typecode in "bBhHiIlLqQ"
    if kind.__module__ != "numpy" or kind.__name__ != "ndarray":
        return False
    return column.dtype.kind in "iu" and column.ndim == 1


def listed(name: str, column: Any) -> list[Any]:
    """A column as a list: a list as it is, an array's entries as plain numbers, any other sequence copied.

    Raises:
        RouteBatchError: It is not a sequence, or has no order.
    """
    if type(column) is list:
        return column
    if not isinstance(column, (Mapping, AbstractSet)):
        try:
            values = column.tolist() if hasattr(column, "tolist") else list(column)
        except Exception as error:
            raise RouteBatchError(f"{name}: cannot be read as a sequence: {shown(column)}") from error
        if isinstance(values, list):
            return values
    raise RouteBatchError(f"{name}: want a sequence, got {shown(column)}")


_COLUMNS = [f.name for f in fields(RouteBatch) if f.name != "minus_one_is_no_target"]
