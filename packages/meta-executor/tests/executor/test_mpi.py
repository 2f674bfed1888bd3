"""Links and new work over real MPI ranks: order, activations, nothing that blocks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.executor.messages import Admit, Leave, Result, Schedule, Work
from meta_executor.executor.request import Request
from meta_executor.executor.work import BROADCAST_CONFIG, BroadcastRecord, BroadcastWork, ChainWork


def until(condition, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0002)


def admit(request_id: int) -> Admit:
    request = Request(
        request_id=request_id, token_ids=np.arange(50, dtype=np.int32), sampling=SamplingParams(1), peer="p"
    )
    return Admit(request, request_id, -1)


@pytest.mark.mpi(4)
def test_frames_and_activations_arrive_in_order_and_work_goes_down_the_chain(world_comm: Any) -> None:
    """60 schedules with activations of different sizes around the ring, new work along the chain, all in order."""
    from meta_executor.executor._mpi import MpiLink

    link = MpiLink(world_comm)
    work = ChainWork(link)
    target, source = (link.rank + 1) % 4, (link.rank - 1) % 4
    sizes = [1 + (step * 37) % 200 for step in range(60)]
    for step, rows in enumerate(sizes):
        link.send(target, Schedule(step, (), "x" * step), np.full((rows, 64), step, np.float32))
        link.send(target, Result(step, ((link.rank, step),)))
    if link.rank == 0:
        work.publish([admit(r) for r in range(1, 20)])
        work.publish([Leave(True)])
    got: list[Any] = []
    items: list[Any] = []

    def receive() -> bool:
        for frame in link.poll():
            if isinstance(frame.body, Work):
                work.deliver(frame.body)
            else:
                assert frame.source_rank == source
                got.append(frame)
        items.extend(work.take())
        return len(got) == 120 and len(items) == 20

    until(receive)
    until(lambda: link.poll() == [] and link.unsent_count == 0)
    schedules = [frame for frame in got if isinstance(frame.body, Schedule)]
    assert [frame.body.step_id for frame in schedules] == list(range(60))
    for frame, rows in zip(schedules, sizes):
        assert frame.activations is not None and frame.activations.shape == (rows, 64)
        assert (frame.activations == frame.body.step_id).all()
    assert [item.request.request_id for item in items[:-1]] == list(range(1, 20)) and items[-1] == Leave(True)
    world_comm.Barrier()
    link.free()


@pytest.mark.mpi(2)
def test_broadcast_work_is_the_same_on_every_rank_and_a_late_rank_costs_nothing(world_comm: Any) -> None:
    """Rank 1 is late by 0.3 s: rank 0's calls return at once, everything arrives in order, views were copied."""
    from comm_broadcast import Broadcaster, MpiComm, TokenBatchCodec

    broadcaster = Broadcaster(
        MpiComm(world_comm.Dup()), codec=TokenBatchCodec(BroadcastRecord), config=BROADCAST_CONFIG
    )
    work = BroadcastWork(broadcaster, world_comm.Get_rank())
    items: list[Any] = []
    if work._rank == 1:
        time.sleep(0.3)
    else:
        began_s = time.monotonic()
        for first in range(1, 40, 3):
            work.publish([admit(r) for r in range(first, first + 3)])
        work.publish([Leave(True)])
        items.extend(work.take())
        assert time.monotonic() - began_s < 0.25
        assert len(items) == 40, "rank 0 takes its own items when it decides them"

    def receive() -> bool:
        items.extend(work.take())
        return len(items) == 40 and not work.busy

    until(receive)
    assert [item.request.request_id for item in items[:-1]] == list(range(1, 40))
    assert all(item.request.token_ids.tolist() == list(range(50)) for item in items[:-1])
    work.close()


@pytest.mark.mpi(4)
def test_the_start_up_exchange_carries_different_lengths(world_comm: Any) -> None:
    """Every rank's bytes, in order, on every rank; empty ones too."""
    from meta_executor.rank.startup import barrier, exchange

    mine = bytes([world_comm.Get_rank()]) * (world_comm.Get_rank() * 1000)
    assert exchange(world_comm, mine) == [bytes([rank]) * (rank * 1000) for rank in range(4)]
    barrier(world_comm)
