"""The legs of a request: which instances, in which order, and what happens when one fails.

Context-first: the context instance prefills and answers with the first token; then the generation instance pulls the KV
and streams the rest. Generation-first: both are asked at once; the generation instance's stream is consumed by a task of
its own from the start, because the context leg ends only after the generation leg has published its destination. Generation
alone: a short prompt is computed where its answer is, which costs less than a transfer.

Rules. A leg that certainly was not received may go to another server, or again to the same one after one refresh when the
receiver answered STALE_GENERATION; in generation-first that is the generation leg alone, because it was told who the context
instance is. Nothing that may have been received is ever sent again. However a request ends, each leg that was sent and has
not ended is told to abort, and every reservation is released exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from endpoint_lifecycle import AsyncEndpointDirectory, AsyncReservation, EndpointError, StaleGeneration
from meta_executor import wire
from meta_executor.executor.request import Request
from meta_executor.front.choices import Choices
from meta_executor.front.leg import UNREACHABLE, Chunk, LegError, Prefilled, context_is_stale
from meta_executor.front.legs import LegClient
from meta_executor.front.metrics import FrontMetrics
from meta_executor.front.order import LegOrder
from meta_executor.front.routers import BlockNames, Routers
from meta_executor.front.stories import ENDED, FIRST_TOKEN, GIVEN, SENT, STOPPED, Story
from meta_executor.wire import TokenLogprobs

#: Servers that are tried when connecting fails (count).
_CONNECT_TRIES = 3
#: A reservation's expiry is put off once in so many seconds of its stream: the grace that it has is longer.
_RENEW_EVERY_S = 1.0

_Answer = TypeVar("_Answer")


@dataclass
class Job:
    """One request on its way.

    Attributes:
        request: What is asked; its deadline is filled in per leg.
        deadline: On the dispatcher's clock (s).
        accepted: When it came, on that clock (s).
        satisfied: Its reader has all that it wants (a stop string was met): the leg that still runs is stopped, not failed.
        prompt_tokens, cached_tokens: What the context instance counted.
        prompt_logprobs: Of the prompt's tokens behind the first, where they are asked for: there before the first token is.
        servers: Role -> server that took the leg.
        story: What happens to it is told here; None: to nobody.
        first_token_s: When its first token was known, on that clock (s).
        block_names: Of its prompt; shared by the jobs of one prompt.
    """

    request: Request
    deadline: float
    accepted: float = 0.0
    satisfied: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    servers: dict[str, str] = field(default_factory=dict)
    story: Story | None = None
    first_token_s: float | None = None
    block_names: BlockNames = field(default_factory=BlockNames)

    @property
    def request_id(self) -> int:
        """The request's."""
        return self.request.request_id

    def prefilled(self, answer: Prefilled) -> None:
        """What the context instance tells of the prompt."""
        self.prompt_tokens, self.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        self.prompt_logprobs = answer.prompt_logprobs


@dataclass(frozen=True)
class Tokens:
    """What one hand-over brought.

    Attributes:
        token_ids: New tokens of the answer.
        finish_reason: ``stop`` or ``length`` on the last.
        logprobs: Of each of them, where the request asks for them.
    """

    token_ids: list[int]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class _Leg:
    """A leg's reservation, and whether its instance must be told when the request ends early."""

    def __init__(self, role: str, reservation: AsyncReservation, job: Job) -> None:
        self.role = role
        self.job = job
        self.reservation = reservation
        self.server = reservation.server
        self.sent_s: float | None = None
        self.ended = False
        self._renew_at_s = 0.0

    def renew(self, now_s: float) -> None:
        """Its stream goes on: its reservation does not expire."""
        if now_s >= self._renew_at_s:
            self._renew_at_s = now_s + _RENEW_EVERY_S
            self.reservation.renew()


class Dispatch:
    """Sends requests to instances.

    Args:
        directory: Of both roles' instances.
        routers: Choose among them.
        legs: To them, over their streams or HTTP.
        metrics: Counted here.
        clock: Monotonic time (s).
        order: Order of context legs in generation-first; default: as requests arrive.
        choices: Told of every choice of an instance.
        instance_wait_s: How long a leg may wait for an instance that can take it (s).
    """

    def __init__(
        self,
        directory: AsyncEndpointDirectory,
        routers: Routers,
        legs: LegClient,
        metrics: FrontMetrics,
        clock: Callable[[], float] = time.monotonic,
        order: LegOrder | None = None,
        choices: Choices | None = None,
        *,
        instance_wait_s: float,
    ) -> None:
        self._instance_wait_s = instance_wait_s
        self._choices = choices
        self._order = order or LegOrder(1)
        self._directory = directory
        self._routers = routers
        self._legs = legs
        self._metrics = metrics
        self._clock = clock
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(self, job: Job) -> AsyncGenerator[Tokens, None]:
        """The answer's tokens as they come. Use with ``contextlib.aclosing``.

        Raises:
            LegError: A leg failed.
            EndpointError: No instance can take it.
        """
        if job.request.prefills_here:
            self._metrics.without_context.inc()
            steps = self._generation_alone(job)
        elif job.request.generation_first:
            steps = self._generation_first(job)
        else:
            steps = self._context_first(job)
        async with contextlib.aclosing(steps):
            async for tokens in steps:
                yield tokens

    async def settle(self) -> None:
        """Wait until every abort that was begun has been sent or given up (each is bounded in time)."""
        while self._aborts:
            await asyncio.wait(set(self._aborts))

    # -- context first ------------------------------------------------------------------------------------------------

    async def _context_first(self, job: Job) -> AsyncGenerator[Tokens, None]:
        async def ask_context(leg: _Leg, stack: contextlib.AsyncExitStack) -> Prefilled:
            return await self._post_context(leg, job)

        async with self._sent("context", job, ask_context) as (context, answer):
            job.prefilled(answer)
            if answer.finish_reason is not None:
                self._ended(context)
                self._metrics.without_generation.inc()
                yield Tokens([answer.first_token], answer.finish_reason, answer.logprobs)
                return
            yield Tokens([answer.first_token], None, answer.logprobs)
            peer = self._peer(context, str(context.reservation.generation))

            async def ask_generation(leg: _Leg, stack: contextlib.AsyncExitStack) -> AsyncIterator[Chunk]:
                opened = self._open_generation(leg, job, peer, answer.first_token)
                return await stack.enter_async_context(opened)

            try:
                async with self._sent("generation", job, ask_generation) as (generation, chunks):
                    async for chunk in chunks:
                        # The first line comes after the transfer: the context instance is done with this request.
                        if not context.ended:
                            self._ended(context)
                            context.reservation.release("transferred")
                        generation.renew(self._clock())
                        if chunk.finish_reason is not None:
                            self._ended(generation)
                        yield Tokens(chunk.tokens, chunk.finish_reason, chunk.logprobs)
            except LegError as error:
                if context_is_stale(error):
                    await self._refresh(context)
                raise

    # -- generation alone ---------------------------------------------------------------------------------------------

    async def _generation_alone(self, job: Job) -> AsyncGenerator[Tokens, None]:
        async def ask(leg: _Leg, stack: contextlib.AsyncExitStack) -> AsyncIterator[Chunk]:
            return await stack.enter_async_context(self._open_generation(leg, job, None, None))

        async with self._sent("generation", job, ask) as (generation, chunks):
            async for chunk in chunks:
                job.cached_tokens += chunk.cached_tokens
                job.prompt_logprobs += chunk.prompt_logprobs
                generation.renew(self._clock())
                if chunk.finish_reason is not None:
                    self._ended(generation)
                yield Tokens(chunk.tokens, chunk.finish_reason, chunk.logprobs)

    # -- generation first ---------------------------------------------------------------------------------------------

    async def _generation_first(self, job: Job) -> AsyncGenerator[Tokens, None]:
        async with contextlib.AsyncExitStack() as stack:
            context = await stack.enter_async_context(self._leg("context", job, revalidate=True))
            generation = await stack.enter_async_context(self._leg("generation", job))
            peer = self._peer(context, str(context.reservation.generation))
            events: asyncio.Queue[Chunk | asyncio.Task[Any]] = asyncio.Queue()

            async def ask_generation(leg: _Leg, stack: contextlib.AsyncExitStack) -> AsyncIterator[Chunk]:
                return await stack.enter_async_context(self._open_generation(leg, job, peer, None))

            async def consume() -> None:
                nonlocal generation
                unreachable: tuple[str, ...] = ()
                while True:
                    async with contextlib.AsyncExitStack() as opened:
                        try:
                            chunks = await self._refreshed_once(generation, ask_generation, opened)
                        except LegError as error:
                            unreachable = self._left_behind(generation, error, unreachable)
                        else:
                            async for chunk in chunks:
                                events.put_nowait(chunk)
                            return
                    generation = await stack.enter_async_context(self._leg("generation", job, exclude=unreachable))
                    self._metrics.role("generation").retry.inc()

            async def prefill() -> Prefilled:
                await self._order.turn()
                return await self._post_context(context, job)

            def prefilled(answer: Prefilled) -> None:
                job.prefilled(answer)
                self._ended(context)
                context.reservation.release("prefilled")

            consuming = asyncio.create_task(consume(), name=f"generation {job.request_id}")
            prefilling = asyncio.create_task(prefill(), name=f"context {job.request_id}")
            tasks: tuple[asyncio.Task[Any], ...] = (consuming, prefilling)
            for task in tasks:
                task.add_done_callback(events.put_nowait)

            async def judge(task: asyncio.Task[Any]) -> None:
                """Take in how a leg's task ended; what failed ends the request, and may teach the directory something."""
                try:
                    await task
                except LegError as error:
                    await self._heal(generation if task is consuming else context, context, error)
                    raise
                if task is prefilling and not context.ended:
                    prefilled(prefilling.result())

            try:
                finished, wants_first = False, job.request.sampling.logprobs is not None
                while not (finished and context.ended):
                    event = await events.get()
                    if isinstance(event, asyncio.Task):
                        await judge(event)
                        continue
                    generation.renew(self._clock())
                    finished = event.finish_reason is not None
                    if finished:
                        self._ended(generation)
                        # The counts are in the context leg's answer, which is on its way: the last piece waits for it.
                        await judge(prefilling)
                    logprobs = event.logprobs
                    if wants_first and event.tokens:
                        # What is told of the first token is in the context leg's answer.
                        wants_first = False
                        await judge(prefilling)
                        logprobs = (*prefilling.result().logprobs, *logprobs)
                    yield Tokens(event.tokens, event.finish_reason, logprobs)
            finally:
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.gather(*tasks, return_exceptions=True)

    # -- legs ---------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _leg(
        self, role: str, job: Job, *, revalidate: bool = False, exclude: tuple[str, ...] = ()
    ) -> AsyncIterator[_Leg]:
        """A reserved leg; leaving aborts it if it was sent and has not ended, and releases it."""
        weight = job.request.prompt_count + (job.request.sampling.max_tokens if role == "generation" else 0)
        hint = await self._routers.hint(role, job.request, job.block_names)
        async with self._directory.reserve(
            role,
            job.request_id,
            weight=weight,
            revalidate=revalidate,
            timeout_s=min(self._left_s(job), self._instance_wait_s),
            exclude=exclude,
            affinity=hint,
        ) as reservation:
            leg = _Leg(role, reservation, job)
            self._tell(leg, GIVEN)
            if self._choices is not None:
                self._choices.chosen(job.request_id, reservation, weight, hint, exclude)
            try:
                yield leg
            finally:
                if leg.sent_s is not None and not leg.ended:
                    if job.satisfied:
                        self._ended(leg)
                    else:
                        self._metrics.role(role).error.inc()
                    self._tell(leg, STOPPED)
                    self._abort(leg.server, job.request_id)

    @contextlib.asynccontextmanager
    async def _sent(
        self, role: str, job: Job, ask: Callable[[_Leg, contextlib.AsyncExitStack], Awaitable[_Answer]]
    ) -> AsyncIterator[tuple[_Leg, _Answer]]:
        """Reserve a server, send, and give the leg with its answer. Moves on while a server cannot be reached.

        Args:
            role: Whose leg.
            job: The request.
            ask: Sends; what it enters on the stack is left with the leg.
        """
        unreachable: tuple[str, ...] = ()
        while True:
            async with contextlib.AsyncExitStack() as stack:
                leg = await stack.enter_async_context(self._leg(role, job, exclude=unreachable))
                try:
                    answer = await self._refreshed_once(leg, ask, stack)
                except LegError as error:
                    unreachable = self._left_behind(leg, error, unreachable)
                else:
                    yield leg, answer
                    return
            self._metrics.role(role).retry.inc()

    def _left_behind(self, leg: _Leg, error: LegError, unreachable: tuple[str, ...]) -> tuple[str, ...]:
        """The servers that a leg has tried in vain, after one more; where no other may be tried, what happened is raised."""
        if not error.received:
            leg.ended = True
        if error.code != UNREACHABLE:
            raise error
        leg.reservation.unreachable()
        self._tell(leg, "cannot be reached")
        unreachable = (*unreachable, leg.server)
        if len(unreachable) >= _CONNECT_TRIES or len(unreachable) >= len(self._directory.servers(leg.role)):
            raise error
        return unreachable

    async def _refreshed_once(
        self,
        leg: _Leg,
        ask: Callable[[_Leg, contextlib.AsyncExitStack], Awaitable[_Answer]],
        stack: contextlib.AsyncExitStack,
    ) -> _Answer:
        """Send; where the receiver refuses the generation, which touches nothing there, once more after a refresh."""
        try:
            return await ask(leg, stack)
        except StaleGeneration:
            # The directory learned of a new lifetime between the pick and the send: nothing has left yet.
            pass
        except LegError as error:
            # A stale context generation is not for this leg to mend: the KV that it wants went with its instance.
            if error.code != wire.STALE_GENERATION or context_is_stale(error):
                raise
        self._metrics.role(leg.role).retry.inc()
        self._tell(leg, "was replaced: asked again")
        await leg.reservation.prove_stale()
        return await ask(leg, stack)

    async def _heal(self, leg: _Leg, context: _Leg, error: LegError) -> None:
        """After a failure that may not be tried again: what it proves about the server helps the next request."""
        if not error.received:
            leg.ended = True
        if error.code == wire.STALE_GENERATION:
            await self._refresh(context if context_is_stale(error) else leg)
        elif error.code == UNREACHABLE:
            leg.reservation.unreachable()

    @staticmethod
    async def _refresh(leg: _Leg) -> None:
        with contextlib.suppress(EndpointError):
            await leg.reservation.prove_stale()

    async def _post_context(self, leg: _Leg, job: Job) -> Prefilled:
        request = msgspec.structs.replace(job.request, deadline_s=self._left_s(job))
        generation = str(leg.reservation.generation)
        self._sending(leg, job)
        answer = await self._legs.context(leg.server, request, generation)
        if leg.sent_s is not None:
            self._metrics.context.first_token.observe(self._clock() - leg.sent_s)
        self._first_token(leg)
        return answer

    @contextlib.asynccontextmanager
    async def _open_generation(
        self, leg: _Leg, job: Job, peer: wire.PeerContext | None, first_token: int | None
    ) -> AsyncIterator[AsyncIterator[Chunk]]:
        request = msgspec.structs.replace(job.request, deadline_s=self._left_s(job), first_token=first_token)
        generation = str(leg.reservation.generation)
        self._sending(leg, job)
        async with (
            self._legs.generation(leg.server, request, generation, peer) as chunks,
            contextlib.aclosing(self._measured(leg, chunks)) as measured,
        ):
            yield measured

    async def _measured(self, leg: _Leg, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[Chunk, None]:
        first_s = None
        count = 0
        async for chunk in chunks:
            now_s = self._clock()
            if first_s is None and leg.sent_s is not None:
                first_s = now_s
                self._first_token(leg)
                self._metrics.generation.first_token.observe(now_s - leg.sent_s)
            else:
                count += len(chunk.tokens)
            if chunk.finish_reason is not None and first_s is not None and count:
                self._metrics.generation.per_token.observe((now_s - first_s) / count)
            yield chunk

    def _sending(self, leg: _Leg, job: Job) -> None:
        # First, because it refuses what has become stale meanwhile; then nothing was sent and nothing is to be aborted.
        leg.reservation.dispatched()
        self._metrics.role(leg.role).total.inc()
        leg.sent_s = self._clock()
        if not job.servers:
            self._metrics.queue_latency.observe(max(leg.sent_s - job.accepted, 0.0))
        job.servers[leg.role] = leg.server
        self._tell(leg, SENT)

    def _first_token(self, leg: _Leg) -> None:
        if leg.job.first_token_s is None:
            leg.job.first_token_s = self._clock()
        self._tell(leg, FIRST_TOKEN)

    def _tell(self, leg: _Leg, what: str) -> None:
        if leg.job.story is not None:
            leg.job.story.tell(self._clock(), what, leg.job.request_id, leg.role, leg.server)

    def _ended(self, leg: _Leg) -> None:
        if not leg.ended and leg.sent_s is not None:
            leg.ended = True
            metrics = self._metrics.role(leg.role)
            metrics.completed.inc()
            metrics.complete.observe(self._clock() - leg.sent_s)
            self._tell(leg, ENDED)

    @staticmethod
    def _peer(context: _Leg, generation: str) -> wire.PeerContext:
        record = context.reservation.record
        return wire.PeerContext(
            instance_id=record.instance_id,
            endpoint_generation=generation,
            control_addresses=list(record.control_addresses),
            url=context.server,
        )

    def _left_s(self, job: Job) -> float:
        return max(job.deadline - self._clock(), 0.001)

    def _abort(self, server: str, request_id: int) -> None:
        task = asyncio.create_task(
            self._legs.abort(server, request_id, "request ended early"), name=f"abort {request_id}"
        )
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
