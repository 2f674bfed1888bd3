"""Moving KV and getting memory back by proof only: receiver, sender, their transports and channels.

This is one of the package's two public faces; it needs no planner unless it bounces. Events are classes of
``kv_bounce_planner.sessions.events``. For authors of transports and of hosts with proofs of their own there are the modules
``transports.interface``, ``sessions.proof`` and ``sessions.arena``.
"""

from typing import TYPE_CHECKING

from kv_bounce_planner._faces import lazy

if TYPE_CHECKING:
    from kv_bounce_planner._errors import AddressStillExposed as AddressStillExposed
    from kv_bounce_planner._errors import CapacityExceeded as CapacityExceeded
    from kv_bounce_planner._errors import ChannelError as ChannelError
    from kv_bounce_planner._errors import DuplicateTransfer as DuplicateTransfer
    from kv_bounce_planner._errors import KVTransferError as KVTransferError
    from kv_bounce_planner._errors import StaleIdentity as StaleIdentity
    from kv_bounce_planner._errors import TransfersOutstanding as TransfersOutstanding
    from kv_bounce_planner._errors import WouldBlock as WouldBlock
    from kv_bounce_planner.sessions.arena import BounceArena as BounceArena
    from kv_bounce_planner.sessions.config import ExpectedOperation as ExpectedOperation
    from kv_bounce_planner.sessions.config import SessionConfig as SessionConfig
    from kv_bounce_planner.sessions.config import SessionResources as SessionResources
    from kv_bounce_planner.sessions.events import DrainReport as DrainReport
    from kv_bounce_planner.sessions.events import PeerEvidence as PeerEvidence
    from kv_bounce_planner.sessions.events import SessionEvent as SessionEvent
    from kv_bounce_planner.sessions.identity import OperationIdentity as OperationIdentity
    from kv_bounce_planner.sessions.identity import PeerId as PeerId
    from kv_bounce_planner.sessions.identity import RequestKey as RequestKey
    from kv_bounce_planner.sessions.identity import TransferIdentity as TransferIdentity
    from kv_bounce_planner.sessions.keeper import PeerKeeper as PeerKeeper
    from kv_bounce_planner.sessions.ledgers import ExposureLedger as ExposureLedger
    from kv_bounce_planner.sessions.messages import ReceiveRequest as ReceiveRequest
    from kv_bounce_planner.sessions.processes import ProcessIdentity as ProcessIdentity
    from kv_bounce_planner.sessions.processes import ProcessWatch as ProcessWatch
    from kv_bounce_planner.sessions.proof import OwnedMemory as OwnedMemory
    from kv_bounce_planner.sessions.proof import ProvenMemory as ProvenMemory
    from kv_bounce_planner.sessions.proof import TransportClass as TransportClass
    from kv_bounce_planner.sessions.proof import free as free
    from kv_bounce_planner.sessions.proof import step_retired as step_retired
    from kv_bounce_planner.sessions.receiver import Receiver as Receiver
    from kv_bounce_planner.sessions.send_core import TerminalSnapshot as TerminalSnapshot
    from kv_bounce_planner.sessions.sender import Loan as Loan
    from kv_bounce_planner.sessions.sender import Sender as Sender
    from kv_bounce_planner.transports._nixl import NixlConfig as NixlConfig
    from kv_bounce_planner.transports._nixl import NixlTransport as NixlTransport
    from kv_bounce_planner.transports._zmq import ZmqControlChannel as ZmqControlChannel
    from kv_bounce_planner.transports.interface import ControlChannel as ControlChannel
    from kv_bounce_planner.transports.interface import MemoryRegion as MemoryRegion
    from kv_bounce_planner.transports.interface import Transport as Transport

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "_errors": (
            "KVTransferError",
            "WouldBlock",
            "ChannelError",
            "DuplicateTransfer",
            "StaleIdentity",
            "CapacityExceeded",
            "AddressStillExposed",
            "TransfersOutstanding",
        ),
        "sessions.identity": (
            "PeerId",
            "RequestKey",
            "TransferIdentity",
            "OperationIdentity",
        ),
        "sessions.config": (
            "SessionConfig",
            "SessionResources",
            "ExpectedOperation",
        ),
        "sessions.events": (
            "SessionEvent",
            "DrainReport",
            "PeerEvidence",
        ),
        "sessions.receiver": ("Receiver",),
        "sessions.sender": ("Sender", "Loan"),
        "sessions.send_core": ("TerminalSnapshot",),
        "sessions.messages": ("ReceiveRequest",),
        "sessions.ledgers": ("ExposureLedger",),
        "sessions.arena": ("BounceArena",),
        "sessions.keeper": ("PeerKeeper",),
        "sessions.processes": ("ProcessIdentity", "ProcessWatch"),
        "sessions.proof": (
            "OwnedMemory",
            "ProvenMemory",
            "TransportClass",
            "free",
            "step_retired",
        ),
        "transports.interface": (
            "Transport",
            "ControlChannel",
            "MemoryRegion",
        ),
    },
    {
        "transports._nixl": (
            "nixl",
            (
                "NixlTransport",
                "NixlConfig",
            ),
        ),
        "transports._zmq": ("zmq", ("ZmqControlChannel",)),
    },
)
