"""Homes of conversations: the least recently used is forgotten first; changed by whole calls only.

A table of 65,536 homes cannot be copied for each call. So a call notes what it changes beside the table, which all versions
share; once the call is done, the next one writes the notes into the table. Writing them again is harmless: an interrupt in the
middle of it costs nothing, because the notes are kept until all are written.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple


class Home(NamedTuple):
    """Of one conversation."""

    rank: int
    #: Hash of key, rank and the moment of its last use.
    mark: int


class Homes:
    """One version of the table. See the module."""

    __slots__ = ("_gone", "_new", "_sum", "_table", "_uses")

    def __init__(self, table: OrderedDict[str, Home] | None = None, uses: int = 0, total: int = 0) -> None:
        self._table: OrderedDict[str, Home] = OrderedDict() if table is None else table
        #: What this version changes: uses in their order, and the homes forgotten.
        self._new: dict[str, Home] = {}
        self._gone: list[str] = []
        #: Uses of homes so far, and the sum of all marks: the digest of a table that nobody has to read.
        self._uses = uses
        self._sum = total

    def draft(self) -> Homes:
        """The next version, for one call. This one has to be that of the last call that was done."""
        self._settle()
        return Homes(self._table, self._uses, self._sum)

    def _settle(self) -> None:
        for key in self._gone:
            self._table.pop(key, None)
        for key, home in self._new.items():
            self._table[key] = home
            self._table.move_to_end(key)
        self._gone = []
        self._new = {}

    def __len__(self) -> int:
        self._settle()
        return len(self._table)

    def rank_of(self, key: str) -> int | None:
        """The rank that a conversation is at home on; to the call that works on this version, or once it was done."""
        found = self._new.get(key) or self._table.get(key)
        return None if found is None else found.rank

    def settled_rank_of(self, key: str) -> int | None:
        """The same, of the version of the last call that was done."""
        self._settle()
        return self.rank_of(key)

    def use(self, key: str, rank: int) -> None:
        """A use of a home, now the most recent; the digest follows by what came and what went."""
        before = self._new.pop(key, None) or self._table.get(key)
        if before is not None:
            self._sum -= before.mark
        self._uses += 1
        text = b"%d %d " % (rank, self._uses) + key.encode("utf-8", "surrogatepass")
        mark = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        self._new[key] = Home(rank, mark)
        self._sum += mark

    def trim(self, homes_max: int) -> None:
        """Forget the least recently used, at the end of a call. Only as many homes are looked at as the call used or loses."""
        if not self._new:
            return
        table, new = self._table, self._new
        surplus = len(table) + sum(key not in table for key in new) - homes_max
        if surplus <= 0:
            return
        for key, home in table.items():
            if key not in new:
                self._gone.append(key)
                self._sum -= home.mark
                surplus -= 1
                if not surplus:
                    return
        for key in list(new)[:surplus]:
            self._sum -= new.pop(key).mark
            self._gone.append(key)

    def digest_part(self) -> tuple[int, int]:
        """Equal where homes and their order of use are: kept up to date by each use, read at once."""
        return self._uses, self._sum % (1 << 128)
