"""RPC over ZeroMQ with an in-process fast path."""

from rpc_local_registry.__about__ import __version__

__all__ = ["__version__"]
