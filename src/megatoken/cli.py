"""The commands: parse, call, print. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

from megatoken import __version__
from megatoken.errors import ExitCode, MegatokenError, UsageError

# Base of everything typer raises for a wrong command line; it gives it no public name.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
_FLAGS = "megatoken.flags"

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="How many tokens per second does a machine serve, is that number true, and what is it worth.",
)


class SchemaCommand(TyperCommand):
    """A command that takes keys of the configuration schema as flags, beside those it declares."""

    prefix = ""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Sets undeclared ``--key value`` and ``--key=value`` aside for the schema, which checks them."""
        declared = {name for option in self.get_params(ctx) for name in option.opts}
        flags: dict[str, str] = {}
        kept: list[str] = []
        rest = list(args)
        while rest:
            argument = rest.pop(0)
            name, equals, value = argument.partition("=")
            if argument == "--":
                kept += [argument, *rest]
                break
            if name in declared or not name.startswith(f"--{self.prefix}"):
                kept.append(argument)
                if name in self._valued and not equals:
                    kept += rest[:1]
                    del rest[:1]
            elif equals:
                flags[name[2:]] = value
            else:
                flags[name[2:]] = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        ctx.meta[_FLAGS] = flags
        return list(super().parse_args(ctx, kept))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Adds the keys of the schema to the help."""
        from megatoken.config import describe_keys

        super().format_help(ctx, formatter)
        keys = [(f"--{key}", f"{text} [{default}]") for key, default, text in describe_keys()]
        with formatter.section("Keys of the configuration, each also a flag"):
            formatter.write_dl([row for row in keys if row[0].startswith(f"--{self.prefix}")])

    @property
    def _valued(self) -> set[str]:
        options = [option for option in self.params if isinstance(option, TyperOption) and not option.is_flag]
        return {name for option in options for name in option.opts}


class EngineCommand(SchemaCommand):
    """A command that takes the keys of the engine only."""

    prefix = "engine."


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(f"megatoken {__version__}")
    elif ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command(cls=SchemaCommand)
def run(
    ctx: typer.Context,
    config_file: Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; flags win.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR|SHAPE", help="Checkpoint directory or named shape.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Take only DIR's shape.")] = False,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp8")] = None,
    scenario: Annotated[str | None, typer.Option(metavar="offline")] = None,
    mode: Annotated[str | None, typer.Option(metavar="performance|accuracy")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts: JSON lines or OpenOrca pickle.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="FILE", help="CSV of token lengths.")] = None,
    samples: Annotated[str | None, typer.Option(metavar="N", help="Samples to issue.")] = None,
    min_duration: Annotated[str | None, typer.Option(metavar="SECONDS", help="Shortest duration of the run.")] = None,
    rules: Annotated[str | None, typer.Option(metavar="v5.1", help="MLPerf round whose rules the run claims.")] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder that receives the run folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and write nothing.")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Measure how fast this machine serves a model, under MLPerf LoadGen, and leave a folder of evidence."""
    from megatoken.config import load_run_config
    from megatoken.harness.prepare import prepare
    from megatoken.harness.progress import Progress

    declared = {
        "model": model,
        "random-weights": random_weights or None,
        "precision": precision,
        "scenario": scenario,
        "mode": mode,
        "prompts": prompts,
        "lengths": lengths,
        "samples": samples,
        "min-duration": min_duration,
        "rules": rules,
        "out": out,
    }
    config = load_run_config(config_file, _given(declared) | ctx.meta[_FLAGS])
    prepared = prepare(config)
    if dry_run:
        print(json.dumps(prepared.plan(), indent=2) if json_only else prepared.describe())
        return ExitCode.OK

    from megatoken.harness.offline import run_offline
    from megatoken.report import show, write_report
    from megatoken.results import read_run
    from megatoken.targets.in_process import InProcessTarget

    progress = Progress(quiet=json_only)
    for note in prepared.notes:
        progress.note(f"note: {note}")
    progress.stage(f"loading {prepared.model.name} in {config.precision}")
    target = InProcessTarget(prepared.build_engine())
    path = run_offline(config, prepared.data_set, target, prepared.facts(), progress)
    target.close()
    write_report(path)
    finished = read_run(path)
    if json_only:
        print(json.dumps({**finished.result, "run_folder": str(path)}, indent=2))
    else:
        show(finished)
    return finished.verdict.exit_code


@app.command(cls=EngineCommand)
def generate(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(metavar="DIR|SHAPE", help="Checkpoint directory or named shape.")],
    prompts: Annotated[Path | None, typer.Option(metavar="IN.jsonl", help="Prompts, one JSON object a line.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="OUT.jsonl", help="Answers, in the order of the prompts.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One prompt; its answer is streamed.")] = None,
    max_tokens: Annotated[str | None, typer.Option(metavar="N", help="Longest answer in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Draw from the K likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens of this share.")] = 1.0,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp8")] = None,
) -> int:
    """Answer the prompts of a file, or one prompt from the command line."""
    from megatoken.config import load_run_config

    if (prompt is None) == (prompts is None):
        raise UsageError("give either --prompts IN.jsonl with --out OUT.jsonl, or --prompt TEXT")
    if (prompts is None) != (out is None):
        raise UsageError("--prompts IN.jsonl and --out OUT.jsonl go together")
    declared = {"model": model, "max-tokens": max_tokens, "precision": precision}
    config = load_run_config(None, _given(declared) | ctx.meta[_FLAGS])

    from megatoken.engine import Sampling
    from megatoken.harness.generate import generate_file, stream_prompt

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    if prompts is not None and out is not None:
        generate_file(config, prompts, out, sampling)
    elif prompt is not None:
        for piece in stream_prompt(config, prompt, sampling):
            print(piece, end="", flush=True)
        print()
    return ExitCode.OK


def main() -> NoReturn:
    """Entry point: runs the command, turns what can go wrong into one line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Threads that wait for each other spin, and on a busy machine for the very core that the other needs: five times
    # slower there (docs/performance.md). Read when PyTorch is imported, so it must be set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        code = app(standalone_mode=False) or ExitCode.OK
        sys.stdout.flush()
    except MegatokenError as error:
        code = _complain(str(error), error.exit_code)
    except _CommandLineError as error:
        code = _complain(error.format_message(), ExitCode.USAGE)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.ERROR
    sys.exit(code)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _complain(message: str, code: ExitCode) -> ExitCode:
    print(f"megatoken: {' '.join(message.split())}", file=sys.stderr)
    return code


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
