"""Facts that a run folder states more than once, compared: its files have no common writer to replay."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import numpy as np

from megatoken.analysis.entries import formats_of
from megatoken.analysis.machine import is_of_server, unix_seconds
from megatoken.analysis.series import numbers, replicas
from megatoken.analysis.statistics import ARRIVING, SOAK, SWEEP, Samples
from megatoken.audit.differences import Doubt
from megatoken.audit.folder import LOGGED, TABLES, RunFolder, compared
from megatoken.audit.replay_answers import UnknownError
from megatoken.engine.config import REFERENCE, SHAPES, EngineConfig, ModelConfig, model_folder
from megatoken.engine.hugging_face import model_config
from megatoken.engine.memory import plan_memory_of
from megatoken.engine.schemes import SCHEMES
from megatoken.errors import MegatokenError
from megatoken.files import mapping, read_json_object
from megatoken.harness.loadgen_plan import library_to_data_set
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.run_figures import completion_seconds, in_seconds, samples_answers, whole
from megatoken.runs.identity import TEMPLATE_FILES, TOKENIZER_FILES, joint_hash
from megatoken.runs.plan_hash import changed_parts, unknown_edits
from megatoken.runs.run import CONFIG, ENVIRONMENT, SCHEMA_VERSION, SERIES, Run
from megatoken.text import count_of

# Of result.json and config.yaml; those of the engine where it is not a rack's, whose machines have their own sizes.
_CONFIGURED = {name: name for name in ("scenario", "mode", "rules", "precision", "text")}
_STEP = {"target.target_step_seconds": "engine.target_step_seconds"}
_ENGINE = {f"target.{name}": f"engine.{name}" for name in ("threads", "tensor_parallel")}
_ENGINE |= {
    f"memory_plan.{name}": f"engine.{name}"
    for name in ("device", "max_batched_tokens", "max_sequences", "max_length", "page_size", "packed_weights")
}
CLOCK_SECONDS = 1.0  # some dates have whole seconds, and a clock may be adjusted a little
CLOCK_DRIFT = 0.01  # of a soak
LATE_SECONDS = 60.0  # between two steps of a start, on a busy machine
EARLIER_SECONDS, LATER_SECONDS, LATER_SHARE = 0.1, 1.0, 0.05  # of the last sample in the rows, against LoadGen's
RATE_ERROR = 1e-4  # relative: LoadGen's rates have six digits, and its clock runs until it hears of the last sample
WEIGHTS_SHARE = 0.05  # releases count a scale or a copy of the head in another way; number formats differ by more
MOST_LIBRARY_ROWS = 20_000_000


@compared("run_folder.configuration", "The run was configured as it says", "Other settings give other numbers.")
def configuration(folder: RunFolder) -> Iterator[str]:
    """What ran against what was configured."""
    run, log = folder.run, folder.log
    result, config = run.result, run.config
    scenario = {"scenario": SOAK} if "soak" in result and config.get("scenario") == "offline" else {}
    if "load" in result and config.get("scenario") == "server":  # a sweep takes its limits and how it streams
        scenario = {"scenario": SWEEP}
    served = {"precision"} if is_of_server(result) else set()  # only the server knows it
    for field, key in {**_CONFIGURED, **_STEP, **({} if folder.on_rack else _ENGINE)}.items():
        if field in served:
            continue
        stated, asked = _at(result, field), _at({**config, **scenario}, key)
        left_open = asked in (None, "auto") and key.startswith("engine.") and key not in _STEP.values()
        if asked is not ... and not left_open and (stated is not ... or "." not in field) and stated != asked:
            yield f"{field} {None if stated is ... else stated}, {CONFIG} {key} {asked}"
    soak = mapping(result.get("soak"))
    recorded = dict(mapping(soak.get("settings")))
    if "duration_seconds" in soak:
        recorded["min_duration_seconds"] = soak["duration_seconds"]
    for key, value in recorded.items():
        if (asked := _at(config, key)) is not ... and asked != value:
            yield f"soak.settings {key} {value}, {CONFIG} {asked}"
    overlap, steps = _at(config, "engine.overlap"), _at(result, "target.steps_in_flight")
    if isinstance(overlap, bool) and steps is not ... and steps != 1 + overlap:
        yield f"target.steps_in_flight {steps}, {CONFIG} engine.overlap {overlap}"
    yield from (f"{one['key']} differs from the hash stored when the run began" for one in changed_parts(run))
    yield from _subject(run)
    yield from _files(run)
    yield from _simulated(run)
    yield from _formats(run)
    if not folder.on_rack:
        yield from _device(run)
    if log is not None and "soak" not in result:
        yield from _asked(run, log)
        yield from _library(run, log)


def _may_have_hashes(folder: RunFolder) -> bool:
    return (
        folder.run.result["schema_version"] == SCHEMA_VERSION and not folder.is_part and "load" not in folder.run.result
    )


@compared(
    "run_folder.plan",
    "What decided the run was hashed when it began",
    "A later change of the configuration or the machine would not be noticed.",
    when=_may_have_hashes,
)
def plan(folder: RunFolder) -> Iterator[str]:
    """Whether there are hashes to compare; ``configuration`` compares them."""
    if unknown := unknown_edits(folder.run):
        raise UnknownError(unknown)
    yield from ()


def _subject(run: Run) -> Iterator[str]:
    result, config = run.result, run.config
    model = config.get("model")
    if isinstance(model, str) and PurePath(model).name not in ("", "..", result.get("model")):
        other = f"model {result.get('model')}, {CONFIG} model {model}"
        yield Doubt(other) if "/" in model else other  # a link may lead to a folder of another name
    drawn, weights = result.get("random_weights"), result.get("weights")
    if "random_weights" in config and isinstance(weights, str):
        if (drawn or weights.startswith("random")) and weights != f"random, seed {config.get('seed')}":
            yield f"weights {weights}, {CONFIG} seed {config.get('seed')}"
        if bool(drawn) is not weights.startswith("random") or (config["random_weights"] is True and not drawn):
            yield f"weights {weights}, random_weights {drawn}, {CONFIG} random_weights {config['random_weights']}"
    name, source, given = result.get("data_set"), result.get("data_set_source"), config.get("prompts")
    given = given or config.get("lengths")
    is_path = isinstance(source, str) and re.fullmatch(r"\S*/[^/\s]+\.\w+", source)
    for place, path in ((f"{CONFIG}", given), ("data_set_source", source if is_path else None)):
        if isinstance(path, str) and name is not None and PurePath(path).name != name:
            yield f"data_set {name}, {place} {path}"


def _files(run: Run) -> Iterator[str]:
    """Hashes of weights, tokenizer and chat template against those of the files that they are of."""
    identity = mapping(run.result.get("identity"))
    if "files" not in identity:
        return
    hashes = {one["name"]: one["sha256"] for one in identity["files"]}
    weights = hashes.keys() - {*TOKENIZER_FILES, *TEMPLATE_FILES}
    for of, names in (("weights", weights), ("tokenizer", TOKENIZER_FILES), ("chat_template", TEMPLATE_FILES)):
        again, stored = (
            joint_hash({name: hashes[name] for name in names if name in hashes}),
            identity.get(f"{of}_sha256"),
        )
        if stored != again:
            yield f"identity.{of}_sha256 {stored}, by identity.files {again}"


def _simulated(run: Run) -> Iterator[str]:
    """Every place that names a simulated GPU names the same one, and its weights are random."""
    target = mapping(run.result.get("target"))
    named = {f"{CONFIG} rack.simulated_gpu": _at(run.config, "rack.simulated_gpu")}
    named["target.simulated_gpu"] = target.get("simulated_gpu", ...)
    named = {place: gpu for place, gpu in named.items() if gpu is not ...}
    if len({gpu and str(gpu).lower() for gpu in named.values()}) > 1:  # config.yaml has it as it was typed
        yield ", ".join(f"{place} {gpu}" for place, gpu in named.items())
    if any(named.values()) and run.result.get("random_weights") is False:
        yield f"simulated GPUs, with weights {run.result.get('weights')}"


def _device(run: Run) -> Iterator[str]:
    target, device = mapping(run.result.get("target")), _at(run.result, "target.device")
    planned, gpus = _at(run.result, "memory_plan.device"), [gpu["name"] for gpu in run.environment.get("gpus") or ()]
    if isinstance(device, str) and not target.get("simulated_gpu"):
        if planned is not ... and (device == "cpu") is not (planned == "cpu"):
            yield f"target.device {device}, memory_plan.device {planned}"
        if gpus and device not in (*gpus, "cpu"):
            yield f"target.device {device}, {ENVIRONMENT} {', '.join(dict.fromkeys(gpus))}"


def _formats(run: Run) -> Iterator[str]:
    target, precision = mapping(run.result.get("target")), run.result.get("precision")
    schemes = [scheme for scheme in SCHEMES if scheme.precision == precision]
    if "formats" in target and target["formats"] not in [scheme.formats() for scheme in schemes]:
        yield f"precision {precision}, target.formats {formats_of(run.result) or target['formats']}"
    if "fp8_scales" in target and target["fp8_scales"] not in [scheme.fp8_scales for scheme in schemes]:
        yield f"precision {precision}, target.fp8_scales {target['fp8_scales']}"


def _asked(run: Run, log: DetailLog) -> Iterator[str]:
    """Keys of ``config.yaml`` against LoadGen's log.

    A compliance test has its own duration, a search offers other rates than the first, and SingleStream asks for one
    sample less (``harness.loadgen_plan``).
    """
    config, searched = run.config, run.config.get("find_rate") is True
    known: dict[str, float | None] = {}
    if config.get("compliance") is None:
        known["min_duration_seconds"] = in_seconds(log.number("effective_min_duration_ms"), 1e3)
    if config.get("scenario") != "singlestream" and not searched:
        known["samples"] = log.number("requested_min_query_count")
    if config.get("scenario") in ARRIVING:
        known["rate"] = None if searched else log.number("effective_target_qps")
        for name in ("ttft", "tpot"):
            known[f"{name}_limit_seconds"] = in_seconds(log.number(f"requested_server_{name}_latency"), 1e9)
    for key, logged in known.items():
        value = config.get(key)
        if key == "min_duration_seconds" and isinstance(value, float):
            value = round(1e3 * value) / 1e3  # as LoadGen is given it
        if value is not None and logged is not None and not math.isclose(value, logged, rel_tol=1e-9):
            yield f"{CONFIG} {key} {value}, LoadGen was asked for {logged:g}"


def _library(run: Run, log: DetailLog) -> Iterator[str]:
    """``data_set_rows`` against LoadGen's library and the rows that were issued."""
    rows, library = run.result.get("data_set_rows"), whole(log, "qsl_reported_total_count")
    if not isinstance(rows, int) or not library or library > MOST_LIBRARY_ROWS:
        return
    if rows < 1:
        yield f"data_set_rows {rows}"
        return
    behind = np.unique(library_to_data_set(str(run.result.get("mode")), library, rows))
    issued, sampled = np.unique(run.requests["sample_index"].to_numpy()), samples_answers(log)
    if sampled and library != rows:
        yield f"data_set_rows {rows:,}, LoadGen's library of all of them has {library:,}"
    foreign = np.setdiff1d(issued, behind)
    left_out = len(behind) - len(issued) if len(run.requests) >= library and not sampled else 0
    if len(foreign) or left_out > 0:
        what = f"{len(foreign):,} other rows were issued" if len(foreign) else f"{left_out:,} of them were not issued"
        yield f"data_set_rows {rows:,} in a library of {library:,}: {what}"


@compared("run_folder.memory", "Sizes fit model and machine", "Other sizes belong to another model or precision.")
def memory(folder: RunFolder) -> Iterator[str]:
    """``memory_plan`` against the plan for a model of known shape, the series and the memory of the machine."""
    run, alone = folder.run, not folder.on_rack
    plan, result = mapping(run.result.get("memory_plan")), run.result
    planned = {name: value for name, value in plan.items() if name not in ("device", "packed_weights")}
    wrong = {name: value for name, value in planned.items() if type(value) is not int or value < 0}
    if wrong:
        yield f"memory_plan {', '.join(f'{name} {value}' for name, value in wrong.items())}"
        return
    engine, pages = mapping(run.config.get("engine")), plan.get("pages")
    tokens, logged = engine.get("cache_tokens"), set(run.series["pages"].to_pylist())
    if alone and isinstance(tokens, int) and plan.get("page_size") and pages != tokens // plan["page_size"]:
        yield f"memory_plan.pages {pages}, {CONFIG} engine.cache_tokens {tokens:,}"
    if pages is not None and logged and pages not in logged:
        yield f"memory_plan.pages {pages:,}, {SERIES} {', '.join(map(str, sorted(logged)[:3]))}"
    yield from _planned(run, plan)
    total = mapping(run.environment.get("memory")).get("total_bytes")
    total, peak = total if isinstance(total, int) else math.inf, result.get("peak_memory_bytes")
    on_cpu, ranks = alone and plan.get("device") == "cpu", engine.get("tensor_parallel") or 1
    sizes = {"memory_plan.available_bytes": plan.get("available_bytes") if on_cpu else None, "peak_memory_bytes": peak}
    for name, size in sizes.items():
        if isinstance(size, int) and size > total:
            yield f"{name} {size:,} of a machine with {total:,}"
    if on_cpu and ranks == 1 and isinstance(peak, int) and peak < plan.get("weights_bytes", 0):
        yield f"peak_memory_bytes {peak:,}, below weights_bytes {plan['weights_bytes']:,}"


def _planned(run: Run, plan: Mapping[str, Any]) -> Iterator[str]:
    """The plan made again from its sizes; weights and cache only, for what a step takes changes between versions."""
    model, config = _shape(run), mapping(run.config.get("engine"))
    needed = {"device", "available_bytes", "pages", "page_size", "max_batched_tokens", "max_sequences", "max_length"}
    if model is None or not needed <= plan.keys() or plan["device"] not in ("cpu", "cuda"):
        return
    ranks = config.get("tensor_parallel") or 1
    sizes = {name: plan[name] for name in ("page_size", "max_batched_tokens", "max_sequences", "max_length")}
    names = ("fp8_scales", "packed_weights", "cuda_graphs")
    own = {name: config[name] for name in names if config.get(name) is not None}
    available = plan["available_bytes"] * (ranks if plan["device"] == "cpu" else 1)
    own |= {"tensor_parallel": ranks, "cache_tokens": plan["pages"] * plan["page_size"]}
    try:
        asked = EngineConfig(precision=run.result["precision"], **sizes, **own)
        again = plan_memory_of(model, asked, plan["device"], available)
    except (MegatokenError, ArithmeticError) as error:
        yield f"memory_plan of {model.name}: {error}"
        return
    tolerances = {"weights_bytes": WEIGHTS_SHARE, "cache_bytes": 1 / (again.pages + 1)}
    if again.window_pages and "window_pages" not in plan:
        del tolerances["cache_bytes"]  # of an older version, whose layers all held every key
    for name, tolerance in tolerances.items():
        if name in plan and not math.isclose(plan[name], getattr(again, name), rel_tol=tolerance):
            yield f"memory_plan.{name} {plan[name]:,}, recomputed for {model.name} {getattr(again, name):,}"


def _shape(run: Run) -> ModelConfig | None:
    """That of a published model with random weights, or of the model that ships."""
    name, drawn = run.config.get("model"), run.result.get("random_weights")
    if run.result.get("model") != name:  # configuration() says so
        return None
    if name in SHAPES and drawn:
        return SHAPES[str(name)]
    if name != REFERENCE or drawn:
        return None
    file = model_folder(REFERENCE) / "config.json"
    return model_config(read_json_object(file)[0], file)


@compared("run_folder.counts", "LoadGen counted the same", "Both saw all samples.", LOGGED, lambda it: it.is_logged)
def counts(folder: RunFolder) -> Iterator[str]:
    """LoadGen learns of the last sample a little after it ended, and leaves answers of one token out of its rates."""
    run, log, figures = folder.run, folder.log, folder.figures
    result, scenario = run.result, run.result.get("scenario")
    if result.get("mode") != "performance" or log is None or figures is None:
        return
    tokens, samples = result.get("output_tokens"), result.get("samples_completed")
    failed = result.get("samples_failed") or 0  # LoadGen issued them, and counts them
    if figures.output_tokens is not None and isinstance(tokens, int):
        counted = tokens - (result.get("samples_without_tpot") or 0)
        if not isinstance(samples, int) or samples + failed != figures.samples_issued:
            yield f"{samples} samples and {failed} failed ones, LoadGen {figures.samples_issued}"
        if abs(counted - figures.output_tokens) > RATE_ERROR * max(tokens, 1):
            yield f"{counted:,} tokens of answers of more than one, LoadGen {figures.output_tokens:,.0f}"
    last = Samples.of(run.requests).last
    if scenario == "offline":
        logged, ours = in_seconds(log.number("result_max_latency_ns"), 1e9), float(np.max(last, initial=-math.inf))
    elif scenario in ARRIVING and len(last):  # of the sample that was issued last
        logged, ours = completion_seconds(log), float(last[int(np.argmax(run.requests["sample_id"].to_numpy()))])
    else:
        return
    if logged is None or not math.isfinite(ours):
        return
    if not logged - LATER_SECONDS - LATER_SHARE * logged <= ours <= logged + EARLIER_SECONDS:
        yield f"the last sample ended after {ours:.3f} s, by LoadGen {logged:.3f} s"


@compared("run_folder.times", "Dates are in order", "A folder with other dates may be of another run.", LOGGED)
def times(folder: RunFolder) -> Iterator[str]:
    """Dates in their order, against LoadGen's own and the time under load."""
    run, figures = folder.run, None if folder.logged is None else folder.logged.figures
    result, soak = run.result, run.result.get("soak")
    stated = {"soak.segments started_at": soak["segments"][0]["started_at"]} if soak else {}
    stated |= {name: result[name] for name in ("created_at", "started_at", "ended_at") if name in result}
    dates = {name: unix_seconds(text) for name, text in stated.items() if text is not None}
    yield from (f"{name} {stated[name]} is not a date" for name, date in dates.items() if date is None)
    known = {name: date for name, date in dates.items() if date is not None}
    for (earlier, before), (later, after) in pairwise(known.items()):
        if before - after > CLOCK_SECONDS or (soak and later != "ended_at" and after - before > LATE_SECONDS):
            yield f"{earlier} {stated[earlier]}, {later} {stated[later]}"
    if figures is not None:
        began, done = figures.began_at, figures.ended_at
        if began and abs(known.get("started_at", began.timestamp()) - began.timestamp()) > LATE_SECONDS:
            yield f"started_at {stated['started_at']}, LoadGen's test began {began}"
        if done and known.get("ended_at", math.inf) < done.timestamp() - CLOCK_SECONDS:
            yield f"ended_at {stated['ended_at']}, LoadGen's test ended {done}"
    if soak:
        last = soak["segments"][-1]
        resumed, ended = unix_seconds(last["started_at"]), known.get("ended_at")
        loaded = max(run.series["elapsed_seconds"].to_pylist(), default=0.0) - last["begins_seconds"]
        if resumed is not None and ended is not None and ended - resumed < (1 - CLOCK_DRIFT) * loaded - CLOCK_SECONDS:
            yield f"ended_at {stated['ended_at']}, {loaded:.0f} s under load after {last['started_at']}"
        yield from _segments(run, soak)


def _segments(run: Run, soak: Mapping[str, Any]) -> Iterator[str]:
    """Where a soak stopped and went on, against its dates and the rows of the series."""
    begins = [segment["begins_seconds"] for segment in soak["segments"]]
    stops = [one["at_seconds"] for one in soak["interruptions"]]
    if begins != [0.0, *stops] or any(one >= other for one, other in pairwise(begins)):
        yield f"segments begin at {begins}, interruptions are at {stops}"
        return
    series = run.series
    elapsed, under_way = numbers(series["elapsed_seconds"]), numbers(series["in_flight"])
    dates = [unix_seconds(segment["started_at"]) for segment in soak["segments"]]
    for one, (begin, stop), (date, resumed) in zip(
        soak["interruptions"], pairwise(begins), pairwise(dates), strict=True
    ):
        if date is not None and resumed is not None:
            gap = max(0.0, resumed - date - (stop - begin))
            if not math.isclose(gap, one["gap_seconds"], abs_tol=1e-3):
                yield f"gap_seconds {one['gap_seconds']:.3f} at {stop:.3f} s, by started_at {gap:.3f}"
        earlier, resumption = np.flatnonzero(elapsed < stop), np.flatnonzero(elapsed == stop)
        last = [earlier[rows[-1]] for _, _, rows in replicas(series.take(earlier))]
        busy = under_way[resumption].any() or numbers(series["waiting"])[resumption].any()
        if len(resumption) != len(last) or busy:
            yield f"a segment begins at {stop:.3f} s, {SERIES} has no rows of replicas that start there"
        elif (dropped := int(under_way[last].sum())) != one["samples_dropped"]:
            yield f"samples_dropped {one['samples_dropped']} at {stop:.3f} s, {dropped} were in flight"


def _has_replicas(folder: RunFolder) -> bool:
    """A soak that went on after an interruption has the nodes of its last segment alone."""
    run, result = folder.run, folder.run.result
    of_rack = mapping(run.config.get("rack")).get("cluster") is not None or "ray" in mapping(result.get("target"))
    stated = bool(result.get("rack") and result.get("rack_nodes"))
    resumed = mapping(result.get("soak")).get("interruptions")
    return folder.finished and not resumed and (stated or bool(of_rack and len(run.requests)))


@compared(
    "run_folder.replicas",
    "A rack has the replicas of its time series",
    "Its verdict depends on them.",
    TABLES,
    _has_replicas,
)
def replicas_of_rack(folder: RunFolder) -> Iterator[str]:
    """``rack_nodes`` and ``rack`` against each other, the GPUs that replicas need and the series."""
    run, result = folder.run, folder.run.result
    if absent := [name for name in ("rack", "rack_nodes") if not result.get(name)]:
        yield from (f"no {name}" for name in absent)
        return
    target, rack = mapping(result.get("target")), result["rack"]
    stated = {entry["node"]: entry["replicas"] for entry in result["rack_nodes"]}
    served = {
        (node, number): bool(numbers(run.series["pages"])[rows].any()) for node, number, rows in replicas(run.series)
    }
    counted = Counter(node for node, _ in served)
    if target.get("count") == "per_node" and "node_verdicts" not in result:
        stated = {node: stated.get(node, 0) for node in counted}  # the folder of one node has the others too
    planned, joined = sum(stated.values()), len(rack["joined"])
    least, at_end = rack["replicas_least"], rack["replicas_at_end"]
    if planned != rack["replicas"]:
        yield f"rack_nodes have {count_of(planned, 'replica')}, rack.replicas {rack['replicas']}"
    if not 0 <= least <= at_end <= rack["replicas"] + joined:
        yield f"replicas_least {least}, replicas_at_end {at_end} of {rack['replicas']} and {joined} that joined"
    if not math.isclose(rack["share_left"], least / rack["replicas"], rel_tol=1e-9):
        yield f"share_left {rack['share_left']}, replicas_least {least} of {rack['replicas']}"
    on_gpus = target.get("device") != "cpu" and not target.get("simulated_gpu")
    for entry in result["rack_nodes"]:
        if entry["gpus"] != (entry["replicas"] * (target.get("tensor_parallel") or 1) if on_gpus else 0):
            yield f"{entry['node']} has {count_of(entry['gpus'], 'GPU')} for {count_of(entry['replicas'], 'replica')}"
    absent = planned - len(served)
    if counted.keys() == stated.keys():  # otherwise a node that joined may serve what another one had
        absent = sum(max(0, replicas_here - counted[node]) for node, replicas_here in stated.items())
    if absent > rack["replicas"] - least:
        yield f"{count_of(absent, 'replica')} of rack_nodes without rows in {SERIES}"
    lost = {(loss["node"], loss["replica"]) for loss in rack["lost"]}
    if (serving := sum(served.values())) > at_end + len(lost):  # one that was lost before the start has no pages
        yield f"{serving} replicas served in {SERIES}, rack.replicas_at_end {at_end} and {len(lost)} lost"


def _at(document: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; ``...`` if there is none."""
    value: Any = document
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return ...
        value = value[part]
    return value
