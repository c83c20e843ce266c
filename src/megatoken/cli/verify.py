"""``megatoken verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.output import Json
from megatoken.cli.streams import standard_output
from megatoken.errors import ExitCode, UsageError


def verify(
    test: Annotated[str, typer.Argument(metavar="TEST06|TEST07|TEST09")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Run folder, or LoadGen's accuracy log or its folder.")],
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="TEST06: model that answered, for its end tokens.")
    ] = None,
    end_tokens: Annotated[
        str | None, typer.Option(metavar="ID,...", help="TEST06: end token ids, in place of a model.")
    ] = None,
    json_only: Json = False,
) -> int:
    """Hold the log of a compliance test against the rules. And more; writes the file that a submission needs."""
    from megatoken.accuracy.verify import verify as verified
    from megatoken.mlperf.compliance import DOCUMENT, TESTS

    if test not in TESTS:
        raise UsageError(f"{test}: no compliance test that is known here; there are {', '.join(TESTS)}")

    result, file = verified(test, path, model=model, end_tokens=end_tokens)
    with standard_output(f"the result is in {file}"):
        if json_only:
            print(json.dumps(result.to_document() | {"file": str(file)}, indent=2))
        else:
            print(*result.lines, sep="\n")
            print(f"Our own check: {'passed' if result.sound else 'failed'}")
            for finding in result.findings:
                print(f"  {finding}")
            print(f"Written: {file}, {DOCUMENT}")
    return ExitCode.OK if result.passed and result.sound else ExitCode.INVALID
