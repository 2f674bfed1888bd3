"""Host copies on a thread of their own: the host's counterpart of a device stream.

A gather of 64 MiB takes ten milliseconds; in the thread that polls transfers and runs an engine's loop, everything else
would wait for it. numpy's indexed copies and memmove release the GIL, so a worker really runs beside the caller. Small copies
are done at once where nothing is queued: handing them over would cost more than they do.
"""

from __future__ import annotations

import queue
import threading

from kv_bounce_planner._errors import LayoutError, LocalProtocolError, TransportError
from kv_bounce_planner.copies.gather import FINISHED, CopyHandle, CopyTable, HostLists, PackedCopy, PreparedCopy


class _ThreadHandle:
    """A copy that a worker runs."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        """Whether every byte has landed; never blocks."""
        if not self._ended.is_set():
            return False
        if self._error is not None:
            raise TransportError(f"a host copy failed: {self._error}") from self._error
        return True

    def wait(self) -> None:
        """Block until it has."""
        self._ended.wait()
        self.done()


class ThreadCopier(HostLists):
    """Copies host memory on one worker thread, first in, first out.

    Args:
        inline_bytes_max: Copies up to this size run in the caller's thread while nothing is queued (bytes, at least 0).
        queued_max: Copies that may wait (count, at least 1).

    The thread starts with the first queued copy. Close it before the memory that it copies goes away.
    """

    def __init__(self, *, inline_bytes_max: int = 1 << 20, queued_max: int = 1024) -> None:
        if inline_bytes_max < 0 or queued_max < 1:
            raise LayoutError("inline_bytes_max must not be negative and queued_max must be at least 1")
        self._inline_bytes_max, self._queued_max = inline_bytes_max, queued_max
        self._queue: queue.SimpleQueue[tuple[CopyTable | PackedCopy, _ThreadHandle] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, prepared: PreparedCopy) -> CopyHandle:
        """Start a copy.

        Raises:
            LocalProtocolError: The copier is closed, or ``queued_max`` copies wait. Nothing was started.
            LayoutError: A list of another copier.
        """
        if not isinstance(prepared, CopyTable | PackedCopy):
            raise LayoutError("a list prepared by another copier")
        handle = _ThreadHandle()
        with self._lock:
            if self._closed:
                raise LocalProtocolError("the copier is closed")
            inline = self._waiting == 0 and prepared.total_bytes <= self._inline_bytes_max
            if not inline:
                if self._waiting >= self._queued_max:
                    raise LocalProtocolError(f"{self._waiting} copies wait already")
                self._waiting += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="kv-copies", daemon=True)
                    self._thread.start()
        if inline:
            prepared.run()
            return FINISHED
        self._queue.put((prepared, handle))
        return handle

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            table, handle = item
            error: BaseException | None = None
            try:
                table.run()
            except BaseException as caught:  # noqa: BLE001 - handed to whoever asks the handle
                error = caught
            with self._lock:
                self._waiting -= 1
            handle.finish(error)

    def close(self) -> None:
        """Refuse new copies, let the queued ones end, and end the thread. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def __enter__(self) -> ThreadCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
