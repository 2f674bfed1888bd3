"""An answer's tokens to its text, and its counts."""

from __future__ import annotations

from collections.abc import Sequence

from meta_executor.engine.tokenizer import StopStrings, Tokenizer
from meta_executor.wire import TokenLogprobs


class AnswerText:
    """Collects one answer.

    Args:
        tokenizer: The model's.
        stops: Stop strings.
        end_token_ids: Tokens that end an answer and are not part of its text.
        tokens_min: The first so many tokens end it in no way (count).
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], end_token_ids: frozenset[int], tokens_min: int = 0
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopStrings(stops)
        self._watched = bool(stops)
        self._end_token_ids = end_token_ids
        self._tokens_min = tokens_min
        self._ended_by_token = False
        self.logprobs: list[TokenLogprobs] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens so far, an end token included (count)."""
        return len(self.token_ids)

    @property
    def shown_tokens(self) -> int:
        """Of them, those whose text is part of the answer: all but a token that ended it."""
        return len(self.token_ids) - self._ended_by_token

    def push(self, tokens: Sequence[int], finish_reason: str | None, logprobs: Sequence[TokenLogprobs] = ()) -> str:
        """Text that these tokens add. Sets :attr:`finish_reason` at the end, also where a stop string ends it.

        Counts tokens up to and including the one that completed a stop string; those after it were generated for nobody.
        """
        self.logprobs.extend(logprobs)
        if not self._watched and finish_reason is None:
            self.token_ids.extend(tokens)
            return self._detokenizer.push(tokens)
        text = []
        for place, token in enumerate(tokens):
            last = place == len(tokens) - 1
            self.token_ids.append(token)
            if last and finish_reason == "stop" and token in self._end_token_ids:
                self._ended_by_token = True
                break
            more = self._detokenizer.push((token,))
            # A stop string counts where it ends behind the least length, wherever it begins.
            text.append(self._stops.push(more, early=len(self.token_ids) <= self._tokens_min))
            if self._stops.hit is not None:
                self.finish_reason = "stop"
                return "".join(text)
        if finish_reason is not None:
            text.append(self._stops.push(self._detokenizer.finish()))
            text.append(self._stops.finish())
            self.finish_reason = "stop" if self._stops.hit is not None else finish_reason
        return "".join(text)
