"""``megatoken verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from megatoken.cli.flags import flag, place
from megatoken.cli.output import Json, print_result
from megatoken.errors import ExitCode, UsageError


def verify(
    test: Annotated[str, place("TEST06|TEST07|TEST09", "Compliance test.")],
    path: Annotated[Path, place("PATH", "Run folder, or LoadGen accuracy log, or the folder of that log.")],
    model: Annotated[
        str | None, flag("DIR", "TEST06: model that answered, for its end tokens. Default: the model of the run.")
    ] = None,
    end_tokens: Annotated[str | None, flag("ID,...", "TEST06: end token ids, instead of --model.")] = None,
    json_only: Json = False,
) -> int:
    """Verify a compliance-test log. Writes the file that a submission needs."""
    from megatoken.accuracy.verify import verify as verified
    from megatoken.mlperf.compliance import DOCUMENT, TESTS

    if test not in TESTS:
        raise UsageError(f"{test}: unknown compliance test; give {', '.join(TESTS)}")

    result, file = verified(test, path, model=model, end_tokens=end_tokens)

    def show() -> None:
        print(*result.lines, sep="\n")
        print(f"Additional checks: {'passed' if result.sound else 'failed'}")
        for finding in result.findings:
            print(f"  {finding['message']}")
        print(f"Written: {file}, {DOCUMENT}")

    document = result.to_document() | {"file": str(file)}
    print_result(document, show, json_only=json_only, kept=f"the result is in {file}")
    return ExitCode.OK if result.passed and result.sound else ExitCode.INVALID
