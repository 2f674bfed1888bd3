"""Asks a service: its front, or one instance that was started alone. Every failure is one :class:`ObserveError`."""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from meta_executor import wire
from meta_executor.listener.tls import pinned_context
from meta_executor.observe.request_trace import ToldRequest
from meta_executor.observe.top import InstanceSample, Sample, values_of

#: One question is answered within this time (s).
_ASK_S = 5.0


class ObserveError(Exception):
    """The service cannot be looked at; the message is one line that says what was asked, and why not."""


@dataclass(frozen=True)
class Address:
    """A service as ``/server_info`` names it.

    Attributes:
        front: What was asked is a front; otherwise it is an instance.
        instances: (owner_id, role, url, what the front knows of it) of every instance.
    """

    front: bool
    instances: tuple[tuple[str, str, str, str], ...]


class ServiceClient:
    """Use as a context manager.

    Args:
        url: Of a front, or of an instance.
        key: The run's key (hex), "" without one.
        api_key: An operator's API key, "" without one: enough for a front, and for an instance of a service that asks for keys.
        certificate_file: The front's own certificate; None: one that this machine trusts, where it speaks TLS.
        clock: Monotonic time (s).
        transport: For tests.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        api_key: str = "",
        certificate_file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._clock = clock
        self._http = httpx.Client(
            headers={
                **({wire.KEY_HEADER: key} if key else {}),
                **({"authorization": f"Bearer {api_key}"} if api_key else {}),
            },
            timeout=_ASK_S,
            trust_env=False,
            verify=pinned_context(certificate_file) if certificate_file else True,
            transport=transport,
        )
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="observe")

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End every connection. Idempotent."""
        self._pool.shutdown()
        self._http.close()

    def address(self) -> Address:
        """Who answers there.

        Raises:
            ObserveError: Nobody, or nobody of ours.
        """
        told = self._get(self._url, "/server_info")
        try:
            data = msgspec.json.decode(told)
            if data["role"] == "front":
                servers = tuple((s["owner_id"], s["role"], s["url"], s["status"]) for s in data["servers"])
                return Address(True, servers)
            return Address(False, ((data["owner_id"], data["role"], self._url, data["state"].lower()),))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise ObserveError(f"{self._url}/server_info is not one of meta-executor's") from error

    def routing(self, count_max: int = wire.ROUTING_SHOWN_MAX) -> wire.ServiceRouting:
        """The last decisions, of the front and its instances, or of the one instance that was asked.

        Raises:
            ObserveError: They cannot be had.
        """
        path = f"/debug/routing?limit={count_max}"
        front = self.address().front
        told = self._get(self._url, path)
        try:
            if front:
                return msgspec.json.decode(told, type=wire.ServiceRouting)
            inside = msgspec.json.decode(told, type=wire.InstanceRouting)
        except msgspec.DecodeError as error:
            raise ObserveError(f"{self._url}{path}: {error}") from error
        return wire.ServiceRouting(policy="", decided=0, decisions=[], instances=[inside])

    def request(self, request_id: str) -> ToldRequest:
        """What a front knows of one of its last requests.

        Args:
            request_id: The client's name for it, or the id of an answer.

        Raises:
            ObserveError: It cannot be had, or is not known any more.
        """
        path = f"/debug/requests/{urllib.parse.quote(request_id, safe='')}"
        told = self._get(self._url, path)
        try:
            return msgspec.json.decode(told, type=ToldRequest)
        except msgspec.DecodeError as error:
            raise ObserveError(f"{self._url}{path}: {error}") from error

    def sample(self) -> Sample:
        """Every metric now. An instance that cannot be asked is in it with the reason.

        Raises:
            ObserveError: The address that was given does not answer.
        """
        address = self.address()
        waiting = [self._pool.submit(self._instance, *known) for known in address.instances]
        front = values_of(self._get(self._url, "/metrics").decode()) if address.front else None
        health = self._health(self._url) if address.front else ""
        return Sample(
            at_s=self._clock(),
            url=self._url,
            health=health,
            front=None if front is None else front.totals,
            instances=tuple(future.result() for future in waiting),
        )

    def _instance(self, owner_id: str, role: str, url: str, status: str) -> InstanceSample:
        try:
            health = self._health(url)
            values = values_of(self._get(url, "/metrics").decode())
        except ObserveError as error:
            return InstanceSample(owner_id, role, status=f"gone: {error}", totals={}, ranks={})
        return InstanceSample(owner_id, role, status=health or status, totals=values.totals, ranks=values.ranks)

    def _health(self, url: str) -> str:
        response = self._response(url, "/health")
        try:
            told: Any = msgspec.json.decode(response.content)
            return str(told["status"])
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise ObserveError(f"{url}/health: HTTP {response.status_code}, not one of meta-executor's") from error

    def _get(self, url: str, path: str) -> bytes:
        response = self._response(url, path)
        if response.status_code in (401, 403):
            raise ObserveError(
                f"{url}{path} wants the run's key or an operator's: name the run's folder, or set META_EXECUTOR_API_KEY"
            )
        if response.status_code != 200:
            raise ObserveError(f"{url}{path} answered HTTP {response.status_code}: {response.text[:200]}")
        return response.content

    def _response(self, url: str, path: str) -> httpx.Response:
        try:
            return self._http.get(f"{url}{path}")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ObserveError(f"{url} cannot be asked: {error or type(error).__name__}") from error
