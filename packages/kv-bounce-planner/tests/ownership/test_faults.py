"""Seeded faults against a byte map: whatever is reordered, lost, held or killed, nothing lands in memory that was given away.

The host of this test behaves as an executor does: it takes a block when it opens a transfer, and the moment it is given the
memory back it fills it with a canary and may give it to another transfer. At the end every write that could still land does.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from kv_bounce_planner.planning import WriterPlan, WriterTransfer
from kv_bounce_planner.sessions import ExpectedOperation, Loan, PeerEvidence, RequestKey, SessionConfig, free
from kv_bounce_planner.sessions.proof import WriteExecutor

CANARY = 0xEE
BLOCK = 256


def run(make_lab, seed: int, *, turns: int = 260) -> dict[str, int]:
    generator = random.Random(seed)
    executor = generator.choice([WriteExecutor.RECEIVER, WriteExecutor.SENDER, WriteExecutor.NIC])
    writers = generator.randint(1, 3)

    def landing(job, part):
        return generator.choices(["land", "hold", "error"], [0.6, 0.38, 0.02])[0]

    lab = make_lab(
        writers,
        areas=1,
        linked=generator.random() < 0.7,
        executor=executor,
        landing=landing,
        arena=generator.choice([0, 1024, 4096]),
        send_arena=generator.choice([0, 512, 4096]),
        parts_max=generator.choice([1, 2, 64]),
        config=SessionConfig(
            drain_deadline_s=5.0,
            bounce_wait_s=0.3,
            frames_per_poll_max=generator.choice([1, 3, 64]),
            quarantine_bytes_max=1 << 30,
            link_timeout_s=generator.choice([1.0, 30.0]),
            operation_timeout_s=generator.choice([8.0, 600.0]),
            lease_s=generator.choice([None, 3.0]),
        ),
    )
    severed: set[int] = set()
    blocks = len(lab.target) // BLOCK
    free_blocks = list(range(blocks))
    lab.target[:] = CANARY
    owned: dict[int, list[int]] = {}
    tally = {"opened": 0, "released": 0, "quarantined": 0, "succeeded": 0, "late": 0}
    request = 0

    def fill(ids):
        for block in ids:
            lab.target[block * BLOCK : (block + 1) * BLOCK] = CANARY

    def plan_of(rank, ids, number):
        mine = [block for index, block in enumerate(sorted(ids)) if index % writers == rank]
        targets = lab.target_at + np.array(mine, np.int64) * BLOCK
        sizes = np.full(len(mine), BLOCK - 8, np.int64)
        source_at = int(lab.sources[rank].__array_interface__["data"][0])
        sources = source_at + (np.arange(len(mine), dtype=np.int64) * 512 + number * 16) % (lab.SHARE - BLOCK)
        return WriterTransfer(
            WriterPlan(rank, targets, sizes, len(mine), len(mine)), sources, targets, sizes, len(mine)
        )

    plans: dict[tuple[int, int], WriterTransfer] = {}
    for _ in range(turns):
        choice = generator.random()
        if choice < 0.25 and len(free_blocks) >= writers and len(owned) < 6:
            request += 1
            count = generator.randint(writers, min(len(free_blocks), writers * 3))
            ids = sorted(generator.sample(free_blocks, count))
            free_blocks = [block for block in free_blocks if block not in ids]
            expected = []
            for rank, sender in enumerate(lab.senders):
                plan = plans[(request, rank)] = plan_of(rank, ids, request)
                tier = generator.choice(["direct", "bounce", "pull"])
                reads = {"resolve": lambda _payload, plan=plan: plan} if tier == "pull" else {}
                expected.append(ExpectedOperation(sender.self_id, plan.total_bytes, b"", plan.writer, tier, **reads))
            lab.receiver.open(lab.identity(request), expected, claim=ids, blocks=ids)
            owned[request] = ids
            tally["opened"] += 1
        elif choice < 0.45 and owned:
            number = generator.choice(list(owned))
            rank = generator.randrange(writers)
            sender, key = lab.senders[rank], RequestKey(number, 0)
            record = sender._requests.get(key)
            if record is None or not (record.core.ready or record.core.sealed):
                if generator.random() < 0.15:
                    sender.fail(key, "aborted")
                else:
                    sender.ready(
                        key,
                        lambda asked, n=number, rank=rank: Loan(b"") if asked.pulls else plans[(n, rank)],
                        claim=number,
                    )
        elif choice < 0.53 and owned:
            lab.receiver.cancel(lab.identity(generator.choice(list(owned))))
        elif choice < 0.6 and owned:
            rank = generator.randrange(writers)
            key = RequestKey(generator.choice(list(owned)), 0)
            if key in lab.senders[rank]._requests:
                lab.senders[rank].seal(key)
        elif choice < 0.64:
            one, other = lab.peer, generator.choice(lab.senders).self_id
            if generator.random() < 0.5:
                one, other = other, one
            (lab.network.hold if generator.random() < 0.5 else lab.network.let)(one, other)
        elif choice < 0.65 and len(lab.dead) < writers:
            rank = generator.randrange(writers)
            if rank not in lab.dead:
                lab.kill(rank)
                if generator.random() < 0.7:
                    lab.receiver.peer_died(lab.senders[rank].self_id, PeerEvidence.PROCESS_REAPED)
        elif choice < 0.66 and len(lab.dead) == writers:
            lab.receiver.retire_peer("ctx", "c1")
        elif choice < 0.72 and lab.network.log:
            source, target, frame = generator.choice(lab.network.log[-40:])
            if generator.random() < 0.3:
                frame = bytes(b ^ (1 << generator.randrange(8)) if generator.random() < 0.02 else b for b in frame)
                lab.network.inject(source, target, frame[: generator.randint(1, len(frame))])
            elif target == lab.peer:
                continue  # an authenticated channel replays nothing; the sender's own replay guard is tested below
            else:
                lab.network.inject(source, target, frame)
        elif choice < 0.735 and lab.linked:
            rank = generator.randrange(writers)
            if rank in severed:
                lab.network.heal(lab.peer, lab.senders[rank].self_id)
                severed.discard(rank)
            else:
                lab.network.sever(lab.peer, lab.senders[rank].self_id)
                severed.add(rank)
        elif choice < 0.78:
            lab.clock.advance(generator.choice([0.1, 0.5, 2.0]))
        for rank, sender in enumerate(lab.senders):
            if rank not in lab.dead and generator.random() < 0.7:
                for event in sender.poll():
                    if type(event).__name__ == "SourceReleased":
                        free(event.proven)
                        assert not any(
                            write.flying
                            and sender.self_id in (write.agent.owner, write.job.peer)
                            and not (write.job.reads and (write.error or not write.agent.alive))
                            and write.job.operation.request == event.request
                            for write in lab.world.writes
                            if executor is WriteExecutor.SENDER or not write.error
                        ), "a source was released while a write still reads it"
        if generator.random() < 0.7:
            for event in lab.receiver.poll():
                name = type(event).__name__
                if name == "MemoryReleased":
                    ids = free(event.proven)
                    assert owned.pop(event.identity.request_id) == ids
                    if tally.get("ok", 0) == event.identity.request_id:
                        check_bytes(lab, plans, event.identity.request_id, writers)
                    fill(ids)
                    free_blocks += ids
                    tally["released"] += 1
                elif name == "MemoryQuarantined":
                    owned.pop(event.identity.request_id)
                    tally["quarantined"] += 1
                elif name == "TransferSucceeded":
                    tally["succeeded"] += 1
                    tally["ok"] = event.identity.request_id
                assert name != "FatalDiagnosis"
        check_canaries(lab, free_blocks, seed)
        lab.validate()
    tally["late"] = lab.world.land_everything()
    lab.receiver._transport.poll()
    check_canaries(lab, free_blocks, seed)
    tally.pop("ok", None)
    return tally


def check_bytes(lab, plans, request, writers):
    for rank in range(writers):
        plan = plans[(request, rank)]
        source_at = int(lab.sources[rank].__array_interface__["data"][0])
        for source, target, size in zip(plan.source_addresses, plan.target_addresses, plan.sizes):
            got = lab.target[target - lab.target_at : target - lab.target_at + size]
            want = lab.sources[rank][source - source_at : source - source_at + size]
            assert (got == want).all(), "a transfer succeeded without its bytes"


def check_canaries(lab, free_blocks, seed):
    for block in free_blocks:
        assert (lab.target[block * BLOCK : (block + 1) * BLOCK] == CANARY).all(), (
            f"seed {seed}: block {block} was written after it was free"
        )


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_no_byte_lands_in_memory_that_was_given_away(make_lab, first):
    """Twenty seeds each: holds, errors, replays, corruption, cancels, seals, deaths, time; canaries survive."""
    total = {"opened": 0, "released": 0, "quarantined": 0, "succeeded": 0, "late": 0}
    for seed in range(first, first + 20):
        for name, count in run(make_lab, seed).items():
            total[name] += count
    assert total["released"] > 30, total
    assert total["succeeded"] > 5, total


@pytest.mark.slow
def test_no_byte_lands_in_memory_that_was_given_away_many_seeds(make_lab):
    for seed in range(1000, 3000):
        run(make_lab, seed)
