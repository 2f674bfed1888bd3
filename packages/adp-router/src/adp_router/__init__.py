"""Spread requests over attention-data-parallel ranks."""

from adp_router.__about__ import __version__

__all__ = ["__version__"]
