"""The parts of a saved audit that a dossier reads, checked before they are used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatoken.errors import UsageError
from megatoken.files import UnreadableError, plain, read_text

FILE = "audit.json"
HASH = "content_sha256"
NO_HASH = f"states no {HASH}, so an edit of it cannot be noticed; audit again"
LARGEST_BYTES = 64 * 2**20
HOW = "make one: megatoken audit PATH --claims CLAIMS.yaml --out DIR"


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Place(_Part):
    file: str
    line: int | None = None


class _Claim(_Part):
    text: str
    answer: str
    why: str
    evidence_that_would_settle: list[str] = []
    where: list[_Place] = []


class _Finding(_Part):
    severity: str
    title: str
    expected: str
    found: str
    where: list[_Place] = []


class _Node(_Part):
    samples: int | None = None


class _Makespan(_Part):
    seconds: float | None = None
    output_tokens_per_second: float | None = None


class _Aggregate(_Part):
    nodes: list[_Node] = []
    makespan: _Makespan | None = None


class _Artefact(_Part):
    path: str | None = None
    node: str | None = None


class _System(_Part):
    accelerator_model_name: str | None = None


class _Audit(_Part):
    kind: Literal["audit"]
    schema_version: Literal[1]
    title: str
    artefact_kind: str
    inputs: list[str] = Field(min_length=1)
    notes: list[str]
    counts: dict[str, int]
    findings: list[_Finding]
    claims: list[_Claim] = []
    systems: list[_System] = []
    artefacts: list[_Artefact] = []
    aggregate: _Aggregate | None = None


def with_hash(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document with ``content_sha256``: SHA-256 over its other fields as JSON with sorted keys and without spaces."""
    content = {name: value for name, value in plain(document).items() if name != HASH}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, HASH: hashlib.sha256(text.encode()).hexdigest()}


def audit_file(path: Path) -> Path:
    """``path``, or the saved audit in it where it is a folder."""
    return path / FILE if path.is_dir() else path


def read_audit(path: Path) -> dict[str, Any]:
    """``audit.json`` of ``megatoken audit --out``, or the folder that it is in.

    Raises:
        UsageError: the file cannot be read, is no audit, or was edited; the message names the key.
    """
    file = audit_file(path)
    try:
        text = read_text(file, LARGEST_BYTES)[0]
        audit = _Audit.model_validate_json(text)
    except UnreadableError as error:
        raise UsageError(f"{file}: no saved audit: {error}; {HOW}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{file}: no saved audit ({where or 'the file'}: {first['msg']}); {HOW}") from None
    document = json.loads(text)
    if HASH not in document:  # older versions wrote none
        return {**audit.model_dump(), "notes": [*audit.notes, NO_HASH]}
    refuse_edited(document, file)
    return audit.model_dump()


def refuse_edited(document: Mapping[str, Any], file: Path) -> None:
    """Refuse a document whose content does not give the hash that it states, if it states one. Raises UsageError."""
    if HASH in document and document != with_hash(document):
        raise UsageError(f"{file}: edited after the audit: its content does not give its {HASH}; {HOW}")
