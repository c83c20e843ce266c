"""Tests against a target: warm-up, then one test from LoadGen's start to a verdict; also for probes and repeats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.accuracy.gate import Gate, Judgement
from megatoken.analysis.machine import utc_text
from megatoken.config import RunConfig
from megatoken.datasets.requests import Dataset
from megatoken.engine.process_memory import collect_garbage_rarely
from megatoken.hardware.host_sensors import PowerMeter
from megatoken.hardware.inventory import peak_memory_bytes
from megatoken.harness.client_capacity import measure_client_capacity
from megatoken.harness.loadgen import LoadGenTest, TestSettings
from megatoken.harness.loadgen_plan import (
    OFFERED_SHARES,
    learning_seconds,
    library_to_data_set,
    own_load,
    plan_test,
    resolve_test,
    run_limits,
)
from megatoken.harness.measurement import Measurement
from megatoken.harness.progress import Progress
from megatoken.harness.qualification import prediction_facts
from megatoken.harness.recording import interrupted_by_errors, record
from megatoken.harness.result import asked_facts, concluded, end_notes
from megatoken.harness.saturation import Saturation, SaturationWatch
from megatoken.harness.sizing import estimate_latency, estimate_rate
from megatoken.harness.stop import Stop, StopSignals
from megatoken.harness.text_stages import Codec, TextStages
from megatoken.mlperf.detail_log import DetailLog
from megatoken.mlperf.rules import ClientCapacity
from megatoken.runs.reasons import Reason, reason
from megatoken.runs.tables import SampleRow
from megatoken.runs.writer import RunFolder
from megatoken.targets import Target

if TYPE_CHECKING:
    import pyarrow as pa

WATCH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class TestSession:
    """What all tests of one command share."""

    __test__ = False  # not a test of pytest's

    config: RunConfig  # what to run
    data_set: Dataset  # the requests; the target can serve every one
    target: Target  # what serves them; no one else may use it meanwhile
    facts: Mapping[str, Any]  # fields of ``result.json`` about model and data set; the target adds its own
    progress: Progress  # where to report how far it is
    text: TextStages | None  # where prompts and answers are text within the measured time
    client: ClientCapacity | None  # what the client can send without a model, if the scenario has latency limits
    gate: Gate | None  # what the answers are compared with before there is a verdict, if anything
    power_meter: PowerMeter | None  # reads the power of the whole system, if the user has a meter
    silences: tuple[str, ...] = ()  # what the warm-up showed of a server that stopped answering

    @classmethod
    def start(
        cls,
        config: RunConfig,
        data_set: Dataset,
        target: Target,
        facts: Mapping[str, Any],
        progress: Progress,
        tokenizer: Codec | None = None,
        gate: Gate | None = None,
    ) -> tuple[TestSession, TestSettings, float]:
        """Warms up and plans. Arguments as the attributes; ``tokenizer`` is the model's, for ``config.text``.

        Returns:
            The session, what to ask of LoadGen, and the samples per second to offer.
        """
        collect_garbage_rarely()
        text = None
        if config.text and tokenizer is not None:
            progress.stage("making the text of every prompt")
            text = TextStages(tokenizer, data_set)
        silences: list[str] = []
        rate = _warm_up(config, data_set, target, progress, silences.append)
        offered = config.rate or OFFERED_SHARES.get(config.scenario, 1.0) * rate
        settings = plan_test(config, len(data_set.requests), offered)
        client = None
        if run_limits(config) is not None:
            progress.stage("measuring what the client can send without a model")
            client = measure_client_capacity(settings, data_set)
        facts = {**facts, "estimated_samples_per_second": rate}
        meter = PowerMeter(config.power_meter) if config.power_meter is not None else None
        session = cls(config, data_set, target, facts, progress, text, client, gate, meter, tuple(silences))
        return session, settings, offered

    def create_folder(
        self,
        config: RunConfig,
        settings: TestSettings,
        out: Path,
        name: str | None = None,
        stop: StopSignals | None = None,
    ) -> RunFolder:
        """Creates the run folder of one test, which ``stop`` will name if a signal ends the process at once."""
        resolved = resolve_test(config, settings)
        facts = {
            **self.facts,
            "notes": [*self.facts.get("notes", ()), *_cut_short(config, resolved)],
            **self.target.facts(),
            "data_set_rows": len(self.data_set.requests),
            **asked_facts(config, settings),
            "client_capacity": asdict(self.client) if self.client else None,
        }
        folder = record(resolved, facts, out, name=name)
        if stop is not None:
            stop.parting_words = f"stopped at once; {says_interrupted(folder)}"
            stop.write_seconds = folder.write_seconds
        return folder

    def run(
        self,
        config: RunConfig,
        settings: TestSettings,
        folder: RunFolder,
        stop: Stop,
        watch: SaturationWatch | None = None,
        start_wall_ns: int | None = None,
    ) -> Saturation | None:
        """Runs one test until it ends, a signal comes or ``watch`` finds the rate too high; ends the folder.

        ``watch`` sees every sample, and may end the test. ``start_wall_ns``: when LoadGen starts (``time.time_ns()``);
        None: at once.

        Returns:
            Why ``watch`` ended the test early, if it did.
        """
        rows = len(self.data_set.requests)
        library = library_to_data_set(config.mode, settings.library_rows, rows)
        with interrupted_by_errors(folder, self.progress, says_interrupted(folder)):
            with LoadGenTest(settings, folder.mlperf_directory, start_wall_ns) as test:
                watched = _Watched(folder, watch) if watch else folder
                measurement = Measurement(
                    test,
                    settings,
                    library,
                    self.data_set,
                    self.target,
                    watched,
                    self.progress,
                    self.text,
                    power_meter=self.power_meter,
                )
                saturation = self._drive(measurement, stop, watch)
                if not stop.received and saturation is None:
                    self._conclude(config, folder, measurement, test.finish())
                    return None
                folder.add_facts({"peak_memory_bytes": peak_memory_bytes(), "notes": end_notes(folder.facts)})
                if saturation is not None:
                    folder.interrupt(saturation.reason)
                else:
                    issued = {"issued" if test.all_issued else "issued_so_far": measurement.issued}
                    folder.interrupt(reason("INTERRUPTED", signal=stop.received, ended=measurement.ended, **issued))
            self.target.cancel_all()
            return saturation

    def _drive(self, measurement: Measurement, stop: Stop, watch: SaturationWatch | None) -> Saturation | None:
        looked = 0.0
        saturation = None
        while not measurement.over and not stop.received and saturation is None:
            measurement.step()
            if watch and (now := measurement.elapsed_seconds()) - looked >= WATCH_SECONDS:
                looked, saturation = now, watch.look(now, *measurement.unended())
        if stop.received or saturation is not None:
            measurement.interrupt()
        measurement.note_state()
        return saturation

    def _conclude(self, config: RunConfig, folder: RunFolder, measurement: Measurement, log: DetailLog) -> None:
        requests, _ = folder.end_recording()
        folder.add_facts(
            {"core_wait_share": measurement.core_wait.share(), **self.target.outcome(measurement.start_ns)}
        )
        folder.add_facts(
            {
                "notes": [*end_notes(folder.facts, requests), *measurement.findings()],
                "wall_clock_step_seconds": measurement.wall_clock.largest_seconds,
                **({"output_characters": self.text.characters} if self.text else {}),
            }
        )
        if (document := self.facts.get("qualification_document")) is not None:
            settings = config.model_dump(mode="json")
            folder.add_facts({"prediction": prediction_facts(document, folder.facts, settings, requests)})
        judged = self._judge_answers(folder, requests)
        result = concluded(folder.facts, log, requests, judged, compliance=config.compliance is not None)
        folder.finish({**result, "ended_at": utc_text(datetime.now(UTC))})

    def _judge_answers(self, folder: RunFolder, requests: pa.Table) -> Judgement:
        if self.gate is None:
            return Judgement({}, ())
        self.progress.stage("judging the answers")
        return self.gate.judge(folder.path, requests)


def _cut_short(given: RunConfig, resolved: RunConfig) -> list[Reason]:
    """The note that an exact number of samples leaves no room for the duration that was asked for."""
    asked, kept = given.min_duration_seconds, resolved.min_duration_seconds
    if given.samples is None or asked is None or kept is None or kept >= asked:
        return []
    text = f"--samples {given.samples} ends the run, so --min-duration {asked:g} does not apply; leave one of them out"
    return [reason("NOTE", text=text)]


def says_interrupted(folder: RunFolder) -> str:
    """What is left of a run that has no verdict."""
    return f"{folder.path} says INTERRUPTED and keeps what was done"


def _warm_up(
    config: RunConfig, data_set: Dataset, target: Target, progress: Progress, note: Callable[[str], None]
) -> float:
    """Samples per second expected of the target: when it is full, or in SingleStream one after the other."""
    load = own_load(config, len(data_set.requests))
    if config.scenario == "singlestream":
        text = f"warming up for {config.warm_up_seconds:g} s"
        progress.stage(text)
        waiting = partial(progress.waiting, text)
        return 1 / estimate_latency(target, data_set, config.warm_up_seconds, load, waiting)
    learning = learning_seconds(config, len(data_set.requests))
    at_least = "at least " if learning and not data_set.fills_limit.all() else ""
    text = f"warming up for {at_least}{config.warm_up_seconds:g} s"
    progress.stage(text)
    waiting = partial(progress.waiting, text)
    return estimate_rate(target, data_set, config.warm_up_seconds, learning, load, note, waiting)


class _Watched:
    """A run folder that passes its samples on to a watch."""

    def __init__(self, folder: RunFolder, watch: SaturationWatch) -> None:
        self._folder = folder
        self._watch = watch
        self.add_series = folder.add_series
        self.add_token_times = folder.add_token_times
        self.add_facts = folder.add_facts

    def add_samples(self, rows: Sequence[SampleRow]) -> None:
        self._watch.add_samples(rows)
        self._folder.add_samples(rows)
