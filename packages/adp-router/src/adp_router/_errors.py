"""The error tree."""

from __future__ import annotations


class RouterError(Exception):
    """Base of everything that this package raises."""


class RouterConfigError(RouterError, ValueError):
    """A setting cannot be used; the message names the field and the value."""


class RouteBatchError(RouterError, ValueError):
    """A batch cannot be routed as a whole: columns of unequal length, no sequence, a request that is held already.

    Nothing was routed, no state changed.
    """


class RankStateError(RouterError, ValueError):
    """The ranks' states cannot be routed over: none, a rank twice, no integer, a negative count.

    Nothing was routed, no state changed.
    """
