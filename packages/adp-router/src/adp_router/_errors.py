"""The error tree."""

from __future__ import annotations


class RouterError(Exception):
    """Base of everything that this package raises."""


class RouterConfigError(RouterError, ValueError):
    """A setting cannot be used; the message names the field and the value."""


class RankStateError(RouterError, ValueError):
    """The ranks' states cannot be routed over (none, a rank twice, a negative count). Nothing was routed, no state changed."""
