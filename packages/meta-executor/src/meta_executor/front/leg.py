"""One leg of a request: what it brings, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass

from meta_executor import wire
from meta_executor.wire import TokenLogprobs

UNREACHABLE = "UNREACHABLE"
CUT = "CUT"
MALFORMED = "MALFORMED"
#: What of a foreign message is repeated (characters).
ECHO_MAX = 500


class LegError(Exception):
    """A leg failed.

    Attributes:
        role: ``context`` or ``generation``.
        server: The instance's address.
        code: One of :mod:`meta_executor.wire`'s codes, or ``UNREACHABLE``, ``CUT``, ``MALFORMED``.
        message: For a person.
        status: HTTP status that the code stands for, if the instance gave one.
        field: The field at fault, if the instance named one.
        received: Whether the instance may have begun the work. False: it certainly has not.
    """

    def __init__(
        self,
        role: str,
        server: str,
        code: str,
        message: str,
        *,
        status: int | None = None,
        field: str | None = None,
        received: bool,
    ) -> None:
        message = message[:ECHO_MAX]
        super().__init__(f"{role} leg at {server}: {code}: {message}")
        self.role = role
        self.server = server
        self.code = code
        self.message = message
        self.status = status
        self.field = field
        self.received = received

    @staticmethod
    def refused(role: str, server: str, body: wire.ErrorBody, status: int | None = None) -> LegError:
        """What an instance's error says. 4xx and DRAINING are refusals before any memory was touched."""
        status = wire.STATUS_OF.get(body.error, 500) if status is None else status
        untouched = (400 <= status < 500 and status != wire.STATUS_OF[wire.CANCELLED]) or body.error == wire.DRAINING
        return LegError(role, server, body.error, body.message, status=status, field=body.field, received=not untouched)


def context_is_stale(error: LegError) -> bool:
    """Whether a generation instance refused because the context instance is not the one it was told of."""
    stale = error.code == wire.STALE_GENERATION and error.field == wire.CONTEXT_GENERATION
    return stale and error.role == "generation"


@dataclass(frozen=True, slots=True)
class Condition:
    """What an instance says of its health."""

    #: Why it cannot serve now, or does not say; "" while it can.
    why: str
    #: The lifetime that says so; None where it does not tell.
    generation: str | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The context leg's end: the prompt is computed. ``finish_reason`` is set when the first token ends the answer."""

    first_token: int
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    #: Of the first token, where the request asks for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Of the prompt's tokens behind the first, where the request asks for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the generation leg brought at once. The last one, and only it, has a ``finish_reason``. ``logprobs``: of the tokens,
    where the request asks for them; those of the first token come with the context leg."""

    tokens: list[int]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Of the prompt, found in the instance's prefix cache; with the first token, where there is no context leg.
    cached_tokens: int = 0
    #: Of the prompt's tokens behind the first, where the request asks for them; likewise.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
