"""``megatoken sweep``: one point after the other on one target, each a run folder, and the document on all of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.analysis.machine import utc_text
from megatoken.analysis.summary import summarise_run
from megatoken.analysis.sweep import SWEEP, no_window, saturated
from megatoken.analysis.sweep_point import parts_of, point_figures
from megatoken.config import RunConfig
from megatoken.errors import MegatokenError, UsageError
from megatoken.files import to_json, write_text
from megatoken.hardware.inventory import take_inventory
from megatoken.harness.loadgen_plan import run_limits
from megatoken.harness.measurement import Measurement
from megatoken.harness.prepare import NO_DATA_SET, Prepared
from megatoken.harness.progress import Progress
from megatoken.harness.result import concluded_point, end_notes, run_notes
from megatoken.harness.sizing import estimate_rate
from megatoken.harness.stop import StopSignals
from megatoken.harness.sweep.neighbour import neighbour
from megatoken.harness.sweep.plan import Plan, Setup, SweepPlan
from megatoken.harness.sweep.point import PointLoad
from megatoken.harness.sweep.result_files import write_result_files
from megatoken.harness.sweep.ruled import RuledPlan
from megatoken.mlperf.endpoints import judged_sweep
from megatoken.runs.reasons import reason
from megatoken.runs.run import Run, read_run
from megatoken.runs.writer import RunFolder, new_folder, run_name
from megatoken.targets import RemoteTarget, Target
from megatoken.text import precise

DRAIN_WINDOWS = 1.0  # how long the last requests of a point may take to end, in windows


def run_sweep(
    prepared: Prepared,  # what to run
    config: RunConfig,  # resolved
    plan: Plan,  # the loads
    target: Target,  # what serves; no other load may use it meanwhile
    progress: Progress,  # where to report how far it is
    neighbour: Sequence[str] = (),  # flags of a second load; every point then runs again next to it
) -> Path:
    """Warms up and runs the points.

    Returns:
        The sweep's folder: a run folder for each point, and ``sweep.json``.

    Raises:
        StorageError: a folder cannot be written.
    """
    if isinstance(plan, SweepPlan) and plan.trace is not None:
        model = prepared.model
        if model.shape is None or model.prompts == "text" or model.max_length is None:
            raise UsageError(
                "--trace: prompts are random token ids, and this server is asked in text; give the model that it "
                "serves (--model DIR or SHAPE), and --endpoint.api completions"
            )
        sizes = {"vocabulary_size": model.shape.vocabulary_size, "max_length": model.max_length}
        replayed = plan.trace.dataset(**sizes, seed=config.seed)
        others = [note for note in prepared.notes if note["message"] not in prepared.data_set.notes]
        notes = (*others, *(reason("NOTE", text=note) for note in replayed.notes))
        prepared = replace(prepared, data_set=replayed, notes=notes)
    text = f"warming up for {config.warm_up_seconds:g} s"
    progress.stage(text)
    first = next(plan.loads(1.0))
    data_set = plan.setup(first, prepared.data_set, (config.seed,), None).data_set
    if prepared.data_set is NO_DATA_SET:  # the load brings its own
        prepared = replace(prepared, data_set=data_set)
    if isinstance(target, RemoteTarget) and not isinstance(plan, SweepPlan):
        target.keep_every_text()
    waiting = partial(progress.waiting, text)
    rate = estimate_rate(target, data_set, config.warm_up_seconds, 0.0, plan.own_load(), waiting=waiting)
    name = run_name(datetime.now(UTC), "sweep", config.model)
    with StopSignals() as stop, new_folder(config.out / name) as path:
        sweep = _Sweep(prepared, config, plan, target, progress, stop, path, tuple(neighbour))
        try:
            sweep.run(rate)
        finally:
            progress.clear()
    return path


@dataclass(slots=True)
class _Sweep:
    prepared: Prepared
    config: RunConfig
    plan: Plan
    target: Target
    progress: Progress
    stop: StopSignals
    path: Path
    neighbour: tuple[str, ...]

    def run(self, estimated_rate: float) -> None:
        """Every load as often as ``config.repeat`` says, until one ends the sweep or a signal comes.

        A load without a window ends it too; the points before it stay. Raises MegatokenError if it is the first.
        """
        runs: list[Run] = []
        points: list[dict[str, Any]] = []
        for number, value in enumerate(self.plan.loads(estimated_rate), 1):
            for repeat in range(self.config.repeat):
                run = self._point(number, value, repeat)
                whole = self._record(runs, run)
                if whole and self.neighbour and not self.stop.received:
                    out = self.path.with_name(f"{self.path.name}-neighbour")
                    with neighbour(self.neighbour, self.config.endpoint.addresses, out):
                        whole = self._record(runs, self._point(number, value, repeat, shared=True))
                if self.stop.received or not whole:
                    return
                for part in parts_of(run):
                    points.append(point_figures(part))
                    self._report(points[-1])
                if isinstance(self.plan, RuledPlan):
                    self.plan.note(run.result)
            if points[-1]["ended_by"] or (self.plan.finds_its_end and saturated(points)):
                return

    def _record(self, runs: list[Run], run: Run) -> bool:
        """Adds a run to the sweep and its document; returns whether it has something to count."""
        runs.append(run)
        write_text(self.path / SWEEP, to_json(judged_sweep(runs, self.path.name)))
        if parts_of(run) or self.stop.received:
            return True
        why = f"{run.path}: {no_window(run)['message']}"
        if len(runs) == 1:
            raise MegatokenError(
                f"{why}. Check that the target still answers; requests.parquet has the error of each request"
            )
        self.progress.note(f"{why}; the sweep ends, and keeps the loads before it")
        return False

    def _report(self, point: Mapping[str, Any]) -> None:
        ttft, latency = (point[name]["p50"] for name in ("ttft_seconds", "latency_seconds"))
        none = point["unjudged"] or "no answer"
        times = f"TTFT p50 {1000 * ttft:.0f} ms, latency p50 {latency:.2f} s" if ttft is not None else none
        ended = f"; {point['ended_by']['message']}" if point["ended_by"] else ""
        self.progress.note(
            f"{point['kind']} {precise(point['value'])}: {precise(point['output_tokens_per_second'])} tokens/s, "
            f"{times}{ended}"
        )

    def _point(self, number: int, value: float, repeat: int, *, shared: bool = False) -> Run:
        seed = self.config.seed
        facts = {**self.plan.facts(value, seed), "neighbour": shlex.join(self.neighbour) if shared else None}
        name = f"{number:02}-{facts['kind']}-{facts['value']:g}-{repeat + 1}"
        folder = self._folder(f"{name}-shared" if shared else name, facts)
        self.stop.parting_words = f"stopped at once; {folder.path} says INTERRUPTED and keeps what was done"
        self.stop.write_seconds = folder.write_seconds
        try:
            setup = self.plan.setup(value, self.prepared.data_set, (seed, repeat), folder.mlperf_directory)
            self._measure(setup, folder, value)
        except BaseException as error:
            folder.interrupt(reason("INTERRUPTED", error=type(error).__name__, cause=str(error)))
            if isinstance(error, MegatokenError):
                error.args = (f"{error}; {folder.path} says INTERRUPTED and keeps what was done",)
            raise
        return read_run(folder.path)

    def _folder(self, name: str, load: Mapping[str, Any]) -> RunFolder:
        facts = {**self.prepared.facts(), **self.target.facts()}
        limits = run_limits(self.config)
        assert limits is not None  # the configuration has the scenario server
        more = {
            "notes": [*run_notes(facts), reason("SWEEP_POINT"), *self.plan.notes()],
            "mode": self.config.mode,
            "rules": None,
            "text": self.config.text,
            "ttft_limit_seconds": limits.ttft_seconds,
            "tpot_limit_seconds": limits.tpot_seconds,
            "load": load,
        }
        return RunFolder.create(
            self.path,
            name,
            self.config.model_dump(mode="json"),
            take_inventory(),
            scenario="sweep",
            facts={**facts, **more},
            summarise=summarise_run,
        )

    def _measure(self, setup: Setup, folder: RunFolder, value: float) -> None:
        load = PointLoad(setup.load, self.plan.phases, early=isinstance(self.target, RemoteTarget))
        data_set, answers = setup.data_set, setup.answers
        window = self.plan.phases.window_seconds
        measurement = Measurement(
            load,
            None,
            np.arange(len(data_set.requests)),
            data_set,
            self.target,
            folder,
            self.progress,
            planned_seconds=None if window is None else self.plan.phases.warm_up_seconds + window,
            keeps_token_times=True,
            answers=answers,
        )
        while not load.all_issued and not self.stop.received:
            measurement.step()
        deadline = measurement.elapsed_seconds() + DRAIN_WINDOWS * (window or 0.0)
        while not measurement.over and not self.stop.received and measurement.elapsed_seconds() < deadline:
            measurement.step()
        measurement.abandon()
        measurement.note_state()
        facts = {**folder.facts["load"], "window_seconds": load.window_seconds(measurement.start_ns)}
        folder.add_facts({"load": {**facts, "ended_by": load.ended_by}})
        if self.stop.received:
            folder.add_facts({"notes": end_notes(folder.facts)})
            folder.interrupt(
                reason("INTERRUPTED", signal=self.stop.received, ended=measurement.ended, issued_so_far=load.issued)
            )
            return
        requests, _ = folder.end_recording()
        folder.add_facts({"notes": [*end_notes(folder.facts, requests), *measurement.findings()]})
        if answers is not None:
            answers.close()
        concluded = concluded_point(folder.facts, requests)
        if isinstance(self.plan, RuledPlan):
            write_result_files(folder.mlperf_directory, self.plan, value, concluded["ruled"], requests, self.config)
        folder.finish({**concluded, "ended_at": utc_text(datetime.now(UTC))})
