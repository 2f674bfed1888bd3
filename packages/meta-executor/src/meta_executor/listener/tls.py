"""TLS: what a listener needs, and how a process of the same run reaches it."""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsError(Exception):
    """Certificate or key cannot be used. The message names the file."""


def server_context(certificate_file: str, key_file: str) -> ssl.SSLContext:
    """TLS 1.2 or newer with this certificate.

    Raises:
        TlsError: A file is not there or not PEM, or the key is not the certificate's.
    """
    for file in (certificate_file, key_file):
        try:
            with Path(file).open("rb"):
                pass
        except OSError as error:
            raise TlsError(f"{file}: {error.strerror}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a password would ask a terminal that is not there.
        context.load_cert_chain(certificate_file, key_file, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(f"{certificate_file} with {key_file}: {error}") from error
    return context


def pinned_context(certificate_file: str) -> ssl.SSLContext:
    """For a client of our own listener: it must show exactly this certificate, under whichever name it is reached.

    Raises:
        TlsError: The file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    # The certificate itself is what is trusted, also where another authority has signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate_file)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(f"{certificate_file}: {error}") from error
    return context
