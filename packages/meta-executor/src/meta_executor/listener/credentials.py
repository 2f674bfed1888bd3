"""What the configuration says about who may come in, read from its files."""

from __future__ import annotations

import ssl

from meta_executor.config import ConfigError, FrontConfig
from meta_executor.listener.access import KeyFile, KeyFileError
from meta_executor.listener.tls import TlsError, server_context


def api_keys(front: FrontConfig) -> KeyFile | None:
    """Keys of clients and operators; None where none are asked for.

    Raises:
        ConfigError: The file cannot be used.
    """
    try:
        return None if front.api_keys_file is None else KeyFile(front.api_keys_file)
    except KeyFileError as error:
        raise ConfigError("front.api_keys_file", str(error)) from error


def credentials(front: FrontConfig) -> tuple[KeyFile | None, ssl.SSLContext | None]:
    """API keys and TLS of the front, None for what is not configured.

    Raises:
        ConfigError: One is configured and cannot be used.
    """
    keys = api_keys(front)
    if front.tls_certificate_file is None or front.tls_key_file is None:
        return keys, None
    try:
        return keys, server_context(front.tls_certificate_file, front.tls_key_file)
    except TlsError as error:
        raise ConfigError("front.tls_certificate_file", str(error)) from error
