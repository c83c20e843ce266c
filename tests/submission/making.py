"""Run folders for the tests: the real LoadGen and real folders, under a round cut down to 24 rows and 0.3 s.

``direct`` calls LoadGen itself, which accepts one test a process, so ``make`` has it done by another:
python making.py JSON.
"""

import json
import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import megatoken
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
TIMEOUT_SECONDS = 200


def answer_tokens(row: int) -> int:
    return 60 + row % 9  # long enough for an accuracy log that has to be truncated


def write_lengths(path: Path) -> Path:
    rows = "".join(f"{10 + row},{answer_tokens(row)}\n" for row in range(ROWS))
    path.write_text("input_tokens,output_tokens\n" + rows)
    return path


def make(**arguments: Any) -> Path:
    """Makes a run folder by ``direct`` in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, json.dumps(arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout)


def write_prompts(path: Path) -> Path:
    lines = HELD_OUT.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:ROWS]))
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
    import gc

    import pytest

    from megatoken.config import RunConfig
    from megatoken.harness.prepare import prepare
    from megatoken.harness.progress import Progress
    from megatoken.harness.run import run_scenario
    from megatoken.mlperf.rounds import round_of_seeds, round_seeds
    from megatoken.targets.in_process import InProcessBackend
    from short_rounds import shorten_rounds

    claimed = round_of_seeds(seeds or round_seeds()["v5.1"])
    settings: dict[str, Any] = {"rules": claimed, "mode": mode, "warm_up_seconds": 0.1, "engine": {"threads": 1}}
    if test06:
        settings |= {"compliance": "TEST06", "prompts": write_prompts(Path(out) / MODEL["data_set"])}
    else:
        settings |= {"model": "tiny", "lengths": write_lengths(Path(out) / MODEL["data_set"])}
        if mode == "performance":
            settings |= {"samples": 4 * ROWS, "min_duration_seconds": SECONDS}
    with pytest.MonkeyPatch.context() as patch:
        shorten_rounds(patch, ROWS, SECONDS)
        config, progress = RunConfig(out=Path(out), **settings), Progress(quiet=True)
        backend = InProcessBackend(config, progress)
        prepared = prepare(config, backend)
        known = {**prepared.facts(), **(facts or {})}
        with backend.load() as target:
            path = run_scenario(prepared.config, prepared.data_set, target, known, progress, gate=prepared.gate)
    gc.unfreeze()  # a run takes what is there out of the collector's hands
    configuration = path / "config.yaml"  # of the model that ``known`` says it was
    lines = configuration.read_text().replace(f"model: {prepared.config.model}\n", f"model: {known['model']}\n")
    configuration.write_text(lines)
    return path


def direct(
    out: str,
    scenario: str,
    mode: str = "performance",
    model: str = "llama2-70b",
    test06: bool = False,
    seeds: list[int] | None = None,
    verdict: str | None = None,
    facts: dict[str, Any] | None = None,
    repeat_conf: bool = False,
) -> Path:
    """LoadGen itself, answered at once with token ids; the folder is that of a harness."""
    import mlperf_loadgen as lg
    import numpy as np

    from megatoken.analysis.summary import summarise_run
    from megatoken.hardware.inventory import take_inventory
    from megatoken.harness.result import loadgen_facts
    from megatoken.mlperf.detail_log import read_finished_log
    from megatoken.mlperf.rounds import round_seeds
    from megatoken.runs.tables import SampleRow, SeriesRow
    from megatoken.runs.writer import RunFolder, run_name

    name = "Server" if scenario == "interactive" else {"singlestream": "SingleStream"}.get(scenario, scenario.title())
    told = f"{model}-interactive" if scenario == "interactive" else model
    environment = take_inventory()
    known = {**MODEL, "mode": mode, "rules": "v5.1", "data_set_rows": ROWS, "target": {"device": "cpu"}}
    known |= {"notes": [], **(facts or {})}
    folder = RunFolder.create(
        Path(out),
        run_name(datetime.now(UTC), scenario, model),
        {"model": known["model"], "scenario": scenario, "mode": mode},
        environment,
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
        assert settings.FromConfig(str(user_conf), told, name) == 0
    settings.scenario = getattr(lg.TestScenario, name)
    settings.mode = lg.TestMode.AccuracyOnly if mode == "accuracy" else lg.TestMode.PerformanceOnly
    official = round_seeds()["v5.1"]
    keys = ("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed")
    for key, seed in zip(keys, seeds or official, strict=True):
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
    folder.add_series(SeriesRow(0.1, "here", 0, sum(row.output_tokens for row in rows), 0, 0, 0, 0, 0, 0, 0, 0))
    log = (folder.mlperf_directory / "mlperf_log_detail.txt").read_text()
    valid = mode == "accuracy" or test06 or '"result_validity", "value": "VALID"' in log
    said = verdict or ("VALID" if valid else "INVALID")
    reasons = [] if said == "VALID" else [{"code": "LOADGEN_INVALID", "message": "of the test"}]
    read = read_finished_log(folder.mlperf_directory, "loadgen_version")
    asked: dict[str, Any] = {}
    if name == "Server":
        ttft, tpot = (read.get(f"requested_server_{limit}_latency") / 1e9 for limit in ("ttft", "tpot"))
        asked = {"offered_samples_per_second": 1500.0, "ttft_limit_seconds": ttft, "tpot_limit_seconds": tpot}
    if mode == "performance":
        limit = max(0.01, 0.05 * asked.get("ttft_limit_seconds", 0.0))
        asked["send_lag_limit_seconds"] = None if name == "Offline" else limit
    names = (key.removesuffix("_rng_seed") for key in keys)
    asked["seeds"] = {name: getattr(settings, key) for name, key in zip(names, keys, strict=True)}
    folder.finish({"verdict": said, "reasons": reasons, **asked, **loadgen_facts(scenario, read)})
    return folder.path


if __name__ == "__main__":
    print(direct(**json.loads(sys.argv[1])), end="")
