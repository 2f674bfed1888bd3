"""The one place where this distribution's version stands."""

__version__ = "0.1.0"
