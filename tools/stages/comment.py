"""Comment lines such as ``/bot run --disable-fail-fast --stage-list "A, B"`` as the runner's own arguments."""

from __future__ import annotations

import shlex

from .errors import StageError, nearest

_COMMANDS = ("run", "kill", "skip", "reuse-pipeline", "help")


def arguments_of_comment(text: str) -> list[str]:
    """The runner's arguments for the first ``/bot`` line of a comment.

    Raises:
        StageError: There is no such line, its quotes are unbalanced, or its command is not ``run``.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("/bot")]
    if not lines:
        raise StageError(f"no /bot line in {text[:80]!r}")
    try:
        words = shlex.split(lines[0])
    except ValueError as error:
        raise StageError(f"{lines[0]!r}: {error}") from error
    if words[0] != "/bot":
        raise StageError(f"{words[0]!r} is no command; did you mean /bot run?")
    if len(words) < 2:
        raise StageError("/bot wants a command, such as /bot run")
    if words[1] not in _COMMANDS:
        raise StageError(f"/bot {words[1]!r} is no command{nearest(words[1], _COMMANDS)}")
    if words[1] != "run":
        raise StageError(f"/bot {words[1]} needs a pipeline; here only /bot run does something")
    return words[2:]
