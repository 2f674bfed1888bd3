"""One error tree of the engine room."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

#: What of a foreign file's content is repeated in an error (characters).
_ECHO_MAX = 300


class EngineError(Exception):
    """Base of what an engine raises."""


class ModelNotFoundError(EngineError, FileNotFoundError):
    """There is no model where the configuration points; the message says what was looked for. Nothing was loaded."""


class ModelFormatError(EngineError, ValueError):
    """The model's file is damaged or holds something that is not supported; the message names the file and the field."""


class StepError(EngineError):
    """The caller's step breaks the interface's contract (shape, range, missing activations). The engine stays usable."""


class OwnershipError(EngineError):
    """A block was used against its state; carries the story of that block. The pool is unchanged.

    Attributes:
        block_id: The block.
        story: What happened to it, oldest first.
    """

    def __init__(self, message: str, block_id: int, story: tuple[str, ...]) -> None:
        super().__init__(f"{message}; story of block {block_id}: {' | '.join(story) or 'none'}")
        self.block_id = block_id
        self.story = story


class KVPoolExhausted(EngineError):
    """Not enough free blocks now. Expected under load: nothing was allocated, try again after a release.

    Attributes:
        wanted: Blocks asked for (count).
        free: Blocks that were free (count).
    """

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} KV blocks wanted, {free} free")
        self.wanted = wanted
        self.free = free


@contextlib.contextmanager
def reading(where: str | os.PathLike[str]) -> Iterator[None]:
    """Reading a file of others: whatever its content leads to inside is one named error, with the cause kept.

    Raises:
        ModelFormatError: The content is not what is expected.
    """
    try:
        yield
    except EngineError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        text = str(error)[:_ECHO_MAX]
        raise ModelFormatError(f"{where}: {type(error).__name__}: {text}") from error
    except BaseException as error:
        # A panic of the tokenizers library is no Exception; it leaves that library usable.
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise ModelFormatError(f"{where}: {str(error)[:_ECHO_MAX]}") from error
