"""What an MLPerf round demands of a llama2-70b Offline log, what a log does not meet of it, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatoken.harness.loadgen import LoadGenLog, Seeds
from megatoken.results import Reason, Verdict


@dataclass(frozen=True, slots=True)
class Round:
    """The numbers of one MLPerf Inference round for the closed division (mlcommons/inference, submission checker)."""

    name: str
    seeds: Seeds
    min_duration_seconds: float
    data_set_rows: int
    min_samples: int


ROUNDS = {
    "v5.1": Round(
        name="v5.1",
        seeds=Seeds(qsl=1780908523862526354, sample_index=14771362308971278857, schedule=18209322760996052031),
        min_duration_seconds=600.0,
        data_set_rows=24_576,
        min_samples=24_576,
    )
}
DEFAULT_ROUND = "v5.1"  # its seeds are used, and its rules listed, when none are claimed


class UnmetRule(Reason):
    """A rule the log does not meet, with the number found and the number required."""

    found: float | str
    required: float | str


def unmet_rules(round_: Round, mode: str, log: LoadGenLog, data_set_rows: int) -> list[UnmetRule]:
    """Every rule of ``round_`` that a complete LoadGen log fails, judged by what it says, not by what was asked for.

    ``data_set_rows``: of which LoadGen's library repeats some if it has more rows, and leaves some out if it has fewer.
    """
    judge_log = _unmet_by_performance if mode == "performance" else _unmet_by_any
    return list(judge_log(round_, log, data_set_rows))


def judge(claimed: bool, unmet: Sequence[UnmetRule], failed_samples: int, samples: int) -> tuple[Verdict, list[Reason]]:
    """The verdict on a run that came to its end, and its reasons.

    Args:
        claimed: whether the run claims the rules.
        unmet: the rules its log does not meet.
        failed_samples: samples that ended with an error; no run with one is healthy.
        samples: samples issued.
    """
    reasons: list[Reason] = []
    if failed_samples:
        reasons.append(Reason(code="FAILED_SAMPLES", message=f"{failed_samples:,} of {samples:,} samples failed"))
    if claimed:
        reasons.extend(unmet)
    if reasons:
        return Verdict.INVALID, reasons
    return (Verdict.VALID if claimed else Verdict.MEASURED), []


def _unmet_by_performance(round_: Round, log: LoadGenLog, data_set_rows: int) -> Iterator[UnmetRule]:
    values = log.values
    ran_seconds = values["result_max_latency_ns"] / 1e9
    asked_seconds = values["effective_min_duration_ms"] / 1e3
    required_seconds = round_.min_duration_seconds
    if ran_seconds < required_seconds:
        yield _unmet(
            "MIN_DURATION", ran_seconds, required_seconds, f"ran {ran_seconds:.4g} s of {required_seconds:g} s"
        )
    elif asked_seconds < required_seconds:
        message = f"LoadGen was asked to run for {asked_seconds:g} s of {required_seconds:g} s"
        yield _unmet("MIN_DURATION", asked_seconds, required_seconds, message)

    samples = values["effective_samples_per_query"]
    if samples < round_.min_samples:
        message = f"issued {samples:,} of {round_.min_samples:,} samples"
        yield _unmet("MIN_SAMPLES", samples, round_.min_samples, message)

    seeds = Seeds(*(values[f"effective_{name}_rng_seed"] for name in ("qsl", "sample_index", "schedule")))
    if seeds != round_.seeds:
        yield _unmet("SEEDS", str(seeds), str(round_.seeds), f"the seeds are not those of round {round_.name}")

    issued, rows = values["generated_samples_per_query"], values["qsl_reported_performance_count"]
    rows = min(rows, data_set_rows)
    if not values["effective_sample_concatenate_permutation"] or issued % rows:
        message = f"issued {issued:,} samples of {rows:,} rows, not every row equally often"
        yield _unmet("EQUAL_ISSUE", issued, -(-issued // rows) * rows, message)

    if values["result_validity"] != "VALID":
        cause = " ".join(str(values.get("result_invalid_reason", "")).split()) or "no reason given"
        yield _unmet("LOADGEN_INVALID", values["result_validity"], "VALID", f"LoadGen says {cause}")
    yield from _unmet_by_any(round_, log, data_set_rows)


def _unmet_by_any(round_: Round, log: LoadGenLog, data_set_rows: int) -> Iterator[UnmetRule]:
    rows = min(log.values["qsl_reported_total_count"], data_set_rows)
    if rows != round_.data_set_rows:
        message = f"drew from {rows:,} rows; MLPerf's data set has {round_.data_set_rows:,}"
        yield _unmet("DATA_SET_SIZE", rows, round_.data_set_rows, message)
    if log.errors:
        message = f"LoadGen logged {len(log.errors):,} error{'s'[: len(log.errors) > 1]}, the first: {log.errors[0]}"
        yield _unmet("LOADGEN_ERRORS", len(log.errors), 0, message)


def _unmet(code: str, found: float | str, required: float | str, message: str) -> UnmetRule:
    return UnmetRule(code=code, message=message, found=found, required=required)
