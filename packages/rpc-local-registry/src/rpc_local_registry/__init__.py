"""RPC over ZeroMQ with an in-process fast path.

Layout: ``_hooks``, ``_errors`` and ``_config`` are leaves; ``_mac``, ``_wire`` (frames), ``_session`` (handshake) and
``_tickets`` (who may connect) are pure protocol; ``_codec`` and ``_methods`` turn bytes into typed arguments of allow-listed
methods; ``_streams`` and ``_registry`` are the in-process parts; ``_engine`` (client's I/O thread), ``_core`` (a client's two
paths and one state), ``_calls``, ``_consumers`` (streams), ``_typed``, ``_client``, ``_lanes`` and ``_server`` run them.
``_zmq``, ``_numpy``, ``_cryptography`` and ``_nvtx`` each import the library they are named after. ``testing`` is public.
"""

from rpc_local_registry.__about__ import __version__
from rpc_local_registry._calls import Call, StreamCall
from rpc_local_registry._client import ClientStatistics, RpcClient, TypedClient
from rpc_local_registry._config import RpcConfig, new_key
from rpc_local_registry._consumers import RpcStream
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
    RpcUsageError,
)
from rpc_local_registry._methods import rpc_method
from rpc_local_registry._numpy import Loan
from rpc_local_registry._registry import get_local_worker, register_local_worker, unregister_local_worker
from rpc_local_registry._server import PeerInfo, RpcServer, ServerStatistics
from rpc_local_registry._streams import StreamSource
from rpc_local_registry._typed import RemoteMethod, RemoteStreamMethod, remote_method, remote_stream

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
    "TypedClient",
    "remote_method",
    "remote_stream",
    "RemoteMethod",
    "RemoteStreamMethod",
    "Call",
    "StreamCall",
    "RpcStream",
    "ClientStatistics",
    "Loan",
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
    "RpcUsageError",
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
