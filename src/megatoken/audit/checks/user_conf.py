"""What user.conf asks LoadGen for, compared with what its log says was requested."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatoken.audit.evidence import Role, Where
from megatoken.audit.finding import Outcome, Severity, check, listed, outcome
from megatoken.audit.view import RunView
from megatoken.mlperf.benchmarks import benchmark_of
from megatoken.mlperf.constraints import SIX_DIGITS
from megatoken.mlperf.user_conf import user_conf_entries

# Keys of user.conf and the keys of the log, whose values are the same; durations are in milliseconds.
_LOGGED = {
    "min_duration": "requested_min_duration_ms",
    "max_duration": "requested_max_duration_ms",
    "min_query_count": "requested_min_query_count",
    "max_query_count": "requested_max_query_count",
    "performance_sample_count_override": "requested_performance_sample_count_override",
    "sample_concatenate_permutation": "requested_sample_concatenate_permutation",
}
_LIMITS = {"ttft_latency": "requested_server_ttft_latency", "tpot_latency": "requested_server_tpot_latency"}
_OF_SCENARIO = {
    "Offline": {"target_qps": "requested_offline_expected_qps"},
    "Server": {"target_qps": "requested_server_target_qps", **_LIMITS},
}


@check("configuration.user_conf", "LoadGen got what user.conf says", "Another configuration made this log.")
def check_user_conf(run: RunView) -> Outcome | None:
    """A file in another folder than the logs applies to performance runs only: others may have their own rate.

    Compliance tests are left out, since an audit.config configures them too.
    """
    scenario = run.figures.scenario
    if run.user_conf is None or run.files.role is Role.COMPLIANCE or scenario is None:
        return None
    path, text = run.user_conf
    if path.rpartition("/")[0] != run.files.folder and run.files.role is not Role.PERFORMANCE:
        return None
    entries = user_conf_entries(text)
    compared = {
        key: (name, asked)
        for key, name in {**_LOGGED, **_OF_SCENARIO.get(scenario, {})}.items()
        if name in run.detail.first and (asked := _asked(entries, run, scenario, key))
    }
    wrong = [
        (f"{key} = {asked[0][0]}", name, Where(path, asked[0][1]))
        for key, (name, asked) in compared.items()
        if not any(_same(float(value), run.detail.get(name), key) for value, _ in asked)
    ]
    if not compared:
        return None
    expected = listed((asked for asked, _, _ in wrong), "what user.conf asks for")
    found = listed((run.text(name) for _, name, _ in wrong), f"{len(compared)} settings agree")
    where = (*(place for _, _, place in wrong), *run.at(*(name for _, name, _ in wrong)))
    # A program may change settings after LoadGen has read the file.
    return outcome(not wrong, expected, found, where, Severity.WARN)


def _asked(
    entries: Mapping[tuple[str, str, str], tuple[str, int]], run: RunView, scenario: str, key: str
) -> list[tuple[str, int]]:
    """The value as LoadGen prefers them; those of several models if it is not known which one ran."""
    mine = [model for model, _, name in entries if model != "*" and name == key and _may_be(run, model)]
    for models, scenarios in ((mine, scenario), (["*"], scenario), (mine, "*"), (["*"], "*")):
        if found := [entries[model, scenarios, key] for model in models if (model, scenarios, key) in entries]:
            return found
    return []


def _may_be(run: RunView, model: str) -> bool:
    """Whether the run may be of that model: LoadGen's log does not say by which name it was asked for a model."""
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
