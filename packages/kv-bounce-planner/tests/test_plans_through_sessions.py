"""Planner and sessions together: random layout pairs move through real receive requests, over fakes with real memory.

The receiver plans alone and publishes its layout and block table; each sender decodes them, plans alone and writes; bounce
reports are checked against the receiver's plan. Every byte is compared with the per-byte oracle.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_bounce_planner.planning import (
    InstanceLayout,
    KVLayout,
    WriterTransfer,
    decode_blocks,
    decode_layout,
    encode_blocks,
    encode_layout,
    plan_destination,
    plan_writer,
)
from kv_bounce_planner.sessions import (
    BounceArena,
    ExpectedOperation,
    Loan,
    OperationIdentity,
    PeerId,
    Receiver,
    RequestKey,
    Sender,
    SessionConfig,
    SessionResources,
    TransferIdentity,
)
from kv_bounce_planner.sessions.events import MemoryReleased, PeerIntroduced, TransferSucceeded
from kv_bounce_planner.sessions.ledgers import ExposureLedger
from kv_bounce_planner.sessions.reports import PlannerReports
from kv_bounce_planner.testing import FakeClock, FakeNetwork, FakeWorld

ARENA = 1 << 20


def load_oracles() -> ModuleType:
    name = "kv_bounce_planner_test_oracles"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("oracles.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def shifted(layout: KVLayout, by: int) -> KVLayout:
    """The same layout elsewhere in memory."""
    groups = tuple(
        replace(
            group,
            key_bases=tuple(base + by for base in group.key_bases),
            value_bases=tuple(base + by for base in group.value_bases),
        )
        for group in layout.groups
    )
    return replace(layout, groups=groups, memory_kind="DRAM")


class Service:
    """A source instance and one target rank, in one thread."""

    def __init__(self, case: Any, seed: int, *, explicit: bool, reports: PlannerReports | None = None) -> None:
        world, network, clock = FakeWorld(parts_max=64), FakeNetwork(), FakeClock()
        self.memory: list[np.ndarray] = []
        self.shift: list[int] = []
        for layouts in (case.source.ranks, (case.target,)):
            spans = [span for layout in layouts for span in layout.regions()]
            low = min(start for start, _ in spans)
            array = np.zeros(max(start + size for start, size in spans) - low + 64, np.uint8)
            self.memory.append(array)
            self.shift.append(world.add_buffer(array) - low)
        self.memory[0][:] = np.random.default_rng(seed).integers(1, 256, len(self.memory[0]), dtype=np.uint8)
        self.source = InstanceLayout(
            case.source.instance_id,
            tuple(shifted(layout, self.shift[0]) for layout in case.source.ranks),
            case.source.pp_size,
            case.source.tp_size,
            case.source.adp_size,
            case.source.cp_size,
            case.source.order,
        )
        self.target = shifted(case.target, self.shift[1])
        self.case = case
        config = SessionConfig(drain_deadline_s=10.0, bounce_wait_s=0.2, serves_reads=True)
        self.regions = [np.zeros(ARENA, np.uint8) for _ in range(1 + len(case.source.ranks))]
        arenas = [BounceArena(world.add_buffer(region), ARENA, alignment=64) for region in self.regions]
        self.peer = PeerId("gen", "g1", case.target.rank)
        self.receiver = Receiver(
            self.peer,
            SessionResources(
                world.transport(self.peer),
                network.channel(self.peer),
                arena=arenas[0],
                reports=PlannerReports(explicit=explicit),
                clock=clock,
            ),
            config,
            ledger=ExposureLedger(),  # many services of one name in one process, whose addresses come again
        )
        self.senders = []
        for rank in range(len(case.source.ranks)):
            peer = PeerId("ctx", "c1", rank)
            self.senders.append(
                Sender(
                    peer,
                    SessionResources(
                        world.transport(peer),
                        network.channel(peer),
                        arena=arenas[1 + rank],
                        reports=reports or PlannerReports(explicit=explicit),
                        clock=clock,
                    ),
                    config,
                    prefers_bounce=lambda request, transfer: True,
                )
            )

    def move(self, tier: str, garble: Callable[[Any], Any] = lambda transfer: transfer) -> list[Any]:
        """One request, from publication to the end."""
        case = self.case
        adp = case.source_adp_rank
        plan = plan_destination(self.source, self.target, case.target_blocks, case.tokens, source_adp_rank=adp)
        payload = msgspec.msgpack.encode((encode_layout(self.target), encode_blocks(case.target_blocks, case.tokens)))

        def read_plan(offer: bytes, rank: int) -> Any:
            blocks, _ = decode_blocks(offer)
            return garble(
                plan_writer(
                    self.source, rank, blocks, self.target, case.target_blocks, case.tokens, source_adp_rank=adp
                )
            )

        identity = TransferIdentity(7, 0, self.peer.generation, self.peer.rank)
        self.receiver.open(
            identity,
            [
                ExpectedOperation(
                    PeerId("ctx", "c1", rank),
                    writer.total_bytes,
                    payload,
                    writer,
                    tier,  # type: ignore[arg-type]
                    resolve=(lambda offer, rank=rank: read_plan(offer, rank)) if tier == "pull" else None,
                )
                for rank, writer in plan.writers.items()
            ],
            claim="blocks",
        )
        for rank in plan.writers:

            def resolve(request: Any, rank: int = rank) -> Any:
                if request.pulls:
                    return Loan(encode_blocks(case.source_blocks[rank], case.tokens))
                layout, table = msgspec.msgpack.decode(request.payload, type=tuple[bytes, bytes])
                blocks, tokens = decode_blocks(table)
                return garble(
                    plan_writer(
                        self.source,
                        rank,
                        case.source_blocks[rank],
                        decode_layout(layout),
                        blocks,
                        tokens,
                        source_adp_rank=adp,
                    )
                )

            key = RequestKey(7, 0)
            self.senders[rank].expect(key, 1)
            self.senders[rank].ready(key, resolve, "source")
        events: list[Any] = []
        for _ in range(200):
            for sender in self.senders:
                sender.poll()
            events.extend(event for event in self.receiver.poll() if not isinstance(event, PeerIntroduced))
            if any(isinstance(event, MemoryReleased) for event in events):
                break
        return events


@pytest.mark.parametrize(
    ("tier", "explicit"),
    [("direct", False), ("direct", True), ("bounce", False), ("bounce", True), ("pull", False)],
)
def test_random_layout_pairs_arrive_byte_for_byte(tier: str, explicit: bool) -> None:
    """120 random pairs per tier and kind of report: all bytes in place, none elsewhere, the tier as offered."""
    oracles = load_oracles()
    moved = fan_in = 0
    for seed in range(5000, 5120):
        case = oracles.random_case(seed)
        expected = oracles.byte_map(case)
        if not expected:
            continue
        service = Service(case, seed, explicit=explicit)
        events = service.move(tier)
        names = [type(event).__name__ for event in events]
        assert names == ["TransferSucceeded", "MemoryReleased"], (seed, events)
        succeeded = next(event for event in events if isinstance(event, TransferSucceeded))
        assert {taken for _, taken, _ in succeeded.tiers} == {tier}, (seed, succeeded)
        assert succeeded.byte_count == len(expected)
        want = np.zeros_like(service.memory[1])
        source_low = service.shift[0] - service.memory[0].ctypes.data
        target_low = service.shift[1] - service.memory[1].ctypes.data
        for at, (_, origin) in expected.items():
            want[at + target_low] = service.memory[0][origin + source_low]
        assert np.array_equal(service.memory[1], want), seed
        moved += 1
        fan_in += len(succeeded.tiers) > 1
    assert moved > 60 and fan_in > 20


def off_by_one(transfer: WriterTransfer) -> WriterTransfer:
    """The same number of bytes, one byte further."""
    writer = replace(transfer.writer, target_addresses=transfer.writer.target_addresses + 1)
    return replace(transfer, writer=writer, target_addresses=transfer.target_addresses + 1)


class LyingReports(PlannerReports):
    """A sender that wrote one thing and reports another."""

    def encode(self, transfer: WriterTransfer, operation: OperationIdentity, base_address: int) -> bytes:
        return super().encode(off_by_one(transfer), operation, base_address)


@pytest.mark.parametrize("tier", ["direct", "bounce", "pull"])
def test_a_side_that_derives_another_plan_moves_nothing(tier: str) -> None:
    """Whoever plans the transfer compares the digest before it begins: the request fails, no byte changed."""
    oracles, failed = load_oracles(), 0
    for seed in range(5000, 5040):
        case = oracles.random_case(seed)
        if not oracles.byte_map(case):
            continue
        service = Service(case, seed, explicit=False)
        names = [type(event).__name__ for event in service.move(tier, off_by_one)]
        assert "TransferFailed" in names and "TransferSucceeded" not in names, (seed, names)
        assert not service.memory[1].any(), seed
        failed += 1
    assert failed > 20


@pytest.mark.parametrize("explicit", [False, True])
def test_a_report_of_another_plan_is_never_scattered(explicit: bool) -> None:
    """A bounce write that is reported as something else stays in the bounce region: the request fails, and not one byte of
    the target's blocks changed. (Any wrong derivation would end here.)
    """
    oracles, failed = load_oracles(), 0
    for seed in range(5000, 5040):
        case = oracles.random_case(seed)
        if not oracles.byte_map(case):
            continue
        service = Service(case, seed, explicit=explicit, reports=LyingReports(explicit=explicit))
        names = [type(event).__name__ for event in service.move("bounce")]
        assert "TransferFailed" in names and "TransferSucceeded" not in names, (seed, names)
        assert not service.memory[1].any(), seed
        failed += 1
    assert failed > 20
