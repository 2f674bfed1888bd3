"""Why a value is refused, in plain words: what the decoder says, said for a person who wrote the value."""

from __future__ import annotations

import re

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_EXPECTED = re.compile(
    r"Expected `(?P<kinds>[a-z |]{1,80})`"
    r"(?:, got `(?P<got>[a-z]{1,20})`|(?P<length> of length)? (?P<sign><=|>=|<|>) (?P<bound>[0-9.e+-]{1,30}))?"
)
_BOUNDS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than"}
_COUNTED = {"a list": "items", "a string": "characters", "an object": "members"}


def plain(reason: str) -> str:
    """``Expected `int` <= 5`` becomes ``want an integer of at most 5``; what is of no known form stays as it is."""
    found = _EXPECTED.fullmatch(reason)
    if found is None:
        if reason.startswith("Invalid enum value "):
            return f"{reason.removeprefix('Invalid enum value ')} is not one of the values that are known here"
        return f"{reason[:1].lower()}{reason[1:]}"
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in found["kinds"].split(" | "))
    if found["got"]:
        return f"want {kinds}, got {_KINDS.get(found['got'], found['got'])}"
    if found["sign"] is None:
        return f"want {kinds}"
    counted = f" {_COUNTED.get(kinds, 'items')}" if found["length"] else ""
    return f"want {kinds} of {_BOUNDS[found['sign']]} {found['bound']}{counted}"
