"""A checked request's answers, in one piece or as a stream, while somebody watches for the client to leave.

A request may ask for several answers: of several prompts, several of each, or the best of several. Each is a job of its own
with legs of its own; here they run side by side and become one reply. Whichever ends first, the answers or the client's
connection, ends the other. A stream's headers are sent with its first piece, so that what fails earlier still has an honest
status; when one answer of a reply fails, the reply has failed, and the others are stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.front.answers import AnswerText
from meta_executor.front.checking import Call, made
from meta_executor.front.dispatch import Job, Tokens
from meta_executor.front.metrics import FrontMetrics
from meta_executor.front.openai import ApiError
from meta_executor.front.shapes import AnswerIds, LogprobShape, Piece, usage
from meta_executor.front.stories import Stories, Story
from meta_executor.listener.access import Caller

_LOG = logging.getLogger("meta_executor.front")
#: What of an error is kept in a story (characters).
_ECHO_MAX = 200


class ReplyService(Protocol):
    """What a reply needs of the service."""

    tokenizer: Tokenizer
    metrics: FrontMetrics
    runs: set[asyncio.Task[None]]
    stories: Stories
    cutting: bool

    def admitted(self, caller: Caller, answers: int) -> AbstractContextManager[None]:
        """Count so many answers of a caller while they are made.

        Raises:
            ApiError: There are too many.
        """
        ...

    def tokens(self, job: Job) -> AsyncGenerator[Tokens, None]:
        """A job's tokens; every failure as an :class:`ApiError`."""
        ...

    def now_s(self) -> float:
        """On the clock of the deadlines (s)."""
        ...


@dataclass(frozen=True, slots=True)
class _More:
    """What one answer has more: ``place`` among the jobs, ``count`` of its tokens so far."""

    place: int
    text: str
    count: int
    finish_reason: str | None


class _Answer:
    """One answer of a reply: its text so far, and what of it the client was told."""

    def __init__(self, service: ReplyService, call: Call, place: int) -> None:
        self._call = call
        self.place = place
        self.prompt = place // call.candidates
        self.job = call.jobs[place]
        self.made = AnswerText(service.tokenizer, call.stops, call.end_token_ids, call.tokens_min)
        self.echo = call.echoes[self.prompt] if call.echoes else ""
        self.finish_reason: str | None = None
        self.count = 0
        self.begun = False
        self._ids_told = self._logprobs_told = 0
        #: What is told of the prompt's tokens, until it is told.
        self._prompt_shown: Mapping[str, list[Any]] | None = None
        self._logprobs = LogprobShape(chat=call.shape.chat, tokenizer=service.tokenizer, offset=len(self.echo))

    async def take_prompt(self) -> None:
        """What is told of its prompt's tokens is known.

        Raises:
            ApiError: It is not.
        """
        prompt, logprobs = self.job.request.token_ids, self.job.prompt_logprobs
        if len(logprobs) != len(prompt) - 1:
            raise ApiError(502, "an instance told no log probabilities of its prompt's tokens", code="incomplete")
        self._prompt_shown = await made(lambda: self._logprobs.prompt(prompt.tolist(), logprobs), len(prompt))

    def take(self, more: _More) -> None:
        """It has come this far."""
        self.count = more.count
        self.finish_reason = more.finish_reason

    def piece(self, index: int, text: str) -> Piece:
        """What is new since the last piece; an echo with the first."""
        echo = "" if self.begun else self.echo
        self.begun = True
        return Piece(index, echo + text, self.finish_reason, self._new_ids(), self._new_logprobs())

    @property
    def merit(self) -> float:
        """What the best of several is chosen by: the mean log probability of its tokens."""
        logprobs = self.made.logprobs[: self.count]
        return sum(told.logprob for told in logprobs) / len(logprobs) if logprobs else float("-inf")

    def has_news(self) -> bool:
        """There is more to tell than its text."""
        return self._call.with_logprobs and (self._shown() > self._logprobs_told or self._prompt_shown is not None)

    def _shown(self) -> int:
        return self.made.shown_tokens if self.finish_reason is not None else self.count

    def _new_ids(self) -> AnswerIds | None:
        if not self._call.with_ids:
            return None
        told, self._ids_told = self._ids_told, self.count
        prompt = self.job.request.token_ids.tolist() if told == 0 else None
        return AnswerIds(self.made.token_ids[told : self.count], prompt)

    def _new_logprobs(self) -> Mapping[str, Any] | None:
        if not self._call.with_logprobs:
            return None
        told, self._logprobs_told = self._logprobs_told, self._shown()
        part = slice(told, self._logprobs_told)
        shown = self._logprobs.shown(self.made.token_ids[part], self.made.logprobs[part])
        prompt, self._prompt_shown = self._prompt_shown, None
        return shown if prompt is None else {name: [*prompt[name], *shown[name]] for name in shown}


class Reply(Response):
    """Runs a call and sends its reply.

    Args:
        service: Makes the answers.
        call: What is asked.
        story: Is told how it ends.
    """

    def __init__(self, service: ReplyService, call: Call, story: Story) -> None:
        self._service = service
        self._call = call
        self._story = story
        self._started = False
        self._answers = tuple(_Answer(service, call, place) for place in range(len(call.jobs)))
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        metrics = self._service.metrics
        run = asyncio.create_task(self._run(send), name=f"request {self._call.jobs[0].request_id}")
        watch = asyncio.create_task(_client_left(receive))
        self._service.runs.add(run)
        run.add_done_callback(self._service.runs.discard)
        try:
            await asyncio.wait((run, watch), return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                metrics.client_disconnects.inc()
        finally:
            watch.cancel()
            if not run.done():
                run.cancel()
            # Its cleanup is short and bounded; a second cancellation of this task does not cut it.
            await asyncio.wait((run, watch))
            self._service.stories.ended(self._story)
        if run.cancelled():
            self._tell("its client has gone")
            return
        error = run.exception()
        if isinstance(error, OSError):
            # The connection broke while sending: the client has left.
            metrics.client_disconnects.inc()
        elif error is not None:
            raise error

    async def _run(self, send: Send) -> None:
        service = self._service
        try:
            try:
                with service.admitted(self._call.caller, len(self._call.jobs)):
                    async with asyncio.timeout(max(self._call.deadline - service.now_s(), 0.0)):
                        await (self._stream(send) if self._call.stream else self._whole(send))
            except ApiError:
                raise
            except TimeoutError as error:
                raise ApiError(504, "no complete answer within the time that a request has", code="deadline_exceeded") \
                    from error  # fmt: skip
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not service.cutting or task is None:
                    raise
                task.uncancel()
                raise ApiError(503, "the service was stopped", code="stopped") from None
            except OSError:
                raise
            except Exception as error:
                service.metrics.internal_errors.inc()
                _LOG.exception("request %s of %s failed in the front", self._call.request_id, self._call.caller.account)
                raise ApiError(500, "the front failed; its log says why", code="internal") from error
        except ApiError as error:
            service.metrics.http_exceptions.inc()
            self._tell(f"failed with {error.status}: {error.message[:_ECHO_MAX]}")
            if not self._started:
                await self._send_json(send, error.status, error.body(), error.headers())
            else:
                # After the first piece there is no status any more: the API's clients know an error event.
                await self._send_event(send, msgspec.json.encode(error.body()))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            self._tell("answered")
            reasons = [str(answer.finish_reason) for answer in self._answers]
            service.metrics.answered(self._usage(), reasons, self._call.jobs[0], service.now_s())

    # -- the answers --------------------------------------------------------------------------------------------------

    async def _pieces(self, answer: _Answer) -> AsyncGenerator[_More, None]:
        """One answer as it comes; the last piece has a finish reason."""
        text_of, job = answer.made, answer.job
        wants_prompt = self._call.with_prompt_logprobs
        if self._call.no_tokens:
            yield _More(answer.place, "", 0, "length")
            return
        async with contextlib.aclosing(self._service.tokens(job)) as batches:
            async for tokens in batches:
                if job.request.sampling.logprobs is not None and len(tokens.logprobs) != len(tokens.token_ids):
                    raise ApiError(502, "an instance told no log probabilities of its tokens", code="incomplete")
                if wants_prompt:
                    wants_prompt = False
                    await answer.take_prompt()
                if self._call.tokens_max == 0:
                    # It was made for the prompt's sake.
                    if tokens.finish_reason is not None:
                        yield _More(answer.place, "", 0, "length")
                        return
                    continue
                text = text_of.push(tokens.token_ids, tokens.finish_reason, tokens.logprobs)
                if text_of.finish_reason is not None:
                    # After a stop string the rest is of no use; leaving here stops the leg.
                    job.satisfied = True
                yield _More(answer.place, text, text_of.completion_tokens, text_of.finish_reason)
                if text_of.finish_reason is not None:
                    return
        raise ApiError(502, "the answer ended without a finish reason", code="incomplete")

    async def _all(self) -> AsyncGenerator[tuple[_Answer, str], None]:
        """All answers as they come, side by side."""
        if len(self._answers) == 1:
            (answer,) = self._answers
            async with contextlib.aclosing(self._pieces(answer)) as pieces:
                async for more in pieces:
                    answer.take(more)
                    yield answer, more.text
            return
        # What waits here is bounded by what the answers may have; a slow reader costs only itself.
        events: asyncio.Queue[_More | asyncio.Task[None]] = asyncio.Queue()

        async def follow(answer: _Answer) -> None:
            async with contextlib.aclosing(self._pieces(answer)) as pieces:
                async for more in pieces:
                    events.put_nowait(more)

        tasks = [
            asyncio.create_task(follow(answer), name=f"answer {answer.job.request_id}") for answer in self._answers
        ]
        for task in tasks:
            task.add_done_callback(events.put_nowait)
        try:
            left = len(tasks)
            while left:
                event = await events.get()
                if isinstance(event, asyncio.Task):
                    left -= 1
                    event.result()
                    continue
                answer = self._answers[event.place]
                answer.take(event)
                yield answer, event.text
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _whole(self, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in self._answers]
        async with contextlib.aclosing(self._all()) as pieces:
            async for answer, text in pieces:
                texts[answer.place].append(text)
        given = [answer.piece(index, "".join(texts[answer.place])) for index, answer in enumerate(self._chosen())]
        await self._send_json(send, 200, self._call.shape.whole(given, self._usage()))

    def _chosen(self) -> list[_Answer]:
        """The answers that the client gets, in order of their index: of each prompt's candidates the best ones, best first."""
        call = self._call
        if call.candidates == call.wanted:
            return list(self._answers)
        chosen: list[_Answer] = []
        for begin in range(0, len(self._answers), call.candidates):
            candidates = self._answers[begin : begin + call.candidates]
            chosen += sorted(candidates, key=lambda answer: answer.merit, reverse=True)[: call.wanted]
        return chosen

    async def _stream(self, send: Send) -> None:
        shape, with_usage, with_counts = self._call.shape, self._call.with_usage, self._call.with_counts
        async with contextlib.aclosing(self._all()) as pieces:
            async for answer, text in pieces:
                if not self._started:
                    await self._start_stream(send)
                counts = self._usage() if with_counts else None
                if not answer.begun:
                    first = shape.first(answer.place, counts, with_usage=with_usage)
                    if first is not None:
                        await self._send_event(send, first)
                if text or answer.finish_reason is not None or answer.has_news() or (answer.echo and not answer.begun):
                    piece = answer.piece(answer.place, text)
                    await self._send_event(send, shape.piece(piece, counts, with_usage=with_usage))
                answer.begun = True
        if with_usage:
            await self._send_event(send, shape.last(self._usage()))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _usage(self) -> dict[str, Any]:
        """Counts so far: each prompt once, every answer that is made."""
        firsts = self._answers[:: self._call.candidates]
        prompts = sum(answer.job.prompt_tokens or answer.job.request.prompt_count for answer in firsts)
        return usage(
            prompts, sum(answer.count for answer in self._answers), sum(answer.job.cached_tokens for answer in firsts)
        )

    def _tell(self, what: str) -> None:
        self._story.tell(self._service.now_s(), what)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _head(self, kind: bytes) -> list[tuple[bytes, bytes]]:
        head = [(b"content-type", kind)]
        if self._call.unknown:
            names = ", ".join(name.encode("unicode_escape").decode("ascii") for name in self._call.unknown)
            head.append((UNKNOWN_HEADER, names.encode("ascii")))
        return head

    async def _start_stream(self, send: Send) -> None:
        headers = [*self._head(b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._started = True

    async def _send_event(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def _send_json(
        self, send: Send, status: int, data: Mapping[str, Any], more: Mapping[str, str] | None = None
    ) -> None:
        body = msgspec.json.encode(data)
        headers = [*self._head(b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in (more or {}).items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        self._started = True
        await send({"type": "http.response.body", "body": body, "more_body": False})


#: Names the fields of a body that nobody here knows.
UNKNOWN_HEADER = b"x-unknown-fields"


async def _client_left(receive: Receive) -> None:
    """Returns when the client has left; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
