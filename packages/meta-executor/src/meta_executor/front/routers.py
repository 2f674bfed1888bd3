"""Which instance of a role gets a leg: one policy per role, each with what it remembers.

    round_robin      in turn
    load_balancing   the least loaded, by tokens or by requests
    kv_cache_aware   where most of the prompt is cached already, less what is ahead of it there
    conversation     where its conversation went before; the least loaded where it has none

A policy is asked inside the directory's pick, so it only computes; what it wants to know of a request comes with the question
(:class:`Hint`). It remembers what it chose at once, so that two requests that come together see each other. Nothing is asked
of an instance: what one has cached is what was sent there, as far as the memory here reaches.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from endpoint_lifecycle import Candidate, PickRequest
from meta_executor.config import FrontRouterConfig
from meta_executor.executor.request import Request

#: Blocks of longer prompts are named in a thread (tokens), so that they do not hold up the streams of others.
_NAMED_INLINE_TOKENS = 4096
#: Instances whose blocks are remembered beyond as many as can be picked (count): those that have left are forgotten.
_SERVERS_BESIDES = 8


@dataclass(frozen=True)
class Hint:
    """What a policy wants to know of a request before it is asked.

    Attributes:
        blocks: Names of the prompt's whole blocks; each stands for all tokens up to its end.
        conversation: Its name; "" for none.
    """

    blocks: tuple[bytes, ...] = ()
    conversation: str = ""


class Policy(Protocol):
    """Chooses one of several instances of one role."""

    def pick(self, candidates: Sequence[Candidate], hint: Hint) -> Candidate:
        """One of them (at least one)."""
        ...

    def why(self, hint: Hint, count: int) -> str:
        """The rule in words, for who asks later; ``count`` instances could be picked."""
        ...


class LoadBalancing:
    """The least loaded.

    Args:
        by_tokens: Tokens decide, then requests; else requests, then tokens.
    """

    def __init__(self, *, by_tokens: bool) -> None:
        self._by_tokens = by_tokens

    def pick(self, candidates: Sequence[Candidate], hint: Hint) -> Candidate:
        """See :class:`Policy`."""
        return min(candidates, key=self.load)

    def load(self, candidate: Candidate) -> tuple[int, int]:
        """What is compared."""
        both = (candidate.weight, candidate.count)
        return both if self._by_tokens else both[::-1]

    def why(self, hint: Hint, count: int) -> str:
        """See :class:`Policy`."""
        return f"least loaded of {count}"


class RoundRobin:
    """In turn."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    def pick(self, candidates: Sequence[Candidate], hint: Hint) -> Candidate:
        """See :class:`Policy`."""
        return candidates[next(self._turns) % len(candidates)]

    def why(self, hint: Hint, count: int) -> str:
        """See :class:`Policy`."""
        return f"next in turn of {count}"


class ByConversation:
    """A conversation stays where it is while that instance can be picked; a new one goes to the least loaded.

    Args:
        otherwise: For who has no home.
        homes_max: Conversations remembered (count); the one that was longest silent is forgotten first.
    """

    def __init__(self, otherwise: LoadBalancing, homes_max: int) -> None:
        self._otherwise = otherwise
        self._homes_max = homes_max
        self._homes: OrderedDict[str, str] = OrderedDict()

    def pick(self, candidates: Sequence[Candidate], hint: Hint) -> Candidate:
        """See :class:`Policy`."""
        home = self._homes.get(hint.conversation) if hint.conversation else None
        found = next((candidate for candidate in candidates if candidate.server == home), None)
        if found is None:
            found = self._otherwise.pick(candidates, hint)
        if hint.conversation:
            self._homes[hint.conversation] = found.server
            self._homes.move_to_end(hint.conversation)
            while len(self._homes) > self._homes_max:
                self._homes.popitem(last=False)
        return found

    def why(self, hint: Hint, count: int) -> str:
        """See :class:`Policy`."""
        return f"home of its conversation, of {count}" if hint.conversation else self._otherwise.why(hint, count)


class KvCacheAware:
    """Where it costs least: tokens that are not cached there, and those that are ahead of it there.

    Args:
        otherwise: Decides among equals.
        block_tokens: Tokens of one block (count).
        blocks_max: Blocks remembered of each instance (count); the one that was longest unused is forgotten first.
    """

    def __init__(self, otherwise: LoadBalancing, block_tokens: int, blocks_max: int) -> None:
        self._otherwise = otherwise
        self._block_tokens = block_tokens
        self._blocks_max = blocks_max
        self._cached: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def pick(self, candidates: Sequence[Candidate], hint: Hint) -> Candidate:
        """See :class:`Policy`."""

        def cost(candidate: Candidate) -> tuple[int, tuple[int, int]]:
            # Of what is ahead half is done already on the average, and some of it is cached, too.
            ahead = candidate.weight // 2
            load = self._otherwise.load(candidate)
            return ahead - self.cached_blocks(candidate.server, hint) * self._block_tokens, load

        found = min(candidates, key=cost)
        self._remember(found.server, hint)
        while len(self._cached) > len(candidates) + _SERVERS_BESIDES:
            self._cached.popitem(last=False)
        return found

    def cached_blocks(self, server: str, hint: Hint) -> int:
        """Leading blocks of a prompt that were sent there and not forgotten (count)."""
        cached = self._cached.get(server)
        if cached is None:
            return 0
        return next((index for index, name in enumerate(hint.blocks) if name not in cached), len(hint.blocks))

    def _remember(self, server: str, hint: Hint) -> None:
        cached = self._cached.setdefault(server, OrderedDict())
        self._cached.move_to_end(server)
        # The end of a prompt is forgotten before its beginning, which others may share.
        for name in reversed(hint.blocks):
            cached[name] = None
            cached.move_to_end(name)
        while len(cached) > self._blocks_max:
            cached.popitem(last=False)

    def why(self, hint: Hint, count: int) -> str:
        """See :class:`Policy`."""
        return f"fewest tokens to compute and ahead of it, of {count}"


def policy_of(config: FrontRouterConfig) -> Policy:
    """The configured policy, with nothing remembered yet."""
    balanced = LoadBalancing(by_tokens=config.use_tokens)
    if config.type == "round_robin":
        return RoundRobin()
    if config.type == "conversation":
        return ByConversation(balanced, config.remembered_max)
    if config.type == "kv_cache_aware":
        return KvCacheAware(balanced, config.tokens_per_block, config.remembered_max)
    return balanced


def block_names(request: Request, block_tokens: int) -> tuple[bytes, ...]:
    """A name for each whole block of a prompt: a hash of all tokens up to its end and of who may share them."""
    running = hashlib.blake2b(request.cache_salt.encode(), digest_size=16)
    data = memoryview(request.token_ids.astype("<i4", copy=False).tobytes())
    size = block_tokens * 4
    names = []
    for begin in range(0, len(data) - size + 1, size):
        running.update(data[begin : begin + size])
        names.append(running.digest())
    return tuple(names)


class BlockNames:
    """The names of one prompt's blocks: made once for all its answers and their legs."""

    def __init__(self) -> None:
        self._made: dict[int, asyncio.Future[tuple[bytes, ...]]] = {}

    async def of(self, request: Request, block_tokens: int) -> tuple[bytes, ...]:
        """See :func:`block_names`.

        Args:
            request: Has the prompt and the salt, the same ones at each call.
            block_tokens: Tokens of one block (count).
        """
        made = self._made.get(block_tokens)
        if made is None:
            made = self._made[block_tokens] = self._begun(request, block_tokens)
        # Several wait for it; one that leaves takes it from nobody.
        return await asyncio.shield(made)

    @staticmethod
    def _begun(request: Request, block_tokens: int) -> asyncio.Future[tuple[bytes, ...]]:
        if request.prompt_count > _NAMED_INLINE_TOKENS:
            return asyncio.ensure_future(asyncio.to_thread(block_names, request, block_tokens))
        made = asyncio.get_running_loop().create_future()
        made.set_result(block_names(request, block_tokens))
        return made


class Routers:
    """The policies of both roles.

    Args:
        context, generation: How an instance of the role is chosen.
    """

    def __init__(self, context: FrontRouterConfig, generation: FrontRouterConfig) -> None:
        self._configs = {"context": context, "generation": generation}
        self._policies = {role: policy_of(config) for role, config in self._configs.items()}

    async def hint(self, role: str, request: Request, names: BlockNames) -> Hint:
        """What the role's policy wants to know of a request: the ``affinity`` of its reservation."""
        config = self._configs[role]
        blocks = await names.of(request, config.tokens_per_block) if config.type == "kv_cache_aware" else ()
        return Hint(blocks, request.conversation_id or "")

    def pick(self, candidates: Sequence[Candidate], request: PickRequest) -> Candidate:
        """The directory's policy."""
        hint = request.affinity if isinstance(request.affinity, Hint) else Hint()
        return self._policies[request.role].pick(candidates, hint)

    def why(self, role: str, hint: Hint, count: int) -> str:
        """The rule in words."""
        return self._policies[role].why(hint, count)

    def name(self, role: str) -> str:
        """The policy's."""
        return self._configs[role].type
