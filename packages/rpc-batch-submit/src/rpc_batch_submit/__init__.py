"""Coalesce many submits into one call."""

from rpc_batch_submit.__about__ import __version__

__all__ = ["__version__"]
