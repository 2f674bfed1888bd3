"""The one file that imports zmq: sockets, addresses, wake-ups, connection events.

A ``Link`` belongs to one thread; only ``wake`` may be called from others. Receiving is event-driven: one poll over the
socket, the wake-up descriptor and the socket's monitor. LINGER is 0 everywhere; what must arrive is acknowledged by the
protocol instead.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import select
import shutil
import socket as stdlib_socket
import stat
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.backend import zmq_poll
from zmq.utils.monitor import parse_monitor_message

from rpc_local_registry._config import RpcConfig
from rpc_local_registry._errors import RpcAddressError, RpcAddressInUse, RpcConnectionError

#: ``sockaddr_un.sun_path`` holds 108 bytes, the last is zero.
IPC_PATH_BYTES_MAX: Final = 107
#: Above this the binding sends from the caller's memory; below it copying is cheaper.
_COPY_BYTES_MAX: Final = 65536
_TCP: Final = re.compile(r"^tcp://(\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9_.\-*]+):(\d{1,5})$")

# As plain integers: arithmetic on the binding's enumerations costs half a microsecond a time.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_NOBLOCK_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN: Final = int(zmq.POLLIN)
_EVENT_STATE: Final = int(zmq.EVENTS)
_MORE: Final = int(zmq.RCVMORE)
#: Arguments of one receive that does not wait.
_ONE_AT_ONCE: Final = (_NOBLOCK,)
#: What ``Link.poll`` found.
READABLE: Final = 1
WOKEN: Final = 2
MONITORED: Final = 4

CONNECTED: Final = "connected"
DISCONNECTED: Final = "disconnected"
CLOSED: Final = "closed"
LISTENING: Final = "listening"
#: The server does not accept this client's ticket; libzmq will not try again.
TURNED_AWAY: Final = "turned away"
#: The other side speaks another protocol, or another handshake of this one.
FOREIGN: Final = "foreign"
#: Longest single wait in the poller, which counts milliseconds in 32 bits: an hour.
_POLL_MS_MAX: Final = 3_600_000
#: Longest time for the transport's own handshake.
_HANDSHAKE_S_MAX: Final = 30.0
#: Longest wait for libzmq to let go of a port.
_RELEASE_S: Final = 0.2
_EVENTS: Final = {
    int(zmq.Event.CONNECTED): CONNECTED,
    int(zmq.Event.ACCEPTED): CONNECTED,
    int(zmq.Event.DISCONNECTED): DISCONNECTED,
    int(zmq.Event.CLOSED): CLOSED,
    int(zmq.Event.LISTENING): LISTENING,
    int(zmq.Event.HANDSHAKE_FAILED_AUTH): TURNED_AWAY,
    int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL): FOREIGN,
}
#: Where libzmq asks whether a connection may speak (ZeroMQ RFC 27), and what it is told.
_GATE_ADDRESS: Final = "inproc://zeromq.zap.01"
_GATE_VERSION: Final = b"1.0"
_GATE_DOMAIN: Final = b"rpc-local-registry"


def check_address(address: object, *, bind: bool) -> str:
    """A usable address, or an error that says what is wrong with it.

    Raises:
        RpcAddressError: Malformed, too long, abstract, or a wildcard where one must connect.
    """
    if not isinstance(address, str) or "\0" in address:
        raise RpcAddressError(f"address must be text, got {address!r}")
    if address.startswith("inproc://") and len(address) > len("inproc://"):
        return address
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if path in ("", "*"):
            if not bind:
                raise RpcAddressError(f"{address!r} names no socket to connect to; use the server's .address")
            return "ipc://"
        if path.startswith("@"):
            raise RpcAddressError(f"{address!r}: abstract sockets have no owner and no permissions")
        if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
            raise RpcAddressError(
                f"socket path of {len(os.fsencode(path))} bytes; at most {IPC_PATH_BYTES_MAX}: {path}"
            )
        if not os.path.isabs(path):
            raise RpcAddressError(f"{address!r}: the socket path must be absolute")
        return address
    match = _TCP.match(address)
    if match is None:
        raise RpcAddressError(f"{address!r} is not ipc://, ipc:///path, tcp://host:port or inproc://name")
    if int(match[2]) > 65535 or (not bind and (int(match[2]) == 0 or match[1] == "*")):
        raise RpcAddressError(f"{address!r}: port or host cannot be {'bound' if bind else 'connected to'}")
    return address


def _option_milliseconds(time_s: float) -> int:
    """As a socket's options take it: at least one, and no more than a C int holds (24 days)."""
    return min(2**31 - 1, max(1, int(time_s * 1000)))


def _milliseconds(timeout_s: float) -> int:
    """As the poller takes it."""
    return min(_POLL_MS_MAX, max(0, math.ceil(timeout_s * 1000)))


def clock_id() -> bytes:
    """Identity of this process's monotonic clock: the machine's boot and the time namespace; empty if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/time')}".encode()
    except OSError:
        # Deadlines then travel as spans.
        return b""


def _private_folder(folder: Path) -> None:
    """Make or check the folder of an ipc socket: ours, and nobody else may enter."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise RpcAddressError(f"the socket's folder {folder} cannot be used: {error}") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise RpcAddressError(
            f"{folder} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}: an ipc socket wants a folder "
            f"of its own with mode 0700"
        )


def _is_live(path: str) -> bool:
    probe = stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
    try:
        probe.setblocking(False)
        probe.connect(path)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in (errno.ECONNREFUSED, errno.ENOENT, errno.ENOTSOCK):
            return False
        raise RpcAddressError(f"{path}: {error}") from error
    else:
        return True
    finally:
        probe.close()


#: (ticket's name, its password, now on the monotonic clock) to whether the connection may speak.
Admit = Callable[[bytes, bytes, float], bool]


class _Context:
    """libzmq's thread and what belongs to it, of a server that asks who may connect and of its clients in this process.

    A server has one of its own, because the question goes to whoever answers for the context, and the process's shared context
    may have another. Its clients in the same process join it: one thread of libzmq then carries a message all the way, where
    two would wake each other. It ends with the last of its links.
    """

    __slots__ = ("_links", "zmq")

    def __init__(self) -> None:
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = 1

    @classmethod
    def of_server(cls, address: str) -> _Context | None:
        """That of the server at this very address, if it is of this process: one link more has it."""
        with _contexts_lock:
            found = _contexts.get(address)
            if found is not None:
                found._links += 1
            return found

    def publish(self, address: str) -> None:
        """Clients may join it from here on."""
        with _contexts_lock:
            _contexts[address] = self

    def withdraw(self, address: str) -> None:
        """No more of them."""
        with _contexts_lock:
            if _contexts.get(address) is self:
                del _contexts[address]

    def leave(self) -> None:
        """One link less, whose sockets are closed."""
        with _contexts_lock:
            self._links -= 1
            over = not self._links
        if over:
            self.zmq.term()


_contexts_lock = threading.Lock()
#: By address of the server.
_contexts: dict[str, _Context] = {}


def _wake_up(undo: contextlib.ExitStack) -> int:
    """A descriptor whose writer wakes whoever polls it."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    undo.callback(os.close, descriptor)
    return descriptor


class Link:
    """One socket with its wake-up descriptor and monitor."""

    def __init__(
        self,
        kind: int,
        config: RpcConfig,
        *,
        monitored: bool,
        context: _Context | None = None,
        admit: Admit | None = None,
    ) -> None:
        self._wake_pending = False
        self._wake_lock = threading.Lock()
        self._closed = False
        self._folder: Path | None = None
        self._ipc_path: str | None = None
        self._ipc_identity = (0, 0)
        self._monitor: zmq.Socket[bytes] | None = None
        self._bound = False
        #: Descriptor that listens, for a forked child to close; -1 before ``bind`` and for in-process sockets.
        self.listener_fd = -1
        self.address = ""
        self._context = context
        self._admit = admit
        self._gate: zmq.Socket[bytes] | None = None
        self._gate_fd = -1
        self._routed = kind == zmq.ROUTER
        #: The first frame of a message that a borrower received and that is not yet read.
        self._seen: deque[bytes] = deque()
        # Descriptors run out, and then any of the following fails: what was opened before it is closed, the last one first.
        with contextlib.ExitStack() as undo:
            if context is not None:
                undo.callback(context.leave)
            self._wake_fd = _wake_up(undo)
            self._socket: zmq.Socket[bytes] = (zmq.Context.instance() if context is None else context.zmq).socket(kind)
            undo.callback(self._socket.close, linger=0)
            self._set_options(config)
            # The binding's poll without its wrapper, which costs as much again.
            self._sources: list[tuple[Any, int]] = [(self._socket, _POLLIN), (self._wake_fd, _POLLIN)]
            self._parked = select.poll()
            self._parked.register(self._wake_fd, select.POLLIN)
            # What a borrower of the socket waits for: a message, or that the socket's owner wants it back. Not for a short time
            # in the socket itself: a timer that soon costs more than all of this package's part in a round trip.
            self._hurry_fd = _wake_up(undo)
            self._borrowed: list[tuple[Any, int]] = [(self._socket, _POLLIN), (self._hurry_fd, _POLLIN)]
            if context is not None and admit is not None:
                self._open_gate(context.zmq, undo)
            if monitored:
                self._open_monitor(undo)
            undo.pop_all()
        _links.add(self)

    def _set_options(self, config: RpcConfig) -> None:
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 0)
        # Bounded by calls, bytes and credit in the protocol above; a drop at a high-water mark would break the
        # sequence.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, config.message_bytes_max + 65536)
        if self._context is None or self._admit is not None:
            # Not beside the server: what would freeze one of the two freezes both.
            socket.setsockopt(zmq.HEARTBEAT_IVL, _option_milliseconds(config.heartbeat_s))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _option_milliseconds(config.peer_timeout_s))
        # A connection that does not get through the transport's own handshake is closed.
        socket.setsockopt(zmq.HANDSHAKE_IVL, _option_milliseconds(min(config.handshake_timeout_s, _HANDSHAKE_S_MAX)))
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.copy_threshold = _COPY_BYTES_MAX
        if self._routed:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def _open_monitor(self, undo: contextlib.ExitStack) -> None:
        undo.callback(self._socket.disable_monitor)
        self._monitor = self._socket.get_monitor_socket(
            zmq.Event.CONNECTED
            | zmq.Event.ACCEPTED
            | zmq.Event.DISCONNECTED
            | zmq.Event.CLOSED
            | zmq.Event.LISTENING
            | zmq.Event.HANDSHAKE_FAILED_AUTH
            | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
        )
        undo.callback(self._monitor.close, linger=0)
        # Its descriptor, not the socket: polled at a third of the cost, and ``events`` always reads it empty.
        self._sources.append((int(self._monitor.getsockopt(zmq.FD)), _POLLIN))
        self.events()

    def _open_gate(self, context: zmq.Context[zmq.Socket[bytes]], undo: contextlib.ExitStack) -> None:
        self._gate = gate = context.socket(zmq.REP)
        undo.callback(gate.close, linger=0)
        gate.setsockopt(zmq.LINGER, 0)
        gate.bind(_GATE_ADDRESS)
        self._gate_fd = int(gate.getsockopt(zmq.FD))
        # The descriptor, as with the monitor: it costs the poll of every message less than the socket would.
        self._sources.append((self._gate_fd, _POLLIN))
        self._socket.setsockopt(zmq.PLAIN_SERVER, 1)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _GATE_DOMAIN)
        self._answer_gate()

    def _answer_gate(self) -> None:
        """Say who may connect, and re-arm the gate's descriptor."""
        gate, admit = self._gate, self._admit
        if gate is None or admit is None:
            return
        while int(gate.getsockopt(_EVENT_STATE)) & _POLLIN:
            # version, request, domain, address, identity, mechanism, then PLAIN's name and password.
            asked = gate.recv_multipart()
            good = len(asked) == 8 and asked[5] == b"PLAIN" and admit(asked[6], asked[7], time.monotonic())
            status, text = (b"200", b"") if good else (b"400", b"no ticket of this server's key")
            gate.send_multipart([_GATE_VERSION, asked[1], status, text, b"", b""])

    @classmethod
    def connect(cls, address: str, config: RpcConfig, ticket: tuple[str, str] | None = None) -> Link:
        """The client's end. Succeeds whether or not somebody listens.

        Args:
            ticket: Name and password that a server behind a gate wants to see; unused in-process.

        Raises:
            RpcConnectionError: There is no descriptor left for it, or libzmq refuses the address.
        """
        try:
            link = cls(
                zmq.DEALER,
                config,
                monitored=not address.startswith("inproc://"),
                context=_Context.of_server(address),
            )
        except (OSError, zmq.ZMQError) as error:
            raise RpcConnectionError(f"cannot connect to {address}: {error}") from error
        try:
            if ticket is not None and not address.startswith("inproc://"):
                link._socket.setsockopt_string(zmq.PLAIN_USERNAME, ticket[0])
                link._socket.setsockopt_string(zmq.PLAIN_PASSWORD, ticket[1])
            if "[" in address:
                link._socket.setsockopt(zmq.IPV6, 1)
            link._socket.connect(address)
        except zmq.ZMQError as error:
            link.close()
            raise RpcConnectionError(f"cannot connect to {address}: {error}") from error
        link.address = address
        return link

    @classmethod
    def bind(cls, address: str, config: RpcConfig, admit: Admit | None = None) -> Link:
        """The server's end.

        Args:
            admit: Asked, inside ``poll``, whether a connection with this ticket may speak; None lets everybody in. Nobody is
                asked in-process.

        Raises:
            RpcAddressInUse: Somebody alive serves the address.
            RpcAddressError: The address cannot be bound, or there is no descriptor left for it.
        """
        outside = not address.startswith("inproc://")
        gated = outside and admit is not None
        try:
            link = cls(
                zmq.ROUTER,
                config,
                monitored=outside,
                context=_Context() if gated else None,
                admit=admit if gated else None,
            )
        except (OSError, zmq.ZMQError) as error:
            raise RpcAddressError(f"cannot bind {address}: {error}") from error
        try:
            if address.startswith("ipc://"):
                link._bind_ipc(address)
            else:
                if "[" in address:
                    link._socket.setsockopt(zmq.IPV6, 1)
                link._bind(address)
                link._bound = True
                link.address = link._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            link.events()
            if link._context is not None:
                link._context.publish(link.address)
        except BaseException:
            link.close()
            raise
        return link

    def _bind(self, address: str) -> None:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise RpcAddressInUse(f"{address} is served already") from error
            raise RpcAddressError(f"cannot bind {address}: {error}") from error

    def _bind_ipc(self, address: str) -> None:
        path = address.removeprefix("ipc://")
        if not path:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="rpc-"))
            except OSError as error:
                raise RpcAddressError(f"no folder for the socket: {error}") from error
            path = str(self._folder / "s")
            if len(os.fsencode(path)) > IPC_PATH_BYTES_MAX:
                raise RpcAddressError(f"the temporary folder's name is too long for a socket: {path}")
        folder = Path(path).parent
        _private_folder(folder)
        # The listening socket is made here and lent to libzmq: left to itself it unlinks whatever is at the path,
        # before it binds and again some time after it was closed. The folder's lock makes looking and binding one act.
        try:
            folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise RpcAddressError(f"the socket's folder {folder} cannot be used: {error}") from error
        listener = stdlib_socket.socket(stdlib_socket.AF_UNIX, stdlib_socket.SOCK_STREAM)
        try:
            fcntl.flock(folder_fd, fcntl.LOCK_EX)
            try:
                if os.path.lexists(path):
                    if not stat.S_ISSOCK(os.lstat(path).st_mode):
                        raise RpcAddressInUse(f"{path} exists and is not a socket")
                    if _is_live(path):
                        raise RpcAddressInUse(f"{path} is served already")
                    os.unlink(path)
                listener.bind(path)
                listener.listen(128)
            except OSError as error:
                raise RpcAddressError(f"cannot bind {path}: {error}") from error
            self._ipc_path = path
            status = os.lstat(path)
            self._ipc_identity = (status.st_dev, status.st_ino)
            self._socket.setsockopt(zmq.USE_FD, listener.fileno())
            self._bind(f"ipc://{path}")
            listener.detach()
        finally:
            listener.close()
            os.close(folder_fd)
        self.address = f"ipc://{path}"

    def wake(self) -> None:
        """Make the owning thread's ``poll`` return; from any thread. Several wake-ups before it looks cost one."""
        if not self._wake_pending:
            # Against ``close``: a descriptor's number is given to the next that opens one, and a stray write there wakes
            # (or, if it is a socket's own signal, breaks) a stranger.
            with self._wake_lock:
                if not self._closed:
                    try:
                        self._wake_pending = True
                        os.eventfd_write(self._wake_fd, 1)
                    except BaseException:
                        # An interrupt: nobody else would write while the flag is set.
                        os.eventfd_write(self._wake_fd, 1)
                        raise

    def poll(self, timeout_s: float | None) -> int:
        """Wait for a message, a wake-up or a connection event; any of ``READABLE``, ``WOKEN``, ``MONITORED``.

        One poll per message is also the cheapest way to ask whether there is another: reading the socket's event state
        through the binding costs more than polling all of them, and an empty receive three times as much.
        """
        ready = 0
        for source, _ in zmq_poll(self._sources, -1 if timeout_s is None else _milliseconds(timeout_s)):
            if source is self._socket:
                ready |= READABLE
            elif source == self._wake_fd:
                os.eventfd_read(self._wake_fd)
                # Before the caller drains its queue: whoever appends from here on wakes us again.
                self._wake_pending = False
                ready |= WOKEN
            elif source == self._gate_fd:
                self._answer_gate()
            else:
                ready |= MONITORED
        return ready

    def wait_woken(self, timeout_s: float) -> bool:
        """Wait for a wake-up only, and leave it to ``poll``: the socket is another's meanwhile."""
        return bool(self._parked.poll(math.ceil(timeout_s * 1000)))

    def events(self) -> list[str]:
        """Connection events since the last call. Reads them all, which re-arms the monitor's descriptor."""
        found: list[str] = []
        monitor = self._monitor
        while monitor is not None and int(monitor.getsockopt(_EVENT_STATE)) & _POLLIN:
            told = parse_monitor_message(monitor.recv_multipart())
            event = _EVENTS.get(int(told["event"]))
            if event == LISTENING:
                self.listener_fd = int(told["value"])
            elif event is not None:
                found.append(event)
        return found

    def receive(self, frames_max: int) -> list[bytes | memoryview]:
        """All frames of the next message; a server's first one is the peer's routing id.

        At most ``frames_max`` + 1 come back, so that the reader sees an excess; the rest is dropped unread. Only after
        ``poll`` said ``READABLE``.
        """
        receive = self._socket.recv
        frames: list[bytes | memoryview] = [receive(_NOBLOCK)] if self._routed else []
        if self._seen:
            frames.append(self._seen.popleft())
            more = bool(self._socket.getsockopt(_MORE))
        else:
            frame = receive(_NOBLOCK, False)
            frames.append(frame.bytes)
            more = frame.more
        while more:
            frame = receive(_NOBLOCK, False)
            if len(frames) <= frames_max:
                frames.append(frame.buffer)
            more = frame.more
        return frames

    @property
    def unread(self) -> bool:
        """Whether a frame was left unread: ``poll`` knows nothing of it."""
        return bool(self._seen)

    def wait_frame(self, timeout_s: float | None) -> bytes | None:
        """For who has borrowed the socket: wait for a message, whose first frame is left unread; None if none came.

        Whether there are further frames is not asked: that costs more than to see it by the message's code, which covers them
        all.
        """
        for source, _ in zmq_poll(self._borrowed, -1 if timeout_s is None else _milliseconds(timeout_s)):
            if source is self._socket:
                # In one step of the interpreter, and copied: a frame of the binding's drops an interrupt when it goes.
                self._seen.extend(map(self._socket.recv, _ONE_AT_ONCE))
                return self._seen[0]
        return None

    def hurry(self) -> None:
        """Make whoever has borrowed the socket, now or in a moment, leave ``wait_frame``; until ``calm``."""
        os.eventfd_write(self._hurry_fd, 1)

    def calm(self) -> None:
        """The socket is back: the next borrower may wait."""
        os.eventfd_read(self._hurry_fd)

    def drop_rest(self) -> None:
        """Drop the further frames of a message whose first one was received and lost in a signal."""
        while self._socket.getsockopt(_MORE):
            self._socket.recv(_NOBLOCK)

    def looked(self) -> None:
        """The frame that was left unread has been read."""
        self._seen.popleft()

    def send(self, frames: Sequence[bytes | memoryview], routing_id: bytes = b"") -> bool:
        """Queue a message; False if that peer is gone (servers only)."""
        send = self._socket.send
        try:
            if routing_id:
                send(routing_id, _NOBLOCK_MORE)
            if len(frames) == 1:
                send(frames[0], _NOBLOCK)
            else:
                for frame in frames[:-1]:
                    send(frame, _NOBLOCK_MORE, len(frame) <= _COPY_BYTES_MAX)
                send(frames[-1], _NOBLOCK, len(frames[-1]) <= _COPY_BYTES_MAX)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def _release_address(self) -> None:
        """Unbind, and wait until the port or name is free: the next server of this address may be waiting for it."""
        try:
            self._socket.unbind(self.address)
        except zmq.ZMQError:
            # Nothing is bound there any more, which is what was wanted.
            return
        until_s = time.monotonic() + _RELEASE_S
        while self._monitor is not None and CLOSED not in self.events():
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self._monitor.poll(math.ceil(left_s * 1000)):
                return

    def close(self) -> None:
        """Release everything at once: sockets, descriptor, socket file, private folder."""
        if self._closed:
            return
        with self._wake_lock:
            self._closed = True
            os.close(self._wake_fd)
        os.close(self._hurry_fd)
        if self._context is not None and self._admit is not None:
            self._context.withdraw(self.address)
        if self._bound:
            self._release_address()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None
        self._socket.close(linger=0)
        if self._gate is not None:
            self._gate.close(linger=0)
            self._gate = None
        if self._context is not None:
            self._context.leave()
        if self._ipc_path is not None:
            try:
                status = os.lstat(self._ipc_path)
                if (status.st_dev, status.st_ino) == self._ipc_identity:
                    os.unlink(self._ipc_path)
            except OSError:
                # Gone already, or its folder is: nothing of ours is left there.
                pass
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def after_fork_in_child(self) -> None:
        """Let go of what only the parent may hold: a listener that lives on here would keep the address in use."""
        self._wake_lock = threading.Lock()
        self._closed = True
        if self.listener_fd >= 0:
            os.close(self.listener_fd)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    global _contexts_lock
    _contexts_lock = threading.Lock()
    _contexts.clear()
    for link in list(_links):
        # The parent's links that it closed have given their descriptors' numbers away.
        if not link._closed:
            link.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
