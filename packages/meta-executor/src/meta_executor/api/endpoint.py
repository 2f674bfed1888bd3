"""The endpoint of an instance: may this request come in, and what does ``/server_info`` say.

In the worker's own process the record belongs to an ``endpoint_lifecycle.EndpointOwner``. A proxy in a process of its own
holds a copy of the published record, which never changes under its generation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from endpoint_lifecycle import Draining, EndpointOwner, NotReady, StaleGeneration
from meta_executor import wire


class Refused(Exception):
    """Not admitted; nothing was touched. ``body`` says why."""

    def __init__(self, body: wire.ErrorBody) -> None:
        super().__init__(body.message)
        self.body = body


class Endpoint(Protocol):
    """What the API server needs."""

    #: Where the front's stream ends, once it does.
    service_address: str

    def info(self) -> wire.ServerInfo:
        """The record now."""
        ...

    def start_draining(self) -> None:
        """No new request from now on. Idempotent."""
        ...


def _stale(expected: str, live: str | None) -> Refused:
    return Refused(
        wire.ErrorBody(
            error=wire.STALE_GENERATION,
            message=f"endpoint_generation {expected!r} is not the live one",
            field="endpoint_generation",
            endpoint_generation=live,
        )
    )


class OwnedEndpoint:
    """Over the owner, in its process.

    Args:
        owner: The owner's machine.
        info: Everything of the record that the owner does not know; ``ready``, ``state``, ``generation`` and the addresses are
            filled from the owner.
    """

    def __init__(self, owner: EndpointOwner, info: wire.ServerInfo) -> None:
        self._owner = owner
        self._info = info
        self.service_address = ""
        #: Told when a drain begins, in whichever thread it does.
        self.on_draining: Callable[[], None] = lambda: None

    def admit(self, expected_generation: str) -> AbstractContextManager[object]:
        """Let a request in that was meant for this generation.

        Raises:
            Refused: It was meant for another one, or nothing is published, or this one is draining.
        """
        try:
            return self._owner.admit(expected_generation)
        except StaleGeneration as error:
            raise _stale(expected_generation, self._owner.generation) from error
        except Draining as error:
            raise Refused(wire.ErrorBody(error=wire.DRAINING, message=str(error))) from error
        except NotReady as error:
            raise Refused(wire.ErrorBody(error=wire.DRAINING, message=str(error))) from error

    def info(self) -> wire.ServerInfo:
        """See :class:`Endpoint`."""
        record = self._owner.record()
        state = self._owner.state.name
        if record is None:
            # Nothing that an estimation runtime has bound is ever shown.
            return wire.ServerInfo(
                ready=False,
                state=state,
                role=self._info.role,
                owner_id=self._info.owner_id,
                instance_id=self._info.instance_id,
            )
        return msgspec.structs.replace(
            self._info,
            ready=self._owner.ready,
            state=state,
            generation=record.generation,
            control_addresses=list(record.control_addresses),
            service_address=self.service_address,
        )

    def start_draining(self) -> None:
        """See :class:`Endpoint`."""
        if self._owner.state.name == "PUBLISHED":
            self._owner.start_draining()
            self.on_draining()


class CopiedEndpoint:
    """Over a copy of the published record, in another process."""

    def __init__(self, info: wire.ServerInfo) -> None:
        self._info = info
        self._draining = False
        self.service_address = ""

    def info(self) -> wire.ServerInfo:
        """See :class:`Endpoint`."""
        info = msgspec.structs.replace(self._info, service_address=self.service_address)
        return msgspec.structs.replace(info, ready=False, state="DRAINING") if self._draining else info

    def start_draining(self) -> None:
        """See :class:`Endpoint`."""
        self._draining = True
