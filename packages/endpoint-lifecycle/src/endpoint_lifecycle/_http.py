"""Bodies of ``/server_info``, ``/cluster_info`` and ``/debug/reservations``, for whichever web framework is used.

Each returns what a JSON encoder takes as it is. The caller mounts them; nothing here knows a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from endpoint_lifecycle._errors import (
    DirectoryClosed,
    Draining,
    EndpointError,
    EndpointTimeout,
    LocalProtocolError,
    NotReady,
    Overloaded,
    RecordInvalid,
    RefreshFailed,
    StaleGeneration,
    StoreError,
    Unavailable,
)
from endpoint_lifecycle._owner import EndpointOwner, describe_owner
from endpoint_lifecycle._views import DirectoryAudit


class _Audited(Protocol):
    def audit(self) -> DirectoryAudit: ...


def server_info_body(owner: EndpointOwner) -> dict[str, Any]:
    """What an instance says of itself.

    Before publication, and after the end, there are no endpoint fields at all: identity, state, ``ready: false``. While
    published or draining: the record, whole, and whether new work is taken.
    """
    state, record = owner.snapshot()
    body = describe_owner(owner) | {"state": state.value, "ready": False}
    if record is not None:
        body |= msgspec.json.decode(record.encode())
        body["ready"] = record.state == "published"
    return body


def cluster_info_body(directory: _Audited | DirectoryAudit) -> dict[str, Any]:
    """What a router knows: servers by role, with state, generation and load, and how many can be picked."""
    audit = directory if isinstance(directory, DirectoryAudit) else directory.audit()
    roles: dict[str, dict[str, Any]] = {}
    for view in audit.servers:
        role = roles.setdefault(view.role, {"ready": 0, "servers": []})
        role["ready"] += view.status.value == "ready"
        role["servers"].append(
            {
                "server": view.server,
                "owner_id": view.owner_id,
                "status": view.status.value,
                "generation": view.generation,
                "epoch": view.epoch,
                "reservations": view.count,
                "weight": view.weight,
                "error": view.error,
            }
        )
    return {"roles": roles, "reservations": audit.statistics.reservations}


def reservations_body(directory: _Audited | DirectoryAudit) -> dict[str, Any]:
    """The audit, whole. ``consistent`` is false when any counter disagrees with the reservations; ``faults`` say where."""
    audit = directory if isinstance(directory, DirectoryAudit) else directory.audit()
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(audit))
    body["consistent"] = not audit.faults
    return body


def check_generation(expected: str | None, owner: EndpointOwner, *, new_work: bool = True) -> None:
    """Refuse a message that was meant for another lifetime, before it touches memory.

    Raises:
        StaleGeneration: Another generation is live here.
        NotReady: Nothing is published.
        Draining: New work while draining.
    """
    owner.check(expected, new_work=new_work)


_CODES: tuple[tuple[type[EndpointError], str, int], ...] = (
    (StaleGeneration, "STALE_GENERATION", 409),
    (Overloaded, "OVERLOADED", 429),
    (Draining, "DRAINING", 503),
    (Unavailable, "UNAVAILABLE", 503),
    (DirectoryClosed, "SHUTTING_DOWN", 503),
    (EndpointTimeout, "TIMEOUT", 504),
    (RefreshFailed, "REFRESH_FAILED", 502),
    (RecordInvalid, "RECORD_INVALID", 502),
    (StoreError, "STORE", 502),
    (LocalProtocolError, "BAD_REQUEST", 400),
)


def http_status(error: EndpointError) -> int:
    """The status code for an error of this package."""
    return next((status for kind, _, status in _CODES if isinstance(error, kind)), 500)


def error_body(error: EndpointError) -> dict[str, Any]:
    """The JSON body for an error: ``error`` is a stable code, ``message`` is for people, the rest are its fields."""
    body: dict[str, Any] = {
        "error": next((code for kind, code, _ in _CODES if isinstance(error, kind)), "INTERNAL"),
        "message": error.message,
    }
    for name in ("expected", "current", "field", "reason", "server", "attempts", "role"):
        if name in error.__dict__:
            body[name] = error.__dict__[name]
    return body


#: Bytes of an answer that are looked at, and characters of its message that are kept.
_ANSWER_BYTES_MAX, _MESSAGE_MAX = 65536, 256


def refusal_of(status: int, body: bytes | str | Mapping[str, Any] | None) -> StaleGeneration | Unavailable | None:
    """The refusal that an answer carries: what ``http_status`` and ``error_body`` made of an error at the receiver.

    Args:
        status: Of the answer.
        body: Of the answer, as JSON or decoded. Only looked at for 409, 429 and 503.

    Returns:
        StaleGeneration, Draining, NotReady or Overloaded: the receiver took nothing in, so the request may go elsewhere.
        None: any other answer; it is the client's.
    """
    if status not in (409, 429, 503) or isinstance(status, bool):
        return None
    fields = _answer_fields(body)
    code, message = fields.get("error"), fields.get("message")
    text = message[:_MESSAGE_MAX] if isinstance(message, str) else ""
    if (code, status) == ("STALE_GENERATION", 409):
        expected, current = (fields.get(name) for name in ("expected", "current"))
        return StaleGeneration(*(value if isinstance(value, str) else None for value in (expected, current)))
    if (code, status) == ("OVERLOADED", 429):
        return Overloaded(text or "the receiver is overloaded")
    if (code, status) == ("DRAINING", 503):
        return Draining(text or "the receiver is draining")
    if status == 503 and code in ("UNAVAILABLE", "SHUTTING_DOWN"):
        return NotReady(text or "the receiver is not ready")
    return None


def _answer_fields(body: object) -> Mapping[str, Any]:
    """The fields of an answer's body; none where it is not a JSON object of bearable size."""
    if isinstance(body, Mapping):
        return body
    if not isinstance(body, (bytes, bytearray, memoryview, str)) or len(body) > _ANSWER_BYTES_MAX:
        return {}
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
