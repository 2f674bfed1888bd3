"""The thread of an engine: it runs steps in the order of their launches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from meta_executor.engine.base import StepOutput
from meta_executor.engine.errors import StepError
from meta_executor.engine.step_recorder import StepRecorder


class WorkerHandle:
    """A step that a worker thread runs."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._output: StepOutput | None = None
        self._error: BaseException | None = None
        self._call: Callable[[], None] | None = None

    def add_done_callback(self, call: Callable[[], None]) -> None:
        """Call this once the step has ended, from the worker's thread; perhaps twice if it ends meanwhile."""
        self._call = call
        if self._ended.is_set():
            call()

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
            if self._call is not None:
                self._call()


class StepWorker:
    """One daemon thread that runs steps in order."""

    def __init__(self, name: str, prepare: Callable[[], None] | None = None) -> None:
        self._queue: SimpleQueue[tuple[WorkerHandle, Callable[[], StepOutput]] | None] = SimpleQueue()
        self._closed = False
        self._prepare = prepare
        #: Notes the steps that begin from now on; None: nobody does.
        self.recorder: StepRecorder | None = None
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
            recorder = self.recorder
            handle.run(work if recorder is None else partial(recorder.run, work))
