"""Disaggregated LLM serving over MPI ranks with KV moved by NIXL."""

from meta_executor.__about__ import __version__

__all__ = ["__version__"]
