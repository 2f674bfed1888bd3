"""Which engine a configuration means: the only module that knows all of them. A new one is named here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meta_executor.config import EngineConfig
from meta_executor.engine.base import Engine, ModelInfo, StageSpec
from meta_executor.engine.step_recorder import StepRecorder
from meta_executor.engine.synthetic import SyntheticEngine, synthetic_model_info
from meta_executor.engine.weights import resolve_model

if TYPE_CHECKING:
    from meta_executor.engine.llama import LlamaEngine


def model_info(config: EngineConfig) -> ModelInfo:
    """A model's shape, without loading it.

    Raises:
        ModelNotFoundError: No such model.
        ModelFormatError: Its file cannot be used.
    """
    if config.kind == "synthetic":
        return synthetic_model_info(config.synthetic)
    return resolve_model(config.model).info(config.dtype)


def create_engine(config: EngineConfig, stage: StageSpec, recorder: StepRecorder | None = None) -> Engine:
    """Load the stage's share of the configured model; ``recorder`` notes its steps.

    Raises:
        ModelNotFoundError: No such model.
        ModelFormatError: Its file cannot be used.
        ValueError: The stage does not fit the model.
    """
    engine: SyntheticEngine | LlamaEngine
    if config.kind == "synthetic":
        engine = SyntheticEngine(config.synthetic, stage)
    else:
        # Only here is torch needed.
        from meta_executor.engine.llama import LlamaEngine

        engine = LlamaEngine.load(config, stage)
    if recorder is not None:
        engine.record_steps(recorder)
    return engine
