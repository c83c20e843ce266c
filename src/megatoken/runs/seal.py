"""The seal of a run folder: SHA-256 of every file in it, signed by a key file if one is given."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError, how_to_install
from megatoken.files import to_json, write_text
from megatoken.runs.run import read_run
from megatoken.text import utc_now

SEAL = "seal.json"
SCHEMA_VERSION = 1
ALGORITHM = "ed25519"
MOST_NAMED = 20  # files in a message
_PRIMITIVES = "cryptography.hazmat.primitives"  # imported where it is used, because it is an extra


@dataclass(frozen=True, slots=True)
class SealState:
    """What became of a sealed folder: names of files that are not as they were sealed.

    ``signature`` is None of a seal without one, else whether it is that of ``public_key``; ``unchecked`` says why there
    was nothing to check, or nothing to check it with.
    """

    sealed_at: str
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    public_key: str | None
    signature: bool | None
    unchecked: str = ""

    @property
    def whole(self) -> bool:
        """Whether every sealed file is as it was, and a signature, if any, is right; files may have been added."""
        return not (self.changed or self.removed) and self.signature is not False

    @property
    def kept(self) -> str:
        """Of a folder that is whole: since when, and which files the seal does not cover."""
        found = f"no sealed file changed since {self.sealed_at}"
        return f"{found}; added later, so not sealed: {named(self.added)}" if self.added else found

    @property
    def problems(self) -> str:
        """What differs from the seal, in one line; empty if nothing does."""
        groups = {"changed": self.changed, "added": self.added, "removed": self.removed}
        texts = [f"{what}: {named(names)}" for what, names in groups.items() if names]
        if self.signature is False:
            texts.insert(0, self.unchecked or "the signature is not that of the statement and key in the seal")
        return "; ".join(texts)


def named(files: tuple[str, ...]) -> str:
    """The first of the files, and how many more there are."""
    more = len(files) - MOST_NAMED
    return ", ".join(files[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def seal(folder: Path, key: Path | None = None) -> dict[str, Any]:
    """Write ``seal.json`` into a run folder, in place of an earlier one; returns what it holds.

    Args:
        folder: a run folder.
        key: PEM file of an ed25519 private key without a password; None: no signature.

    Raises:
        UsageError: it is no whole run folder, it has a seal that is signed or that the files no longer match, the key
            cannot be used, or the package for signatures is missing.
        StorageError: the folder cannot be written.
    """
    read_run(folder)
    _refuse_second(folder)
    statement = {"schema_version": SCHEMA_VERSION, "sealed_at": utc_now(), "files": file_hashes_in(folder)}
    document = statement if key is None else {**statement, **_signed(statement, key)}
    write_text(folder / SEAL, to_json(document), movable=False)
    return document


def _refuse_second(folder: Path) -> None:
    """Refuse a seal in place of one that says more: who signed it, or which files have changed since."""
    try:
        state = seal_state(folder)
    except ValueError:
        state = None  # it says nothing
    if state is None:
        return
    if state.public_key is not None:
        why = f"it is sealed and signed by {state.public_key}"
    elif changed := (*state.changed, *state.removed):
        why = f"it was sealed, and has changed since: {named(changed)}"
    else:
        return
    raise UsageError(f"{folder}: {why}; remove {SEAL} to seal it as it is now")


def sealed_folder(place: Path) -> Path | None:
    """The sealed folder that a file or folder lies in, or is; None if there is none."""
    there = place.resolve()
    return next((folder for folder in (there, *there.parents) if _has_seal(folder)), None)


def _has_seal(folder: Path) -> bool:
    """Whether it has a seal of ours, and not a file of another program by that name."""
    try:
        document = json.loads((folder / SEAL).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and isinstance(document.get("files"), dict) and "sealed_at" in document


def refuse_sealed(place: Path, *, movable: bool = True) -> None:
    """Refuse to write into a sealed folder. Raises UsageError; ``movable``: the command has a flag ``--out``."""
    if folder := sealed_folder(place):
        how = " with --out" if movable else ""
        raise UsageError(f"{place}: a new file breaks the seal of {folder}; name another place{how}")


def seal_state(folder: Path) -> SealState | None:
    """Compare a folder with its seal; None where it has none. Raises ValueError: the seal cannot be read."""
    if not (folder / SEAL).is_file():
        return None
    document = json.loads((folder / SEAL).read_bytes())
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise ValueError("not a seal")  # noqa: TRY004 - damaged content, not a wrong argument
    there, sealed = file_hashes_in(folder), document["files"]
    signature, unchecked = _verified(document)
    return SealState(
        sealed_at=str(document.get("sealed_at")),
        changed=tuple(sorted(name for name in sealed.keys() & there.keys() if sealed[name] != there[name])),
        added=tuple(sorted(there.keys() - sealed.keys())),
        removed=tuple(sorted(sealed.keys() - there.keys())),
        public_key=document.get("public_key"),
        signature=signature,
        unchecked=unchecked,
    )


def file_hashes_in(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the seal by its path below ``folder``; of a link, of where it leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = hashlib.sha256(b"link " + os.fsencode(os.readlink(path))).hexdigest()  # noqa: PTH115 - as bytes
        elif path.is_file() and name != SEAL:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _message(document: Mapping[str, Any]) -> bytes:
    """What is signed: the statement as JSON with sorted keys and without spaces."""
    statement = {name: document.get(name) for name in ("schema_version", "sealed_at", "files")}
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def _signed(statement: Mapping[str, Any], key: Path) -> dict[str, str]:
    try:
        unsupported = import_module("cryptography.exceptions").UnsupportedAlgorithm
        kind = import_module(f"{_PRIMITIVES}.asymmetric.ed25519").Ed25519PrivateKey
        load_pem_private_key = import_module(f"{_PRIMITIVES}.serialization").load_pem_private_key
    except ImportError:
        raise UsageError(f"--key needs the package cryptography; {how_to_install('seal')}") from None
    new = "new-key.pem" if key.exists() else key  # openssl would write over what is there
    how = f"make one: openssl genpkey -algorithm {ALGORITHM} -out {new}"
    try:
        private = load_pem_private_key(key.read_bytes(), password=None)
    except OSError as error:
        raise UsageError(f"{key}: cannot be read ({error.strerror}); {how}") from None
    except (ValueError, TypeError, unsupported):
        raise UsageError(f"{key}: not a PEM file of a private key without a password; {how}") from None
    if not isinstance(private, kind):
        raise UsageError(f"{key}: not an {ALGORITHM} key; {how}")
    return {
        "algorithm": ALGORITHM,
        "public_key": private.public_key().public_bytes_raw().hex(),
        "signature": private.sign(_message(statement)).hex(),
    }


def _verified(document: Mapping[str, Any]) -> tuple[bool | None, str]:
    if "signature" not in document:
        keyed = "public_key" in document or "algorithm" in document
        return (False, "the seal names a key, and its signature is missing") if keyed else (None, "")
    try:
        invalid = import_module("cryptography.exceptions").InvalidSignature
        kind = import_module(f"{_PRIMITIVES}.asymmetric.ed25519").Ed25519PublicKey
    except ImportError:
        return None, f"the package cryptography is missing; {how_to_install('seal')}"
    try:
        public = kind.from_public_bytes(bytes.fromhex(str(document.get("public_key"))))
        public.verify(bytes.fromhex(str(document["signature"])), _message(document))
    except (invalid, ValueError):
        return False, ""
    return True, ""
