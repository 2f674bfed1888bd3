"""Who asks: API keys from a file, the run's own key, and what each path wants.

    need         without a key file      with a key file
    OPEN         everybody               everybody
    CLIENT       everybody               any key of the file, the run's key
    STATISTICS   everybody               an operator's key, the run's key
    OPERATOR     the run's key           an operator's key, the run's key
    RUN          the run's key           the run's key

A path that is not in the listener's table needs a CLIENT, also where there is no route: nobody without a key learns which
paths exist. The run's key is in the run's folder, for its user; it comes in a header of its own, an API key as
``Authorization: Bearer KEY``.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from starlette.types import ASGIApp, Receive, Scope, Send

from meta_executor import wire
from meta_executor.listener.bounds import Ledger, Refusal, Worded, client_of
from meta_executor.private_files import NotPrivateError, open_own_file

_LOG = logging.getLogger("meta_executor.access")
_KEY_HEADER = wire.KEY_HEADER.encode()
_KEY_LENGTH_MIN = 24
_FILE_BYTES_MAX = 1 << 20
#: How often the file is looked at while keys are asked for (s).
_LOOK_S = 2.0
# Matched against one word of a file of ours.
# A name is shorter than every key: a key that stands where a name belongs is refused, and never shown as one.
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{_KEY_LENGTH_MIN - 1}}}")
_KEY = re.compile(rf"[!-~]{{{_KEY_LENGTH_MIN},512}}")
#: Under this key a request's ``scope["state"]`` has its :class:`Caller`.
CALLER = "caller"


class Need(Enum):
    """What a path wants; see the module."""

    OPEN = "open"
    CLIENT = "client"
    STATISTICS = "statistics"
    OPERATOR = "operator"
    RUN = "run"


class KeyFileError(Exception):
    """The file of API keys cannot be used. The message names file and line and repeats nothing of the file: in a damaged
    one any word may be part of a key."""


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: Of the API key; "" where no key was asked for. What belongs to one name is not shown to another.
        address: The client's, as the bounds count it.
        operator: May see what concerns all clients.
        run: Had the run's key.
    """

    name: str = ""
    address: str = ""
    operator: bool = False
    run: bool = False

    @property
    def account(self) -> str:
        """Under which its requests are counted."""
        return f"key {self.name}" if self.name else self.address


@dataclass(frozen=True)
class _Key:
    name: str
    digest: bytes
    operator: bool


class KeyFile:
    """API keys: per line a name, a key, and for an operator the word ``operator``; a line that begins
    with ``#`` is a comment.

    Looked at again when the file changes, so that a key can be given or taken away while the service runs. A change that
    cannot be used is logged, and the keys before it stay.

    Args:
        path: The file; of this user (or root), not readable or writable by others.
        clock: Monotonic time (s).

    Raises:
        KeyFileError: It cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._path = os.fspath(path)
        self._clock = clock
        self._keys, self._seen = self._read()
        self._looked_s = clock()

    def find(self, given: bytes) -> _Key | None:
        """The key that was given. Takes the same time whichever of them it is, and whether it is one."""
        if self._clock() - self._looked_s >= _LOOK_S:
            self.refresh()
        digest = hashlib.sha256(given).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def refresh(self) -> bool:
        """Read the file again if it has changed. Whether the keys are new ones."""
        self._looked_s = self._clock()
        try:
            if _identity(os.stat(self._path)) == self._seen:
                return False
            self._keys, self._seen = self._read()
        except (OSError, KeyFileError) as error:
            _LOG.error("api_keys_file: the keys stay as they were: %s", error)
            return False
        _LOG.warning("api_keys_file: %d keys, %s", len(self._keys), ", ".join(key.name for key in self._keys))
        return True

    def _read(self) -> tuple[tuple[_Key, ...], tuple[int, ...]]:
        try:
            descriptor = open_own_file(self._path, root_too=True)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if stat.S_IMODE(status.st_mode) & (stat.S_IRGRP | stat.S_IROTH) and status.st_uid == os.getuid():
                    raise KeyFileError(f"{self._path} may be read by others; chmod 600 it")
                text = file.read(_FILE_BYTES_MAX + 1)
        except (OSError, NotPrivateError) as error:
            raise KeyFileError(f"{self._path}: {error.strerror if isinstance(error, OSError) else error}") from error
        if len(text) > _FILE_BYTES_MAX:
            raise KeyFileError(f"{self._path} is larger than {_FILE_BYTES_MAX} bytes")
        return keys_of(text, self._path), _identity(status)


def keys_of(text: bytes, path: str) -> tuple[_Key, ...]:
    """The keys of a file's text.

    Raises:
        KeyFileError: A line is not a name and a key; two have the same; there is none.
    """
    keys: dict[str, _Key] = {}
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        at = f"{path} line {number}"
        if len(words) not in (2, 3) or (len(words) == 3 and words[2] != "operator"):
            raise KeyFileError(f"{at}: want a name, a key, and perhaps the word operator")
        name, key = words[:2]
        if not _NAME.fullmatch(name):
            raise KeyFileError(f"{at}: a name has 1 to {_KEY_LENGTH_MIN - 1} of A-Z a-z 0-9 . _ -")
        if not _KEY.fullmatch(key):
            raise KeyFileError(f"{at}: the key must have {_KEY_LENGTH_MIN} to 512 visible ASCII characters")
        digest = hashlib.sha256(key.encode()).digest()
        earlier = names.get(name) or digests.get(digest)
        if earlier:
            raise KeyFileError(f"{at}: the {'name' if name in names else 'key'} of line {earlier} is there twice")
        names[name] = digests[digest] = number
        keys[name] = _Key(name, digest, len(words) == 3)
    if not keys:
        raise KeyFileError(f"{path} has no key")
    return tuple(keys.values())


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Access:
    """Decides who may.

    Args:
        run_key: The run's key, hex.
        keys: API keys; None: none are asked for.
    """

    def __init__(self, run_key: str, keys: KeyFile | None = None) -> None:
        self._run_key = run_key.encode()
        self.keys = keys

    def caller(self, headers: Iterable[tuple[bytes, bytes]], address: str) -> Caller:
        """Who says so with these headers."""
        run = False
        bearer = None
        for name, value in headers:
            if name == _KEY_HEADER:
                run = hmac.compare_digest(value, self._run_key)
            elif name == b"authorization" and value[:7].lower() == b"bearer ":
                bearer = value[7:].strip()
        if run:
            return Caller("", address, operator=True, run=True)
        if self.keys is None or bearer is None:
            return Caller("", address)
        key = self.keys.find(bearer)
        return Caller("", address) if key is None else Caller(key.name, address, key.operator)

    def may(self, caller: Caller, need: Need) -> bool:
        """Whether a caller has what a path wants."""
        if need is Need.OPEN or caller.run:
            return True
        if need is Need.RUN:
            return False
        if need is Need.OPERATOR or (need is Need.STATISTICS and self.keys is not None):
            return caller.operator
        return self.keys is None or bool(caller.name)


class Guard:
    """ASGI middleware: lets requests through to whom their path allows it, and says in ``scope["state"]`` who asks.

    Args:
        app: What is guarded.
        access: Decides.
        need_of: What a path wants.
        worded: How this listener words an error.
        ledger: Counts refusals.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        need_of: Callable[[str], Need],
        worded: Worded,
        ledger: Ledger,
    ) -> None:
        self._app = app
        self._access = access
        self._need_of = need_of
        self._worded = worded
        self._ledger = ledger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it before its body is read."""
        if scope["type"] != "http":
            return
        client = scope.get("client")
        caller = self._access.caller(scope["headers"], client_of(client[0] if client else None))
        need = self._need_of(scope["path"])
        if self._access.may(caller, need):
            scope.setdefault("state", {})[CALLER] = caller
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(caller, need)
        body = self._worded(refusal.status, refusal.code, refusal.message)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, caller: Caller, need: Need) -> Refusal:
        if caller.name and need in (Need.OPERATOR, Need.STATISTICS):
            return self._ledger.refuse(Refusal(403, "forbidden", "this path is for operators' keys"))
        if need is Need.RUN or self._access.keys is None:
            return self._ledger.refuse(Refusal(401, "unauthorized", f"{wire.KEY_HEADER} is not this run's"))
        return self._ledger.refuse(
            Refusal(401, "unauthorized", "want an API key of this service: Authorization: Bearer KEY")
        )


def table(needs: Mapping[str, Need], *, prefixes: Mapping[str, Need] | None = None) -> Callable[[str], Need]:
    """What a path wants, by its name or its beginning; CLIENT for every other."""

    def need_of(path: str) -> Need:
        found = needs.get(path)
        if found is None:
            found = next((need for prefix, need in (prefixes or {}).items() if path.startswith(prefix)), Need.CLIENT)
        return found

    return need_of
