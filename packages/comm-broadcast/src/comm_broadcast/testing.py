"""A communicator of threads that records what each rank does, for tests without MPI.

world = FakeWorld(3)
results = world.run(lambda comm: Broadcaster(comm).broadcast("x" if comm.rank == 0 else None))
assert world.operations(1) == world.operations(2)
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeVar

from comm_broadcast._comm import Buffer, Request

T = TypeVar("T")


class _Ready:
    def test(self) -> bool:
        return True


class _When:
    def __init__(self, attempt: Callable[[], bool]) -> None:
        self._attempt = attempt
        self._done = False

    def test(self) -> bool:
        """See :class:`Request`."""
        self._done = self._done or self._attempt()
        return self._done


class FakeWorld:
    """The ranks' shared board. Collectives match by their order on each rank, as MPI's do.

    Args:
        size: Ranks (count).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._board: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._mail: dict[tuple[str, int, int], deque[bytes]] = defaultdict(deque)
        self._log: list[list[tuple[str, int]]] = [[] for _ in range(size)]

    def comm(self, rank: int) -> FakeComm:
        """One rank's communicator."""
        return FakeComm(self, rank)

    def operations(self, rank: int) -> list[tuple[str, int]]:
        """(operation, bytes) of every collective that a rank joined, in order."""
        return list(self._log[rank])

    def run(self, body: Callable[[FakeComm], T], timeout_s: float = 20.0) -> list[T | BaseException]:
        """Run ``body`` on every rank, a thread each; results or the errors raised, in rank order.

        Raises:
            TimeoutError: A rank did not finish: it hangs; names the ranks and what they did last.
        """
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = body(self.comm(rank))
            except BaseException as error:  # noqa: BLE001 - handed to the test
                results[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            raise TimeoutError(f"ranks {stuck} hang; last operations: {[self._log[r][-1:] for r in stuck]}")
        return results


class FakeComm:
    """One rank of a :class:`FakeWorld`."""

    reports = True

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self._count = 0

    def _join(self, name: str, size: int) -> dict[int, bytes]:
        """What the ranks put down for their next collective."""
        self._count += 1
        self._world._log[self.rank].append((name, size))
        # Without the lock two ranks can each make one.
        with self._world._lock:
            return self._world._board[self._count]

    def ibcast(self, buffer: Buffer, root: int) -> Request:
        """See :class:`Comm`."""
        view = memoryview(buffer).cast("B")
        board = self._join("bcast", view.nbytes)
        if self.rank == root:
            with self._world._lock:
                board[root] = bytes(view)
            return _Ready()

        def attempt() -> bool:
            with self._world._lock:
                data = board.get(root)
            if data is None:
                return False
            if len(data) != view.nbytes:
                raise ValueError(f"bcast of {len(data)} bytes met a buffer of {view.nbytes}")
            view[:] = data
            return True

        return _When(attempt)

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        """See :class:`Comm`."""
        source = memoryview(send).cast("B")
        target = memoryview(receive).cast("B")
        board = self._join("allgather", source.nbytes)
        with self._world._lock:
            board[self.rank] = bytes(source)

        def attempt() -> bool:
            with self._world._lock:
                if len(board) < self.size:
                    return False
                target[:] = b"".join(board[r] for r in range(self.size))
            return True

        return _When(attempt)

    def _send(self, name: str, buffer: Buffer, target: int) -> Request:
        with self._world._lock:
            self._world._mail[name, self.rank, target].append(bytes(buffer))
        return _Ready()

    def isend(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        return self._send("data", buffer, target)

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """See :class:`Comm`."""
        view = memoryview(buffer).cast("B")
        with self._world._lock:
            box = self._world._mail["data", source, self.rank]

        def attempt() -> bool:
            with self._world._lock:
                if not box:
                    return False
                view[:] = box.popleft()
            return True

        return _When(attempt)

    def report(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        return self._send("report", buffer, target)

    def poll_report(self, size: int) -> bytes | None:
        """See :class:`Comm`."""
        with self._world._lock:
            for source in range(self.size):
                box = self._world._mail["report", source, self.rank]
                if box:
                    return box.popleft()
        return None

    def free(self) -> None:
        """See :class:`Comm`."""
