"""Receiver-owned plans and sessions for KV cache transfer."""

from kv_bounce_planner.__about__ import __version__

__all__ = ["__version__"]
