"""What a decoder says of a wrong value, in plain words."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from meta_executor.reasons import plain


def said(value: Any, kind: Any) -> str:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(value, type=kind)
    return plain(str(raised.value))


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("a", int, "want an integer, got a string"),
        ("a", float | None, "want a number or null, got a string"),
        (1, bool, "want true or false, got an integer"),
        ({}, list[int], "want a list, got an object"),
        (9, Annotated[int, msgspec.Meta(le=5)], "want an integer of at most 5"),
        (0, Annotated[float, msgspec.Meta(gt=0.5)], "want a number of more than 0.5"),
        ([], Annotated[list[int], msgspec.Meta(min_length=1)], "want a list of at least 1 items"),
        ("abc", Annotated[str, msgspec.Meta(max_length=2)], "want a string of at most 2 characters"),
        ("c", Literal["a", "b"], "'c' is not one of the values that are known here"),
    ],
)
def test_what_the_decoder_says_is_said_plainly(value: Any, kind: Any, words: str) -> None:
    """Against the library itself: a version that words it otherwise fails here."""
    assert said(value, kind) == words


def test_what_has_no_known_form_stays() -> None:
    assert plain("Something `else`") == "something `else`"
