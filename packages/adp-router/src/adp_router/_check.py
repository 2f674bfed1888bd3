"""The boundary: whatever a caller gave becomes plain integers, strings and booleans here, before anything changes.

What is wrong with one request is that request's error; what is wrong with a rank fails the call. The bytes for the digest
are made from what was normalised: equal inputs have equal digests whatever types carry them, different ones different digests.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

from adp_router._batch import NO_TARGET, RouteBatch, holds_integers
from adp_router._errors import RankStateError
from adp_router._plain import count_of_type, plain_flag, plain_integer
from adp_router._text import canonical, shown
from adp_router._types import RankState, RequestError

#: Type code of unsigned integers of 32 bits.
_UNSIGNED = "I" if array("I").itemsize == 4 else "L"
#: Counts are below this, so that a capacity without limit is above each (count).
COUNT_END = 1 << 62
#: Numbers of rows, so that not every call makes thousands of integers anew.
_ROWS = tuple(range(4096))
#: Field and column of the counts.
_COUNTS = (
    ("token_count", "token_counts"), ("child_count", "child_counts"), ("kv_block_count", "kv_block_counts"),
    ("waited_rounds", "waited_rounds"),
)  # fmt: skip
_CAPACITIES = ("slots", "kv_blocks", "tokens")
#: Field, whether None is a value, whether negative is.
_RANK_FIELDS = (
    ("rank", False, False), ("token_count", False, False), ("request_count", False, False),
    *((f"free_{name}", True, True) for name in _CAPACITIES), *((f"total_{name}", True, False) for name in _CAPACITIES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checked:
    """A call's inputs, sound and plain.

    Attributes:
        batch: Columns without a fault in the rows of ``good``; ids are what the caller gave.
        good: Rows that can be routed.
        errors: What is wrong with the others.
        packed: Bytes of all of it, for the digest.
    """

    batch: RouteBatch
    good: Sequence[int]
    errors: list[RequestError]
    packed: list[bytes]


def check_ranks(ranks: Sequence[RankState]) -> tuple[tuple[RankState, ...], dict[int, int], bytes]:
    """Plain states, positions by rank, and their bytes for the digest.

    Raises:
        RankStateError: None, one twice, or a field that cannot be used; names position, field and value.
    """
    try:
        states = list(ranks)
    except Exception as error:
        raise RankStateError(f"ranks: want a sequence of RankState, got {shown(ranks)}") from error
    if not states:
        raise RankStateError("ranks: want at least one, got none")
    rows = _plain_rows(states)
    if rows is None:
        states = [_plain_state(position, state) for position, state in enumerate(states)]
        rows = list(map(_rank_fields, states))
    position_of: dict[int, int] = {}
    for position, row in enumerate(rows):
        if row[0] in position_of:
            raise RankStateError(f"ranks[{position}].rank: {row[0]} appears twice")
        position_of[row[0]] = position
    numbers = [_MISSING if number is None else number for number in chain.from_iterable(rows)]
    return tuple(states), position_of, array("q", numbers).tobytes()


#: All of a rank's fields: the counts, then the totals, then whether it drains.
_rank_fields = attrgetter(*(name for name, _, _ in _RANK_FIELDS), "draining")
_REQUIRED = sum(not may_lack for _, may_lack, _ in _RANK_FIELDS)
#: What stands for a capacity that is not known in the bytes of the digest; no number of a rank is as low.
_MISSING = -(1 << 63)
_FREE_END = _REQUIRED + len(_CAPACITIES)


def _plain_rows(states: list[Any]) -> list[tuple[Any, ...]] | None:
    """Fields by state, where none needs a second look: plain integers in range, plain truth values. All at once: by column."""
    if count_of_type(states, RankState) != len(states):
        return None
    try:
        rows = list(map(_rank_fields, states))
    except AttributeError:
        return None
    *counts, draining = zip(*rows, strict=True)
    required = [*chain.from_iterable(counts[:_REQUIRED])]
    free = [*chain.from_iterable(counts[_REQUIRED:_FREE_END])]
    total = [*chain.from_iterable(counts[_FREE_END:])]
    if (
        count_of_type(draining, bool) != len(states)
        or count_of_type(required, int) != len(required)
        or {*map(type, free), *map(type, total)} - {int, type(None)}
    ):
        return None
    pairs = [(f, t) for f, t in zip(free, total, strict=True) if f is not None and t is not None]
    given = [number for number in free if number is not None]
    given_total = [number for number in total if number is not None]
    if (
        min(chain(required, given_total)) < 0
        or max(chain(required, given, given_total)) >= COUNT_END
        or min(given, default=0) <= -COUNT_END
        or any(f > t for f, t in pairs)
    ):
        return None
    return rows


def _plain_state(position: int, state: object) -> RankState:
    if not isinstance(state, RankState):
        raise RankStateError(f"ranks[{position}]: not a RankState, got {shown(state)}")
    values = _rank_values(position, state)
    given = _rank_field(position, state, "draining")
    draining = plain_flag(given)
    if draining is None:
        raise RankStateError(f"ranks[{position}].draining: want True or False, got {shown(given)}")
    plain = dict(zip((name for name, _, _ in _RANK_FIELDS), values, strict=True))
    return RankState(**plain, draining=draining)  # type: ignore[arg-type]


def _rank_field(position: int, state: RankState, name: str) -> Any:
    try:
        return getattr(state, name)
    except Exception as error:
        raise RankStateError(f"ranks[{position}].{name}: cannot be read: {shown(error)}") from error


def _rank_values(position: int, state: RankState) -> list[int | None]:
    values: list[int | None] = []
    for name, may_lack, may_be_negative in _RANK_FIELDS:
        given = _rank_field(position, state, name)
        if given is None and may_lack:
            values.append(None)
            continue
        value = plain_integer(given)
        where = f"ranks[{position}].{name}"
        if value is None:
            raise RankStateError(f"{where}: want an integer, got {shown(given)}")
        if value < 0 and not may_be_negative:
            raise RankStateError(f"{where}: must not be negative, got {shown(value)}")
        if not -COUNT_END < value < COUNT_END:
            raise RankStateError(f"{where}: must be below 2**62, got {shown(value)}")
        values.append(value)
    for number, name in enumerate(_CAPACITIES):
        free, total = values[3 + number], values[6 + number]
        if free is not None and total is not None and free > total:
            raise RankStateError(f"ranks[{position}].free_{name}: {free} is more than total_{name}, {total}")
    return values


def check_requests(given: RouteBatch, position_of: dict[int, int], size: int) -> Checked:
    """Sound columns. A column without a fault costs two passes: its types, and packing it for the digest.

    Raises:
        RouteBatchError: Columns of unequal length, or one that is not a sequence.
    """
    columns, minus_one_is_no_target = given.columns()
    bad: dict[int, tuple[str, str]] = {}
    packed: list[bytes] = []
    ids = columns["request_ids"]
    count = len(ids)
    found: dict[str, Any] = {"request_ids": _ids(ids, bad, packed, sure=holds_integers(given.request_ids))}
    for field, name in _COUNTS:
        column = columns.get(name)
        if column is not None:
            found[name] = _counts(field, column, bad, packed, sure=holds_integers(getattr(given, name)))
    if found["token_counts"] is None:
        found["token_counts"] = [0] * count
    targets, strict = columns.get("target_ranks"), columns.get("strict")
    if targets is not None or strict is not None:
        found["target_ranks"], found["strict"] = _targets(
            targets, strict, position_of, bad, packed, minus_one_is_no_target=minus_one_is_no_target
        )
    if "conversation_ids" in columns:
        found["conversation_ids"] = _conversations(columns["conversation_ids"], bad, packed)
    if "prefix_matches" in columns:
        found["prefix_matches"] = _matches(columns["prefix_matches"], size, bad, packed)
    checked = RouteBatch(**found, minus_one_is_no_target=False)
    rows = _ROWS[:count] if count <= len(_ROWS) else range(count)
    if not bad:
        return Checked(checked, rows, [], packed)
    errors = [RequestError(ids[row], *bad[row]) for row in sorted(bad)]
    return Checked(checked, [row for row in rows if row not in bad], errors, packed)


def digest_of(*parts: bytes) -> bytes:
    """Hash of parts, each with its length before it (16 bytes)."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


# -- columns -----------------------------------------------------------------------------------------------------------


def _plain(
    column: list[Any],
    read: Callable[[object], Any],
    kinds: Sequence[type],
    blank: Any,
    complain: Callable[[int, object], None],
) -> tuple[list[Any], bytes]:
    """A column with every value plain; what cannot be read is reported, blank, and in the bytes by its text."""
    count = len(column)
    if sum(count_of_type(column, kind) for kind in kinds) == count:
        return column, b""
    values, faults = [], []
    for row, given in enumerate(column):
        if type(given) in kinds:
            values.append(given)
            continue
        value = read(given)
        if value is None:
            complain(row, given)
            faults.append(f"{row} {canonical(given)}")
        values.append(blank if value is None else value)
    return values, b"".join(
        b"%d:%s" % (len(text), text) for text in (f.encode("utf-8", "surrogatepass") for f in faults)
    )


def _pack(values: list[int]) -> tuple[bool, bytes]:
    """Whether plain integers are all of 32 bits and none negative, and their bytes.

    Unsigned ones are a third of the work, and half the bytes to hash.
    """
    for code in _UNSIGNED, "q":
        packed = array(code)
        try:
            packed.fromlist(values)
        except OverflowError:
            continue
        return code != "q", code.encode() + packed.tobytes()
    return False, b"x" + " ".join(map(hex, values)).encode()


def _ids(column: list[Any], bad: dict[int, tuple[str, str]], packed: list[bytes], *, sure: bool) -> list[int]:
    def complain(row: int, given: object) -> None:
        bad[row] = ("request_id", f"want an integer, got {shown(given)}")

    values, faults = (column, b"") if sure else _plain(column, plain_integer, (int,), 0, complain)
    packed += (b"request_id", _pack(values)[1], faults)
    if bad or len(set(values)) != len(values):
        seen: set[int] = set()
        for row, value in enumerate(values):
            if row in bad:
                continue
            if value in seen:
                bad[row] = ("request_id", f"{shown(value)} appears twice")
            seen.add(value)
    return values


def _counts(
    field: str, column: list[Any], bad: dict[int, tuple[str, str]], packed: list[bytes], *, sure: bool
) -> list[int] | None:
    """Plain counts; None where all are 0, as if nothing had been said."""

    def complain(row: int, given: object) -> None:
        bad.setdefault(row, (field, f"want an integer, got {shown(given)}"))

    values, faults = (column, b"") if sure else _plain(column, plain_integer, (int,), 0, complain)
    if not faults and not any(values):
        return None
    small, data = _pack(values)
    packed += (field.encode(), data, faults)
    if not small and values and (min(values) < 0 or max(values) >= COUNT_END):
        for row, value in enumerate(values):
            if value < 0:
                bad.setdefault(row, (field, f"must not be negative, got {shown(value)}"))
            elif value >= COUNT_END:
                bad.setdefault(row, (field, f"must be below 2**62, got {shown(value)}"))
    return values


def _targets(
    given_targets: list[Any] | None,
    given_strict: list[Any] | None,
    position_of: dict[int, int],
    bad: dict[int, tuple[str, str]],
    packed: list[bytes],
    *,
    minus_one_is_no_target: bool,
) -> tuple[list[int | None] | None, list[bool] | None]:
    def no_rank(row: int, given: object) -> None:
        bad.setdefault(row, ("target_rank", f"there is no rank {shown(given)}; there are {sorted(position_of)}"))

    def no_flag(row: int, given: object) -> None:
        bad.setdefault(row, ("strict", f"want True or False, got {shown(given)}"))

    targets: list[int | None] | None = None
    strict: list[bool] | None = None
    if given_targets is not None:
        targets, faults = _plain(given_targets, plain_integer, (int, type(None)), None, no_rank)
        if minus_one_is_no_target:
            targets = [None if target == NO_TARGET else target for target in targets]
        said = bytes(target is not None for target in targets)
        if any(said) or faults:
            packed += (b"target_rank", said, _pack([0 if target is None else target for target in targets])[1], faults)
        for row, target in enumerate(targets):
            if target is not None and target not in position_of:
                no_rank(row, target)
    if given_strict is not None:
        strict, faults = _plain(given_strict, plain_flag, (bool,), False, no_flag)
        if any(strict) or faults:
            packed += (b"strict", bytes(strict), faults)
        for row, wanted in enumerate(strict):
            if wanted and (targets is None or targets[row] is None):
                bad.setdefault(row, ("strict", "a strict request names its target_rank, got None"))
    return targets, strict


def _conversations(
    column: Sequence[Any], bad: dict[int, tuple[str, str]], packed: list[bytes]
) -> list[str | None] | None:
    def complain(row: int, given: object) -> None:
        bad.setdefault(row, ("conversation_id", f"want a string or None, got {shown(given)}"))

    def read(given: object) -> str | None:
        return str.__str__(given) if isinstance(given, str) else None

    values, faults = _plain(column, read, (str, type(None)), None, complain)  # type: ignore[arg-type]
    if not faults and values.count(None) == len(values):
        return None
    lengths = array("q", [-1 if value is None else len(value) for value in values])
    text = "".join(value for value in values if value is not None).encode("utf-8", "surrogatepass")
    packed += (b"conversation_id", lengths.tobytes(), text, faults)
    return values


def _matches(
    column: Sequence[Any], size: int, bad: dict[int, tuple[str, str]], packed: list[bytes]
) -> list[tuple[int, ...]] | None:
    values: list[tuple[int, ...]] = []
    for row, given in enumerate(column):
        try:
            counts = [plain_integer(value) for value in (() if given is None else given)]
        except Exception:  # noqa: BLE001  a caller's object may fail in any way
            counts = [None]
        found = tuple(count for count in counts if count is not None and 0 <= count < COUNT_END)
        if len(found) != len(counts):
            bad.setdefault(row, ("prefix_matches", f"want counts that are not negative, got {shown(given)}"))
        elif len(found) not in (0, size):
            bad.setdefault(row, ("prefix_matches", f"want one count per rank ({size}), got {len(found)}"))
        if not counts:
            values.append(())
            continue
        sound = len(found) == len(counts) and len(found) in (0, size)
        text = repr(found) if len(found) == len(counts) else canonical(given)
        packed.append(f"prefix_matches {row} {text}".encode("utf-8", "surrogatepass"))
        values.append(found if sound else ())
    return values if any(values) else None
