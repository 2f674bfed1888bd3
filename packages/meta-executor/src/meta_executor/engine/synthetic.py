"""The engine without a model: tokens by hash, step time as configured, KV memory that matters.

Every KV element is a pattern of (token, position, layer, place). A step reads KV bytes of each sequence back through its
block table, and the token that it chooses is a hash of them: a wrong byte of a KV transfer, or a wrong block in a table,
changes the output. The digest is a sum over layers modulo 2**64, carried between stages in the activations, so any split
into stages gives the same tokens.

``kv_check`` says how much is read: ``full``, every byte of every position, in each step; ``sampled``, a few words of a few
positions that a hash of the step's position chooses; ``off``, nothing is written or read and the answer depends on the
tokens alone. ``full`` costs host time in proportion to the length of the sequences, which a measurement of the host must not
contain; with the other two a step costs a handful of array operations, whatever the lengths.

Step time is spent in the engine's own thread, in a wait that does not hold the GIL. Needs numpy only.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from meta_executor.config import SyntheticConfig
from meta_executor.engine.base import Int64Array, KVMemory, ModelInfo, StageSpec, StepInput, StepOutput, check_step
from meta_executor.engine.errors import StepError
from meta_executor.engine.step_recorder import StepRecorder
from meta_executor.engine.step_worker import StepWorker, WorkerHandle
from meta_executor.wire import TokenLogprobs

#: Activations carry the digest as 16-bit limbs, which float32 holds exactly; the rest of the row is padding.
_LIMBS = 4
_HIDDEN = 8
#: Ids below this are never generated: 0 unknown, 1 begin, 2 end.
_RESERVED = 3
#: KV bytes that are read at once: few enough to stay in a cache.
_READ_BYTES = 4 << 20
#: Positions that a sequence's step reads with ``kv_check: sampled``, the newest among them (count).
_SAMPLED_POSITIONS = 4
#: Patterns of a token with ``kv_check: sampled`` (count): a wrong token is seen with a probability of 1 - 1/patterns.
_PATTERNS = 1024

_U64 = np.uint64
_LIMB_SHIFTS = np.arange(_LIMBS, dtype=_U64) * _U64(16)
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_MIX1 = _U64(0xBF58476D1CE4E5B9)
_MIX2 = _U64(0x94D049BB133111EB)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser, elementwise."""
    with np.errstate(over="ignore"):
        values = values + _GOLDEN
        values = (values ^ (values >> _U64(30))) * _MIX1
        values = (values ^ (values >> _U64(27))) * _MIX2
        return values ^ (values >> _U64(31))


def _keys(tokens: Int64Array, positions: Int64Array) -> npt.NDArray[np.uint64]:
    """What a token's pattern is made from: the token and its position."""
    with np.errstate(over="ignore"):
        return _mix(tokens.astype(_U64) * _U64(0x1_0000_0001) + positions.astype(_U64) * _U64(0xFFFF_FFFB))


def synthetic_model_info(config: SyntheticConfig) -> ModelInfo:
    """The shape that the configuration gives."""
    return ModelInfo(
        name="synthetic",
        layer_count=config.layer_count,
        hidden_size=_HIDDEN,
        attention_head_count=config.kv_head_count,
        kv_head_count=config.kv_head_count,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        context_tokens_max=config.context_tokens_max,
        kv_dtype="float32",
        bos_token_id=1,
        eos_token_ids=(2,),
    )


class SyntheticEngine:
    """One stage of a synthetic model without weights.

    Args:
        config: Shape and step time.
        stage: Layers of this stage.
        clock: Monotonic time (s).
        sleep: Wait without the GIL (s).
    """

    def __init__(
        self,
        config: SyntheticConfig,
        stage: StageSpec,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if stage.first_layer + stage.layer_count > config.layer_count:
            raise ValueError(f"stage layers {stage.layers} exceed layer_count {config.layer_count}")
        self.model = synthetic_model_info(config)
        self.stage = stage
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._kv: npt.NDArray[np.float32] | None = None
        layers = np.arange(stage.first_layer, stage.first_layer + stage.layer_count, dtype=_U64)
        elements = config.kv_head_count * config.head_dim
        places = np.arange(2 * elements, dtype=_U64)
        #: Keys or values of one token in one layer are read as words of this type, the widest that divides them.
        self._word = np.dtype(np.uint64 if elements % 2 == 0 else np.uint32)
        words = elements * 4 // self._word.itemsize
        with np.errstate(over="ignore"):
            self._salt = _mix(layers[:, None] * _U64(1 << 20) + places[None, :])
            #: Odd multipliers per (layer, key or value, word), so that every bit counts and swapping two words shows.
            self._weights = _mix(self._salt.reshape(stage.layer_count, 2, elements)[:, :, :words]) | _U64(1)
        if config.kv_check == "sampled":
            self._table = self._patterns_of(_mix(np.arange(_PATTERNS, dtype=_U64)))
        self._worker = StepWorker(f"synthetic-{stage.stage_index}")

    def allocate_kv(self, block_count: int, block_tokens: int) -> KVMemory:
        """Make the KV memory, zeroed: (layer, block, key or value, token, head, element)."""
        if self._kv is not None:
            raise StepError("the KV memory was allocated already")
        heads, dim = self.model.kv_head_count, self.model.head_dim
        kv = np.zeros((self.stage.layer_count, block_count, 2, block_tokens, heads, dim), np.float32)
        self._kv = kv
        base = kv.ctypes.data
        return KVMemory(
            block_count=block_count,
            block_tokens=block_tokens,
            layer_base_addresses=tuple(base + layer * kv.strides[0] for layer in range(self.stage.layer_count)),
            block_stride_bytes=kv.strides[1],
            kv_stride_bytes=kv.strides[2],
            token_stride_bytes=kv.strides[3],
            head_stride_bytes=kv.strides[4],
            kv_head_count=heads,
            head_dim=dim,
            element_bytes=4,
            memory_kind="DRAM",
            device_id=0,
            regions=((base, kv.nbytes),),
            owner=kv,
        )

    def launch(self, step: StepInput) -> WorkerHandle:
        """Queue a step; the engine's thread runs it."""
        return self._worker.submit(lambda: self._step(step))

    def record_steps(self, recorder: StepRecorder) -> None:
        """Have it note the steps that are launched from now on."""
        self._sleep = recorder.device_wait
        self._worker.recorder = recorder

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._worker.close()

    def _step(self, step: StepInput) -> StepOutput:
        started_s = self._clock()
        if self._kv is None:
            raise StepError("launch before allocate_kv")
        kv = self._kv
        check_step(step, self.stage, self.model, kv.shape[1], kv.shape[3])
        tokens, before = self._tokens_and_digests(step)
        digests = before + self._own_digests(kv, step, tokens)
        output = self._chosen(step, digests) if self.stage.is_last else self._handed_on(step, tokens, digests)
        config = self._config
        cost_ms = (
            config.step_ms + config.step_ms_per_token * step.token_count + config.stagger_ms * self.stage.stage_index
        )
        cost_s = cost_ms / 1000.0
        remaining_s = started_s + cost_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
        return output

    # -- digests, between stages and to tokens ------------------------------------------------------------------------

    def _tokens_and_digests(self, step: StepInput) -> tuple[Int64Array, npt.NDArray[np.uint64]]:
        """The step's tokens, and each sequence's digest over the stages before."""
        if self.stage.is_first:
            return step.token_ids.astype(np.int64), np.zeros(step.sequence_count, _U64)
        if step.hidden is None:
            raise StepError(f"step {step.step_id}: no activations")
        # The token itself rides along, so that later stages write the same pattern as a whole model would.
        limbs = step.hidden[step.row_ends - 1, :_LIMBS].astype(_U64)
        return step.hidden[:, _LIMBS].astype(np.int64), (limbs << _LIMB_SHIFTS).sum(axis=1, dtype=_U64)

    @staticmethod
    def _handed_on(step: StepInput, tokens: Int64Array, digests: npt.NDArray[np.uint64]) -> StepOutput:
        hidden = np.zeros((len(tokens), _HIDDEN), np.float32)
        hidden[:, _LIMBS] = tokens
        hidden[step.row_ends - 1, :_LIMBS] = (digests[:, None] >> _LIMB_SHIFTS) & _U64(0xFFFF)
        return StepOutput(step.step_id, hidden=hidden)

    def _chosen(self, step: StepInput, digests: npt.NDArray[np.uint64]) -> StepOutput:
        wanted = np.array([sampling is not None for sampling in step.sampling])
        seeds = np.array(
            [
                0 if one is None or one.temperature == 0 else one.seed * 0x9E3779B97F4A7C15 % 2**64
                for one in step.sampling
            ],
            _U64,
        )
        chosen = (_RESERVED + _mix(digests ^ seeds) % _U64(self.model.vocab_size - _RESERVED)).astype(np.int32)
        return StepOutput(
            step.step_id,
            token_ids=np.where(wanted, chosen, np.int32(-1)),
            margins=wanted.astype(np.float32),
            # A hash is certain of its token, and gives no other one.
            logprobs={
                index: TokenLogprobs(0.0, ((int(chosen[index]), 0.0),) if one.logprobs else ())
                for index, one in enumerate(step.sampling)
                if one is not None and one.logprobs is not None
            },
            prompt_logprobs={index: self._scored(step, index, count) for index, count in step.scored.items()},
        )

    @staticmethod
    def _scored(step: StepInput, index: int, count: int) -> tuple[TokenLogprobs, ...]:
        """A number in (-1, 0] of each token and its position, and no other token."""
        targets = step.targets(index).astype(np.int64)
        positions = int(step.starts[index]) + 1 + np.arange(len(targets))
        logprobs = (_keys(targets, positions) >> _U64(11)).astype(np.float64) * -(2.0**-53)
        return tuple(
            TokenLogprobs(logprob, ((token, logprob),) if count else ())
            for token, logprob in zip(targets.tolist(), logprobs.tolist())
        )

    def _own_digests(self, kv: npt.NDArray[np.float32], step: StepInput, tokens: Int64Array) -> npt.NDArray[np.uint64]:
        """Write what the step adds; each sequence's digest over this stage's layers."""
        if self._config.kv_check == "off":
            if not self.stage.is_first:
                return np.zeros(step.sequence_count, _U64)
            last = step.row_ends - 1
            return _keys(tokens[last], step.ends - 1)
        blocks = step.block_tables[step.owners, step.positions // kv.shape[3]]
        if self._config.kv_check == "full":
            values = self._patterns_of(_keys(tokens, step.positions))
        else:
            values = self._table[(_keys(tokens, step.positions) % _U64(_PATTERNS)).astype(np.int64)]
        kv[:, blocks, :, step.positions % kv.shape[3]] = values
        return self._read(kv, step) if self._config.kv_check == "full" else self._sample(kv, step)

    # -- KV memory ----------------------------------------------------------------------------------------------------

    def _patterns_of(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
        """The pattern of each key in every layer: (keys, layer, key or value, head, element)."""
        pattern = _mix(keys[:, None, None] ^ self._salt[None])
        # 24 bits in [0, 1): finite and exact, whatever copies or converts it on the way.
        values = ((pattern >> _U64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)
        return values.reshape(len(keys), self.stage.layer_count, 2, self.model.kv_head_count, self.model.head_dim)

    def _sample(self, kv: npt.NDArray[np.float32], step: StepInput) -> npt.NDArray[np.uint64]:
        """Each sequence's digest over a few words: at each position drawn one word of the keys and one of the values of one
        layer, which is read by the stage that has it."""
        block_tokens = kv.shape[3]
        ends = step.ends.astype(_U64)[:, None]
        draws = _mix(ends ^ (np.arange(_SAMPLED_POSITIONS, dtype=_U64) << _U64(40)))
        positions = (draws % ends).astype(np.int64)
        positions[:, 0] = step.ends - 1
        layers = ((draws >> _U64(20)) % _U64(self.model.layer_count)).astype(np.int64) - self.stage.first_layer
        rows, columns = np.nonzero((layers >= 0) & (layers < self.stage.layer_count))
        layers, positions, draws = layers[rows, columns], positions[rows, columns], draws[rows, columns]
        words = kv.view(self._word).reshape(*kv.shape[:4], -1)
        places = ((draws >> _U64(32)) % _U64(words.shape[4])).astype(np.int64)
        blocks = step.block_tables[rows, positions // block_tokens]
        read = words[layers, blocks, :, positions % block_tokens, places].astype(_U64)
        digests = np.zeros(step.sequence_count, _U64)
        with np.errstate(over="ignore"):
            weighted = (read * self._weights[layers, :, 0]).sum(axis=1, dtype=_U64)
            np.add.at(digests, rows, _mix(weighted ^ _mix(positions.astype(_U64))))
        return digests

    def _read(self, kv: npt.NDArray[np.float32], step: StepInput) -> npt.NDArray[np.uint64]:
        """Each sequence's digest over this stage's layers: every byte of every position, by its block table.

        A handful of array operations per megabyte, whatever the number of sequences: the time that the interpreter is held
        for does not grow with the batch.
        """
        counts = -(-step.ends // kv.shape[3])
        digests = np.empty(step.sequence_count, _U64)
        bytes_per_block = kv[:, 0].nbytes
        begin = 0
        while begin < step.sequence_count:
            end = begin + 1
            while end < step.sequence_count and counts[begin : end + 1].sum() * bytes_per_block <= _READ_BYTES:
                end += 1
            digests[begin:end] = self._read_group(kv, step, slice(begin, end), counts[begin:end])
            begin = end
        return digests

    def _read_group(
        self, kv: npt.NDArray[np.float32], step: StepInput, group: slice, counts: Int64Array
    ) -> npt.NDArray[np.uint64]:
        block_tokens = kv.shape[3]
        tables = step.block_tables[group]
        blocks = tables[np.arange(tables.shape[1]) < counts[:, None]]
        first = np.cumsum(counts) - counts
        # Position of every token slot in its own sequence; slots behind the sequence's end weigh nothing.
        slots = (np.arange(len(blocks)) - np.repeat(first, counts))[:, None] * block_tokens + np.arange(block_tokens)
        ends = np.repeat(step.ends[group], counts)
        position_weights = np.where(slots < ends[:, None], _mix(slots.astype(_U64)) | _U64(1), _U64(0))
        words = np.take(kv, blocks, axis=1).view(self._word)
        words = words.reshape(self.stage.layer_count, len(blocks), 2, block_tokens, -1)
        with np.errstate(over="ignore"):
            weighted = words * self._weights[:, None, :, None, :]
            per_slot = weighted.sum(axis=(0, 2, 4), dtype=_U64)
            per_block = (per_slot * position_weights).sum(axis=1, dtype=_U64)
            return np.add.reduceat(per_block, first)
