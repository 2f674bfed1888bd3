"""Who may publish an endpoint, and who may use it."""

from endpoint_lifecycle.__about__ import __version__

__all__ = ["__version__"]
