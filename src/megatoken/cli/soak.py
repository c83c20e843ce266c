"""``megatoken soak``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatoken.cli.flags import FLAGS
from megatoken.cli.run import measure_and_show
from megatoken.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from megatoken.config import RunConfig
    from megatoken.harness.prepare import Prepared
    from megatoken.harness.progress import Progress
    from megatoken.harness.text_stages import Codec
    from megatoken.targets import Target

SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 7 * 86_400.0
_UNIT_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
# What a soak decides itself: it is one run under full load, of a length that --duration says.
_OWN = ("scenario", "mode", "rules", "compliance", "samples", "min_duration_seconds", "repeat", "rack.count")


def soak(
    ctx: typer.Context,
    config_file: Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml", help="Settings; flags win.")] = None,
    duration: Annotated[str | None, typer.Option(metavar="80m", help="Time under load: 90s, 80m, 1h30m, 2d.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Go on with an interrupted soak.")] = None,
    model: Annotated[str | None, typer.Option(metavar="DIR|SHAPE", help="Default: the model that ships.")] = None,
    random_weights: Annotated[bool, typer.Option("--random-weights", help="Take only DIR's shape.")] = False,
    precision: Annotated[str | None, typer.Option(metavar="fp32|bf16|fp8")] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts: JSON lines or OpenOrca pickle.")] = None,
    lengths: Annotated[str | None, typer.Option(metavar="FILE", help="CSV of token lengths.")] = None,
    rack: Annotated[
        str | None, typer.Option(metavar="CONFIG|auto", help="Use all nodes of a Ray cluster; its keys in a file.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Folder that receives the run folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and write nothing.")] = False,
    json_only: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Judge whether a rate holds for hours. Under full load, of this machine or a rack; resumable."""
    from megatoken.config import KEYS, load_run_config

    declared = {
        "model": model,
        "random-weights": random_weights or None,
        "precision": precision,
        "prompts": prompts,
        "lengths": lengths,
        "out": out,
    }
    given = {name: value for name, value in (declared | ctx.meta[FLAGS]).items() if value is not None}
    if resume is not None:
        return _resume(resume, [config_file, duration, *given], rack, dry_run=dry_run, json_only=json_only)
    if duration is None:
        raise UsageError("--duration: how long? for example --duration 80m; or --resume FOLDER")
    seconds = duration_seconds(duration)
    config = load_run_config(config_file, given, rack)
    for key in _OWN:
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if value != KEYS[key].default:
            raise ConfigError(f"{key}: a soak does not take it: it runs under full load for as long as --duration says")
    config = config.model_copy(update={"min_duration_seconds": seconds})
    return measure_and_show(config, _measure, dry_run=dry_run, json_only=json_only)


def _resume(folder: Path, others: list[object], rack: str | None, *, dry_run: bool, json_only: bool) -> int:
    if any(other is not None for other in others):
        raise UsageError(
            "--resume: the folder says what is soaked and for how long; give only --rack and --json with it"
        )
    from megatoken.config import load_run_config
    from megatoken.harness.soak import Earlier
    from megatoken.results.run_folder import CONFIG

    earlier = Earlier.read(folder)
    config = load_run_config(folder / CONFIG, {}, rack)

    def measure(prepared: Prepared, config: RunConfig, target: Target, progress: Progress, codec: Codec | None) -> Path:
        from megatoken.harness.soak import run_soak

        return run_soak(prepared, config, target, progress, codec, earlier)

    return measure_and_show(config, measure, dry_run=dry_run, json_only=json_only)


def _measure(prepared: Prepared, config: RunConfig, target: Target, progress: Progress, codec: Codec | None) -> Path:
    from megatoken.harness.soak import run_soak

    return run_soak(prepared, config, target, progress, codec)


def duration_seconds(text: str) -> float:
    """``80m``, ``1h30m``, ``2d``, ``90s`` or ``90`` in seconds.

    Raises:
        UsageError: it is none of these, or nothing that a soak can last.
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
