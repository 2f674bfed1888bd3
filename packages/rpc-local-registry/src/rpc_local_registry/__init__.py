"""RPC over ZeroMQ with an in-process fast path.

Layout: ``_errors`` and ``_config`` are leaves; ``_wire`` (frames) and ``_session`` (handshake) are pure protocol;
``_codec`` and ``_methods`` turn bytes into typed arguments of allow-listed methods; ``_streams`` and ``_registry`` are
the in-process parts; ``_engine`` (client's I/O thread), ``_client``, ``_lanes`` and ``_server`` run them. ``_zmq``,
``_numpy`` and ``_nvtx`` each import the library they are named after. ``testing`` is public.
"""

from rpc_local_registry.__about__ import __version__
from rpc_local_registry._client import Call, ClientStatistics, RpcClient, RpcStream
from rpc_local_registry._config import RpcConfig, new_key
from rpc_local_registry._errors import (
    RpcAddressError,
    RpcAddressInUse,
    RpcArgumentError,
    RpcAuthenticationError,
    RpcBackpressure,
    RpcCancelled,
    RpcClosed,
    RpcConfigError,
    RpcConnectionError,
    RpcEncodeError,
    RpcError,
    RpcMethodNotFound,
    RpcPeerDead,
    RpcProtocolError,
    RpcProtocolMismatch,
    RpcRemoteError,
    RpcServerStopped,
    RpcStreamingError,
    RpcTimeout,
    RpcUnreachable,
)
from rpc_local_registry._methods import rpc_method
from rpc_local_registry._registry import get_local_worker, register_local_worker, unregister_local_worker
from rpc_local_registry._server import PeerInfo, RpcServer, ServerStatistics
from rpc_local_registry._streams import StreamSource

__all__ = [
    # settings
    "RpcConfig",
    "new_key",
    # the worker's side
    "rpc_method",
    "StreamSource",
    "RpcServer",
    "ServerStatistics",
    "PeerInfo",
    # the caller's side
    "RpcClient",
    "Call",
    "RpcStream",
    "ClientStatistics",
    # workers of this process
    "register_local_worker",
    "unregister_local_worker",
    "get_local_worker",
    # errors
    "RpcError",
    "RpcConfigError",
    "RpcAddressError",
    "RpcAddressInUse",
    "RpcMethodNotFound",
    "RpcArgumentError",
    "RpcEncodeError",
    "RpcStreamingError",
    "RpcRemoteError",
    "RpcTimeout",
    "RpcCancelled",
    "RpcBackpressure",
    "RpcConnectionError",
    "RpcUnreachable",
    "RpcAuthenticationError",
    "RpcProtocolMismatch",
    "RpcPeerDead",
    "RpcServerStopped",
    "RpcClosed",
    "RpcProtocolError",
    "__version__",
]
