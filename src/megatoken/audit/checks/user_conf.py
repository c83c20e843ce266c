"""What user.conf asks LoadGen for, against what its log says was requested."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from megatoken.audit.evidence import Role, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import RunView, observe
from megatoken.mlperf.benchmarks import benchmark_of

SIX_DIGITS = 6e-6
MOST_LINES = 5_000
_LINE = re.compile(r"\s*([\w-]{1,80}|\*)\.(\w{1,40}|\*)\.(\w{1,80})\s+=\s+(-?\d{1,20}(?:\.\d{1,20})?)(?:\s.*)?")
# Keys whose value is logged as it is asked for; times in milliseconds.
_LOGGED = {
    "min_duration": "requested_min_duration_ms",
    "max_duration": "requested_max_duration_ms",
    "min_query_count": "requested_min_query_count",
    "max_query_count": "requested_max_query_count",
    "performance_sample_count_override": "requested_performance_sample_count_override",
    "sample_concatenate_permutation": "requested_sample_concatenate_permutation",
}
_RATES = {"Offline": "requested_offline_expected_qps", "Server": "requested_server_target_qps"}
_LIMITS = {"ttft_latency": "requested_server_ttft_latency", "tpot_latency": "requested_server_tpot_latency"}


def user_conf_entries(text: str) -> dict[tuple[str, str, str], tuple[str, int]]:
    """``<model>.<scenario>.<key> = <number>``, as LoadGen reads it: value and line; of equal keys the last."""
    entries: dict[tuple[str, str, str], tuple[str, int]] = {}
    for number, line in enumerate(text.split("\n")[:MOST_LINES], 1):
        if found := _LINE.fullmatch(line[:300]):
            model, scenario, key, value = found.groups()
            entries[model, scenario, key] = (value, number)
    return entries


def check_user_conf(run: RunView) -> Iterator[Observation]:
    """A file that lies apart from the logs speaks for performance runs alone: others may have a rate of their own.

    Compliance tests are configured by an audit.config too, and are left out.
    """
    if run.user_conf is None or run.files.role is Role.COMPLIANCE or run.figures.scenario is None:
        return
    path, text = run.user_conf
    beside = path.rpartition("/")[0] == run.files.folder
    if not beside and run.files.role is not Role.PERFORMANCE:
        return
    entries = user_conf_entries(text)
    scenario = run.figures.scenario
    logged = {
        **_LOGGED,
        **({"target_qps": _RATES[scenario]} if scenario in _RATES else {}),
        **(_LIMITS if scenario == "Server" else {}),
    }
    wrong: list[tuple[str, str, int]] = []
    compared = 0
    for key, name in logged.items():
        asked = _asked(entries, run, scenario, key)
        requested = run.detail.first.get(name)
        if not asked or requested is None:
            continue
        compared += 1
        if not any(_same(float(value), requested.value, key) for value, _ in asked):
            wrong.append((f"{key} = {asked[0][0]}", name, asked[0][1]))
    if compared:
        yield observe(
            "configuration.user_conf",
            not wrong,
            shown("; ".join(asked for asked, _, _ in wrong)) or "what user.conf asks for",
            shown("; ".join(run.text(name) for _, name, _ in wrong)) or f"{compared} settings agree",
            (*(Where(path, line) for _, _, line in wrong), *run.at(*(name for _, name, _ in wrong))),
            Severity.WARN,  # a program may set others after LoadGen has read the file
        )


def _asked(
    entries: Mapping[tuple[str, str, str], tuple[str, int]], run: RunView, scenario: str, key: str
) -> list[tuple[str, int]]:
    """The value, or those of several models of which it is not known which is meant; as LoadGen prefers them."""
    mine = [model for model, _, name in entries if model != "*" and name == key and _may_be(run, model)]
    for models, scenarios in ((mine, scenario), (["*"], scenario), (mine, "*"), (["*"], "*")):
        if found := [entries[model, scenarios, key] for model in models if (model, scenarios, key) in entries]:
            return found
    return []


def _may_be(run: RunView, model: str) -> bool:
    """LoadGen's log does not say by which name it was asked for a model; any of a family, or one not known here."""
    known = benchmark_of(model, None)
    return run.benchmark is None or known is None or _family(model) == _family(run.benchmark.name)


def _family(name: str) -> str:
    return re.sub(r"-99(?:\.9)?$|-interactive$", "", name.replace("llama3_1", "llama3.1"))


def _same(asked: float, requested: object, key: str) -> bool:
    if isinstance(requested, bool):
        return requested is (asked == 1)
    if not isinstance(requested, int | float):
        return False
    expected = asked * 1e6 if key in _LIMITS else asked
    return abs(requested - expected) <= SIX_DIGITS * abs(expected)
