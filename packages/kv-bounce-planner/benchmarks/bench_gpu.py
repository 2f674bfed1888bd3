"""Gather and scatter on a CUDA device against a device-to-device copy of the same run, and a bounce through NIXL.

``python packages/kv-bounce-planner/benchmarks/bench_gpu.py [--sweep] [--no-link]``

Without a CUDA device, or without Triton, it says NO COVERAGE and reports nothing. Kernel times come from CUDA graphs of
several launches between two events, tables resident, taken in turn with the copy; every result is checked byte for byte.
The link part runs two processes on one device: 4,096 fragments written one by one against gather, one write, scatter.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from typing import Any

import numpy as np

from kv_bounce_planner.copies.tiles import KernelShape, default_shape

CASES = {"4,096 x 64 KiB": (4096, 64 << 10), "32,768 x 4 KiB": (32768, 4 << 10)}
LAUNCHES, REPEATS = 20, 7


def figure(name: str, value: float, unit: str, baseline: float | None, goal: float | None) -> dict[str, object]:
    """Higher is better here; ``ratio`` is value over baseline and the goal is on the ratio."""
    ratio = None if baseline is None else value / baseline
    return {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 3),
        "ratio": None if ratio is None else round(ratio, 4),
        "goal": goal,
        "met": None if goal is None or ratio is None else ratio >= goal,
    }


def skewed_sizes(count: int, total: int) -> np.ndarray:
    """Log-normal sizes, multiples of 16 B, that add up to about ``total``: a few fragments hold much of it."""
    rng = np.random.default_rng(1)
    weights = rng.lognormal(0.0, 1.5, count)
    return np.maximum((weights / weights.sum() * total / 16).astype(np.int64), 1) * 16


def graph_seconds(torch: Any, actions: dict[str, Any]) -> dict[str, float]:
    """Seconds per launch of each action: graphs of LAUNCHES launches, replayed in turn, shortest of REPEATS."""
    graphs = {}
    for name, action in actions.items():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                action()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                action()
        graphs[name] = graph
    best = dict.fromkeys(actions, float("inf"))
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end) / 1e3 / LAUNCHES)
    return best


def spread(sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Offsets of the fragments in a pool: random order, gaps of one to four grains."""
    order = rng.permutation(len(sizes))
    gaps = 256 * rng.integers(1, 5, len(sizes))
    offsets = np.empty(len(sizes), np.int64)
    offsets[order] = np.cumsum(sizes[order] + gaps) - sizes[order]
    return offsets // 16 * 16


def copies(torch: Any, sweep: bool) -> list[dict[str, object]]:
    """Kernel bandwidth of gather and scatter over the device's own copy."""
    from kv_bounce_planner.planning import TritonCopier

    rng = np.random.default_rng(0)
    results: list[dict[str, object]] = []
    cases = {name: (np.full(count, size, np.int64), 0.85) for name, (count, size) in CASES.items()}
    cases["32,768 skewed, 256 MiB"] = (skewed_sizes(32768, 256 << 20), 0.70)
    for name, (sizes, goal) in cases.items():
        total = int(sizes.sum())
        offsets = spread(sizes, rng)
        room = int((offsets + sizes).max()) + 4096
        pool = torch.randint(0, 256, (room,), dtype=torch.uint8, device="cuda")
        other = torch.zeros(room, dtype=torch.uint8, device="cuda")
        staging = torch.zeros(total, dtype=torch.uint8, device="cuda")
        copied = torch.zeros(total, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()  # copiers have streams of their own
        staged = staging.data_ptr() + np.cumsum(sizes) - sizes

        def prepared(shape: KernelShape | None) -> tuple[Any, Any, Any]:
            copier = TritonCopier("cuda", shape=shape)
            out = copier.prepare(offsets + pool.data_ptr(), staged, sizes)  # noqa: B023
            back = copier.prepare(staged, offsets + other.data_ptr(), sizes)  # noqa: B023
            return copier, out, back

        copier, out, back = prepared(None)
        copier.submit(out).wait()
        copier.submit(back).wait()
        reference, origin = other.cpu().numpy(), pool.cpu().numpy()
        wanted = np.zeros_like(origin)
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            wanted[offset : offset + size] = origin[offset : offset + size]
        if not np.array_equal(reference, wanted):
            raise AssertionError(f"{name}: bytes differ")
        shapes = {"": None}
        if sweep:
            shapes |= {
                f" tile {tile} x {tiles}, {warps} warps": KernelShape(tile, tiles, warps)  # type: ignore[misc]
                for tile in (1024, 2048, 4096, 8192, 16384)
                for tiles in (1, 2, 4)
                for warps in (2, 4, 8)
                if 2048 <= tile * tiles <= 32768
            }
        for label, shape in shapes.items():
            copier, out, back = prepared(shape)
            taken = graph_seconds(
                torch,
                {
                    "copy": lambda: copied.copy_(staging),  # noqa: B023
                    "gather": lambda: copier.launch(out),  # noqa: B023
                    "scatter": lambda: copier.launch(back),  # noqa: B023
                },
            )
            gb = 2 * total / 1e9
            used = shape or default_shape(sizes)
            for kind in ("gather", "scatter"):
                text = label or f" (tile {used.tile_bytes} x {used.tiles_per_program}, {used.num_warps} warps)"
                results.append(
                    figure(
                        f"{kind} {name}{text}", gb / taken[kind], "GB/s", gb / taken["copy"], None if label else goal
                    )
                )
    return results


# --- a bounce through NIXL between two processes on one device ---------------------------------------------------------

LINK_CASES = {"4,096 x 64 KiB": (4096, 64 << 10), "4,096 x 4 KiB": (4096, 4 << 10)}
LINK_REPEATS = 5


def _scratch(torch: Any, seed: int) -> tuple[Any, Any]:
    from kv_bounce_planner.planning.calibration import scratch_bytes
    from kv_bounce_planner.sessions import MemoryRegion

    room = max(scratch_bytes(count * size, count) for count, size in LINK_CASES.values()) + (1 << 20)
    room = -(-room // 4096) * 4096
    generator = torch.Generator(device="cuda").manual_seed(seed)
    memory = torch.randint(0, 256, (room,), dtype=torch.uint8, device="cuda", generator=generator)
    torch.cuda.synchronize()
    return memory, MemoryRegion(memory.data_ptr(), room, "VRAM", 0)


def _check_trial(torch: Any, wanted: Any, memory: Any, trial: tuple[int, int, int]) -> None:
    """Every byte of every fragment, on the device."""
    from kv_bounce_planner.planning.calibration import trial_offsets

    number, count, size = trial
    within = torch.arange(size // 8, device="cuda")
    sources, targets = (
        torch.from_numpy(offsets // 8).cuda()[:, None] for offsets in trial_offsets(number, count, size)
    )
    if not torch.equal(wanted.view(torch.int64)[sources + within], memory.view(torch.int64)[targets + within]):
        raise AssertionError(f"trial {trial}: bytes differ")


def serve(address: str, link: Any, stop: Any, errors: Any) -> None:
    """The receiving process."""
    try:
        import torch

        from kv_bounce_planner.planning import CalibrationTarget, TritonCopier
        from kv_bounce_planner.sessions import NixlConfig, NixlTransport, PeerId, ZmqControlChannel

        memory, region = _scratch(torch, 1)
        wanted, _ = _scratch(torch, 0)  # what the sender's memory holds
        checked: dict[tuple[int, int], int] = {}
        source, target = PeerId("bench-source", "g1", 0), PeerId("bench-target", "g2", 0)
        transport = NixlTransport(target, config=NixlConfig(**link))
        registration = transport.register([region])
        channel = ZmqControlChannel(target, b"a key for one benchmark run", None)
        channel.connect(source, address)
        answering = CalibrationTarget(transport, channel, region, clock=time.perf_counter, copier=TritonCopier("cuda"))
        answering.announce(source)
        begin = time.monotonic()
        while not stop.is_set() and time.monotonic() - begin < 240:
            for _ in range(64):
                before = answering.trials
                answering.poll()
                if answering.trials != before and answering.last_trial is not None:
                    # The first trials of each kind, one direct and one bounce: the check delays the next trial's begin.
                    kind = answering.last_trial[1:]
                    checked[kind] = checked.get(kind, 0) + 1
                    if checked[kind] <= 2:
                        _check_trial(torch, wanted, memory, answering.last_trial)
        transport.deregister(registration)
        channel.close()
        transport.close()
        del memory
    except BaseException as error:
        errors.put(f"{type(error).__name__}: {error}")
        raise


def link(torch: Any) -> list[dict[str, object]]:
    """Direct and bounce of 4,096 fragments between two processes; the target compares every byte of the first trials."""
    from kv_bounce_planner.planning import LinkCalibration, Tier, TritonCopier
    from kv_bounce_planner.sessions import NixlConfig, NixlTransport, PeerId, ZmqControlChannel

    memory, region = _scratch(torch, 0)
    # The direct writes get the best of two settings: bounded posts as sessions use them, and everything in one post.
    settings = {
        "bounded posts": {"descriptors_per_post_max": 256},
        "one post": {
            "descriptors_per_post_max": 4096,
            "bytes_per_post_max": 1 << 30,
            "descriptors_per_grain": 4096,
            "bytes_per_grain": 1 << 30,
            "post_budget_s": 10.0,
        },
    }
    best: dict[str, dict[Tier, float]] = {name: {} for name in LINK_CASES}
    phases_of: dict[str, Any] = {}
    context = multiprocessing.get_context("spawn")
    for options in settings.values():
        source, target = PeerId("bench-source", "g1", 0), PeerId("bench-target", "g2", 0)
        transport = NixlTransport(source, config=NixlConfig(**options))  # type: ignore[arg-type]
        registration = transport.register([region])
        channel = ZmqControlChannel(source, b"a key for one benchmark run", "tcp://127.0.0.1:*")
        stop, errors = context.Event(), context.Queue()
        child = context.Process(target=serve, args=(channel.address, options, stop, errors))
        child.start()
        try:
            measuring = LinkCalibration(
                transport,
                channel,
                target,
                region,
                clock=time.perf_counter,
                copier=TritonCopier("cuda"),
                repeats=1,
                timeout_s=90,
            )
            measuring.connect()
            for name, (count, size) in LINK_CASES.items():
                for _ in range(LINK_REPEATS):
                    for tier in (Tier.DIRECT, Tier.BOUNCE):
                        phases = measuring.measure(tier, count * size, count)
                        whole = phases.wire_s + phases.gather_s + phases.scatter_s + phases.overhead_s
                        if whole < best[name].get(tier, float("inf")):
                            best[name][tier] = whole
                            if tier is Tier.BOUNCE:
                                phases_of[name] = phases
        finally:
            stop.set()
            child.join(30)
            if child.is_alive():
                child.kill()
                child.join()
            if not errors.empty():
                raise AssertionError(f"target: {errors.get()}")
        transport.deregister(registration)
        channel.close()
        transport.close()
    del memory
    results = []
    for name, (count, size) in LINK_CASES.items():
        gb = count * size / 1e9
        direct, bounce = best[name][Tier.DIRECT], best[name][Tier.BOUNCE]
        shown = phases_of[name]
        text = (
            f"bounce {name} between two processes ({1e3 * bounce:.2f} ms: gather {1e3 * shown.gather_s:.2f}, wire "
            f"{1e3 * shown.wire_s:.2f}, scatter {1e3 * shown.scatter_s:.2f}, grant {1e3 * shown.overhead_s:.2f}; "
            f"direct {1e3 * direct:.2f} ms)"
        )
        results.append(figure(text, gb / bounce, "GB/s", gb / direct, 3.0))
    return results


def main(*, sweep: bool = False, with_link: bool = True) -> list[dict[str, object]]:
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        print(f"NO COVERAGE: {error}")
        return []
    if not torch.cuda.is_available():
        print("NO COVERAGE: no CUDA device")
        return []
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    results = copies(torch, sweep)
    if with_link:
        try:
            import nixl  # noqa: F401
            import zmq  # noqa: F401
        except ImportError as error:
            print(f"NO COVERAGE of the link: {error}")
        else:
            results += link(torch)
    return results


def show(results: list[dict[str, object]]) -> None:
    """A table, then one JSON line per figure."""
    width = max((len(str(r["name"])) for r in results), default=0)
    for r in results:
        verdict = "" if r["met"] is None else ("met" if r["met"] else "MISSED")
        goal = "" if r["goal"] is None else f"goal {r['goal']}"
        print(f"{r['name']!s:<{width}}  {r['value']!s:>10} {r['unit']}  {r['ratio']}x  {goal} {verdict}")
    for r in results:
        print(json.dumps(r))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="try other kernel shapes as well")
    parser.add_argument("--no-link", action="store_true", help="copies only")
    chosen = parser.parse_args()
    show(main(sweep=chosen.sweep, with_link=not chosen.no_link))
