"""The look at a JSON text before it is decoded, against a reading of it byte by byte."""

from __future__ import annotations

import json
import random

import pytest

from meta_executor.listener import structure
from meta_executor.listener.structure import Structure, StructureError, look, without_blanks


def dumb(text: bytes) -> tuple[Structure, bytes]:
    """One byte after the other."""
    depth = deepest = elements = blanks = 0
    inside = escaped = False
    kept = bytearray()
    for byte in text:
        char = chr(byte)
        blank = not inside and byte <= 32
        if not blank:
            kept.append(byte)
        if escaped:
            escaped = False
            if char in '"\\':
                continue
        if char == "\\":
            escaped = True
        elif char == '"':
            inside = not inside
        elif not inside:
            blanks += blank
            if char in "[{":
                depth += 1
                deepest = max(deepest, depth)
            elif char in "]}":
                depth -= 1
            elements += char in "[{,"
    return Structure(deepest, elements, blanks), bytes(kept)


@pytest.mark.parametrize("seed", range(60))
def test_random_texts_and_slices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bytes, and wherever a slice ends: the same as byte by byte."""
    draw = random.Random(seed)
    for _ in range(20):
        monkeypatch.setattr(structure, "_SLICE_BYTES", draw.randint(1, 40))
        text = bytes(draw.choices(b'{}[],:"\\\\\\ \nax1\xc3', k=draw.randint(0, 120)))
        want, kept = dumb(text)
        assert look(text, depth_max=10_000, elements_max=10_000) == want, text
        assert without_blanks(text) == kept, text


@pytest.mark.parametrize("seed", range(20))
def test_real_documents_mean_the_same_without_blanks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings keep their white space, quotes and backslashes."""
    draw = random.Random(seed)
    monkeypatch.setattr(structure, "_SLICE_BYTES", draw.randint(1, 64))

    def value(level: int) -> object:
        if level > 4 or draw.random() < 0.3:
            return draw.choice([1, None, True, ' a "b" \\ ', "\\\\", "\n\t", "ü", "{[,", ""])
        if draw.random() < 0.5:
            return [value(level + 1) for _ in range(draw.randint(0, 4))]
        return {f'k{i}"\\': value(level + 1) for i in range(draw.randint(0, 4))}

    document = value(0)
    text = json.dumps(document, indent=draw.choice([None, 1, 3]), ensure_ascii=draw.random() < 0.5).encode()
    assert json.loads(without_blanks(text)) == document
    assert look(text, depth_max=100, elements_max=10_000).blanks == len(text) - len(without_blanks(text))


def test_bounds_are_the_last_that_pass() -> None:
    """Exactly the bound passes, one more does not; what is in strings does not count."""
    look(b"[" * 5 + b"]" * 5, depth_max=5, elements_max=5)
    with pytest.raises(StructureError, match="deeper than 4"):
        look(b"[" * 5 + b"]" * 5, depth_max=4, elements_max=5)
    look(b"[1,2,3]", depth_max=1, elements_max=3)
    with pytest.raises(StructureError, match="more than 2 members"):
        look(b"[1,2,3]", depth_max=1, elements_max=2)
    look(b'"' + b"[,{" * 100 + b'"', depth_max=0, elements_max=0)
    look(b"", depth_max=0, elements_max=0)
