"""What several files of tests need."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

PATIENCE_S = 20.0


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Waits for something that must happen."""

    def wait(condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "did not happen"
            time.sleep(0.001)

    return wait
