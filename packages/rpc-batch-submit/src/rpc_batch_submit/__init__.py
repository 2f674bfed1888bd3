"""Coalesce many submits into one call.

Layout: ``_errors`` and ``_config`` are leaves; ``_batcher`` is the pure core; ``_outcomes`` reads results and helps the
worker; ``_driver`` is what the two drivers ``_asyncio`` and ``_threads`` share. ``testing`` is public. Nothing but the
standard library.
"""

from rpc_batch_submit.__about__ import __version__
from rpc_batch_submit._asyncio import AsyncioBatchSubmitter
from rpc_batch_submit._batcher import FLUSH_REASONS, Batcher, BatchStatistics, Entry, EntryState, SendBatch
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import (
    BatchAborted,
    BatchBackpressure,
    BatchClosed,
    BatchConfigError,
    BatchItemFailed,
    BatchOutcomeError,
    BatchSendFailed,
    BatchSendUnknown,
    BatchSubmitError,
    BatchUsageError,
)
from rpc_batch_submit._outcomes import never_ran, take_in, unpack_outcomes
from rpc_batch_submit._threads import ThreadBatchSubmitter

__all__ = [
    # settings
    "BatchSubmitConfig",
    # the caller's side
    "AsyncioBatchSubmitter",
    "ThreadBatchSubmitter",
    "BatchStatistics",
    "never_ran",
    # the worker's side
    "take_in",
    "unpack_outcomes",
    # the pure core
    "Batcher",
    "Entry",
    "EntryState",
    "SendBatch",
    "FLUSH_REASONS",
    # errors
    "BatchSubmitError",
    "BatchConfigError",
    "BatchUsageError",
    "BatchClosed",
    "BatchBackpressure",
    "BatchAborted",
    "BatchSendFailed",
    "BatchSendUnknown",
    "BatchItemFailed",
    "BatchOutcomeError",
    "__version__",
]
