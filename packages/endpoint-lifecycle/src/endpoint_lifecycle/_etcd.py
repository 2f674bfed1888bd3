"""The one file that imports etcd3gw: etcd v3 over its JSON gateway, blocking. ``_asyncio_etcd.py`` makes a store of it.

Reads and writes go through the client's own calls; the watch reads the same HTTP stream itself, because the client's watcher
ends silently when a chunk is not one whole message and never tells of compaction or cancellation, and a watch that died
quietly is the fault this package exists to avoid.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from urllib3.exceptions import ReadTimeoutError

from endpoint_lifecycle._discovery import Snapshot, StoreEvent
from endpoint_lifecycle._errors import StoreCompacted, StoreError
from endpoint_lifecycle._record import check_field

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


class EtcdClient:
    """What a lease store needs of etcd, as blocking calls; safe from several threads. Errors are StoreError.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        timeout_s: Bound of one call, seconds.
        client: A client made elsewhere (TLS, credentials); ``url`` is then for messages only.
    """

    def __init__(self, url: str, timeout_s: float, client: Etcd3Client | None = None) -> None:
        check_field(timeout_s > 0, "timeout_s", "must be > 0")
        parts = urlsplit(url)
        check_field(parts.scheme in ("http", "https") and bool(parts.hostname), "url", f"is {url!r}")
        self.url = url
        self.timeout_s = timeout_s
        if client is None:
            client = Etcd3Client(
                host=parts.hostname or "", port=parts.port or 2379, protocol=parts.scheme, timeout=timeout_s
            )
            client.session.trust_env = False  # a proxy of the environment is no part of the control plane
        self.client = client

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except Etcd3Exception as error:
            raise StoreError(f"{self.url}: {type(error).__name__}: {error.detail_text or error}") from error
        except (requests.RequestException, OSError) as error:
            raise StoreError(f"{self.url}: {type(error).__name__}: {error}") from error
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"{self.url}: unexpected answer: {type(error).__name__}: {error}") from error

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One call of the gateway, bounded by ``timeout_s``."""
        with self._mapped():
            answer = self.client.post(self.client.get_url(path), json=body)
            if not isinstance(answer, dict):
                raise TypeError(f"{path} answered {type(answer).__name__}")
            return answer

    def grant(self, ttl_s: float) -> int:
        """A new lease. etcd counts whole seconds: rounded up."""
        answer = self.post("/lease/grant", {"TTL": max(1, -int(-ttl_s // 1)), "ID": 0})
        with self._mapped():
            return int(answer["ID"])

    def keep_alive(self, lease_id: int) -> bool:
        """Whether the lease lives on."""
        answer = self.post("/lease/keepalive", {"ID": lease_id})
        with self._mapped():
            return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease_id: int) -> None:
        """End a lease; an unknown one is no error."""
        try:
            self.post("/lease/revoke", {"ID": lease_id})
        except StoreError as error:
            if "lease not found" not in error.message:
                raise

    def _transact(self, key: str, revision: int | None, action: dict[str, Any]) -> int | None:
        compare = []
        if revision is not None:
            compare.append({"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)})
        answer = self.post("/kv/txn", {"compare": compare, "success": [action], "failure": []})
        with self._mapped():
            return int(answer["header"]["revision"]) if answer.get("succeeded") else None

    def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None) -> int | None:
        """Set under a lease, if the key was last changed at that revision; one transaction."""
        put = {"request_put": {"key": _encode(key), "value": _encode(value), "lease": str(lease_id)}}
        return self._transact(key, if_revision, put)

    def compare_and_delete(self, key: str, revision: int) -> bool:
        """Delete, if the key was last changed at that revision; one transaction."""
        return self._transact(key, revision, {"request_delete_range": {"key": _encode(key)}}) is not None

    def snapshot(self, prefix: str) -> Snapshot:
        """Everything under a prefix, as of one revision."""
        answer = self.post("/kv/range", {"key": _encode(prefix), "range_end": _range_end(prefix)})
        with self._mapped():
            found = {_decode(kv["key"]).decode(): kv for kv in answer.get("kvs", ())}
            items = {key: _decode(kv.get("value", "")) for key, kv in found.items()}
            revisions = {key: int(kv["mod_revision"]) for key, kv in found.items()}
            return Snapshot(int(answer["header"]["revision"]), items, revisions)

    def close(self) -> None:
        """Give connections back."""
        self.client.session.close()


class EtcdWatch:
    """One watch: ``read`` blocks in a thread of the caller's and hands over what comes, until ``stop`` or an error.

    Args:
        client: Whose etcd.
        prefix, after_revision: What to watch from where.
        idle_s: End when nothing came for so long: a peer that vanished without a word looks just like a quiet one, and
            listing again tells them apart.
        hand_over: Called on the reading thread with each batch of events; an empty one says that the watch stands.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        after_revision: int,
        idle_s: float,
        hand_over: Callable[[Sequence[StoreEvent]], None],
    ) -> None:
        self._owner = client
        self._idle_s = idle_s
        self._hand_over = hand_over
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

    def read(self) -> None:
        """Read until nothing came for ``idle_s``.

        Raises:
            StoreCompacted: The revision is gone: list again.
            StoreError: Anything else; also when the stream ended.
        """
        # urllib3 drops its socket under a reader that stop() interrupts: an AttributeError, mapped like the rest.
        with self._owner._mapped():
            try:
                self._read()
            except requests.ConnectionError as error:
                if error.args and isinstance(error.args[0], ReadTimeoutError):
                    return
                raise
        raise StoreError(f"{self._owner.url}: the watch ended")

    def _read(self) -> None:
        client = self._owner.client
        # A session of its own: the shared one's pool would hand a half-read connection to the next call.
        with requests.Session() as session:
            session.verify, session.cert = client.session.verify, client.session.cert
            session.headers.update(client.session.headers)
            response = session.post(
                client.get_url("/watch"), json=self._request, stream=True, timeout=(self._owner.timeout_s, self._idle_s)
            )
            with self._lock:
                self._response = response
            try:
                if response.status_code != requests.codes["ok"]:
                    raise StoreError(f"{self._owner.url}: watch: HTTP {response.status_code}: {response.text[:200]}")
                pending = b""
                for chunk in response.iter_content(chunk_size=None):
                    if self._stopped.is_set():
                        return
                    pending += chunk
                    *lines, pending = pending.split(b"\n")
                    if len(pending) > _LINE_BYTES_MAX:
                        raise StoreError(f"{self._owner.url}: watch: a message of more than {_LINE_BYTES_MAX} bytes")
                    for line in lines:
                        if line.strip():
                            self._message(json.loads(line))
            finally:
                response.close()

    def _message(self, message: dict[str, Any]) -> None:
        if "error" in message:
            raise StoreError(f"{self._owner.url}: watch: {message['error']}")
        result = message["result"]
        if int(result.get("compact_revision", 0)):
            raise StoreCompacted(f"{self._owner.url}: compacted at {result['compact_revision']}")
        if result.get("canceled"):
            raise StoreError(f"{self._owner.url}: watch cancelled: {result.get('cancel_reason', '')}")
        events = []
        for event in result.get("events", ()):
            kv = event["kv"]
            value = None if event.get("type") == "DELETE" else _decode(kv.get("value", ""))
            events.append(StoreEvent(_decode(kv["key"]).decode(), value, int(kv["mod_revision"])))
        if events or result.get("created"):
            self._hand_over(events)

    def stop(self) -> None:
        """End the stream; ``read`` returns soon after, by an error."""
        self._stopped.set()
        with self._lock:
            response = self._response
        connection = getattr(response.raw, "_connection", None) if response is not None else None
        sock = getattr(connection, "sock", None)
        if sock is not None:
            try:
                sock.shutdown(2)  # wakes the reader, which closes everything itself
            except OSError:
                pass  # it is closed already, which is what is wanted
