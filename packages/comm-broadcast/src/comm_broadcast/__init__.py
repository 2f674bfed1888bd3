"""Object broadcast and gather over ranks that fail together.

Layout:

- ``_exchange``: the exchanges as non-blocking steps, ``Broadcaster``; ``_handle``: who drives them
- ``_settings``: what ranks agree on at construction; ``_config``, ``_errors``
- ``_frame``: the first frame; ``_block``: what does not fit in it; ``_pool``, ``_window``: memory
- ``_codec``: values as segments of bytes: pickle 5, raw bytes; ``_tokens``: typed token batches
- ``_comm``: what an adapter offers; ``_mpi`` (``MpiComm``), ``_torch`` (``TorchComm``): the adapters, imported on first use
- ``testing``: a communicator of threads that records every rank's operations
"""

from typing import Any

from comm_broadcast.__about__ import __version__
from comm_broadcast._codec import BytesCodec, Codec, PickleCodec
from comm_broadcast._comm import Comm
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import (
    BroadcastConfigError,
    BroadcastError,
    CommBroadcastError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
)
from comm_broadcast._exchange import Broadcaster, BroadcastStatistics
from comm_broadcast._handle import Handle
from comm_broadcast._tokens import TokenBatchCodec

BroadcastHandle = Handle

__all__ = [
    "BroadcastConfig",
    "BroadcastConfigError",
    "BroadcastError",
    "BroadcastHandle",
    "BroadcastStatistics",
    "Broadcaster",
    "BytesCodec",
    "Codec",
    "Comm",
    "CommBroadcastError",
    "Handle",
    "LocalProtocolError",
    "MpiComm",
    "PickleCodec",
    "RemoteProtocolError",
    "TokenBatchCodec",
    "TorchComm",
    "TransportError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "MpiComm":
        from comm_broadcast._mpi import MpiComm

        return MpiComm
    if name == "TorchComm":
        from comm_broadcast._torch import TorchComm

        return TorchComm
    raise AttributeError(f"module 'comm_broadcast' has no attribute {name!r}")
