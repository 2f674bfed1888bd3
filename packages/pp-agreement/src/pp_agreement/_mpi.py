"""MPI: point to point on a private communicator of the domain's members. The one file that imports mpi4py.

Receives are persistent and posted ahead; sends are persistent synchronous-mode sends, at most ``window`` per peer, so a
frame that was not received never leaves the sender's count (plain ``Isend`` completes eagerly and fills the receiver's
unexpected queue without bound). Both rings are walked in posting order, which MPI's matching order makes stream order.
There is no collective between ``open`` and ``close``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import Any

from mpi4py import MPI

from pp_agreement._codec import frame_length
from pp_agreement._config import Domain, seconds, within
from pp_agreement._errors import ConfigurationError, TransportError, WouldBlock
from pp_agreement._events import new
from pp_agreement._transport import Sweep

TAG = 0
QUIET_ROUNDS = 4
"""Fruitless rounds that end a sweep while sends of our own are outstanding. One look makes MPICH handle about one packet, and
the acknowledgements of synchronous sends are packets, too: with a single round every hop took an iteration longer (60 instead
of 20 ms). With nothing outstanding one fruitless round is enough."""
SIZE_CLASSES = (256, 2048)  # persistent sends have a fixed length; most frames carry under nine records
CANCEL_TESTS = 1000
"""Looks at a cancelled receive before it is left alone: one that has matched a large frame completes only with its sender."""

_left_behind: list[_Stream] = []
"""Streams with a request that MPI may still serve when the peer comes back: their memory is never given back."""
# Not at the interpreter's end either, by one reference too many: MPI_Finalize comes later and goes on with what is under way.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_left_behind))


class MpiTransport:
    """One member's streams over MPI; see :class:`pp_agreement.Transport`.

    Args:
        comm: Parent communicator (``mpi4py.MPI.Intracomm``); ``domain.ranks`` are its ranks. Only members take part in
            ``open``, which makes the private communicator (collective over the members, once, at start-up).
        domain: Who decides together.
        window: Outstanding frames per stream and receives posted per peer, 1..64. A frame that matched a posted receive
            is the peer's, so at most ``2 * window`` frames of a stream lie between two hosts.
        watch: Gives (rank, evidence) of dead ranks of the parent communicator, again as often as it likes: for instance
            ``PidWatch.all_dead``, which several domains may share; a death has to stop every one of them.
        open_deadline_s: Longest wait of ``open`` for the other members, > 0. It needs ``MPI_THREAD_MULTIPLE``, which
            mpi4py asks for by default; with less MPI waits as long as it likes.

    Raises:
        ConfigurationError: This process is not a member, or a value is out of range.
    """

    name = "mpi"

    def __init__(
        self,
        comm: Any,
        domain: Domain,
        *,
        window: int = 4,
        watch: Callable[[], Iterable[tuple[int, str]]] | None = None,
        open_deadline_s: float = 120.0,
    ) -> None:
        within("window", window, 1, 64)
        seconds("open_deadline_s", open_deadline_s, 1e-3)
        if max(domain.ranks) >= comm.Get_size():
            raise ConfigurationError("ranks", f"{domain.ranks} exceed the communicator of {comm.Get_size()}")
        self._parent = comm
        self._domain = domain
        self._me = domain.index_of(comm.Get_rank())
        self._window = window
        self._watch = watch
        self._open_deadline_s = open_deadline_s
        self._comm: Any = None
        self._streams: dict[int, _Stream] = {}
        self._order: tuple[int, ...] = ()
        self._all = 0  # their mask
        self._nothing = Sweep([], 0)  # a sweep that found every ring empty
        self._sending = False  # whether a send may be outstanding
        self._waiting = 0  # frames that have arrived and were not handed over yet
        self._start = 0
        self._turns: list[tuple[_Stream, ...]] = []  # the streams, beginning with each in turn
        self._requests: list[Any] = []  # all posted receives, by peer and slot
        self._owners: list[tuple[_Stream, int]] = []  # whose they are
        self._broken: MPI.Exception | None = None  # found while frames were in hand

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """See :class:`Transport`. Collective over the domain's members, and bounded.

        Raises:
            TransportError: MPI refused, or not every member has opened within the deadline. This transport is of no more
                use then: MPI may still be waiting for the others.
        """
        try:
            self._comm = self._make_communicator()
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)  # surfaces as MPI.Exception, mapped below
        except MPI.Exception as error:
            raise TransportError(f"no private communicator: {error}") from error
        self._order = peers
        self._all = sum(1 << peer for peer in peers)
        self._nothing = Sweep([], self._all)
        try:
            for peer in peers:
                stream = self._streams[peer] = _Stream(self._comm, peer, self._window, frame_bytes_max)
                self._requests.extend(stream.receives)
                self._owners.extend((stream, slot) for slot in range(self._window))
        except MPI.Exception as error:
            self.close(False)
            raise TransportError(f"no persistent requests: {error}") from error
        streams = tuple(self._streams.values())
        self._turns = [(*streams[place:], *streams[:place]) for place in range(len(streams))]

    def _make_communicator(self) -> Any:
        """Making it waits for every member, and MPI offers no bound: a thread waits, this one only so long."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            return self._create_group()
        made: list[Any] = []
        failed: list[BaseException] = []

        def make() -> None:
            try:
                made.append(self._create_group())
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that opens
                failed.append(error)

        thread = threading.Thread(target=make, name="pp-agreement open", daemon=True)
        thread.start()
        thread.join(self._open_deadline_s)
        if failed:
            raise failed[0]
        if not made:
            ranks = self._domain.ranks
            raise TransportError(f"not every member of {ranks} has opened within {self._open_deadline_s} s")
        return made[0]

    def _create_group(self) -> Any:
        group = self._parent.Get_group()
        members = group.Incl(list(self._domain.ranks))
        try:
            return self._parent.Create_group(members, self._domain.domain_id % 32_768)
        finally:
            members.Free()
            group.Free()

    def outstanding(self, peer: int) -> int:
        """See :class:`Transport`."""
        try:
            return self._streams[peer].outstanding()
        except MPI.Exception as error:
            raise TransportError(str(error), rank=self._domain.ranks[peer]) from error

    def can_send(self, peer: int) -> bool:
        """See :class:`Transport`."""
        return self._streams[peer].count < self._window or self.outstanding(peer) < self._window

    def send(self, peer: int, frame: bytes) -> None:
        """See :class:`Transport`."""
        stream = self._streams[peer]
        if stream.count >= self._window and self.outstanding(peer) >= self._window:
            raise WouldBlock(f"{self._window} frames are outstanding")
        try:
            stream.send(frame)
            self._sending = True
        except MPI.Exception as error:
            raise TransportError(str(error), rank=self._domain.ranks[peer]) from error

    def receive(self, frames_max: int) -> Sweep:
        """See :class:`Transport`. Round robin, one frame per peer and turn; one look at all streams per round."""
        if self._broken is not None:
            raise TransportError(str(self._broken)) from self._broken
        frames: list[tuple[int, bytes]] = []
        order = self._order
        if not order:
            return Sweep(frames, 0)
        look, requests, owners = MPI.Request.Testsome, self._requests, self._owners
        quiet = 0
        if self._waiting and self._move(frames, frames_max):
            return Sweep(frames, self._empty())
        try:
            while True:
                found = look(requests)
                if found:
                    for index in found:
                        stream, slot = owners[index]
                        stream.arrived[slot] = True
                        stream.waiting += 1
                    self._waiting += len(found)
                    quiet = 0
                    if self._move(frames, frames_max):
                        return Sweep(frames, self._empty())
                else:
                    quiet += 1
                    if quiet >= QUIET_ROUNDS or not self._sending or not self._is_sending():
                        return new(Sweep, (frames, self._all)) if frames else self._nothing
        except MPI.Exception as error:
            if not frames:
                raise TransportError(str(error)) from error
            self._broken = error  # what was received is handed over first
            return Sweep(frames, 0)

    def _move(self, frames: list[tuple[int, bytes]], frames_max: int) -> bool:
        """Move what has arrived into ``frames``; True: their limit is reached. Fair: one frame of each peer in turn."""
        self._start = start = (self._start + 1) % len(self._turns)
        live = True
        while live and self._waiting > 0:
            live = False
            for stream in self._turns[start]:
                if stream.waiting:
                    if len(frames) >= frames_max:
                        return True
                    data = stream.take()
                    if data is not None:
                        live = True
                        self._waiting -= 1
                        frames.append((stream.peer, data))
        return len(frames) >= frames_max

    def _empty(self) -> int:
        """Members whose ring holds nothing that was seen: a flood of one hides no other."""
        return sum(1 << peer for peer in self._order if not self._streams[peer].waiting)

    def _is_sending(self) -> bool:
        """Whether a frame is outstanding. All are looked at, since each look also makes MPI handle a packet."""
        sending = False
        for stream in self._streams.values():
            if stream.count and stream.outstanding():
                sending = True
        self._sending = sending
        return sending

    def deaths(self) -> tuple[tuple[int, str], ...]:
        """See :class:`Transport`."""
        if self._watch is None:
            return ()
        ranks = self._domain.ranks
        try:
            dead = tuple(self._watch())
        except OSError as error:
            raise TransportError(f"the watch for dead ranks failed: {error}") from error
        return tuple((ranks.index(rank), evidence) for rank, evidence in dead if rank in ranks)

    def close(self, clean: bool) -> None:
        """Cancel the posted receives; after a clean close also free the requests and the communicator.

        Freeing is collective in MPI's terms, so it is done only when every member has closed. After an unclean close
        leave the process without ``MPI_Finalize`` (``os._exit``): a synchronous send to a dead rank never completes.
        Never waits for a peer; what MPI may still read or write stays allocated for the life of the process.

        Raises:
            TransportError: MPI refused; nothing more can be done with this transport.
        """
        streams, self._streams = self._streams, {}
        comm, self._comm = self._comm, None
        self._order = ()
        self._requests, self._owners = [], []
        try:
            for stream in streams.values():
                if not stream.close(clean):
                    _left_behind.append(stream)
            if clean and comm is not None:
                comm.Free()
        except MPI.Exception as error:
            _left_behind.extend(s for s in streams.values() if s not in _left_behind)
            raise TransportError(f"close: {error}") from error


class _Stream:
    """Both directions between two members: rings of persistent requests."""

    def __init__(self, comm: Any, peer: int, window: int, frame_bytes_max: int) -> None:
        self.peer = peer
        self._window = window
        self._sizes = (*(s for s in SIZE_CLASSES if s < frame_bytes_max), frame_bytes_max)
        self._send_buffers = [bytearray(frame_bytes_max) for _ in range(window)]
        self._sends = [
            [
                (size, comm.Ssend_init([memoryview(buffer)[:size], size, MPI.BYTE], dest=peer, tag=TAG))
                for size in self._sizes
            ]
            for buffer in self._send_buffers
        ]
        self._active: list[Any] = [None] * window
        self._first = 0  # oldest outstanding send
        self.count = 0
        self._buffers = [bytearray(frame_bytes_max) for _ in range(window)]
        self._views = [memoryview(buffer) for buffer in self._buffers]
        self.receives = [comm.Recv_init([b, len(b), MPI.BYTE], source=peer, tag=TAG) for b in self._buffers]
        self.arrived = [False] * window  # whether there is something in each slot
        self.waiting = 0  # slots with something
        self._head = 0
        for request in self.receives:
            request.Start()

    def outstanding(self) -> int:
        while self.count and self._active[self._first].Test():
            self._active[self._first] = None
            self._first = (self._first + 1) % self._window
            self.count -= 1
        return self.count

    def send(self, frame: bytes) -> None:
        slot = (self._first + self.count) % self._window
        length = len(frame)
        self._send_buffers[slot][:length] = frame
        for size, request in self._sends[slot]:
            if length <= size:
                request.Start()
                self._active[slot] = request
                self.count += 1
                return
        raise WouldBlock(f"a frame of {length} bytes is longer than {self._sizes[-1]}")

    def take(self) -> bytes | None:
        """The next frame in posting order, which MPI's matching order makes stream order; None: it has not come."""
        head = self._head
        if not self.arrived[head]:
            return None
        view = self._views[head]
        # Behind a message that is shorter than it claims lies the rest of an older one: such bytes are no frame.
        data = bytes(view[: frame_length(view)])
        self.arrived[head] = False
        self.waiting -= 1
        self.receives[head].Start()
        self._head = (head + 1) % self._window
        return data

    def close(self, clean: bool) -> bool:
        """Whether nothing is left that MPI may still touch."""
        idle = True
        for request in self.receives:
            request.Cancel()
        for request in self.receives:
            # Local for a cancelled or a small matched receive; never ``Wait``: the sender of a large frame may be dead.
            if any(request.Test() for _ in range(CANCEL_TESTS)):
                request.Free()
            else:
                idle = False
        self.outstanding()
        for slot, active in zip(self._sends, self._active):
            for _size, request in slot:
                if request is not active:
                    request.Free()
                else:  # an outstanding synchronous send is left alone
                    idle = False
        return idle
