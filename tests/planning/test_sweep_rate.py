"""A sweep as the rate of plans: the measured point that keeps the limits, and what stops the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_support import call_here
from megatoken.errors import UsageError
from megatoken.planning.sweep_rate import choose
from megatoken.planning.throughput import MIX

PERCENTILES = ("p50", "p90", "p95", "p99")


def spread(value: float) -> dict[str, Any]:
    shares = zip(PERCENTILES, (1.0, 1.5, 1.7, 2.0), strict=True)
    return {**{name: value * share for name, share in shares}, "samples": 5000, "unreliable": []}


def point(value: float, rate: float, ttft: float, tpot: float, **more: Any) -> dict[str, Any]:
    return {
        "value": value,
        "kind": "concurrency",
        "output_tokens_per_second": rate,
        "ttft_seconds": spread(ttft),
        "tpot_seconds": spread(tpot),
        "overloaded": False,
        "ended_by": None,
        "requests_completed": 5000,
        "requests_failed": 0,
        "accelerators": None,
        "goodput": None,
        "input_tokens_per_request": 1000.0,
        "output_tokens_per_request": 250.0,
        **more,
    }


def sweep(points: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "kind": "sweep",
        "verdict": "MEASURED",
        "load_unit": "requests at once",
        "accelerator": None,
        "simulated_gpu": None,
        "points": points,
    }


# A batch engine: a step takes 10 ms and 1 ms for each request.
LOADS = (1, 2, 4, 8, 16, 32, 64)
CURVE = sweep([point(n, n / (0.01 + 0.001 * n), 0.05 + 0.01 * n, 0.01 + 0.001 * n) for n in LOADS])


def test_the_highest_measured_load_within_the_limits_is_chosen_and_the_next_one_says_why() -> None:
    chosen = choose(CURVE, (10.0, 0.050), "p99")
    assert chosen.load.value == 8  # 2 x 18 ms; 16 requests: 2 x 26 ms
    assert chosen.binds == (
        "time per output token binds: at 16 requests at once it has p99 of TTFT 0.42 s, time per output token 52 ms"
    )
    assert choose(CURVE, (0.5, 10.0), "p99").binds.startswith("time to first token binds: at 32")
    assert choose(CURVE, (10.0, 0.050), "p50").load.value == 32
    assert "neither limit binds" in choose(CURVE, (10.0, 10.0), "p99").binds


@given(
    st.lists(
        st.tuples(st.floats(0.1, 1e5), st.floats(1e-3, 100), st.floats(1e-4, 10), st.booleans()), min_size=1, max_size=9
    ),
    st.tuples(st.floats(1e-3, 200), st.floats(1e-4, 20)),
    st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)),
    st.sampled_from(PERCENTILES),
)
def test_tighter_limits_never_give_a_higher_rate(
    made: list[tuple[float, float, float, bool]],
    limits: tuple[float, float],
    shares: tuple[float, float],
    percentile: str,
) -> None:
    document = sweep([point(at, *one[:3], overloaded=one[3]) for at, one in enumerate(made, 1)])
    tighter = (limits[0] * shares[0], limits[1] * shares[1])
    try:
        tight = choose(document, tighter, percentile).load.output_tokens_per_second
    except UsageError:
        return
    assert choose(document, limits, percentile).load.output_tokens_per_second >= tight


def test_repeats_count_by_their_slowest_and_loads_that_broke_do_not() -> None:
    slow = sweep([point(1, 10, 0.1, 0.01), point(2, 20, 0.1, 0.01), point(2, 22, 0.9, 0.01)])
    assert choose(slow, (1.0, 1.0), "p99").load.value == 1
    failed = sweep([point(1, 10, 0.1, 0.01), point(2, 20, 0.1, 0.01, requests_failed=1)])
    assert choose(failed, (1.0, 1.0), "p99").load.value == 1
    waiting = sweep([point(1, 10, 0.1, 0.01), point(2, 20, 0.1, 0.01, requests_unanswered=1)])
    assert choose(waiting, (1.0, 1.0), "p99").load.value == 1
    with pytest.raises(UsageError, match=r"no load of the sweep keeps.*the lowest, 1, has p99 of TTFT 0\.2 s"):
        choose(slow, (0.01, 1.0), "p99")
    for broke, why in (
        ({"requests_failed": 3}, "3 requests failed"),
        ({"overloaded": True}, "did not keep up with it"),
    ):
        with pytest.raises(UsageError, match=f"the lowest, 1, has p99 of TTFT 0.2 s, .* ms, but .*{why}$"):
            choose(sweep([point(1, 10, 0.1, 0.01, **broke)]), (1.0, 1.0), "p99")
    unknown = {"ttft_seconds": dict.fromkeys(PERCENTILES), "tpot_seconds": dict.fromkeys(PERCENTILES)}
    with pytest.raises(UsageError, match=r"the lowest, 1, has no answer within its window; use a longer --window"):
        choose(sweep([point(1, 10, 0.1, 0.01, **unknown)]), (1.0, 1.0), "p99")


def few(value: float, rate: float, answers: int) -> dict[str, Any]:
    """A point within all limits, so far as that few answers show."""
    return point(value, rate, 0.1, 0.01, requests_completed=answers)


def test_a_load_whose_limits_too_few_answers_show_is_not_within_them_and_the_plan_says_so(tmp_path: Path) -> None:
    known, unknown = point(1, 10, 0.1, 0.01), few(2, 20, 300)
    chosen = choose(sweep([known, unknown]), (1.0, 1.0), "p99")
    assert chosen.load.value == 1
    assert chosen.binds.startswith(
        "limits are unknown at 2 requests at once, which has 300 of the 662 answers that p99 needs: use a longer"
    )
    assert choose(sweep([known, unknown]), (1.0, 1.0), "p90").load.value == 2
    assert choose(sweep([known, few(2, 20, 331), few(2, 20, 331)]), (1.0, 1.0), "p99").load.value == 2  # repeats
    (tmp_path / "sweep.json").write_text(json.dumps(sweep([known, unknown])))
    code, out, err = call_here("plan", "capacity", "--sweep", tmp_path, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert any(
        "Limits unknown, so that these do not count" in note and "load 2: 300 of" in note for note in plan["notes"]
    )
    table = next(table for table in plan["tables"] if table["name"] == "sweep")
    assert [row["breaks"] for row in table["rows"]] == ["chosen", "unknown"]
    with pytest.raises(UsageError, match=r"one with most, 2, has 300 of the 662 .*, or plan with --percentile p95$"):
        choose(sweep([unknown]), (1.0, 1.0), "p99")


def test_a_load_whose_answers_came_in_one_piece_is_not_within_a_limit_on_the_time_per_output_token() -> None:
    known, whole = point(1, 10, 0.1, 0.01), point(2, 20, 0.1, 0.01, tpot_seconds=dict.fromkeys(PERCENTILES))
    chosen = choose(sweep([known, whole]), (1.0, 1.0), "p99")
    assert (
        chosen.load.value == 1 and "at 2 requests at once, which has answers of several tokens in one" in chosen.binds
    )
    assert choose(sweep([known, {**whole, "output_tokens_per_request": 1.0}]), (1.0, 1.0), "p99").load.value == 2
    with pytest.raises(UsageError, match=r"do not show whether a load keeps .* in one piece: look for a proxy"):
        choose(sweep([whole]), (1.0, 1.0), "p99")


@pytest.mark.parametrize(("answers", "shown"), [(300, 0), (662, 2)])
def test_a_plan_shows_no_p99_that_too_few_answers_show(answers: int, shown: int, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(sweep([few(2, 20, answers)])))
    code, out, err = call_here("plan", "capacity", "--sweep", tmp_path, "--percentile", "p90", "--json")
    assert code == 0, err
    assert len([one for one in json.loads(out)["results"] if one["name"].endswith(", p99")]) == shown


@pytest.mark.parametrize(
    "command",
    [
        ("capacity",),
        ("cost", "--accelerators", "1", "--accelerator", "H200"),
        ("fleet", "--accelerators", "1", "--accelerator", "H200", "--demand", "100", "--profile", "rag"),
    ],
)
def test_plans_take_a_sweep_and_name_its_point(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(CURVE))
    limits = ("--ttft-limit", 10, "--tpot-limit", 0.05)
    code, out, err = call_here("plan", *command, "--sweep", tmp_path, *limits, "--json")
    assert code == 0, err
    plan = json.loads(out)
    load = next(result for result in plan["results"] if result["name"] == "Load of the sweep")
    assert load["value"] == 8
    assert "time per output token binds" in load["formula"]
    table = next(table for table in plan["tables"] if table["name"] == "sweep")
    assert [row["breaks"] for row in table["rows"]][3:5] == ["chosen", "time per output token"]
    rate = next(one for one in plan["inputs"] if one["name"] == "rate")
    assert rate["value"] == pytest.approx(8 / 0.018)


@pytest.mark.parametrize("given", [".", "sweep.json"])
def test_a_sweep_given_as_the_run_is_planned_with_as_a_sweep(given: str, tmp_path: Path) -> None:
    """Else the rate would be the mean of its loads."""
    (tmp_path / "sweep.json").write_text(json.dumps(CURVE))
    limits = ("--ttft-limit", 10, "--tpot-limit", 0.05, "--percentile", "p90", "--json")
    plans = [call_here("plan", "capacity", *of, *limits)[1] for of in ((tmp_path / given,), ("--sweep", tmp_path))]
    results = [json.loads(plan)["results"] for plan in plans]
    assert [one["value"] for one in results[0]] == [one["value"] for one in results[1]]
    assert next(one for one in results[0] if one["name"] == "Load of the sweep")["value"] == 16
    assert call_here("plan", "capacity", tmp_path, "--sweep", tmp_path)[0] == 2


def test_a_plan_says_that_answers_were_cut_off(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(sweep([point(1, 10, 0.1, 0.01, requests_unended=3)])))
    code, out, err = call_here("plan", "capacity", "--sweep", tmp_path, "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert any(note.startswith("Cut off at the end of the load: 3 answers.") for note in plan["notes"])
    states = {one["name"]: one["state"] for one in (*plan["inputs"], *plan["results"])}
    assert (states["rate"], states[MIX]) == ("measured", "estimate")
    assert (states["Load of the sweep"], states["Peak rate, input and output"]) == ("measured", "estimate")


def test_users_follow_the_limits(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(CURVE))
    users = []
    for limit in (0.03, 0.05, 0.1):
        flags = ("--sweep", tmp_path / "sweep.json", "--tpot-limit", limit, "--profile", "rag", "--json")
        code, out, err = call_here("plan", "capacity", *flags)
        assert code == 0, err
        results = json.loads(out)["results"]
        users.append(next(one["value"] for one in results if one["name"] == "Users of rag"))
    assert users == sorted(users)
    assert users[0] < users[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sweep", "SWEEP", "--tokens-per-second", "5"), "not both"),
        (("--sweep", "SWEEP", "--percentile", "p80"), "expected one of p50"),
        (("--percentile", "p90", "--tokens-per-second", "5", "--per", "node"), "only with --sweep"),
        (("--sweep", "missing.json"), "expected the folder of a sweep"),
        (("--sweep", "STAGES"), "stages.json: a sweep of stages, each of which begins with the requests of the one"),
    ],
)
def test_what_a_plan_from_a_sweep_refuses(flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps(CURVE))
    (tmp_path / "stages.json").write_text(json.dumps(CURVE | {"load_kind": "stages"}))
    files = {"SWEEP": str(tmp_path), "STAGES": str(tmp_path / "stages.json")}
    given_flags = [files.get(flag, flag) for flag in flags]
    code, _, err = call_here("plan", "capacity", *given_flags)
    assert code == 2
    assert message in err
