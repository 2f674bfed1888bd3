"""The layouts that stand in the rooms' ``__init__`` files are those of the code."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import meta_executor

SOURCE = Path(meta_executor.__file__).parent
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
#: Not part of a layout: a room's own two files, and the version's place.
_APART = {"__init__", "__main__", "__about__"}


def layout_of(module: str) -> list[str]:
    """The names of a layout, in its order."""
    document = importlib.import_module(module).__doc__ or ""
    return re.findall(r"^    ([a-z_]+)(?:  +\S.*)?$", document, flags=re.MULTILINE)


def imported(path: Path) -> Iterator[str]:
    """Modules that a file imports, also inside its functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_room_is_looked_at() -> None:
    assert {"api", "executor", "front", "rank", "supervise"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_its_files_in_the_order_of_their_imports(room: str) -> None:
    """None is left out, none is gone, and each imports only what stands above it."""
    layout = layout_of(f"meta_executor.{room}")
    assert sorted(layout) == sorted(path.stem for path in (SOURCE / room).glob("*.py") if path.stem not in _APART)
    for place, name in enumerate(layout):
        below = {f"meta_executor.{room}.{other}" for other in layout[place + 1 :]}
        assert not below & set(imported(SOURCE / room / f"{name}.py")), name


def test_the_package_names_its_rooms_in_the_order_of_their_imports() -> None:
    """Here each imports only what stands below it."""
    layout = layout_of("meta_executor")
    assert sorted(layout) == sorted({*ROOMS, *(path.stem for path in SOURCE.glob("*.py") if path.stem not in _APART)})
    for place, name in enumerate(layout):
        above = {f"meta_executor.{other}" for other in layout[:place]}
        files = sorted((SOURCE / name).glob("*.py")) if name in ROOMS else [SOURCE / f"{name}.py"]
        for path in files:
            found = {".".join(module.split(".")[:2]) for module in imported(path)}
            assert not above & found, f"{path.name} of {name}"
