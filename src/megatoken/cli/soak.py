"""``megatoken soak``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.flags import FLAGS, MODEL_KEYS, OUT_KEYS, PROMPT_KEYS, ConfigFile, DryRun, Rack, flag, key_command
from megatoken.cli.output import Json
from megatoken.cli.run import measure_and_show
from megatoken.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from megatoken.config import RunConfig
    from megatoken.harness.prepare import Prepared
    from megatoken.harness.progress import Progress
    from megatoken.harness.soak import Earlier
    from megatoken.targets import Target

SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 7 * 86_400.0
_UNIT_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
# Settings that a soak fixes: it is one run under full load for --duration.
_OWN = ("scenario", "mode", "rules", "compliance", "samples", "min_duration_seconds", "repeat", "rack.count")

SoakCommand = key_command({**MODEL_KEYS, **PROMPT_KEYS, **OUT_KEYS})


def soak(
    ctx: typer.Context,
    config_file: ConfigFile = None,
    duration: Annotated[str | None, flag("80m", "Time under load, for example 90s, 80m, 1h30m, 2d.")] = None,
    resume: Annotated[Path | None, flag("FOLDER", "Continue an interrupted soak.")] = None,
    rack: Rack = None,
    dry_run: DryRun = False,
    json_only: Json = False,
) -> int:
    """Keep a machine or a rack under full load for hours. Reports whether the rate holds; can be resumed."""
    given = ctx.meta[FLAGS]
    if resume is not None:
        config, earlier = _interrupted(resume, [config_file, duration, *given], rack)
    else:
        config, earlier = _new(config_file, given, rack, duration), None

    def test(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
        from megatoken.harness.soak import run_soak

        return run_soak(prepared, config, target, progress, earlier)

    check = earlier.check if earlier is not None else None
    return measure_and_show(config, test, dry_run=dry_run, json_only=json_only, check=check)


def _new(config_file: Path | None, given: Mapping[str, str], rack: str | None, duration: str | None) -> RunConfig:
    if duration is None:
        raise UsageError("give --duration, for example --duration 80m, or --resume FOLDER")
    from megatoken.config import KEYS, load_run_config

    seconds = duration_seconds(duration)
    config = load_run_config(config_file, given, rack)
    for key in _OWN:
        if attrgetter(key)(config) != KEYS[key].default:
            raise ConfigError(
                f"{key}: not a setting of a soak, which runs under full load for --duration; leave it out"
            )
    return config.model_copy(update={"min_duration_seconds": seconds})


def _interrupted(folder: Path, others: list[object], rack: str | None) -> tuple[RunConfig, Earlier]:
    if any(other is not None for other in others):
        raise UsageError("--resume takes all settings from the folder; give only --rack and --json with it")
    from megatoken.config import load_run_config
    from megatoken.harness.soak import Earlier
    from megatoken.runs.run import CONFIG

    earlier = Earlier.read(folder)
    config = load_run_config(folder / CONFIG, {}, rack)
    earlier.check_settings(config)
    return config, earlier


def duration_seconds(text: str) -> float:
    """``80m``, ``1h30m``, ``2d``, ``90s`` or ``90`` in seconds.

    Raises:
        UsageError: another form, or shorter or longer than a soak can be.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    whole = "".join(number + unit for number, unit in parts)
    if re.fullmatch(r"\d+(?:\.\d+)?", text):
        seconds = float(text)
    elif parts and whole == text:
        seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    else:
        raise UsageError(f"--duration {text}: must be a time such as 90s, 80m, 1h30m or 2d")
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise UsageError(f"--duration {text}: must be at least {SHORTEST_SECONDS:g} s and at most 7 days")
    return seconds
