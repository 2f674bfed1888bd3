"""Engine request objects as a batch: attributes are read here, each at most once, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import repeat
from operator import countOf
from typing import Any

from adp_router._batch import RouteBatch, listed
from adp_router._check import plain_flag
from adp_router._errors import RouterConfigError
from adp_router._text import shown
from adp_router._types import RouteRequest

#: Attributes that an engine's objects may have, or not.
ATTRIBUTES = ("request", "scheduling_params", "py_scheduling_params", "child_req_ids", "conversation_id")


#: Names from which on it pays to gather what all objects have (count).
_UNION_MIN = 3


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
    items = listed("objects", objects)
    absent = _absent(items, wanted)

    def column(items: list[Any], name: str) -> list[Any] | None:
        return _read(items, name) if name in wanted and name not in absent else None

    inner = column(items, "request")
    if inner is None:
        inner = items
    else:
        inner = [i if r is None else r for i, r in zip(items, inner, strict=True)]
        # "child_req_ids" is the item's; the others are its request's.
        absent = (absent & {"child_req_ids"}) | (_absent(inner, wanted) - {"child_req_ids"})
    ids: Any
    try:
        ids = [item.request_id for item in items]
    except AttributeError:
        ids = [None]
    if _lacking(ids):
        ids = [_identity(i, r) for i, r in zip(items, inner, strict=True)]
    counts = list(map(length, inner)) if length is not None else [_token_count(r) for r in inner]
    parameters = column(inner, "scheduling_params")
    if parameters is None:
        parameters = column(inner, "py_scheduling_params")
    elif _lacking(parameters):
        other = column(inner, "py_scheduling_params") or repeat(None)
        parameters = [b if a is None else a for a, b in zip(parameters, other, strict=False)]
    targets = strict = None
    if parameters is not None:
        targets = _read(parameters, "attention_dp_rank")
    if parameters is not None and targets is not None:
        relax = _read(parameters, "attention_dp_relax") or repeat(None)
        strict = [t is not None and _strict(r) for t, r in zip(targets, relax, strict=False)]
    children = column(items, "child_req_ids")
    return RouteBatch(
        ids,
        counts,
        targets,
        strict,
        None if children is None else [0 if c is None else _child_count(c) for c in children],
        None if kv_blocks is None else list(map(kv_blocks, inner)),
        column(inner, "conversation_id"),
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


def _read(items: list[Any], name: str) -> list[Any] | None:
    """An attribute of every object, None where it is missing; None when nothing was said at all."""
    values = list(map(getattr, items, repeat(name), repeat(None)))
    return None if _lacking(values) == len(values) else values


def _lacking(values: list[Any]) -> int:
    """How many are None; by type, for a value's equality may cost or fail."""
    return countOf(map(type, values), type(None))


def _absent(items: list[Any], names: frozenset[str]) -> frozenset[str]:
    """Names that no object has, by classes and the union of all instances' names: half of what looking for each on each costs.

    Where a class computes attributes, or hides its instances' names, nothing is known to be absent.
    """
    if len(names) < _UNION_MIN:
        return frozenset()
    kinds: set[Any] = set(map(type, items))
    declared: set[str] = set()
    for kind in kinds:
        if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__"):
            return frozenset()
        declared.update(*(vars(base) for base in kind.__mro__))
    try:
        said = declared.union(*map(vars, items))
    except TypeError:
        return frozenset()
    return names - said


def _identity(item: Any, inner: Any) -> Any:
    for name in ("request_id", "id"):
        found = getattr(item, name, None)
        if found is not None:
            return found
    return inner.request_id


def _token_count(item: Any) -> int:
    tokens = item.input_token_ids
    return 0 if tokens is None else len(tokens)
