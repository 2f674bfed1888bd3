"""The engine without a model: tokens by hash, step time as configured, KV memory that matters.

Every KV element is a pattern of (token, position, layer, place). A step reads back *all* KV bytes of each sequence
through its block table and the token that it chooses is a hash of them, so one wrong byte of a KV transfer, or one wrong
block in a table, changes the output. The digest is a sum over layers modulo 2**64, carried between stages in the
activations, so any split into stages gives the same tokens.

Step time is spent in the engine's own thread, in a wait that does not hold the GIL. Needs numpy only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from meta_executor.config import SyntheticConfig
from meta_executor.engine.base import KVMemory, ModelInfo, SequenceStep, StageSpec, StepInput, StepOutput, check_step
from meta_executor.engine.errors import StepError

#: Activations carry the digest as 16-bit limbs, which float32 holds exactly; the rest of the row is padding.
_LIMBS = 4
_HIDDEN = 8
#: Ids below this are never generated: 0 unknown, 1 begin, 2 end.
_RESERVED = 3
#: KV bytes that are read at once: few enough to stay in a cache.
_READ_BYTES = 4 << 20

_U64 = np.uint64
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


class WorkerHandle:
    """A step that a worker thread runs."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._output: StepOutput | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the step has ended."""
        return self._ended.is_set()

    def result(self) -> StepOutput:
        """The output; waits. Raises what the step raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._output is None:
            raise StepError("the step ended without an output")
        return self._output

    def run(self, work: Callable[[], StepOutput]) -> None:
        """Do the work and keep its outcome (in the worker thread)."""
        try:
            self._output = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error
        finally:
            self._ended.set()


class StepWorker:
    """One daemon thread that runs steps in order."""

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._queue: SimpleQueue[tuple[WorkerHandle, Callable[[], StepOutput]] | None] = SimpleQueue()
        self._closed = False
        self._prepare = prepare
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], StepOutput]) -> WorkerHandle:
        """Queue one step.

        Raises:
            StepError: The engine is closed.
        """
        if self._closed:
            raise StepError("the engine is closed")
        handle = WorkerHandle()
        self._queue.put((handle, work))
        return handle

    def close(self) -> None:
        """End the thread after what was queued. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (item := self._queue.get()) is not None:
            handle, work = item
            handle.run(work)


class SyntheticEngine:
    """One stage of the model that is none.

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

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._worker.close()

    def _step(self, step: StepInput) -> StepOutput:
        started_s = self._clock()
        if self._kv is None:
            raise StepError("launch before allocate_kv")
        kv = self._kv
        check_step(step, self.stage, self.model, kv.shape[1], kv.shape[3])
        count = len(step.sequences)
        sequences = step.sequences
        lengths = np.array([len(sequence.token_ids) for sequence in sequences])
        ends = np.cumsum(lengths)
        if self.stage.is_first:
            tokens = np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)
            before = np.zeros(count, _U64)
        elif step.hidden is not None:
            # The token itself rides along, so that later stages write the same pattern as a whole model would.
            tokens = step.hidden[:, _LIMBS].astype(np.int64)
            limbs = step.hidden[ends - 1, :_LIMBS].astype(_U64)
            before = (limbs << (np.arange(_LIMBS, dtype=_U64) * _U64(16))).sum(axis=1, dtype=_U64)
        else:
            raise StepError(f"step {step.step_id}: no activations")
        positions = np.concatenate([np.arange(s.start_position, s.end_position) for s in sequences])
        self._write(kv, tokens, positions, np.concatenate([self._blocks_of_tokens(s, kv.shape[3]) for s in sequences]))
        digests = before + self._read(kv, sequences)
        token_ids = np.full(count, -1, np.int32)
        margins = np.zeros(count, np.float32)
        hidden = np.zeros((len(tokens), _HIDDEN), np.float32)
        if self.stage.is_last:
            seeds = [
                0 if s.sampling is None or s.sampling.temperature == 0 else s.sampling.seed * 0x9E3779B97F4A7C15 % 2**64
                for s in sequences
            ]
            chosen = _RESERVED + _mix(digests ^ np.array(seeds, _U64)) % _U64(self.model.vocab_size - _RESERVED)
            wanted = np.array([sequence.sampling is not None for sequence in sequences])
            token_ids[wanted] = chosen[wanted].astype(np.int32)
            margins[wanted] = 1.0
        else:
            hidden[:, _LIMBS] = tokens
            parts = (digests[:, None] >> (np.arange(_LIMBS, dtype=_U64) * _U64(16))) & _U64(0xFFFF)
            hidden[ends - 1, :_LIMBS] = parts
        cost_s = (self._config.step_ms + self._config.step_ms_per_token * step.token_count) / 1000.0
        remaining_s = started_s + cost_s - self._clock()
        if remaining_s > 0:
            self._sleep(remaining_s)
        if not self.stage.is_last:
            return StepOutput(step.step_id, hidden=hidden)
        return StepOutput(step.step_id, token_ids=token_ids, margins=margins)

    @staticmethod
    def _blocks_of_tokens(sequence: SequenceStep, block_tokens: int) -> npt.NDArray[np.int64]:
        positions = np.arange(sequence.start_position, sequence.end_position)
        return np.asarray(sequence.block_ids)[positions // block_tokens]

    def _write(
        self,
        kv: npt.NDArray[np.float32],
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.int64],
    ) -> None:
        """Write the pattern of every token of the step, in every layer."""
        with np.errstate(over="ignore"):
            keys = _mix(tokens.astype(_U64) * _U64(0x1_0000_0001) + positions.astype(_U64) * _U64(0xFFFF_FFFB))
            pattern = _mix(keys[:, None, None] ^ self._salt[None])
        # 24 bits in [0, 1): finite and exact, whatever copies or converts it on the way.
        values = ((pattern >> _U64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)
        shape = (len(tokens), self.stage.layer_count, 2, self.model.kv_head_count, self.model.head_dim)
        kv[:, blocks, :, positions % kv.shape[3]] = values.reshape(shape)

    def _read(self, kv: npt.NDArray[np.float32], sequences: Sequence[SequenceStep]) -> npt.NDArray[np.uint64]:
        """Each sequence's digest over this stage's layers: every byte of every position, by its block table.

        A handful of array operations per megabyte, whatever the number of sequences: the time that the interpreter is held
        for does not grow with the batch.
        """
        block_tokens = kv.shape[3]
        counts = np.array([-(-sequence.end_position // block_tokens) for sequence in sequences])
        digests = np.empty(len(sequences), _U64)
        bytes_per_block = kv[:, 0].nbytes
        begin = 0
        while begin < len(sequences):
            end = begin + 1
            while end < len(sequences) and counts[begin : end + 1].sum() * bytes_per_block <= _READ_BYTES:
                end += 1
            digests[begin:end] = self._read_group(kv, sequences[begin:end], counts[begin:end])
            begin = end
        return digests

    def _read_group(
        self, kv: npt.NDArray[np.float32], sequences: Sequence[SequenceStep], counts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint64]:
        block_tokens = kv.shape[3]
        blocks = np.concatenate([np.asarray(s.block_ids)[:count] for s, count in zip(sequences, counts)])
        first = np.cumsum(counts) - counts
        # Position of every token slot in its own sequence; slots behind the sequence's end weigh nothing.
        slots = (np.arange(len(blocks)) - np.repeat(first, counts))[:, None] * block_tokens + np.arange(block_tokens)
        ends = np.repeat([sequence.end_position for sequence in sequences], counts)
        position_weights = np.where(slots < ends[:, None], _mix(slots.astype(_U64)) | _U64(1), _U64(0))
        words = np.take(kv, blocks, axis=1).view(self._word)
        words = words.reshape(self.stage.layer_count, len(blocks), 2, block_tokens, -1)
        with np.errstate(over="ignore"):
            weighted = words * self._weights[:, None, :, None, :]
            per_slot = weighted.sum(axis=(0, 2, 4), dtype=_U64)
            per_block = (per_slot * position_weights).sum(axis=1, dtype=_U64)
            return np.add.reduceat(per_block, first)
