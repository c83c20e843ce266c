"""Documents of results, as all commands that make one print and save them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from megatoken.cli.streams import standard_output

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that receives the document and its page.")]


def deliver(document: Mapping[str, Any], *, json_only: bool, out: Path | None) -> None:
    """Saves a document and its page in ``out``, where given, and prints it."""
    from megatoken.report import save_document, show
    from megatoken.results.files import plain

    saved = save_document(document, out) if out is not None else ()
    with standard_output(f"the result is in {out}" if saved else ""):
        if json_only:
            print(json.dumps(plain(document), indent=2, allow_nan=False))
        else:
            show(document)
            for path in saved:
                print(f"Saved: {path}")
