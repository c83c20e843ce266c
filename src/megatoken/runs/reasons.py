"""Every reason, shortfall, doubt and note of a run: a stable code, typed fields, and the one sentence made from them.

This is the only place where these sentences are written. Code decides by ``code`` and fields; ``message`` is for
people, and its wording may change between versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from string import Formatter
from typing import Any, TypedDict, cast

from megatoken.text import count_of, precise


class Reason(TypedDict):
    """A stable code, its sentence, and the fields that the code has in ``TEMPLATES``, as keys of the same mapping."""

    code: str
    message: str


class Shortfall(Reason):
    """A rule that is not met, or a doubt about the measurement, with the value found and the value required."""

    found: float | str
    required: float | str


# The first template whose fields are all given makes the message. ``_Formatter`` has the formats of fields.
REASONS: Mapping[str, tuple[str, ...]] = {
    # verdicts
    "FAILED_SAMPLES": ("{failed:,} of {samples:count sample} failed",),
    "LOST_REPLICAS": (
        "{replicas_least} of {replicas:count replica} left at the lowest ({share_left:percent.1}),"
        " {replicas_at_end} at the end; lost: {losses:list}",
        "{replicas_least} of {replicas:count replica} left ({share_left:percent.1}); lost: {losses:list}",
        "{replicas_least} of {replicas:count replica} left ({share_left:percent.1})",
        "{lost_replicas:count replica} lost before {at_seconds:.0f} s",
    ),
    "LOST_ENDPOINTS": (
        "{lost} of {endpoints:count endpoint} lost: {losses:list}; {samples_moved:count unanswered sample} went to the"
        " others",
    ),
    "CLIENT_SATURATED": (
        "requests were sent {found:ms} after they were due at p99; the limit is {required:ms}."
        " {processes:count client process/client processes} used {busy_share:percent} of a core and waited for one"
        " {core_wait_share:percent} of the time; use {processes_needed}"
        " (endpoint.processes), more than the {cores:count core} here: share the load between {hosts_needed} hosts",
        "requests were sent {found:ms} after they were due at p99; the limit is {required:ms}."
        " {processes:count client process/client processes} used {busy_share:percent} of a core and waited for one"
        " {core_wait_share:percent} of the time; use {processes_needed}"
        " on free cores (endpoint.processes)",
        "{late_share:percent} of the looks of a client process at its clock were late by over 10 ms."
        " {processes:count client process/client processes} used {busy_share:percent} of a core and waited for one"
        " {core_wait_share:percent} of the time; use {processes_needed}"
        " (endpoint.processes), more than the {cores:count core} here: share the load between {hosts_needed} hosts",
        "{late_share:percent} of the looks of a client process at its clock were late by over 10 ms."
        " {processes:count client process/client processes} used {busy_share:percent} of a core and waited for one"
        " {core_wait_share:percent} of the time; use {processes_needed}"
        " on free cores (endpoint.processes)",
    ),
    "ANSWERS": ("{found:count answer}; {source} requires {required:,}",),
    "ACCURACY": (
        "{metric} is {found:.7g}; {source} allows at most {at_most:.7g}",
        "{metric} is {found:.7g}; {source} requires {at_least:.7g} or more",
        "no {metric}; {source} requires {at_least:.7g} or more",
    ),
    "COMPLIANCE": ("{finding}",),  # from the check of the compliance test, which quotes lines of the log
    "NO_VALID_RATE": ("{outcome}",),
    # the end of a run
    "NOT_FINISHED": ("the process ended before the run did; the data here was written by {written_at}",),
    "INTERRUPTED": (
        "{signal} after {ended:,} of {issued:count sample}",
        "{signal} after {ended:,} of {issued_so_far:count sample} issued so far",
        "{signal} after {at_seconds:.0f} of {duration_seconds:g} s; resume with megatoken soak --resume {folder}",
        "{signal} after {probes:count probe}",
        "every node was lost: {losses:list}",
        "{signal}",
        "{error}: {cause}",
        "{cause}",
    ),
    "OVER_LIMIT": (
        "{samples:count sample} over the {metric} limit after {at_seconds:.1f} s; a full run may have {allowed:,}",
    ),
    "FALLS_SHORT": (
        "served {served_samples_per_second:precise} of {offered_samples_per_second:precise} samples/s for"
        " {seconds:.1f} s while others waited",
    ),
    # the end of a point of a sweep
    "OVERLOAD": (
        "the target cannot keep up: requests under way grew from {before:,} to {after:,} while {due:count request} came"
        " due",
    ),
    "FAILING": ("{failed:,} of {samples:count request} failed",),
    # MLPerf's rules
    "SCENARIO": ("{benchmark} has no scenario {found}, only {required}",),
    "MIN_DURATION": (
        "LoadGen was asked to run for {requested_seconds:g} s of {required:g} s",
        "ran {found:precise} s of {required:g} s",
    ),
    "MIN_SAMPLES": ("issued {found:,} of {required:,} samples",),
    "SEEDS": ("the seeds are not those of round {round}",),
    "EQUAL_ISSUE": ("issued {found:count sample} of {rows:count row}, not every row equally often",),
    "TTFT_LIMIT": ("p99 TTFT is {found:ms}, the limit {required:ms}",),
    "TPOT_LIMIT": ("p99 TPOT is {found:ms}, the limit {required:ms}",),
    "LATENCY_LIMITS": ("LoadGen was asked for a {metric} of {found:ms}, the limit is {required:ms}",),
    "EARLY_STOPPING": (
        "{found:,} of {queries:count query/queries} over a limit; early stopping allows {required:,}",
        "{found:count query/queries}; a p{percentile} needs {required:,}",
    ),
    "LOADGEN_INVALID": ("LoadGen result: {found} ({why})",),
    "DATA_SET_SIZE": ("drew from {found:count row}; MLPerf's data set has {required:,}",),
    "LOADGEN_ERRORS": ("LoadGen logged {found:count error}, the first: {first}",),
    # MLPerf Endpoints: a point
    "SHORT_WINDOW": (
        "the steady-state window of {super_passes:count super-pass/super-passes} lasts {found:precise} s; the rules"
        " need {required:precise} s",
    ),
    "NO_STEADY_STATE": (
        "no steady state in {super_passes:count super-pass/super-passes} of {rows:,} requests, {cropped} of them"
        " cropped: {required} in a row must be flat, and {drifting:list} is not",
        "no steady state in {super_passes:count super-pass/super-passes} of {rows:,} requests, {cropped} of them"
        " cropped: {required} in a row must be flat",
    ),
    "PARTIAL_PASS": ("issued {issued:count request}, not a whole multiple of the {rows:count row}",),
    "NOT_A_BENCHMARK": ("the model is none of MLPerf Endpoints' benchmarks ({models:list}); name it with --benchmark",),
    "OUTSIDE_REGIONS": ("concurrency {concurrency:,} is in no region of the curve",),
    "SEED_SET": ("the seeds are not a published set",),
    "NOT_SALTED": ("prompts have no salt of their own, so answers may come from a cache",),
    "TOKENS_NOT_COUNTED": (
        "output tokens are as the target reports them; the rules count them with the model's tokenizer: give --model",
    ),
    "NOT_STREAMED": ("answers did not come as streams",),
    "NOT_AN_ENDPOINT": ("the target is no server over HTTP; give --endpoint",),
    "NO_TPOT": ("no answer has a time per output token",),
    "OFFLINE_NOT_AT_ONCE": (
        "the client kept at most {most_open:count request} open; the rules make all {rows:,} available at once: raise"
        " endpoint.max_in_flight",
    ),
    # MLPerf Endpoints: a curve
    "FEW_POINTS": ("{found:count point}; the rules need {required}",),
    "MANY_POINTS": ("{found:count point}; the rules allow {required}",),
    "CURVE_SPAN": ("the curve needs a lowest concurrency of at most {limit} and a highest above {limit}",),
    "REGION_EMPTY": ("no point in the region {region}",),
    "OFFLINE_RUNS": ("{found:count Offline run}; the rules need one",),
    "OFFLINE_BELOW_C_MAX": (
        "the Offline run gives {found:percent.1} of the output at the highest concurrency; the rules need"
        " {required:percent}",
    ),
    "OFFLINE_CONCURRENCY": (
        "the Offline run has {found:count request} at once, fewer than the highest concurrency of {required:,}",
    ),
    # doubts about a measurement
    "LOADGEN_DISAGREES": ("p99 {metric} is {required:ms} by LoadGen, {found:ms} by our records",),
    "SEND_LAG": ("samples were sent late: p99 {found:ms} after they were due, the limit is {required:ms}",),
    "CLIENT_LIMIT": (
        "{found:precise} samples/s is more than {share:percent} of the {capacity_samples_per_second:precise} that the"
        " client can send without a model",
    ),
    "WALL_CLOCK": ("the wall clock, which LoadGen uses, was set by {found:+.4g} s during the run",),
    # the stability of a soak
    "TREND": ("the rate changed by {change:change} over the soak",),
    "DRIFT": ("the rate changed by {change:change} from the first tenth to the last",),
    "VARIATION": ("windows vary by {found:percent.1}; at most {required:percent} is steady",),
    "STANDSTILL": ("at least half of the windows saw no token",),
    "WORST_WINDOW": ("the window that begins at {begins_seconds:.0f} s made {found:percent.1} of the median",),
    "GAP": ("no token came {gaps:count time}; the longest gap was {found:.1f} s and began at {begins_seconds:.0f} s",),
    "GPU_ERRORS": ("{replica} reported {found:,} {kind}",),
    "THROTTLED": (
        "{replica} was slowed down by {causes:list} in {found:percent.1} of the rows",
        "{replica} ran below its clock for {found:percent.1} of the time, with power to spare",
    ),
    "TOO_SHORT": ("{found:count full window} of {window_seconds:g} s after the ramp; {required} are needed",),
    "TREND_UNCERTAIN": (
        "the trend over the soak, {change:change}, could be more than {required:percent}; run a longer soak",
    ),
    "NOT_FULL": ("samples waited in only {found:percent.1} of the rows, so the load may limit the rate",),
}
# Of compliance tests and evaluations; ``COMPLIANCE`` quotes those of a run.
FINDINGS: Mapping[str, tuple[str, ...]] = {
    # findings of compliance tests
    "FIRST_TOKEN_DIFFERS": (
        "{failed:,} of {answers:count answer} do not begin with the token reported first: {place}",
    ),
    "END_TOKEN_REPEATED": ("{failed:,} of {answers:count answer} end with more than one end token: {place}",),
    "TOKEN_COUNT_DIFFERS": (
        "{failed:,} of {answers:count answer} have another number of tokens than was reported: {place}",
    ),
    "AFTER_END_TOKEN": ("{failed:,} of {answers:count answer} continue after an end token: {place}",),
    "NO_END_TOKEN": ("{failed:,} of {answers:count answer} have no end token and were not cut: {place}",),
    "END_TOKENS_UNPROVEN": (
        "no answer has an end token of the model ({end_token_ids}), so the EOS check proves nothing",
    ),
    "ANSWER_COUNT": (
        "{found:count answer}; {test} needs {required:,}: {logged_by}",
        "{found:count answer}; {test} needs {required:,}",
    ),
    "ROW_COUNT": ("answers to {found:count row}; {test} needs {required:,}",),
    "EXACT_MATCH": ("exact_match is {found:.7g}; {test} requires {required} or more",),
    "MEAN_TOKENS": ("the mean answer has {found:.2f} tokens; {test} requires {at_least} to {at_most}",),
    # notes of an evaluation
    "OTHER_REFERENCES": ("{references} is another file than the prompts of the run",),
    "PARTIAL_ANSWERS": ("{answers:,} of {rows:count row} have an answer",),
    "ONE_WORD_REFERENCES": (
        "ROUGE-2 counts pairs of words: {found:,} of {references:count expected answer} have fewer than two words and"
        " score 0, whatever the answer",
    ),
    "NO_SENTENCE_DATA": ("no NLTK sentence data: {left_out}",),
    "UNFAILING_TARGETS": (
        "the baseline scores 0 in {metrics:list}, so nothing can fall below it; the other metrics decide",
    ),
    "EMPTY_ANSWERS": (
        "{empty:count answer} without text, {right:,} of them right by the reference's rule",
        "{empty:count answer} without text",
    ),
    "IDENTIFIERS_FOUND": (
        "identifiers found whole: {found:.2f} %; the reference's exact_match gives a wrong identifier about 90",
    ),
}
NOTES: Mapping[str, tuple[str, ...]] = {
    "NOTE": ("{text}",),  # of a data set, or of an older version
    "ENDPOINT": ("measured over HTTP, by the route of {api}: {urls:list}",),
    "EMPTY_FIRST_FRAME": (
        "{answers:,} of {of:count answer} began with frames without text; times to first token are those of the first"
        " text",
    ),
    "DUMMY_FIRST_TOKEN": (
        "{answers:,} of {of:count answer} began with the same piece of text, and the next came {first_gap_seconds:ms}"
        " later, where others follow each other in {gap_seconds:ms}: times to first token are not those of the model",
    ),
    "SEVERAL_TOKENS_A_FRAME": (
        "{tokens_per_frame:.2f} tokens a frame: gaps are those between frames, not between tokens",
    ),
    "NO_DONE": ("{answers:,} of {of:count stream} ended without [DONE]",),
    "EARLY_DONE": ("{answers:,} of {of:count stream} sent [DONE] before the answer was complete",),
    "NO_USAGE": ("{answers:,} of {of:count answer} came without usage; their tokens are counted as frames",),
    "USAGE_DIFFERS": (
        "the server counts {usage_tokens:,} tokens in {answers:count answer} whose text has {own_tokens:,} by the"
        " model's tokenizer",
    ),
    "USAGE_TOO_SMALL": ("{answers:,} of {of:count answer} have fewer tokens by usage than frames that brought text",),
    "OVER_MAX_TOKENS": ("{answers:,} of {of:count answer} have more tokens than max_tokens allows",),
    "CUT_ANSWERS": ("{answers:,} of {of:count answer} were cut by length before max_tokens",),
    "LENGTHS_NOT_FORCED": ("{answers:,} of {of:count answer} ended before the length that ignore_eos asked for",),
    "PADDED_ANSWERS": ("{answers:,} of {of:count answer} end in white space that counts as tokens",),
    "CACHED_PROMPTS": (
        "the server took {share:percent} of the prompt tokens from a cache, in {answers:,} of {of:count answer}",
    ),
    "CACHED_ANSWERS": (
        "{answers:,} of {of:count repeated prompt} got the same text in {share:percent} of the time of new prompts:"
        " the answers come from a cache",
    ),
    "SLIDING_WINDOW": (
        "the context ends at the sliding_window of {model}, {max_length:,} tokens, because attention differs beyond it",
    ),
    "RANDOM_PROMPTS": ("prompts are random tokens of the data set's lengths",),
    "RANDOM_WEIGHTS": ("random weights: the speed is real, the text is not",),
    "SIMULATED_GPU": ("every GPU is a simulated {gpu}: a cost model computes the speed, and the text is made up",),
    "REFERENCE_MODEL": (
        "the reference model (7.9 M parameters) answers only short tasks that it was trained on; its speed says nothing"
        " about larger models",
    ),
    "ACCURACY_GATE": ("every score of the answers must reach {share:percent} of the model's own in fp32",),
    "ACCURACY_NOT_JUDGED": ("accuracy is not judged: that takes every row of the held-out set, once",),
    "RULES_SCOPE": ("the verdict judges LoadGen's log by the rules; {not_judged} are not part of it",),
    "OTHER_SEEDS": (
        "LoadGen {loadgen_version} brings the seeds of {brings}; it was given those of {round} instead",
        "LoadGen {loadgen_version} brings unknown seeds; it was given those of {round} instead",
    ),
    "COMPLIANCE_TEST": ("compliance test {test}: logs the answers of a few samples, and does not measure speed",),
    "SOAK": (
        "a soak issues its own samples, without LoadGen; it shows whether a rate holds and claims no MLPerf rules",
    ),
    "SWEEP_POINT": (
        "a point of a sweep: its own numbers cover warm-up and cool-down too; those of its window are in the sweep's"
        " report",
    ),
    "ENDPOINTS_SCOPE": (
        "the verdict judges load, window, lengths and curve by the rules {version}; accuracy, power and the submitter's"
        " disclosures are not part of it",
    ),
    "SALTED": (
        "every prompt has a salt of {bits} bits after its system prompt, drawn from the published seed plus the"
        " concurrency",
    ),
    "NO_KERNELS": ("without compiled kernels, so the result is low: {why}; on Linux, install GCC (g++)",),
    "BF16_WIDENED": (
        "this processor has no AVX-512 BF16, so the compiled kernels widen each bf16 value before they multiply;"
        " --precision fp32 may be faster here",
    ),
    "NO_GPU": ("{why}",),
    "EXPANDED_WEIGHTS": (
        "4-bit weights were expanded to fp8 when they were loaded: {exact} of {linears:count linear} exactly, the"
        " others rounded",
    ),
    "SPECIFICATION": ("{text}",),
    "CORE_WAIT": (
        "CPU contention: this process waited for a core {share:percent} of the time, so the result is low. Stop other"
        " work, or lower engine.threads",
    ),
    "DRIVER_CORE_WAIT": (
        "CPU contention: the driver waited for a core {share:percent} of the time, so replicas may have waited for"
        " samples. Stop other work on its machine",
    ),
}
TEMPLATES = {**REASONS, **FINDINGS, **NOTES}


def reason(code: str, **fields: Any) -> Reason:
    """The reason with this code of ``TEMPLATES`` and its fields; with the field ``node`` the message begins with it.

    Raises:
        KeyError: the code is unknown, or no template of it has only fields that are given.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    template = next((one for one in TEMPLATES[code] if _names(one) <= given.keys()), None)
    if template is None:
        raise KeyError(f"{code} needs other fields than {', '.join(fields) or 'none'}")
    message = _Formatter().vformat(template, (), given)
    if "node" in given:
        message = f"{given['node']}: {message}"
    return cast("Reason", {"code": code, "message": message, **fields})


def shortfall(code: str, found: float | str, required: float | str, **fields: Any) -> Shortfall:
    """A reason with the value found and the value required."""
    return cast("Shortfall", reason(code, found=found, required=required, **fields))


def on_node(one: Reason, node: str) -> Reason:
    """The same reason, of one node of several."""
    return cast("Reason", {**one, "node": node, "message": f"{node}: {one['message']}"})


def _names(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


class _Formatter(Formatter):
    """Python's formats, and five more.

    ``precise`` is ``text.precise``; ``ms`` is of seconds; ``percent`` and ``percent.1`` are of shares; ``list`` joins
    texts; ``count query/queries`` is a number of things; ``change`` is a share with its interval.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, words = format_spec.partition(" ")
        if kind == "count":
            one, _, many = words.partition("/")
            return count_of(value, one, many or None)
        if kind == "precise":
            return precise(value)
        if kind == "ms":
            return f"{precise(value * 1e3)} ms"
        if kind.startswith("percent"):
            return f"{100 * value:.{kind.removeprefix('percent').removeprefix('.') or 0}f} %"
        if kind == "list":
            return "; ".join(map(str, value))
        if kind == "change":
            return _change(value)
        return str(super().format_field(value, format_spec))


def _change(change: Mapping[str, float]) -> str:
    share, low, high = (100 * change[name] for name in ("change_share", "low_share", "high_share"))
    known = math.isfinite(low) and math.isfinite(high)
    return f"{share:+.1f} % ({f'{low:+.1f} to {high:+.1f} %' if known else 'too few windows for an interval'})"
