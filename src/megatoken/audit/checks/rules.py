"""The rules of MLPerf's closed division that one run can meet or break. Their severity depends on what is claimed."""

from __future__ import annotations

from dataclasses import replace

from megatoken.analysis.standing import answer_length
from megatoken.audit.evidence import Role
from megatoken.audit.finding import Check, Outcome, Reported, Severity, check, outcome, shown
from megatoken.audit.stated import EndpointResult
from megatoken.audit.view import RunView
from megatoken.mlperf import rules
from megatoken.mlperf.benchmarks import Benchmark, benchmarks
from megatoken.mlperf.constraints import SIX_DIGITS
from megatoken.mlperf.detail_log import SEED_KEYS
from megatoken.mlperf.rounds import round_seeds, ruled_rounds
from megatoken.mlperf.rules import Ruling
from megatoken.mlperf.run_figures import whole
from megatoken.text import count_of

Subject = RunView | EndpointResult


def _any_run(run: Subject) -> bool:
    """Compliance tests have settings of their own, and a ranging run only finds the range of the power meter."""
    return run.files.role not in (Role.COMPLIANCE, Role.RANGING) and (run.scenario or run.figures.mode) is not None


def _timed(run: Subject) -> bool:
    return _any_run(run) and run.figures.mode == "PerformanceOnly"


def _with_duration(run: Subject) -> bool:
    return _timed(run) and run.scenario != "MultiStream"


def _of_benchmark(run: Subject) -> bool:
    return _timed(run) and run.benchmark is not None


def _offline(run: Subject) -> bool:
    return _of_benchmark(run) and run.scenario == "Offline"


def _known(run: Subject) -> Benchmark:
    """The benchmark of a run that has one."""
    assert run.benchmark is not None
    return run.benchmark


def _ruled(run: Subject, ruling: Ruling, expected: str, form: str, *keys: str) -> Outcome:
    """A rule that one figure meets or not; ``form`` makes text of a value, and ``expected`` has the one required."""
    found = "not known" if ruling.found is None else form.format(ruling.found)
    return outcome(ruling.holds, expected.format(form.format(ruling.required)), found, run.at(*keys), run.unmet)


def _line(run: RunView, holds: bool | None, expected: str, key: str) -> Outcome:
    """A rule about the line ``key`` of the log."""
    return outcome(holds, expected, run.text(key), run.at(key), run.unmet)


@check("rules.valid", "LoadGen's verdict is VALID", "An INVALID run did not meet its own constraints.", _timed)
def valid(run: RunView) -> Outcome:
    validity = run.detail.get("result_validity")
    found, reported = shown(validity or "no verdict"), None
    if validity not in ("VALID", None):
        reported = Reported(shown(validity), tuple(map(shown, rules.invalid_reasons(run.detail))))
        found = reported.text
    where = run.at("result_validity", "result_invalid_reason", "early_stopping_met")
    holds = validity == "VALID" if validity is not None else None
    return replace(outcome(holds, "VALID", found, where, run.unmet), reported=reported)


@check("rules.no_errors", "The run had no errors", "LoadGen may print VALID although it logged errors.", _any_run)
def no_errors(run: RunView) -> Outcome:
    log = run.detail
    first = log.errors[0] if log.errors else None
    found = f"{count_of(log.error_count, 'error')}, the first: {shown(first.value)}" if first else "none"
    severe = run.rules_claimed or log.get("result_validity") == "INVALID"
    where, otherwise = run.at(first.key if first else "num_errors"), run.unmet if severe else Severity.WARN
    counted = log.number("num_errors")
    found_errors = outcome(not log.error_count, "no line marked as an error", found, where, otherwise)
    return replace(found_errors, fields={} if counted is None else {"num_errors": counted})


@check("rules.mode", "The mode fits the folder", "A performance run says nothing about accuracy.", _any_run)
def mode(run: RunView) -> Outcome | None:
    accuracy = run.files.folder.endswith("/accuracy")
    if not run.rules_claimed or run.files.role is Role.RANGING or not (accuracy or run.files.folder.endswith("/run_1")):
        return None
    wanted, found = "AccuracyOnly" if accuracy else "PerformanceOnly", run.figures.mode
    return outcome(found == wanted, wanted, shown(found), run.at("effective_test_mode"), run.unmet)


@check("rules.seeds", "Official seeds", "No submitter can choose easy samples or a favourable order.", _any_run)
def seeds(run: Subject) -> Outcome:
    mine, wanted = run.figures.round, run.round
    official = f"{wanted}: {', '.join(map(str, round_seeds()[wanted]))}" if wanted else "a round"
    found = f"those of {mine}" if mine else shown(", ".join(map(str, run.seeds)))
    where = run.at(*SEED_KEYS, "scheduler_random_seed", "dataloader_random_seed")
    return outcome(rules.official_seeds(mine, wanted), f"the seeds of {official}", found, where, run.unmet)


@check("rules.benchmark", "The round has the benchmark", "Each round has its own list, limits and targets.", _any_run)
def benchmark(run: RunView) -> Outcome | None:
    """Unknown where the rules of the round or of the benchmark are not known."""
    round_ = run.round or run.figures.round
    mine = [name for name, entry in benchmarks().items() if round_ in entry.rounds]
    found = shown(run.files.benchmark or (run.benchmark.name if run.benchmark else "no benchmark named"))
    known = run.benchmark is not None and round_ in ruled_rounds()
    if not run.rules_claimed:
        return None
    if not known:
        found += f": its rules in {round_ or 'this round'} are not known here, and not all were applied"
    holds = run.benchmark is not None and run.benchmark.name in mine if known else None
    expected = f"a benchmark of {round_}: {', '.join(mine)}" if mine else "a benchmark of a known round"
    return outcome(holds, expected, found, run.at("qsl_reported_total_count"), run.unmet)


@check("rules.data_set", "The complete data set", "A smaller data set is another benchmark.", _any_run)
def data_set(run: RunView) -> Outcome | None:
    if run.benchmark is None:
        return None
    rows = whole(run.detail, "qsl_reported_total_count")
    asked = whole(run.detail, "effective_accuracy_sample_count") if run.is_accuracy else None
    ruling = rules.complete_data_set(rows if asked is None else asked, run.benchmark, accuracy=run.is_accuracy)
    expected = f"{{}}, the data set of {run.benchmark.name}"
    return _ruled(run, ruling, expected, "{:,} rows", "qsl_reported_total_count")


@check("rules.sample_count", "Enough rows in the library", "A smaller library lets caches answer.", _of_benchmark)
def sample_count(run: RunView) -> Outcome:
    key = "effective_performance_sample_count"
    ruling = rules.at_least(whole(run.detail, key) or 0, _known(run).rows)
    return _ruled(run, ruling, "a library of at least {}", "{:,} rows", key)


@check("rules.equal_issue", "Every row equally often", "Answers differ in length.", _of_benchmark)
def equal_issue(run: RunView) -> Outcome:
    holds = run.detail.get(rules.EQUAL_ISSUE) is True
    return _line(run, holds, f"every row issued equally often: {rules.EQUAL_ISSUE} true", rules.EQUAL_ISSUE)


@check("rules.token_latencies", "Token latencies are on", "They give token rate, TTFT and TPOT.", _of_benchmark)
def token_latencies(run: RunView) -> Outcome:
    key = "requested_use_token_latencies"
    return _line(run, run.detail.get(key) is True, "token latencies switched on", key)


@check("rules.min_duration", "The required duration was requested", "Short runs show peaks.", _with_duration)
def min_duration(run: Subject) -> Outcome:
    ruling, keys = rules.long_enough(run.figures.min_duration_seconds), ("effective_min_duration_ms", "min_duration_ms")
    return _ruled(run, ruling, "a minimum duration of at least {}", "{:g} s", *keys)


@check("rules.ran_long_enough", "The run lasted long enough", "The run may not keep to the setting.", _with_duration)
def ran_long_enough(run: Subject) -> Outcome:
    keys = ("result_max_latency_ns" if run.scenario == "Offline" else "power_end", "duration_ns")
    ran = run.ran_seconds
    if ran is not None and run.scenario != "Offline":
        ran *= 1 + SIX_DIGITS  # it follows from a rate of six digits
    until = " until the last query was due" if isinstance(run, RunView) and run.scenario == "Server" else ""
    return _ruled(run, rules.long_enough(ran), "a run of at least {}", f"{{:.1f}} s{until}", *keys)


@check("rules.offline_samples", "Offline: enough samples", "The query holds the data set at least once.", _offline)
def offline_samples(run: Subject) -> Outcome:
    """A log without its line on queries asks for none."""
    figures, rows = run.figures, _known(run).rows
    keys = ("effective_samples_per_query", "effective_min_query_count", "n_samples_issued")
    if isinstance(run, RunView) and not whole(run.detail, keys[1]):
        return _line(run, False, f"one query of at least {rows:,} samples", keys[1])
    samples = figures.samples_issued if figures.samples_requested is None else figures.samples_requested
    return _ruled(run, rules.at_least(samples, rows), "a query of at least {}", "{:,} samples", *keys)


@check("rules.whole_passes", "Offline: whole passes over the data set", "A part favours some rows.", _offline)
def whole_passes(run: RunView) -> Outcome:
    issued, rows = run.figures.samples_issued, _known(run).rows
    found = "not known" if issued is None else f"{count_of(issued, 'sample')}, {issued / rows:g} passes"
    holds, where = None if issued is None else issued % rows == 0, run.at("generated_samples_per_query")
    return outcome(holds, f"whole passes over {rows:,} rows", found, where, run.unmet)


@check("rules.scenario", "The scenario fits the folder", "Limits are chosen by the folder.", _timed)
def scenario(run: Subject) -> Outcome | None:
    folder, ran = run.files.scenario, run.figures.scenario
    if folder is None:
        return None
    wanted = "Server" if folder == "Interactive" else folder
    expected = f"scenario {wanted} in a folder named {folder}"
    found = f"scenario {ran}" if ran else "a load of no MLPerf scenario"
    return outcome(
        None if ran is None else ran == wanted, expected, found, run.at("effective_scenario", "load_pattern")
    )


@check("rules.latency_limits", "TTFT and TPOT within the limits", "Slower answers are of no use.", _of_benchmark)
def latency_limits(run: Subject) -> Outcome | None:
    """99th percentiles, by the limits of the folder's scenario; without a folder by the limits LoadGen was given."""
    if run.scenario not in ("Server", None):
        return None
    name = _limited_scenario(run)
    limits, (ttft, tpot) = _known(run).limits.get(name), run.p99_seconds
    if limits is None or ttft is None or tpot is None:
        return outcome(None, "TTFT and TPOT below the limits", "limits or figures missing", run.at())
    expected = f"{name}: p99 TTFT < {limits.ttft_seconds * 1e3:g} ms and p99 TPOT < {limits.tpot_seconds * 1e3:g} ms"
    found, where = f"{ttft * 1e3:.6g} ms and {tpot * 1e3:.6g} ms", run.at(*rules.P99, "ttft", "tpot")
    return outcome(limits.kept_by(ttft, tpot), expected, found, where, run.unmet)


def _limited_scenario(run: Subject) -> str:
    """The folder's scenario; without one the scenario whose limits LoadGen was given."""
    if run.files.scenario is not None or isinstance(run, EndpointResult):
        return run.files.scenario or "Server"
    limits = _known(run).limits.items()
    return next((name for name, limit in limits if rules.were_given(limit, run.detail)), "Server")


def _limited(run: RunView) -> bool:
    """Whether the run has limits, and figures to compare with them."""
    if run.scenario != "Server" or not _of_benchmark(run) or None in run.p99_seconds:
        return False
    return _limited_scenario(run) in _known(run).limits


@check("rules.limits_asked", "LoadGen was given the limits", "Its verdict is about these limits.", _limited)
def limits_asked(run: RunView) -> Outcome:
    limits = _known(run).limits[_limited_scenario(run)]
    expected = f"LoadGen given the limits {limits.ttft_ns} and {limits.tpot_ns} ns"
    found = f"{' and '.join(shown(run.detail.number(key)) for key in rules.LIMITS_GIVEN)} ns"
    return outcome(rules.were_given(limits, run.detail), expected, found, run.at(*rules.LIMITS_GIVEN), run.unmet)


@check("rules.target_latency", "Target latency within the limit", "The rules bound it.", _limited)
def target_latency(run: RunView) -> Outcome | None:
    key, most = "effective_target_latency_ns", _known(run).max_target_latency_ns
    target = run.detail.number(key)
    return None if most is None or target is None else _line(run, target <= most, f"{key} of at most {most}", key)


@check("rules.early_stopping", "Early stopping met", "Otherwise the percentile is not shown.", _limited)
def early_stopping(run: RunView) -> Outcome:
    met = run.detail.get("early_stopping_met")
    return outcome(met is True, "early stopping met", shown(met), run.at("early_stopping_met"), run.unmet)


@check("rules.tokens_per_sample", "Tokens per sample", "Shorter or longer answers change the rates.", _of_benchmark)
def tokens_per_sample(run: Subject) -> Outcome | None:
    window, found = _known(run).tokens_per_sample, run.figures.tokens_per_sample
    if window is None or not window[0]:  # an upper bound alone is one of accuracy runs
        return None
    holds, text = (None, "not known") if found is None else (window[0] <= found <= window[1], f"{found:.2f}")
    text = "; ".join(filter(None, (text, answer_length(_known(run).name, found))))
    expected = f"{window[0]:g} to {window[1]:g} tokens per sample, within 10 % of the reference of {_known(run).name}"
    rates = ("tokens_per_second", "samples_per_second", "completed_tokens_per_second", "completed_samples_per_sec")
    where = run.at(*(f"result_{name}" for name in rates), "output_sequence_lengths")
    return outcome(holds, expected, text, where, Severity.WARN if run.rules_claimed else Severity.NOTE)


@check("rules.network", "Network division: name of the SUT", "The division's rules ask for it.", _any_run)
def network(run: RunView) -> Outcome | None:
    if run.files.division != "network":
        return None
    name = run.detail.text("sut_name") or ""
    return outcome("Network SUT" in name, "a SUT name with 'Network SUT'", shown(name), run.at("sut_name"))


OF_ANY_RESULT: tuple[Check[[Subject]], ...] = (
    *(seeds, scenario, min_duration, ran_long_enough),
    *(latency_limits, offline_samples, tokens_per_sample),
)
"""Rules that also apply to results of MLPerf Endpoints."""
