"""The package's error tree. Every class says whether the object that raised it is still usable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pp_agreement._events import Fault, Key


class AgreementError(Exception):
    """Base of everything this package raises, except :class:`WouldBlock`."""


class ConfigurationError(AgreementError, ValueError):
    """A domain, configuration or address is impossible; ``field`` names it. Nothing was constructed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class NegotiationError(AgreementError):
    """The ranks' contributions do not agree. Raised on every rank alike, after the exchange has completed."""

    def __init__(self, rank: int, field: str, message: str) -> None:
        super().__init__(f"rank {rank}, {field}: {message}")
        self.rank = rank
        self.field = field


class LocalProtocolError(AgreementError):
    """The caller broke the contract. Nothing changed; the agreement stays usable."""

    def __init__(
        self, message: str, *, rank: int, key: Key | None = None, state: str = "", story: Sequence[str] = ()
    ) -> None:
        text = f"rank {rank}: {message}"
        if key is not None:
            text += f" [request {key.request_id}, incarnation {key.incarnation}, attempt {key.attempt}; {state}]"
        if story:
            text += "\n  " + "\n  ".join(story)
        super().__init__(text)
        self.rank = rank
        self.key = key
        self.state = state
        self.story = tuple(story)


class ConcurrentCallError(AgreementError):
    """A call came while another one of the same agreement was running. It changed nothing; one thread uses an agreement.

    Raised in a signal handler and not caught there, it breaks the interrupted call off, and the domain stops.
    """


class RemoteProtocolError(AgreementError):
    """A peer broke the contract. The core reports it as a ``Fault``; codecs raise it for bytes that are no frame."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message if rank is None else f"rank {rank}: {message}")
        self.rank = rank


class DomainStopped(AgreementError):
    """The domain has stopped; ``fault`` is the first diagnosis. Only ``poll``, ``evidence`` and ``close`` still work."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"domain stopped: {fault.code.name}: {fault.detail}")
        self.fault = fault


class TransportError(AgreementError):
    """A transport failed for good while talking to ``rank``; the cause is kept. The domain stops."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message if rank is None else f"rank {rank}: {message}")
        self.rank = rank


class MissingLibraryError(AgreementError, ImportError):
    """An adapter's library is not installed or cannot be loaded; says what to install. The rest of the package works."""


class WouldBlock(Exception):
    """No credit or no send slot now. Nothing changed; try again after a poll."""
