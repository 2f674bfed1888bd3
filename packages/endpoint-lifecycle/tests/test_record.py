"""Strict reading: every field that is wrong is named, and nothing of a bad record is kept."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from endpoint_lifecycle import (
    EndpointError,
    EndpointProfile,
    EndpointRecord,
    NotReady,
    RecordInvalid,
    address_fault,
    parse_record,
    record_from_disaggregated_params,
    unknown_fields,
)

GOOD: dict[str, Any] = {
    "role": "context",
    "owner_id": "ctx-0",
    "instance_id": "i1",
    "generation": "g1",
    "state": "published",
    "ready": True,
    "control_addresses": ["tcp://10.0.0.1:7000", "ipc:///tmp/a"],
    "profile": {"dp_size": 2, "address_scope": "dp_rank", "dp_rank": 1, "limits": {"tokens": 5}},
}


def changed(**changes: Any) -> dict[str, Any]:
    body = json.loads(json.dumps(GOOD))
    for key, value in changes.items():
        if key.startswith("profile_"):
            body["profile"][key.removeprefix("profile_")] = value
        elif value is ...:
            del body[key]
        else:
            body[key] = value
    return body


def test_good_record_is_read_whole() -> None:
    record = parse_record(json.dumps(GOOD).encode(), role="context", owner_id="ctx-0", instance_id="i1")
    assert record.control_addresses == ("tcp://10.0.0.1:7000", "ipc:///tmp/a")
    assert record.profile.limits == {"tokens": 5}
    assert parse_record(record.encode()) == record


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (changed(role=...), "role"),
        (changed(owner_id=...), "owner_id"),
        (changed(instance_id=...), "instance_id"),
        (changed(generation=...), "generation"),
        (changed(generation=None), "generation"),
        (changed(state=...), "state"),
        (changed(control_addresses=...), "control_addresses"),
        (changed(role=""), "role"),
        (changed(role="a b"), "role"),
        (changed(owner_id="x" * 129), "owner_id"),
        (changed(instance_id="\u00e9"), "instance_id"),
        (changed(generation="g\n"), "generation"),
        (changed(generation="g" * 129), "generation"),
        (changed(generation=7), "generation"),
        (changed(state="estimating"), "state"),
        (changed(state="retired"), "state"),
        (changed(ready="yes"), "ready"),
        (changed(control_addresses=[]), "control_addresses"),
        (changed(control_addresses="tcp://10.0.0.1:7000"), "control_addresses"),
        (changed(control_addresses=["tcp://10.0.0.1:7000"]), "control_addresses"),
        (changed(control_addresses=["tcp://10.0.0.1:7000"] * 2), "control_addresses[1]"),
        (changed(control_addresses=["tcp://0.0.0.0:7000", "ipc://a"]), "control_addresses[0]"),
        (changed(control_addresses=["ipc://a", "tcp://[::]:7000"]), "control_addresses[1]"),
        (changed(control_addresses=["ipc://a", 5]), "control_addresses[1]"),
        (changed(profile_dp_rank=2), "profile.dp_rank"),
        (changed(profile_dp_rank=-1), "profile.dp_rank"),
        (changed(profile_dp_size=0), "profile.dp_size"),
        (changed(profile_dp_size="2"), "profile.dp_size"),
        (changed(profile_pp_size=-4), "profile.pp_size"),
        (changed(profile_tp_size=2**21), "profile.tp_size"),
        (changed(profile_protocol_version=0), "profile.protocol_version"),
        (changed(profile_address_scope="host"), "profile.address_scope"),
        (changed(profile_limits={"tokens": -1}), "profile.limits.tokens"),
        (changed(profile_limits={"tokens": True}), "profile.limits[...]"),
        (changed(profile_layout_fingerprint="f" * 129), "profile.layout_fingerprint"),
        (changed(profile=None), "profile"),
    ],
)
def test_bad_field_is_named(body: dict[str, Any], field: str) -> None:
    """Each entry breaks one field; the error names exactly it."""
    with pytest.raises(RecordInvalid) as caught:
        parse_record(body, server="http://a:1")
    assert caught.value.field == field
    assert "http://a:1" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"role": "generation"}, "role"),
        ({"owner_id": "ctx-1"}, "owner_id"),
        ({"instance_id": "i2"}, "instance_id"),
        ({"protocol_version": 2}, "profile.protocol_version"),
        ({"layout_fingerprint": "abc"}, "profile.layout_fingerprint"),
    ],
)
def test_other_identity_or_layout_fails_closed(wanted: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordInvalid) as caught:
        parse_record(GOOD, **wanted)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 5000, 7, None, {"a": object()}]
)
def test_what_is_no_object_is_refused(payload: Any) -> None:
    with pytest.raises(RecordInvalid) as caught:
        parse_record(payload)
    assert caught.value.field == "$"


def test_oversized_payload_is_refused_unread() -> None:
    body = json.dumps(changed(padding="x" * 70000)).encode()
    with pytest.raises(RecordInvalid, match="at most 65536"):
        parse_record(body)
    with pytest.raises(RecordInvalid, match="at most 65536"):
        parse_record(json.loads(body))
    assert parse_record(body, payload_bytes_max=100_000).role == "context"


@pytest.mark.parametrize("state", ["new", "estimating", "final", "retired", "failed"])
def test_not_ready_answer_is_told_apart_from_a_bad_one(state: str) -> None:
    with pytest.raises(NotReady):
        parse_record({"role": "context", "owner_id": "ctx-0", "instance_id": "i1", "state": state, "ready": False})


def test_draining_answer_is_a_record() -> None:
    assert parse_record(changed(state="draining", ready=False)).state == "draining"


def test_missing_generation_is_accepted_where_allowed() -> None:
    assert parse_record(changed(generation=...), require_generation=False).generation is None


def test_unknown_keys_are_reported_and_not_forwarded() -> None:
    body = changed(surprise=1, zeta=2)
    assert unknown_fields(body) == ("surprise", "zeta")
    assert b"surprise" not in parse_record(body).encode()


@pytest.mark.parametrize(
    "address",
    [
        "tcp://10.0.0.1:1",
        "tcp://host.example:65535",
        "tcp://[fe80::1]:7000",
        "ipc:///run/x.sock",
        "ipc://@abstract",
        "unix:///run/x",
    ],
)
def test_dialable_addresses(address: str) -> None:
    assert address_fault(address) is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "10.0.0.1:7000",
        "http://10.0.0.1:7000",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:65536",
        "tcp://10.0.0.1:-1",
        "tcp://10.0.0.1:7e3",
        "tcp://10.0.0.1:\u0663",
        "tcp://:7000",
        "tcp://*:7000",
        "tcp://0.0.0.0:7000",
        "tcp://[::]:7000",
        "tcp://0:7000",
        "tcp://fe80::1:7000",
        "tcp://a/b:7000",
        "tcp://u@h:7000",
        "ipc://",
        "unix://",
        "tcp://a b:1",
        "tcp://" + "a" * 600 + ":1",
        5,
        None,
    ],
)
def test_undialable_addresses(address: Any) -> None:
    """Wildcards, ports out of range, missing parts: a peer could not dial them."""
    assert address_fault(address)


def test_per_rank_scope_counts_all_ranks() -> None:
    profile = EndpointProfile(dp_size=2, pp_size=4, tp_size=1)
    assert profile.address_count == 8
    assert EndpointProfile(dp_size=2, pp_size=4, address_scope="dp_rank").address_count == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(GOOD) + [f"profile.{f}" for f in EndpointProfile.__struct_fields__]), JSON)
def test_any_value_in_any_field_is_accepted_or_named(field: str, value: Any) -> None:
    """No value makes another error than RecordInvalid or NotReady, and what is accepted is a sound record."""
    body = json.loads(json.dumps(GOOD))
    if field.startswith("profile."):
        body["profile"][field.removeprefix("profile.")] = value
    else:
        body[field] = value
    blamed = record = None
    try:
        record = parse_record(body)
    except RecordInvalid as error:
        blamed = error.field.split(".")[0].split("[")[0]
    except NotReady:
        blamed = "ready" if body["ready"] is False else "nothing"
    if record is None:
        assert blamed in {field.split(".")[0], "control_addresses", "profile"}
    else:
        assert isinstance(record, EndpointRecord)
        assert len(record.control_addresses) == record.profile.address_count
        assert parse_record(record.encode()) == record


def test_mutated_bytes_never_escape_the_error_tree() -> None:
    """Every single-byte change of a record is accepted whole or refused by our own error."""
    source = parse_record(GOOD).encode()
    generator = random.Random(8)
    for position in range(len(source)):
        mutated = bytearray(source)
        mutated[position] = generator.randrange(256)
        try:
            record = parse_record(bytes(mutated))
        except EndpointError:
            continue
        assert msgspec.json.decode(record.encode(), type=EndpointRecord) == record


def test_field_names_of_tensorrt_llm_workers_are_read() -> None:
    info = {
        "model": "m",
        "disaggregated_params": {
            "ctx_info_endpoint": ["tcp://10.0.0.2:2000"],
            "ctx_dp_rank": 0,
            "ctx_endpoint_generation": "f",
        },
    }
    record = record_from_disaggregated_params(info, server="http://a:1", role="context")
    assert (record.control_addresses, record.profile.dp_rank, record.generation) == (("tcp://10.0.0.2:2000",), 0, "f")
    del info["disaggregated_params"]["ctx_endpoint_generation"]  # type: ignore[attr-defined]
    info["disaggregated_params"]["ctx_info_endpoint"] = "tcp://10.0.0.2:2000"  # type: ignore[index]
    assert record_from_disaggregated_params(info, server="http://a:1", role="context").generation is None
    with pytest.raises(RecordInvalid):
        record_from_disaggregated_params({"model": "m"}, server="http://a:1", role="context")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (changed(profile_dp_size="x"), "profile.dp_size"),
        (changed(profile_limits={'" - at `$"' * 3000 + "\n": "x"}), "profile.limits"),
        (changed(profile_limits={"a - at `$.role`": "x"}), "profile.limits"),
    ],
)
def test_a_field_is_named_whatever_the_text_of_others_looks_like(body: dict[str, Any], field: str) -> None:
    """The decoder's words are taken apart from their end, in one pass, also beside keys that look like them."""
    with pytest.raises(RecordInvalid) as caught:
        parse_record(body)
    assert caught.value.field.startswith(field)
