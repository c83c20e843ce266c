"""Run folders for the tests: the real LoadGen and real folders, under a round cut down to 24 rows and 0.3 s.

``direct`` calls LoadGen itself, which accepts one test a process, so ``make`` has it done by another:
python making.py JSON.
"""

import json
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import megatoken
from cli_support import ENVIRONMENT, TIMEOUT_SECONDS
from forks import forked
from megatoken.runs.reasons import reason

HELD_OUT = Path(megatoken.__file__).parent / "data" / "reference_model" / "held_out.jsonl"
ROWS = 24
SECONDS = 0.3
QUERIES = 720  # a multiple of the rows, above the 459 that early stopping wants at least
MODEL = {
    **{"model": "llama2-70b", "weights": "5f3c", "random_weights": False, "precision": "bf16"},
    **{"data_set": "rows", "data_set_sha256": "ab12"},
}
RULES_NOTE, COMPLIANCE_NOTE = (
    reason("RULES_SCOPE", not_judged="model and data set"),
    reason("COMPLIANCE_TEST", test="TEST06"),
)
TEST06 = {"accuracy_log_rng_seed": 720381539243781796, "accuracy_log_sampling_target": 100, "min_query_count": 100}
ATTEMPTS = 3
END_TOKEN = 2


def answer_tokens(row: int) -> int:
    return 60 + row % 9  # long enough for an accuracy log that has to be truncated


def write_lengths(path: Path) -> Path:
    rows = "".join(f"{10 + row},{answer_tokens(row)}\n" for row in range(ROWS))
    path.write_text("input_tokens,output_tokens\n" + rows)
    return path


def make(**arguments: Any) -> Path:
    """Makes a VALID run folder by ``direct`` in a process of its own; a busy machine may need several attempts."""
    reasons: list[Any] = []
    for _ in range(ATTEMPTS):
        with forked(__file__, json.dumps(arguments), environment=ENVIRONMENT) as process:
            out, err = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 0, err
        result = json.loads((Path(out) / "result.json").read_text())
        if result["verdict"] == "VALID":
            return Path(out)
        reasons.append(result["reasons"])
    raise AssertionError(reasons)


def write_prompts(path: Path) -> Path:
    """The first rows of the held-out set that are short."""
    rows = [(line, json.loads(line)) for line in HELD_OUT.read_text().splitlines(keepends=True)]
    short = [line for line, row in rows if len(row["prompt"]) <= 200 and 4 <= len(row["reference"]) <= 14]
    path.write_text("".join(short[:ROWS]))
    return path


def offline(
    out: str,
    mode: str = "performance",
    facts: dict[str, Any] | None = None,
    seeds: list[int] | None = None,
    test06: bool = False,
) -> Path:
    """The shape tiny through the harness, as ``megatoken run --rules`` does; with ``facts`` it passes as another.

    The compliance test is about natural ends of answers, so there it is the reference model.
    """
    import pytest

    from megatoken.config import RunConfig
    from megatoken.engine.schemes import find_scheme
    from megatoken.harness.prepare import prepare
    from megatoken.harness.progress import Progress
    from megatoken.harness.run import run_scenario
    from megatoken.mlperf.rounds import round_of_seeds, round_seeds
    from megatoken.runs.plan_hash import part_hashes, plan_of_run
    from megatoken.runs.run import read_run
    from megatoken.targets.in_process import InProcessBackend
    from short_rounds import shorten_rounds

    claimed = round_of_seeds(seeds or round_seeds()["v5.1"])
    settings: dict[str, Any] = {"rules": claimed, "mode": mode, "warm_up_seconds": 0.1, "engine": {"threads": 1}}
    settings["precision"] = "fp32"  # most processors multiply bf16 three times as slowly
    if test06:
        settings |= {"compliance": "TEST06", "prompts": write_prompts(Path(out) / MODEL["data_set"])}
    else:
        settings |= {"model": "tiny", "lengths": write_lengths(Path(out) / MODEL["data_set"])}
        if mode == "performance":
            settings |= {"samples": 2 * ROWS, "min_duration_seconds": SECONDS}
    with pytest.MonkeyPatch.context() as patch:
        shorten_rounds(patch, ROWS, SECONDS)
        config, progress = RunConfig(out=Path(out), **settings), Progress(quiet=True)
        backend = InProcessBackend(config, progress)
        prepared = prepare(config, backend)
        known = {**prepared.facts(), **(facts or {})}
        with backend.load() as target:
            path = run_scenario(prepared.config, prepared.data_set, target, known, progress, gate=prepared.gate)
    configuration = path / "config.yaml"  # of the model that ``known`` says it was
    lines = configuration.read_text()
    for key in ("model", "precision"):
        lines = lines.replace(f"{key}: {getattr(prepared.config, key)}\n", f"{key}: {known[key]}\n")
    configuration.write_text(lines)
    run = read_run(path)
    target = {**run.result["target"], "formats": find_scheme(known["precision"]).formats()}
    again = {**run.result, "plan_sha256": part_hashes(plan_of_run(run)), "target": target}
    (path / "result.json").write_text(json.dumps(again))
    return path


def direct(
    out: str,
    scenario: str,
    mode: str = "performance",
    model: str = "llama2-70b",
    test06: bool = False,
    seeds: list[int] | None = None,
    facts: dict[str, Any] | None = None,
    repeat_conf: bool = False,
) -> Path:
    """LoadGen itself, answered at once with token ids; the folder ends as the harness ends it.

    With ``repeat_conf`` LoadGen logs an error, which the folder overlooks: it says VALID.
    """
    import mlperf_loadgen as lg
    import numpy as np
    import pytest

    from megatoken.accuracy.gate import ComplianceGate, Judgement
    from megatoken.analysis.summary import summarise_run
    from megatoken.hardware.inventory import take_inventory
    from megatoken.harness.result import concluded
    from megatoken.mlperf.detail_log import read_finished_log
    from megatoken.mlperf.rounds import round_of_seeds, round_seeds
    from megatoken.runs.tables import SampleRow, SeriesRow
    from megatoken.runs.writer import RunFolder, run_name
    from short_rounds import shorten_rounds

    name = "Server" if scenario == "interactive" else {"singlestream": "SingleStream"}.get(scenario, scenario.title())
    asked = seeds or list(round_seeds()["v5.1"])
    claimed = round_of_seeds(asked)
    keys = ("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed")
    config = {"scenario": scenario, "mode": mode, "rules": claimed, **({"compliance": "TEST06"} if test06 else {})}
    known = {
        **MODEL,
        "notes": [RULES_NOTE, *([COMPLIANCE_NOTE] if test06 else [])],
        "mode": mode,
        "rules": claimed,
        "data_set_rows": ROWS,
        "benchmark": model.replace("llama3_1", "llama3.1"),
        "seeds": {key.removesuffix("_rng_seed"): seed for key, seed in zip(keys, asked, strict=True)},
        "client_capacity": None,
        "target": {"device": "cpu"},
        **(facts or {}),
    }
    folder = RunFolder.create(
        Path(out),
        run_name(datetime.now(UTC), scenario, model),
        {"model": known["model"], **config},
        take_inventory(),
        scenario=scenario,
        summarise=summarise_run,
        facts=known,
    )
    user_conf = folder.mlperf_directory / "user.conf"
    user_conf.write_text(
        f"*.*.min_duration = {round(SECONDS * 1000)}\n*.*.min_query_count = {QUERIES}\n*.Server.target_qps = 1500\n"
        f"*.SingleStream.target_latency = 0.5\n*.Offline.target_qps = 1000\n"
        f"*.*.performance_sample_count_override = {ROWS}\n"
    )
    settings = lg.TestSettings()
    for _ in range(2 if repeat_conf else 1):
        loadgen_model = f"{model}-interactive" if scenario == "interactive" else model
        assert settings.FromConfig(str(user_conf), loadgen_model, name) == 0
    settings.scenario = getattr(lg.TestScenario, name)
    settings.mode = lg.TestMode.AccuracyOnly if mode == "accuracy" else lg.TestMode.PerformanceOnly
    for key, seed in zip(keys, asked, strict=True):
        setattr(settings, key, seed)
    if test06:
        for key, value in {**TEST06, "min_duration_ms": 0, "sample_concatenate_permutation": False}.items():
            setattr(settings, key, value)
    logs = lg.LogSettings()
    logs.enable_trace = False
    logs.log_output.outdir = str(folder.mlperf_directory)
    logs.log_output.copy_summary_to_stdout = False

    rows: list[SampleRow] = []
    began = time.monotonic()
    lock = threading.Lock()

    def issue(samples: list[Any]) -> None:
        for place, sample in enumerate(samples):
            if place == len(samples) - 1 and mode == "performance" and name != "Server" and not test06:
                time.sleep(SECONDS * 1.2 if name == "Offline" else 0.0006)
            tokens = np.arange(1000 + sample.index, 1000 + sample.index + answer_tokens(sample.index), dtype="<i4")
            tokens[-1] = END_TOKEN
            sent = time.monotonic() - began
            if name != "Offline":
                lg.FirstTokenComplete([lg.QuerySampleResponse(sample.id, tokens.ctypes.data, 4)])
            response = lg.QuerySampleResponse(sample.id, tokens.ctypes.data, tokens.nbytes, len(tokens))
            lg.QuerySamplesComplete([response])
            with lock:
                done = time.monotonic() - began
                scheduled = 0.0 if name == "Offline" else sent
                row = (len(rows), sample.index, scheduled, scheduled, done, done, 9, len(tokens), "stop", "here")
                rows.append(SampleRow(*row))

    sut = lg.ConstructSUT(issue, lambda: None)
    library = lg.ConstructQSL(ROWS, ROWS, lambda _: None, lambda _: None)
    began = time.monotonic()
    lg.StartTestWithLogSettings(sut, library, settings, logs, str(user_conf / "audit"))
    folder.add_samples(rows)
    ended = max(row.last_token_seconds for row in rows)
    output = sum(row.output_tokens for row in rows)
    processed = output + sum(row.input_tokens for row in rows)
    folder.add_series(SeriesRow(ended, "here", 0, output, processed, 0, 0, 0, 0, 0, 0, 0))
    requests, _ = folder.end_recording()
    log = read_finished_log(folder.mlperf_directory, "loadgen_version")
    offered: dict[str, float | None] = dict.fromkeys(
        ("offered_samples_per_second", "ttft_limit_seconds", "tpot_limit_seconds")
    )
    if name == "Server":
        limits = [log.get(f"requested_server_{limit}_latency") / 1e9 for limit in ("ttft", "tpot")]
        offered = dict(zip(offered, [log.get("effective_target_qps"), *limits], strict=True))
    folder.add_facts({**offered, "core_wait_share": 0.0, "wall_clock_step_seconds": 0.0})
    judged = Judgement({}, ())
    if test06:
        judged = ComplianceGate(name == "Offline", [END_TOKEN]).judge(folder.path, requests)
    with pytest.MonkeyPatch.context() as patch:
        shorten_rounds(patch, ROWS, SECONDS)
        result = concluded(folder.facts, log, requests, judged, compliance=test06)
    folder.finish({**result, **({"verdict": "VALID", "reasons": []} if repeat_conf else {})})
    return folder.path


if __name__ == "__main__":
    print(direct(**json.loads(sys.argv[1])), end="")
