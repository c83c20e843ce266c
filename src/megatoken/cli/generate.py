"""``megatoken generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import FLAGS, Model
from megatoken.cli.streams import standard_output
from megatoken.errors import ExitCode, UsageError


def generate(
    ctx: typer.Context,
    model: Model = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="IN.jsonl", help="Prompts, one JSON object per line; needs --out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="OUT.jsonl", help="File to write: answers in the order of the prompts.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="One prompt; prints its answer as it is generated.")
    ] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="N", help="Maximum length of an answer, in tokens.")] = None,
    temperature: Annotated[
        str | None, typer.Option(metavar="T", help="Sampling temperature. Default 0: take the likeliest token.")
    ] = None,
    top_k: Annotated[
        str | None, typer.Option(metavar="K", help="Draw from the K likeliest tokens. Default 0: from all.")
    ] = None,
    top_p: Annotated[
        str | None, typer.Option(metavar="P", help="Draw from the likeliest tokens with this total probability.")
    ] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed of the random draws.")] = None,
    stop_token_ids: Annotated[
        str | None, typer.Option(metavar="ID,ID...", help="Token ids that end an answer.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp8", help="Number format of the weights.")
    ] = None,
) -> int:
    """Generate answers to the prompts of a file, or to one prompt."""
    from megatoken.config import load_answer_config, load_run_config

    if (prompt is None) == (prompts is None):
        raise UsageError("give either --prompts IN.jsonl with --out OUT.jsonl, or --prompt TEXT")
    if (prompts is None) != (out is None):
        raise UsageError("--prompts IN.jsonl and --out OUT.jsonl go together")
    declared = {"model": model, "max-tokens": max_tokens, "precision": precision}
    config = load_run_config(None, declared | ctx.meta[FLAGS])
    declared = {
        "temperature": temperature,
        "top-k": top_k,
        "top-p": top_p,
        "seed": seed,
        "stop-token-ids": stop_token_ids,
    }
    answers = load_answer_config(declared)

    from megatoken.harness.generate import generate_file, stream_prompt

    if prompts is not None and out is not None:
        generate_file(config, answers, prompts, out)
    elif prompt is not None:
        for piece in stream_prompt(config, answers, prompt):
            with standard_output():
                print(piece, end="")
        with standard_output():
            print()
    return ExitCode.OK
