"""``megatoken rerun``: whether the same run can be made here and now, and whether its rate comes out the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.analysis.comparison import ratio_interval
from megatoken.analysis.series import tokens_per_second_within
from megatoken.analysis.statistics import leading_rates
from megatoken.config import KEYS, RunConfig, load_run_config
from megatoken.engine.config import REFERENCE, SHAPES
from megatoken.errors import UsageError
from megatoken.files import new_document, plain
from megatoken.hardware.inventory import take_inventory
from megatoken.harness.command import measure
from megatoken.harness.prepare import Prepared, resolve
from megatoken.harness.progress import Progress
from megatoken.harness.run import run_prepared
from megatoken.mlperf.rounds import DEFAULT_ROUND, round_seeds
from megatoken.runs.plan_hash import (
    changed_parts,
    flat,
    plan_differences,
    plan_hash,
    plan_of,
    plan_of_run,
    unknown_edits,
)
from megatoken.runs.run import CONFIG, Run, read_run

SPANS = 10  # of the rated time, whose rates give an interval
LONG_ENOUGH_SECONDS = 30
SCENARIOS = ("offline", "server", "interactive", "singlestream")
RULE = (
    f"the rates agree if 1 lies in the 95 % interval of their ratio (Welch's t on the logarithms of the output rates of"
    f" {SPANS} equal spans of each run)"
)


def check_plan(path: Path, progress: Progress) -> dict[str, Any]:
    """The document on whether the run ``path`` would be the same run here and now; reads the model, computes nothing.

    Raises:
        UsageError: it is no run folder of ``megatoken run``, or what it used cannot be used here.
    """
    run, config = _read(path)
    prepared, _ = measure(config, run_prepared, progress, dry_run=True)
    return _document(run, plan_of_run(run), _plan_now(prepared), None)


def rerun(path: Path, progress: Progress, out: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Make the run ``path`` again, in ``out`` or next to it; returns the comparison and the new folder.

    Raises:
        UsageError: as ``check_plan``.
    """
    run, config = _read(path)
    config = config.model_copy(update={"out": out or path.absolute().parent})

    _, folder = measure(config, run_prepared, progress)
    assert folder is not None  # not a dry run
    again = read_run(folder)
    return _document(run, plan_of_run(run), plan_of_run(again), again), folder


def _read(path: Path) -> tuple[Run, RunConfig]:
    run = read_run(path)
    if run.result.get("scenario") not in SCENARIOS or run.config.get("find_rate") or run.config.get("repeat", 1) != 1:
        raise UsageError(f"{path}: not one test of megatoken run; give one of its run folders, or repeat the command")
    config = load_run_config(path / CONFIG, {})
    served = (run.result.get("target") or {}).get("served_model")
    for name, file in {"prompts": config.prompts, "lengths": config.lengths, "model": Path(config.model)}.items():
        named = name == "model" and config.model in (REFERENCE, *SHAPES, served)  # rather than a folder
        if file is not None and not named and not file.is_absolute() and not file.exists():
            where = "the path is relative to where the run was started; re-run there"
            raise UsageError(f"{path}: there is no {file} here, its {name}: {where}")
    return run, config


def _plan_now(prepared: Prepared) -> dict[str, str]:
    config = resolve(prepared.config, prepared.model)
    seeds = round_seeds()[config.rules or DEFAULT_ROUND]._asdict()
    return plan_of(config.model_dump(mode="json"), prepared.facts(), take_inventory(), seeds)


def _document(run: Run, then: dict[str, str], now: dict[str, str], again: Run | None) -> dict[str, Any]:
    edited = [_edited_setting(run, one) or one for one in changed_parts(run)]
    edited = [{**one, "key": f"{one['key']} (edited after the run)"} for one in edited]
    differences = [*edited, *plan_differences(then, now)]
    rates = None if again is None else _rates(run, again)
    return new_document(
        "rerun",
        title=f"Re-run of {run.path.name}",
        inputs=[run.path, *([again.path] if again else [])],
        notes=[],
        plan_sha256={"then": plan_hash(then), "now": plan_hash(now)},
        equal=not differences,
        differences=differences,
        unknown_edits=unknown_edits(run),
        rates=rates,
    )


def _edited_setting(run: Run, part: dict[str, str | None]) -> dict[str, str | None] | None:
    """The one setting whose value in ``result.json``, or default, gives the stored hash; None: there is no such."""
    if part["key"] != "config":
        return None
    config = {key: value for key, value in plan_of_run(run).items() if key.startswith("config.")}
    given = {one["setting"]: one["value"] for one in run.result.get("changed_settings") or ()}
    for setting, known in KEYS.items():
        key = f"config.{setting}"
        then = dict(flat(key, given.get(setting, plain(known.default))))
        others = {name: value for name, value in config.items() if name != key and not name.startswith(f"{key}.")}
        if plan_hash(others | then) == part["then"]:
            return {"key": key, "then": then.get(key), "now": config.get(key)}
    return None


def _rates(run: Run, again: Run) -> dict[str, Any]:
    rates = [leading_rates(one.result)["output_tokens_per_second"] for one in (run, again)]
    spans = [_span_rates(one) for one in (run, again)]
    interval = ratio_interval(spans[1], spans[0])
    short = [one for one, of in zip((run, again), spans, strict=True) if len(of) < 2]
    why = {"why_no_interval": _why_no_interval(short[0])} if short else {}
    return {
        "then_output_tokens_per_second": rates[0],
        "now_output_tokens_per_second": rates[1],
        "ratio": rates[1] / rates[0] if rates[0] and rates[1] else None,
        "ratio_low": interval[0] if interval else None,
        "ratio_high": interval[1] if interval else None,
        "agree": interval[0] <= 1 <= interval[1] if interval else None,
        "rule": RULE,
        **why,
    }


def _why_no_interval(run: Run) -> str:
    seconds = leading_rates(run.result)["rated_seconds"]
    if not seconds:
        return f"{run.path.name} has no time that its rate is over (rated_seconds of its result.json)"
    if seconds >= SPANS:
        return f"{run.path.name} has output tokens in fewer than 2 of {SPANS} equal spans of its series.parquet"
    return (
        f"{run.path.name} is too short: an interval needs {SPANS} s, each with a row in its series.parquet, and its"
        f" rate is over {seconds:.1f} s; make the first run again with --min-duration {LONG_ENOUGH_SECONDS}, then"
        " re-run that one"
    )


def _span_rates(run: Run) -> Sequence[float]:
    seconds = leading_rates(run.result)["rated_seconds"]
    if not seconds or seconds < SPANS:
        return []
    edges = np.linspace(0.0, float(seconds), SPANS + 1)
    rates = [tokens_per_second_within(run.series, float(start), float(end)) for start, end in pairwise(edges)]
    return [rate for rate in rates if rate]
