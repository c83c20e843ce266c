"""HTTPS: the server's certificate and its private key."""

from __future__ import annotations

import ssl
from pathlib import Path

from megatoken.errors import UsageError


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What HTTPS needs; None without files.

    Raises:
        UsageError: a file cannot be read, or the two do not belong together.
    """
    if certificate is None or key is None:
        return None
    for name, path in (("--tls-certificate", certificate), ("--tls-key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise UsageError(f"{name} {path}: cannot be read ({error.strerror}); give a PEM file") from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise UsageError(
            f"{certificate} and {key} are not a certificate chain and its private key, both as PEM files "
            f"({error.reason or error})"
        ) from error
    return context
