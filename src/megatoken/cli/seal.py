"""``megatoken seal``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megatoken.cli.flags import flag, place
from megatoken.cli.streams import standard_output
from megatoken.errors import ExitCode
from megatoken.text import count_of


def seal(
    path: Annotated[Path, place("RUN", "Run folder.")],
    key: Annotated[Path | None, flag("FILE.pem", "Sign with this ed25519 private key.")] = None,
) -> int:
    """Seal a run folder. Writes the hash of every file; megatoken audit then names each that changed."""
    from megatoken.runs.seal import SEAL
    from megatoken.runs.seal import seal as sealed

    document = sealed(path, key)
    with standard_output(f"the seal is {path / SEAL}"):
        by = f", signed by {document['public_key']}" if "public_key" in document else ", not signed"
        print(f"Sealed {count_of(len(document['files']), 'file')}{by}: {path / SEAL}")
    return ExitCode.OK
