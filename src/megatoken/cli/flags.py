"""Flags that several commands declare, and what commands make of those typed after them.

An unknown one is answered with the nearest that they have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from megatoken.errors import ConfigError, UsageError

BOOLEANS = {"true", "false", "yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "null", "none"}
FLAGS = "megatoken.flags"  # where a context keeps the flags that are keys of the configuration

ConfigFile = Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; flags win.")]
Model = Annotated[str | None, typer.Option(metavar="DIR|SHAPE", help="Default: the model that ships.")]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="Take only DIR's shape.")]
Precision = Annotated[str | None, typer.Option(metavar="fp32|bf16|fp8|fp4")]
Prompts = Annotated[str | None, typer.Option(metavar="FILE", help="Prompts: JSON lines or OpenOrca pickle.")]
Lengths = Annotated[str | None, typer.Option(metavar="FILE", help="CSV of token lengths.")]
Rack = Annotated[
    str | None, typer.Option(metavar="CONFIG|auto", help="Use all nodes of a Ray cluster; its keys in a file.")
]
RunsOut = Annotated[str | None, typer.Option(metavar="DIR", help="Folder that receives the run folder.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and write nothing.")]


class Command(TyperCommand):
    """A command whose flags may be typed with dashes or underscores."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Writes flags as they are declared, sets undeclared ones aside, refuses those that nobody knows."""
        options = [name for option in self.get_params(ctx) for name in option.opts if name.startswith("--")]
        valued = [option for option in self.params if isinstance(option, TyperOption) and not option.is_flag]
        takes_value = {name for option in valued for name in option.opts}
        switches = self.switches()
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
            if name in switches:
                flags[name[2:]] = value if equals else _boolean(rest)
            elif name in options:
                kept.append(f"{name}{equals}{value}")
                if name in takes_value and not equals:
                    kept += rest[:1]
                    del rest[:1]
            elif not typed.startswith("--"):
                kept.append(argument)
            elif not self.is_key(typed[2:]):
                known = [*self.other_flags(), *(option[2:] for option in options)]
                raise _unknown_flag(typed, known, ctx.command_path)
            elif equals:
                flags[typed[2:]] = value
            elif rest and not rest[0].startswith("--"):
                flags[typed[2:]] = rest.pop(0)
            else:
                raise UsageError(f"{typed}: needs a value")
        ctx.meta[FLAGS] = flags
        return list(super().parse_args(ctx, kept))

    def is_key(self, flag: str) -> bool:
        """Whether an undeclared flag is a key that the command takes."""
        return False

    def switches(self) -> Collection[str]:
        """Flags, with dashes, of keys that may stand without a value, which is true then."""
        return ()

    def other_flags(self) -> Sequence[str]:
        """Flags that the command takes beside those it declares."""
        return ()


class SchemaCommand(Command):
    """A command that takes keys of the configuration schema as flags, beside those it declares."""

    prefix = ""

    def is_key(self, flag: str) -> bool:
        """Whether ``flag`` is a key of the schema."""
        from megatoken.config import flag_key

        return flag_key(flag) in self._keys()

    def switches(self) -> Collection[str]:
        """Those of the schema's keys that are true or false."""
        from megatoken.config import KEYS

        return {f"--{key.replace('_', '-')}" for key in self._keys() if KEYS[key].is_switch}

    def other_flags(self) -> Sequence[str]:
        """The keys and their shorter names."""
        from megatoken.config import FLAG_ALIASES

        aliases = (alias.replace("_", "-") for alias in FLAG_ALIASES if alias.startswith(self.prefix))
        return [*self._keys(), *aliases]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Adds the keys of the schema to the help."""
        from megatoken.config import describe_keys

        super().format_help(ctx, formatter)
        keys = [(f"--{key}", f"{text} [{default}]") for key, default, text in describe_keys()]
        with formatter.section("Keys of the configuration, each also a flag"):
            formatter.write_dl([row for row in keys if row[0].startswith(f"--{self.prefix}")])

    def _keys(self) -> list[str]:
        from megatoken.config import KEYS

        return [key for key in KEYS if key.startswith(self.prefix)]


class EngineCommand(SchemaCommand):
    """A command that takes the keys of the engine only."""

    prefix = "engine."


def _boolean(rest: list[str]) -> str:
    """The value of a switch: the next word if it can be one, which is taken away, else true."""
    return rest.pop(0) if rest and rest[0].lower() in BOOLEANS else "true"


def _unknown_flag(flag: str, known: Iterable[str], command: str) -> ConfigError:
    from megatoken.text import nearest

    spellings = {name.replace("_", "-"): name for name in known}
    meant = nearest(flag[2:].replace("_", "-"), spellings)
    mend = f"did you mean --{spellings[meant]}?" if meant else f"see {command} --help"
    return ConfigError(f"{flag}: unknown flag; {mend}")
