"""All commands in one program: parse, call, print. Commands import what they need when they run."""

from __future__ import annotations

import os
import signal
import sys
from errno import ENOMEM
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from megatoken import __version__
from megatoken.cli import (
    accuracy,
    audit,
    compare,
    dataset,
    dossier,
    generate,
    plan,
    qualify,
    quantize,
    report,
    run,
    serve,
    soak,
    submission,
    sweep,
)
from megatoken.cli.flags import Command
from megatoken.cli.streams import (
    complain,
    escape_what_cannot_be_encoded,
    flush,
    stand_in_for_closed_streams,
    standard_output,
)
from megatoken.errors import ExitCode, MegatokenError, UsageError
from megatoken.signals import handle_stop_signals, leave_at_once

# Base of all errors that typer raises for a wrong command line; it has no public name.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[1]
IMPORT_POLL_SECONDS = 0.02
COMPLETION = "_MEGATOKEN_COMPLETE"

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure how fast a machine serves language models, check published results, and plan capacity and cost.",
    epilog="Exit codes: 0 success (MEASURED, VALID); 1 error; 2 wrong flag, file or value; 3 INVALID; 4 DEGRADED; "
    "130 interrupted.",
)
app.command(cls=Command)(dossier.init)
app.command(cls=run.RunCommand)(run.run)
app.command(cls=soak.SoakCommand)(soak.soak)
app.command(cls=sweep.SweepCommand)(sweep.sweep)
app.command(cls=generate.GenerateCommand)(generate.generate)
app.command(cls=serve.ServeCommand)(serve.serve)
app.command(cls=Command)(qualify.qualify)
app.command(cls=Command)(qualify.doctor)
app.command(cls=Command)(quantize.quantize)
app.command(cls=Command)(run.rerun)
app.command(cls=compare.CheckCommand)(compare.check)
app.command(cls=Command)(audit.audit)
app.command(cls=Command)(dossier.seal)
app.command(cls=compare.CheckCommand)(dossier.dossier)
app.command(cls=Command)(compare.aggregate)
app.command(cls=Command)(compare.compare)
app.add_typer(plan.app, name="plan")
app.add_typer(dataset.app, name="dataset")
app.command(cls=Command)(accuracy.accuracy)
app.command(cls=Command)(accuracy.verify)
app.add_typer(submission.app, name="submission")
app.command(cls=Command)(report.report)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False
) -> None:
    if version or ctx.invoked_subcommand is None:
        with standard_output():
            print(f"megatoken {__version__}" if version else ctx.get_help())


def run_application() -> NoReturn:
    """Run the command and end the process with its exit code."""
    stand_in_for_closed_streams()
    escape_what_cannot_be_encoded()
    # Threads that wait for each other spin. On a busy machine they spin on the core that the other thread needs, which
    # is five times slower (docs/performance.md). PyTorch reads this when it is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        handle_stop_signals(_interrupt)
        code = _outcome()
        signal.setitimer(signal.ITIMER_REAL, 0)
        handle_stop_signals(signal.SIG_IGN)  # libraries that clean up at exit print no traceback
    except KeyboardInterrupt:  # while an error was being printed
        code = ExitCode.INTERRUPTED
    flush()
    sys.exit(code)


def _outcome() -> int:
    """Run the command; turn errors into one line on standard error and an exit code."""
    try:
        return _command()
    except MegatokenError as error:
        return complain(str(error), error.exit_code)
    except _CommandLineError as error:
        return complain(_explained(error), ExitCode.USAGE)
    except KeyboardInterrupt as interruption:
        return complain(str(interruption) or "interrupted; nothing was written", ExitCode.INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has closed it
        return ExitCode.ERROR
    except UnicodeEncodeError:
        return complain("a path is not UTF-8 and cannot be written into a file; rename it", ExitCode.USAGE)
    except (MemoryError, ImportError, OSError) as error:
        return complain(_of_the_machine(error), ExitCode.ERROR)


def _of_the_machine(error: MemoryError | ImportError | OSError) -> str:
    """What the machine or the installation lacks, and how to fix it. Libraries are loaded when a command needs them."""
    text = str(error)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == ENOMEM or "failed to map segment" in text:
        return f"not enough memory{f' ({text})' if text else ''}; free some, or raise the limit (ulimit -v)"
    return f"cannot load a library ({text}); install megatoken again" if isinstance(error, ImportError) else text


def _explained(error: Exception) -> str:
    """The error of a wrong command line; for a value that pydantic refused, in the words of other settings."""
    message = str(error.format_message())  # type: ignore[attr-defined]
    names = getattr(getattr(error, "param", None), "opts", [""])
    if message.startswith("Got unexpected extra argument"):
        command = error.ctx.command_path  # type: ignore[attr-defined]
        return f"unexpected extra argument: {message.partition('(s) (')[2].removesuffix(')')}; see {command} --help"
    if error.__cause__ is None or not names[0].startswith("--"):
        return message.replace(": Value error, ", ": ")
    from pydantic import ValidationError

    from megatoken.yaml_files import demand

    if not isinstance(error.__cause__, ValidationError):
        return message
    detail = error.__cause__.errors()[0]
    of_typer = detail["type"] == "value_error"  # a sentence that names the value
    return f"{names[0]}: {str(detail['ctx']['error']).rstrip('.') if of_typer else demand(detail)}"


_commands = cache(partial(get_command, app))  # once a process, which may run several


def _command() -> int:
    """Run the command of the command line. Does not call ``app``, which would hide interruptions."""
    try:
        Path.cwd()  # libraries that need it end the process in their own words
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}); change to another one") from error
    command = _commands()
    if COMPLETION in os.environ:  # the shell asks for words; this answers and ends the process
        command.main(prog_name="megatoken", complete_var=COMPLETION)
    try:
        with command.make_context("megatoken", sys.argv[1:]) as context:
            return command.invoke(context) or ExitCode.OK
    except typer.Exit as end:  # after --help
        return end.exit_code


class _Interruption(KeyboardInterrupt):
    """A subclass, because after a plain KeyboardInterrupt has left an exec or eval, ``python -m`` ends by SIGINT.

    See ``run_eval_code_obj`` in pythonrun.c and ``Py_RunMain`` in main.c of CPython.
    """

    def __init__(self) -> None:
        """With an ``__init__``, no codec replaces it by an exception with the codec's words (``errors.c`` of 3.11)."""
        super().__init__()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first signal unwinds the command, which then reports what it has written; the second ends the process.

    An import is finished first: it would turn the interruption into another exception, such as NumPy's ImportError, or
    print it as ignored.
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
