"""The engine for Llama-family models, in torch, on CPU or CUDA.

One stage holds its own layers only. KV memory is paged: ``(layer, block, key or value, token, head, element)``, so one
block of one layer is one run of bytes. A step's decode rows are attended together, by gathering each row's blocks
through its block table; prompt chunks are attended one sequence at a time. All dense products run over all rows of the
step at once.

Query heads of one KV head are treated as further query rows of it, so grouped attention needs no copy of the keys.

``deterministic_rows``: dense products run over tiles of a fixed number of rows, attention runs per sequence with
keys padded to a fixed granularity, so that the bits of a row depend on nothing but its own sequence.

Source: docs/design.md, section "Engine"; tests/engine/test_llama_engine.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from meta_executor.config import EngineConfig
from meta_executor.engine.base import (
    Float32Array,
    Int64Array,
    KVMemory,
    ModelInfo,
    StageSpec,
    StepInput,
    StepOutput,
    check_step,
)
from meta_executor.engine.errors import EngineError, StepError
from meta_executor.engine.sampling import chosen
from meta_executor.engine.step_recorder import StepRecorder
from meta_executor.engine.step_worker import StepWorker, WorkerHandle
from meta_executor.engine.weights import LlamaGeometry, load_stage_tensors, resolve_model
from meta_executor.wire import TokenLogprobs

#: Rows of a prompt whose logits are there at once (count).
_SCORED_ROWS = 64
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: A CPU's instructions for products of each narrow type, by the names of ``torch.cpu.get_capabilities``.
_CPU_PRODUCTS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
#: Rows of a tile under ``deterministic_rows``: small steps, and prompt chunks.
_SMALL_TILE_ROWS = 8
_LARGE_TILE_ROWS = 64
#: Keys are padded to a multiple of this many tokens under ``deterministic_rows``: the split of torch's CPU attention.
_DETERMINISTIC_KEYS = 512
#: oneDNN's kernels take longer for one to three rows than for four (measured: 35 against 27 ms for a whole model).
_PACKED_ROWS_MIN = 4


class _Dense:
    """A matrix that rows are multiplied with.

    On the CPU the matrix is reordered once into the blocks that oneDNN's kernels read. That is twice as fast for few rows,
    and those kernels give a row the same bits whatever stands beside it. Where the operation is missing or wrong (another
    build of torch, a type that the machine lacks) the plain product is used.
    """

    def __init__(self, weight: torch.Tensor, *, packed: bool) -> None:
        self.columns = weight.shape[1]
        self._packed = packed
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._packed:
            return F.linear(x, self._weight)
        rows = x.shape[0]
        if rows < _PACKED_ROWS_MIN:
            return _packed_product(F.pad(x, (0, 0, 0, _PACKED_ROWS_MIN - rows)), self._weight)[:rows]
        return _packed_product(x, self._weight)


def arithmetic_of(
    dtype: torch.dtype, device: torch.device, capabilities: Mapping[str, object] | None = None
) -> torch.dtype:
    """The type that an engine computes in.

    A CPU that has no instructions for a narrow type emulates each product, which takes several times as long as float32: there
    the weights keep the narrow type's values and the KV memory the type itself, and the arithmetic is float32.

    Args:
        dtype: As configured.
        device: Where it computes.
        capabilities: Of the CPU; None: this one's.
    """
    if device.type != "cpu" or dtype not in _CPU_PRODUCTS:
        return dtype
    if capabilities is None:
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return dtype if any(capabilities.get(name) for name in _CPU_PRODUCTS[dtype]) else torch.float32


def _packed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return result


def _packing_works(dtype: torch.dtype) -> bool:
    """Whether the packed product exists here and agrees with the plain one."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(8, 96, generator=generator).to(dtype)
    weight = torch.randn(80, 96, generator=generator).to(dtype)
    try:
        packed = _Dense(weight, packed=True)(x)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return False
    plain = F.linear(x.double(), weight.double())
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}[dtype]
    return bool(torch.allclose(packed.double(), plain, atol=tolerance, rtol=tolerance))


@dataclass(frozen=True)
class _Layer:
    """A decoder layer's weights."""

    attn_norm: torch.Tensor
    qkv: _Dense
    output: _Dense
    ffn_norm: torch.Tensor
    gate_up: _Dense
    down: _Dense


@dataclass(frozen=True)
class _Chunk:
    """A sequence attended on its own: its rows of the step, its blocks, and its mask."""

    rows: slice
    key_blocks: torch.Tensor
    value_blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """A step's index tensors, made once and used by every layer."""

    rotation: torch.Tensor
    key_slots: torch.Tensor
    value_slots: torch.Tensor
    #: Rows attended together; None: every row of the step, in order.
    decode_rows: torch.Tensor | None
    decode_count: int
    decode_key_blocks: torch.Tensor
    decode_value_blocks: torch.Tensor
    decode_mask: torch.Tensor
    chunks: tuple[_Chunk, ...]


class _DeviceHandle:
    """A step whose kernels were queued by the worker and end later, on the device."""

    def __init__(self, inner: WorkerHandle, event: Any) -> None:
        self._inner = inner
        self._event = event

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """Call this once the step's kernels are queued."""
        self._inner.add_done_callback(call)

    def done(self) -> bool:
        """Whether the device has ended the step."""
        return self._inner.done() and bool(self._event.query())

    def result(self) -> StepOutput:
        """The output; waits."""
        return self._inner.result()


class LlamaEngine:
    """One stage of a Llama-family model.

    Args:
        model: Shape.
        geometry: Arithmetic.
        tensors: The stage's, by the names of :mod:`meta_executor.engine.weights`, float32.
        stage: Which layers.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: Of weights, activations within the stage, and KV memory; see :func:`arithmetic_of` for CPUs that lack it.
        threads: Of torch on the CPU (count).
        deterministic_rows: See the module's header.
    """

    def __init__(
        self,
        model: ModelInfo,
        geometry: LlamaGeometry,
        tensors: Mapping[str, Float32Array],
        stage: StageSpec,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        threads: int = 1,
        deterministic_rows: bool = False,
    ) -> None:
        self.model = model
        self.stage = stage
        self._geometry = geometry
        self._device = torch.device(device)
        self._kv_dtype = _DTYPES[dtype]
        self._dtype = arithmetic_of(self._kv_dtype, self._device)
        self._threads = threads
        self._deterministic = deterministic_rows
        self._group = model.attention_head_count // model.kv_head_count
        self._query_heads = model.attention_head_count
        self._rotated_heads = model.attention_head_count + model.kv_head_count
        torch.set_num_threads(threads)
        self._take_weights(tensors)
        self._rotations = self._rotation_table()
        self._kv: torch.Tensor | None = None
        #: Where keys and values are gathered; reused by every layer and step, grown when needed.
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._large_tile = _LARGE_TILE_ROWS
        self._stream = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
            # cuDNN plans anew for every length of the keys, which took three times as long as the whole step.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._settle()
        self._worker = StepWorker(f"llama-{stage.stage_index}", self._prepare_thread)
        if deterministic_rows:
            self._large_tile = self._qualified_tile()

    def _take_weights(self, tensors: Mapping[str, Float32Array]) -> None:
        """The stage's weights, on the device and in the arithmetic's type."""
        stage = self.stage

        def tensor(name: str) -> torch.Tensor:
            values = torch.from_numpy(tensors[name]).to(device=self._device, dtype=self._kv_dtype)
            return values.to(self._dtype).contiguous()

        with torch.inference_mode():
            self.packed = self._device.type == "cpu" and _packing_works(self._dtype)

            def dense(name: str) -> _Dense:
                return _Dense(tensor(name), packed=self.packed)

            self._embedding = tensor("embed") if stage.is_first else None
            self._layers = tuple(
                _Layer(
                    attn_norm=tensor(f"layers.{layer}.attn_norm"),
                    qkv=dense(f"layers.{layer}.qkv"),
                    output=dense(f"layers.{layer}.output"),
                    ffn_norm=tensor(f"layers.{layer}.ffn_norm"),
                    gate_up=dense(f"layers.{layer}.gate_up"),
                    down=dense(f"layers.{layer}.down"),
                )
                for layer in stage.layers
            )
            self._final_norm = tensor("final_norm") if stage.is_last else None
            self._head = dense("head" if "head" in tensors else "embed") if stage.is_last else None

    @staticmethod
    def load(config: EngineConfig, stage: StageSpec) -> LlamaEngine:
        """Find the model, read the stage's tensors, build the engine.

        Raises:
            ModelNotFoundError: No such model.
            ModelFormatError: Its file cannot be used.
        """
        source = resolve_model(config.model)
        model, geometry = source.describe(config.dtype)
        tensors = load_stage_tensors(source, stage, config.weights_cache_dir)
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return LlamaEngine(
            model,
            geometry,
            tensors,
            stage,
            device=device,
            dtype=config.dtype,
            threads=config.threads,
            deterministic_rows=config.deterministic_rows,
        )

    # -- interface ----------------------------------------------------------------------------------------------------

    def allocate_kv(self, block_count: int, block_tokens: int) -> KVMemory:
        """Make the KV memory, zeroed: stale bytes that a mask hides must still be finite."""
        if self._kv is not None:
            raise StepError("the KV memory was allocated already")
        shape = (len(self._layers), block_count, 2, block_tokens, self.model.kv_head_count, self.model.head_dim)
        kv = torch.zeros(shape, dtype=self._kv_dtype, device=self._device)
        self._settle()
        self._kv = kv
        size = kv.element_size()
        strides = [stride * size for stride in kv.stride()]
        base = kv.data_ptr()
        return KVMemory(
            block_count=block_count,
            block_tokens=block_tokens,
            layer_base_addresses=tuple(base + layer * strides[0] for layer in range(len(self._layers))),
            block_stride_bytes=strides[1],
            kv_stride_bytes=strides[2],
            token_stride_bytes=strides[3],
            head_stride_bytes=strides[4],
            kv_head_count=self.model.kv_head_count,
            head_dim=self.model.head_dim,
            element_bytes=size,
            memory_kind="DRAM" if self._device.type == "cpu" else "VRAM",
            device_id=0 if self._device.type == "cpu" else (self._device.index or 0),
            regions=((base, kv.numel() * size),),
            owner=kv,
        )

    def launch(self, step: StepInput) -> WorkerHandle | _DeviceHandle:
        """Queue a step; the worker thread runs it, on CUDA on the engine's own stream."""
        if self._stream is None:
            return self._worker.submit(lambda: self._step(step))
        event = torch.cuda.Event()
        return _DeviceHandle(self._worker.submit(lambda: self._step_on_device(step, event)), event)

    def record_steps(self, recorder: StepRecorder) -> None:
        """Have it note the steps that are launched from now on."""
        self._worker.recorder = recorder

    def close(self) -> None:
        """End the worker thread. Idempotent."""
        self._worker.close()

    # -- a step -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for copies and fills on the device's default stream: steps run on another one."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)

    def _prepare_thread(self) -> None:
        # The thread count of OpenMP is a setting of each thread that starts parallel work.
        torch.set_num_threads(self._threads)

    def _step_on_device(self, step: StepInput, event: Any) -> StepOutput:
        with torch.cuda.stream(self._stream):
            try:
                return self._step(step)
            finally:
                event.record(self._stream)

    def _step(self, step: StepInput) -> StepOutput:
        if self._kv is None:
            raise StepError("launch before allocate_kv")
        check_step(step, self.stage, self.model, self._kv.shape[1], self._kv.shape[3])
        with torch.inference_mode():
            plan = self._plan(step, self._kv)
            x = self._first_rows(step)
            for index, layer in enumerate(self._layers):
                x = self._layer(layer, self._kv[index], x, plan)
            if not self.stage.is_last:
                return StepOutput(step.step_id, hidden=x.to(torch.float32).cpu().numpy())
            output = self._choose_tokens(step, x)
            return replace(output, prompt_logprobs=self._scored(step, x)) if step.scored else output

    def _first_rows(self, step: StepInput) -> torch.Tensor:
        if self.stage.is_first:
            if self._embedding is None:
                raise EngineError("the first stage has no embedding")
            return F.embedding(self._index(step.token_ids.astype(np.int64)), self._embedding)
        if step.hidden is None:
            raise StepError(f"step {step.step_id}: no activations")
        # A copy: the caller may reuse its receive buffer, and arrays from a wire may be read-only.
        return torch.from_numpy(np.array(step.hidden, dtype=np.float32)).to(device=self._device, dtype=self._dtype)

    def _layer(self, layer: _Layer, kv: torch.Tensor, x: torch.Tensor, plan: _Plan) -> torch.Tensor:
        epsilon = self._geometry.norm_epsilon
        width = (self.model.hidden_size,)
        rows = x.shape[0]
        qkv = self._linear(F.rms_norm(x, width, layer.attn_norm, epsilon), layer.qkv)
        qkv = qkv.view(rows, -1, self.model.head_dim)
        rotated = self._rotated(qkv[:, : self._rotated_heads], plan.rotation)
        # Blocks seen as (2 * blocks, token, head, element): keys of block b at 2b, values at 2b + 1.
        halves = kv.view(-1, *kv.shape[2:])
        flat = halves.view(-1, *kv.shape[3:])
        flat.index_copy_(0, plan.key_slots, rotated[:, self._query_heads :].to(kv.dtype))
        flat.index_copy_(0, plan.value_slots, qkv[:, self._rotated_heads :].to(kv.dtype))
        attended = self._attend(rotated[:, : self._query_heads], halves.view(halves.shape[0], -1), plan)
        x = x + self._linear(attended, layer.output)
        gate, up = self._linear(F.rms_norm(x, width, layer.ffn_norm, epsilon), layer.gate_up).chunk(2, dim=-1)
        return x + self._linear(F.silu(gate) * up, layer.down)

    def _attend(self, queries: torch.Tensor, halves: torch.Tensor, plan: _Plan) -> torch.Tensor:
        """Attention of all rows: queries (rows, query heads, element) -> (rows, query heads * element)."""
        rows = queries.shape[0]
        heads, group, dim = self.model.kv_head_count, self._group, self.model.head_dim
        result = None
        if plan.decode_count:
            chosen = queries if plan.decode_rows is None else queries.index_select(0, plan.decode_rows)
            keys, values = self._gather(halves, plan.decode_key_blocks, plan.decode_value_blocks, plan.decode_count)
            grouped = chosen.reshape(plan.decode_count, heads, group, dim)
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=plan.decode_mask)
            out = out.reshape(plan.decode_count, -1)
            if plan.decode_rows is None:
                return out
            result = out.new_empty(rows, heads * group * dim)
            result.index_copy_(0, plan.decode_rows, out)
        for chunk in plan.chunks:
            out = self._attend_chunk(queries[chunk.rows], halves, chunk)
            if len(plan.chunks) == 1 and result is None:
                return out
            if result is None:
                result = out.new_empty(rows, heads * group * dim)
            result[chunk.rows] = out
        if result is None:
            raise EngineError("a step without rows")
        return result

    def _attend_chunk(self, queries: torch.Tensor, halves: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
        heads, group, dim = self.model.kv_head_count, self._group, self.model.head_dim
        keys, values = self._gather(halves, chunk.key_blocks, chunk.value_blocks, 1)
        count = queries.shape[0]
        # (tokens, heads * group, dim) -> (1, heads, tokens * group, dim): the group's queries share keys and mask.
        grouped = queries.view(count, heads, group, dim).transpose(0, 1).reshape(1, heads, count * group, dim)
        if not self._deterministic:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=chunk.mask)
        else:
            out = self._attend_tiled(grouped, keys, values, chunk.mask)
        return out.view(heads, count, group, dim).transpose(0, 1).reshape(count, -1)

    def _gather(
        self, halves: torch.Tensor, key_blocks: torch.Tensor, value_blocks: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``count`` sequences of equal padded length: (sequences, heads, tokens, element) each.

        The views are good until the next gather: they share one buffer, which saves the page faults of a fresh one (a
        third of the time).
        """
        rows = key_blocks.shape[0]
        if self._gathered is None or self._gathered[0].shape[0] < rows:
            room = max(rows, 64)
            self._gathered = (halves.new_empty(room, halves.shape[1]), halves.new_empty(room, halves.shape[1]))
        shape = (count, -1, self.model.kv_head_count, self.model.head_dim)
        keys, values = (buffer[:rows] for buffer in self._gathered)
        torch.index_select(halves, 0, key_blocks, out=keys)
        torch.index_select(halves, 0, value_blocks, out=values)
        keys, values = keys.to(self._dtype), values.to(self._dtype)
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)

    def _attend_tiled(
        self, grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The same in tiles of a fixed number of query rows, the last one filled up."""
        tile = _SMALL_TILE_ROWS * self._group
        parts = []
        for start in range(0, grouped.shape[2], tile):
            part = grouped[:, :, start : start + tile]
            part_mask = mask[:, :, start : start + tile]
            count = part.shape[2]
            if count < tile:
                part = F.pad(part, (0, 0, 0, tile - count))
                part_mask = F.pad(part_mask, (0, 0, 0, tile - count))
            parts.append(F.scaled_dot_product_attention(part, keys, values, attn_mask=part_mask)[:, :, :count])
        return torch.cat(parts, dim=2)

    def _linear(self, x: torch.Tensor, weight: _Dense) -> torch.Tensor:
        if not self._deterministic:
            return weight(x)
        rows = x.shape[0]
        parts = []
        start = 0
        while start < rows:
            tile = self._large_tile if rows - start > _SMALL_TILE_ROWS else _SMALL_TILE_ROWS
            part = x[start : start + tile]
            count = part.shape[0]
            if count < tile:
                part = F.pad(part, (0, 0, 0, tile - count))
            parts.append(weight(part.contiguous())[:count])
            start += tile
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _qualified_tile(self) -> int:
        """The large tile if this machine's kernels give a row the same bits in it as in the small one; else the small."""

        def same_bits() -> StepOutput:
            generator = torch.Generator().manual_seed(1)
            agreed = True
            with torch.inference_mode():
                weights = [weight for layer in self._layers[:1] for weight in (layer.qkv, layer.gate_up, layer.down)]
                if self._head is not None:
                    weights.append(self._head)
                for weight in weights:
                    x = torch.randn(_LARGE_TILE_ROWS, weight.columns, generator=generator)
                    x = x.to(device=self._device, dtype=self._dtype)
                    whole = weight(x)
                    for start in range(0, _LARGE_TILE_ROWS, _SMALL_TILE_ROWS):
                        rows = slice(start, start + _SMALL_TILE_ROWS)
                        agreed = agreed and torch.equal(weight(x[rows].contiguous()), whole[rows])
            return StepOutput(int(agreed))

        # In the worker thread, where the products of every step will run.
        agreed = self._worker.submit(same_bits).result().step_id
        return _LARGE_TILE_ROWS if agreed else _SMALL_TILE_ROWS

    # -- rotary positions ---------------------------------------------------------------------------------------------

    def _rotation_table(self) -> torch.Tensor:
        """cos + i sin, complex64, shape (positions, 1, head_dim / 2); angles in double precision."""
        inverse = torch.tensor(self._geometry.inverse_frequencies, dtype=torch.float64)
        angles = torch.outer(torch.arange(self.model.context_tokens_max, dtype=torch.float64), inverse)
        table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        return table.unsqueeze(1).to(self._device)

    @staticmethod
    def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.to(torch.float32).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)

    # -- a step's indices ---------------------------------------------------------------------------------------------

    def _plan(self, step: StepInput, kv: torch.Tensor) -> _Plan:
        block_tokens = kv.shape[3]
        positions = step.positions
        blocks = step.block_tables[step.owners, positions // block_tokens]
        slots = self._index(blocks * (2 * block_tokens) + positions % block_tokens)
        decoding = step.counts == 1 if not self._deterministic else np.zeros(step.sequence_count, np.bool_)
        together, alone = np.flatnonzero(decoding), np.flatnonzero(~decoding)
        key_blocks, mask = self._decode_table(step, together, block_tokens)
        first_rows = step.row_ends - step.counts
        return _Plan(
            rotation=self._rotations.index_select(0, self._index(positions)),
            key_slots=slots,
            value_slots=slots + block_tokens,
            decode_rows=self._index(first_rows[together]) if len(alone) and len(together) else None,
            decode_count=len(together),
            decode_key_blocks=key_blocks,
            decode_value_blocks=key_blocks + 1,
            decode_mask=mask,
            chunks=tuple(self._chunk(step, int(index), block_tokens) for index in alone),
        )

    def _index(self, values: Int64Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        return torch.from_numpy(mask).to(device=self._device, dtype=self._dtype)

    def _decode_table(
        self, step: StepInput, together: Int64Array, block_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat key-half indices of every decoding sequence, padded to the longest, and the mask that hides the padding."""
        ends = step.ends[together]
        needed = -(-ends // block_tokens)
        width = int(needed.max(initial=0))
        table = step.block_tables[together, :width]
        # Padding repeats a block of the sequence itself: nobody else's bytes are ever read.
        table = np.where(np.arange(width) < needed[:, None], table, table[:, :1])
        hidden = np.arange(width * block_tokens)[None, :] >= ends[:, None]
        return self._index(table.reshape(-1) * 2), self._mask(hidden[:, None, None, :])

    def _chunk(self, step: StepInput, index: int, block_tokens: int) -> _Chunk:
        start, end, row_end = int(step.starts[index]), int(step.ends[index]), int(step.row_ends[index])
        blocks = step.block_tables[index, : -(-end // block_tokens)]
        if self._deterministic:
            granularity = _DETERMINISTIC_KEYS // math.gcd(_DETERMINISTIC_KEYS, block_tokens)
            blocks = np.concatenate([blocks, np.full(-len(blocks) % granularity, blocks[0])])
        keys = np.arange(len(blocks) * block_tokens)
        queries = np.repeat(np.arange(start, end), self._group)
        key_blocks = self._index(blocks * 2)
        mask = self._mask((keys[None, :] > queries[:, None])[None, None])
        return _Chunk(slice(row_end - (end - start), row_end), key_blocks, key_blocks + 1, mask)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _choose_tokens(self, step: StepInput, x: torch.Tensor) -> StepOutput:
        count = step.sequence_count
        token_ids = np.full(count, -1, np.int32)
        margins = np.zeros(count, np.float32)
        sampling = step.sampling
        rows = np.flatnonzero([step.want_logits or one is not None for one in sampling])
        if not len(rows):
            return StepOutput(step.step_id, token_ids=token_ids, margins=margins)
        logits = self._logits(x.index_select(0, self._index(step.row_ends[rows] - 1)))
        full = logits.cpu().numpy().copy() if step.want_logits else None
        best = logits.max(dim=-1)
        own = {
            index: logits[place].cpu().numpy().copy()
            for place, index in enumerate(rows)
            if (one := sampling[index]) is not None and not one.largest_wins
        }
        # The second largest is the largest of the rest: two passes are ten times faster than a top-k of a vocabulary.
        logits.scatter_(1, best.indices.unsqueeze(1), -torch.inf)
        margins[rows] = (best.values - logits.amax(dim=-1)).cpu().numpy()
        token_ids[rows] = best.indices.cpu().numpy()
        logprobs: dict[int, TokenLogprobs] = {}
        for index, row in own.items():
            one = sampling[index]
            if one is not None:
                token_ids[index], told = chosen(
                    row, one, int(step.ends[index]), step.told[index] if step.told else None
                )
                if told is not None:
                    logprobs[int(index)] = told
        if step.want_logits:
            unwanted = [one is None for one in sampling]
            token_ids[unwanted], margins[unwanted] = -1, 0.0
        return StepOutput(step.step_id, token_ids=token_ids, margins=margins, logits=full, logprobs=logprobs)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """What the model says behind these activations: float32, (rows, vocabulary)."""
        if self._final_norm is None or self._head is None:
            raise EngineError("the last stage has no vocabulary projection")
        normed = F.rms_norm(rows, (self.model.hidden_size,), self._final_norm, self._geometry.norm_epsilon)
        return self._linear(normed, self._head).to(torch.float32)

    def _scored(self, step: StepInput, x: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log probabilities of prompts' tokens, where they are wanted; so many rows at a time that their logits stay small."""
        scored = {}
        for index, count in step.scored.items():
            targets = step.targets(index).astype(np.int64)
            first_row = int(step.row_ends[index] - step.counts[index])
            told: list[TokenLogprobs] = []
            for begin in range(0, len(targets), _SCORED_ROWS):
                wanted = targets[begin : begin + _SCORED_ROWS]
                logits = self._logits(x[first_row + begin : first_row + begin + len(wanted)]).to(torch.float64)
                logits -= logits.logsumexp(dim=-1, keepdim=True)
                own = logits.gather(1, self._index(wanted).unsqueeze(1)).squeeze(1).tolist()
                tops = logits.topk(min(count, logits.shape[1]), dim=-1) if count else None
                ids, values = ([[]] * len(own),) * 2 if tops is None else (tops.indices.tolist(), tops.values.tolist())
                told += [
                    # Largest first, lower id first among equals.
                    TokenLogprobs(one, tuple(sorted(zip(best, their), key=lambda pair: (-pair[1], pair[0]))))
                    for one, best, their in zip(own, ids, values)
                ]
            scored[index] = tuple(told)
        return scored
