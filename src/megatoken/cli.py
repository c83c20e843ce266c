"""The commands: parse, call, print. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption
from typer.main import get_command

from megatoken import __version__
from megatoken.errors import ConfigError, ExitCode, MegatokenError, UsageError

if TYPE_CHECKING:
    from megatoken.harness.prepare import Prepared

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
        """Sets undeclared ``--key value`` and ``--key=value`` aside for the schema; refuses what neither side knows."""
        from megatoken.config import FLAG_ALIASES, KEYS, flag_key

        options = [name for option in self.get_params(ctx) for name in option.opts if name.startswith("--")]
        valued = [option for option in self.params if isinstance(option, TyperOption) and not option.is_flag]
        takes_value = {name for option in valued for name in option.opts}
        keys = [key for key in KEYS if key.startswith(self.prefix)]
        flags: dict[str, str] = {}
        kept: list[str] = []
        rest = list(args)
        while rest:
            argument = rest.pop(0)
            typed, equals, value = argument.partition("=")
            name = typed.replace("_", "-")
            if argument == "--":
                kept += [argument, *rest]
                break
            if name in options:
                kept.append(f"{name}{equals}{value}")
                if name in takes_value and not equals:
                    kept += rest[:1]
                    del rest[:1]
            elif not typed.startswith("--"):
                kept.append(argument)
            elif flag_key(typed[2:]) not in keys:
                aliases = [alias.replace("_", "-") for alias in FLAG_ALIASES if alias.startswith(self.prefix)]
                raise _unknown_flag(typed, [*keys, *aliases, *(option[2:] for option in options)], ctx.command_path)
            elif equals:
                flags[typed[2:]] = value
            else:
                flags[typed[2:]] = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        ctx.meta[_FLAGS] = flags
        return list(super().parse_args(ctx, kept))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Adds the keys of the schema to the help."""
        from megatoken.config import describe_keys

        super().format_help(ctx, formatter)
        keys = [(f"--{key}", f"{text} [{default}]") for key, default, text in describe_keys()]
        with formatter.section("Keys of the configuration, each also a flag"):
            formatter.write_dl([row for row in keys if row[0].startswith(f"--{self.prefix}")])


class EngineCommand(SchemaCommand):
    """A command that takes the keys of the engine only."""

    prefix = "engine."


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version or ctx.invoked_subcommand is None:
        with _standard_output():
            print(f"megatoken {__version__}" if version else ctx.get_help())


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
    config = load_run_config(config_file, declared | ctx.meta[_FLAGS])
    try:
        from megatoken.harness.prepare import prepare  # PyTorch with it, which takes a while

        prepared = prepare(config)
        path = None if dry_run else _measure(prepared, quiet=json_only)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted before the measurement began; nothing was written") from None
    if path is None:
        with _standard_output():
            print(json.dumps(prepared.plan(), indent=2) if json_only else prepared.describe())
        return ExitCode.OK

    from megatoken.report import show, write_report
    from megatoken.results import read_run

    with _standard_output(f"the run is in {path}"):
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
    temperature: Annotated[str | None, typer.Option(metavar="T", help="0 (default): the likeliest token.")] = None,
    top_k: Annotated[str | None, typer.Option(metavar="K", help="Draw from the K likeliest; 0 (default): all.")] = None,
    top_p: Annotated[str | None, typer.Option(metavar="P", help="Draw from the likeliest of this share.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed of the draws.")] = None,
    stop_token_ids: Annotated[str | None, typer.Option(metavar="ID,ID...", help="Ids that end an answer.")] = None,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp8")] = None,
) -> int:
    """Answer the prompts of a file, or one prompt from the command line."""
    from megatoken.config import load_answer_config, load_run_config

    if (prompt is None) == (prompts is None):
        raise UsageError("give either --prompts IN.jsonl with --out OUT.jsonl, or --prompt TEXT")
    if (prompts is None) != (out is None):
        raise UsageError("--prompts IN.jsonl and --out OUT.jsonl go together")
    declared = {"model": model, "max-tokens": max_tokens, "precision": precision}
    config = load_run_config(None, declared | ctx.meta[_FLAGS])
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
            with _standard_output():
                print(piece, end="")
        with _standard_output():
            print()
    return ExitCode.OK


def main() -> NoReturn:
    """Entry point: runs the command, turns what can go wrong into one line on stderr and an exit code."""
    _stand_in_for_closed_streams()
    signal.signal(signal.SIGTERM, _interrupt)
    # Threads that wait for each other spin, and on a busy machine for the very core that the other needs: five times
    # slower there (docs/performance.md). Read when PyTorch is imported, so it must be set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        code = _command()
    except MegatokenError as error:
        code = _complain(str(error), error.exit_code)
    except _CommandLineError as error:
        code = _complain(error.format_message(), ExitCode.USAGE)  # type: ignore[attr-defined]
    except KeyboardInterrupt as interruption:
        code = _complain(str(interruption) or "interrupted; nothing was written", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has left
        code = ExitCode.ERROR
    except OSError as error:
        code = _complain(str(error), ExitCode.ERROR)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # said already; the interpreter's own flush at the end must not fail too
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _command() -> int:
    """Runs what the command line asks for. Not by calling ``app``, which would keep interruptions to itself."""
    command = get_command(app)
    try:
        with command.make_context("megatoken", sys.argv[1:]) as context:
            return command.invoke(context) or ExitCode.OK
    except typer.Exit as end:  # help was asked for
        return end.exit_code


def _measure(prepared: Prepared, quiet: bool) -> Path:
    """Loads the weights and runs the measurement; returns the run folder."""
    from megatoken.harness.offline import run_offline
    from megatoken.harness.progress import Progress
    from megatoken.targets.in_process import InProcessTarget

    progress = Progress(quiet)
    for note in prepared.notes:
        progress.note(f"note: {note}")
    progress.stage(f"loading {prepared.model.name} in {prepared.config.precision}")
    try:
        target = InProcessTarget(prepared.build_engine())
        return run_offline(prepared.config, prepared.data_set, target, prepared.facts(), progress)
    finally:
        progress.clear()


@contextmanager
def _standard_output(kept: str = "") -> Iterator[None]:
    """What is printed inside has left the process at the end; if it cannot, the error says what was ``kept``."""
    also = f"; {kept}" if kept else ""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{also}") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise MegatokenError(f"cannot write to standard output: {error.strerror}{also}") from error


def _stand_in_for_closed_streams() -> None:
    """Puts /dev/null where a standard stream is closed: a file opened later would get its number and its output.

    It is open for reading only, so that writing fails as on the closed one.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _unknown_flag(flag: str, known: Iterable[str], command: str) -> ConfigError:
    from megatoken.config import nearest

    spellings = {name.replace("_", "-"): name for name in known}
    meant = nearest(flag[2:].replace("_", "-"), spellings)
    mend = f"did you mean --{spellings[meant]}?" if meant else f"see {command} --help"
    return ConfigError(f"{flag}: unknown flag; {mend}")


def _complain(message: str, code: ExitCode) -> ExitCode:
    with suppress(OSError):  # then there is nobody to tell
        print(f"megatoken: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
