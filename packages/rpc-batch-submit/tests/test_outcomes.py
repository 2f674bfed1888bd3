"""Settings, outcomes, and the worker's side."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpc_batch_submit import (
    BatchConfigError,
    BatchItemFailed,
    BatchOutcomeError,
    BatchSubmitConfig,
    take_in,
    unpack_outcomes,
)


class TestConfig:
    """Strict: a bad value names its variable or field."""

    def test_defaults_and_values(self) -> None:
        """Off by default, as documented."""
        assert BatchSubmitConfig.from_env({}) == BatchSubmitConfig(batch_max=1, delay_ms=0.5)
        environment = {"TLLM_RPC_SUBMIT_BATCH_MAX": "32", "TLLM_RPC_SUBMIT_BATCH_DELAY_MS": "2.5"}
        config = BatchSubmitConfig.from_env(environment, adaptive=True)
        assert (config.batch_max, config.delay_ms, config.delay_s, config.adaptive) == (32, 2.5, 0.0025, True)
        assert BatchSubmitConfig.from_env({"TLLM_RPC_SUBMIT_BATCH_DELAY_MS": "0"}).delay_ms == 0

    @pytest.mark.parametrize(
        "text", ["", "0", "-1", " 4", "4 ", "+4", "4.0", "1e3", "nan", "inf", "four", "٤", "65537", "1_0"]
    )
    def test_bad_batch_max(self, text: str) -> None:
        """Named."""
        with pytest.raises(BatchConfigError, match="TLLM_RPC_SUBMIT_BATCH_MAX"):
            BatchSubmitConfig.from_env({"TLLM_RPC_SUBMIT_BATCH_MAX": text})

    @pytest.mark.parametrize("text", ["", "-1", " 1", "1ms", "nan", "inf", "1e3", ".5", "5.", "60001", "٤", "1,5"])
    def test_bad_delay(self, text: str) -> None:
        """Named."""
        with pytest.raises(BatchConfigError, match="TLLM_RPC_SUBMIT_BATCH_DELAY_MS"):
            BatchSubmitConfig.from_env({"TLLM_RPC_SUBMIT_BATCH_DELAY_MS": text})

    @pytest.mark.parametrize(
        "bad",
        [
            {"batch_max": 0}, {"batch_max": True}, {"batch_max": 2.0}, {"delay_ms": -0.1}, {"delay_ms": float("nan")},
            {"delay_ms": "1"}, {"bytes_max": 0}, {"outstanding_max": 0}, {"adaptive": 1},
        ],
        ids=str,
    )  # fmt: skip
    def test_bad_fields(self, bad: dict[str, Any]) -> None:
        """Named."""
        with pytest.raises(BatchConfigError, match=next(iter(bad))):
            BatchSubmitConfig(**bad)


def test_unpack_outcomes() -> None:
    """None, texts, exceptions; anything else is an error for that request, or for all when the count is wrong."""
    error = ValueError("own")
    got = unpack_outcomes([None, "text", error, 5], 4)
    assert got[0] is None
    assert isinstance(got[1], BatchItemFailed)
    assert got[2] is error
    assert isinstance(got[3], BatchOutcomeError)
    assert unpack_outcomes(None, 3) == [None] * 3
    assert all(isinstance(item, BatchOutcomeError) for item in unpack_outcomes([None], 2))


class TestTakeIn:
    """The worker's loop runs between items."""

    def test_item_by_item(self) -> None:
        """Each request is asked for just before it is submitted."""
        trace: list[str] = []

        def lazily() -> Iterator[int]:
            for number in range(3):
                trace.append(f"read {number}")
                yield number

        assert take_in(lazily(), lambda number: trace.append(f"submit {number}")) == [None] * 3
        assert trace == ["read 0", "submit 0", "read 1", "submit 1", "read 2", "submit 2"]

    def test_bad_requests_fail_alone(self) -> None:
        """Unreadable ones and refused ones, each with its text, in place."""

        class Items(Iterator[int]):
            def __init__(self) -> None:
                self.left = [1, ValueError("unreadable"), 0, 4]

            def __next__(self) -> int:
                if not self.left:
                    raise StopIteration
                item = self.left.pop(0)
                if isinstance(item, Exception):
                    raise item
                return item

        taken: list[int] = []

        def submit(number: int) -> None:
            taken.append(12 // number)

        outcomes = take_in(Items(), submit)
        assert outcomes == [None, "ValueError: unreadable", outcomes[2], None]
        assert outcomes[2] is not None
        assert outcomes[2].startswith("ZeroDivisionError")
        assert taken == [12, 3]

    def test_the_lock_is_offered_by_time_held(self) -> None:
        """With 0.2 ms per item and 0.5 ms allowed, every third item is followed by an offer; short batches by none."""
        now_s = 0.0
        offers: list[int] = []
        taken: list[int] = []

        def submit(number: int) -> None:
            nonlocal now_s
            taken.append(number)
            now_s += 0.0002

        take_in(range(9), submit, hold_s=0.0005, clock=lambda: now_s, offer=lambda: offers.append(len(taken)))
        assert offers == [3, 6, 9]
        offers.clear()
        taken.clear()
        take_in(range(2), submit, hold_s=0.0005, clock=lambda: now_s, offer=lambda: offers.append(len(taken)))
        assert offers == []

    def test_another_thread_really_runs_between_items(self) -> None:
        """With a switch interval too long to help, a thread that waits for the lock still runs inside a batch."""
        taken: list[int] = []
        seen: list[int] = []
        stop = threading.Event()
        asleep = threading.Event()

        def other() -> None:
            while not stop.is_set():
                asleep.set()
                time.sleep(0.0001)
                seen.append(len(taken))

        def submit(number: int) -> None:
            until_s = time.perf_counter() + 0.0003
            while time.perf_counter() < until_s:
                pass
            taken.append(number)

        interval_s = sys.getswitchinterval()
        thread = threading.Thread(target=other)
        sys.setswitchinterval(30.0)
        try:
            thread.start()
            asleep.wait(20)
            take_in(range(60), submit, hold_s=0.0005)
        finally:
            sys.setswitchinterval(interval_s)
            stop.set()
            thread.join()
        inside = {count for count in seen if 0 < count < 60}
        assert len(inside) >= 5, f"ran at {sorted(inside)} of 60 items only"


def test_nothing_but_the_standard_library() -> None:
    """Importing the package pulls in no distribution but itself."""
    script = (
        "import sys\nimport rpc_batch_submit\n"
        "names = {n.split('.')[0] for n in sys.modules}\n"
        "print(sorted(n for n in names if n not in sys.stdlib_module_names and not n.startswith(('_', 'rpc_batch_submit'))))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=60, env={
        "PYTHONPATH": str(Path(__import__("rpc_batch_submit").__file__).parents[1])
    })  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_core_reads_no_clock() -> None:
    """Time, environment, threads and logs stay out of the pure core."""
    import rpc_batch_submit._batcher as core

    text = Path(core.__file__).read_text()
    for word in ("import time", "import os", "threading", "asyncio", "logging"):
        assert word not in text
