"""SUMMARY.

Layout:

- ``_events``: what comes in and what goes out
- ``_machine``: the core
- ``_errors``: the one error tree
"""

from MODULE.__about__ import __version__
from MODULE._errors import LocalProtocolError, PackageError
from MODULE._events import Added, ReportCount
from MODULE._machine import Counter, Statistics

__all__ = ["Added", "Counter", "LocalProtocolError", "PackageError", "ReportCount", "Statistics", "__version__"]
