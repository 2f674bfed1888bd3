"""Who writes which bytes where: layouts, exact plans, choice of tier, copies, plans in words and pictures.

This is one of the package's two public faces; it needs numpy and msgspec only, and no session.
"""

from typing import TYPE_CHECKING

from kv_bounce_planner._faces import lazy

if TYPE_CHECKING:
    from kv_bounce_planner._errors import CodecError as CodecError
    from kv_bounce_planner._errors import KVTransferError as KVTransferError
    from kv_bounce_planner._errors import LayoutError as LayoutError
    from kv_bounce_planner._errors import PlanRefused as PlanRefused
    from kv_bounce_planner._errors import ReportRefused as ReportRefused
    from kv_bounce_planner._errors import TransferTimeout as TransferTimeout
    from kv_bounce_planner._errors import TransportError as TransportError
    from kv_bounce_planner._reasons import REASONS as REASONS
    from kv_bounce_planner._reasons import Reason as Reason
    from kv_bounce_planner._reasons import Refusal as Refusal
    from kv_bounce_planner.copies._torch import TorchCopier as TorchCopier
    from kv_bounce_planner.copies._triton import TritonCopier as TritonCopier
    from kv_bounce_planner.copies.choice import default_copier as default_copier
    from kv_bounce_planner.copies.gather import Copier as Copier
    from kv_bounce_planner.copies.gather import HostCopier as HostCopier
    from kv_bounce_planner.copies.gather import gather as gather
    from kv_bounce_planner.copies.gather import scatter as scatter
    from kv_bounce_planner.copies.threads import ThreadCopier as ThreadCopier
    from kv_bounce_planner.layout.engines import TensorView as TensorView
    from kv_bounce_planner.layout.engines import from_kv_memory as from_kv_memory
    from kv_bounce_planner.layout.engines import from_sglang as from_sglang
    from kv_bounce_planner.layout.engines import from_tensorrt_llm as from_tensorrt_llm
    from kv_bounce_planner.layout.engines import from_tensors as from_tensors
    from kv_bounce_planner.layout.engines import from_vllm as from_vllm
    from kv_bounce_planner.layout.model import BlockTable as BlockTable
    from kv_bounce_planner.layout.model import InstanceLayout as InstanceLayout
    from kv_bounce_planner.layout.model import KVLayout as KVLayout
    from kv_bounce_planner.layout.model import LayerGroup as LayerGroup
    from kv_bounce_planner.layout.model import PeerLayouts as PeerLayouts
    from kv_bounce_planner.layout.model import RequestBlocks as RequestBlocks
    from kv_bounce_planner.layout.model import TokenRange as TokenRange
    from kv_bounce_planner.layout.model import TokenShare as TokenShare
    from kv_bounce_planner.layout.model import head_range as head_range
    from kv_bounce_planner.layout.model import layer_range as layer_range
    from kv_bounce_planner.planning.calibration import CalibrationTarget as CalibrationTarget
    from kv_bounce_planner.planning.calibration import LinkCalibration as LinkCalibration
    from kv_bounce_planner.planning.codec import decode_blocks as decode_blocks
    from kv_bounce_planner.planning.codec import decode_instance as decode_instance
    from kv_bounce_planner.planning.codec import decode_layout as decode_layout
    from kv_bounce_planner.planning.codec import decode_plan as decode_plan
    from kv_bounce_planner.planning.codec import decode_report as decode_report
    from kv_bounce_planner.planning.codec import encode_blocks as encode_blocks
    from kv_bounce_planner.planning.codec import encode_layout as encode_layout
    from kv_bounce_planner.planning.codec import encode_plan as encode_plan
    from kv_bounce_planner.planning.codec import encode_report as encode_report
    from kv_bounce_planner.planning.plan import TransferPlan as TransferPlan
    from kv_bounce_planner.planning.plan import WriterPlan as WriterPlan
    from kv_bounce_planner.planning.plan import WriterTransfer as WriterTransfer
    from kv_bounce_planner.planning.plan import plan_destination as plan_destination
    from kv_bounce_planner.planning.plan import plan_transfer as plan_transfer
    from kv_bounce_planner.planning.plan import plan_writer as plan_writer
    from kv_bounce_planner.planning.plan import request_ranges as request_ranges
    from kv_bounce_planner.planning.plan import try_plan_destination as try_plan_destination
    from kv_bounce_planner.planning.report import WriterReport as WriterReport
    from kv_bounce_planner.planning.report import check_fragments as check_fragments
    from kv_bounce_planner.planning.report import validate_report as validate_report
    from kv_bounce_planner.planning.slices import Slice as Slice
    from kv_bounce_planner.planning.slices import SlicedPlan as SlicedPlan
    from kv_bounce_planner.planning.slices import choose_slice_count as choose_slice_count
    from kv_bounce_planner.planning.slices import cut_slices as cut_slices
    from kv_bounce_planner.planning.slices import plan_slices as plan_slices
    from kv_bounce_planner.planning.slices import plan_writer_slices as plan_writer_slices
    from kv_bounce_planner.planning.tier import DEFAULT_MODELS as DEFAULT_MODELS
    from kv_bounce_planner.planning.tier import CostModel as CostModel
    from kv_bounce_planner.planning.tier import Tier as Tier
    from kv_bounce_planner.planning.tier import TierChoice as TierChoice
    from kv_bounce_planner.planning.tier import TierLimits as TierLimits
    from kv_bounce_planner.planning.tier import calibrate as calibrate
    from kv_bounce_planner.planning.tier import choose_tier as choose_tier
    from kv_bounce_planner.words.draw import draw as draw
    from kv_bounce_planner.words.explain import COALESCED_PREFIX as COALESCED_PREFIX
    from kv_bounce_planner.words.explain import coalesced_marker as coalesced_marker
    from kv_bounce_planner.words.explain import describe as describe
    from kv_bounce_planner.words.explain import explain as explain
    from kv_bounce_planner.words.explain import in_place_marker as in_place_marker

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "_errors": (
            "KVTransferError",
            "LayoutError",
            "PlanRefused",
            "ReportRefused",
            "CodecError",
            "TransferTimeout",
            "TransportError",
        ),
        "_reasons": (
            "Reason",
            "Refusal",
            "REASONS",
        ),
        "layout.model": (
            "KVLayout",
            "LayerGroup",
            "InstanceLayout",
            "PeerLayouts",
            "BlockTable",
            "RequestBlocks",
            "TokenRange",
            "TokenShare",
            "head_range",
            "layer_range",
        ),
        "layout.engines": (
            "TensorView",
            "from_tensors",
            "from_vllm",
            "from_sglang",
            "from_tensorrt_llm",
            "from_kv_memory",
        ),
        "planning.plan": (
            "TransferPlan",
            "WriterPlan",
            "WriterTransfer",
            "plan_destination",
            "try_plan_destination",
            "plan_writer",
            "plan_transfer",
            "request_ranges",
        ),
        "planning.slices": (
            "Slice",
            "SlicedPlan",
            "choose_slice_count",
            "cut_slices",
            "plan_slices",
            "plan_writer_slices",
        ),
        "planning.tier": (
            "Tier",
            "TierChoice",
            "TierLimits",
            "CostModel",
            "DEFAULT_MODELS",
            "calibrate",
            "choose_tier",
        ),
        "planning.calibration": (
            "LinkCalibration",
            "CalibrationTarget",
        ),
        "planning.report": (
            "WriterReport",
            "validate_report",
            "check_fragments",
        ),
        "planning.codec": (
            "encode_report",
            "decode_report",
            "encode_plan",
            "decode_plan",
            "encode_blocks",
            "decode_blocks",
            "encode_layout",
            "decode_layout",
            "decode_instance",
        ),
        "copies.gather": (
            "Copier",
            "HostCopier",
            "gather",
            "scatter",
        ),
        "copies.threads": ("ThreadCopier",),
        "copies.choice": ("default_copier",),
        "words.explain": (
            "COALESCED_PREFIX",
            "coalesced_marker",
            "in_place_marker",
            "explain",
            "describe",
        ),
        "words.draw": ("draw",),
    },
    {
        "copies._torch": ("torch", ("TorchCopier",)),
        "copies._triton": ("triton", ("TritonCopier",)),
    },
)
