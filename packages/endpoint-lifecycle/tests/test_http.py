"""Bodies and status codes: what a web framework mounts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import endpoint_lifecycle
from endpoint_lifecycle import (
    DirectoryConfig,
    Draining,
    EndpointDirectory,
    EndpointError,
    EndpointOwner,
    EndpointProfile,
    EndpointRecord,
    EndpointTimeout,
    InvalidTransition,
    NoServer,
    NotReady,
    Overloaded,
    RecordInvalid,
    RefreshFailed,
    ServerGone,
    StaleGeneration,
    StoreError,
    check_generation,
    cluster_info_body,
    error_body,
    http_status,
    parse_record,
    reservations_body,
    server_info_body,
)
from endpoint_lifecycle.testing import check_instance

ADDRESS = ("tcp://10.0.0.1:7000",)


def test_server_info_has_no_endpoint_field_until_published_and_round_trips_after() -> None:
    owner = EndpointOwner("ctx-0", "i1", "context")
    assert server_info_body(owner) == {
        "role": "context",
        "owner_id": "ctx-0",
        "instance_id": "i1",
        "state": "new",
        "ready": False,
    }
    with owner.begin_estimation():
        assert server_info_body(owner)["state"] == "estimating"
    record = owner.finalize().publish(ADDRESS, EndpointProfile(limits={"tokens": 9}))
    body = server_info_body(owner)
    assert body["ready"] is True
    assert parse_record(json.dumps(body).encode(), role="context", instance_id="i1") == record
    owner.start_draining()
    body = server_info_body(owner)
    assert (body["ready"], body["state"], body["generation"]) == (False, "draining", record.generation)
    owner.retire(record.generation)
    assert "generation" not in server_info_body(owner)


def test_check_generation_refuses_with_both_sides_named() -> None:
    owner = EndpointOwner("ctx-0", "i1", "context")
    with pytest.raises(NotReady):
        check_generation("g", owner)
    live = owner.finalize().publish(ADDRESS).generation
    check_generation(live, owner)
    check_generation(None, owner)
    with pytest.raises(StaleGeneration) as caught:
        check_generation("old", owner)
    assert http_status(caught.value) == 409
    assert error_body(caught.value) == {
        "error": "STALE_GENERATION",
        "message": f"generation 'old' is not the live one ({live!r})",
        "expected": "old",
        "current": live,
    }
    owner.start_draining()
    with pytest.raises(Draining):
        check_generation(live, owner)
    check_generation(live, owner, new_work=False)
    assert owner.in_flight == 0


def test_cluster_and_reservations_are_json_and_agree(make_record: Callable[..., EndpointRecord]) -> None:
    directory = EndpointDirectory(DirectoryConfig())
    directory.apply_set("http://a", make_record("g1"), 0.0)
    directory.add_server("http://b", "context", 0.0)
    directory.reserve("context", 7, 1.0, weight=5)
    audit = directory.audit(2.0)
    cluster = json.loads(json.dumps(cluster_info_body(audit)))
    assert cluster["roles"]["context"]["ready"] == 1
    assert [s["status"] for s in cluster["roles"]["context"]["servers"]] == ["ready", "unprepared"]
    assert cluster["reservations"] == 1
    body = json.loads(json.dumps(reservations_body(audit)))
    assert body["consistent"] is True
    assert body["reservations"][0] | {"age_s": 0} == {
        "role": "context",
        "request_id": 7,
        "server": "http://a",
        "generation": "g1",
        "weight": 5,
        "state": "reserved",
        "age_s": 0,
        "expires_in_s": 179.0,
    }
    directory._slots["http://a"].load.weight += 1
    assert reservations_body(directory.audit(2.0))["consistent"] is False


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StaleGeneration("a", "b"), 409, "STALE_GENERATION"),
        (Overloaded("x"), 429, "OVERLOADED"),
        (Draining("x"), 503, "DRAINING"),
        (NotReady("x"), 503, "UNAVAILABLE"),
        (NoServer("context", "x"), 503, "UNAVAILABLE"),
        (ServerGone("http://a"), 503, "UNAVAILABLE"),
        (EndpointTimeout("x"), 504, "TIMEOUT"),
        (RefreshFailed("http://a", 3, "x"), 502, "REFRESH_FAILED"),
        (RecordInvalid("role", "x"), 502, "RECORD_INVALID"),
        (StoreError("x"), 502, "STORE"),
        (InvalidTransition("o", "new", "publish"), 400, "BAD_REQUEST"),
        (EndpointError("x"), 500, "INTERNAL"),
    ],
)
def test_status_and_code_of(error: EndpointError, status: int, code: str) -> None:
    assert http_status(error) == status
    body: dict[str, Any] = json.loads(json.dumps(error_body(error)))
    assert body["error"] == code and body["message"]


def test_every_error_of_the_package_has_a_status() -> None:
    for name in endpoint_lifecycle.__all__:
        kind = getattr(endpoint_lifecycle, name)
        if isinstance(kind, type) and issubclass(kind, EndpointError) and kind not in (EndpointError,):
            error = kind.__new__(kind)
            assert http_status(error) != 500 or kind is endpoint_lifecycle.RemoteProtocolError, name


# -- an instance's face -------------------------------------------------------------------------------------------------


class Face:
    """An instance as the packages' document says to write one."""

    def __init__(self) -> None:
        self.owner = EndpointOwner("ctx-0", "process-1", "context")
        self.owner.finalize().publish(list(ADDRESS))

    async def info(self) -> Any:
        return server_info_body(self.owner)

    async def work(self, generation: str) -> tuple[int, Any]:
        try:
            with self.owner.admit(generation):
                return 200, {"answer": 42}
        except EndpointError as error:
            return http_status(error), error_body(error)

    async def drain(self) -> None:
        self.owner.start_draining()


class Unchecked(Face):
    async def work(self, generation: str) -> tuple[int, Any]:
        return 200, {}


class ChecksNothingLate(Face):
    async def work(self, generation: str) -> tuple[int, Any]:
        return await super().work(generation) if self.owner.ready else (200, {})


class Fails(Face):
    async def work(self, generation: str) -> tuple[int, Any]:
        return 500, {"error": "INTERNAL"}


class RefusesAll(Face):
    async def work(self, generation: str) -> tuple[int, Any]:
        return await super().work("another")


class SaysLittle(Face):
    async def info(self) -> Any:
        return {"ready": True}


class Remints(Face):
    calls = 0

    async def info(self) -> Any:
        self.calls += 1
        return {**server_info_body(self.owner), "generation": f"g{self.calls}"}


class RemintsInTheDrain(Face):
    async def info(self) -> Any:
        found = server_info_body(self.owner)
        return found if self.owner.ready else {**found, "generation": "another"}


class EndsAtOnce(Face):
    async def drain(self) -> None:
        self.owner.start_draining()
        self.owner.retire(self.owner.generation)


class NeverDrains(Face):
    async def drain(self) -> None:
        pass


class DrainsFromTheStart(Face):
    def __init__(self) -> None:
        super().__init__()
        self.owner.start_draining()


class StaleOnce(Face):
    stale = False

    async def work(self, generation: str) -> tuple[int, Any]:
        status, body = await super().work("gone" if self.stale else generation)
        self.stale |= status == 409
        return status, body


def test_an_instance_as_documented_conforms() -> None:
    """Record, admission, refusals, drain."""
    face = Face()
    asyncio.run(check_instance(face.info, face.work, face.drain))
    assert face.owner.in_flight == 0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unchecked, "another generation is not refused as stale"),
        (ChecksNothingLate, "new work is not refused as draining"),
        (Fails, "neither served nor refused"),
        (RefusesAll, "work for its own generation is refused"),
        (SaysLittle, "record cannot be read"),
        (Remints, "generation changes"),
        (RemintsInTheDrain, "draining has changed the generation"),
        (EndsAtOnce, "must still say so"),
        (NeverDrains, "does not say that it drains"),
        (DrainsFromTheStart, "is not published"),
        (StaleOnce, "has ended the lifetime"),
    ],
)
def test_an_instance_that_does_not_conform_is_found(kind: type[Face], said: str) -> None:
    """Each mistake that such a face makes, by its name."""
    face = kind()
    with pytest.raises(AssertionError, match=said):
        asyncio.run(check_instance(face.info, face.work, face.drain))
