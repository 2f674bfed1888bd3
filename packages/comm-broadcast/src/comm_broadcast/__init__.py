"""Object broadcast and gather over ranks that fail together."""

from comm_broadcast.__about__ import __version__

__all__ = ["__version__"]
