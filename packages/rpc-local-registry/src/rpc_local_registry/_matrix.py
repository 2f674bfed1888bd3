"""Every verb × every outcome, run on one path at a time: what a caller sees, as one line of text to compare.

A cell makes a fresh server and client, brings the outcome about and says what came of it. ``DIFFERENCES`` holds the cells where
the local path differs by design, with the reason; everywhere else all paths must say the same.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from rpc_local_registry import _asyncio as aio
from rpc_local_registry._calls import Call
from rpc_local_registry._client import RpcClient
from rpc_local_registry._config import RpcConfig, new_key
from rpc_local_registry._errors import RpcBackpressure, RpcError, RpcRemoteError, RpcTimeout
from rpc_local_registry._methods import rpc_method
from rpc_local_registry._server import RpcServer

PATHS: Final = ("local", "ipc", "tcp")
VERBS: Final = ("remote", "remote_async", "remote_future", "remote_oneway", "for", "async for")
_ADDRESSES: Final = {"local": "ipc://", "ipc": "ipc://", "tcp": "tcp://127.0.0.1:0"}
#: No cell waits longer for something that must happen.
_PATIENCE_S: Final = 20.0
_SHORT_S: Final = 0.1


class OwnTransportError(RpcError):
    """A worker's own kind of ``RpcError``."""


class MatrixWorker:
    """Methods of every kind that end as their argument says; all may run locally."""

    def __init__(self) -> None:
        self.ran = 0
        self.entered = threading.Event()
        self.gate = threading.Event()

    def _act(self, how: str) -> Any:
        self.ran += 1
        match how:
            case "error":
                raise ValueError("told")
            case "subclass":
                raise OwnTransportError("mine")
            case "own backpressure":
                raise RpcBackpressure("of a peer of mine")
            case "own time-out":
                raise RpcTimeout("of a peer of mine")
            case "SystemExit":
                raise SystemExit(3)
            case "cancellation":
                raise aio.CancelledError
            case "no encoding":
                return lambda: None
            case "wait":
                self.entered.set()
                self.gate.wait(_PATIENCE_S)
        return 7

    @rpc_method(non_blocking=True)
    def plain(self, how: str) -> Any:
        """A plain method."""
        return self._act(how)

    @rpc_method(non_blocking=True)
    async def coroutine(self, how: str) -> Any:
        """A coroutine."""
        await aio.sleep(0)
        if how == "wait":
            self.entered.set()
            while not self.gate.is_set():
                await aio.sleep(0.005)
            return 7
        return self._act(how)

    @rpc_method(non_blocking=True, streaming=True)
    def generator(self, how: str) -> Iterator[Any]:
        """A generator."""
        yield 1
        yield self._act(how)

    @rpc_method(non_blocking=True, streaming=True)
    async def async_generator(self, how: str) -> AsyncIterator[Any]:
        """An async generator."""
        yield 1
        if how == "wait":
            self.entered.set()
            while not self.gate.is_set():
                await aio.sleep(0.005)
            yield 7
        else:
            yield self._act(how)

    @rpc_method
    def hold(self) -> None:
        """Blocks on a lane: never local."""
        self.entered.set()
        self.gate.wait(_PATIENCE_S)


@dataclasses.dataclass
class Scene:
    """A served worker and a client of it."""

    path: str
    verb: str
    key: bytes
    worker: MatrixWorker
    server: RpcServer
    client: RpcClient
    #: The caller has its first item.
    got: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def method(self) -> str:
        """The worker's method that suits the verb."""
        return {"remote_async": "coroutine", "for": "generator", "async for": "async_generator"}.get(self.verb, "plain")


def _told(error: BaseException) -> str:
    if isinstance(error, RpcRemoteError):
        cause = type(error.cause).__name__ if error.cause is not None else "none"
        return f"RpcRemoteError {error.type_name.rpartition('.')[2]} '{error.message}' cause {cause}"
    return type(error).__name__


def _make(scene: Scene, call: Callable[[], Call[Any]], timeout_s: float | None = None) -> str:
    """Make the call by the verb; what came of it."""
    items: list[Any] = []
    before = scene.client.statistics()
    try:
        prepared = call()
        match scene.verb:
            case "remote":
                items.append(prepared.remote(timeout_s))
            case "remote_async":
                items.append(aio.run(_within(prepared.remote_async(timeout_s))))
            case "remote_future":
                items.append(prepared.remote_future(timeout_s).result(_PATIENCE_S))
            case "remote_oneway":
                prepared.remote_oneway()
                return _oneway(scene, before.oneway_failed + before.oneway_lost)
            case "for":
                for item in prepared.remote_streaming(timeout_s):
                    items.append(item)
                    scene.got.set()
            case _:
                aio.run(_within(_collect(scene, prepared, timeout_s, items)))
    except RpcError as error:
        return " ".join([*(f"item {item}" for item in items), _told(error)])
    except SystemExit:
        return "raw SystemExit"
    return " ".join("a function" if callable(item) else f"value {item}" for item in items)


async def _within(awaitable: Any) -> Any:
    return await aio.wait_for(awaitable, _PATIENCE_S)


async def _collect(scene: Scene, prepared: Call[Any], timeout_s: float | None, items: list[Any]) -> None:
    async for item in prepared.remote_streaming(timeout_s):
        items.append(item)
        scene.got.set()


def _oneway(scene: Scene, failed_before: int) -> str:
    """A one-way call tells nobody; the counters do."""
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        statistics = scene.client.statistics()
        if statistics.oneway_done + statistics.oneway_lost == statistics.oneway_sent:
            failed = statistics.oneway_failed + statistics.oneway_lost > failed_before
            return "not done, counted" if failed else "done"
        time.sleep(0.001)
    return "never confirmed"


def _plainly(scene: Scene, how: str) -> str:
    return _make(scene, lambda: scene.client.method(scene.method)(how))


def _in_flight(scene: Scene, meanwhile: Callable[[], None]) -> str:
    """Begin a call that waits inside its handler, do something, let the handler go on; what the caller saw."""
    told: list[str] = []
    caller = threading.Thread(target=lambda: told.append(_plainly(scene, "wait")))
    caller.start()
    scene.worker.entered.wait(_PATIENCE_S)
    if scene.verb in ("for", "async for"):
        scene.got.wait(_PATIENCE_S)
    other = threading.Thread(target=meanwhile)
    other.start()
    until_s = time.monotonic() + 0.05
    while time.monotonic() < until_s and other.is_alive():
        other.join(0.005)
    scene.worker.gate.set()
    caller.join(_PATIENCE_S)
    other.join(_PATIENCE_S)
    return told[0] if told else "hangs"


def _time_out(scene: Scene) -> str:
    if scene.path != "local":
        # The deadline is the handler's to miss, not the handshake's.
        scene.client.start()
    threading.Timer(5 * _SHORT_S, scene.worker.gate.set).start()
    told = _make(scene, lambda: scene.client.method(scene.method)("wait"), _SHORT_S)
    scene.worker.gate.set()
    return told


def _backpressure(scene: Scene) -> str:
    pending = scene.client.method("hold")().remote_future()
    scene.worker.entered.wait(_PATIENCE_S)
    told = _plainly(scene, "value")
    scene.worker.gate.set()
    pending.result(_PATIENCE_S)
    return told


def _lost(scene: Scene) -> str:
    """The server is replaced under a client that has used it: lost until ``reconnect``."""
    first = _make(dataclasses.replace(scene, verb="remote"), lambda: scene.client.method("plain")("value"))
    scene.server.shutdown()
    until_s = time.monotonic() + _PATIENCE_S
    while "lost" not in repr(scene.client) and time.monotonic() < until_s:
        time.sleep(0.001)
    with RpcServer(MatrixWorker(), scene.server.address, scene.key):
        lost = _plainly(scene, "value")
        scene.client.reconnect()
        return f"{first}, then {lost}, then {_plainly(scene, 'value')}"


def _wrong_key(scene: Scene) -> str:
    config = RpcConfig(handshake_timeout_s=0.3)
    other = RpcClient(scene.server.address, new_key(), config=config, fast_path=scene.path == "local")
    try:
        return _plainly(dataclasses.replace(scene, client=other), "value")
    finally:
        other.close()


_CHILD: Final = """
import sys, time
from rpc_local_registry import RpcServer
from rpc_local_registry._matrix import MatrixWorker
with RpcServer(MatrixWorker(), sys.argv[1], bytes.fromhex(sys.argv[2])) as server:
    print(server.address, flush=True)
    time.sleep(60)
"""


def _death(scene: Scene) -> str:
    """The process of the worker is killed while a call is in its handler."""
    if scene.path == "local":
        return "-"
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, _ADDRESSES[scene.path], scene.key.hex()], stdout=subprocess.PIPE, text=True
    )
    try:
        address = "" if child.stdout is None else child.stdout.readline().strip()
        with RpcClient(address, scene.key) as client:
            client.method("plain")("value").remote()
            killer = threading.Timer(0.2, child.kill)
            killer.start()
            return _plainly(dataclasses.replace(scene, client=client), "wait")
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def _closed(scene: Scene) -> str:
    _make(dataclasses.replace(scene, verb="remote"), lambda: scene.client.method("plain")("value"))
    scene.client.close()
    return _plainly(scene, "value")


def _bad_time(value: Any) -> Callable[[Scene], str]:
    def cell(scene: Scene) -> str:
        if scene.verb == "remote_oneway":
            return "-"
        return _make(scene, lambda: scene.client.method(scene.method)("value"), value)

    return cell


def _told_by(how: str) -> Callable[[Scene], str]:
    return lambda scene: _plainly(scene, how)


#: Outcome to how it is brought about.
OUTCOMES: Final[dict[str, Callable[[Scene], str]]] = {
    "value": _told_by("value"),
    "error": _told_by("error"),
    "subclass of RpcError": _told_by("subclass"),
    "handler's own backpressure": _told_by("own backpressure"),
    "handler's own time-out": _told_by("own time-out"),
    "SystemExit": _told_by("SystemExit"),
    "handler cancels": _told_by("cancellation"),
    "result that cannot travel": _told_by("no encoding"),
    "argument that cannot travel": lambda s: _make(s, lambda: s.client.method(s.method)(object())),
    "wrong arguments": lambda s: _make(s, lambda: s.client.method(s.method)("value", "one more")),
    "no such method": lambda s: _make(s, lambda: s.client.method("nothing")()),
    "name of 300 characters": lambda s: _make(s, lambda: s.client.method("n" * 300)()),
    "timeout_s nan": _bad_time(float("nan")),
    "timeout_s inf": _bad_time(float("inf")),
    "timeout_s 1e10": _bad_time(1e10),
    "deadline passed": _bad_time(0.0),
    "time-out in the handler": _time_out,
    "backpressure": _backpressure,
    "close in flight": lambda s: _in_flight(s, s.client.close),
    "server stops in flight": lambda s: _in_flight(s, s.server.shutdown),
    "peer dies in flight": _death,
    "closed client": _closed,
    "lost session": _lost,
    "wrong key": _wrong_key,
}

_DIRECT: Final = "a direct call cannot be interrupted; its deadline is checked on entry"
_OBJECTS: Final = "a direct call passes the very objects, whatever they are"
#: (verb, outcome) to why the local path differs there.
DIFFERENCES: Final[dict[tuple[str, str], str]] = {
    **{(verb, "result that cannot travel"): _OBJECTS for verb in VERBS if verb != "remote_oneway"},
    **{(verb, "argument that cannot travel"): _OBJECTS for verb in VERBS},
    **{(verb, "time-out in the handler"): _DIRECT for verb in ("remote", "remote_future", "for")},
    **{(verb, "peer dies in flight"): "the worker is in the caller's own process" for verb in VERBS},
    ("remote_oneway", "server stops in flight"): "a direct one-way call is done when it returns",
    ("remote_oneway", "wrong key"): "a direct call knows at once; over the socket the call is counted as lost",
}


def run_cell(verb: str, outcome: str, path: str) -> str:
    """What a caller sees; "-" where the outcome does not exist."""
    worker, key = MatrixWorker(), new_key()
    tight = RpcConfig(pending_calls_max=1) if outcome == "backpressure" else RpcConfig()
    address = _ADDRESSES[path]
    with RpcServer(worker, address, key) as server:
        client = RpcClient(server.address, key, config=tight, fast_path=path == "local")
        try:
            return OUTCOMES[outcome](Scene(path, verb, key, worker, server, client))
        finally:
            worker.gate.set()
            client.close()


def run_matrix() -> dict[tuple[str, str], dict[str, str]]:
    """All cells: (verb, outcome) to path to what the caller saw."""
    return {
        (verb, outcome): {path: run_cell(verb, outcome, path) for path in PATHS}
        for outcome in OUTCOMES
        for verb in VERBS
    }


def differences(cells: dict[tuple[str, str], dict[str, str]]) -> list[str]:
    """Cells whose paths disagree without a documented reason, and documented ones that agree after all."""
    found = []
    for key, told in cells.items():
        sockets = {told[path] for path in PATHS if path != "local" and path in told}
        equal = len(set(told.values())) == 1
        if len(sockets) > 1 or (not equal and key not in DIFFERENCES) or (equal and key in DIFFERENCES):
            found.append(f"{key[0]}, {key[1]}: {told}")
    return found


def matrix_table(cells: dict[tuple[str, str], dict[str, str]]) -> str:
    """The cells as text, one line each; where the local path differs both are shown, with the reason."""
    lines = [f"{'outcome':<28}{'verb':<16}what the caller sees on every path"]
    for (verb, outcome), told in cells.items():
        same = len(set(told.values())) == 1
        text = told["ipc"]
        if not same:
            text = f"local: {told['local']} | sockets: {text} ({DIFFERENCES.get((verb, outcome), '?')})"
        lines.append(f"{outcome:<28}{verb:<16}{text}")
    return "\n".join(lines)
