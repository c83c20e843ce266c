"""Where a server is, and plain requests to it before and after a measurement."""

from __future__ import annotations

import http.client
import json
import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatoken.addresses import is_loopback
from megatoken.errors import MegatokenError, UsageError
from megatoken.targets.endpoint.bodies import PATHS
from megatoken.text import printable

MOST_BYTES = 16 << 20  # of an answer to a plain request
SHOWN_CHARACTERS = 200  # of a server's message
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"}  # of a server, by OpenSSL's versions
_NO_API = (200, 400, 404, 405, 410, 501)  # statuses with which a server of web pages says that a route is not its own
_PAGE = re.compile(rb"\s*<(!doctype html|html)\b", re.IGNORECASE)
ROUTES = (*PATHS.values(), "/models", "/metrics")
"""Ends of addresses that users copy from a client."""
FORM = "give an address such as http://host:8000/v1"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an API. ``path`` has no slash at its end; ``root`` is it without the ``/v1``."""

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Reads a URL. Raises UsageError, which does not repeat a password."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--endpoint {url.rpartition('@')[2]}: {error}; {FORM}") from None
        if "@" in parts.netloc:
            raise UsageError("--endpoint: an address with a user or a password is not supported; give --api-key-file")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"--endpoint {url}: not the address of an API; {FORM}")
        path = parts.path.rstrip("/")
        if route := next((one for one in ROUTES if path.endswith(one)), None):
            base = f"{parts.scheme}://{parts.netloc}{path.removesuffix(route)}"
            raise UsageError(f"--endpoint {url}: {route} is one route of the API; give the address before it, {base}")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), path or "/v1")

    @property
    def root(self) -> str:
        """Path of the server's own routes: metrics, version."""
        return self.path.removesuffix("/v1")

    @property
    def name(self) -> str:
        """Host and port: how results name the endpoint."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole address."""
        return f"http{'s' * self.secure}://{self.name}{self.path}"

    def taken(self, seconds: float) -> bool:
        """Whether a process of this machine accepts connections at this address, at most ``seconds`` from now."""
        try:
            with socket.create_connection((self.host, self.port), timeout=seconds) as one:
                own, other = one.getsockname()[0], one.getpeername()[0]
        except OSError:
            return False
        return own == other or is_loopback(other)


class AnswerError(MegatokenError):
    """A server gave another answer than was asked for."""

    def __init__(self, message: str, status: int | None = None, *, to_prompt: bool = False) -> None:
        """``status``: of the answer, None without one; ``to_prompt``: it did not answer a prompt."""
        super().__init__(message)
        self.status = status
        self._to_prompt = to_prompt

    def ends_command(self, advice: str = "") -> MegatokenError:
        """The error to end with: of the server if it failed, else of the address, key or model given.

        It failed with HTTP 5xx, or if it did not answer a prompt: before the first one, it has said what it serves.
        """
        failed = self.status is not None and self.status >= 500 and self.status not in _NO_API
        kind = MegatokenError if failed or self._to_prompt else UsageError
        return kind(f"--endpoint {self}{advice}")


def read_key(file: Path | None) -> str | None:
    """The API key in a file. Raises UsageError, without the key."""
    if file is None:
        return None
    try:
        key = file.read_text().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--api-key-file {file}: cannot be read ({why})") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(f"--api-key-file {file}: must hold one key, in printable ASCII characters without spaces")
    return key


def trust(secure: bool, ca_file: Path | None) -> ssl.SSLContext | None:
    """How the server's certificate is checked; None for plain HTTP. Raises UsageError."""
    if not secure:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"endpoint.ca_file {ca_file}: not a PEM file of certificates ({error.strerror})") from None


def ask(
    address: Address,
    path: str,
    *,
    key: str | None,
    tls: ssl.SSLContext | None,
    seconds: float,
    body: Mapping[str, Any] | None = None,
    setting: str = "",
) -> bytes:
    """One request, without following redirects; the body of the answer.

    Args:
        address: the server's.
        path: of the route.
        key: API key.
        tls: how its certificate is checked; None for plain HTTP.
        seconds: longest time without a byte.
        body: a prompt to post; None: GET.
        setting: that ``seconds`` is of, if a user can raise it.

    Raises:
        AnswerError: no connection, another status than 200, or a web page.
    """
    timeout = max(0.1, seconds)
    if tls is not None:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            address.host, address.port, timeout=timeout, context=tls
        )
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        content = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer = connection.getresponse()
        data = answer.read(MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        why = cause_of(error)
        if isinstance(error, TimeoutError):
            why = f"timed out after {timeout:g} s{f'; raise --{setting}' if setting else ''}"
        if body is not None:  # its address and scheme are right
            raise AnswerError(f"{address.url}: no answer to a prompt ({why})", to_prompt=True) from None
        raise AnswerError(f"{address.url}: no answer ({why}{_scheme_hint(error, tls)})") from None
    finally:
        connection.close()
    if answer.status in _NO_API and _PAGE.match(data):
        what = f"it answers {path} with HTTP {answer.status} and a web page"
        raise AnswerError(f"{address.url}: no OpenAI-compatible API: {what}; {FORM}", answer.status)
    if answer.status != 200:
        raise AnswerError(
            f"{address.url}: {status_error(answer.status, _lower(answer.headers), data, key)}", answer.status
        )
    return data


def _scheme_hint(error: OSError | http.client.HTTPException, tls: ssl.SSLContext | None) -> str:
    """The other scheme, where the server did what one does that wants it: it waited, or it closed the connection."""
    if tls is not None:
        return "; if it does not speak TLS, give http://" if isinstance(error, TimeoutError) else ""
    cut_off = isinstance(error, ConnectionResetError | http.client.BadStatusLine)
    return "; if it speaks TLS, give https://" if cut_off else ""


def cause_of(error: OSError | http.client.HTTPException) -> str:
    """Why a connection failed, in one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message.rstrip('.')}; give endpoint.ca_file"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return "it does not speak TLS; give http://"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: no server listens there; check host and port"  # asyncio's own words are of a call
    if isinstance(error, socket.gaierror):
        return f"{error.strerror}: check the host"
    why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(why.split())


def _lower(headers: http.client.HTTPMessage) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def status_error(status: int, headers: Mapping[str, str], body: bytes, key: str | None) -> str:
    """What a server says with a status that is not 200, in one line and without the key."""
    if 300 <= status < 400:
        return f"HTTP {status}: a redirect to {headers.get('location', 'another address')}, which is not followed"
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = "a web page" if _PAGE.match(body) else body.decode("utf-8", "replace")
    shown = printable(" ".join(str(text).split()))
    if key:
        shown = shown.replace(key, "***")
    hint = "; give the key that it expects with --api-key-file FILE" if status in (401, 403) else ""
    return f"HTTP {status}: {shown[:SHOWN_CHARACTERS] or 'no message'}{hint}"
