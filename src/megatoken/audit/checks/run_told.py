"""What a megatoken run folder tells of its subject, against what else it holds: who served, with what, of what size.

Sizes follow from the shapes of published models and of the one that ships. What nothing in the folder bears out is left
alone: a label that was changed everywhere alike leaves no trace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, get_args

import numpy as np

from megatoken.audit.evidence import Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.engine.config import REFERENCE, SHAPES, ModelConfig, Precision, model_folder, sharded
from megatoken.engine.memory import bytes_per_token, weight_bytes
from megatoken.engine.schemes import find_scheme
from megatoken.errors import MegatokenError
from megatoken.files import mapping, read_json_object
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.run_figures import samples_answers, whole
from megatoken.runs.run import CONFIG, ENVIRONMENT, RESULT, SERIES, Run, Verdict
from megatoken.text import count_of

CORE_WAIT_SHARE = 0.05  # of the time, beyond which a run must say that it was kept waiting
CORE_WAIT_DRIFT = 0.006  # the note has whole percents
WEIGHTS_TOLERANCE = 0.05  # releases count a scale or a copy of the head otherwise; formats differ by half and more
MOST_LIBRARY_ROWS = 20_000_000
_COST_MODEL = "none: a cost model"
_SIZES = ("weights_bytes", "cache_bytes", "workspace_bytes", "process_bytes")
_CONFIGURED_SIZES = (  # of the engine, as resolved; older folders call the token budget max_rows
    *("device", "max_batched_tokens", "max_rows", "max_sequences", "max_length", "page_size"),
)


def check_told(folder: Run, log: DetailLog | None, prefix: str) -> Iterator[Observation]:
    """All that a run tells of its subject.

    Args:
        folder: the run.
        log: LoadGen's detail log of it; None where there is none.
        prefix: path of the folder, with a slash at its end; empty for the audited folder itself.
    """
    result, config = Where(prefix + RESULT), Where(prefix + CONFIG)
    yield _found("run_folder.simulation", _simulation(folder), "what simulated, or that nothing did", (result, config))
    yield _found(
        "run_folder.notes", _notes(folder), "the notes that such a run carries, and no other", (result, config)
    )
    if folder.verdict is not Verdict.INTERRUPTED:  # the note comes at the end
        yield from _core_wait(folder, (result,))
    places = (result, config, Where(prefix + ENVIRONMENT), Where(prefix + SERIES))
    yield _found("run_folder.memory", _memory(folder), "sizes that fit model, precision, machine and series", places)
    yield _found("run_folder.subject", _subject(folder, log), "data set and machine as the rest has them", places)


def check_health(folder: Run, prefix: str) -> Iterator[Observation]:
    """What a run that came to its end says against itself, so that nobody takes an audit without a fail for health.

    A compliance test that was not passed is a rule that is broken. A check of our own that was not, and replicas that
    were lost, leave results that are less than they look.
    """
    against = [f"{reason['code']} {reason['message']}" for reason in (*folder.reasons, *folder.doubts)]
    word = (folder.result.get("stability") or {}).get("verdict")
    if folder.verdict in (Verdict.INVALID, Verdict.DEGRADED) or folder.doubts:
        found = f"{folder.verdict}{f', {word}' if word else ''}: {'; '.join(against) or 'no reason given'}"
        expected = "a run that says nothing against itself"
        yield Observation("run_folder.healthy", _weight(folder), expected, shown(found), (Where(prefix + RESULT),))


def _weight(folder: Run) -> Severity:
    if any(reason["code"] == "COMPLIANCE" for reason in folder.reasons):
        return Severity.WARN if mapping(folder.result.get("compliance")).get("passed") is True else Severity.FAIL
    return Severity.WARN if folder.verdict is Verdict.DEGRADED else Severity.NOTE


def _found(check: str, problems: Iterator[str], expected: str, where: tuple[Where, ...]) -> Observation:
    listed = list(problems)
    return observe(check, not listed, expected, shown("; ".join(listed)) or "nothing speaks against it", where)


def _simulation(folder: Run) -> Iterator[str]:
    """Every place that tells of simulated GPUs names the same one."""
    target = mapping(folder.result.get("target"))
    named: dict[str, str | None] = {}
    if "simulated_gpu" in (rack := mapping(folder.config.get("rack"))):
        named[f"{CONFIG} rack.simulated_gpu"] = rack["simulated_gpu"]
    if "simulated_gpu" in target:
        named["target"] = target["simulated_gpu"]
    if "notes" in folder.result:
        notes = (note for note in folder.result["notes"] or () if note["code"] == "SIMULATED_GPU")
        named["notes"] = next((str(note.get("gpu")) for note in notes), None)
    if len({name and name.lower() for name in named.values()}) > 1:  # config.yaml has it as it was typed
        yield ", ".join(f"{place}: {f'simulated {name}' if name else 'not simulated'}" for place, name in named.items())
    if not any(named.values()):
        if str(target.get("kernels", "")).startswith(_COST_MODEL):
            yield f"target.kernels {target['kernels']}, and nothing else of a simulation"
        elif target.get("why_no_gpu") == "simulated":
            yield f"target.why_no_gpu {target['why_no_gpu']}, and nothing else of a simulation"
    elif not folder.result.get("random_weights"):
        yield f"simulated, with weights {folder.result.get('weights')}"


def _notes(folder: Run) -> Iterator[str]:
    result, config = folder.result, folder.config
    codes = {note["code"] for note in result.get("notes") or ()}
    target = mapping(result.get("target"))
    simulated = mapping(config.get("rack")).get("simulated_gpu")
    drawn = result.get("random_weights") is True or config.get("random_weights") is True
    needed = {
        "SIMULATED_GPU": bool(simulated),
        "RANDOM_WEIGHTS": drawn and not simulated and not target.get("simulated_gpu"),
        "REFERENCE_MODEL": result.get("model") == config.get("model") == REFERENCE and not drawn,
        "COMPLIANCE_TEST": bool(config.get("compliance")),
        "RULES_SCOPE": bool(config.get("rules")),
        "NO_KERNELS": bool(target.get("why_no_kernels")),
    }
    for code, must in needed.items():
        if must and code not in codes:
            yield f"no note {code}"
    if result.get("weights") and not drawn and "RANDOM_WEIGHTS" in codes:
        yield "a note on random weights, whose hash is told"


def _core_wait(folder: Run, where: tuple[Where, ...]) -> Iterator[Observation]:
    """Beyond the limit a note says so, of the same share; below it none does."""
    share = folder.result.get("core_wait_share")
    notes = (note for note in folder.result.get("notes") or () if note["code"] in ("CORE_WAIT", "DRIVER_CORE_WAIT"))
    told = next((note.get("share") for note in notes if isinstance(note.get("share"), float)), None)
    if share is None and told is None:
        return
    found = f"core_wait_share {share}, {'no note' if told is None else f'a note on {100 * told:.0f} %'}"
    apart = math.inf
    if isinstance(share, int | float) and 0 <= share <= 1:
        apart = max(0.0, share - CORE_WAIT_SHARE) if told is None else abs(share - told)
    yield observe(
        "run_folder.core_wait",
        apart <= CORE_WAIT_DRIFT,
        f"a note on the same share where it is beyond {CORE_WAIT_SHARE}, and none below",
        shown(found),
        where,
    )


def _memory(folder: Run) -> Iterator[str]:
    plan, result = mapping(folder.result.get("memory_plan")), folder.result
    engine, alone = mapping(folder.config.get("engine")), "rack_nodes" not in result
    wrong = [name for name, value in plan.items() if name != "device" and not _is_size(value)]
    if wrong:
        yield f"memory_plan {', '.join(f'{name} {plan[name]}' for name in wrong)}"
        return
    available = plan.get("available_bytes")
    if available is not None and sum(plan.get(name, 0) for name in _SIZES) > available:
        yield f"parts of memory_plan are {sum(plan.get(name, 0) for name in _SIZES):,} bytes of {available:,} available"
    for name in _CONFIGURED_SIZES if alone else ():
        if name in plan and engine.get(name) not in (None, "auto", plan[name]):
            yield f"memory_plan {name} {plan[name]}, {CONFIG} {engine[name]}"
    tokens, pages, page = engine.get("cache_tokens"), plan.get("pages"), plan.get("page_size")
    if alone and isinstance(tokens, int) and pages is not None and page and pages != tokens // page:
        yield f"memory_plan pages {pages:,} of {page}, {CONFIG} cache_tokens {tokens:,}"
    logged = set(folder.series["pages"].to_pylist())
    if pages is not None and logged and pages not in logged:
        yield f"memory_plan pages {pages:,}, {SERIES} {', '.join(map(str, sorted(logged)[:3]))}"
    yield from _of_the_shape(folder, plan)
    yield from _of_the_machine(folder, plan)


def _of_the_shape(folder: Run, plan: Mapping[str, Any]) -> Iterator[str]:
    """Weights and cache of a model whose shape is known; a folder of somebody's may have a published name."""
    model = _shape(folder)
    device, engine = plan.get("device"), mapping(folder.config.get("engine"))
    if model is None or folder.result.get("precision") not in get_args(Precision) or device not in ("cpu", "cuda"):
        return
    precision = str(folder.result["precision"])
    by_row = engine.get("fp8_scales") == "row" and find_scheme(precision).fp8_scales is not None
    scheme = find_scheme(precision, "row" if by_row else None)
    try:
        part = sharded(model, engine.get("tensor_parallel") or 1)
        weights = weight_bytes(part, scheme, device)
    except (MegatokenError, TypeError, ZeroDivisionError):
        yield f"engine.tensor_parallel {engine.get('tensor_parallel')}, which {model.name} cannot be"
        return
    told = plan.get("weights_bytes")
    if told is not None and not math.isclose(told, weights, rel_tol=WEIGHTS_TOLERANCE):
        yield f"weights_bytes {told:,}, {model.name} in {precision} on {device} has {weights:,}"
    if {"cache_bytes", "pages", "page_size"} <= plan.keys():
        page = plan["page_size"] * bytes_per_token(part, scheme, device)
        if not plan["pages"] * page <= plan["cache_bytes"] <= (plan["pages"] + 1) * page:  # one page takes what is cut
            yield f"cache_bytes {plan['cache_bytes']:,}, {plan['pages']:,} pages of {model.name} have {page:,} each"


def _shape(folder: Run) -> ModelConfig | None:
    name = folder.config.get("model")
    if folder.result.get("model") != name:  # run_folder.configuration says so
        return None
    if name in SHAPES and folder.result.get("random_weights") is True:
        return SHAPES[str(name)]
    if name != REFERENCE or folder.config.get("random_weights") is True:
        return None
    file = model_folder(REFERENCE) / "config.json"
    return ModelConfig.from_hugging_face(read_json_object(file)[0], file)


def _of_the_machine(folder: Run, plan: Mapping[str, Any]) -> Iterator[str]:
    """Resident and available memory lie between the weights and the memory of the machine, where both are its own."""
    result = folder.result
    told = mapping(folder.environment.get("memory")).get("total_bytes")
    total: float = told if isinstance(told, int) else math.inf
    on_cpu = plan.get("device") == "cpu" and "rack_nodes" not in result
    available, weights, peak = plan.get("available_bytes"), plan.get("weights_bytes"), result.get("peak_memory_bytes")
    if on_cpu and available is not None and available > total:
        yield f"available_bytes {available:,} of a machine with {total:,}"
    if not isinstance(peak, int):
        return
    if peak > total:
        yield f"peak_memory_bytes {peak:,} of a machine with {total:,}"
    alone = (mapping(folder.config.get("engine")).get("tensor_parallel") or 1) == 1
    if on_cpu and alone and weights is not None and peak < weights:
        yield f"peak_memory_bytes {peak:,}, below weights_bytes {weights:,}"


def _subject(folder: Run, log: DetailLog | None) -> Iterator[str]:
    result = folder.result
    name, source = result.get("data_set"), result.get("data_set_source")
    is_path = isinstance(source, str) and re.fullmatch(r"\S*/[^/\s]+\.\w+", source) is not None
    if is_path and name is not None and PurePath(str(source)).name != name:
        yield f"data_set {name}, data_set_source {source}"
    if log is not None and "soak" not in result:
        yield from _rows(folder, log)
    target, engine = mapping(result.get("target")), mapping(folder.config.get("engine"))
    steps = target.get("steps_in_flight")
    if steps is not None and engine.get("overlap") is not None and steps != 1 + engine["overlap"]:
        yield f"target.steps_in_flight {steps}, {CONFIG} overlap {engine['overlap']}"
    name = "target_step_seconds"
    if name in target and name in engine and target[name] != engine[name]:
        yield f"target.{name} {target[name]}, {CONFIG} {engine[name]}"
    if "rack_nodes" in result:  # whose nodes have machines and sizes of their own
        return
    gpus = [gpu["name"] for gpu in folder.environment.get("gpus") or ()]
    device = target.get("device")
    real = isinstance(device, str) and not target.get("simulated_gpu")
    planned = mapping(result.get("memory_plan")).get("device")
    if real and planned is not None and (device == "cpu") is not (planned == "cpu"):
        yield f"target.device {device}, memory_plan device {planned}"
    if real and gpus and device not in (*gpus, "cpu"):
        yield f"target.device {device}, {ENVIRONMENT} {', '.join(dict.fromkeys(gpus))}"
    if "fp8_scales" in target and (target["fp8_scales"] is not None) is not (result.get("precision") == "fp8"):
        yield f"precision {result.get('precision')}, target.fp8_scales {target['fp8_scales']}"
    for key in ("threads", "tensor_parallel"):
        if key in target and engine.get(key) not in (None, target[key]):
            yield f"target.{key} {target[key]}, {CONFIG} {engine[key]}"


def _rows(folder: Run, log: DetailLog) -> Iterator[str]:
    """Rows of the data set behind those of LoadGen's library: all of them, the first, or spread evenly over them.

    The first in accuracy mode, spread where the library is smaller, again and again where it is larger.
    """
    rows, library = folder.result.get("data_set_rows"), whole(log, "qsl_reported_total_count")
    if not isinstance(rows, int) or not library or library > MOST_LIBRARY_ROWS:
        return
    if rows < 1:
        yield f"data_set_rows {rows}"
        return
    places = np.arange(library)
    spread = library < rows and folder.result.get("mode") == "performance"
    behind = np.unique(places * rows // library if spread else places % rows)
    asked = np.unique(folder.requests["sample_index"].to_numpy())
    sampled = samples_answers(log)
    if sampled and library != rows:
        yield f"data_set_rows {rows:,}, LoadGen's library of all of them has {library:,}"
    foreign = np.setdiff1d(asked, behind)
    unasked = len(behind) - len(asked) if len(folder.requests) >= library and not sampled else 0
    if len(foreign) or unasked > 0:
        told = f"asks for {count_of(len(foreign), 'other row')}" if len(foreign) else f"leaves {unasked:,} of them out"
        yield f"data_set_rows {rows:,}, of which LoadGen's library of {library:,} {told}"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
