"""How deep and how long a JSON text is, found out before it is decoded.

A decoder holds the interpreter's lock from a text's first byte to its last, and makes an object for every few bytes of
hostile text: 16 MiB of ``{},`` cost 1.5 s and half a gigabyte. This look at the text works in slices of vectorised steps
which let go of the lock, so it may run in a thread beside the loop; what it lets pass costs little to decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SLICE_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _COMMA = 0x22, 0x5C, 0x2C
# With bit 5 set, brackets and braces are the same byte.
_OPEN, _CLOSE, _FOLD = 0x7B, 0x7D, 0x20
_SPACE = 0x20


class StructureError(ValueError):
    """The text is nested deeper, or has more members, than may be decoded. The message names the bound."""


@dataclass(frozen=True)
class Structure:
    """What a text is made of. Of a text that is not JSON: numbers without meaning, that decoding will refuse.

    Attributes:
        depth: Deepest nesting of arrays and objects (count).
        elements: Arrays, objects and commas outside strings (count): at least the members of all of them together.
        blanks: Bytes of white space and control characters outside strings.
    """

    depth: int
    elements: int
    blanks: int


def look(text: bytes, *, depth_max: int, elements_max: int) -> Structure:
    """Measure a text. Linear, without an object per member.

    Args:
        text: JSON, UTF-8.
        depth_max: Nesting that is let pass (count).
        elements_max: Arrays, objects and commas that are let pass (count).

    Raises:
        StructureError: There are more. The rest was not looked at.
    """
    data = np.frombuffer(text, np.uint8)
    inside = escaped = False
    depth = deepest = elements = blanks = 0
    for start in range(0, len(data), _SLICE_BYTES):
        part = data[start : start + _SLICE_BYTES]
        outside, inside, escaped = _outside(part, inside, escaped)
        folded = part | _FOLD
        opens = (folded == _OPEN) & outside
        marks = opens | ((folded == _CLOSE) & outside)
        steps = np.where(opens[marks], 1, -1)
        if len(steps):
            levels = np.cumsum(steps)
            deepest = max(deepest, depth + int(levels.max()))
            depth += int(levels[-1])
        elements += int(np.count_nonzero(opens)) + int(np.count_nonzero((part == _COMMA) & outside))
        blanks += int(np.count_nonzero((part <= _SPACE) & outside))
        if deepest > depth_max:
            raise StructureError(f"nested deeper than {depth_max} levels")
        if elements > elements_max:
            raise StructureError(f"more than {elements_max} members")
    return Structure(deepest, elements, blanks)


def without_blanks(text: bytes) -> bytes:
    """The text without white space outside strings."""
    data = np.frombuffer(text, np.uint8)
    kept = []
    inside = escaped = False
    for start in range(0, len(data), _SLICE_BYTES):
        part = data[start : start + _SLICE_BYTES]
        outside, inside, escaped = _outside(part, inside, escaped)
        kept.append(part[~(outside & (part <= _SPACE))])
    return b"".join(piece.tobytes() for piece in kept)


def _outside(part: npt.NDArray[np.uint8], inside: bool, escaped: bool) -> tuple[npt.NDArray[np.bool_], bool, bool]:
    """Which bytes are outside strings; whether the next slice begins inside one, and with an escaped byte.

    An opening quote counts as inside, a closing one as outside.
    """
    quotes = part == _QUOTE
    slashes = part == _BACKSLASH
    if escaped:
        quotes[0] = slashes[0] = False
    ends_escaped = False
    if slashes.any():
        # A run of backslashes of odd length escapes the byte after it.
        edges = np.flatnonzero(np.diff(slashes.view(np.int8), prepend=0, append=0))
        begins, ends = edges[::2], edges[1::2]
        after = ends[(ends - begins) % 2 == 1]
        ends_escaped = bool(len(after)) and int(after[-1]) == len(part)
        quotes[after[: len(after) - ends_escaped]] = False
    # Only whether the count is odd matters, so that it may wrap.
    odd = (np.cumsum(quotes, dtype=np.uint8) + np.uint8(inside)) & 1
    return odd == 0, bool(odd[-1]), ends_escaped
