"""Receiver-owned plans and sessions for KV cache transfer.

Layout, planning half (pure; depends on numpy and msgspec):

    _errors.py    one error tree: fail open before the reservation, fail closed after the advertisement
    _reasons.py   stable reason codes
    _layout.py    pools, instances, block tables, token ranges; constructors for the field's engines
    _plan.py      exact transfer plans, derivable by either side alone
    _tier.py      cost model, calibration, choice of tier
    _report.py    a writer's report and its validation
    _codec.py     bytes of reports, plans and block tables
    _explain.py   plans and choices in words
    _draw.py      plans as a picture (SVG by itself, PNG with matplotlib)
    _gather.py    gather and scatter by pointer, host memory
    _torch.py     the same for torch devices       (imports torch only when used)
    _triton.py    the same as one Triton kernel    (imports triton only when used)
"""

from kv_bounce_planner.__about__ import __version__
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
from kv_bounce_planner._reasons import REASONS, Reason, Refusal
from kv_bounce_planner._report import WriterReport, check_fragments, validate_report
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
    "gather",
    "scatter",
    # words
    "COALESCED_PREFIX",
    "IN_PLACE_PREFIX",
    "coalesced_marker",
    "in_place_marker",
    "explain",
    "describe",
]
