"""Non-blocking agreement of pipeline ranks on request transitions."""

from pp_agreement.__about__ import __version__

__all__ = ["__version__"]
