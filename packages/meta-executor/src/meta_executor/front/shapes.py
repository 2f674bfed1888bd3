"""The public wire: what clients get, in the shapes of the OpenAI API."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.wire import TokenLogprobs

#: JSON has no infinity: a token that the model excludes is told with this logarithm.
_LOGPROB_MIN = -9999.0


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts of a reply."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class AnswerIds(msgspec.Struct, frozen=True):
    """Token ids for a client that asked for them.

    Attributes:
        answer: Of this piece, an end token included.
        prompt: Of the prompt, with the first piece; else None.
    """

    answer: list[int]
    prompt: list[int] | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one answer of a request has more, or all of it.

    Attributes:
        index: Of the answer among the request's.
        text: More of it.
        finish_reason: With its last piece.
        ids: For a client that asked for them.
        logprobs: As the endpoint shows them; None: not asked for.
    """

    index: int
    text: str
    finish_reason: str | None = None
    ids: AnswerIds | None = None
    logprobs: Mapping[str, Any] | None = None


class LogprobShape:
    """Log probabilities as one of the endpoints shows them, for one answer.

    Args:
        chat: Which endpoint.
        tokenizer: The model's.
        offset: Where the answer's text begins, behind an echoed prompt (characters).
    """

    def __init__(self, *, chat: bool, tokenizer: Tokenizer, offset: int = 0) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._offset = offset

    def shown(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens, in order."""
        pairs = list(zip(token_ids, logprobs))
        if self._chat:
            return {
                "content": [
                    {**self._one(token, told.logprob), "top_logprobs": [self._one(*other) for other in told.top]}
                    for token, told in pairs
                ],
                "refusal": None,
            }
        texts = [self._tokenizer.token_text(token)[0] for token, _ in pairs]
        offsets = [*itertools.accumulate(map(len, texts), initial=self._offset)]
        self._offset = offsets.pop()
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(told.logprob) for _, told in pairs],
            "tokens": texts,
            "top_logprobs": [self._top(told) for _, told in pairs],
        }

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Of an echoed prompt's tokens, as completions have it: nothing is told of the first one.

        Args:
            token_ids: All of them.
            logprobs: Of those behind the first.
        """
        texts = [self._tokenizer.token_text(token)[0] for token in token_ids]
        return {
            "text_offset": [*itertools.accumulate(map(len, texts[:-1]), initial=0)],
            "token_logprobs": [None, *(_finite(told.logprob) for told in logprobs)],
            "tokens": texts,
            "top_logprobs": [None, *(self._top(told) for told in logprobs)],
        }

    def _top(self, told: TokenLogprobs) -> dict[str, float] | None:
        text_of = self._tokenizer.token_text
        return {text_of(other)[0]: _finite(logprob) for other, logprob in reversed(told.top)} or None

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self._tokenizer.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOGPROB_MIN)


class Shape:
    """The two endpoints' answers: same life, different words. A stream's chunks are made as JSON: what is the same in all of
    them is encoded once.

    Args:
        chat: ``/v1/chat/completions``, else ``/v1/completions``.
        answer_id: Without prefix.
        created: Unix time (s).
        model: Name under which the client asked.
    """

    def __init__(self, *, chat: bool, answer_id: str, created: int, model: str) -> None:
        self.chat = chat
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer_id}",
            "created": created,
            "model": model,
        }
        #: Everything before a chunk's one choice.
        same = msgspec.json.encode({**self._head, "object": self._kind})
        self._chunk_begin = same[:-1] + b',"choices":[{"index":'

    def whole(self, answers: Sequence[Piece], counts: Mapping[str, Any]) -> dict[str, Any]:
        """All answers in one piece."""
        kind = "chat.completion" if self.chat else "text_completion"
        body: dict[str, Any] = {**self._head, "object": kind, "choices": [], "usage": dict(counts)}
        for answer in answers:
            choice: dict[str, Any] = {
                "index": answer.index,
                "finish_reason": answer.finish_reason,
                "logprobs": answer.logprobs,
            }
            if self.chat:
                choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            else:
                choice["text"] = answer.text
            if answer.ids is not None:
                choice["token_ids"] = answer.ids.answer
                if answer.ids.prompt is not None:
                    # Where vLLM has them: in the choice of a completion, beside the choices of a chat.
                    (body if self.chat else choice)["prompt_token_ids"] = answer.ids.prompt
            body["choices"].append(choice)
        return body

    def first(self, index: int, counts: Mapping[str, Any] | None, *, with_usage: bool) -> bytes | None:
        """The chunk that opens an answer of a chat stream (JSON)."""
        if not self.chat:
            return None
        choice = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._chunk(index, None, choice, {}, counts, with_usage)

    def piece(self, piece: Piece, counts: Mapping[str, Any] | None = None, *, with_usage: bool) -> bytes:
        """A piece of a stream (JSON); an answer's last has a finish reason.

        Args:
            piece: What is more.
            counts: So far, for a client that wants them in every chunk.
            with_usage: The stream ends with its counts.
        """
        choice: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if self.chat:
            choice["delta"] = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        else:
            choice["text"] = piece.text
        beside: dict[str, Any] = {}
        if piece.ids is not None:
            choice["token_ids"] = piece.ids.answer
            if piece.ids.prompt is not None:
                (beside if self.chat else choice)["prompt_token_ids"] = piece.ids.prompt
        return self._chunk(piece.index, piece.logprobs, choice, beside, counts, with_usage)

    def last(self, counts: Mapping[str, Any]) -> bytes:
        """The chunk with the counts (JSON), which has no choices."""
        return msgspec.json.encode({**self._head, "object": self._kind, "choices": [], "usage": dict(counts)})

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(
        self,
        index: int,
        logprobs: Mapping[str, Any] | None,
        choice: dict[str, Any],
        beside: dict[str, Any],
        counts: Mapping[str, Any] | None,
        with_usage: bool,
    ) -> bytes:
        """``choice`` completes the one choice, ``beside`` the chunk; the first is never empty."""
        if with_usage:
            beside["usage"] = counts
        told = b"null" if logprobs is None else msgspec.json.encode(logprobs)
        end = b"]," + msgspec.json.encode(beside)[1:] if beside else b"]}"
        return b'%b%d,"logprobs":%b,%b%b' % (
            self._chunk_begin, index, told, msgspec.json.encode(choice)[1:], end
        )  # fmt: skip
