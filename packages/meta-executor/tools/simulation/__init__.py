"""What ``simulate_service.py`` puts a whole service into.

Layout (each imports only what stands above it)::

    clock      an event loop whose time jumps to the next timer
    engine     a step has run when it is launched, and ends at its time
    instance   one lifetime of an instance: its ranks, its service, its end
    wires      the front's way to an instance
    site       one seed's shape, chance, links and fabric, and the instances at their addresses
"""

from __future__ import annotations


class Violation(Exception):
    """Something does not hold."""
