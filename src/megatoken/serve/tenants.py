"""Who may ask: API keys, the tenant that each stands for, and its share and limits."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megatoken.errors import ConfigError, UsageError
from megatoken.yaml_files import SECRET, Strict, read_strict

KEY_VARIABLE = "MEGATOKEN_API_KEY"
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Tenant:
    """One user of the server, as scheduling and metrics see it. None: no limit.

    ``weight``: share of the tokens while several tenants have work queued. ``max_running``: requests in the engine at
    once. ``max_queued``: requests waiting for the engine.
    """

    name: str
    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


DEFAULT_TENANT = Tenant("default")


def _secret(value: object) -> object:
    if not isinstance(value, str) or not value.strip():
        raise PydanticCustomError(SECRET, "must be text that is not empty; put it in quotes")
    return value


class _KeyEntry(Strict):
    name: str = Field(min_length=1, max_length=LONGEST_NAME, pattern=r"^[A-Za-z0-9._-]+$")
    key: Annotated[str, BeforeValidator(_secret)]
    weight: float = Field(default=1.0, gt=0, le=1e6)
    max_running: int | None = Field(default=None, ge=1)
    max_queued: int | None = Field(default=None, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class _KeyFile(Strict):
    keys: tuple[_KeyEntry, ...] = Field(min_length=1, strict=False)


@dataclass(frozen=True, slots=True)
class Keys:
    """Digests of all keys with their tenants. Without keys every client is the default tenant."""

    entries: tuple[tuple[bytes, Tenant], ...] = ()

    def tenant_of(self, authorization: str | None) -> Tenant | None:
        """The tenant of an ``Authorization: Bearer`` header; None if the key is missing or unknown.

        Looks at every key and compares in constant time, so that timing says nothing about any of them.
        """
        if not self.entries:
            return DEFAULT_TENANT
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip()) if scheme.lower() == "bearer" else b""
        found = None
        for known, tenant in self.entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def load_keys(api_keys: Sequence[str], file: Path | None) -> Keys:
    """The keys given as flags, else in ``MEGATOKEN_API_KEY`` (several with commas), and those of a file.

    The file is YAML: ``keys``, a list of entries with ``name``, ``key`` and, if wanted, ``weight``, ``max_running``,
    ``max_queued``, ``requests_per_minute``, ``tokens_per_minute``.

    Raises:
        ConfigError: the file cannot be used, or two entries have the same key or name.
        UsageError: a key is empty, or not ASCII.
    """
    variable = os.environ.get(KEY_VARIABLE)
    given = list(api_keys) or ([] if variable is None else [key.strip() for key in variable.split(",")])
    if not all(key.strip() for key in given):
        raise UsageError(f"an API key is empty; give a key, or leave --api-key and {KEY_VARIABLE} out")
    if not all(key.isascii() for key in given):
        raise UsageError("an API key has letters beyond ASCII, which clients send in different ways; give one of ASCII")
    entries = [(_digest(key), Tenant("default" if at == 0 else f"key-{at + 1}")) for at, key in enumerate(given)]
    if file is not None:
        for number, one in enumerate(read_strict(file, _KeyFile).keys):
            if not one.key.isascii():
                raise ConfigError(f"{file}: keys.{number}.key has letters beyond ASCII; give one of ASCII")
            limits = one.model_dump(exclude={"key"})
            entries.append((_digest(one.key), Tenant(**limits)))
    for what, values in (("name", [tenant.name for _, tenant in entries]), ("key", [key for key, _ in entries])):
        if len(set(values)) < len(values):
            where = file if file is not None else "--api-key"
            raise ConfigError(f"{where}: two keys have the same {what}; make each {what} unique")
    return Keys(tuple(entries))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
