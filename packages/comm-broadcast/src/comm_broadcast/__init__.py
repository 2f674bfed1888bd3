"""Object broadcast and gather over ranks that fail together.

Layout:

- ``_broadcaster``: ``Broadcaster`` begins exchanges; ``_handle``: who waits for them
- ``_exchange``: one exchange on one rank, as a script that can be begun again; ``_ahead``: one whose root waits for nobody;
  ``_failure``: what went wrong, as text
- ``_settings``: what ranks agree on at construction; ``_config``, ``_errors``
- ``_frame``: the first frame and the verdict on all ranks' frames; ``_block``: what does not fit in it
- ``_pool``, ``_window``: memory
- ``_codec``: values as segments of bytes: pickle 5, raw bytes; ``_tokens``: typed token batches
- ``_comm``: what an adapter offers; ``_mpi`` (``MpiComm``), ``_torch`` (``TorchComm``): adapters that import their library when
  one is made
- ``testing``: a communicator of threads that records every rank's operations, and a check of communicators
"""

from comm_broadcast.__about__ import __version__
from comm_broadcast._broadcaster import Broadcaster, BroadcastStatistics
from comm_broadcast._codec import BytesCodec, Codec, PickleCodec
from comm_broadcast._comm import Comm
from comm_broadcast._config import BroadcastConfig
from comm_broadcast._errors import (
    BroadcastConfigError,
    BroadcastError,
    BroadcastTimeoutError,
    CallMismatchError,
    ClosedError,
    CommBroadcastError,
    LocalProtocolError,
    MissingLibraryError,
    RankFailure,
    RemoteProtocolError,
    TransportError,
)
from comm_broadcast._handle import Handle
from comm_broadcast._mpi import MpiComm
from comm_broadcast._tokens import TokenBatchCodec
from comm_broadcast._torch import TorchComm

__all__ = [
    "BroadcastConfig",
    "BroadcastConfigError",
    "BroadcastError",
    "BroadcastStatistics",
    "BroadcastTimeoutError",
    "Broadcaster",
    "BytesCodec",
    "CallMismatchError",
    "ClosedError",
    "Codec",
    "Comm",
    "CommBroadcastError",
    "Handle",
    "LocalProtocolError",
    "MissingLibraryError",
    "MpiComm",
    "PickleCodec",
    "RankFailure",
    "RemoteProtocolError",
    "TokenBatchCodec",
    "TorchComm",
    "TransportError",
    "__version__",
]
