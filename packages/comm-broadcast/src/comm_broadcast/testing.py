"""A communicator of threads that records what each rank does, for tests without MPI; and a check of communicators.

world = FakeWorld(3)
results = world.run(lambda comm: Broadcaster(comm).broadcast("x" if comm.rank == 0 else None))
assert world.operations(1) == world.operations(2)
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from comm_broadcast._comm import Buffer, Comm
from comm_broadcast._errors import TransportError

T = TypeVar("T")


class FakeWorld:
    """The ranks' shared board. Collectives match by their order on each rank, as MPI's do.

    Args:
        size: Ranks (count).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # No lock: an exception between its acquisition and its release would keep it for ever. Each access is one operation
        # of a dictionary, which threads do not interrupt.
        #: number of a collective -> rank -> (operation, bytes, what it gives)
        self._board: dict[int, dict[int, tuple[str, int, bytes]]] = {}
        #: (source, target) -> ordinal -> bytes
        self._mail: dict[tuple[int, int], dict[int, bytes]] = {}
        self._log: list[dict[int, tuple[str, int]]] = [{} for _ in range(size)]
        #: Per rank: collectives that it has done with.
        self._past = [0] * size
        self._cleared = 0

    def comm(self, rank: int) -> FakeComm:
        """One rank's communicator."""
        return FakeComm(self, rank)

    def operations(self, rank: int) -> list[tuple[str, int]]:
        """(operation, bytes) of every collective that a rank joined, in order."""
        return [entry for _, entry in sorted(self._log[rank].items())]

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
            raise TimeoutError(f"ranks {stuck} hang; last operations: {[self.operations(r)[-1:] for r in stuck]}")
        return results

    def join(self, number: int, rank: int, operation: str, size: int, gives: bytes) -> None:
        """Put down what a rank brings to a collective; a second time changes nothing."""
        self._log[rank][number] = (operation, size)
        self._board.setdefault(number, {})[rank] = (operation, size, gives)

    def joined(self, number: int, rank: int) -> dict[int, tuple[str, int, bytes]]:
        """Who has joined a collective, and with what.

        Raises:
            TransportError: They joined different ones.
        """
        board = self._board[number].copy()
        mine = board[rank][:2]
        for other, (operation, size, _) in board.items():
            if (operation, size) != mine:
                raise TransportError(
                    mine[0], rank, f"of {mine[1]} bytes met {operation} of {size} bytes on rank {other}"
                )
        return board

    def past(self, number: int, rank: int) -> None:
        """A rank is done with all collectives before this one: what all are done with is dropped."""
        self._past[rank] = max(self._past[rank], number)
        while (first := self._cleared) < min(self._past):
            self._board.pop(first, None)
            self._cleared = first + 1

    def mail(self, source: int, target: int) -> dict[int, bytes]:
        """What was sent from one rank to another."""
        return self._mail.setdefault((source, target), {})


class _Posted:
    """An operation that was started: its number among the collectives, or its ordinal between two ranks."""

    def __init__(self, operation: str, number: int, peer: int, attempt: Callable[[], bool]) -> None:
        self.operation = operation
        self.number = number
        self.peer = peer
        self.attempt = attempt
        self.done = False


class FakeComm:
    """One rank of a :class:`FakeWorld`. Everything that it does may be done again: an exception may end it anywhere."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.posted: list[_Posted] = []
        #: Numbers of the first operations that are not listed any more: collectives under (), the others by kind and rank.
        self._next: dict[tuple[str, int], int] = defaultdict(int)

    def _number(self, operation: str, peer: int) -> int:
        """The next operation's number among those that it is matched with."""
        key = _key(operation, peer)
        for earlier in reversed(self.posted):
            if _key(earlier.operation, earlier.peer) == key:
                return earlier.number + 1
        return self._next[key]

    def ibcast(self, buffer: Buffer, root: int) -> None:
        """See :class:`Comm`."""
        view = memoryview(buffer).cast("B")
        number = self._number("bcast", root)
        self._world.join(number, self.rank, "bcast", view.nbytes, bytes(view) if self.rank == root else b"")

        def attempt() -> bool:
            board = self._world.joined(number, self.rank)
            if root not in board:
                return False
            if self.rank != root:
                view[:] = board[root][2]
            return True

        self.posted.append(_Posted("bcast", number, root, attempt))

    def iallgather(self, send: Buffer, receive: Buffer) -> None:
        """See :class:`Comm`."""
        source, target = memoryview(send).cast("B"), memoryview(receive).cast("B")
        number = self._number("allgather", 0)
        self._world.join(number, self.rank, "allgather", source.nbytes, bytes(source))

        def attempt() -> bool:
            board = self._world.joined(number, self.rank)
            if len(board) < self.size:
                return False
            target[:] = b"".join(board[r][2] for r in range(self.size))
            return True

        self.posted.append(_Posted("allgather", number, 0, attempt))

    def igather(self, send: Buffer, receive: Buffer | None, root: int) -> None:
        """See :class:`Comm`."""
        source = memoryview(send).cast("B")
        number = self._number("gather", root)
        self._world.join(number, self.rank, "gather", source.nbytes, bytes(source))

        def attempt() -> bool:
            board = self._world.joined(number, self.rank)
            if receive is None:
                return True
            if len(board) < self.size:
                return False
            memoryview(receive).cast("B")[:] = b"".join(board[r][2] for r in range(self.size))
            return True

        self.posted.append(_Posted("gather", number, root, attempt))

    def isend(self, buffer: Buffer, target: int) -> None:
        """See :class:`Comm`."""
        number = self._number("send", target)
        self._world.mail(self.rank, target)[number] = bytes(buffer)
        self.posted.append(_Posted("send", number, target, lambda: True))

    def irecv(self, buffer: Buffer, source: int) -> None:
        """See :class:`Comm`."""
        view = memoryview(buffer).cast("B")
        number = self._number("receive", source)
        box = self._world.mail(source, self.rank)

        def attempt() -> bool:
            data = box.get(number)
            if data is None:
                return False
            view[:] = data
            return True

        self.posted.append(_Posted("receive", number, source, attempt))

    def test(self, index: int) -> bool:
        """See :class:`Comm`."""
        posted = self.posted[index]
        posted.done = posted.done or posted.attempt()
        return posted.done

    def forget(self, keep: int) -> None:
        """See :class:`Comm`."""
        done = len(self.posted) - keep
        for posted in self.posted[:done]:
            self._next[_key(posted.operation, posted.peer)] = posted.number + 1
            if posted.operation == "receive":
                self._world.mail(posted.peer, self.rank).pop(posted.number, None)
        self._world.past(self._next[_key("bcast", 0)], self.rank)
        del self.posted[:done]

    def free(self) -> None:
        """See :class:`Comm`."""


def _key(operation: str, peer: int) -> tuple[str, int]:
    """Which operations an operation is matched by order with: all collectives, or the same ones with one rank."""
    return (operation, peer) if operation in ("send", "receive") else ("collective", 0)


#: Bytes of the buffers of a check: within a first frame, beyond one, and beyond what goes straight from each to each.
_SIZES = (1, 256, 5000, 70_000)


def check_comm(comm: Comm, *, messages_block: bool = False, limit_s: float = 30.0) -> None:
    """What a communicator of your own must do; every rank calls it at once, with nothing under way. It is freed at the end.

    Args:
        comm: This rank's.
        messages_block: A look at a message between two ranks waits for it, as with gloo: that looks return is not checked.
        limit_s: Longest wait for an operation that all ranks have started.

    Raises:
        AssertionError: Something differs on this rank; the others may then be left waiting, up to the limit.
    """
    _expect(len(comm.posted) == 0, "something is listed before anything was started", len(comm.posted))
    _expect(0 <= comm.rank < comm.size, "the rank is not among the ranks", (comm.rank, comm.size))
    for size in _SIZES:
        _check_collectives(comm, size, limit_s)
        if comm.size > 1:
            _check_messages(comm, size, limit_s)
    if comm.size > 1 and not messages_block:
        _check_that_tests_return(comm, limit_s)
    comm.free()
    comm.free()


def _check_collectives(comm: Comm, size: int, limit_s: float) -> None:
    """Each by itself, then all of them at once: they match by their order."""
    mine = _pattern(comm.rank, size)
    everybody = b"".join(_pattern(rank, size) for rank in range(comm.size))
    for together in (False, True):
        gathered = bytearray(size * comm.size)
        casts = [bytearray(_pattern(root, size) if root == comm.rank else size) for root in range(comm.size)]
        roots = [bytearray(size * comm.size) if root == comm.rank else None for root in range(comm.size)]
        starts: list[tuple[Callable[..., None], tuple[Any, ...]]] = [(comm.iallgather, (mine, gathered))]
        starts += [(comm.ibcast, (buffer, root)) for root, buffer in enumerate(casts)]
        starts += [(comm.igather, (mine, into, root)) for root, into in enumerate(roots)]
        for start, arguments in starts:
            _start(comm, start, *arguments)
            if not together:
                _finish(comm, limit_s)
        _finish(comm, limit_s, forget_by=2)
        _expect(gathered == everybody, f"iallgather of {size} bytes", comm.rank)
        for root, buffer in enumerate(casts):
            _expect(buffer == _pattern(root, size), f"ibcast of {size} bytes from rank {root}", comm.rank)
        _expect(bytes(roots[comm.rank] or b"") == everybody, f"igather of {size} bytes", comm.rank)


def _check_messages(comm: Comm, size: int, limit_s: float) -> None:
    """Two to each neighbour, in order, and two from each."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = [bytearray(size) for _ in range(2)]
    for buffer in received:
        _start(comm, comm.irecv, buffer, before)
    for number in range(2):
        _start(comm, comm.isend, _pattern(comm.rank + 7 * number, size), after)
    _finish(comm, limit_s)
    for number, buffer in enumerate(received):
        _expect(buffer == _pattern(before + 7 * number, size), f"message {number} of {size} bytes", comm.rank)


def _check_that_tests_return(comm: Comm, limit_s: float) -> None:
    """Rank 0 looks for what rank 1 sends only after it has heard from rank 0: a look that waits would wait for ever."""
    if comm.rank > 1:
        return
    buffer = bytearray(1)
    if comm.rank == 0:
        _start(comm, comm.irecv, buffer, 1)
        _expect(not comm.test(0), "something has arrived that nobody has sent", comm.rank)
        _start(comm, comm.isend, b"?", 1)
    else:
        _start(comm, comm.irecv, buffer, 0)
        _finish(comm, limit_s)
        _start(comm, comm.isend, b"!", 0)
    _finish(comm, limit_s)


def _pattern(seed: int, size: int) -> bytes:
    return bytes((seed * 31 + place) % 251 for place in range(size))


def _start(comm: Comm, start: Callable[..., None], *arguments: Any) -> None:
    listed = len(comm.posted)
    start(*arguments)
    name = getattr(start, "__name__", str(start))
    _expect(len(comm.posted) == listed + 1, f"{name} does not list one operation", len(comm.posted) - listed)


def _finish(comm: Comm, limit_s: float, forget_by: int = 1) -> None:
    """Look until all that is listed has completed, once more, and unlist it, so many operations a step."""
    until_s = time.monotonic() + limit_s
    listed = len(comm.posted)
    while not all(comm.test(index) for index in range(listed)):
        _expect(time.monotonic() < until_s, f"an operation has not completed within {limit_s} s", comm.rank)
        time.sleep(0.0002)
    _expect(all(comm.test(index) for index in range(listed)), "what has completed is under way again", comm.rank)
    for keep in (*range(listed - 1, 0, -forget_by), 0, 0):
        comm.forget(keep)
        _expect(len(comm.posted) == keep, f"after forget({keep}) there are as many", len(comm.posted))


def _expect(holds: bool, what: str, shown: object) -> None:
    if not holds:
        raise AssertionError(f"{what}: {shown}")
