"""torch.distributed over gloo: two processes, the same promises."""

import json
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")


class Raises:
    """Cannot be pickled."""

    def __reduce__(self):
        raise ValueError("no")


class FailsOnOne:
    """Cannot be loaded on rank 1."""

    def __reduce__(self):
        return _rebuild, ()


def _rebuild():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("cannot be decoded here")
    return "rebuilt"


def _rank(rank, path):
    import datetime

    import torch.distributed as dist

    from comm_broadcast import BroadcastConfig, BroadcastConfigError, Broadcaster, BroadcastError, TorchComm
    from comm_broadcast.testing import check_comm

    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    check_comm(TorchComm(), messages_block=True)
    done = []
    config = BroadcastConfig(chunk_bytes=8192, gather_bytes_max=50_000, agree=True)
    broadcaster = Broadcaster(TorchComm(), config=config)
    for value in (None, "small", list(range(20_000)), {"big": np.arange(40_000)}):
        got = broadcaster.broadcast(value if rank == 0 else None)
        assert (got is value) if rank == 0 or value is None else repr(got) == repr(value)
    done.append("values")
    for bad, failing in ((Raises(), 0), (FailsOnOne(), 1)):
        try:
            broadcaster.broadcast(bad if rank == 0 else None)
        except BroadcastError as error:
            done.append((error.rank, "ValueError" in error.cause, error.rank == failing))
        done.append(broadcaster.broadcast("next" if rank == 0 else None))
    done.append(broadcaster.allgather(rank))
    gathered = broadcaster.gather(np.full(30_000 * rank + 3, rank))
    done.append(None if gathered is None else [a.size for a in gathered])
    broadcaster.close()
    ahead = Broadcaster(TorchComm(), config=BroadcastConfig(ahead_max=2, chunk_bytes=8192, gather_bytes_max=50_000))
    for value in (None, "small", list(range(20_000)), {"big": np.arange(40_000)}, FailsOnOne(), "lost", "lost", "last"):
        try:
            got = ahead.broadcast(value if rank == 0 else None)
            done.append("last" if got == "last" else rank == 0 or value is None or repr(got) == repr(value))
        except BroadcastError as error:
            done.append((error.rank, error.earlier))
    done.append(ahead.allgather(rank))
    ahead.close()
    try:
        Broadcaster(TorchComm(), root=rank)
    except BroadcastConfigError as error:
        done.append("root" in str(error))
    dist.destroy_process_group()
    print(json.dumps(done))


@pytest.mark.timeout(90)
def test_two_processes_over_gloo(tmp_path):
    """Values, failures on either side that both raise at once, or in a later exchange, gathers, a root that differs."""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "init")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    common = ["values", [0, True, True], "next", [1, True, True], "next", [0, 1]]
    for rank, (gathered, mine) in enumerate((([3, 30_003], True), (None, [1, False]))):
        assert found[rank][:7] == [*common, gathered]
        told = found[rank][7:]
        assert told[:5] == [True, True, True, True, mine]
        # Within two exchanges, and the values of others arrive.
        assert told[5:8].count([1, True]) == 1
        assert told[8:] == [[0, 1], True]
    assert found[0][12:15].index([1, True]) == found[1][12:15].index([1, True])


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2])
