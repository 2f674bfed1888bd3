"""Connections and descriptors: the process's limit is raised as far as it may be, and no more is let in than it holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import lingering_max
from meta_executor.listener.descriptors import fitted

PROGRAM = """
import logging, resource, sys
from meta_executor.config import HttpConfig
from meta_executor.listener.descriptors import within_descriptors
soft, hard, tls = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
logging.basicConfig(format="%(message)s")
bounds = within_descriptors(HttpConfig(connections_max=1000, connections_per_client_max=800), tls=bool(tls))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], bounds.connections_max, bounds.connections_per_client_max)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "tls", "told"),
    [
        (3000, 4000, 0, "3000 1000 800"),  # enough
        (256, 4000, 0, "1506 1000 800"),  # raised: the connections, 250 that read a refusal, 256 besides
        (256, 4000, 1, "2506 1000 800"),  # and as many handshakes
        (256, 1024, 0, "1024 614 307"),
        (256, 1024, 1, "1024 307 153"),
        (256, 256, 0, "256 102 51"),
    ],
)
def test_the_bounds_are_those_of_the_process(soft: int, hard: int, tls: int, told: str) -> None:
    """In a process of its own, whose limits are its own. A bound that is lowered is said aloud, with both numbers."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(soft), str(hard), str(tls)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == told
    assert ("(ulimit -n)" in done.stderr) == (told.split()[1] != "1000"), done.stderr


@pytest.mark.parametrize("tls", [False, True])
def test_what_is_let_in_fits(tls: bool) -> None:
    """Connections, refused ones and handshakes together take no more than is there, and of a small limit half stays free."""
    for descriptors in range(8, 6000, 7):
        bounds = fitted(HttpConfig(), descriptors, tls=tls)
        taken = bounds.connections_max * (2 if tls else 1) + lingering_max(bounds)
        assert taken <= descriptors - min(256, descriptors // 2) + 1, descriptors
        assert 1 <= bounds.connections_per_client_max <= bounds.connections_max
