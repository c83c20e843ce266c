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
    test: Annotated[str, typer.Argument(metavar="TEST06|TEST07|TEST09", help="Compliance test.")],
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Run folder, or LoadGen accuracy log, or the folder of that log.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="TEST06: model that answered, for its end tokens. Default: the model of the run."
        ),
    ] = None,
    end_tokens: Annotated[
        str | None, typer.Option(metavar="ID,...", help="TEST06: end token ids, instead of --model.")
    ] = None,
    json_only: Json = False,
) -> int:
    """Verify a compliance-test log. Writes the file that a submission needs."""
    from megatoken.accuracy.verify import verify as verified
    from megatoken.mlperf.compliance import DOCUMENT, TESTS

    if test not in TESTS:
        raise UsageError(f"{test}: unknown compliance test; give {', '.join(TESTS)}")

    result, file = verified(test, path, model=model, end_tokens=end_tokens)
    with standard_output(f"the result is in {file}"):
        if json_only:
            print(json.dumps(result.to_document() | {"file": str(file)}, indent=2))
        else:
            print(*result.lines, sep="\n")
            print(f"Additional checks: {'passed' if result.sound else 'failed'}")
            for finding in result.findings:
                print(f"  {finding['message']}")
            print(f"Written: {file}, {DOCUMENT}")
    return ExitCode.OK if result.passed and result.sound else ExitCode.INVALID
