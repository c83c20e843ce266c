"""Flags that several commands share, and how commands read flags; an unknown flag is refused with the nearest one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer._click.shell_completion import CompletionItem
from typer.core import TyperCommand, TyperOption

from megatoken.cli.streams import standard_output
from megatoken.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from megatoken.config import Key

BOOLEANS = {"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "null", "none"}
SHARED = ("rack", "slo", "dry_run", "json_only", "help")
LIMITS = "limits."  # prefix of the configuration keys that are the user's limits
FLAGS = "megatoken.flags"  # key of ctx.meta: the flags that are configuration keys


def flag(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option with its help; its names follow from the parameter unless given."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


def place(metavar: str, text: str) -> Any:
    """A positional argument with its help."""
    return typer.Argument(metavar=metavar, help=text)


Slo = Annotated[Path | None, flag("FILE.yaml", "Your limits on latencies, rates, accuracy and price.", "--slo")]
ConfigFile = Annotated[Path | None, place("CONFIG.yaml", "Settings; flags override them.")]
Rack = Annotated[str | None, flag("CONFIG|auto", "Run on all nodes of a Ray cluster: auto, host:port or a YAML file.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and memory plan, then stop.")]

# Configuration keys that a help lists first: flag -> metavar and help. ``run`` and ``soak`` share these.
MODEL_KEYS = {
    "model": ("DIR|SHAPE", "Checkpoint directory or named shape. Default: the reference model."),
    "random-weights": ("", "Use random weights in the shape of the model."),
    "precision": ("fp32|bf16|fp8|fp4", "Number format of the weights."),
}
ENDPOINT_KEYS = {
    "endpoint": ("URL", "Measure a server over HTTP, such as http://host:8000/v1; may be repeated."),
    "served-model": ("NAME", "Model to ask that server for. Default: the first that it lists."),
    "api-key-file": ("FILE", "File that holds the server's API key."),
    "api": ("chat|completions|responses", "Route to call. Default: chat for messages, else completions."),
    "start-server": ("COMMAND", "Start that server first, and stop it afterwards."),
}
PROMPT_KEYS = {
    "prompts": ("FILE", "Prompts: JSON lines, or a data set of MLPerf."),
    "lengths": ("FILE", "Token lengths (CSV); prompts are random tokens."),
}
OUT_KEYS = {"out": ("DIR", "Folder to create the run folder in.")}


class Command(TyperCommand):
    """A command whose flags may be typed with dashes or underscores."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Normalise declared flags, put those that are configuration keys into ``ctx.meta``, refuse the others."""
        options = [name for option in self.get_params(ctx) for name in option.opts if name.startswith("--")]
        valued = [option for option in self.params if isinstance(option, TyperOption) and not option.is_flag]
        takes_value = {name for option in valued for name in option.opts}
        no_value = {name: option for option in self.params if option not in valued for name in option.opts}
        switches = self.switches()
        flags: dict[str, str] = {}
        takes_arguments = any(param.param_type_name == "argument" for param in self.get_params(ctx))
        kept: list[str] = []
        rest = list(args)
        while rest:
            argument = rest.pop(0)
            typed, equals, value = argument.partition("=")
            name = typed.replace("_", "-")
            if argument == "--":
                kept += [argument, *rest]
                break
            if name in switches:
                if not equals and rest and not takes_arguments and not rest[0].startswith("-"):
                    value, equals = rest.pop(0), "="  # the schema says what is wrong with it
                flags[name[2:]] = value if equals else _boolean(rest)
            elif name in options:
                kept.append(f"{name}{equals}{value}")
                if name in takes_value and not equals:
                    kept += rest[:1]
                    del rest[:1]
                elif name in no_value and rest and not takes_arguments and not rest[0].startswith("-"):
                    use = getattr(no_value[name], "help", "")
                    raise UsageError(f"{name}: takes no value, but {rest[0]!r} follows it; its use: {use}")
            elif not typed.startswith("--"):
                kept.append(argument)
            elif not self.is_key(typed[2:]):
                known = [*self.other_flags(), *(option[2:] for option in options)]
                raise _unknown_flag(typed, known, ctx.command_path)
            elif not equals and (not rest or rest[0].startswith("--")):
                raise UsageError(f"{typed}: needs a value")
            else:
                value = value if equals else rest.pop(0)
                again = typed[2:] in flags and self.repeats(typed[2:])
                flags[typed[2:]] = f"{flags[typed[2:]]},{value}" if again else value
        ctx.meta[FLAGS] = flags
        return list(super().parse_args(ctx, kept))

    def is_key(self, flag: str) -> bool:
        """Whether an undeclared flag is a configuration key of this command."""
        return False

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Flags that begin with ``incomplete``, those that are configuration keys too."""
        others = sorted(f"--{name.replace('_', '-')}" for name in self.other_flags()) if incomplete[:1] == "-" else []
        items = super().shell_complete(ctx, incomplete)
        return [*items, *(CompletionItem(name) for name in dict.fromkeys(others) if name.startswith(incomplete))]

    def switches(self) -> Collection[str]:
        """Flags, with dashes, that need no value: without one they are true."""
        return ()

    def repeats(self, flag: str) -> bool:
        """Whether a key may be given several times; its values are then joined by commas."""
        return False

    def other_flags(self) -> Sequence[str]:
        """Flags that the command takes in addition to those it declares."""
        return ()


class SchemaCommand(Command):
    """A command that also takes keys of the configuration as flags: those under ``prefix`` and ``first``."""

    prefix = ""
    first: Mapping[str, tuple[str, str]] = {}  # those that the help lists first: flag -> metavar and help

    def is_key(self, flag: str) -> bool:
        """Whether ``flag`` is a key of the configuration."""
        from megatoken.config import flag_key

        return flag_key(flag) in self.keys() or flag.replace("_", "-") in self.first

    def switches(self) -> Collection[str]:
        """The configuration keys that are true or false."""
        return {f"--{key.replace('_', '-')}" for key, setting in self.keys().items() if setting.is_switch}

    def repeats(self, flag: str) -> bool:
        """Whether ``flag`` takes several values."""
        from megatoken.config import REPEATED, flag_key

        return flag_key(flag) == REPEATED

    def other_flags(self) -> Sequence[str]:
        """The keys and their short names."""
        from megatoken.config import FLAG_ALIASES

        aliases = (alias.replace("_", "-") for alias in FLAG_ALIASES if alias.startswith(self.prefix))
        return [*self.keys(), *self.first, *aliases]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List arguments, the command's own options, its first keys, then options that several commands have."""
        records = [(param, record) for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        arguments = [record for param, record in records if param.param_type_name == "argument"]
        own = [record for param, record in records if record not in arguments and param.name not in SHARED]
        keys = [(f"--{flag} {metavar}".rstrip(), text) for flag, (metavar, text) in self.first.items()]
        shared = [record for param, record in records if param.name in SHARED]
        for title, rows in (("Arguments", arguments), ("Options", [*own, *keys, *shared])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Add the configuration keys to the help."""
        from megatoken.config import describe_keys, flag_key

        super().format_help(ctx, formatter)
        declared = {flag_key(name[2:]) for option in self.get_params(ctx) for name in option.opts}
        declared |= {flag_key(flag) for flag in self.first}
        own = self.prefix == LIMITS  # elsewhere a file of limits is the usual way, and megatoken check lists them
        keys = describe_keys({key: of for key, of in self.keys().items() if own or not key.startswith(LIMITS)})
        with formatter.section("Configuration keys (also flags)"):
            formatter.write_dl(
                [(f"--{key}", f"{text} [{default}]") for key, default, text in keys if key not in declared]
            )

    def keys(self) -> dict[str, Key]:
        """The configuration keys that are flags."""
        from megatoken.config import KEYS

        return {name: key for name, key in KEYS.items() if name.startswith(self.prefix)}


def key_command(first: Mapping[str, tuple[str, str]], prefix: str = "") -> type[SchemaCommand]:
    """A ``SchemaCommand`` whose help lists these keys first, then all others under ``prefix``."""
    return type("KeyCommand", (SchemaCommand,), {"first": first, "prefix": prefix})


def group(text: str) -> typer.Typer:
    """A command of several commands; without one of them it prints its help."""
    app = typer.Typer(rich_markup_mode=None, help=text)

    @app.callback(invoke_without_command=True)
    def print_help(ctx: typer.Context) -> None:
        if ctx.invoked_subcommand is None:
            with standard_output():
                print(ctx.get_help())

    return app


def _boolean(rest: list[str]) -> str:
    """The value of a switch: the next word, taken from ``rest``, if it is a boolean; otherwise true."""
    return rest.pop(0) if rest and rest[0].lower() in BOOLEANS else "true"


def _unknown_flag(flag: str, known: Iterable[str], command: str) -> ConfigError:
    from megatoken.text import nearest

    spellings = {name.replace("_", "-"): name for name in known}
    meant = nearest(flag[2:].replace("_", "-"), spellings)
    hint = f"did you mean --{spellings[meant]}?" if meant else f"see {command} --help"
    return ConfigError(f"{flag}: unknown flag; {hint}")
