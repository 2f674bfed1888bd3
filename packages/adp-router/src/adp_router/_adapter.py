"""Engine request objects as a batch: attributes are read here, each at most once, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import Any

from adp_router._batch import PlainIntegers, RouteBatch, listed
from adp_router._errors import RouterConfigError
from adp_router._plain import count_of_type, plain_flag
from adp_router._text import shown
from adp_router._types import RouteRequest

#: Attributes that an engine's objects may have, or not.
ATTRIBUTES = ("request", "scheduling_params", "py_scheduling_params", "child_req_ids", "conversation_id")
#: Of these: a queue item's; the others are its request's.
_OF_ITEMS = frozenset({"request", "child_req_ids"})
#: Names from which on it pays to ask for what is missing first (count).
_ASKED_MIN = 2
_NONE = type(None)
#: Reads an attribute of many objects; written out, which the interpreter makes twice as fast as a name that is looked up.
_READ: dict[str, Callable[[list[Any]], list[Any]]] = {
    "request_id": lambda objects: [item.request_id for item in objects],
    "id": lambda objects: [item.id for item in objects],
    "request": lambda objects: [item.request for item in objects],
}


def batch_from(
    objects: Iterable[Any],
    *,
    length: Callable[[Any], int] | None = None,
    kv_blocks: Callable[[Any], int] | None = None,
    attributes: Collection[str] = ATTRIBUTES,
) -> RouteBatch:
    """Read what routing needs from an engine's request objects, column by column.

    ``input_token_ids`` is often a getter that copies the whole list: it is read once per object, and not at all when
    ``length`` is given. Attributes: ``request_id`` (else ``id``), ``scheduling_params`` (else ``py_scheduling_params``) with
    ``attention_dp_rank`` and ``attention_dp_relax`` (None and missing count as relaxed), ``child_req_ids``,
    ``conversation_id``.

    Args:
        objects: The engine's requests; a ``request`` attribute (a queue item's) is looked through.
        length: Prompt length of an object (tokens), without touching its token list.
        kv_blocks: KV blocks that an object will need (count).
        attributes: Which of ``ATTRIBUTES`` the objects may have; the others are not looked for. To look for one that no object
            has costs as much as to read one: name yours where there are thousands.

    Returns:
        Columns in the objects' order, for :meth:`Router.route`.

    Raises:
        AttributeError: An object has no id, or neither a length nor tokens.
        RouteBatchError: ``objects`` is not a sequence, or has no order.
        RouterConfigError: A name that is none of ``ATTRIBUTES``.
    """
    wanted = _names(attributes)
    outer = _Objects(listed("objects", objects))
    absent = outer.absent((wanted & _OF_ITEMS) | {"request_id"})
    inner = outer
    if "request" in wanted - absent:
        found = _Objects(outer.values("request"))
        if _NONE not in found.kinds:
            inner = found
        elif len(found.kinds) > 1:
            inner = _Objects([o if r is None else r for o, r in zip(outer.items, found.items, strict=True)])
    ids = _identities(outer, inner, named="request_id" not in absent)
    children = _read(outer, "child_req_ids") if "child_req_ids" in wanted - absent else None
    said = wanted - _OF_ITEMS
    said -= inner.absent(said)
    parameters = _read(inner, "scheduling_params") if "scheduling_params" in said else None
    if "py_scheduling_params" in said and (parameters is None or _lacking(parameters)):
        other = _read(inner, "py_scheduling_params")
        parameters = _first_said(parameters, other)
    counts = list(map(length, inner.items)) if length is not None else [_token_count(r) for r in inner.items]
    targets = strict = None
    if parameters is not None:
        settings = _Objects(parameters)
        targets = _read(settings, "attention_dp_rank")
    if parameters is not None and targets is not None:
        relax = _read(settings, "attention_dp_relax") or repeat(None)
        strict = [t is not None and _strict(r) for t, r in zip(targets, relax, strict=False)]
    return RouteBatch(
        ids,
        counts,
        targets,
        strict,
        None if children is None else [0 if c is None else _child_count(c) for c in children],
        None if kv_blocks is None else list(map(kv_blocks, inner.items)),
        _read(inner, "conversation_id") if "conversation_id" in said else None,
        minus_one_is_no_target=False,
    )


def requests_from(
    objects: Iterable[Any],
    *,
    length: Callable[[Any], int] | None = None,
    kv_blocks: Callable[[Any], int] | None = None,
    attributes: Collection[str] = ATTRIBUTES,
) -> list[RouteRequest]:
    """The same as request objects, one per engine object: for callers that look at them; :func:`batch_from` costs less."""
    batch = batch_from(objects, length=length, kv_blocks=kv_blocks, attributes=attributes)
    count = len(batch)

    def column(values: Any, default: Any) -> Any:
        return repeat(default, count) if values is None else values

    return [
        RouteRequest(request_id, tokens, target, strict, children, blocks, conversation)
        for request_id, tokens, target, strict, children, blocks, conversation in zip(
            batch.request_ids, batch.token_counts, column(batch.target_ranks, None), column(batch.strict, False),
            column(batch.child_counts, 0), column(batch.kv_block_counts, 0), column(batch.conversation_ids, None),
            strict=True,
        )
    ]  # fmt: skip


def _names(attributes: object) -> frozenset[str]:
    """The names asked for; read once, for a generator can be."""
    try:
        names = (attributes,) if isinstance(attributes, str) else tuple(attributes)  # type: ignore[arg-type]
    except Exception as error:
        raise RouterConfigError(f"attributes: want names, got {shown(attributes)}") from error
    for name in names:
        if not isinstance(name, str) or name not in ATTRIBUTES:
            raise RouterConfigError(f"attributes: want some of {', '.join(ATTRIBUTES)}, got {shown(name)}")
    return frozenset(names)


def _strict(relax: Any) -> Any:
    """Whether only the target will do, by ``attention_dp_relax``; what is not a truth value stays, for ``route`` to refuse."""
    if relax is None or relax is True or relax is False:
        return relax is False
    flag = plain_flag(relax)
    return relax if flag is None else not flag


def _child_count(children: Any) -> Any:
    """How many ids there are; what has no length stays, for ``route`` to refuse (a number too: it is not a list of ids)."""
    try:
        return len(children)
    except Exception:  # noqa: BLE001  a caller's object may fail in any way
        return (children,)


class _Objects:
    """A list of objects, and what their classes tell of them.

    Attributes:
        items: The objects.
        kinds: Their classes.
    """

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        alike = bool(items) and count_of_type(items, type(items[0])) == len(items)
        self.kinds: set[Any] = {type(items[0])} if alike else set(map(type, items))

    @cached_property
    def _declared(self) -> set[str] | None:
        """What the classes declare; None where one computes attributes."""
        declared: set[str] = set()
        for kind in self.kinds:
            if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__"):
                return None
            declared.update(*(vars(base) for base in kind.__mro__))
        return declared

    def values(self, name: str) -> list[Any]:
        """An attribute of every object, None where it is missing; what may be computed is read once each."""
        items, read = self.items, _READ.get(name)
        if read is not None and self._declared is not None and name not in self._declared:
            with suppress(AttributeError):
                return read(items)
        values: list[Any] = []
        try:
            values.extend(map(attrgetter(name), items))
        except AttributeError:
            # What was read stays read; from the first that lacks it on, each is asked whether it has it.
            values.append(None)
            values.extend(map(getattr, items[len(values) :], repeat(name), repeat(None)))
        return values

    def absent(self, names: frozenset[str]) -> frozenset[str]:
        """Names that no object has: to ask for one that is missing costs less than to read it and see that nothing came.

        Where a class computes its attributes nobody asks twice: nothing is known to be absent, and of what it declares neither.
        Objects that have nothing but what their classes declare need not be asked.
        """
        if len(names) < _ASKED_MIN or self._declared is None:
            return frozenset()
        unknown = names - self._declared
        if not any(kind.__dictoffset__ for kind in self.kinds):
            return unknown
        lacking = [name for name in unknown if not hasattr(self.items[0], name)]
        if lacking and _none_has(self.items, lacking):
            return frozenset(lacking)
        return frozenset(name for name in lacking if _none_has(self.items, [name]))


def _none_has(items: list[Any], names: list[str]) -> bool:
    """Whether no object has any of these names. Several at a time, written out, cost a fifth less than one by one."""
    if len(names) == 3:
        first, second, third = names
        for item in items:
            if hasattr(item, first) or hasattr(item, second) or hasattr(item, third):
                return False
    elif len(names) == 2:
        first, second = names
        for item in items:
            if hasattr(item, first) or hasattr(item, second):
                return False
    else:
        return not any(any(map(hasattr, items, repeat(name))) for name in names)
    return True


def _read(objects: _Objects, name: str) -> list[Any] | None:
    """The values; None when nothing was said at all."""
    values = objects.values(name)
    return None if _lacking(values) == len(values) else values


def _lacking(values: list[Any]) -> int:
    """How many are None; by type, for a value's equality may cost or fail."""
    return count_of_type(values, _NONE)


def _identities(outer: _Objects, inner: _Objects, *, named: bool) -> Sequence[Any]:
    """An item's ``request_id``, or else its ``id``, or else its request's ``request_id``.

    Args:
        named: Whether any item has a ``request_id``.
    """
    ids = outer.values("request_id") if named else outer.values("id")
    if count_of_type(ids, int) == len(ids):
        return PlainIntegers(ids)
    if not _lacking(ids):
        return ids
    if named:
        ids = [getattr(item, "id", None) if a is None else a for a, item in zip(ids, outer.items, strict=True)]
    return [r.request_id if a is None else a for a, r in zip(ids, inner.items, strict=True)]


def _first_said(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    """Row by row what is not None."""
    if first is None or second is None:
        return first or second
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


def _token_count(item: Any) -> int:
    tokens = item.input_token_ids
    return 0 if tokens is None else len(tokens)
