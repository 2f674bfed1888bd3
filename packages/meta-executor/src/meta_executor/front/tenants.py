"""What keeps the clients of one front apart: their conversations, the prefixes they may share, and how much each may have."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Literal

from meta_executor.listener.access import Caller

PrefixSharing = Literal["per_key", "all"]


class Tenants:
    """See the module.

    Args:
        secret: Nobody outside the run knows it.
        sharing: Whose cached prefixes a request may find: those of its own key, or everybody's.
    """

    def __init__(self, secret: bytes, sharing: PrefixSharing) -> None:
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"tenants").digest()
        self._sharing = sharing
        self._running: Counter[str] = Counter()

    def conversation(self, caller: Caller, conversation_id: str | None) -> str | None:
        """The id under which a conversation is known inside: one key's never meets another's of the same name."""
        if conversation_id is None or not caller.name:
            return conversation_id
        return self._mixed("conversation", caller.name, conversation_id)

    def cache_salt(self, caller: Caller) -> str:
        """What a request's prefixes are mixed with; "" where they are everybody's."""
        return self._mixed("prefix", caller.name) if caller.name and self._sharing == "per_key" else ""

    def running(self, caller: Caller) -> int:
        """Requests that this caller has now (count)."""
        return self._running[caller.account]

    def begin(self, caller: Caller, count: int) -> None:
        """So many more of them."""
        self._running[caller.account] += count

    def end(self, caller: Caller, count: int) -> None:
        """So many less."""
        self._running[caller.account] -= count
        if not self._running[caller.account]:
            del self._running[caller.account]

    def _mixed(self, *parts: str) -> str:
        text = "\0".join(parts).encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=16, key=self._secret).hexdigest()
