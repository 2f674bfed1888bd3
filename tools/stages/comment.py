"""Comment lines such as ``/bot run --disable-fail-fast --stage-list "A, B"`` as the runner's own arguments.

Whoever can comment can write such a line: only options that choose what is run are taken from one, none that names a path.
"""

from __future__ import annotations

import shlex

from .errors import StageError, nearest

#: Options that ``/bot run`` takes; how each is written is the command line's business.
RUN_OPTIONS = (
    "--stage-list", "--extra-stage", "--gpu-type", "--test-backend", "--post-merge", "--disable-fail-fast", "--reuse-test",
    "--disable-reuse-test", "--skip-test", "--add-multi-gpu-test", "--only-multi-gpu-test", "--disable-multi-gpu-test",
    "--detailed-log", "--accept-capability", "--dry-run", "--list",
)  # fmt: skip
#: The field's options that have nothing to act on here, and why: refused by name, never ignored.
REFUSED = {
    "--only-perf-sanity-test": "there are no performance stages: nox -s bench takes figures, tests assert none",
    "--debug": "no container is kept to log in to: the bundle's log.txt holds each pytest command, to be run again here",
    "--match-exact": "a key that a stage's query lacks matches, as for every list of this format",
    "--test-prefix": "full:<hardware>/ prefixes follow from the stage's own name",
}
_COMMANDS = ("run", "skip", "reuse-pipeline", "help")


def arguments_of_comment(text: str) -> list[str]:
    """The runner's arguments for the ``/bot`` line of a comment."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("/bot")]
    if not lines:
        raise StageError(f"no /bot line in {text[:80]!r}")
    if len(lines) > 1:
        raise StageError(
            f"{len(lines)} /bot lines in one comment, only one is run at a time: {' and '.join(map(repr, lines))}"
        )
    try:
        words = shlex.split(lines[0])
    except ValueError as error:
        raise StageError(f"{lines[0]!r}: {error}") from error
    if words[0] != "/bot":
        raise StageError(f"{words[0]!r} is not a command; did you mean /bot run?")
    if len(words) < 2:
        raise StageError("/bot wants a command, such as /bot run")
    command, rest = words[1], words[2:]
    if command == "kill":
        raise StageError(
            "/bot kill has nothing to act on here: a run ends with Ctrl-C, a hosted one with the next push"
        )
    if command not in _COMMANDS:
        raise StageError(f"/bot {command!r} is not a command{nearest(command, _COMMANDS)}")
    if command == "run":
        return _run(rest)
    if command == "skip":
        if len(rest) != 2 or rest[0] != "--comment" or not rest[1].strip():
            raise StageError(f"/bot skip wants --comment and a reason, got {' '.join(rest)!r}")
        return [f"--skip-test={rest[1]}"]
    if rest:
        raise StageError(f"/bot {command} takes nothing more, got {' '.join(rest)!r}")
    return [f"--{command}"]


def _run(words: list[str]) -> list[str]:
    for word in words:
        name = word.split("=", 1)[0]
        if name.startswith("-") and name not in (*RUN_OPTIONS, *REFUSED):
            raise StageError(f"/bot run takes no {name}{nearest(name, RUN_OPTIONS)}")
    return words
