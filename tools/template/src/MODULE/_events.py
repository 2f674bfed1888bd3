"""Inputs and effects of the core."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Added:
    """``count`` items arrived (count, >= 1)."""

    count: int


@dataclass(frozen=True)
class ReportCount:
    """Tell whoever listens that ``total`` items are there now (count)."""

    total: int
