"""MPI ranks with CUDA devices: the bounce end to end between processes, and a pipeline whose stages hand over activations.

Each case says how many GPUs it needs. With one, all ranks share it; with more, every rank has a device of its own, so that
every byte crosses from one GPU to another.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from kv_bounce_planner import (
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
    WriterPlan,
    WriterTransfer,
    ZmqControlChannel,
    free,
)
from meta_executor.engine import ModelInfo, SamplingParams, SequenceStep, StageSpec, StepInput

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ROOM, COUNT, SIZE = 64 << 20, 4096, 4096
KEY = b"a key of the tests"


def worlds(*cases: tuple[int, int]) -> Any:
    """Parameters (ranks, GPUs), each with the marks that say so."""
    return pytest.mark.parametrize(
        "gpus",
        [
            pytest.param(
                gpus, marks=[pytest.mark.mpi(ranks), pytest.mark.gpus(count=gpus)], id=f"{ranks}-ranks-{gpus}-gpus"
            )
            for ranks, gpus in cases
        ],
    )


def pool_of(torch: Any, rank: int) -> Any:
    """A rank's source pool, on the host: whoever receives from it can make it again."""
    return torch.randint(0, 256, (ROOM,), dtype=torch.uint8, generator=torch.Generator().manual_seed(100 + rank))


def places(seed: int) -> np.ndarray:
    """``COUNT`` fragments' offsets in a pool, no two of them adjacent, in a random order."""
    generator = np.random.default_rng(seed)
    return generator.permutation(ROOM // SIZE // 2)[:COUNT].astype(np.int64) * 2 * SIZE


class End:
    """One end of a transfer: pool and bounce slot on a device, registered with an agent of its own."""

    def __init__(self, torch: Any, kind: type[Receiver] | type[Sender], peer: PeerId, pool: Any, device: int) -> None:
        from kv_bounce_planner import TritonCopier

        self.peer, self.pool = peer, pool
        self.slot = torch.zeros(32 << 20, dtype=torch.uint8, device=pool.device)
        torch.cuda.synchronize(pool.device)
        self.transport = NixlTransport(peer)
        self.transport.register([MemoryRegion(m.data_ptr(), m.numel(), "VRAM", device) for m in (pool, self.slot)])
        arena = BounceArena(self.slot.data_ptr(), self.slot.numel(), memory_kind="VRAM", device_id=device)
        self.channel = ZmqControlChannel(peer, KEY, "tcp://127.0.0.1:*")
        copier = TritonCopier(pool.device)
        self.session: Any = kind(
            peer,
            SessionResources(self.transport, self.channel, arena, copier=copier, memory_kind="VRAM", device_id=device),
        )

    def close(self) -> None:
        self.session.close()
        self.transport.close()

    def of(self, rank: int) -> PeerId:
        return PeerId(self.peer.instance_id, self.peer.generation, rank)


def transfer_of(request: Any, source: Any) -> WriterTransfer:
    """What a sender writes for a request: fragments of its pool to the addresses that the receiver's payload describes."""
    base, writer = json.loads(request.payload)
    plan = WriterPlan(writer, base + np.sort(places(1)), np.full(COUNT, SIZE, np.int64), COUNT, COUNT)
    return WriterTransfer(plan, source.data_ptr() + places(2), plan.target_addresses, plan.sizes, COUNT)


@worlds((2, 1), (2, 2), (4, 4), (8, 8))
def test_bounce_around_a_ring_of_devices(world_comm: Any, gpus: int) -> None:
    """Every rank sends 4,096 fragments of 4 KiB to the next one and receives as many from the one before, by NIXL out of device
    memory into device memory, coalesced; every byte is compared and nothing else is touched."""
    import torch

    comm, rank, size = world_comm, world_comm.rank, world_comm.size
    device = rank % gpus
    torch.cuda.set_device(device)
    used = comm.allgather(str(torch.cuda.get_device_properties(device).uuid))
    assert len(set(used)) == gpus, f"ranks share a device: {used}"
    on = torch.device("cuda", device)
    receiver = End(torch, Receiver, PeerId("gen", "g1", rank), torch.zeros(ROOM, dtype=torch.uint8, device=on), device)
    sender = End(torch, Sender, PeerId("ctx", "c1", rank), pool_of(torch, rank).to(on), device)
    addresses = comm.allgather((receiver.channel.address, sender.channel.address))
    before = (rank - 1) % size
    receiver.channel.connect(sender.of(before), addresses[before][1])
    receiver.session.introduce([sender.of(before)])

    plan = WriterPlan(
        before, receiver.pool.data_ptr() + np.sort(places(1)), np.full(COUNT, SIZE, np.int64), COUNT, COUNT
    )
    payload = json.dumps([receiver.pool.data_ptr(), before]).encode()
    expected = ExpectedOperation(sender.of(before), plan.total_bytes, payload, plan, "bounce")
    receiver.session.open(TransferIdentity(1, 0, "g1", rank), [expected], claim="pool")
    sender.session.expect(RequestKey(1), 1)
    sender.session.ready(RequestKey(1), lambda request: transfer_of(request, sender.pool), claim="source")

    seen: list[str] = []
    limit = time.monotonic() + 120
    while not {"MemoryReleased", "SourceReleased"} <= set(seen) and time.monotonic() < limit:
        for end in (sender, receiver):
            for event in end.session.poll():
                seen.append(type(event).__name__)
                if seen[-1] == "TransferSucceeded":
                    assert [tier for _, tier, _ in event.tiers] == ["bounce"], event.tiers
                if seen[-1] == "RequestServed":
                    sender.session.seal(event.request)
                if seen[-1] in ("MemoryReleased", "SourceReleased"):
                    free(event.proven)
    assert {"TransferSucceeded", "MemoryReleased", "SourceReleased"} <= set(seen), seen
    assert receiver.session.statistics()["operations_bounced"] == 1
    wanted = torch.zeros(ROOM // SIZE, SIZE, dtype=torch.uint8)
    wanted[torch.from_numpy(np.sort(places(1)) // SIZE)] = pool_of(torch, before).reshape(-1, SIZE)[places(2) // SIZE]
    assert torch.equal(receiver.pool.cpu().reshape(-1, SIZE), wanted)
    comm.barrier()  # nobody's agent goes while a neighbour may still look at it
    for end in (sender, receiver):
        end.close()


GEOMETRY_TENSORS = {"qkv": (256, 128), "output": (128, 128), "gate_up": (512, 128), "down": (128, 256)}
LAYERS = 8
INFO = ModelInfo("tiny", LAYERS, 128, 4, 2, 32, 300, 2048, "float32", 1, (2,))


def engine(device: str, stage: StageSpec) -> Any:
    """A small Llama's stage, the same weights in every process."""
    from meta_executor.engine.llama import LlamaEngine
    from meta_executor.engine.weights import LlamaGeometry

    rng = np.random.default_rng(4)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    tensors = {"embed": matrix(300, 128), "final_norm": 1 + matrix(128)}
    for layer in range(LAYERS):
        tensors |= {f"layers.{layer}.{name}": matrix(*shape) for name, shape in GEOMETRY_TENSORS.items()}
        tensors |= {f"layers.{layer}.{name}": 1 + matrix(128) for name in ("attn_norm", "ffn_norm")}
    geometry = LlamaGeometry(256, 1e-5, tuple(float(10000.0 ** (-2 * i / 32)) for i in range(16)), tied_head=True)
    made = LlamaEngine(INFO, geometry, tensors, stage, device=device)
    made.allocate_kv(16, 16)
    return made


def decode(one: Any, tokens: int, hand_on: Any) -> list[int]:
    """Prefill a prompt and decode greedily; ``hand_on(step)`` gives the step's activations in, and takes its output."""
    answer: list[int] = []
    prompt = list(range(10, 110))
    for count in range(tokens):
        new = np.asarray(answer[-1:] or prompt, np.int32)
        start = len(prompt) + count - 1 if answer else 0
        steps = (SequenceStep(0, new, start, np.arange(16), SamplingParams(tokens, ignore_eos=True)),)
        answer.append(hand_on(one, count, steps))
    one.close()
    return answer


@worlds((2, 1), (2, 2), (4, 4), (8, 8))
def test_a_pipeline_over_devices_gives_one_process_tokens(world_comm: Any, gpus: int) -> None:
    """A stage of layers per rank, each on its rank's device with its KV memory there; activations go from rank to rank over
    MPI."""
    import torch

    comm, rank, size = world_comm, world_comm.rank, world_comm.size
    device = rank % gpus

    def alone(one: Any, count: int, steps: Any) -> int:
        return int(one.launch(StepInput.of(count, steps)).result().token_ids[0])

    def in_line(one: Any, count: int, steps: Any) -> int:
        hidden = comm.recv(source=rank - 1, tag=count) if rank else None
        output = one.launch(StepInput.of(count, steps, hidden)).result()
        if rank < size - 1:
            comm.send(output.hidden, dest=rank + 1, tag=count)
        return int(comm.bcast(int(output.token_ids[0]) if rank == size - 1 else None, root=size - 1))

    wanted = decode(engine(f"cuda:{device}", StageSpec.split(LAYERS, 1)[0]), 8, alone)
    mine = engine(f"cuda:{device}", StageSpec.split(LAYERS, size)[rank])
    held = torch.cuda.memory_allocated(device)
    assert held > 0
    used = comm.allgather(str(torch.cuda.get_device_properties(device).uuid))
    assert len(set(used)) == gpus, f"ranks share a device: {used}"
    assert decode(mine, 8, in_line) == wanted
