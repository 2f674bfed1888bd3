"""KV connector for vLLM over kv-bounce-planner: class ``BounceConnector`` of this module.

A request to the prefilling side carries ``kv_transfer_params={"transfer_id": N}``, N a number of the caller's, used once; its
answer adds ``sources``. The request to the decoding side carries both. It may be sent before the prefill is over, with the
``sources`` of any earlier answer.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from kv_worker import Abandon, Consumer, Fetch, KvWorker, Producer, Serve, Settings, Source, open_resources
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

import kv_bounce_planner as kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class Commands(KVConnectorMetadata):
    """From the scheduler to every rank."""

    commands: tuple[Serve | Fetch | Abandon, ...]


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From a prefilling rank to its scheduler."""

    source: bytes


def asked_of(request: Request) -> tuple[int | None, str | None]:
    """Transfer id and sources that a request names; a caller's parameters that are not what they should be name nothing."""
    params = request.kv_transfer_params or {}
    transfer_id, sources = params.get("transfer_id"), params.get("sources")
    if type(transfer_id) is not int or not 0 <= transfer_id < 1 << 63:
        return None, None
    return transfer_id, sources if isinstance(sources, str) else None


def check_packing(cache: torch.Tensor) -> None:
    """See that this machine's kernel packs K as the layout says: by packing a block of known numbers."""
    _, heads, tokens, joined = cache.shape
    scratch = torch.arange(heads * tokens * joined).remainder(251).to(cache.dtype).view(1, heads, tokens, joined)
    key, value = scratch[..., : joined // 2].clone(), scratch[..., joined // 2 :].clone()
    wanted = torch.cat([key.transpose(2, 3).reshape(1, heads, -1), value.reshape(1, heads, -1)], 2)
    current_platform.pack_kv_cache(scratch, torch.zeros(1, dtype=torch.long))
    if not torch.equal(scratch.view(1, heads, -1), wanted):
        raise ValueError(
            f"this machine's attention packs {cache.dtype} KV in a way that BounceConnector has no layout for"
        )


class BounceConnector(KVConnectorBase_V1, SupportsHMA):
    """One rank's worker side, or its scheduler's side."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        extra = dict(transfer.kv_connector_extra_config)
        self._key = Path(extra.pop("key_file")).read_bytes()
        unknown = set(extra) - {each.name for each in fields(Settings)}
        self._heads = vllm_config.model_config.get_total_num_kv_heads()
        self._ranks = parallel.tensor_parallel_size
        for wrong, why in (
            (unknown, f"kv_connector_extra_config has no {', '.join(sorted(unknown))}"),
            (transfer.kv_role == "kv_both", "kv_role is kv_producer or kv_consumer: one session serves one direction"),
            (len(kv_cache_config.kv_cache_groups) != 1, "models with several KV cache groups are not moved"),
            (parallel.pipeline_parallel_size != 1, "pipeline parallelism within an instance is not supported"),
            (self._heads % self._ranks, f"{self._heads} KV heads are not divisible by {self._ranks} ranks"),
        ):
            if wrong:
                raise ValueError(why)
        self._settings = Settings(**extra)
        self._producer = transfer.is_kv_producer
        self._instance = transfer.engine_id
        self._block_tokens = vllm_config.cache_config.block_size
        self._commands: list[Serve | Fetch | Abandon] = []
        self._fetched: set[str] = set()
        self._sources = ""
        self.worker: KvWorker | None = None

    # -- the scheduler's side

    def set_xfer_handshake_metadata(self, metadata: dict[int, Handshake]) -> None:
        """The prefilling ranks are known: answers name them from now on."""
        sources = [msgspec.json.decode(metadata[rank].source, type=Source) for rank in sorted(metadata)]
        self._sources = msgspec.json.encode(sources).decode()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """The whole prompt, once: what failed is not fetched again."""
        if self._producer or asked_of(request)[1] is None or request.request_id in self._fetched:
            return 0, False
        count = request.num_prompt_tokens - num_computed_tokens
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are there: fetch."""
        if num_external_tokens == 0 or request.request_id in self._fetched:
            return
        self._fetched.add(request.request_id)
        transfer_id, sources = asked_of(request)
        first, end = request.num_prompt_tokens - num_external_tokens, request.num_prompt_tokens
        held = tuple(blocks.get_block_ids()[0][first // self._block_tokens :])
        self._commands.append(Fetch(request.request_id, transfer_id, sources, held, first, end))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Commands:
        """What was decided since the last step."""
        commands, self._commands = tuple(self._commands), []
        return Commands(commands)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A prefill is over: lend its blocks. Anything that ended otherwise: abandon it."""
        transfer_id, _ = asked_of(request)
        if transfer_id is None:
            return False, None
        if not self._producer:
            if request.request_id in self._fetched:
                self._fetched.discard(request.request_id)
                self._commands.append(Abandon(request.request_id, transfer_id))
            return False, None
        if request.status not in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
            self._commands.append(Abandon(request.request_id, transfer_id))
            return False, None
        self._commands.append(Serve(request.request_id, transfer_id, tuple(block_ids)))
        return True, {"transfer_id": transfer_id, "sources": self._sources}

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """There is one group."""
        return self.request_finished(request, block_ids[0])

    # -- a rank's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The caches are there: open the session."""
        tensors = {extract_layer_index(name): cache for name, cache in kv_caches.items()}
        first, rank = next(iter(tensors.values())), get_tensor_model_parallel_rank()
        check_packing(first)
        layout = kv.from_vllm(
            rank=rank,
            layer_ids=sorted(tensors),
            tensors=[tensors[layer] for layer in sorted(tensors)],
            head_total=self._heads,
            first_head=rank * self._heads // self._ranks,
            attention="cpu_attn",
            memory_kind="DRAM",
        )
        me = kv.PeerId(self._instance, secrets.token_hex(8), rank)
        resources = open_resources(me, layout, self._key, self._settings)
        if self._producer:
            self.worker = Producer(me, layout, resources, self._settings)
        else:
            self.worker = Consumer(me, layout, resources, self._settings, head_total=self._heads, ranks=self._ranks)
        self.worker.start()

    def get_handshake_metadata(self) -> Handshake | None:
        """Where a prefilling rank is found."""
        return Handshake(msgspec.json.encode(self.worker.source())) if isinstance(self.worker, Producer) else None

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Hand this step's commands over."""
        for command in self._get_connector_metadata().commands:
            self.worker.submit(command)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """What the session proved since the last step."""
        results = self.worker.results()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def shutdown(self) -> None:
        """Leave."""
        if self.worker is not None:
            self.worker.stop()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """Nothing is sent before a prefill is over."""

    def wait_for_save(self) -> None:
        """Nothing is saved in a step."""
