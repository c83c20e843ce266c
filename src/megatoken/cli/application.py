"""All commands in one program: parse, call, print. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from megatoken import __version__
from megatoken.cli import accuracy, audit, compare, dataset, generate, plan, report, run, soak, submission, verify
from megatoken.cli.flags import Command, EngineCommand, SchemaCommand
from megatoken.cli.streams import (
    complain,
    escape_what_cannot_be_encoded,
    flush,
    stand_in_for_closed_streams,
    standard_output,
)
from megatoken.errors import ExitCode, MegatokenError
from megatoken.signals import handle_stop_signals, leave_at_once

# Base of everything typer raises for a wrong command line; it gives it no public name.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
IMPORT_POLL_SECONDS = 0.02

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="How many tokens per second does a machine serve, is that number true, and what is it worth.",
)
app.command(cls=SchemaCommand)(run.run)
app.command(cls=SchemaCommand)(soak.soak)
app.command(cls=EngineCommand)(generate.generate)
app.command(cls=Command)(audit.audit)
app.command(cls=Command)(compare.aggregate)
app.command(cls=Command)(compare.compare)
app.add_typer(plan.app, name="plan")
app.add_typer(dataset.app, name="dataset")
app.command(cls=Command)(accuracy.accuracy)
app.command(cls=Command)(verify.verify)
app.add_typer(submission.app, name="submission")
app.command(cls=Command)(report.report)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version or ctx.invoked_subcommand is None:
        with standard_output():
            print(f"megatoken {__version__}" if version else ctx.get_help())


def run_application() -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    stand_in_for_closed_streams()
    escape_what_cannot_be_encoded()
    # Threads that wait for each other spin, and on a busy machine for the very core that the other needs: five times
    # slower there (docs/performance.md). Read when PyTorch is imported, so it must be set before.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        handle_stop_signals(_interrupt)
        code = _outcome()
        signal.setitimer(signal.ITIMER_REAL, 0)
        handle_stop_signals(signal.SIG_IGN)  # all is said; libraries that clean up need no traceback
    except KeyboardInterrupt:  # while an error was being told
        code = ExitCode.INTERRUPTED
    flush()
    sys.exit(code)


def _outcome() -> int:
    """Runs the command, turns what can go wrong into one line on stderr and an exit code."""
    try:
        return _command()
    except MegatokenError as error:
        return complain(str(error), error.exit_code)
    except _CommandLineError as error:
        return complain(_explained(error), ExitCode.USAGE)
    except KeyboardInterrupt as interruption:
        return complain(str(interruption) or "interrupted; nothing was written", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has left
        return ExitCode.ERROR
    except UnicodeEncodeError:
        return complain("a path is not UTF-8 and cannot be written into a file; rename it", ExitCode.USAGE)
    except OSError as error:
        return complain(str(error), ExitCode.ERROR)


def _explained(error: Exception) -> str:
    """What is wrong in the command line; of a value that pydantic refused for typer, in our words and not in its."""
    message = str(error.format_message())  # type: ignore[attr-defined]
    names = getattr(getattr(error, "param", None), "opts", [""])
    if error.__cause__ is None or not names[0].startswith("--"):
        return message.replace(": Value error, ", ": ")
    from pydantic import ValidationError

    from megatoken.yaml_files import demand

    why = demand(error.__cause__.errors()[0]) if isinstance(error.__cause__, ValidationError) else None
    return f"{names[0]}: {why}" if why else message


def _command() -> int:
    """Runs what the command line asks for. Not by calling ``app``, which would keep interruptions to itself."""
    command = get_command(app)
    try:
        with command.make_context("megatoken", sys.argv[1:]) as context:
            return command.invoke(context) or ExitCode.OK
    except typer.Exit as end:  # help was asked for
        return end.exit_code


class _Interruption(KeyboardInterrupt):
    """Not KeyboardInterrupt: once that has left an exec or eval, ``python -m`` ends by SIGINT, whatever was made of it.

    See ``run_eval_code_obj`` in pythonrun.c and ``Py_RunMain`` in main.c of CPython.
    """


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first signal unwinds the command, which says what is left of its work; one more ends it where it is.

    An import is let through first, which would make another exception of it, such as NumPy's ImportError, or print it
    as ignored.
    """
    handle_stop_signals(leave_at_once("interrupted again; ended at once"))
    if not _importing(frame):
        raise _Interruption
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, IMPORT_POLL_SECONDS)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
