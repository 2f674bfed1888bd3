"""What a body can cost before it is refused: nothing that grows faster than it, and nothing of it is repeated at length."""

from __future__ import annotations

import msgspec
import pytest

from meta_executor.front import openai
from meta_executor.front.openai import ApiError


@pytest.mark.parametrize(
    "name", ["x" * 300_000, ' - at `$"' * 40_000, " - at `$" * 40_000 + "`", "unknown field `" * 20_000]
)
def test_a_clients_names_are_cut_and_never_searched_by_expression(name: str) -> None:
    """An unknown key of any form: 400 in linear time, with a message that a terminal can show."""
    body = msgspec.json.encode({"model": "m", "prompt": "a", name: 1})
    with pytest.raises(ApiError) as caught:
        openai.decode_request(body, openai.CompletionRequest)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000 and len(caught.value.param or "") < 1000


def test_errors_still_name_the_field() -> None:
    """Wrong type, unknown, missing, nested."""
    for body, field, reason in (
        ({"model": "m", "prompt": "a", "max_tokens": "x"}, "max_tokens", "expected `int | null`, got `str`"),
        ({"model": "m", "prompt": "a", "max_tokenz": 1}, "max_tokenz", "unknown field"),
        ({"prompt": "a"}, "model", "is required"),
        ({"model": "m", "prompt": "a", "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
    ):
        with pytest.raises(ApiError) as caught:
            openai.decode_request(msgspec.json.encode(body), openai.CompletionRequest)
        assert (caught.value.param, caught.value.message) == (field, f"{field}: {reason}")


def test_a_prompt_of_too_many_ids_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by its commas; the decoder is never asked."""
    request = openai.decode_request(
        b'{"model": "m", "prompt": [' + b"5," * 3_000_000 + b"5]}", openai.CompletionRequest
    )
    monkeypatch.setattr(openai, "_TOKENS", None)
    with pytest.raises(ApiError, match="3000001 tokens, at most 100") as caught:
        openai.prompt_of(request, tokens_max=100)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("hello", "hello"), (["hello"], "hello"), ([1, 2, 3], [1, 2, 3]), ([[4, 5]], [4, 5]), ([], None), ([[]], None),
        ("", None), ([1, "a"], None), ([[1], [2]], None), (["a", "b"], None), (7, None), ([-1], None), ([1.5], None),
        (None, None), ({}, None), ([True], None), ([["a"]], None), ([2**40], None),
    ],
)  # fmt: skip
def test_prompts_of_every_form(prompt: object, want: object) -> None:
    """One text or one list of ids, also alone in a list; everything else is a 400 on ``prompt``."""
    body = msgspec.json.encode({"model": "m", "prompt": prompt})
    request = openai.decode_request(body, openai.CompletionRequest)
    if want is None:
        with pytest.raises(ApiError) as caught:
            openai.prompt_of(request, tokens_max=100)
        assert caught.value.status == 400 and caught.value.param == "prompt"
        return
    got = openai.prompt_of(request, tokens_max=100)
    assert (got if isinstance(got, str) else got.tolist()) == want


@pytest.mark.parametrize("prompt", [b'"\xdd6"', b'["\xdd6"]', b'[["\xdd"]]', b"[1, 2"])
def test_a_slice_that_is_not_json_is_a_400(prompt: bytes) -> None:
    """What stays a slice of the body was not decoded with it: its own decoding may fail, and is answered like the body's."""
    with pytest.raises(ApiError) as caught:
        request = openai.decode_request(b'{"model": "m", "prompt": ' + prompt + b"}", openai.CompletionRequest)
        openai.prompt_of(request, tokens_max=100)
    assert caught.value.status == 400
    for field in (b"logit_bias", b"suffix", b"n"):
        with pytest.raises(ApiError) as caught:
            openai.decode_request(
                b'{"model": "m", "prompt": "a", "' + field + b'": {"\xdd": 1}}', openai.CompletionRequest
            )
        assert (caught.value.status, caught.value.param) == (400, field.decode())
