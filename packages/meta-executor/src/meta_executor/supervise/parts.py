"""The command lines that start the parts of one service on their hosts."""

from __future__ import annotations

import shlex
from pathlib import Path

from meta_executor.addresses import is_loopback_name, is_wildcard
from meta_executor.config import ConfigError, Role, ServiceConfig
from meta_executor.mpi_launcher import SETTING, USUAL_LAUNCHERS

_ROLES: tuple[Role, ...] = ("context", "generation")


def launch_lines(service: ServiceConfig, config: Path) -> list[str]:
    """What starts each part: for each MPI one line that may be typed on any host, and the line by which its ranks start there.

    Args:
        service: The configuration.
        config: Where it stands, on every host.

    Raises:
        ConfigError: Parts that are started apart of this configuration would not meet.
    """
    if service.key_file is None:
        raise ConfigError("key_file", "is wanted: parts that are started apart have one key")
    lines: list[str] = []
    for role in _ROLES:
        section = service.instance(role)
        if section.urls:
            continue
        if service.discovery.store is None:
            raise ConfigError(
                f"{role}_servers.urls", "want the addresses at which its front finds it, or discovery.store"
            )
        host = _host(section.hostname, section.advertised_host)
        instances = "" if section.num_instances == 1 else f"{section.num_instances} instances of "
        lines += _part(f"{role}: {instances}{section.world_size} ranks", host, ["serve", role, str(config)])
        ranks = (f"{shlex.join(each.command(section.world_size, []))} ({each.flavour})" for each in USUAL_LAUNCHERS)
        lines.append(f"# there it starts its ranks by what is found or {SETTING} names: {', '.join(ranks)}")
    lines += _part("front", _host(service.hostname, None), ["front", str(config)])
    return lines


def _part(what: str, host: str, words: list[str]) -> list[str]:
    lines = [f"# {what}, on {host}: one of these"]
    for launcher in USUAL_LAUNCHERS:
        lines.append(f"{shlex.join(launcher.command_on(host, ['meta-executor', *words]))}  # {launcher.flavour}")
    return lines


def _host(hostname: str, advertised_host: str | None) -> str:
    """By which name a launcher reaches it."""
    if advertised_host:
        return advertised_host
    return "localhost" if is_loopback_name(hostname) or is_wildcard(hostname) else hostname
