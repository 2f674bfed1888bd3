"""Engine request objects as route requests: attributes are read here, each at most once, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from adp_router._types import RouteRequest


def requests_from(
    objects: Iterable[Any],
    *,
    length: Callable[[Any], int] | None = None,
    kv_blocks: Callable[[Any], int] | None = None,
) -> list[RouteRequest]:
    """Read what routing needs from an engine's request objects.

    ``input_token_ids`` is often a getter that copies the whole list: it is read once per object, and not at all when
    ``length`` is given. Attributes: ``request_id`` (else ``id``), ``scheduling_params`` with ``attention_dp_rank`` and
    ``attention_dp_relax`` (None and missing count as relaxed), ``child_req_ids``, ``conversation_id``.

    Args:
        objects: The engine's requests; a ``request`` attribute (a queue item's) is looked through.
        length: Prompt length of an object (tokens), without touching its token list.
        kv_blocks: KV blocks that an object will need (count).

    Returns:
        One request per object, in order.

    Raises:
        AttributeError: An object has no id, or neither a length nor tokens.
    """
    found = []
    for item in objects:
        engine_request = getattr(item, "request", None)
        inner = item if engine_request is None else engine_request
        identity = getattr(item, "request_id", None)
        if identity is None:
            identity = getattr(item, "id", None)
        if identity is None:
            identity = inner.request_id
        if length is not None:
            count = length(inner)
        else:
            tokens = inner.input_token_ids
            count = 0 if tokens is None else len(tokens)
        parameters = getattr(inner, "scheduling_params", None)
        if parameters is None:
            parameters = getattr(inner, "py_scheduling_params", None)
        target = getattr(parameters, "attention_dp_rank", None)
        relax = getattr(parameters, "attention_dp_relax", None)
        children = getattr(item, "child_req_ids", None)
        found.append(
            RouteRequest(
                request_id=identity,
                token_count=count,
                target_rank=target,
                strict=target is not None and relax is False,
                child_count=len(children) if children else 0,
                kv_block_count=kv_blocks(inner) if kv_blocks is not None else 0,
                conversation_id=getattr(inner, "conversation_id", None),
            )
        )
    return found
