"""The published record, and the strict reading of one that somebody else published.

A record is written whole and read whole: addresses, generation and profile of one publication never mix with those of
another. Its JSON form is flat, with ``ready`` beside the fields; unknown keys are kept by nobody's parser but reported in
``unknown_fields`` so that an operator sees them, and are never forwarded to peers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal

import msgspec

from endpoint_lifecycle._errors import ConfigError, NotReady, RecordInvalid

#: Version of the meaning of these fields. A record of another version is refused.
PROTOCOL_VERSION = 1
#: Longest generation, owner id, instance id, role.
ID_CHARS_MAX = 128
ADDRESSES_MAX = 4096
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_WILDCARD_HOSTS = frozenset({"", "*", "0.0.0.0", "::", "[::]", "0", "[::0]", "::0", "0:0:0:0:0:0:0:0"})  # noqa: S104

PUBLISHED: Literal["published"] = "published"
DRAINING: Literal["draining"] = "draining"


class EndpointProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know of an instance beyond its addresses.

    Attributes:
        protocol_version: Version of the native transfer protocol that the instance speaks, >= 1.
        layout_fingerprint: Digest of what must agree for KV to move (page size, dtype, heads, layers, stage map).
        address_scope: ``rank``: one control address per rank; ``dp_rank``: one per attention-DP rank.
        dp_size, pp_size, tp_size: Ranks per dimension, each >= 1.
        dp_rank: The one attention-DP rank that this record speaks for; None: all.
        limits: Named bounds (tokens, blocks, sequence length), integers >= 0.
        details: Anything else that peers need, JSON-able.
    """

    protocol_version: int = PROTOCOL_VERSION
    layout_fingerprint: str = ""
    address_scope: Literal["rank", "dp_rank"] = "rank"
    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    dp_rank: int | None = None
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    details: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def address_count(self) -> int:
        """How many control addresses a record with this profile carries."""
        if self.address_scope == "dp_rank":
            return self.dp_size
        return self.dp_size * self.pp_size * self.tp_size


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One publication: who, where, and for which lifetime.

    Attributes:
        role: What the instance does (``context``, ``generation``, ...).
        owner_id: Stable name of the slot that the instance fills.
        instance_id: Name of this process start.
        generation: Opaque name of this final runtime's lifetime, compared for equality only; None where the publisher is
            of a kind that has none.
        state: ``published`` or ``draining``.
        control_addresses: Where peers send control messages, ``address_count`` of them, in rank order.
        profile: See EndpointProfile.
    """

    role: str
    owner_id: str
    instance_id: str
    generation: str | None
    state: Literal["published", "draining"]
    control_addresses: tuple[str, ...]
    profile: EndpointProfile = msgspec.field(default_factory=EndpointProfile)

    def encode(self) -> bytes:
        """The canonical JSON of this record (equal records give equal bytes)."""
        return msgspec.json.encode(self, order="deterministic")


_FIELDS = frozenset(EndpointRecord.__struct_fields__)
_KNOWN = _FIELDS | {"ready", "unknown_fields"}
_JSON_DEPTH_MAX = 32


def unknown_fields(payload: Mapping[str, Any]) -> tuple[str, ...]:
    """Names in a decoded payload that are no part of a record, sorted."""
    return tuple(sorted(str(key) for key in payload if key not in _KNOWN))


def parse_record(
    payload: bytes | bytearray | memoryview | Mapping[str, Any] | EndpointRecord,
    *,
    server: str = "",
    role: str | None = None,
    owner_id: str | None = None,
    instance_id: str | None = None,
    protocol_version: int | None = None,
    layout_fingerprint: str | None = None,
    payload_bytes_max: int = 65536,
    require_generation: bool = True,
) -> EndpointRecord:
    """Read a record strictly. Nothing of a record that fails is kept.

    Args:
        payload: JSON text, its decoded mapping, or a record.
        server: Named in errors.
        role, owner_id, instance_id: What the answer must say, where the caller knows it.
        protocol_version, layout_fingerprint: What this side can work with; None accepts any.
        payload_bytes_max: Longest JSON text accepted.
        require_generation: Refuse a record without a generation.

    Returns:
        The record, every field checked.

    Raises:
        RecordInvalid: ``field`` names the first field that is missing, of a wrong type or out of range.
        NotReady: The answer is well formed and says that nothing is published.
    """
    if isinstance(payload, EndpointRecord):
        record = payload
    else:
        record = _decode(payload, server, payload_bytes_max)
    check_record(record, server=server, require_generation=require_generation)
    _expect("role", record.role, role, server)
    _expect("owner_id", record.owner_id, owner_id, server)
    _expect("instance_id", record.instance_id, instance_id, server)
    _expect("profile.protocol_version", record.profile.protocol_version, protocol_version, server)
    _expect("profile.layout_fingerprint", record.profile.layout_fingerprint, layout_fingerprint, server)
    return record


def _expect(field: str, value: object, wanted: object, server: str) -> None:
    if wanted is not None and value != wanted:
        raise RecordInvalid(field, f"is {value!r}, expected {wanted!r}", server=server)


def _decode(
    payload: bytes | bytearray | memoryview | Mapping[str, Any], server: str, payload_bytes_max: int
) -> EndpointRecord:
    if isinstance(payload, (bytes, bytearray, memoryview)):
        if len(payload) > payload_bytes_max:
            raise RecordInvalid("$", f"{len(payload)} bytes, at most {payload_bytes_max}", server=server)
        try:
            decoded = msgspec.json.decode(payload)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RecordInvalid("$", f"not JSON: {error}", server=server) from error
    elif isinstance(payload, Mapping):
        decoded = dict(payload)
        try:
            size = len(msgspec.json.encode(decoded))
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise RecordInvalid("$", f"not JSON-able: {error}", server=server) from error
        if size > payload_bytes_max:
            raise RecordInvalid("$", f"{size} bytes, at most {payload_bytes_max}", server=server)
    else:
        raise RecordInvalid("$", f"is a {type(payload).__name__}, not an object", server=server)
    if not isinstance(decoded, dict):
        raise RecordInvalid("$", f"is a {type(decoded).__name__}, not an object", server=server)
    ready = decoded.get("ready", True)
    if not isinstance(ready, bool):
        raise RecordInvalid("ready", f"is {ready!r}, not a boolean", server=server)
    if not ready and decoded.get("state") != DRAINING:
        raise NotReady(f"{server or 'server'} is not ready (state {decoded.get('state')!r})")
    for field in ("role", "owner_id", "instance_id", "generation", "state", "control_addresses"):
        if field not in decoded and field != "generation":
            raise RecordInvalid(field, "is missing", server=server)
    decoded.setdefault("generation", None)
    try:
        return msgspec.convert({key: decoded[key] for key in _FIELDS if key in decoded}, EndpointRecord)
    except (msgspec.ValidationError, RecursionError) as error:
        field, reason = _field_of(str(error))
        raise RecordInvalid(field, reason, server=server) from error


def _field_of(message: str) -> tuple[str, str]:
    """``Expected `int`, got `str` - at `$.profile.dp_size``` → (``profile.dp_size``, ``Expected ...``)."""
    # Taken apart without an expression: the text holds what somebody else sent, and a search over it could take long.
    reason, at, path = message.rpartition(" - at `$")
    if not at or not path.endswith("`"):
        _, missing, name = message.partition("missing required field `")
        return (name.rpartition("`")[0] if missing else "$"), message
    return (path[:-1].removeprefix(".") or "$"), reason


def check_record(record: EndpointRecord, *, server: str = "", require_generation: bool = True) -> None:
    """Check every field of a record that has the right types.

    Raises:
        RecordInvalid: The first field that is out of range.
    """
    for field in ("role", "owner_id", "instance_id"):
        check_id(field, getattr(record, field), server=server)
    if record.generation is None:
        if require_generation:
            raise RecordInvalid("generation", "is missing", server=server)
    else:
        check_id("generation", record.generation, server=server)
    if record.state not in (PUBLISHED, DRAINING):
        raise RecordInvalid("state", f"is {record.state!r}, must be {PUBLISHED!r} or {DRAINING!r}", server=server)
    _check_profile(record.profile, server)
    _check_addresses(record, server)


def check_id(field: str, value: object, *, server: str = "") -> None:
    """Printable ASCII without spaces, 1 to 128 characters."""
    if not isinstance(value, str) or not value:
        raise RecordInvalid(field, f"is {value!r}, not a non-empty string", server=server)
    if len(value) > ID_CHARS_MAX:
        raise RecordInvalid(field, f"has {len(value)} characters, at most {ID_CHARS_MAX}", server=server)
    if not _PRINTABLE.fullmatch(value):
        raise RecordInvalid(field, f"{value!r} has characters that are not printable ASCII", server=server)


def _check_profile(profile: EndpointProfile, server: str) -> None:
    for field in ("protocol_version", "dp_size", "pp_size", "tp_size"):
        value = getattr(profile, field)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise RecordInvalid(f"profile.{field}", f"is {value!r}, must be an integer from 1 to 2**20", server=server)
    if profile.address_scope not in ("rank", "dp_rank"):
        raise RecordInvalid(
            "profile.address_scope", f"is {profile.address_scope!r}, must be 'rank' or 'dp_rank'", server=server
        )
    rank = profile.dp_rank
    if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < profile.dp_size):
        raise RecordInvalid("profile.dp_rank", f"is {rank!r}, not in [0, {profile.dp_size})", server=server)
    fingerprint = profile.layout_fingerprint
    if not isinstance(fingerprint, str) or len(fingerprint) > ID_CHARS_MAX:
        raise RecordInvalid("profile.layout_fingerprint", f"is not a string of at most {ID_CHARS_MAX}", server=server)
    for name, bound in profile.limits.items():
        if not isinstance(bound, int) or isinstance(bound, bool) or bound < 0:
            raise RecordInvalid(f"profile.limits.{name}", f"is {bound!r}, must be an integer >= 0", server=server)


def _check_addresses(record: EndpointRecord, server: str) -> None:
    addresses = record.control_addresses
    if not addresses:
        raise RecordInvalid("control_addresses", "is empty", server=server)
    if len(addresses) > ADDRESSES_MAX:
        raise RecordInvalid(
            "control_addresses", f"has {len(addresses)} entries, at most {ADDRESSES_MAX}", server=server
        )
    seen: set[str] = set()
    for index, address in enumerate(addresses):
        reason = address_fault(address)
        if reason is None and address in seen:
            reason = f"{address!r} is a duplicate"
        if reason is not None:
            raise RecordInvalid(f"control_addresses[{index}]", reason, server=server)
        seen.add(address)
    wanted = record.profile.address_count
    if len(addresses) != wanted:
        raise RecordInvalid(
            "control_addresses",
            f"has {len(addresses)} entries, expected {wanted} (one per {record.profile.address_scope})",
            server=server,
        )


def address_fault(address: object) -> str | None:
    """Why an address cannot be dialled by a peer, or None when it can.

    ``tcp://host:port`` with a concrete host and a port from 1 to 65535, ``ipc://path`` or ``unix://path``.
    """
    if not isinstance(address, str) or not address:
        return f"is {address!r}, not an address"
    if len(address) > 512:
        return "is longer than 512 characters"
    if not _PRINTABLE.fullmatch(address):
        return f"{address!r} has characters that are not printable ASCII"
    scheme, separator, rest = address.partition("://")
    if not separator:
        return f"{address!r} has no scheme"
    if scheme in ("ipc", "unix"):
        return None if rest else f"{address!r} has no path"
    if scheme != "tcp":
        return f"{address!r} has scheme {scheme!r}, not tcp, ipc or unix"
    host, separator, port = rest.rpartition(":")
    if not separator:
        return f"{address!r} has no port"
    if host.lower() in _WILDCARD_HOSTS:
        return f"{address!r} has a wildcard host"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"{address!r}: an IPv6 host stands in brackets"
    if "/" in host or "@" in host:
        return f"{address!r} has a malformed host"
    if not port.isdecimal() or not port.isascii() or not 1 <= int(port[:6]) <= 65535 or len(port) > 5:
        return f"{address!r} has port {port!r}, must be 1 to 65535"
    return None


def record_from_disaggregated_params(
    server_info: Mapping[str, Any], *, server: str, role: str, dp_size: int = 1
) -> EndpointRecord:
    """Read the record out of a ``/server_info`` answer with the field names that TensorRT-LLM workers use.

    The addresses stand in ``disaggregated_params`` as ``ctx_info_endpoint`` (a string or a list), with ``ctx_dp_rank``
    and, from workers that have one, ``ctx_endpoint_generation``. Such an answer has no identity of its own: the server's
    name stands for owner and instance.

    Raises:
        RecordInvalid: As parse_record; a missing generation is accepted.
    """
    params = server_info.get("disaggregated_params")
    if not isinstance(params, Mapping):
        raise RecordInvalid("disaggregated_params", "is missing", server=server)
    endpoint = params.get("ctx_info_endpoint")
    addresses = (endpoint,) if isinstance(endpoint, str) else tuple(endpoint) if isinstance(endpoint, list) else ()
    name = re.sub(r"[^\x21-\x7e]", "_", server)[:ID_CHARS_MAX]
    record = {
        "role": role,
        "owner_id": name,
        "instance_id": name,
        "generation": params.get("ctx_endpoint_generation"),
        "state": PUBLISHED,
        "control_addresses": list(addresses),
        "profile": {"address_scope": "dp_rank", "dp_size": dp_size, "dp_rank": params.get("ctx_dp_rank")},
    }
    return parse_record(record, server=server, role=role, require_generation=False)


def check_number(value: object, field: str, *, whole: bool = False) -> None:
    """Raise ConfigError naming ``field`` unless it is a number (an integer where ``whole``). Truth values and nan are none."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real) or value != value:
        raise ConfigError(field, f"is {value!r}, not {'an integer' if whole else 'a number'}")


def check_field(ok: bool, field: str, reason: str) -> None:
    """Raise ConfigError naming ``field`` unless ``ok``."""
    if not ok:
        raise ConfigError(field, reason)
