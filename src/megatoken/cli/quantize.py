"""``megatoken quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from megatoken.cli.flags import flag, place
from megatoken.cli.output import Json, counted, print_result
from megatoken.errors import UsageError

if TYPE_CHECKING:
    from megatoken.quantization.write import Quantized


def quantize(
    model: Annotated[str, place("DIR", "Checkpoint in bf16, fp16 or fp32, or reference.")],
    to: Annotated[str, flag("FORMAT", "Number format of the layers' linears: nvfp4, mxfp4, fp8 or int4.")],
    out: Annotated[Path, flag("DIR", "New folder for the quantized checkpoint.")],
    json_only: Json = False,
) -> int:
    """Write a checkpoint in fewer bits, for this engine and others. Uses the layouts of compressed-tensors."""
    from megatoken.engine.config import model_folder
    from megatoken.quantization.write import FORMATS
    from megatoken.quantization.write import quantize as write
    from megatoken.runs.seal import refuse_sealed

    form = next((known for known in FORMATS if known == to), None)
    if form is None:
        raise UsageError(f"--to {to}: take one of {', '.join(FORMATS)}")
    refuse_sealed(out)
    with counted("linears") as progress:
        done = write(model_folder(model), form, out, progress=progress)
    print_result(_document(done), lambda: _show(done), json_only=json_only, kept=f"the checkpoint is in {out}")
    return 0


def _document(done: Quantized) -> dict[str, Any]:
    return {
        "kind": "quantize",
        "directory": done.directory,
        "format": done.form,
        "block": done.block,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
        "relative_rms_errors": done.relative_errors,
    }


def _show(done: Quantized) -> None:
    from megatoken.report.blocks import Column, Table
    from megatoken.report.console import show_table

    parts: dict[str, list[float]] = {}
    for name, error in done.relative_errors.items():
        parts.setdefault(name.removesuffix(".weight").rpartition(".")[2], []).append(error)
    rows = [
        (part, str(len(errors)), f"{100 * sum(errors) / len(errors):.2f} %", f"{100 * max(errors):.2f} %")
        for part, errors in sorted(parts.items())
    ]
    columns = (Column("Linears"), *(Column(name, numeric=True) for name in ("count", "mean error", "largest error")))
    show_table(Table("", columns, tuple(rows), note="root mean square of the error, of that of the weight"))
    print(f"{done.bytes_before / 1e6:,.1f} MB became {done.bytes_after / 1e6:,.1f} MB")
    print(f"Saved: {done.directory}")
