"""The engine that reads every byte of KV, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meta_executor.config import SyntheticConfig
from meta_executor.engine.base import StageSpec, StepInput, StepOutput
from meta_executor.engine.synthetic import SyntheticEngine
from simulation import Violation


class SimulatedEngine(SyntheticEngine):
    """The engine that reads all KV; a step has run when it is launched, and ends at its time."""

    def __init__(
        self, config: SyntheticConfig, stage: StageSpec, later: Callable[[Callable[[], None]], object]
    ) -> None:
        super().__init__(config, stage)
        super().close()
        self._later = later

    def launch(self, step: StepInput) -> Any:
        return _Step(self._step(step), self._later)

    def close(self) -> None:
        """There is no thread."""


class _Step:
    def __init__(self, output: StepOutput, later: Callable[[Callable[[], None]], object]) -> None:
        self._output = output
        self._ended = False
        self._call: Callable[[], None] = lambda: None
        later(self._end)

    def _end(self) -> None:
        self._ended = True
        self._call()

    def add_done_callback(self, call: Callable[[], None]) -> None:
        self._call = call
        if self._ended:
            call()

    def done(self) -> bool:
        return self._ended

    def result(self) -> StepOutput:
        if not self._ended:
            raise Violation("a step was asked for its result before its end")
        return self._output
