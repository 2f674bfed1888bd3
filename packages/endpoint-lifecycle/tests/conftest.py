"""Builders that several test modules use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from endpoint_lifecycle import EndpointProfile, EndpointRecord


def _make_record(generation: str | None = "g1", **changes: Any) -> EndpointRecord:
    values: dict[str, Any] = {
        "role": "context",
        "owner_id": "ctx-0",
        "instance_id": "i1",
        "generation": generation,
        "state": "published",
        "control_addresses": ("tcp://10.0.0.1:7000",),
        "profile": EndpointProfile(),
    }
    return EndpointRecord(**(values | changes))


@pytest.fixture(scope="session")
def make_record() -> Callable[..., EndpointRecord]:
    """A record of one context instance; fields can be replaced."""
    return _make_record
