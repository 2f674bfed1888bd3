"""What may be believed about memory that a peer could write, as types.

Theory. A block is OWNED while any write that names it may still land or read it, and while any compute step holds it.
It leaves that state by proof or not at all: OWNED → PROVEN → FREE, or OWNED → QUARANTINED. No time, no error, no report
of failure and no count of results is a proof. What counts, for the receiver of one operation:

- never exposed: no address of it left this process;
- sealed: the sender's acknowledgement that it never posted and never will;
- done: the exact-match notification of every part of the write;
- drained: the sender's acknowledgement, for exactly this operation, that all it posted has completed and it is sealed;
- and when none of these can come any more, what the transport's class allows (``required_proofs``): it depends on who
  executes the write, because a write goes on exactly as long as its executor.

A ``ProvenMemory`` can only be made by ``OwnedMemory.prove`` from proofs that cover every operation, and ``free`` takes
nothing else: freeing without proof does not type-check, and raises where types are not checked.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, final

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.sessions.identity import OperationIdentity

ClaimT = TypeVar("ClaimT")


class WriteExecutor(enum.StrEnum):
    """Who moves the bytes: the transport's class. Named for a write; in a read "sender" is who began it, the reader."""

    RECEIVER = "receiver-executed"  # tcp, active messages: the target's own agent copies them in
    SENDER = "sender-executed"  # CMA, xpmem, cuda_ipc: the sender's process (or its device) stores into the target
    NIC = "nic-executed"  # RDMA
    UNKNOWN = "unknown"


class Evidence(enum.StrEnum):
    """Facts about a peer or about our own transport that a class proof is made of."""

    AGENT_DESTROYED = "our agent for that peer was destroyed"
    PEER_REAPED = "the peer's process was reaped"
    DEREGISTERED = "the memory was deregistered successfully"
    QUEUE_PAIRS_GONE = "the queue pairs to that peer are gone"
    OWN_EXIT = "our own process exited"


#: Several classes need all of their proofs; an unknown one is proven only by the exit of this process, which no
#: code of this process can see.
CLASS_PROOFS: Final[Mapping[WriteExecutor, frozenset[Evidence]]] = {
    WriteExecutor.RECEIVER: frozenset({Evidence.AGENT_DESTROYED}),
    WriteExecutor.SENDER: frozenset({Evidence.PEER_REAPED}),
    WriteExecutor.NIC: frozenset({Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE}),
    WriteExecutor.UNKNOWN: frozenset({Evidence.OWN_EXIT}),
}

#: The same for memory that our own agent reads into. Over CMA the reader's own process stores, inside its agent's calls; over
#: tcp its agent copies in what came; so in both its agent's end is the proof, and what the peer's process does is none.
READER_PROOFS: Final[Mapping[WriteExecutor, frozenset[Evidence]]] = {
    **CLASS_PROOFS,
    WriteExecutor.SENDER: frozenset({Evidence.AGENT_DESTROYED}),
}

_R, _S, _N = WriteExecutor.RECEIVER, WriteExecutor.SENDER, WriteExecutor.NIC
#: UCX transports by name. Only tcp and cma were qualified by reproducers (tests/test_late_write.py); the others stand as
#: the rule states them. posix and sysv carry both eager messages (the target copies) and direct stores (the sender does).
UCX_CLASSES: Final[Mapping[str, frozenset[WriteExecutor]]] = {
    "tcp": frozenset({_R}),
    "cma": frozenset({_S}),
    "xpmem": frozenset({_S}),
    "knem": frozenset({_S}),
    "cuda_ipc": frozenset({_S}),
    "cuda_copy": frozenset({_S}),
    "gdr_copy": frozenset({_S}),
    "posix": frozenset({_R, _S}),
    "sysv": frozenset({_R, _S}),
    "self": frozenset({_S}),
    "rc": frozenset({_N}),
    "rc_verbs": frozenset({_N}),
    "rc_mlx5": frozenset({_N}),
    "dc_mlx5": frozenset({_N}),
    "ud": frozenset({_R}),
}
#: Transports that cannot leave a host (another kernel, by its boot identifier). cuda_ipc can, over multi-node NVLink.
HOST_ONLY: Final = frozenset({"cma", "xpmem", "knem", "posix", "sysv", "self"})


@dataclass(frozen=True)
class TransportClass:
    """Which executors the transfers of one transport may have.

    Args:
        key: Stable text, ``family:name,name``, e.g. ``ucx:tcp``; part of calibration keys and of the first message to a peer.
        executors: Every executor that a transfer over it may have; empty is refused.
        host: Identifies this side's host (kernel), or empty.
        afar: The executors towards a peer on another host, where fewer transports can be used; None: the same.
    """

    key: str
    executors: frozenset[WriteExecutor]
    host: str = ""
    afar: frozenset[WriteExecutor] | None = None

    def __post_init__(self) -> None:
        if not self.executors or (self.afar is not None and not self.afar):
            raise ValueError(f"transport {self.key!r} names no executor: use WriteExecutor.UNKNOWN")

    @classmethod
    def of_ucx(cls, transports: Iterable[str], host: str = "") -> TransportClass:
        """The class of a UCX transport list; a name that is not known makes the whole class unknown."""
        names = tuple(transports)
        far = [name for name in names if name not in HOST_ONLY]
        return cls("ucx:" + ",".join(names), _executors(names), host, _executors(far) if far else None)

    def meets(self, key: str) -> bool:
        """Whether a peer that shows this key can be reached: the same family, and a transport in common.

        What is used then is in both lists, so our own class covers it: hosts need not be alike.
        """
        (family, _, ours), (other, _, theirs) = self.key.partition(":"), key.partition(":")
        return family == other and bool(set(ours.split(",")) & set(theirs.split(",")))

    def towards(self, host: str) -> TransportClass:
        """The class of transfers with a peer on ``host``: where both hosts are known and differ, that of the network alone."""
        if self.afar is None or not host or not self.host or host == self.host:
            return self
        return TransportClass(self.key, self.afar, self.host, self.afar)

    @property
    def required(self) -> frozenset[Evidence]:
        """All evidence that together proves dead what a peer may still do to memory that was exposed to it."""
        return required_proofs(self.executors)

    @property
    def required_of_reader(self) -> frozenset[Evidence]:
        """All evidence that together proves dead what our own reads may still do to memory."""
        return required_proofs(self.executors, READER_PROOFS)


def _executors(names: Iterable[str]) -> frozenset[WriteExecutor]:
    unknown = frozenset({WriteExecutor.UNKNOWN})
    found: frozenset[WriteExecutor] = frozenset().union(*(UCX_CLASSES.get(name, unknown) for name in names))
    return found or unknown


def required_proofs(
    executors: Iterable[WriteExecutor], proofs: Mapping[WriteExecutor, frozenset[Evidence]] = CLASS_PROOFS
) -> frozenset[Evidence]:
    """The evidence that proves a doubtful transfer over these executors dead: the union over the classes."""
    needed: frozenset[Evidence] = frozenset()
    for executor in executors:
        needed |= proofs[executor]
    return needed


class ProofKind(enum.StrEnum):
    NEVER_EXPOSED = "never exposed"
    SEALED_NEVER_POSTED = "sealed, never posted"
    DONE = "exact-match done"
    DRAINED = "drained and sealed"
    CLASS = "transport class"
    NEVER_POSTED = "never posted by us"
    COMPLETED = "all that we posted completed"
    READ_OVER = "the reader's word that nothing is read any more"
    READER_DEAD = "the reader's process was reaped"
    PEER_DEAD_REGISTERED = "receiver dead, memory still registered"
    OWN_AGENT_DESTROYED = "our own agent destroyed"
    STEP_RETIRED = "compute step retired"


_SEAL: Final = object()


class _Sealed:
    """What nobody can make, change, copy, extend or read from a file: its type alone says that it is genuine.

    (Python cannot stop ``object.__setattr__``; it can make everything else fail.)
    """

    __slots__ = ()

    def __init_subclass__(cls, *, sealed: bool = False) -> None:
        if not sealed:
            raise TypeError(f"{cls.__name__} extends a type that decides over memory: it is final")
        super().__init_subclass__()

    def __setattr__(self, name: str, value: object) -> None:
        if name == "__orig_class__":  # ``OwnedMemory[Blocks](...)``: typing tries, and lives without
            raise AttributeError(name)
        raise LocalProtocolError(f"a {type(self).__name__} does not change")

    def __delattr__(self, name: str) -> None:
        raise LocalProtocolError(f"a {type(self).__name__} does not change")

    def __copy__(self) -> Any:
        raise LocalProtocolError(f"a {type(self).__name__} exists once")

    def __deepcopy__(self, memo: object) -> Any:
        raise LocalProtocolError(f"a {type(self).__name__} exists once")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise LocalProtocolError(f"a {type(self).__name__} does not leave its process")

    def _assign(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@final
class Proof(_Sealed, sealed=True):
    """Why one operation can no longer touch memory. Made by the state machines of this package only."""

    __slots__ = ("evidence", "kind", "operation")

    kind: ProofKind
    operation: OperationIdentity | str
    evidence: frozenset[Evidence]

    def __init__(
        self,
        kind: ProofKind,
        operation: OperationIdentity | str,
        evidence: frozenset[Evidence] = frozenset(),
        *,
        _seal: object = None,
    ) -> None:
        if _seal is not _SEAL:
            raise LocalProtocolError("a proof is made by the session that observed it, not by hand")
        subject = str if kind is ProofKind.STEP_RETIRED else OperationIdentity
        if type(operation) is not subject:
            raise LocalProtocolError(f"{kind.value!r} is a proof about a {subject.__name__}, got {operation!r}")
        self._assign(kind=kind, operation=operation, evidence=evidence)

    def __repr__(self) -> str:
        return f"Proof({self.kind.value}, {self.operation})"


def _prove(kind: ProofKind, operation: OperationIdentity | str, evidence: Iterable[Evidence] = ()) -> Proof:
    return Proof(kind, operation, frozenset(evidence), _seal=_SEAL)


@final
class QuarantinedMemory(_Sealed, Generic[ClaimT], sealed=True):
    """Memory that is never used again in this process. It has no way out."""

    __slots__ = ("byte_count", "claim", "reason")

    claim: ClaimT
    byte_count: int
    reason: str

    def __init__(self, claim: ClaimT, byte_count: int, reason: str, *, _seal: object = None) -> None:
        if _seal is not _SEAL:
            raise LocalProtocolError("memory is quarantined through OwnedMemory.quarantine")
        self._assign(claim=claim, byte_count=byte_count, reason=reason)


@final
class ProvenMemory(_Sealed, Generic[ClaimT], sealed=True):
    """Memory that nothing can write or read any more, with the proofs. The only thing that ``free`` takes."""

    __slots__ = ("_claim", "_freed", "proofs")

    _claim: ClaimT
    _freed: bool
    proofs: tuple[Proof, ...]

    def __init__(self, claim: ClaimT, proofs: tuple[Proof, ...], *, _seal: object = None) -> None:
        if _seal is not _SEAL:
            raise LocalProtocolError("memory becomes proven through OwnedMemory.prove")
        self._assign(_claim=claim, _freed=False, proofs=proofs)

    @property
    def claim(self) -> ClaimT:
        return self._claim


@final
class OwnedMemory(_Sealed, Generic[ClaimT], sealed=True):
    """Memory that listed operations may still touch.

    Args:
        claim: Whatever names the memory for its user.
        operations: Every owner: one proof each is needed.
        byte_count: For accounting if it has to be quarantined.
    """

    __slots__ = ("_claim", "_ended", "byte_count", "operations")

    _claim: ClaimT
    _ended: str
    operations: frozenset[OperationIdentity | str]
    byte_count: int

    def __init__(self, claim: ClaimT, operations: Iterable[OperationIdentity | str], byte_count: int = 0) -> None:
        owners = frozenset(operations)
        for owner in owners:
            if type(owner) is not OperationIdentity and type(owner) is not str:
                raise LocalProtocolError(f"memory is owned by operations and named steps, not by {owner!r}")
        self._assign(_claim=claim, _ended="", operations=owners, byte_count=byte_count)

    def prove(self, proofs: Iterable[Proof]) -> ProvenMemory[ClaimT]:
        """Turn ownership into proven memory.

        Raises:
            LocalProtocolError: A proof is missing or is not a ``Proof``, or this memory already left ownership. It
                stays owned.
        """
        if self._ended:
            raise LocalProtocolError(f"memory already left ownership: {self._ended}")
        given = tuple(proofs)
        for proof in given:
            if type(proof) is not Proof:
                raise LocalProtocolError(f"{proof!r} is not a proof")
        missing = self.operations - {proof.operation for proof in given}
        if missing:
            raise LocalProtocolError(f"no proof for {sorted(map(str, missing))}: the memory stays owned")
        self._assign(_ended="proven")
        return ProvenMemory(self._claim, given, _seal=_SEAL)

    def quarantine(self, reason: str) -> QuarantinedMemory[ClaimT]:
        """Give the memory up for the life of this process."""
        if self._ended:
            raise LocalProtocolError(f"memory already left ownership: {self._ended}")
        self._assign(_ended=f"quarantined: {reason}")
        return QuarantinedMemory(self._claim, self.byte_count, reason, _seal=_SEAL)


def free(memory: ProvenMemory[ClaimT]) -> ClaimT:
    """PROVEN → FREE, once: returns the claim, whose blocks may be used again.

    Raises:
        LocalProtocolError: Not proven memory, or freed before.
    """
    if type(memory) is not ProvenMemory:
        raise LocalProtocolError(f"only proven memory can be freed, got {type(memory).__name__}")
    if memory._freed:
        raise LocalProtocolError("this memory was freed before")
    memory._assign(_freed=True)
    return memory._claim


class BlockState(enum.StrEnum):
    """The states of a block or region, and their only edges."""

    OWNED = "OWNED"
    PROVEN = "PROVEN"
    FREE = "FREE"
    QUARANTINED = "QUARANTINED"


BLOCK_TRANSITIONS: Final[Mapping[BlockState, frozenset[BlockState]]] = {
    BlockState.FREE: frozenset({BlockState.OWNED}),
    BlockState.OWNED: frozenset({BlockState.PROVEN, BlockState.QUARANTINED}),
    BlockState.PROVEN: frozenset({BlockState.FREE}),
    BlockState.QUARANTINED: frozenset(),
}


def step_retired(step: str) -> Proof:
    """The host's proof that a compute step's device work ended (its event was seen): compute is an owner too.

    The one proof that is made outside a session, because only the host sees its device. It covers owners that are named
    steps (text), never a transfer's operation. Name steps uniquely.

    Raises:
        LocalProtocolError: ``step`` is not text.
    """
    return _prove(ProofKind.STEP_RETIRED, step)
