"""Receiver-owned plans and sessions for KV cache transfer.

Layout, planning half (pure; depends on numpy and msgspec):

    _errors.py    one error tree: fail open before the reservation, fail closed after the advertisement
    _reasons.py   stable reason codes
    _layout.py    pools, instances, block tables, token ranges; constructors for the field's engines
    _plan.py      exact transfer plans, derivable by either side alone
    _tier.py      cost model, calibration, choice of tier
    _calibration.py  measures a link with its own transport, channel and copiers
    _report.py    a writer's report and its validation
    _codec.py     bytes of reports, plans and block tables
    _explain.py   plans and choices in words
    _draw.py      plans as a picture (SVG by itself, PNG with matplotlib)
    _gather.py    gather and scatter by pointer, host memory
    _threads.py   host copies on a thread of their own
    _copiers.py   the copier for a kind of memory
    _tiles.py     how a copy list is cut for a device
    _torch.py     the same for torch devices       (imports torch only when used)
    _triton.py    the same as one Triton kernel    (imports triton only when used)

Layout, ownership half:

    _identity.py     who, which request, which write; the notification's bytes
    _messages.py     control messages and their bytes
    _states.py       state tables of one operation on both sides, and their only assignment
    _proof.py        proofs and owned, proven and quarantined memory as types; transport classes
    _receive_core.py, _send_core.py   step(event, now_s) -> effects
    _arena.py        bounce reservations; the fail-open boundary as two types
    _quarantine.py   what was given up
    _session.py      Receiver and Sender: the shells that perform effects
    _transport.py    what a session needs of a transport and of a control channel
    _pacing.py       how much the next post may take
    _nixl.py         NixlTransport                 (the one file that imports nixl)
    _zmq.py          ZmqControlChannel             (the one file that imports zmq)
    testing.py       fakes and conformance checks
"""

from typing import TYPE_CHECKING, Any

from kv_bounce_planner.__about__ import __version__
from kv_bounce_planner._arena import AdvertisedReservation, ArenaStatistics, BounceArena, BoundRegion, Reservation
from kv_bounce_planner._calibration import CalibrationTarget, LinkCalibration
from kv_bounce_planner._codec import (
    BLOCKS_BYTES_MAX,
    PLAN_BYTES_MAX,
    REPORT_BYTES_MAX,
    decode_blocks,
    decode_instance,
    decode_layout,
    decode_plan,
    decode_report,
    encode_blocks,
    encode_layout,
    encode_plan,
    encode_report,
)
from kv_bounce_planner._copiers import default_copier
from kv_bounce_planner._draw import draw
from kv_bounce_planner._errors import (
    CodecError,
    KVTransferError,
    LayoutError,
    LocalProtocolError,
    PlanRefused,
    RemoteProtocolError,
    ReportRefused,
    TransferTimeout,
    TransportError,
)
from kv_bounce_planner._explain import (
    COALESCED_PREFIX,
    IN_PLACE_PREFIX,
    coalesced_marker,
    describe,
    explain,
    in_place_marker,
)
from kv_bounce_planner._gather import Copier, CopyHandle, CopyTable, HostCopier, PreparedCopy, gather, scatter
from kv_bounce_planner._identity import OperationIdentity, PeerId, RequestKey, TransferIdentity
from kv_bounce_planner._layout import (
    BlockTable,
    InstanceLayout,
    KVLayout,
    LayerGroup,
    PeerLayouts,
    RequestBlocks,
    TensorView,
    TokenRange,
    from_kv_memory,
    from_sglang,
    from_tensorrt_llm,
    from_tensors,
    from_vllm,
    head_range,
    layer_range,
)
from kv_bounce_planner._messages import ReceiveRequest
from kv_bounce_planner._ownership_errors import (
    AddressStillExposed,
    CapacityExceeded,
    ChannelError,
    DuplicateTransfer,
    StaleIdentity,
    TransfersOutstanding,
    WouldBlock,
)
from kv_bounce_planner._plan import (
    TransferPlan,
    WriterPlan,
    WriterTransfer,
    plan_destination,
    plan_transfer,
    plan_writer,
    request_ranges,
    try_plan_destination,
)
from kv_bounce_planner._proof import (
    BlockState,
    Evidence,
    OwnedMemory,
    Proof,
    ProofKind,
    ProvenMemory,
    QuarantinedMemory,
    TransportClass,
    WriteExecutor,
    free,
    required_proofs,
    step_retired,
)
from kv_bounce_planner._reasons import REASONS, Reason, Refusal
from kv_bounce_planner._report import WriterReport, check_fragments, validate_report
from kv_bounce_planner._send_core import TerminalSnapshot
from kv_bounce_planner._session import (
    CancelReceived,
    DrainReport,
    ExpectedOperation,
    ExposureLedger,
    FatalDiagnosis,
    MemoryQuarantined,
    MemoryReleased,
    OperationDone,
    OperationFailed,
    PeerEvidence,
    PlannerReports,
    Receiver,
    ReceiveRequested,
    RequestServed,
    Sender,
    SessionConfig,
    SessionEvent,
    SourceQuarantined,
    SourceReleased,
    TransferCancelled,
    TransferFailed,
    TransferSucceeded,
)
from kv_bounce_planner._states import IllegalTransition, ReceiveState, SendState
from kv_bounce_planner._threads import ThreadCopier
from kv_bounce_planner._tier import (
    DEFAULT_MODELS,
    Affine,
    CalibrationTransport,
    CostModel,
    Phases,
    Tier,
    TierChoice,
    TierLimits,
    calibrate,
    choose_tier,
)
from kv_bounce_planner._tiles import KernelShape
from kv_bounce_planner._transport import (
    AgentInfo,
    ArrivedMark,
    ControlChannel,
    MemoryRegion,
    Transport,
    TransportProgress,
    WriteJob,
    WriteProgress,
)

if TYPE_CHECKING:
    from kv_bounce_planner._nixl import NixlConfig as NixlConfig
    from kv_bounce_planner._nixl import NixlTransport as NixlTransport
    from kv_bounce_planner._torch import TorchCopier as TorchCopier
    from kv_bounce_planner._triton import TritonCopier as TritonCopier
    from kv_bounce_planner._zmq import ZmqControlChannel as ZmqControlChannel

__all__ = [
    "__version__",
    # errors and reasons
    "KVTransferError",
    "LayoutError",
    "PlanRefused",
    "ReportRefused",
    "CodecError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "TransportError",
    "TransferTimeout",
    "Reason",
    "REASONS",
    "Refusal",
    # layouts
    "KVLayout",
    "LayerGroup",
    "InstanceLayout",
    "PeerLayouts",
    "BlockTable",
    "RequestBlocks",
    "TokenRange",
    "TensorView",
    "from_tensors",
    "from_vllm",
    "from_sglang",
    "from_tensorrt_llm",
    "from_kv_memory",
    "head_range",
    "layer_range",
    # plans
    "TransferPlan",
    "WriterPlan",
    "WriterTransfer",
    "plan_destination",
    "try_plan_destination",
    "plan_writer",
    "plan_transfer",
    "request_ranges",
    # tiers
    "Tier",
    "TierChoice",
    "TierLimits",
    "Affine",
    "CostModel",
    "DEFAULT_MODELS",
    "CalibrationTransport",
    "Phases",
    "calibrate",
    "LinkCalibration",
    "CalibrationTarget",
    "choose_tier",
    # reports and bytes
    "WriterReport",
    "validate_report",
    "check_fragments",
    "encode_report",
    "decode_report",
    "encode_plan",
    "decode_plan",
    "encode_blocks",
    "decode_blocks",
    "encode_layout",
    "decode_layout",
    "decode_instance",
    "REPORT_BYTES_MAX",
    "PLAN_BYTES_MAX",
    "BLOCKS_BYTES_MAX",
    # copies
    "Copier",
    "CopyHandle",
    "PreparedCopy",
    "CopyTable",
    "HostCopier",
    "ThreadCopier",
    "default_copier",
    "gather",
    "scatter",
    # words
    "COALESCED_PREFIX",
    "IN_PLACE_PREFIX",
    "coalesced_marker",
    "in_place_marker",
    "explain",
    "describe",
    "draw",
    "KernelShape",
    # identities
    "PeerId",
    "RequestKey",
    "TransferIdentity",
    "OperationIdentity",
    # memory
    "BlockState",
    "Evidence",
    "Proof",
    "ProofKind",
    "OwnedMemory",
    "ProvenMemory",
    "QuarantinedMemory",
    "free",
    "step_retired",
    "TransportClass",
    "WriteExecutor",
    "required_proofs",
    "BounceArena",
    "Reservation",
    "AdvertisedReservation",
    "BoundRegion",
    "ArenaStatistics",
    "ExposureLedger",
    # sessions
    "Receiver",
    "Sender",
    "SessionConfig",
    "ExpectedOperation",
    "PeerEvidence",
    "PlannerReports",
    "DrainReport",
    "TerminalSnapshot",
    "ReceiveRequest",
    "ReceiveState",
    "SendState",
    "SessionEvent",
    "TransferSucceeded",
    "TransferFailed",
    "TransferCancelled",
    "MemoryReleased",
    "MemoryQuarantined",
    "FatalDiagnosis",
    "ReceiveRequested",
    "OperationDone",
    "OperationFailed",
    "CancelReceived",
    "RequestServed",
    "SourceReleased",
    "SourceQuarantined",
    # transports
    "Transport",
    "ControlChannel",
    "MemoryRegion",
    "AgentInfo",
    "WriteJob",
    "WriteProgress",
    "ArrivedMark",
    "TransportProgress",
    # errors of sessions
    "WouldBlock",
    "ChannelError",
    "DuplicateTransfer",
    "StaleIdentity",
    "CapacityExceeded",
    "AddressStillExposed",
    "TransfersOutstanding",
    "IllegalTransition",
]


#: Adapters of optional libraries: imported when first asked for. Public, but not in ``__all__``: a star import must work
#: where the library is absent.
_ADAPTERS = {
    "NixlConfig": "kv_bounce_planner._nixl",
    "NixlTransport": "kv_bounce_planner._nixl",
    "ZmqControlChannel": "kv_bounce_planner._zmq",
    "TorchCopier": "kv_bounce_planner._torch",
    "TritonCopier": "kv_bounce_planner._triton",
}


def __getattr__(name: str) -> Any:
    module = _ADAPTERS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS})
