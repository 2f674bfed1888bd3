"""How inputs are drawn: bytes and JSON documents that were valid, changed in a few places."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from contextlib import AbstractContextManager

#: Pieces that readers of these formats treat in their own way.
_WORDS = [
    b"",
    b"\x00",
    b"\xff",
    b"\xff" * 8,
    b"\x7f" * 8,
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b"\\",
    b"\\u0000",
    b"\\ud800",
    b",",
    b":",
    b"null",
    b"true",
    b"-1",
    b"0",
    b"1e999",
    b"1.5",
    b"9" * 40,
    b"9223372036854775808",
    b"NaN",
    b"\r\n",
    b"\n",
    b" ",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"a" * 300,
    b"[" * 200,
    b"{}," * 100,
    b"<|im_end|>",
    b"</s>",
    b"\x1b[2J",
    b"../../x",
    b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n",
    b"0\r\n\r\n",
]


class Refused(Exception):
    """The target answered as its contract says."""


def mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """One input: a seed with a few changes, or now and then noise."""
    if draw.random() < 0.02:
        return draw.randbytes(draw.randrange(200))
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((0, 1, 1, 2, 3, 6))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1:
                data[at:at] = draw.choice(_WORDS)
            case 2:
                del data[at : at + draw.choice((1, 2, 8, 40))]
            case 3:
                size = draw.choice((1, 4, 16))
                data[at : at + size] = draw.randbytes(size)
            case 4:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                data[at : at + draw.randrange(40)] = other[start : start + draw.randrange(80)]
            case 5:
                piece = bytes(data[at : at + draw.choice((1, 8, 60))])
                data[at:at] = piece * draw.choice((1, 3, 20))
            case _:
                word = draw.choice(_WORDS)
                data[at : at + len(word)] = word
    return bytes(data)


def json_mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """JSON whose values, types and names changed, or a text that is not JSON any more."""
    if draw.random() < 0.4:
        return mutated(seeds, draw)
    document = json.loads(draw.choice(seeds))
    values = [
        None,
        True,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**70,
        1e308,
        0.5,
        "",
        "x" * 300,
        "\x00",
        "\ud800",
        [],
        {},
        [[]],
        [None] * 3,
        {"a": {}},
    ]
    for _ in range(draw.randrange(1, 4)):
        holder = document
        while isinstance(holder, dict | list) and holder and draw.random() < 0.7:
            key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
            if not isinstance(holder[key], dict | list) or not holder[key]:
                break
            holder = holder[key]
        if isinstance(holder, dict):
            key = draw.choice([*holder, "extra", ""])
            if draw.random() < 0.3:
                holder.pop(key, None)
            else:
                holder[key] = copy.deepcopy(draw.choice(values))
        elif isinstance(holder, list):
            holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(draw.choice(values)))
    return json.dumps(document).encode("utf-8", "surrogatepass")


#: Seeds, what draws an input of them, and what reads it.
Target = tuple[list[bytes], Callable[[list[bytes], random.Random], bytes], Callable[[bytes], None]]
#: A context manager that has what its target needs, and gives it.
Maker = Callable[[], AbstractContextManager[Target]]


def shown(error: Exception) -> None:
    """An error's words are bounded."""
    if len(str(error)) > 2000:
        raise RuntimeError(f"a message of {len(str(error))} characters")
