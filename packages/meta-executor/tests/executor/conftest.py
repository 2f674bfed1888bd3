"""What scenarios of whole instances share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meta_executor.executor.testing import Pair


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Pairs that a test makes; their engines end with it."""
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()
