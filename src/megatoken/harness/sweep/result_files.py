"""Writes the files of a point that MLPerf Endpoints' tools read, into the folder ``mlperf`` of its run folder.

The layout is that of a run of the reference client. ``point.yaml`` has what the run knows; what only the submitter can
say comes from the file of disclosures, or stays empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatoken.config import RunConfig
from megatoken.files import plain, redact, storage_error, to_json, write_text
from megatoken.harness.sweep.ruled import ALL_AT_ONCE, TEXTS, RuledPlan
from megatoken.mlperf.endpoints import endpoint_rules
from megatoken.mlperf.endpoints_report import event, moments_of, report_of, sample_uuid, summary_of

if TYPE_CHECKING:
    import pyarrow as pa

EVENTS = "events.jsonl"
DISCLOSED = (  # what only the submitter can say of a point, section 8.3
    *("division", "model_precision", "link_to_model", "dataset_link", "shared_src", "shared_docs"),
)
API_TYPES = {"chat": "openai", "completions": "openai_completions"}


def write_result_files(
    folder: Path, plan: RuledPlan, value: float, point: Mapping[str, Any], requests: pa.Table, config: RunConfig
) -> None:
    """Writes all of them.

    Args:
        folder: with the texts of the answers, which become part of the events.
        plan: of the sweep.
        value: load of the point.
        point: its field ``ruled``.
        requests: table of ``SampleRow``.
        config: resolved.

    Raises:
        StorageError: a file cannot be written.
    """
    settings = _settings(plan, value, len(requests))
    run_config = {
        "load_pattern": settings["load_pattern"],
        "warmup": settings["warmup"],
        **{name: settings["runtime"][name] for name in ("scheduler_random_seed", "dataloader_random_seed")},
    }
    summary = plain(summary_of(requests, run_config, streamed=plan.streamed))
    (folder / "performance").mkdir(exist_ok=True)
    write_text(folder / "performance" / "result_summary.json", to_json(summary))
    write_text(folder / "report.txt", report_of(summary))
    write_text(folder / "config.yaml", _yaml(redact(_configuration(plan, value, settings, config))))
    write_text(folder / "point.yaml", _yaml({**_point(plan, value, point), **plan.disclosures}))
    rows = dict(zip(requests["sample_id"].to_pylist(), requests["sample_index"].to_pylist(), strict=True))
    index = {plan.prepared.data_set.name: {sample_uuid(sample): row for sample, row in rows.items()}}
    write_text(folder / "sample_idx_map.json", json.dumps(index))
    _write_events(folder, requests)


def _write_events(folder: Path, requests: pa.Table) -> None:
    """Joins times and texts; texts are read one by one, since all of them may be larger than memory."""
    ids = requests["sample_id"].to_pylist()
    texts, draft = folder / TEXTS, folder / f".{EVENTS}.tmp"
    moments = moments_of(requests)
    try:
        with texts.open("rb") as source, draft.open("w", encoding="utf-8") as out:
            places: dict[int, int] = {}
            at = 0
            for line in source:
                places[json.loads(line)["sample"]] = at
                at += len(line)

            def write(kind: str, moment_ns: int, sample: int | None = None, pieces: list[str] | None = None) -> None:
                out.write(json.dumps(event(kind, moment_ns, sample, pieces)) + "\n")

            start_ns = moments[0][0] if moments else 0
            write("session.started", start_ns)
            write("session.start_performance_tracking", start_ns)
            for moment_ns, kind, row in moments:
                sample, pieces = ids[row], None
                if kind == "complete":
                    pieces = []
                    if sample in places:
                        source.seek(places[sample])
                        answer = json.loads(source.readline())
                        pieces = [answer["text"][: answer["first"]], answer["text"][answer["first"] :]]
                write(f"sample.{kind}", moment_ns, sample, pieces)
            end_ns = moments[-1][0] if moments else 0
            write("session.stop_performance_tracking", end_ns)
            write("session.ended", end_ns)
        draft.rename(folder / EVENTS)
        texts.unlink()
    except OSError as error:
        raise storage_error(folder / EVENTS, error) from error


def _settings(plan: RuledPlan, value: float, issued: int) -> dict[str, Any]:
    rules, offline = endpoint_rules(plan.version), value == ALL_AT_ONCE
    pattern = rules["offline_load_pattern" if offline else "load_pattern"]
    asked = plan.facts(value, 0)
    return {
        "runtime": {
            "min_duration_ms": round(1000 * asked["asked_window_seconds"]),
            "max_duration_ms": 0,
            "n_samples_to_issue": issued,
            "scheduler_random_seed": plan.seeds["scheduler_rng_seed"],
            "dataloader_random_seed": plan.seeds["sample_index_rng_seed"],
        },
        "load_pattern": {
            "type": pattern,
            "target_qps": None,
            "target_concurrency": None if offline else round(value),
        },
        "client": {"stream_all_chunks": True},
        "warmup": {"enabled": False, "n_requests": None, "salt": False},
    }


def _configuration(plan: RuledPlan, value: float, settings: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    data_set = plan.prepared.data_set
    api = config.endpoint.api or "completions"
    return {
        "name": f"{plan.version}-{'offline' if value == ALL_AT_ONCE else f'c{value:g}'}",
        "version": "1.0",
        "type": "offline" if value == ALL_AT_ONCE else "online",
        "model_params": {
            "name": plan.prepared.model.name,
            "seed": plan.seeds["model_seed"],
            "max_new_tokens": int(data_set.output_limits.max()),
            "streaming": "on" if plan.streamed else "off",
            "tokenizer_name": config.model,
        },
        "datasets": [{"name": data_set.name, "type": "performance", "path": data_set.source}],
        "settings": settings,
        "endpoint_config": {
            "endpoints": list(config.endpoint.addresses) if config.endpoint.urls else [],
            "api_key": None,
            "api_type": API_TYPES.get(api, api),
        },
    }


def _point(plan: RuledPlan, value: float, point: Mapping[str, Any]) -> dict[str, Any]:
    rules, offline = endpoint_rules(plan.version), value == ALL_AT_ONCE
    model = plan.benchmark or plan.prepared.model.name
    data_set = rules["models"][model]["data_set"] if model in rules["models"] else plan.prepared.data_set.name
    settings = _settings(plan, value, point["requests_issued"])
    return {
        "concurrency": point["concurrency"],
        "region": point["region"] or "submitters_choice",
        "offline": "dedicated" if offline else "none",
        "max_supported_concurrency": plan.values[-1],
        "model_name": model,
        "dataset": data_set,
        "dataset_name": data_set,
        "dataset_type": "Performance",
        "seed_set": plan.seed_set,
        "target_cohort": rules["seed_sets"][plan.seed_set]["cohort"],
        "runtime_settings": {
            "load_pattern": settings["load_pattern"]["type"],
            "min_duration_ms": settings["runtime"]["min_duration_ms"],
            "min_sample_count": plan.rows,
            "stream_all_chunks": True,
            "runtime": {
                **{name: plan.seeds[name] for name in ("scheduler_rng_seed", "sample_index_rng_seed", "model_seed")},
                "salt_seed": plan.salt_seed(value),
            },
        },
        "warmup": {
            "duration_s": 0.0,
            "requests_issued": 0,
            "requests_completed": 0,
            "data_source": "no warm-up; the ramp is cropped from the steady-state window",
            "concurrency": 0,
            "initialization_steps": [],
        },
        **({} if offline else {"steady_state": _steady_state(point)}),
        **dict.fromkeys(DISCLOSED, ""),
    }


def _steady_state(point: Mapping[str, Any]) -> dict[str, Any]:
    window = point["window"]
    block: dict[str, Any] = {
        "status": point["status"],
        "verdict": window["shape"],
        "state": dict(window["states"] or {}),
    }
    if window["start"] is not None:
        passes = window["end"] - window["start"]
        block["window"] = {
            "super_pass_start": window["start"],
            "super_pass_end": window["end"] - 1,
            "super_pass_size": window["super_pass_rows"],
            "n_samples": passes * window["super_pass_rows"],
            "duration_s": window["seconds"],
        }
    if window["level_shift"] is not None:
        block["anomaly"] = {"delta_pct": 100 * window["level_shift"]}
    return block


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(plain(values), sort_keys=False, allow_unicode=True)
