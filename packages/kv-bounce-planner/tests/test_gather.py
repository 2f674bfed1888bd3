"""Gather and scatter over real memory, byte for byte, with guards around every fragment."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import random
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.copies import gather as gather_module
from kv_bounce_planner.copies.gather import CopyTable, PackedCopy
from kv_bounce_planner.copies.tiles import KernelShape, align_classes, cut_tiles, default_shape, word_bytes_of
from kv_bounce_planner.planning import (
    HostCopier,
    LayoutError,
    ThreadCopier,
    TransportError,
    default_copier,
    gather,
    plan_transfer,
    scatter,
)


def load_oracles() -> ModuleType:
    name = "kv_bounce_planner_test_oracles"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("oracles.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def random_list(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(source buffer, target buffer, source offsets, target offsets, sizes, expected target)."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 15, 40, 200])
    align = rng.choice([1, 2, 4, 8, 16, 64])
    style = rng.choice(["equal", "few", "skewed"])
    if style == "equal":
        sizes = [rng.randint(1, 64) * align] * count
    elif style == "few":
        choices = [rng.randint(1, 64) * align for _ in range(3)]
        sizes = [rng.choice(choices) for _ in range(count)]
    else:
        sizes = [max(1, int(align * rng.paretovariate(0.8)) % 50_000) for _ in range(count)]

    def place(dense: bool) -> tuple[list[int], int]:
        order = list(range(count))
        if rng.random() < 0.7:
            rng.shuffle(order)
        at, offsets = rng.randrange(3) * align, [0] * count
        for i in order:
            offsets[i] = at
            at += sizes[i] + (0 if dense else rng.randrange(3) * align)
        return offsets, at

    source_at, source_end = place(rng.random() < 0.2)
    target_at, target_end = place(rng.random() < 0.2)
    generator = np.random.default_rng(seed)
    source = generator.integers(0, 256, source_end + 64, dtype=np.uint8)
    target = generator.integers(0, 256, target_end + 64, dtype=np.uint8)
    expected = target.copy()
    for s, t, n in zip(source_at, target_at, sizes):
        expected[t : t + n] = source[s : s + n]
    return source, target, np.array(source_at), np.array(target_at), np.array(sizes), expected


@pytest.mark.parametrize("memmove_from", [16, 32 << 10])
def test_copies_equal_the_loop_and_touch_nothing_else(memmove_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 random lists: equal, few and skewed sizes; any alignment; dense or not on either side."""
    monkeypatch.setattr(gather_module, "MEMMOVE_BYTES_MIN", memmove_from)
    monkeypatch.setattr(gather_module, "STEP_BYTES", 4096)
    monkeypatch.setattr(gather_module, "STEP_COUNT_MAX", 7)
    for seed in range(300):
        source, target, source_at, target_at, sizes, expected = random_list(seed)
        table = CopyTable.of(source_at + source.ctypes.data, target_at + target.ctypes.data, sizes)
        assert table.run() == sizes.sum()
        assert np.array_equal(target, expected), seed
        # A table can be used again: the same bytes, from the same places.
        source[:] = ~source
        HostCopier().submit(table).wait()
        for s, t, n in zip(source_at, target_at, sizes):
            assert np.array_equal(target[t : t + n], source[s : s + n])


def test_gather_and_scatter_are_inverse() -> None:
    """Through one contiguous staging region, in order."""
    for seed in range(100):
        source, target, source_at, target_at, sizes, expected = random_list(seed)
        staging = np.full(int(sizes.sum()) + 16, 0xA5, np.uint8)
        assert gather(source_at + source.ctypes.data, sizes, staging.ctypes.data + 8) == sizes.sum()
        assert (staging[:8] == 0xA5).all() and (staging[-8:] == 0xA5).all()
        assert scatter(staging.ctypes.data + 8, target_at + target.ctypes.data, sizes) == sizes.sum()
        assert np.array_equal(target, expected), seed


def test_planned_transfers_land_byte_for_byte() -> None:
    """The whole way in memory: the sender gathers by its pairs, the receiver scatters by its own plan, 300 random
    layout pairs; then the same by writing the pairs in place.
    """
    oracles = load_oracles()
    moved = 0
    for seed in range(300):
        case = oracles.random_case(seed)
        expected = oracles.byte_map(case)
        plan = plan_transfer(
            case.source,
            case.target,
            tokens=case.tokens,
            target_blocks=case.target_blocks,
            source_blocks=case.source_blocks,
            source_adp_rank=case.source_adp_rank,
        )
        if not expected:
            continue
        lows, memory = [], []
        for layouts in (case.source.ranks, (case.target,)):
            spans = [span for layout in layouts for span in layout.regions()]
            lows.append(min(start for start, _ in spans))
            memory.append(np.zeros(max(start + size for start, size in spans) - lows[-1], np.uint8))
        memory[0][:] = np.random.default_rng(seed).integers(1, 256, len(memory[0]), dtype=np.uint8)
        want = np.zeros_like(memory[1])
        for at, (_, origin) in expected.items():
            want[at - lows[1]] = memory[0][origin - lows[0]]
        to_source, to_target = memory[0].ctypes.data - lows[0], memory[1].ctypes.data - lows[1]
        for writer in plan.writers.values():
            transfer = plan.transfers[writer.rank]
            staging = np.zeros(writer.total_bytes, np.uint8)
            gather(transfer.source_addresses + to_source, transfer.sizes, staging.ctypes.data)
            scatter(staging.ctypes.data, writer.target_addresses + to_target, writer.sizes)
        assert np.array_equal(memory[1], want), seed
        memory[1][:] = 0
        for transfer in plan.transfers.values():
            CopyTable.of(
                transfer.source_addresses + to_source, transfer.target_addresses + to_target, transfer.sizes
            ).run()
        assert np.array_equal(memory[1], want), seed
        moved += 1
    assert moved > 200


def test_malformed_lists_are_refused_before_a_byte_moves() -> None:
    """Pointers are dangerous: lengths, signs and ranges are checked first."""
    one = np.array([4096])
    for source, target, sizes in (
        (one, one, np.array([1, 2])),
        (one, one, np.array([0])),
        (one, one, np.array([-1])),
        (np.array([-1]), one, one),
        (one, np.array([2**63 - 10]), one),
        (one.astype(float), one, one),
    ):
        with pytest.raises(LayoutError):
            CopyTable.of(source, target, sizes)
    assert CopyTable.of(np.array([]), np.array([]), np.array([])).run() == 0
    with pytest.raises(LayoutError):
        HostCopier().submit(object())  # type: ignore[arg-type]


def test_small_fragments_never_cost_a_python_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang #19890 and the reference's traps: 32,768 fragments are a handful of passes, whatever their sizes."""
    calls = []
    monkeypatch.setattr(gather_module, "_copy_class", lambda part: calls.append(part.size))
    monkeypatch.setattr(ctypes, "memmove", lambda *_: calls.append(-1))
    count = 32768
    sizes = np.random.default_rng(0).integers(1, 4096, count)
    addresses = np.cumsum(sizes) + 4096
    CopyTable.of(addresses, addresses + (1 << 40), sizes).run()
    assert 0 < len(calls) <= 13 and -1 not in calls
    calls.clear()
    CopyTable.of(np.arange(count) * 256 + 4096, np.arange(count) * 128 + 4096, np.full(count, 128)).run()
    assert calls == [128]


def test_thread_copier_copies_in_order_beside_the_caller() -> None:
    """Queued lists land exactly; a chain of copies over the same memory proves first in, first out."""
    with ThreadCopier(inline_bytes_max=0) as copier:
        for seed in range(60):
            source, target, source_at, target_at, sizes, expected = random_list(seed)
            handle = copier.submit(
                copier.prepare(source_at + source.ctypes.data, target_at + target.ctypes.data, sizes)
            )
            handle.wait()
            assert handle.done() and np.array_equal(target, expected), seed
        hops = [np.full(1 << 16, i, np.uint8) for i in range(50)]
        tables = [
            copier.prepare(np.array([a.ctypes.data]), np.array([b.ctypes.data]), np.array([1 << 16]))
            for a, b in itertools.pairwise(hops)
        ]
        handles = [copier.submit(table) for table in tables]
        handles[-1].wait()
        assert all(handle.done() for handle in handles)
        assert all((hop == 0).all() for hop in hops)


def test_thread_copier_does_not_block_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a copy runs, submit has returned and done() says False; small ones wait behind it, in order."""
    begun, release = threading.Event(), threading.Event()

    def held(self: CopyTable) -> int:
        begun.set()
        assert release.wait(30)
        return 0

    memory = np.zeros(64, np.uint8)
    copier = ThreadCopier(inline_bytes_max=1 << 20, queued_max=2)
    at = memory.ctypes.data
    large = CopyTable(np.array([at]), np.array([at + 8]), np.array([8]), 2 << 20, ())
    small = copier.prepare(np.array([at]), np.array([at + 8]), np.array([8]))
    with monkeypatch.context() as patched:
        patched.setattr(CopyTable, "run", held)
        first = copier.submit(large)
        assert begun.wait(30) and not first.done()
        second = copier.submit(small)
        assert not second.done()
        with pytest.raises(LocalProtocolError, match="wait already"):
            copier.submit(small)
        release.set()
        second.wait()
        assert first.done() and second.done()
    copier.close()
    copier.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        copier.submit(small)


def test_a_failed_thread_copy_is_an_error_of_its_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker survives; the handle tells, whoever asks and however often; the next copy runs."""
    source = np.arange(16, dtype=np.uint8)
    target = np.zeros(16, np.uint8)
    with ThreadCopier(inline_bytes_max=0) as copier:
        table = copier.prepare(np.array([source.ctypes.data]), np.array([target.ctypes.data]), np.array([16]))
        with monkeypatch.context() as patched:
            patched.setattr(CopyTable, "run", lambda self: 1 // 0)
            failed = copier.submit(table)
            for _ in range(2):
                with pytest.raises(TransportError):
                    failed.wait()
        copier.submit(table).wait()
        assert np.array_equal(source, target)
        with pytest.raises(LayoutError):
            copier.submit(object())  # type: ignore[arg-type]
    with pytest.raises(LayoutError):
        ThreadCopier(queued_max=0)


def test_default_copier_by_memory_kind() -> None:
    """Host memory needs nothing; another word is refused."""
    assert isinstance(default_copier(), HostCopier)
    with pytest.raises(LayoutError):
        default_copier("DISK")  # type: ignore[arg-type]


def test_torch_copier_on_the_host() -> None:
    """The same lists through the torch adapter on CPU."""
    pytest.importorskip("torch")
    from kv_bounce_planner.planning import TorchCopier

    copier = TorchCopier("cpu")
    for seed in range(20):
        source, target, source_at, target_at, sizes, expected = random_list(seed)
        handle = copier.submit(copier.prepare(source_at + source.ctypes.data, target_at + target.ctypes.data, sizes))
        handle.wait()
        assert handle.done() and np.array_equal(target, expected)


def test_torch_word_indices_copy_the_same_bytes() -> None:
    """The device adapter's index lists, applied to host tensors: every width, and lists longer than one assignment."""
    torch = pytest.importorskip("torch")
    from kv_bounce_planner.copies._torch import index_copies

    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    widths, longest = set(), 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny operations: a second thread would only be waited for
    for seed in range(120):
        source, target, source_at, target_at, sizes, expected = random_list(seed)
        if sizes.sum() > 20_000:
            continue
        parts = list(index_copies(source_at, target_at, sizes, "cpu", words_max=64))
        longest = max(longest, len(parts))
        for part in parts:
            word = part.word_bytes
            widths.add(word)
            assert len(part.source_index) < 2 * 64
            into = torch.from_numpy(target[part.target_base :][: part.target_words * word]).view(kinds[word])
            out = torch.from_numpy(source[part.source_base :][: part.source_words * word]).view(kinds[word])
            into.index_copy_(0, part.target_index, out.index_select(0, part.source_index))
        assert np.array_equal(target, expected), seed
    torch.set_num_threads(threads)
    assert widths == {1, 2, 4, 8} and longest > 3


# --- cutting lists for a device ---------------------------------------------------------------------------------------


def _expand(parts: list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]) -> dict[int, int]:
    copied: dict[int, int] = {}
    for word, source, target, sizes in parts:
        for s, t, n in zip(source.tolist(), target.tolist(), sizes.tolist()):
            assert n > 0 and s % word == t % word == n % word == 0
            for i in range(n):
                assert t + i not in copied
                copied[t + i] = s + i
    return copied


def test_alignment_classes_and_tiles_keep_every_byte() -> None:
    """Words by alignment, odd heads and tails peeled, tiles no larger than asked: the same byte map."""
    for seed in range(150):
        _, _, source_at, target_at, sizes, _ = random_list(seed)
        source_at, target_at, sizes = source_at[:60], target_at[:60], np.minimum(sizes[:60], 1500)
        want = {
            t + i: s + i for s, t, n in zip(source_at.tolist(), target_at.tolist(), sizes.tolist()) for i in range(n)
        }
        parts = list(align_classes(source_at, target_at, sizes))
        assert [word for word, *_ in parts] == sorted({word for word, *_ in parts}, reverse=True)
        assert _expand(parts) == want
        tile = 1 << (4 + seed % 8)
        tiles = [(word, *cut_tiles(s, t, n, tile)) for word, s, t, n in parts]
        assert _expand(tiles) == want
        for _, _, _, n in tiles:
            assert n.max() <= tile


def test_one_odd_fragment_does_not_narrow_the_others() -> None:
    """The reference's trap: any size that 16 does not divide sent the whole list down the slow path."""
    source = np.arange(100) * 1024
    target = np.arange(100) * 2048 + (1 << 20)
    sizes = np.full(100, 512)
    assert [word for word, *_ in align_classes(source, target, sizes)] == [16]
    sizes[7] = 510
    parts = {word: int(n.sum()) for word, _, _, n in align_classes(source, target, sizes)}
    assert parts[16] == 99 * 512 + 496 and sum(parts.values()) == 99 * 512 + 510
    source[9] += 3
    target[9] += 3
    parts = {word: int(n.sum()) for word, _, _, n in align_classes(source, target, sizes)}
    assert parts[16] == 98 * 512 + 496 * 2
    assert list(align_classes(source[:0], target[:0], sizes[:0])) == []
    assert word_bytes_of(np.array([8, 24])) == 8


def test_tiles_do_not_depend_on_the_largest_fragment() -> None:
    """Skewed sizes: the number of tiles is the bytes over the tile size plus one per fragment at most."""
    sizes = np.array([64] * 1000 + [1 << 20])
    offsets = np.cumsum(sizes) - sizes
    _, _, tiles = cut_tiles(offsets, offsets + (1 << 30), sizes, 4096)
    assert len(tiles) == 1000 + 256 and int(tiles.sum()) == int(sizes.sum())


@pytest.mark.parametrize(("size", "tile"), [(4096, 4096), (65536, 8192), (100, 128), (1 << 20, 8192), (6000, 4096)])
def test_default_shape_follows_the_fragments(size: int, tile: int) -> None:
    """Tiles fit the size that most bytes come in; powers of two."""
    assert default_shape(np.full(100, size)).tile_bytes == tile
    assert default_shape(np.array([], np.int64)) == KernelShape()
    for bad in ({"tile_bytes": 24}, {"num_warps": 3}, {"tiles_per_program": 0}, {"tile_bytes": 8}):
        with pytest.raises(LayoutError):
            KernelShape(**bad)


@pytest.mark.parametrize("copier", [HostCopier(), ThreadCopier(inline_bytes_max=1 << 30)], ids=["host", "thread"])
def test_a_gather_without_a_list_of_targets_copies_the_same_bytes(copier: HostCopier | ThreadCopier) -> None:
    """Random sources, dense and overlapping ones too, any size, few and many, equal and unequal: byte for byte."""
    generator = np.random.default_rng(11)
    memory = generator.integers(0, 256, 1 << 20, dtype=np.uint8)
    for turn in range(120):
        count, size = int(generator.choice([1, 16, 17, 500, 5000])), int(generator.integers(1, 150))
        sizes = np.full(count, size, np.int64)
        if turn % 5 == 4:
            sizes[generator.integers(count)] += 1
        at = generator.integers(0, (1 << 20) - size - 1, count)
        if turn % 7 == 6:
            at = np.arange(count, dtype=np.int64) * size
        staging = np.full(int(sizes.sum()) + 64, 7, np.uint8)
        prepared = copier.prepare_gather(memory.ctypes.data + at, sizes, staging.ctypes.data + 32)
        assert isinstance(prepared, PackedCopy) == (count > 16 and int(sizes.min()) == int(sizes.max()))
        assert prepared.total_bytes == int(sizes.sum())
        copier.submit(prepared).wait()
        expected = np.concatenate([memory[a : a + s] for a, s in zip(at.tolist(), sizes.tolist(), strict=True)])
        assert (staging[32:-32] == expected).all()
        assert (staging[:32] == 7).all() and (staging[-32:] == 7).all()


@pytest.mark.parametrize(
    ("sources", "sizes", "staging"),
    [
        ([-1] * 20, [8] * 20, 64),
        ([64] * 20, [0] * 20, 64),
        ([64] * 20, [-8] * 20, 64),
        ([64] * 20, [8] * 19, 64),
        ([2**63 - 4] * 20, [8] * 20, 64),
        ([64] * 20, [8] * 20, 2**63 - 80),
        ([64] * 20, [8] * 20, -64),
    ],
)
def test_a_malformed_gather_is_refused(sources: list[int], sizes: list[int], staging: int) -> None:
    """The same refusals as of a list with targets."""
    with pytest.raises(LayoutError):
        HostCopier().prepare_gather(np.array(sources, np.int64), np.array(sizes, np.int64), staging)
