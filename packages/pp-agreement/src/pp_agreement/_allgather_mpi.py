"""The baseline's exchange over MPI: one fixed-size Allgather, a second one only when somebody's records overflow it."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from pp_agreement._config import Domain
from pp_agreement._errors import TransportError

SLOT_BYTES = 1024
_LENGTH_BYTES = 4


class MpiExchange:
    """An :class:`pp_agreement.Exchange` on a private communicator of the domain's members; construction is collective."""

    name = "mpi allgather"

    def __init__(self, comm: Any, domain: Domain) -> None:
        group = comm.Get_group()
        members = group.Incl(list(domain.ranks))
        try:
            self._comm = comm.Create_group(members, domain.domain_id % 32_768)
        except MPI.Exception as error:
            raise TransportError(f"no private communicator: {error}") from error
        finally:
            members.Free()
            group.Free()
        self._size = domain.size
        self._slot = bytearray(SLOT_BYTES)
        self._all = bytearray(SLOT_BYTES * domain.size)

    def exchange(self, contribution: bytes) -> list[bytes]:
        """See :class:`Exchange`."""
        length = len(contribution)
        self._slot[:_LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")
        room = SLOT_BYTES - _LENGTH_BYTES
        first = contribution[:room]
        self._slot[_LENGTH_BYTES : _LENGTH_BYTES + len(first)] = first
        try:
            self._comm.Allgather([self._slot, MPI.BYTE], [self._all, MPI.BYTE])
            slots = [memoryview(self._all)[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for i in range(self._size)]
            lengths = [int.from_bytes(slot[:_LENGTH_BYTES], "little") for slot in slots]
            longest = max(lengths)
            if longest <= room:
                return [bytes(slot[_LENGTH_BYTES : _LENGTH_BYTES + n]) for slot, n in zip(slots, lengths)]
            mine = contribution.ljust(longest, b"\0")
            whole = bytearray(longest * self._size)
            self._comm.Allgather([mine, MPI.BYTE], [whole, MPI.BYTE])
        except MPI.Exception as error:
            raise TransportError(str(error)) from error
        return [bytes(whole[i * longest : i * longest + n]) for i, n in enumerate(lengths)]

    def close(self, clean: bool) -> None:
        """Free the communicator when every member does."""
        if clean:
            self._comm.Free()
