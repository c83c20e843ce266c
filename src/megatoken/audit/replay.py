"""Recompute ``result.json`` with the functions that wrote it, from the logs and tables of its run folder, and compare.

Independent formulas that could show a wrong writer are in the tests of the rooms that own the functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatoken.accuracy.gate import Judgement
from megatoken.analysis.statistics import ARRIVING, Samples, percentiles
from megatoken.analysis.summary import summarise_run
from megatoken.audit.differences import SAME, Difference, differences
from megatoken.audit.discovery import below
from megatoken.audit.finding import Observation, Severity, outcome, shown
from megatoken.audit.folder import LOGGED, TABLES, RunFolder, compared
from megatoken.audit.replay_answers import UnknownError
from megatoken.errors import MegatokenError
from megatoken.files import mapping, mappings, plain
from megatoken.harness.result import concluded, concluded_point, concluded_soak, core_wait_notes, run_notes
from megatoken.harness.together import concluded_nodes, gathered, joined_tables, node_starts
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.run_figures import in_seconds, samples_answers
from megatoken.runs.run import NODES, REQUESTS, RESULT, SCHEMA_VERSION, SERIES, Run, read_run
from megatoken.text import is_number

ANSWERS = ("ACCURACY", "ANSWERS", "COMPLIANCE")  # codes of reasons that follow from the answers alone
MOST_UNWRITTEN_SECONDS = 30  # rows of the series that a killed process may have written since the metrics
MOST_OFFSET_SECONDS = 60.0  # of a node's clock, without a doubt about it
_SENTENCES = frozenset(("message", "notes", "basis", "reason", "formula", "statement", "observations"))
_SENTENCES |= {"coefficient_of_variation_formula"}  # for people; other versions word them in another way


@compared("run_folder.metrics", "Metrics follow from the tables", "Every number can be recomputed.", TABLES)
def metrics(folder: RunFolder) -> list[Difference]:
    """A process that was killed may have written rows after it last wrote the metrics, which are of the rows before."""
    run = folder.run
    known = {name: value for name, value in run.result.items() if name != "aggregate"}
    found = _metrics(run, known, len(run.requests), len(run.series))
    if folder.finished or not found:
        return found
    ended = [run.result.get(f"samples_{how}") for how in ("completed", "failed", "cancelled")]
    samples = sum(count for count in ended if isinstance(count, int))
    for unwritten in range(min(len(run.series), MOST_UNWRITTEN_SECONDS) + 1):
        if not _metrics(run, known, samples, len(run.series) - unwritten):
            return []
    return found


def _metrics(run: Run, known: Mapping[str, Any], samples: int, rows: int) -> list[Difference]:
    again = plain(summarise_run(known, run.requests.slice(0, samples), run.series.slice(0, rows)))
    stored = run.result.get("tpot_seconds")
    noted = any(note.get("code") == "IN_ONE_PIECE" for note in mappings(run.result.get("notes")))
    if not noted and any(differences(stored, again.get("tpot_seconds"))):
        done = Samples.of(run.requests.slice(0, samples))
        counted = plain(percentiles(done.tpot[done.completed]))  # earlier versions counted answers in one piece
        if not any(differences(stored, counted)):
            again["tpot_seconds"] = counted
    if "node_verdicts" in run.result:
        again.pop("aggregate", None)  # of the nodes' own folders
    return list(differences(run.result, again, ignoring=_SENTENCES))


def _has_verdict(folder: RunFolder) -> bool:
    """Whether the verdict follows from the folder alone, not from those of its nodes."""
    return folder.is_logged or (folder.finished and bool({"soak", "load"} & folder.run.result.keys()))


@compared(
    "run_folder.verdict",
    "Verdict and reasons follow from log and rows",
    "They say what may be quoted.",
    LOGGED,
    _has_verdict,
)
def verdict(folder: RunFolder) -> Sequence[object]:
    """Where the answers cannot be judged here, the reasons that they gave are taken as they are stored."""
    run, log = folder.run, folder.log
    if "load" in run.result:
        return _concluded(run, plain(concluded_point(run.result, run.requests)))
    if "soak" in run.result or log is None:
        return _concluded(run, plain(concluded_soak(run.result, run.environment, run.requests, run.series)))
    if run.result["mode"] == "performance" and "result_validity" not in log.first:
        return ["LoadGen's log has no result_validity, so it was cut off before its results"]
    judged = folder.answers.judged
    if judged is None:
        kept: dict[str, Any] = {name: run.result[name] for name in ("accuracy", "compliance") if name in run.result}
        judged = Judgement(kept, [reason for reason in run.reasons if reason["code"] in ANSWERS])
    again = concluded(run.result, log, run.requests, judged, compliance=samples_answers(log))
    return _concluded(run, plain({**_asked(run, log), **again}))


def _concluded(run: Run, again: Mapping[str, Any]) -> list[Difference]:
    """Fields of the end of a run. Reasons of version 1 had sentences only, so their codes and numbers are compared."""
    if run.result["schema_version"] == SCHEMA_VERSION:
        return list(differences(run.result, again))
    known = {name: value for name, value in again.items() if name in run.result}
    return list(differences(_coded(run.result), _coded(known)))


def _coded(fields: Any) -> Any:
    """The same fields; of reasons only their codes and the numbers that were found and required."""
    if isinstance(fields, list):
        return [_coded(one) for one in fields]
    if not isinstance(fields, Mapping):
        return fields
    if "message" in fields:
        numbers = {name: fields[name] for name in ("found", "required") if is_number(fields.get(name))}
        return {"code": fields.get("code"), **numbers}
    return {name: _coded(value) for name, value in fields.items()}


def _asked(run: Run, log: DetailLog) -> dict[str, Any]:
    """What LoadGen was asked for, under the names of ``result.json``."""
    arriving = run.result["scenario"] in ARRIVING

    def of_server(key: str, per_unit: float) -> float | None:
        return in_seconds(log.number(key), per_unit) if arriving else None

    return {
        "seeds": log.seeds._asdict(),
        "offered_samples_per_second": of_server("effective_target_qps", 1.0),
        "ttft_limit_seconds": of_server("requested_server_ttft_latency", 1e9),
        "tpot_limit_seconds": of_server("requested_server_tpot_latency", 1e9),
    }


@compared("run_folder.notes", "Every note has its cause", "Notes say what a reader must know, such as random weights.")
def notes(folder: RunFolder) -> Iterator[object]:
    """Codes of notes that the fields of a run call for, and its notes on them."""
    result, config = folder.run.result, folder.run.config
    gpu, drawn = mapping(config.get("rack")).get("simulated_gpu"), result.get("random_weights")
    stand_in = mapping(result.get("target")).get("stand_in")
    due = {
        "SIMULATED_GPU": bool(gpu),
        "RANDOM_WEIGHTS": bool(drawn) and not gpu,
        "MADE_UP_TOKENS": bool(stand_in),
        "REFERENCE_MODEL": result.get("model") == config.get("model") == "reference" and not drawn and not stand_in,
        "COMPLIANCE_TEST": bool(config.get("compliance")),
        "RULES_SCOPE": bool(config.get("rules")),
        "SOAK": "soak" in result,
        "SWEEP_POINT": "load" in result,
    }
    by_code = {note["code"]: note for note in result.get("notes") or () if "node" not in note}
    again = {note["code"]: note for note in run_notes({**result, "notes": []})}
    if folder.finished:  # it is added at the end
        facts = dict(result)
        if "late_seconds" not in by_code.get("DRIVER_CORE_WAIT", {"late_seconds": 0}):  # lateness was not looked at
            facts |= {"send_lag_seconds": None, "request_lag_seconds": None}
        limit = {"noted_late_seconds": 0.0} if "DRIVER_CORE_WAIT" in by_code else {}  # earlier versions noted 1 ms
        again |= {note["code"]: note for note in core_wait_notes(result.get("core_wait_share"), facts, **limit)}
        due |= {code: code in again for code in ("CORE_WAIT", "DRIVER_CORE_WAIT")}
    due |= {code: code in again for code in ("NO_KERNELS", "BF16_WIDENED", "NO_GPU")}
    for code, wanted in due.items():
        if wanted is not (code in by_code):
            yield f"{'no ' if wanted else ''}note {code}, which {'has its cause' if wanted else 'has no cause'} here"
        elif wanted and code in again:
            tolerance = SAME if result["schema_version"] == SCHEMA_VERSION else 0.2  # it had whole percents
            yield from differences(by_code[code], again[code], code, relative=tolerance, ignoring=_SENTENCES | {"why"})
    if gpu and str(by_code.get("SIMULATED_GPU", {}).get("gpu")).lower() != str(gpu).lower():
        yield f"note SIMULATED_GPU of {by_code.get('SIMULATED_GPU', {}).get('gpu')}, config.yaml {gpu}"


def _has_nodes(folder: RunFolder) -> bool:
    return folder.finished and "node_verdicts" in folder.run.result and "soak" not in folder.run.result


@compared(
    "run_folder.nodes", "A rack's result follows from its nodes", "No log covers the whole rack.", TABLES, _has_nodes
)
def nodes(folder: RunFolder) -> Iterator[str]:
    """Fields and tables of a rack with a LoadGen for each node, against the run folders of the nodes."""
    run, runs = folder.run, _node_runs(folder)
    rack, verdicts = run.result["rack"], run.result["node_verdicts"]
    offsets = rack["clock_offsets"]
    silent = {loss["node"]: loss["cause"] for loss in rack["lost"] if loss["replica"] is None}
    if silent.keys() != verdicts.keys() - runs.keys():
        yield f"nodes without a verdict are not those in rack.lost: {', '.join(silent) or 'none'}"
    yield from (f"no clock offset of {name}" for name in runs.keys() - {one["node"] for one in offsets})
    yield from (f"rack_nodes of {name} differ" for name, one in runs.items() if _planned(one) != _planned(run))
    tables = joined_tables(runs, node_starts(runs, offsets))
    for file, stored, again in zip((REQUESTS, SERIES), (run.requests, run.series), tables, strict=True):
        if len(stored) != len(again):
            yield f"{file} has {len(stored):,} rows, those of the nodes {len(again):,}"
            continue
        if file == SERIES:  # rows of the same moment have no order
            keys = [(name, "ascending") for name in ("node", "replica", "elapsed_seconds")]
            stored, again = stored.sort_by(keys), again.sort_by(keys)
        for name in stored.column_names:
            if any(differences(stored[name].to_pylist(), again[name].to_pylist(), name)):
                yield f"{name} of {file} differs from the nodes' tables"
    again = {**gathered(run.result, runs, silent, offsets), **concluded_nodes(run.result, runs)}
    yield from map(str, differences(run.result, plain(again), ignoring=_SENTENCES))


def _node_runs(folder: RunFolder) -> dict[str, Run]:
    """The runs of nodes that finished. Raises UnknownError."""
    runs = {}
    for name in (name for name, verdict in folder.run.result["node_verdicts"].items() if verdict is not None):
        path = below(folder.path, f"{NODES}/{name}")
        if f"{path}/{RESULT}" not in folder.tree.files:  # a name may lead out of the folder
            raise UnknownError(f"{NODES}/{name} is missing")
        try:
            runs[name] = read_run(folder.tree.path(path))
        except MegatokenError as error:  # the checks of the nodes' folders say so too
            raise UnknownError(str(error)) from None
    if not runs:
        raise UnknownError("no node finished")
    return runs


def far_clocks(folder: RunFolder) -> list[Observation]:
    """Nodes whose clock offset is so long that runs one after the other would look simultaneous."""
    result = folder.run.result
    if not _has_nodes(folder):
        return []
    most = min([MOST_OFFSET_SECONDS, *(node["duration_seconds"] for node in result["nodes"])])
    far = [one for one in result["rack"]["clock_offsets"] if abs(one["wall_seconds"]) > most]
    expected = "clocks that differ by less than a minute and by less than a node ran"
    found = shown("; ".join(f"{one['node']} {one['wall_seconds']:,.3g} s" for one in far))
    return nodes.observations(outcome(False, expected, found, folder.places(RESULT), Severity.WARN) if far else None)


def _planned(run: Run) -> dict[str, tuple[int, int]]:
    return {entry["node"]: (entry["replicas"], entry["gpus"]) for entry in run.result.get("rack_nodes") or ()}
