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
        openai.decode_request(body, openai.CompletionRequest, strict=True)
    assert caught.value.status == 400
    assert len(caught.value.message) < 1000 and len(caught.value.param or "") < 1000
    _, unknown = openai.decode_request(body, openai.CompletionRequest)
    assert len(unknown) == 1 and 0 < len(unknown[0]) <= 64 and name.startswith(unknown[0])


def test_only_some_of_many_unknown_names_are_told() -> None:
    """However many there are."""
    body = msgspec.json.encode({"model": "m", "prompt": "a", **{f"x{i}": i for i in range(500)}})
    _, unknown = openai.decode_request(body, openai.CompletionRequest)
    assert unknown == tuple(f"x{i}" for i in range(8))


def test_errors_still_name_the_field() -> None:
    """Wrong type, unknown, missing, nested."""
    for body, field, reason in (
        ({"model": "m", "prompt": "a", "max_tokens": "x"}, "max_tokens", "want an integer or null, got a string"),
        ({"model": "m", "prompt": "a", "max_tokenz": 1}, "max_tokenz", "unknown field"),
        ({"model": "m", "prompt": "a", "top_k": "x"}, "top_k", "want an integer or null, got a string"),
        ({"prompt": "a"}, "model", "is required"),
        (
            {"model": "m", "prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "want true or false or null, got an integer",
        ),
    ):
        with pytest.raises(ApiError) as caught:
            openai.decode_request(msgspec.json.encode(body), openai.CompletionRequest, strict=True)
        assert (caught.value.param, caught.value.message) == (field, f"{field}: {reason}")


def test_a_prompt_of_too_many_ids_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by its commas; the decoder is never asked."""
    request, _ = openai.decode_request(
        b'{"model": "m", "prompt": [' + b"5," * 3_000_000 + b"5]}", openai.CompletionRequest
    )
    monkeypatch.setattr(openai, "_TOKENS", None)
    with pytest.raises(ApiError, match="3000001 tokens, at most 100") as caught:
        openai.prompts_of(request, tokens_max=100, prompts_max=4)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("hello", ["hello"]), (["hello"], ["hello"]), ([1, 2, 3], [[1, 2, 3]]), ([[4, 5]], [[4, 5]]), ([], None),
        ([[]], None), ("", None), ([1, "a"], None), ([[1], [2]], [[1], [2]]), (["a", "b"], ["a", "b"]), (7, None),
        ([-1], None), ([1.5], None), (None, None), ({}, None), ([True], None), ([["a"]], None), ([2**40], None),
        (["a", [1]], None), ([[1], "a"], None), (["a", 1], None), ([[1], [2**40]], None), (["a"] * 5, None),
        (["a", ""], None), ([[1], []], None), ([[1], [[2]]], None), ([["]"], [1]], None), (["],["], ["],["]),
    ],
)  # fmt: skip
def test_prompts_of_every_form(prompt: object, want: object) -> None:
    """A text, a list of ids, or a list of up to four of either; everything else is a 400 on ``prompt``."""
    body = msgspec.json.encode({"model": "m", "prompt": prompt})
    request, _ = openai.decode_request(body, openai.CompletionRequest)
    if want is None:
        with pytest.raises(ApiError) as caught:
            openai.prompts_of(request, tokens_max=100, prompts_max=4)
        assert caught.value.status == 400 and caught.value.param == "prompt"
        return
    got = openai.prompts_of(request, tokens_max=100, prompts_max=4)
    assert [one if isinstance(one, str) else one.tolist() for one in got] == want


@pytest.mark.parametrize("prompt", [b'"\xdd6"', b'["\xdd6"]', b'[["\xdd"]]', b"[1, 2"])
def test_a_slice_that_is_not_json_is_a_400(prompt: bytes) -> None:
    """What stays a slice of the body was not decoded with it: its own decoding may fail, and is answered like the body's."""
    with pytest.raises(ApiError) as caught:
        request, _ = openai.decode_request(b'{"model": "m", "prompt": ' + prompt + b"}", openai.CompletionRequest)
        openai.prompts_of(request, tokens_max=100, prompts_max=4)
    assert caught.value.status == 400
    for field in (b"logit_bias", b"n"):
        with pytest.raises(ApiError) as caught:
            openai.decode_request(
                b'{"model": "m", "prompt": "a", "' + field + b'": {"\xdd": 1}}', openai.CompletionRequest
            )
        assert caught.value.status == 400
    with pytest.raises(ApiError) as caught:
        openai.decode_request(b'{"model": "m", "prompt": "a", "\xdd": 1}', openai.CompletionRequest)
    assert caught.value.status == 400
    for field in (b"response_format", b"suffix"):
        with pytest.raises(ApiError) as caught:
            openai.decode_request(
                b'{"model": "m", "prompt": "a", "' + field + b'": {"\xdd": 1}}', openai.CompletionRequest
            )
        assert (caught.value.status, caught.value.param) == (400, field.decode())
