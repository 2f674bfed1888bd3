"""What went wrong on this rank, made into text that can travel. Nothing that a foreign exception does may fail in here."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from comm_broadcast._errors import BroadcastError, RankFailure

#: Characters of an error's text that are looked at: the first frame holds far fewer bytes.
_TEXT_MAX = 1 << 16
#: Characters of a value in a message.
_SHOWN_MAX = 200


@dataclass(frozen=True)
class Failure:
    """A failure of this rank.

    Attributes:
        cause: Type and message.
        details: The traceback.
        error: What was raised.
    """

    cause: str
    details: str
    error: BaseException

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Type, message and traceback, where they can be had.

        An exception's text is made by code that nobody knows. What it raises takes the text's place; an interrupt that comes
        meanwhile takes the exception's.
        """
        kind = _name(error)
        try:
            text = str(error)[:_TEXT_MAX]
            cause = f"{kind}: {text}" if text else kind
            details = "".join(traceback.format_exception(error))[-_TEXT_MAX:]
        except Exception as second:  # noqa: BLE001 - the text is lost, the failure is not
            return Failure(f"{kind} (its text cannot be made: {_name(second)})", "", error)
        except BaseException as interrupt:  # noqa: BLE001 - raised by whoever holds the failure
            return Failure(f"{kind} (interrupted while its text was made)", "", interrupt)
        return Failure(cause, details, error)

    @property
    def is_interrupt(self) -> bool:
        """Whether it is an interrupt (``KeyboardInterrupt``, ``SystemExit``), which stays itself on this rank."""
        return not isinstance(self.error, Exception)

    def report(self, rank: int, *, earlier: bool = False) -> RankFailure:
        """For an error that names this rank."""
        return RankFailure(rank, self.cause, self.details, earlier)

    def raised(self, rank: int) -> BaseException:
        """What this rank raises: the interrupt, or a ``BroadcastError`` with the cause."""
        if self.is_interrupt:
            return self.error
        raised = BroadcastError.of((self.report(rank),))
        raised.__cause__ = self.error
        return raised


def _name(error: BaseException) -> str:
    return type_name(type(error))


def type_name(kind: type) -> str:
    """The name of a class, whatever its metaclass says."""
    # A class may be called by an instance of somebody's subclass of str.
    return plain(type.__dict__["__name__"].__get__(kind))


def plain(text: str) -> str:
    """The same characters as a ``str`` without methods of somebody else's."""
    return str.encode(text, "utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def shown(value: object) -> str:
    """A value for a message, shortened. What its ``__repr__`` raises takes its place: a message must not fail."""
    try:
        return plain(repr(value))[:_SHOWN_MAX]
    except Exception as error:  # noqa: BLE001 - said in the message
        return f"a {type_name(type(value))} that cannot be shown ({_name(error)})"
