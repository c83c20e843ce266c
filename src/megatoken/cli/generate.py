"""``megatoken generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatoken.cli.flags import FLAGS, MODEL_KEYS, flag, key_command
from megatoken.cli.streams import standard_output
from megatoken.engine.config import REFERENCE
from megatoken.errors import ExitCode, UsageError

_ANSWER_KEYS = {
    "temperature": ("T", "Sampling temperature. Default 0: take the likeliest token."),
    "top-k": ("K", "Draw from the K likeliest tokens. Default 0: from all."),
    "top-p": ("P", "Draw from the likeliest tokens with this total probability."),
    "seed": ("N", "Seed of the random draws."),
    "stop-token-ids": ("ID,ID...", "Token ids that end an answer."),
}
NOT_A_CHAT = "note: the prompt is sent without the chat template; --chat sends it as a message, by that template"
GenerateCommand = key_command(
    {
        "model": MODEL_KEYS["model"],
        "max-tokens": ("N", "Maximum length of an answer, in tokens."),
        **_ANSWER_KEYS,
        "precision": ("fp32|bf16|fp8", MODEL_KEYS["precision"][1]),
    },
    prefix="engine.",
)


def generate(
    ctx: typer.Context,
    prompts: Annotated[Path | None, flag("IN.jsonl", "Prompts, one JSON object per line; needs --out.")] = None,
    out: Annotated[Path | None, flag("OUT.jsonl", "File to write: answers in the order of the prompts.")] = None,
    prompt: Annotated[str | None, flag("TEXT", "One prompt; prints its answer as it is generated.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send --prompt as a user's message, by the model's chat template.")
    ] = False,
) -> int:
    """Generate answers to the prompts of a file, or to one prompt."""
    from megatoken.config import AnswerConfig, load_flags, load_run_config

    if (prompt is None) == (prompts is None):
        raise UsageError("give either --prompts IN.jsonl with --out OUT.jsonl, or --prompt TEXT")
    if (prompts is None) != (out is None):
        raise UsageError("--prompts IN.jsonl and --out OUT.jsonl go together")
    if chat and prompt is None:
        raise UsageError("--chat: applies to --prompt TEXT; a file's prompts are taken as they are")
    flags = {name.replace("_", "-") if "." not in name else name: text for name, text in ctx.meta[FLAGS].items()}
    answers = load_flags(AnswerConfig, {name: text for name, text in flags.items() if name in _ANSWER_KEYS})
    config = load_run_config(None, {name: text for name, text in flags.items() if name not in _ANSWER_KEYS})

    from megatoken.engine.checkpoint import open_model
    from megatoken.harness.generate import generate_file, stream_prompt
    from megatoken.harness.progress import Progress
    from megatoken.serve.python_chat import ChatTemplate

    if prompts is not None and out is not None:
        generate_file(config, answers, prompts, out)
    elif prompt is not None:
        template = ChatTemplate(config.model)
        if chat and not template.known:
            open_model(config.model)  # refuses a name that is no model
            raise UsageError(f"--chat: {config.model} has no chat template; leave --chat out")
        settled = chat or config.model == REFERENCE  # whose tasks are prompts without a template
        note = NOT_A_CHAT if template.known and not settled else None
        render = (lambda text: template.text([{"role": "user", "content": text}])) if chat else None
        for piece in stream_prompt(config, answers, prompt, render):
            if note is not None:
                Progress().note(note)
                note = None
            with standard_output():
                print(piece, end="")
        with standard_output():
            print()
    return ExitCode.OK
