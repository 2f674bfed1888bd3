"""Torch and Triton copiers on a CUDA device. Without one these tests skip as NO COVERAGE; the kernel's logic is also run
by Triton's interpreter on the CPU where Triton is installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kv_bounce_planner.copies.tiles import KernelShape
from kv_bounce_planner.planning import LayoutError

INTERPRETED = """
import sys
import numpy as np
import torch
from kv_bounce_planner.copies.tiles import KernelShape
from kv_bounce_planner.copies._triton import launch_tiles, tile_tables

rng = np.random.default_rng(0)
words = set()
for case in range(30):
    count = int(rng.integers(1, 40))
    align = int(rng.choice([1, 2, 4, 8, 16]))
    sizes = (rng.integers(1, 300, count) * (align if rng.random() < 0.7 else 1)).astype(np.int64)
    capacity = int(sizes.sum()) * 2 + 100 * count + 64
    source, target = rng.integers(0, 256, capacity, dtype=np.uint8), np.zeros(capacity, np.uint8)

    def place():
        offsets, at = np.zeros(count, np.int64), 0
        for i in rng.permutation(count):
            at = -(-(at + int(rng.integers(0, 3)) * align) // align) * align
            offsets[i] = at
            at += int(sizes[i])
        return offsets

    source_at, target_at = place(), place()
    want = target.copy()
    for s, t, n in zip(source_at, target_at, sizes):
        want[t : t + n] = source[s : s + n]
    shape = KernelShape(int(rng.choice([64, 128, 1024])), int(rng.choice([1, 2, 8])), 4)
    parts = tile_tables(source_at + source.ctypes.data, target_at + target.ctypes.data, sizes, shape, "cpu")
    for part in parts:
        words.add(part.word_bytes)
        launch_tiles(part, shape)
    assert (target == want).all(), case
assert words == {1, 2, 4, 8, 16}, words
print("interpreted 30 lists")
"""


def test_kernel_logic_in_the_interpreter() -> None:
    """Every word width and tile shape, byte for byte, without a device."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NO COVERAGE: triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "interpreted 30 lists" in done.stdout


def cuda_torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("NO COVERAGE: no CUDA device")
    return torch


def device_lists(torch: Any, seed: int) -> tuple[Any, Any, np.ndarray, np.ndarray, np.ndarray, Any]:
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 3, 100, 2000]))
    align = int(rng.choice([1, 2, 4, 8, 16, 64]))
    sizes = rng.integers(1, 300, count) * align
    if rng.random() < 0.3:
        sizes[rng.integers(0, count)] = 100_000 * align

    def place() -> np.ndarray:
        order, offsets, at = rng.permutation(count), np.zeros(count, np.int64), 0
        for i in order:
            at += int(rng.integers(0, 3)) * align
            offsets[i] = at
            at += int(sizes[i])
        return offsets

    source_at, target_at = place(), place()
    room = int(max((source_at + sizes).max(), (target_at + sizes).max())) + 64
    source = torch.randint(0, 256, (room,), dtype=torch.uint8, device="cuda")
    target = torch.randint(0, 256, (room,), dtype=torch.uint8, device="cuda")
    want, origin = target.cpu().numpy().copy(), source.cpu().numpy()
    for s, t, n in zip(source_at, target_at, sizes):
        want[t : t + n] = origin[s : s + n]
    return source, target, source_at, target_at, sizes, want


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch", "triton"])
def test_device_copies_equal_the_loop(kind: str) -> None:
    """Random lists on the device: the copy is exact and nothing else changed."""
    torch = cuda_torch()
    if kind == "triton":
        pytest.importorskip("triton")
        from kv_bounce_planner.planning import TritonCopier

        copier: Any = TritonCopier("cuda")
    else:
        from kv_bounce_planner.planning import TorchCopier

        copier = TorchCopier("cuda")
    for seed in range(40):
        source, target, source_at, target_at, sizes, want = device_lists(torch, seed)
        torch.cuda.synchronize()
        handle = copier.submit(copier.prepare(source_at + source.data_ptr(), target_at + target.data_ptr(), sizes))
        handle.wait()
        assert handle.done()
        assert np.array_equal(target.cpu().numpy(), want), seed


@pytest.mark.gpu
def test_two_copies_in_flight_keep_their_tables() -> None:
    """d20: back-to-back submissions on one stream, prepared before either ran, are both right."""
    torch = cuda_torch()
    pytest.importorskip("triton")
    from kv_bounce_planner.planning import TritonCopier

    copier = TritonCopier("cuda", shape=KernelShape(512, 2, 4))
    first, second = device_lists(torch, 1), device_lists(torch, 2)
    torch.cuda.synchronize()
    prepared = [copier.prepare(x[2] + x[0].data_ptr(), x[3] + x[1].data_ptr(), x[4]) for x in (first, second)]
    handles = [copier.submit(p) for p in prepared]
    del prepared
    for handle in handles:
        handle.wait()
    for _, target, *_, want in (first, second):
        assert np.array_equal(target.cpu().numpy(), want)


@pytest.mark.gpu
def test_warm_up_compiles_and_changes_nothing() -> None:
    """Kernels of every default shape, launched over no tiles."""
    cuda_torch()
    pytest.importorskip("triton")
    from kv_bounce_planner.planning import TritonCopier

    assert TritonCopier("cuda").warm_up() == 14


@pytest.mark.gpu
def test_submit_waits_for_the_event_it_is_given() -> None:
    """The copier's stream is its own: what must come first is passed as an event."""
    torch = cuda_torch()
    pytest.importorskip("triton")
    from kv_bounce_planner.planning import TritonCopier

    copier = TritonCopier("cuda")
    source = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    target = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    prepared = copier.prepare(np.array([source.data_ptr()]), np.array([target.data_ptr()]), np.array([1 << 20]))
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    source.fill_(7)
    event = torch.cuda.Event()
    event.record()
    copier.submit(prepared, after=event).wait()
    assert bool((target == 7).all())


def test_a_cpu_device_is_refused_by_the_triton_copier() -> None:
    """The adapter says what it is for."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("NO COVERAGE: triton is not installed")
    from kv_bounce_planner.planning import TritonCopier

    with pytest.raises(LayoutError):
        TritonCopier("cpu")
