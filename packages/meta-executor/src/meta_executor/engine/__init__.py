"""What computes: one interface, two engines, and the parts that they share.

Layout (each imports only what stands above it)::

    errors         one error tree
    base           the interface: ModelInfo, StageSpec, StepInput, StepOutput, Engine, KVMemory
    sampling       a logits row and a position -> a token; why an answer ends
    kv_pool        paged KV bookkeeping: owners, proofs, prefix cache (no memory of its own)
    gguf_file      the GGUF container: metadata and tensor directory
    weights        where a model is, what shape it has, a stage's tensors
    templates      a chat template, rendered within bounds of time and memory
    tokenizer      text <-> token ids, chat template, stop strings
    step_recorder  what a step took, for trials
    step_worker    the thread that runs an engine's steps
    synthetic      the engine without a model
    llama          the engine for Llama-family models (torch)
    factory        a configuration -> its engine
    generate       one prompt in one process: the reference for equality

An engine knows no request of ours and no rank but its own stage. Importing this package needs numpy and msgspec only.
"""

from meta_executor.engine.base import (
    Engine,
    KVMemory,
    ModelInfo,
    SamplingParams,
    SequenceStep,
    StageSpec,
    StepHandle,
    StepInput,
    StepOutput,
)
from meta_executor.engine.errors import (
    EngineError,
    KVPoolExhausted,
    ModelFormatError,
    ModelNotFoundError,
    OwnershipError,
    StepError,
)
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.kv_pool import BlockPool, BlockState, PoolStatistics
from meta_executor.engine.sampling import finish_reason

__all__ = [
    # interface
    "Engine", "ModelInfo", "StageSpec", "SamplingParams", "SequenceStep", "StepInput", "StepOutput", "StepHandle",
    "KVMemory", "create_engine", "model_info",
    # parts
    "BlockPool", "BlockState", "PoolStatistics", "finish_reason",
    # errors
    "EngineError", "ModelNotFoundError", "ModelFormatError", "StepError", "OwnershipError", "KVPoolExhausted",
]  # fmt: skip
