"""Real ranks: every failure case, each followed by a working exchange; windows, gathers, a late rank."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from comm_broadcast import (
    BroadcastConfig,
    BroadcastConfigError,
    Broadcaster,
    BroadcastError,
    BytesCodec,
    TokenBatchCodec,
    TransportError,
)
from comm_broadcast._codec import BufferSegment, Segment

sys.path.insert(0, str(Path(__file__).parent))
from broadcast_values import Request, Unpicklable


def rebuild(refusing_rank):
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == refusing_rank:
        raise ValueError("cannot be decoded here")
    return "rebuilt"


class FailsOn:
    """Cannot be loaded on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return rebuild, (self.rank,)


def check_all(comm):
    from comm_broadcast import MpiComm

    rank, size = comm.rank, comm.size
    traffic = comm.irecv(source=(rank - 1) % size, tag=77)
    broadcaster = Broadcaster(MpiComm(comm))

    def works(text):
        assert broadcaster.broadcast(text if rank == 0 else None) == text

    # a, b: the root cannot encode, whatever it raises
    for error in (ValueError("no"), KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises((BroadcastError, type(error))) as caught:
            broadcaster.broadcast(Unpicklable(error) if rank == 0 else None)
        if rank == 0 and not isinstance(error, Exception):
            assert caught.value is error
        else:
            assert caught.value.rank == 0
        works("after encode")
    # c: one rank cannot decode; without agreement the others learn of it in the next exchange
    last = size - 1
    if rank == last:
        with pytest.raises(BroadcastError, match=f"rank {last}"):
            broadcaster.broadcast()
    else:
        broadcaster.broadcast(FailsOn(last) if rank == 0 else None)
    with pytest.raises(BroadcastError) as caught:
        broadcaster.broadcast("lost" if rank == 0 else None)
    assert (caught.value.rank, caught.value.earlier) == (last, True)
    works("after decode")
    broadcaster.close()
    # c, at once
    agreeing = Broadcaster(MpiComm(comm), config=BroadcastConfig(agree=True))
    with pytest.raises(BroadcastError) as caught:
        agreeing.broadcast(FailsOn(last) if rank == 0 else None)
    assert caught.value.rank == last
    assert agreeing.broadcast("next" if rank == 0 else None) == "next"
    agreeing.close()
    # d, e: chunk sizes are the root's business; bad ones never get this far
    chunks = Broadcaster(MpiComm(comm), config=BroadcastConfig(chunk_bytes=5000 if rank == 0 else 9000))
    data = bytes(range(256)) * 500
    assert chunks.broadcast(data if rank == 0 else None) == data
    chunks.close()
    # e: a bad setting of one rank alone is refused by all of them, at construction
    for bad in range(2):
        with pytest.raises(BroadcastConfigError, match=f"rank {bad}: chunk_bytes"):
            Broadcaster(MpiComm(comm), config=BroadcastConfig(chunk_bytes=0 if rank == bad else 1 << 20))
    # f: ranks that disagree on the root are refused at construction, everywhere
    if size > 1:
        with pytest.raises(BroadcastConfigError, match="root"):
            Broadcaster(MpiComm(comm), root=min(rank, 1))
    # g: gathers fail together
    gatherer = Broadcaster(MpiComm(comm), root=last)
    with pytest.raises(BroadcastError) as caught:
        gatherer.allgather(Unpicklable(ValueError("no")) if rank == last else "fine")
    assert caught.value.rank == last
    assert gatherer.allgather(rank) == list(range(size))
    got = gatherer.gather(np.full(3 + 100_000 * rank, rank))
    assert (got is None) == (rank != last)
    if got is not None:
        assert [int(a.sum()) for a in got] == [r * (3 + 100_000 * r) for r in range(size)]
    gatherer.close()
    # h: what does not round-trip is found when asked for
    checking = Broadcaster(MpiComm(comm), config=BroadcastConfig(check_round_trip=True))
    with pytest.raises(BroadcastError, match="does not survive"):
        checking.broadcast(FailsOn(-1) if rank == 0 else None)
    assert checking.broadcast([1] if rank == 0 else None) == [1]
    checking.close()
    # i: a buffer in many chunks, from where it lies (the real 2 GiB case is slow and stands below)
    large = Broadcaster(MpiComm(comm), config=BroadcastConfig(chunk_bytes=1 << 20, gather_bytes_max=4096))
    array = np.arange(1 << 20, dtype=np.int64)
    assert np.array_equal(large.broadcast(array if rank == 0 else None), array)
    assert large.statistics().large_buffers == (1 if rank == 0 else 0)
    large.close()
    # foreign traffic was not touched
    comm.send(rank, dest=(rank + 1) % size, tag=77)
    assert traffic.wait() == (rank - 1) % size


@pytest.mark.mpi(2)
def test_all_failures_on_two_ranks(world_comm):
    """Cases a to i, each followed by a working exchange."""
    check_all(world_comm)


@pytest.mark.mpi(4)
def test_all_failures_on_four_ranks(world_comm):
    """Cases a to i, each followed by a working exchange."""
    check_all(world_comm)


@pytest.mark.mpi(4)
def test_token_batches_through_a_shared_window(world_comm):
    """The root encodes in place, readers look at the root's memory; it never overwrites what is being read."""
    from comm_broadcast import MpiComm

    config = BroadcastConfig(shared_slot_bytes=1 << 20)
    broadcaster = Broadcaster(MpiComm(world_comm), config=config, codec=TokenBatchCodec(Request))
    kept = []
    for step in range(50):
        batch = [Request(i, np.full(2000 + step, step * 10 + i, np.int32)) for i in range(8)]
        current = broadcaster.broadcast(batch if world_comm.rank == 0 else None)
        kept = [*kept[-1:], (step, current)] if step < 40 else [*kept, (step, current)]
        for then, requests in kept:
            for i, request in enumerate(requests):
                assert (request.tokens == then * 10 + i).all()
    shared = broadcaster.statistics().shared
    # Some went through the window, and from the 42nd on none could: its slots are held by views.
    assert 0 < shared <= 43 if world_comm.rank == 0 else shared == 0
    broadcaster.close()
    for then, requests in kept:
        assert all((request.tokens == then * 10 + i).all() for i, request in enumerate(requests))


class Halting(Segment):
    """Four mebibytes, copied in eight steps; at one of them the root is interrupted."""

    nbytes = 4 << 20

    def __init__(self, at):
        self.at = at

    def copy(self, target):
        for step in range(8):
            if step == self.at:
                raise KeyboardInterrupt("while copying")
            target[step << 19 : (step + 1) << 19] = bytes([step]) * (1 << 19)
            yield (step + 1) << 19


class HaltingCodec(BytesCodec):
    """Values are where to halt."""

    def encode(self, value):
        return [BufferSegment(b"\1"), Halting(value)]


def check_interruptions(comm):
    """Callers that give up while MPI still writes to their buffers; a decode failure before gathers; windows and gathers."""
    from comm_broadcast import MpiComm

    rank, size = comm.rank, comm.size
    last = size - 1

    def interrupt(timeout_s):
        raise KeyboardInterrupt

    broadcaster = Broadcaster(MpiComm(comm), config=BroadcastConfig(gather_bytes_max=4096, chunk_bytes=8192))
    for step in range(5):
        sent = np.full(50_000, step)
        if rank == last:
            handle = broadcaster.start_broadcast()
            if not handle.test():
                with pytest.raises(KeyboardInterrupt):
                    handle.wait(interrupt)
            del handle
        elif rank == 0:
            time.sleep(0.02)
            broadcaster.broadcast(sent)
        else:
            assert (broadcaster.broadcast() == step).all()
        second = broadcaster.broadcast(sent + 100 if rank == 0 else None)
        assert (second == step + 100).all()
    for call in (broadcaster.allgather, broadcaster.gather):
        if rank == last:
            with pytest.raises(BroadcastError):
                broadcaster.broadcast()
        else:
            broadcaster.broadcast(FailsOn(last) if rank == 0 else None)
        with pytest.raises(BroadcastError) as caught:
            call(rank)
        assert (caught.value.rank, caught.value.earlier) == (last, True)
        assert call(rank) == (list(range(size)) if call == broadcaster.allgather or rank == 0 else None)
    broadcaster.close()
    # Interrupted while pieces are under way.
    config = BroadcastConfig(gather_bytes_max=8 << 20)
    halting = Broadcaster(MpiComm(comm), config=config, codec=HaltingCodec())
    for at in (0, 5, 7):
        with pytest.raises((BroadcastError, KeyboardInterrupt), match="while copying") as caught:
            halting.broadcast(at if rank == 0 else None)
        assert type(caught.value) is KeyboardInterrupt if rank == 0 else caught.value.rank == 0
        got = halting.broadcast(99 if rank == 0 else None)
        assert rank == 0 or got == b"".join(bytes([step]) * (1 << 19) for step in range(8))
    halting.close()
    window = Broadcaster(MpiComm(comm), config=BroadcastConfig(shared_slot_bytes=1 << 20))
    for step in range(10):
        assert (window.broadcast(np.full(10_000, step) if rank == 0 else None) == step).all()
        assert window.allgather(rank) == list(range(size))
        window.gather(rank)
    assert window.statistics().shared == (10 if rank == 0 else 0)
    window.close()


@pytest.mark.mpi(2)
def test_interruptions_on_two_ranks(world_comm):
    """Abandoned exchanges, failures told by gathers, windows with gathers."""
    check_interruptions(world_comm)


@pytest.mark.mpi(4)
def test_interruptions_on_four_ranks(world_comm):
    """Abandoned exchanges, failures told by gathers, windows with gathers."""
    check_interruptions(world_comm)


def check_memory(comm):
    """The last rank has no address to spare, for a value that is sent from where it is, in pieces, and chunk by chunk."""
    from comm_broadcast import MpiComm

    rank, last = comm.rank, comm.size - 1
    broadcaster = Broadcaster(MpiComm(comm))
    value = [np.full(900_000, n % 251, np.uint8) for n in range(40)]
    large = np.ones(100 << 20, np.uint8)
    for _ in range(2):
        # What libraries need for the first time is there before it gets scarce.
        broadcaster.broadcast(value if rank == 0 else None)
        broadcaster.allgather(value)
    broadcaster.pool._entries.clear()
    before = resource.getrlimit(resource.RLIMIT_AS)
    for verb, given in (("broadcast", large), ("broadcast", value), ("allgather", value)):
        if rank == last:
            addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (addresses + (8 << 20), before[1]))
        try:
            getattr(broadcaster, verb)(given if rank == 0 else None, timeout_s=60.0)
            failed = ""
        except BroadcastError as error:
            failed = error.cause
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
        assert ("MemoryError" in failed) == (rank == last), (verb, failed)
        with pytest.raises(BroadcastError, match=f"rank {last} failed in an earlier exchange: MemoryError"):
            broadcaster.allgather(rank, timeout_s=60.0)
        assert broadcaster.allgather(rank, timeout_s=60.0) == list(range(comm.size))
    broadcaster.close()


@pytest.mark.mpi(2)
def test_a_rank_without_memory_on_two_ranks(world_comm):
    """It takes part in every transfer; see :func:`check_memory`."""
    check_memory(world_comm)


@pytest.mark.slow
@pytest.mark.mpi(4)
def test_a_rank_without_memory_on_four_ranks(world_comm):
    """It takes part in every transfer; see :func:`check_memory`."""
    check_memory(world_comm)


@pytest.mark.mpi(2)
def test_errors_of_mpi_are_raised_whatever_the_users_communicator_does(world_comm):
    """One whose errors end the program: the duplicate's are raised, and the original keeps its handler."""
    from mpi4py import MPI

    from comm_broadcast import MpiComm

    fatal = world_comm.Dup()
    fatal.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    ours = MpiComm(fatal)
    with pytest.raises(TransportError, match="Ibcast"):
        ours.ibcast(bytearray(1), 99)
    assert fatal.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    ours.free()
    fatal.Free()


def test_a_program_without_mpi_is_told(tmp_path):
    """Before and after MPI is in use any call of it would end the program."""
    script = tmp_path / "script.py"
    script.write_text(
        "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\n"
        "from comm_broadcast import BroadcastConfigError, MpiComm\n"
        "for state, step in (('not initialized', MPI.Init), ('finalized', None)):\n"
        "    try:\n        MpiComm()\n    except BroadcastConfigError as error:\n        assert state in str(error), error\n"
        "    else:\n        raise SystemExit('no error')\n"
        "    if step:\n        step()\n        MpiComm(MPI.COMM_SELF).free()\n        MPI.Finalize()\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)


@pytest.mark.mpi(2)
def test_errors_of_mpi_are_the_packages_own(world_comm):
    """Mapped once, with the operation and the cause kept."""
    from mpi4py import MPI

    from comm_broadcast import MpiComm, TransportError

    comm = MpiComm(world_comm)
    with pytest.raises(TransportError, match="Ibcast") as caught:
        comm.ibcast(bytearray(8), root=99)
    assert isinstance(caught.value.__cause__, MPI.Exception)
    with pytest.raises(TransportError, match="Isend"):
        comm.isend(bytearray(8), 99)
    with pytest.raises(TransportError, match="Irecv"):
        comm.irecv(bytearray(8), 99)
    comm.free()


@pytest.mark.mpi(2)
def test_a_late_root_costs_the_others_no_processor(world_comm):
    """While the root computes elsewhere, a waiting rank sleeps between polls: a small part of the time, not all of it."""
    from comm_broadcast import MpiComm

    broadcaster = Broadcaster(MpiComm(world_comm))
    if world_comm.rank == 0:
        time.sleep(0.5)
        broadcaster.broadcast("late")
    else:
        busy, wall = time.process_time(), time.perf_counter()
        assert broadcaster.broadcast() == "late"
        busy, wall = time.process_time() - busy, time.perf_counter() - wall
        assert busy < 0.5 * wall, f"{busy:.3f} s of {wall:.3f} s"
    broadcaster.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.mpi(2)
def test_more_than_two_gibibytes(world_comm):
    """2.25 GiB in one buffer: whole, from the source, with one copy on each side at most."""
    import resource

    from comm_broadcast import MpiComm

    size = (9 << 30) // 4
    broadcaster = Broadcaster(MpiComm(world_comm))
    array = np.ones(size, np.uint8) if world_comm.rank == 0 else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    got = broadcaster.broadcast(array)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert got.nbytes == size
    assert int(got[::4096].sum()) == len(got[::4096])
    assert grown < (0.1 if world_comm.rank == 0 else 1.1) * size, f"peak grew by {grown / 2**30:.2f} GiB"
    broadcaster.close()
