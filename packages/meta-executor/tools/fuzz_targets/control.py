"""What processes of a run tell each other: datagrams to the launcher, records of a store, messages of etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

from fuzz_targets.drawing import Refused, Target, json_mutated, shown


@contextlib.contextmanager
def launcher() -> Iterator[Target]:
    """Datagrams to the launcher's socket."""
    from meta_executor.config import service_config
    from meta_executor.supervise.launch import Launcher
    from meta_executor.supervise.report import understood

    started = {"rank_pid": 4194304, "rank_start_ticks": 1, "guard_start_ticks": 2, "parent_pid": 4194304}
    seeds = [
        json.dumps(
            {"owner_id": owner, "rank": 0, "pid": 4194304, "event": event, "instance_id": "", "fields": fields}
        ).encode()
        for owner in ("ctx-0", "front")
        for event, fields in (
            ("started", started),
            ("status", {"phase": "loading"}),
            ("ready", {"url": "http://127.0.0.1:8000", "instance_id": ""}),
            ("orphaned", {"what": "mpiexec", "gone_pid": 9}),
            ("exited", {"rank_pid": 7, "status": -9, "text": "x"}),
            ("memory", {"rss_bytes": 1, "kv_bytes": 2}),
        )
    ]
    listening = Launcher(service_config({}), say=lambda _: None)

    def read(data: bytes) -> None:
        message = understood(data)
        if isinstance(message, str):
            if len(message) > 1000 or not message.isprintable():
                raise RuntimeError(f"a refusal that cannot be shown: {message!r}")
            raise Refused
        listening._on_message(message)

    yield seeds, json_mutated, read


@contextlib.contextmanager
def etcd_records() -> Iterator[Target]:
    """Values under the registrations' prefix."""
    from endpoint_lifecycle import AsyncEndpointDirectory, EndpointError
    from endpoint_lifecycle._discovery import RegistryBook, StoreEvent, decode_registration

    profile = {
        "layout_fingerprint": "f",
        "dp_size": 1,
        "pp_size": 2,
        "tp_size": 1,
        "limits": {"kv_tokens": 5},
        "details": {"a": "b"},
    }
    record = {
        "ready": True,
        "role": "context",
        "owner_id": "ctx-0",
        "instance_id": "i",
        "generation": "g",
        "state": "published",
        "control_addresses": ["tcp://127.0.0.1:5"],
        "profile": profile,
    }
    seeds = [
        json.dumps({"server": "http://127.0.0.1:8000", "role": "context", "record": record}).encode(),
        json.dumps({"server": "http://[::1]:8000", "role": "generation"}).encode(),
    ]

    async def fetch(server: str) -> Any:
        raise OSError(server)

    runner = asyncio.Runner()

    async def stored(data: bytes) -> None:
        book = RegistryBook(AsyncEndpointDirectory(fetch))
        book.event_applied(StoreEvent("/endpoint-lifecycle/servers/context/ctx-0", data, 1), 0.0)
        book.event_applied(StoreEvent("/endpoint-lifecycle/servers/context/ctx-0", None, 2), 0.0)
        if book._known or book.invalid:
            raise RuntimeError("a deleted entry is still there")

    def read(data: bytes) -> None:
        runner.run(stored(data))
        try:
            decode_registration(data)
        except EndpointError as error:
            shown(error)
            raise Refused from None

    yield seeds, json_mutated, read
    runner.close()


@contextlib.contextmanager
def etcd_watch() -> Iterator[Target]:
    """Messages of etcd's watch."""
    from endpoint_lifecycle import EndpointError
    from endpoint_lifecycle._etcd import EtcdClient, EtcdWatch

    event = {"kv": {"key": "YQ==", "value": "Yg==", "mod_revision": "5"}, "type": "PUT"}
    seeds = [
        json.dumps(message).encode()
        for message in (
            {"result": {"created": True}},
            {"result": {"events": [event, {**event, "type": "DELETE"}]}},
            {"result": {"compact_revision": "7"}},
            {"result": {"canceled": True, "cancel_reason": "x"}},
            {"error": "no"},
        )
    ]
    client = EtcdClient("http://127.0.0.1:1", 1.0)
    watch = EtcdWatch(client, "a", 1, 1.0, lambda events: None)

    def read(data: bytes) -> None:
        try:
            with client._mapped():
                watch._message(json.loads(data))
        except EndpointError:
            raise Refused from None

    yield seeds, json_mutated, read
    client.close()
