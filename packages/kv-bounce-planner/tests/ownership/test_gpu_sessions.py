"""Sessions over device memory: bounce through NIXL with Triton copies. Without a CUDA device this is NO COVERAGE."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kv_bounce_planner.planning import WriterPlan, WriterTransfer
from kv_bounce_planner.sessions import (
    BounceArena,
    ExpectedOperation,
    MemoryRegion,
    NixlTransport,
    PeerId,
    Receiver,
    RequestKey,
    Sender,
    SessionResources,
    TransferIdentity,
    free,
)
from kv_bounce_planner.sessions.events import PeerIntroduced
from kv_bounce_planner.testing import FakeNetwork

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch", reason="NO COVERAGE: torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("NO COVERAGE: no CUDA device")
    pytest.importorskip("triton", reason="NO COVERAGE: triton is not installed")
    return torch


@pytest.mark.parametrize("tier", ["direct", "bounce"])
def test_device_memory_goes_through_a_session_exactly(torch, tier):
    """4,096 fragments of 4 KiB at random places of two device pools; every byte compared, nothing else touched."""
    from kv_bounce_planner.planning import TritonCopier

    count, size, room = 4096, 4096, 64 << 20
    device = torch.device("cuda:0")
    source = torch.randint(0, 256, (room,), dtype=torch.uint8, device=device)
    target = torch.zeros(room, dtype=torch.uint8, device=device)
    slots = [torch.zeros(32 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
    torch.cuda.synchronize()
    network, made = FakeNetwork(), []
    for peer, pool, slot, kind in (
        (PeerId("gen", "g1", 0), target, slots[0], Receiver),
        (PeerId("ctx", "c1", 1), source, slots[1], Sender),
    ):
        transport = NixlTransport(peer)
        transport.register([MemoryRegion(m.data_ptr(), m.numel(), "VRAM", 0) for m in (pool, slot)])
        arena = BounceArena(slot.data_ptr(), slot.numel(), memory_kind="VRAM", device_id=0)
        copier = TritonCopier(device)
        made.append(
            kind(peer, SessionResources(transport, network.channel(peer), arena, copier=copier, memory_kind="VRAM"))
        )
    receiver, sender = made
    generator = np.random.default_rng(3)
    targets = target.data_ptr() + np.sort(generator.permutation(room // size)[:count]).astype(np.int64) * size
    sources = source.data_ptr() + generator.permutation(room // size)[:count].astype(np.int64) * size
    sizes = np.full(count, size, np.int64)
    plan = WriterPlan(1, targets, sizes, count, count)
    transfer = WriterTransfer(plan, sources, plan.target_addresses, plan.sizes, count)
    if len(plan.sizes) != count:  # neighbours were joined on the target side: cut the source alike
        pytest.fail("the plan joined ranges: choose places that do not touch")
    identity = TransferIdentity(1, 0, "g1", 0)
    receiver.open(identity, [ExpectedOperation(sender.self_id, plan.total_bytes, b"", plan, tier)], claim="pool")
    sender.ready(RequestKey(1), lambda request: transfer, claim="source")
    limit, names = time.monotonic() + 60, []
    while "MemoryReleased" not in names and time.monotonic() < limit:
        sender.poll()
        for event in receiver.poll():
            if isinstance(event, PeerIntroduced):
                continue
            names.append(type(event).__name__)
            if names[-1] == "TransferSucceeded":
                assert event.tiers[0][1] == tier
            elif names[-1] == "MemoryReleased":
                free(event.proven)
    assert names == ["TransferSucceeded", "MemoryReleased"]
    torch.cuda.synchronize()
    expected = torch.zeros_like(target).reshape(-1, size)
    to = torch.as_tensor((targets - target.data_ptr()) // size, device=device)
    at = torch.as_tensor((sources - source.data_ptr()) // size, device=device)
    expected[to] = source.reshape(-1, size)[at]
    assert torch.equal(expected.reshape(-1), target)
    assert not (tier == "bounce" and receiver.statistics()["operations_bounced"] != 1)
