"""YAML with line numbers: values that remember where they stand, each key once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import ListError, nearest


@dataclass(frozen=True)
class Item:
    """A value and its line (1-based). ``value`` is a scalar, a list of items, or a dict of name → item."""

    value: Any
    line: int

    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        return self.value


def load(path: Path) -> Item:
    """Read a file."""
    try:
        node = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ListError(path, 1, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ListError(path, 1, f"not UTF-8: {error.reason}") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ListError(path, mark.line + 1 if mark else 1, f"not YAML: {getattr(error, 'problem', error)}") from error
    if node is None:
        raise ListError(path, 1, "empty")
    return _item(path, node)


def _item(path: Path, node: yaml.Node) -> Item:
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Item] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in found:
                raise ListError(path, key_node.start_mark.line + 1, f"key {key!r} appears twice")
            found[key] = Item(_item(path, value_node).value, key_node.start_mark.line + 1)
        return Item(found, line)
    if isinstance(node, yaml.SequenceNode):
        return Item([_item(path, child) for child in node.value], line)
    try:
        return Item(yaml.SafeLoader("").construct_object(node), line)
    except (yaml.YAMLError, ValueError, AttributeError, LookupError, TypeError) as error:  # as its constructors fail
        raise ListError(path, line, f"not a plain value: {getattr(error, 'problem', None) or error}") from error


def mapping(path: Path, item: Item, what: str, keys: tuple[str, ...]) -> dict[str, Item]:
    """A mapping with no other than the given keys."""
    if not isinstance(item.value, dict):
        raise ListError(path, item.line, f"{what}: want a mapping, got {type(item.value).__name__}")
    for key, value in item.value.items():
        if key not in keys:
            raise ListError(
                path, value.line, f"{what}: unknown key {key!r}{nearest(key, keys) or '; known: ' + ', '.join(keys)}"
            )
    return item.value
