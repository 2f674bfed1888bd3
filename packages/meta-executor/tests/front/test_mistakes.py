"""docs/mistakes.md: each row is tried, and what is shown is what is printed there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from meta_executor.cli import main
from meta_executor.config import ConfigError, service_config

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"
_CELL = re.compile(r"`` ?(?P<wide>.+?) ?``|`(?P<narrow>[^`]+)`")


def rows(title: str) -> list[tuple[str, str]]:
    """(what was done, what is seen) of a section's table."""
    section = PAGE.read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = []
    for line in section.splitlines():
        if line.startswith("| `"):
            done, seen = line.strip("| ").split(" | ")[:2]
            cells = [match["wide"] or match["narrow"] for text in (done, seen) if (match := _CELL.match(text))]
            assert len(cells) == 2, line
            found.append((cells[0].replace("\\|", "|"), cells[1].replace("\\|", "|")))
    assert len(found) >= 5, title
    return found


@pytest.mark.parametrize(("settings", "seen"), rows("In a configuration"))
def test_a_configuration_that_is_wrong(settings: str, seen: str) -> None:
    """The whole message."""
    with pytest.raises(ConfigError) as raised:
        service_config(yaml.safe_load(settings))
    assert str(raised.value) == seen


@pytest.mark.parametrize(("command", "seen"), rows("On the command line"))
def test_a_command_that_is_wrong(
    command: str, seen: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its last line, and an exit code that is not 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (1, 2)
    assert capsys.readouterr().err.strip().splitlines()[-1] == seen


@pytest.mark.asyncio
@pytest.mark.parametrize(("request_", "seen"), rows("In a request"))
async def test_a_request_that_is_wrong(make_cluster: Any, request_: str, seen: str) -> None:
    """Status and message; no instance was asked."""
    method, path, *body = request_.split(" ", 2)
    async with make_cluster() as cluster:
        answer = await cluster.client.request(method, f"{cluster.url}{path}", content=(body or [""])[0].encode())
        told = answer.json()
        error = told.get("error", told)
        assert f"{answer.status_code}: {error['message']}" == seen
        assert not cluster.context.received and not cluster.generation.received
        await cluster.settled()
