"""The list of messages: what it finds, and that it finds those of every package."""

from __future__ import annotations

from pathlib import Path

import pytest

import messages


def test_what_is_a_message(tmp_path: Path) -> None:
    """Raised, logged, said and help; placeholders in braces, pieces joined; nothing else."""
    file = tmp_path / "code.py"
    file.write_text(
        '"""Not this one."""\n'
        "raise ValueError(f'port: want {low}..{high}, ' f'got {value!r}')\n"
        "log.warning('%s is late', name)\n"
        "_say('it is ready' if ready else 'it is not')\n"
        "parser.add_argument('--x', help='how many of them')\n"
        "raise KeyError(name)\n"
        "text = 'not this one'\n"
        "@cli.command()\ndef up():\n    '''Start it all.'''\n"
        "return RequestError(1, 'field', 'is not an integer')\n".replace("return ", "made = ")
    )
    assert [(kind, text) for _, kind, text in sorted(messages.messages(file))] == [
        ("error", "port: want {low}..{high}, got {value}"),
        ("log", "%s is late"),
        ("said", "it is ready | it is not"),
        ("help", "how many of them"),
        ("help", "Start it all."),
        ("error", "is not an integer"),
    ]


@pytest.mark.parametrize("package", sorted(path.name for path in (messages.ROOT / "packages").iterdir()))
def test_every_package_has_errors_that_are_found(package: str) -> None:
    sources = (messages.ROOT / "packages" / package / "src").rglob("*.py")
    assert sum(kind == "error" for path in sources for _, kind, _ in messages.messages(path)) >= 20
