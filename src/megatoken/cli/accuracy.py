"""``megatoken accuracy`` and ``megatoken verify``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.flags import flag, place
from megatoken.cli.output import Json, Out, counted, deliver, print_result
from megatoken.errors import ConfigError, ExitCode, UsageError

if TYPE_CHECKING:
    from megatoken.accuracy.judge import Judged


def accuracy(
    path: Annotated[
        Path, place("PATH", "Run folder, LoadGen accuracy log or its folder; with --against a checkpoint.")
    ],
    references: Annotated[
        Path | None, flag("FILE", "Data set with the expected answers. Default: the prompts of the run.")
    ] = None,
    model: Annotated[
        str | None, flag("DIR", "Model that answered, for its tokenizer. Default: the model of the run.")
    ] = None,
    benchmark: Annotated[
        str | None, flag("NAME", "Compare with the targets of an MLPerf benchmark, for example llama2-70b-99.9.")
    ] = None,
    baseline: Annotated[
        Path | None, flag("PATH", "Compare with another evaluation: its accuracy.json or run folder.")
    ] = None,
    share: Annotated[
        float, flag("SHARE", "Share of each metric of --baseline that must be reached.", min=0.0, max=1.0)
    ] = 0.99,
    partial: Annotated[
        bool, typer.Option("--partial", help="Score the answered rows if some rows have no answer.")
    ] = False,
    against: Annotated[
        str | None, flag("DIR", "Compare the checkpoint PATH with this one, which it was made from; or reference.")
    ] = None,
    samples: Annotated[int | None, flag("N", "With --against: use only the first N prompts.", min=1)] = None,
    precision: Annotated[str, flag("fp32|bf16|fp8", "With --against: precision in which both run.")] = "bf16",
    out: Out = None,
    json_only: Json = False,
) -> int:
    """Score answers, or compare a checkpoint with its original.

    A run is scored by the metrics of MLPerf; accuracy.txt and accuracy.json are written into its folder.
    """
    if against is not None:
        if benchmark is not None or baseline is not None or model is not None or partial:
            raise UsageError(
                "--against: compares checkpoints; leave out --model, --benchmark, --baseline and --partial"
            )
        return _compare(path, against, references, samples, precision, share, out, json_only=json_only)
    if samples is not None or out is not None:
        raise UsageError("--samples and --out: are for --against; the result of a run goes into its folder")
    from megatoken.accuracy.judge import judge
    from megatoken.engine.config import model_folder

    with counted("scoring answers") as progress:
        judged = judge(
            path,
            references=references,
            model=None if model is None else model_folder(model),
            benchmark=benchmark,
            baseline=baseline,
            share=share,
            partial=partial,
            progress=progress,
        )
    kept = f"the result is in {judged.folder}"
    print_result(judged.document, lambda: _show(judged), json_only=json_only, kept=kept)
    return judged.verdict.exit_code


def _compare(
    path: Path,
    against: str,
    references: Path | None,
    samples: int | None,
    precision: str,
    share: float,
    out: Path | None,
    *,
    json_only: bool,
) -> int:
    from megatoken.accuracy.against import compare
    from megatoken.engine.schemes import find_scheme
    from megatoken.runs.run import Verdict

    try:
        scheme = find_scheme(precision)
    except ConfigError as error:
        raise UsageError(f"--precision {precision}: {error}") from None
    with counted("answers and texts") as progress:
        document = compare(
            str(path),
            against,
            references=references,
            samples=samples,
            precision=scheme.precision,
            share=share,
            progress=progress,
        )
    deliver(document, json_only=json_only, out=out, full=True)
    return Verdict(document["verdict"]).exit_code


def _show(judged: Judged) -> None:
    from megatoken.report.blocks import Column, Table
    from megatoken.report.console import show_table

    document = judged.document
    names = list(document["metrics"])
    groups = {"all": document["metrics"], **document["by_task"]}
    rows = [(group, *(_cell(metrics.get(name)) for name in names)) for group, metrics in groups.items()]
    columns = (Column("Answers"), *(Column(name, numeric=True) for name in names))
    show_table(Table("", columns, tuple(rows), note="value ± standard error"))
    print(f"Tokens per sample: {document['tokens_per_sample']:,}")
    if document["gen_len"] is not None:
        print(f"Characters (gen_len): {document['gen_len']:,}")
    meaning = {
        "VALID": "all targets reached",
        "INVALID": "some targets missed",
        "MEASURED": "no targets given; give them with --benchmark or --baseline",
    }
    targets = document["targets"]
    print(f"{judged.verdict}: {meaning[judged.verdict]}" + (f" ({targets['source']})" if targets else ""))
    for reason in document["reasons"]:
        print(f"  {reason['code']} {reason['message']}")
    for note in document["notes"]:
        print(f"Note: {note['message']}")
    print(f"Written: {judged.folder}/accuracy.txt, accuracy.json")


def _cell(metric: dict[str, float] | None) -> str:
    if metric is None:
        return "-"
    error = metric["standard_error"]  # not defined for one answer
    return f"{metric['value']:.4f} ± {'-' if math.isnan(error) else f'{error:.2f}'}"


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
