"""The rate that a plan starts from, with unit, scope and state: from a run folder, or as a number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from megatoken.analysis.machine import accelerator_name, contentions, rate_state, run_accelerators
from megatoken.analysis.statistics import leading_rates
from megatoken.engine.config import SHAPES
from megatoken.errors import UsageError
from megatoken.planning.assumptions import LARGEST_NUMBER, Assumptions
from megatoken.planning.figures import STATES_TO_GIVE, Input, State, state_of_runs
from megatoken.planning.schedule import PRECISIONS, Lengths, Replica, find_replica, offline_rate
from megatoken.planning.service_level import ServiceLevel, Verdict, how_well_kept, judge_run
from megatoken.text import count_of, exact, precise

if TYPE_CHECKING:
    from megatoken.runs.run import Run

Scope = Literal["accelerator", "node", "rack", "system"]
Counted = Literal["output", "total"]
SCENARIOS = ("offline", "server", "interactive")

_Choice = TypeVar("_Choice")

MIX = "benchmark_input_tokens_per_output_token"
LENGTH = "benchmark_output_tokens_per_request"
DEFAULT_MODEL = "llama2-70b"  # the benchmark whose lengths are the defaults
RATE_UNIT = "output tokens/s, whole run"
LIMITS = ("ttft_limit_seconds", "tpot_limit_seconds")
P99_OVER_MEAN = "p99_over_mean_latency"
MOST_SPEED = 4.0  # a rate further from the cost model is of another model or precision
MOST_INPUT = 1_000_000
MOST_ACCELERATORS = 1_000_000_000
DEFAULT_MIX = (
    "Input tokens per output token are assumed to be those of MLPerf's llama2-70b; for another benchmark give"
    " --input-per-output."
)


@dataclass(frozen=True, slots=True)
class Throughput:
    """A rate of output tokens, and the requests at which it was reached.

    ``accelerators`` is the number that produces the rate, None if unknown. ``input_tokens_per_output_token`` and
    ``output_tokens_per_request`` describe the requests. ``scenario`` is offline, server, interactive or None.
    ``service`` says whether the run kept the service level, if the rate is of a run. ``replica`` is what the cost model
    knows step times of; None where it does not know the model or the accelerator, as ``notes`` say. ``counted`` are the
    tokens that the rate counted as it was given.
    """

    output_tokens_per_second: float
    scope: Scope
    accelerators: int | None
    accelerator: str | None
    input_tokens_per_output_token: float
    output_tokens_per_request: float
    scenario: str | None
    inputs: tuple[Input, ...]
    state: State
    source: str
    mix_state: State
    service: Verdict | None = None
    notes: tuple[str, ...] = ()
    replica: Replica | None = None
    counted: Counted = "output"

    @property
    def lengths(self) -> Lengths:
        """Mean lengths of the requests at which the rate was reached."""
        prompt = self.input_tokens_per_output_token * self.output_tokens_per_request
        return Lengths(prompt, prompt, self.output_tokens_per_request)

    @property
    def speed(self) -> float:
        """The rate over the rate that the cost model gives the same replicas in Offline."""
        assert self.replica is not None
        return self.output_tokens_per_second / self.replicas / offline_rate(self.replica, self.lengths)

    @property
    def replicas(self) -> float:
        """Copies of the model; a part of one where the rate is of fewer accelerators than one copy takes."""
        assert self.replica is not None and self.accelerators is not None
        return self.accelerators / self.replica.ranks

    @property
    def total_tokens_per_second(self) -> float:
        """Input and output tokens together."""
        return self.output_tokens_per_second * (1 + self.input_tokens_per_output_token)

    @property
    def label(self) -> str:
        """The rate and its scope, for titles."""
        count = f", {self.accelerators:,} accelerators" if self.accelerators and self.accelerators > 1 else ""
        return f"{precise(self.output_tokens_per_second)} output tokens/s per {self.scope}{count} ({self.state})"


def from_number(
    tokens_per_second: float,
    *,
    scope: str,
    counted: str = "output",
    accelerators: int | None = None,
    accelerator: str | None = None,
    scenario: str | None = None,
    state: str = "unverified",
    source: str = "given on the command line",
    input_tokens_per_output_token: float | None = None,
    model: str | None = None,
    precision: str | None = None,
    assumptions: Assumptions,
) -> Throughput:
    """A published or otherwise known rate of ``tokens_per_second``, produced by ``accelerators`` accelerators.

    ``counted`` is output, or total if the rate counts input tokens too. ``accelerator`` is a name as in
    ``gpu_specs.csv``. Rates of the scenarios server and interactive already respect latencies. Without
    ``input_tokens_per_output_token`` of the requests at that rate, it is assumed. ``model`` is a named shape, by
    default that of the benchmark; ``precision`` by default the fastest of the accelerator.

    Raises:
        UsageError: a number is out of range, or a scope, unit, state, model or precision is unknown.
    """
    check_positive("--tokens-per-second", tokens_per_second, "12000")
    checked_scope: Scope = choose("--per", scope, get_args(Scope))
    checked_counted: Counted = choose("--counted", counted, get_args(Counted))
    checked_state: State = choose("--state", state, STATES_TO_GIVE)
    if scenario is not None:
        choose("--scenario", scenario, SCENARIOS)
    if accelerators is not None:
        check_count("--accelerators", accelerators, 1, MOST_ACCELERATORS)
    if checked_scope == "accelerator":
        if accelerators not in (None, 1):
            raise UsageError(
                f"a rate per accelerator is the rate of 1 accelerator, got {accelerators}; or give another --per"
            )
        accelerators = 1
    if input_tokens_per_output_token is None:
        mix, mix_input = assumptions[MIX], assumptions.inputs([MIX])[0]
        notes = [] if mix_input.state == "given" else [DEFAULT_MIX]
    else:
        mix = input_tokens_per_output_token
        if not 0 <= mix <= MOST_INPUT:
            raise UsageError(
                f"input tokens per output token: expected 0 to {MOST_INPUT:,}, such as --input-per-output 3.5,"
                f" got {exact(mix)}"
            )
        mix_input, notes = Input(MIX, mix, "input tokens / output token", "given", source), []
    rate = tokens_per_second / (1 + mix) if checked_counted == "total" else tokens_per_second
    unit = f"{checked_counted} tokens/s per {checked_scope}"
    if model is not None:
        choose("--model", model, tuple(SHAPES))
    if precision is not None:
        choose("--precision", precision, PRECISIONS)
    throughput = Throughput(
        output_tokens_per_second=rate,
        scope=checked_scope,
        accelerators=accelerators,
        accelerator=accelerator,
        input_tokens_per_output_token=mix,
        output_tokens_per_request=assumptions[LENGTH],
        scenario=scenario,
        inputs=(Input("rate", tokens_per_second, unit, checked_state, source), mix_input),
        state=checked_state,
        source=source,
        mix_state=mix_input.state,
        notes=tuple(notes),
        counted=checked_counted,
    )
    return _with_replica(throughput, model, precision)


def _with_replica(throughput: Throughput, model: str | None, precision: str | None) -> Throughput:
    """The throughput with its replica, or with a note that says why memory and latency are not computed."""
    found: Replica | str = "the number of accelerators is unknown"
    if throughput.accelerators is not None:
        found = find_replica(model or DEFAULT_MODEL, precision, throughput.accelerator, throughput.lengths)
    if isinstance(found, str):
        note = f"KV memory is not checked: {found}. Give --accelerators and --accelerator, such as GB300."
        return replace(throughput, notes=(*throughput.notes, note))
    calibrated = replace(throughput, replica=found)
    if not 1 / MOST_SPEED <= calibrated.speed <= MOST_SPEED:
        note = (
            f"KV memory is not checked: the rate is {precise(calibrated.speed)} times what the cost model gives"
            f" {found.model} in {found.precision} on {found.gpu}; give the --model and --precision of the rate."
        )
        return replace(throughput, notes=(*throughput.notes, note))
    source = "given" if model else "the benchmark of the default lengths"
    inputs = (
        Input("model", found.model, "shape", "given" if model else "assumed", source),
        Input(
            "precision",
            found.precision,
            f"on {count_of(found.ranks, found.gpu)} per replica",
            "given" if precision else "assumed",
            "given" if precision else f"the fastest that {found.gpu} has",
        ),
        Input("kv_cache", found.cache_tokens, "tokens per replica", "estimate", "memory plan of the engine"),
    )
    return replace(calibrated, inputs=(*throughput.inputs, *inputs))


def from_runs(
    runs: Sequence[Run], assumptions: Assumptions, *, accelerators: int | None = None, accelerator: str | None = None
) -> Throughput:
    """The rate of a run, see ``leading_rates``; for repeats of one test, the geometric mean.

    Interrupted runs are left out if others finished; the service level is that of the run that kept it least.
    ``accelerators`` and ``accelerator`` are for folders that do not state them, as of an engine on CPUs.

    Raises:
        UsageError: a run completed no sample, or used another number of accelerators.
    """
    from megatoken.analysis.repeats import interval, whole_runs

    whole = whole_runs(runs)
    for run in whole:
        if not run.result.get("output_tokens_per_second"):
            raise UsageError(f"{run.path}: no sample was completed, so there is no rate")
    if accelerators is not None:
        check_count("--accelerators", accelerators, 1, MOST_ACCELERATORS)
    first = whole[0]
    nodes = len(first.result.get("nodes") or [None])
    used = run_accelerators(first) or accelerators
    if accelerators not in (None, used):
        raise UsageError(f"{first.path}: expected {accelerators} accelerators, the run used {used}")
    rates = interval([float(leading_rates(run.result)["output_tokens_per_second"]) for run in whole])
    tokens_out, samples = (sum(run.result[name] for run in whole) for name in ("output_tokens", "samples_completed"))
    tokens_in = [run.result["input_tokens"] for run in whole]
    source = f"{first.path} ({first.verdict})" if len(runs) == 1 else _mean_of(whole)
    verdicts = [run.verdict for run in whole]
    state = state_of_runs(verdicts, rate_state(first))
    notes, mix, mix_input = [*_run_notes(runs, whole, rates)], assumptions[MIX], assumptions.inputs([MIX])[0]
    if None in tokens_in:
        notes.append(DEFAULT_MIX)
    else:
        mix = sum(tokens_in) / tokens_out
        mix_state = state_of_runs(verdicts, "measured")
        mix_input = Input(MIX, mix, "input tokens / output token", mix_state, source)
    level = ServiceLevel(*(assumptions[name] for name in LIMITS))
    throughput = Throughput(
        output_tokens_per_second=rates["geometric_mean"],
        scope="system" if nodes > 1 else "node",
        accelerators=used,
        accelerator=accelerator_name(first) or accelerator,
        input_tokens_per_output_token=mix,
        output_tokens_per_request=tokens_out / samples,
        scenario=first.result.get("scenario"),
        inputs=(
            Input("rate", rates["geometric_mean"], RATE_UNIT, state, source, rates["low"], rates["high"]),
            mix_input,
        ),
        state=state,
        source=source,
        mix_state=mix_input.state,
        service=min((judge_run(run, level) for run in whole), key=how_well_kept),
        notes=tuple(notes),
    )
    model, precision = first.result.get("model"), first.result.get("precision")
    return _with_replica(throughput, model, precision) if throughput.accelerator else throughput


def _mean_of(runs: Sequence[Run]) -> str:
    verdicts = ", ".join(dict.fromkeys(run.verdict for run in runs))
    return f"geometric mean of {count_of(len(runs), 'repeat')} in {runs[0].path.parent} ({verdicts})"


def _run_notes(runs: Sequence[Run], whole: Sequence[Run], rates: Mapping[str, Any]) -> Iterator[str]:
    from megatoken.analysis.repeats import shared_notes

    where = runs[0].path if len(runs) == 1 else runs[0].path.parent
    yield from (f"{where}: {note}" for note in shared_notes(runs))
    if rates["low"] is not None:
        yield (
            f"The rate is the geometric mean of {count_of(len(whole), 'repeat')}; its 95 % confidence interval is"
            f" {precise(rates['low'])} to {precise(rates['high'])} output tokens/s, and applies to all results."
        )
    if left_out := [run.path.name for run in runs if run not in whole]:
        yield f"Interrupted runs are not in the mean: {', '.join(left_out)}"
    yield from contentions(whole)
    for run in whole:
        if run.verdict not in ("MEASURED", "VALID"):
            yield f"{run.path} ended {run.verdict}, so the plan rests on an unreliable run."
    result = whole[0].result
    if result.get("scenario") in ("server", "interactive") and "rate_search" not in result:
        yield (
            f"The rate of a {result['scenario']} run is the offered load, if the system keeps up; for the highest rate,"
            " run with --find-rate."
        )


def check_positive(name: str, value: float, example: str) -> None:
    """Refuses a number that is not positive or has an impossible size; ``example`` is a good one. Raises UsageError."""
    if not 1 / LARGEST_NUMBER <= value <= LARGEST_NUMBER:
        limits = f"from {1 / LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}" if value > 0 else "above 0"
        raise UsageError(f"{name}: expected a number {limits}, such as {name} {example}, got {value:g}")


def check_count(name: str, value: int, least: int, most: int) -> None:
    """Refuses a whole number out of range. Raises UsageError."""
    if not least <= value <= most:
        raise UsageError(f"{name}: expected {least} to {most:,}, such as {name} {max(1, least)}, got {value:,}")


def choose(name: str, value: str, known: tuple[_Choice, ...]) -> _Choice:
    """``value`` as one of ``known``; UsageError if it is none of them."""
    for one in known:
        if one == value:
            return one
    raise UsageError(f"{name}: expected one of {', '.join(map(str, known))}, got '{value}'")
