"""The one file that imports etcd3gw: a lease store on etcd v3 (extra ``etcd``).

The client blocks, so each call runs on a small thread pool of the store's own. Reads and writes go through the client's
calls; the watch reads the same HTTP stream itself, because the client's watcher ends silently when a chunk is not one whole
message and never tells of compaction or cancellation, and a watch that died quietly is the fault this package exists to
avoid.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from endpoint_lifecycle._discovery import Snapshot, StoreEvent
from endpoint_lifecycle._errors import StoreCompacted, StoreError
from endpoint_lifecycle._record import check_field

T = TypeVar("T")

_LINE_BYTES_MAX = 16 << 20


def _encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _range_end(prefix: str) -> str:
    """The first key after every key with this prefix."""
    raw = bytearray(prefix.encode())
    while raw and raw[-1] == 0xFF:
        raw.pop()
    if not raw:
        return _encode(b"\x00")
    raw[-1] += 1
    return _encode(bytes(raw))


class EtcdLeaseStore:
    """A lease store on etcd v3 over its JSON gateway.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        timeout_s: Bound of one call, seconds.
        client: A client made elsewhere (TLS, credentials); ``url`` is then for messages only.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:2379", *, timeout_s: float = 2.0, client: Etcd3Client | None = None
    ) -> None:
        check_field(timeout_s > 0, "timeout_s", "must be > 0")
        parts = urlsplit(url)
        check_field(parts.scheme in ("http", "https") and bool(parts.hostname), "url", f"is {url!r}")
        self.url = url
        self._timeout_s = timeout_s
        self._client = client or Etcd3Client(
            host=parts.hostname or "", port=parts.port or 2379, protocol=parts.scheme, timeout=timeout_s
        )
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="etcd")
        self._closed = False
        self._watches: set[_Watch] = set()

    async def _call(self, function: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.url}: the store was closed")

        def guarded() -> T:
            try:
                return function()
            except Etcd3Exception as error:
                raise StoreError(f"{self.url}: {type(error).__name__}: {error.detail_text or error}") from error
            except (requests.RequestException, OSError) as error:
                raise StoreError(f"{self.url}: {type(error).__name__}: {error}") from error
            except (KeyError, ValueError, TypeError) as error:
                raise StoreError(f"{self.url}: unexpected answer: {type(error).__name__}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._pool, guarded)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._client.post(self._client.get_url(path), json=body)
        if not isinstance(answer, dict):
            raise TypeError(f"{path} answered {type(answer).__name__}")
        return answer

    async def grant(self, ttl_s: float) -> int:
        """See LeaseStore. etcd counts whole seconds: rounded up."""
        ttl = max(1, -int(-ttl_s // 1))
        return await self._call(lambda: int(self._post("/lease/grant", {"TTL": ttl, "ID": 0})["ID"]))

    async def keep_alive(self, lease_id: int) -> bool:
        """See LeaseStore."""
        answer = await self._call(lambda: self._post("/lease/keepalive", {"ID": lease_id}))
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    async def revoke(self, lease_id: int) -> None:
        """See LeaseStore."""
        try:
            await self._call(lambda: self._post("/lease/revoke", {"ID": lease_id}))
        except StoreError as error:
            if "lease not found" not in str(error):
                raise

    async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
        """See LeaseStore: one transaction."""
        compare = []
        if if_revision is not None:
            compare.append({"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(if_revision)})
        put = {"request_put": {"key": _encode(key), "value": _encode(value), "lease": str(lease_id)}}
        answer = await self._call(lambda: self._post("/kv/txn", {"compare": compare, "success": [put], "failure": []}))
        return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    async def compare_and_delete(self, key: str, revision: int) -> bool:
        """See LeaseStore: one transaction."""
        body = {
            "compare": [{"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}],
            "success": [{"request_delete_range": {"key": _encode(key)}}],
            "failure": [],
        }
        answer = await self._call(lambda: self._post("/kv/txn", body))
        return bool(answer.get("succeeded"))

    async def snapshot(self, prefix: str) -> Snapshot:
        """See ServerSource."""
        body = {"key": _encode(prefix), "range_end": _range_end(prefix)}
        answer = await self._call(lambda: self._post("/kv/range", body))
        try:
            found = {_decode(kv["key"]).decode(): kv for kv in answer.get("kvs", ())}
            items = {key: _decode(kv.get("value", "")) for key, kv in found.items()}
            revisions = {key: int(kv["mod_revision"]) for key, kv in found.items()}
            return Snapshot(int(answer["header"]["revision"]), items, revisions)
        except (KeyError, ValueError) as error:
            raise StoreError(f"{self.url}: unexpected answer: {error}") from error

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """See ServerSource. An empty sequence first says that the watch stands."""
        watch = _Watch(self, prefix, after_revision, asyncio.get_running_loop())
        self._watches.add(watch)
        watch.thread.start()
        try:
            while True:
                item = await watch.queue.get()
                if isinstance(item, StoreError):
                    raise item
                yield item
        finally:
            watch.stop()
            self._watches.discard(watch)

    async def aclose(self) -> None:
        """See LeaseStore. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for watch in tuple(self._watches):
            watch.stop()
        session = self._client.session
        await asyncio.get_running_loop().run_in_executor(None, self._shutdown, session)

    def _shutdown(self, session: requests.Session) -> None:
        self._pool.shutdown(wait=True)
        session.close()


class _Watch:
    """One HTTP stream read by one thread, handed to the loop line by line; errors are handed over too, then it ends."""

    def __init__(
        self, store: EtcdLeaseStore, prefix: str, after_revision: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.queue: asyncio.Queue[Sequence[StoreEvent] | StoreError] = asyncio.Queue()
        self._store = store
        self._loop = loop
        self._stopped = threading.Event()
        self._response: requests.Response | None = None
        self._lock = threading.Lock()
        self._request = {
            "create_request": {
                "key": _encode(prefix),
                "range_end": _range_end(prefix),
                "start_revision": str(after_revision + 1),
            }
        }
        self.thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)

    def _hand_over(self, item: Sequence[StoreEvent] | StoreError) -> None:
        if self._stopped.is_set():
            return
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            self._stopped.set()  # the loop is closed: nobody listens any more

    def _run(self) -> None:
        url = self._store.url
        try:
            self._read()
            self._hand_over(StoreError(f"{url}: the watch ended"))
        except StoreError as error:
            self._hand_over(error)
        except (Etcd3Exception, requests.RequestException, OSError, AttributeError) as error:
            # AttributeError: urllib3 drops its socket under a reader that stop() interrupts.
            self._hand_over(StoreError(f"{url}: watch: {type(error).__name__}: {error}"))
        except (KeyError, ValueError, TypeError) as error:
            self._hand_over(StoreError(f"{url}: watch: unexpected message: {type(error).__name__}: {error}"))

    def _read(self) -> None:
        client = self._store._client
        # A stream of its own connection: the shared session's pool would hand a half-read one to the next call.
        with requests.Session() as session:
            session.verify, session.cert = client.session.verify, client.session.cert
            session.headers.update(client.session.headers)
            response = session.post(
                client.get_url("/watch"), json=self._request, stream=True, timeout=(self._store._timeout_s, None)
            )
            with self._lock:
                self._response = response
            try:
                if response.status_code != requests.codes["ok"]:
                    raise StoreError(f"{self._store.url}: watch: HTTP {response.status_code}: {response.text[:200]}")
                pending = b""
                for chunk in response.iter_content(chunk_size=None):
                    if self._stopped.is_set():
                        return
                    pending += chunk
                    *lines, pending = pending.split(b"\n")
                    if len(pending) > _LINE_BYTES_MAX:
                        raise StoreError(f"{self._store.url}: watch: a message of more than {_LINE_BYTES_MAX} bytes")
                    for line in lines:
                        if line.strip():
                            self._message(json.loads(line))
            finally:
                response.close()

    def _message(self, message: dict[str, Any]) -> None:
        if "error" in message:
            raise StoreError(f"{self._store.url}: watch: {message['error']}")
        result = message["result"]
        if int(result.get("compact_revision", 0)):
            raise StoreCompacted(f"{self._store.url}: compacted at {result['compact_revision']}")
        if result.get("canceled"):
            raise StoreError(f"{self._store.url}: watch cancelled: {result.get('cancel_reason', '')}")
        events = []
        for event in result.get("events", ()):
            kv = event["kv"]
            value = None if event.get("type") == "DELETE" else _decode(kv.get("value", ""))
            events.append(StoreEvent(_decode(kv["key"]).decode(), value, int(kv["mod_revision"])))
        if events or result.get("created"):
            self._hand_over(events)

    def stop(self) -> None:
        """End the stream; the thread follows by itself."""
        self._stopped.set()
        with self._lock:
            response = self._response
        if response is None:
            return
        connection = getattr(response.raw, "_connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            try:
                sock.shutdown(2)  # wakes the reader, which closes everything itself
            except OSError:
                pass  # it is closed already, which is what is wanted
