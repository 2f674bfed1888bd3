"""The public object: begins exchanges, one after the other, and drives them for whoever asks."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from comm_broadcast._ahead import AheadExchange
from comm_broadcast._codec import Codec, PickleCodec
from comm_broadcast._comm import Comm
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import (
    BroadcastConfigError,
    BroadcastError,
    CallMismatchError,
    CommBroadcastError,
    LocalProtocolError,
    TransportError,
)
from comm_broadcast._exchange import Ended, Exchange, is_running
from comm_broadcast._frame import Call, Operation
from comm_broadcast._handle import Handle, Pace, Wait, blocking, finish
from comm_broadcast._pool import BufferPool
from comm_broadcast._settings import ChosenCodec, check_waiting, choose, comm_problem, compare, digest, settings_of
from comm_broadcast._window import SharedWindow, open_window

#: Exchanges that were given up and not finished yet (count).
ABANDONED_MAX = 1024
_DEFAULTS = BroadcastConfig()


@dataclass(frozen=True)
class BroadcastStatistics:
    """Counts since construction.

    Attributes:
        exchanges: Begun on this rank.
        inline, shared: Broadcasts of this rank whose payload fitted in the first frame, or went through the window.
        large_buffers: Buffers sent from where they lay.
        bytes_sent, bytes_received: Payload (bytes).
        failures: Exchanges that raised ``BroadcastError`` here.
        abandoned: Exchanges that the caller gave up and a later call finished.
        allocations: Blocks that were not found in the pool.
    """

    exchanges: int
    inline: int
    shared: int
    large_buffers: int
    bytes_sent: int
    bytes_received: int
    failures: int
    abandoned: int
    allocations: int


class Broadcaster:
    """Moves objects between the ranks of a communicator; all of them succeed, or all of them raise.

    Construction is collective, and so is :meth:`close`: at start-up one small exchange compares root, settings and codec (two
    more set up the shared window, where one is asked for), after the adapter's own (``MpiComm`` duplicates its communicator).
    Nothing else is collective but the exchanges themselves. One exchange at a time; not for several threads.

    An exchange ends on a rank when every rank has begun it; with ``ahead_max`` a broadcast ends on the root when it has been
    sent, and on the others when it has come. A call that an exception interrupts has begun its exchange, or has not:
    :attr:`begun` says which.

    Args:
        comm: An adapter (``MpiComm``, ``TorchComm``, ``testing.FakeComm``) of which this object becomes the only user.
        root: The rank that broadcasts.
        config: See :class:`BroadcastConfig`.
        codec: How values become bytes; default: pickle.
        timeout_s: How long construction waits for the other ranks (s); None: as long as one is missing.

    Raises:
        BroadcastConfigError: On every rank: one cannot use its settings, or they differ; names field and rank. On this rank
            alone: ``comm`` is not an adapter, or somebody else uses it.
        BroadcastTimeoutError: A rank did not construct its own in time.
    """

    def __init__(
        self,
        comm: Comm,
        root: int = 0,
        *,
        config: BroadcastConfig = _DEFAULTS,
        codec: Codec | None = None,
        timeout_s: float | None = None,
    ) -> None:
        problem = comm_problem(comm)
        if problem is not None:
            raise BroadcastConfigError(problem)
        self.comm = comm
        self.config = config
        self.window: SharedWindow | None = None
        settings = settings_of(comm.size, root, config, PickleCodec() if codec is None else codec, timeout_s)
        crowded = _construct(compare(comm, settings), None if settings.problem is not None else timeout_s)
        if settings.codec is None or settings.sink is None:
            raise BroadcastConfigError(f"not refused by the ranks together: {settings.problem}")
        self._codec: ChosenCodec = settings.codec
        self.pace = Pace(config.spin_s, crowded=crowded)
        self.sink = settings.sink
        self.pool = BufferPool(config.pool_bytes_max)
        self._root = root
        self._settings = digest("\n".join(f"{key}={value}" for key, value in settings.values.items() if key != "codec"))
        #: What the last exchange that has ended left; begun and not ended ones, of which the first is under way.
        self.last = Ended()
        self._queue: deque[Exchange] = deque()
        self._released = False
        self._exchange = AheadExchange if config.ahead_max else Exchange
        if config.shared_slot_bytes and comm.size > 1:
            self.window = _construct(open_window(comm, config.shared_slot_bytes, root), timeout_s)

    # -- public --------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Ranks (count)."""
        return self.comm.size

    @property
    def root(self) -> int:
        """The rank that broadcasts."""
        return self._root

    @property
    def begun(self) -> int:
        """Exchanges that this rank has begun (count): after an interrupt, whether the call that it hit counts as made."""
        self._settle()
        return self.last.sequence + len(self._queue)

    def start_broadcast(self, value: Any = None, *, codec: Codec | None = None) -> Handle[Any]:
        """Begin a broadcast of the root's ``value`` (others' is ignored). The root's result is the very object it gave.

        The root must not change the value before its handle is done: large buffers are sent from where they are.

        Args:
            value: What the root gives.
            codec: For this exchange, on every rank; default: the broadcaster's own.

        Raises:
            LocalProtocolError: Another exchange has not ended, or the object is closed or broken. Nothing was sent.
            BroadcastConfigError: ``codec`` cannot be used. Nothing was sent.
        """
        return self._start(Operation.BROADCAST, value, codec)

    def broadcast(
        self,
        value: Any = None,
        *,
        codec: Codec | None = None,
        wait: Wait | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Broadcast and wait.

        Args:
            value: What the root gives.
            codec: See :meth:`start_broadcast`.
            wait: How to wait between polls; default: sleep, shortly at first.
            timeout_s: How long to wait (s); None: as long as a rank is missing.

        Raises:
            BroadcastError: On every rank, when ranks failed. The next exchange works.
            CallMismatchError: On every rank: they called different things. The next exchange works.
            ClosedError: A rank closed instead.
            BroadcastTimeoutError: Not every rank joined in time; the exchange is given up, the next call finishes it.
            RemoteProtocolError: A frame is damaged, or the ranks are not level.
            TransportError: The communicator failed.
        """
        return self._block(Operation.BROADCAST, value, codec, wait, timeout_s)

    def start_gather(self, value: Any, *, codec: Codec | None = None) -> Handle[list[Any] | None]:
        """Begin to gather one value per rank at the root: a list in rank order there, None elsewhere."""
        return self._start(Operation.GATHER, value, codec)

    def gather(
        self, value: Any, *, codec: Codec | None = None, wait: Wait | None = None, timeout_s: float | None = None
    ) -> list[Any] | None:
        """Gather and wait; arguments and errors as :meth:`broadcast`."""
        values: list[Any] | None = self._block(Operation.GATHER, value, codec, wait, timeout_s)
        return values

    def start_allgather(self, value: Any, *, codec: Codec | None = None) -> Handle[list[Any]]:
        """Begin to gather one value per rank everywhere; this rank's own is the very object it gave."""
        return self._start(Operation.ALLGATHER, value, codec)

    def allgather(
        self, value: Any, *, codec: Codec | None = None, wait: Wait | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Gather everywhere and wait; arguments and errors as :meth:`broadcast`."""
        values: list[Any] = self._block(Operation.ALLGATHER, value, codec, wait, timeout_s)
        return values

    def statistics(self) -> BroadcastStatistics:
        """A frozen snapshot."""
        return BroadcastStatistics(
            exchanges=self.begun, **self.last.totals._asdict(), allocations=self.pool.allocations
        )

    def progress(self) -> bool:
        """Keep what the root's earlier broadcasts left under way (``ahead_max``) going; whether nothing is.

        Any other call does so, too; this one is for a root that has nothing to send for long. Never waits.

        Raises:
            TransportError: The communicator failed.
        """
        self._settle()
        if self._released or self._queue or self.last.broken is not None:
            return not self._queue
        return sum(map(self.comm.test, range(len(self.last.kept)))) == len(self.last.kept)

    def abandon(self) -> None:
        """Give up whatever has not ended, as :meth:`Handle.abandon` does; for a handle that is out of reach.

        A handle in a function that an exception ended lives as long as that exception's traceback.
        """
        for exchange in self._queue:
            exchange.given_up = True

    def close(self, *, timeout_s: float | None = 30.0) -> None:
        """Take part in the end, with all ranks, and release the communicator. Values and views stay valid.

        Whatever this rank has open is given up and finished first. Ranks that are in an exchange meanwhile, or begin one, get
        a ``ClosedError`` there: a standing receive ends so. After that, and on a broken object, closing waits for nobody, and a
        second call does nothing.

        Args:
            timeout_s: How long to wait for the other ranks (s); None: as long as one is missing.

        Raises:
            BroadcastTimeoutError: A rank did not join. Close again, or :meth:`release` without it.
            BroadcastError, CallMismatchError: What had not been told yet: all failures at once, calls that did not match
                before them. All is closed.
            LocalProtocolError: Called from within an exchange, by a codec or ``wait`` function.
            TransportError: The communicator failed; it is released all the same.
        """
        check_waiting(None, timeout_s)
        self._settle()
        if self._released:
            return
        self._refuse_reentry("close")
        self._refuse_foreign()
        self.abandon()
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        # One exchange, or more until the root has told everybody.
        while self.last.closed is None and self.last.broken is None:
            last = self._queue[-1] if self._queue else None
            if last is None or last.call.operation is not Operation.CLOSE:
                last = self._exchange(self, self._call(Operation.CLOSE, 0), None, self._codec)
                self._queue.append(last)
            last.blocking = blocking(self, last, None, None if end_s is None else max(0.0, end_s - time.monotonic()))
            try:
                finish(last.blocking)
            except (BroadcastError, CallMismatchError):
                pass  # kept until all is closed
            except CommBroadcastError:
                if last.ended is not None:
                    self.release()
                raise
            self._settle()
        try:
            if self.last.broken is None:
                self.comm.free()
        except TransportError:
            self.release()
            raise
        self.release()
        if self.last.told:
            raise _all_of(self.last.told)

    def release(self) -> None:
        """Give the communicator up without the other ranks: local, never waits, for use after a fault. They are not told.

        Operations under way keep their memory. Values and views stay valid. A second call does nothing.
        """
        self._released = True
        self.window = None

    def __enter__(self) -> Broadcaster:
        """For ``with``: :meth:`close` at its end, :meth:`release` if it ends with an exception."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See :meth:`__enter__`."""
        if kind is None:
            self.close()
        else:
            self.release()

    # -- one exchange at a time ----------------------------------------------------------------------------------------

    def _call(self, operation: Operation, codec: int) -> Call:
        return Call(operation, self._root, codec, self._settings)

    def _begin(self, operation: Operation, value: Any, codec: Codec | None) -> Exchange:
        """An exchange that may be begun now: it is when it stands in the queue."""
        self._settle()
        if self._released:
            raise LocalProtocolError("the broadcaster is closed")
        if self.last.closed is not None:
            raise LocalProtocolError(f"the broadcaster is closed: {self.last.closed}") from self.last.closed
        if self.last.broken is not None:
            raise LocalProtocolError(f"the broadcaster is broken: {self.last.broken}") from self.last.broken
        if self._queue:
            self._refuse_reentry(operation.name.lower())
            if any(exchange.is_open for exchange in self._queue):
                raise LocalProtocolError(
                    "an exchange has not ended, one at a time per broadcaster: wait for its handle, or abandon() it"
                )
        self._refuse_foreign()
        if len(self._queue) >= ABANDONED_MAX:
            raise LocalProtocolError(f"{len(self._queue)} exchanges were given up and wait for the other ranks")
        chosen = self._codec if codec is None or codec is self._codec.codec else choose(codec)
        self.abandon()
        return self._exchange(self, self._call(operation, chosen.digest), value, chosen)

    def _refuse_foreign(self) -> None:
        if not self._queue and self.last.broken is None and len(self.comm.posted) != len(self.last.kept):
            raise LocalProtocolError(
                "the communicator has operations of somebody else under way: it serves one broadcaster"
            )

    def _refuse_reentry(self, what: str) -> None:
        for exchange in self._queue:
            if exchange.is_running or is_running(exchange.blocking):
                raise LocalProtocolError(f"{what}: called from within an exchange, one at a time per broadcaster")

    def _start(self, operation: Operation, value: Any, codec: Codec | None) -> Handle[Any]:
        exchange = self._begin(operation, value, codec)
        # Held by nothing but what is returned: an exception on the way out drops the handle, and so gives the exchange up.
        held: list[Handle[Any]] = [Handle(self, exchange)]
        exchange.handle = weakref.ref(held[0])
        try:
            self._queue.append(exchange)
            self.advance(exchange)
        except BaseException:
            exchange.given_up = True
            raise
        return held.pop()

    def _block(
        self, operation: Operation, value: Any, codec: Codec | None, wait: Wait | None, timeout_s: float | None
    ) -> Any:
        check_waiting(wait, timeout_s)
        exchange = self._begin(operation, value, codec)
        exchange.blocking = blocking(self, exchange, wait, timeout_s)
        self._queue.append(exchange)
        return finish(exchange.blocking)

    def advance(self, exchange: Exchange) -> bool:
        """See :class:`Owner`. Those before it are finished first."""
        while True:
            self._settle()
            if exchange.ended is not None:
                return True
            if self._released:
                raise LocalProtocolError("the broadcaster was released before the exchange ended")
            if not self._queue[0].step():
                return False

    def _settle(self) -> None:
        """Take note of exchanges that have ended. May be done again from any point of it."""
        queue = self._queue
        while queue and queue[0].ended is not None:
            ended = queue[0].ended
            if ended.broken is None:
                self.comm.forget(len(ended.kept))
            # Without its result, which belongs to whoever asked for it and may look into memory.
            self.last = Ended(ended.sequence, None, None, *ended[3:])
            # Out of the queue first: forgetting a value may run its code, which may call this object again.
            queue.popleft().release()


def _all_of(told: Sequence[BroadcastError | CallMismatchError]) -> CommBroadcastError:
    """One error for all that closing was told: the failures of all of them; calls that did not match stand before that."""
    failures = [error for error in told if isinstance(error, BroadcastError)]
    chain: list[CommBroadcastError] = [error for error in told if isinstance(error, CallMismatchError)]
    if failures:
        chain.append(
            failures[0]
            if len(failures) == 1
            else BroadcastError.of(tuple(f for error in failures for f in error.failures))
        )
    for error, following in itertools.pairwise(chain):
        error.__cause__ = following
    return chain[0]


def _construct(steps: Any, timeout_s: float | None) -> Any:
    """Run a constructor's collective steps to their end."""
    result: list[Any] = []

    def test() -> bool:
        try:
            next(steps)
        except StopIteration as stop:
            result.append(stop.value)
            return True
        return False

    Pace(_DEFAULTS.spin_s, crowded=True).poll(test, None, timeout_s)
    return result[0]
