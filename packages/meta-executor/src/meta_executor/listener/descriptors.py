"""As many connections as the process may have descriptors: a bound that the system does not grant bounds nothing."""

from __future__ import annotations

import logging
import resource

import msgspec

from meta_executor.config import HttpConfig
from meta_executor.listener.bounds import lingering_max

_LOG = logging.getLogger("meta_executor.listener")
#: Descriptors that are for everything else: legs, streams, files, logs (count); of a small limit at most half.
_RESERVED = 256


def within_descriptors(config: HttpConfig, *, tls: bool = False) -> HttpConfig:
    """The bounds of a listener in this process: raises the process's limit of descriptors as far as they need and the system
    grants, and where that is not far enough lowers the bounds on connections and says so.

    Args:
        config: What is configured.
        tls: Handshakes take descriptors, too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _taken(config, tls) + _RESERVED
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if granted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    if granted >= wanted:
        return config
    fitting = fitted(config, granted, tls=tls)
    _LOG.warning(
        "http.connections_max: %d connections need %d descriptors, and this process may have %d (ulimit -n): %d are let in",
        config.connections_max, wanted, granted, fitting.connections_max,
    )  # fmt: skip
    return fitting


def fitted(config: HttpConfig, descriptors: int, *, tls: bool) -> HttpConfig:
    """Bounds on connections, lowered to so many descriptors."""
    free = descriptors - min(_RESERVED, descriptors // 2)
    # Of five descriptors one is for a connection that was refused and reads why.
    most = max(1, free // 2 if tls else free)
    most = min(config.connections_max, max(1, most * 4 // 5))
    return msgspec.structs.replace(
        config,
        connections_max=most,
        connections_per_client_max=min(config.connections_per_client_max, max(1, most // 2)),
    )


def _taken(config: HttpConfig, tls: bool) -> int:
    return config.connections_max * (2 if tls else 1) + lingering_max(config)
