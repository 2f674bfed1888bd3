"""What a seed does to a service is the seed's alone, and every kind of it comes; the service itself: integration/tests."""

import itertools
import mmap
import os
import threading
from collections import Counter
from pathlib import Path

import faults
from meta_executor.config import service_config


def first(seed, count):
    return list(itertools.islice(faults.schedule(seed), count))


def test_a_seed_is_the_same_faults_again():
    """And another seed is others; a longer run begins like a shorter one."""
    assert first(3, 40) == first(3, 60)[:40]
    assert first(3, 40) != first(4, 40)


def test_every_moment_and_every_victim_comes():
    """Of a night's faults none is left out; stops are bounded by what is waited for."""
    drawn = first(1, 400)
    assert {fault.moment for fault in drawn} == set(faults.MOMENTS)
    killed = Counter(victim for fault in drawn if fault.what != "stop" for victim in fault.victims)
    assert set(killed) == {f"{owner}/{name}" for owner in ("ctx-0", "gen-0") for name in faults.KILLED}
    stopped = {(fault.victims[0], fault.stop_s) for fault in drawn if fault.what == "stop"}
    assert {victim for victim, _ in stopped} == set(faults.STOPPED)
    assert {stop_s for _, stop_s in stopped} == set(faults.STOPS_S)
    assert all(0 <= fault.part <= 1 for fault in drawn)
    assert any(len(fault.victims) == 2 for fault in drawn)


def test_every_seed_is_a_service_that_can_be_configured():
    """Both schedules, both agreements, both places of the API, with and without bounce."""
    chosen = [service_config(faults.settings(seed, Path("/nowhere"))) for seed in range(60)]
    assert {service.schedule_style for service in chosen} == {"generation_first", "context_first"}
    contexts = [service.context_servers for service in chosen]
    assert {context.proxy for context in contexts} == {"thread", "spawn"}
    assert {context.cache_transceiver_config.enable_bounce for context in contexts} == {True, False}
    assert {context.cache_transceiver_config.enable_async_terminal_agreement for context in contexts} == {True, False}


def test_a_schedule_is_told_without_doing_it(capsys):
    """For whoever wants to know what a seed did."""
    assert faults.main(["--seed", "5", "--schedule", "3"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{n}. {fault}" for n, fault in enumerate(first(5, 3), 1)]


def test_what_is_left_in_shared_memory_is_what_nobody_uses_and_nobody_removes():
    """One that is mapped is somebody's, one that goes in a moment was somebody's; one that stays is named."""
    before = os.listdir("/dev/shm")
    mapped, going, staying = (
        Path(f"/dev/shm/left-test-{os.getpid()}-{name}") for name in ("mapped", "going", "staying")
    )
    try:
        for path in (mapped, going, staying):
            path.write_bytes(b"x" * 4096)
        with mapped.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            timer = threading.Timer(0.2, going.unlink)
            timer.start()
            left = faults.left_in_shared_memory(before, 1.0)
            timer.join()
            assert staying.name in left and mapped.name not in left and going.name not in left
            staying.unlink()
            staying.mkdir()
            assert staying.name not in faults.left_in_shared_memory(before, 1.0)
    finally:
        if staying.is_dir():
            staying.rmdir()
        for path in (mapped, going, staying):
            path.unlink(missing_ok=True)
