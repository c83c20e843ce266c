"""Verdicts on values."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatoken.engine.gpus import gpus
from megatoken.errors import UsageError
from megatoken.hardware.qualify.catalog import Device
from megatoken.hardware.qualify.judge import (
    Band,
    Earlier,
    Verdict,
    answer,
    is_noisy,
    judge,
    overall,
    spread_between_runs,
    tolerance,
)
from megatoken.hardware.qualify.references import _published, band, read_baseline, taken_share
from megatoken.hardware.qualify.session import chosen_gpu, power_cap
from megatoken.hardware.qualify.shapes import is_large_product
from megatoken.hardware.qualify.values import Bound, NotRun, Value
from megatoken.hardware.specification import part_name

BAND = Band(95.0, 103.0, ("somewhere",))


def rate(*windows: float, better: str = "higher", bound: Bound | None = None) -> Value:
    return Value("rate", "Rate", "GB/s", windows, better, bound)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("median", "verdict"), [(200.0, "PASS"), (95.0, "PASS"), (94.9, "MARGINAL"), (90.3, "MARGINAL"), (90.2, "FAIL")]
)
def test_a_value_below_its_band_is_marginal_and_then_fails(median: float, verdict: str) -> None:
    assert judge(rate(median), BAND, None, noisy=False).verdict == verdict


@pytest.mark.parametrize(("median", "verdict"), [(1.0, "PASS"), (103.1, "MARGINAL"), (108.2, "FAIL")])
def test_a_latency_above_its_band_is_marginal_and_then_fails(median: float, verdict: str) -> None:
    assert judge(rate(median, better="lower"), BAND, None, noisy=False).verdict == verdict


def test_a_slow_value_that_is_noisy_does_not_fail() -> None:
    judged = judge(rate(50.0), BAND, None, noisy=True)
    assert judged.verdict == Verdict.MARGINAL
    assert "noisy" in judged.reason


def test_above_its_bound_a_value_is_an_error_of_the_measurement_even_if_noisy() -> None:
    sheet = Bound(100.0, "8 x 12.5")
    assert judge(rate(101.9, bound=sheet), None, None, noisy=True).verdict == Verdict.NO_REFERENCE
    judged = judge(rate(102.1, bound=sheet), BAND, None, noisy=True)
    assert judged.verdict == Verdict.FAIL
    assert "8 x 12.5" in judged.reason
    assert judge(rate(99.0, better="lower", bound=sheet), None, None, noisy=False).verdict == Verdict.NO_REFERENCE
    assert judge(rate(97.0, better="lower", bound=sheet), None, None, noisy=False).verdict == Verdict.FAIL
    measured = Bound(100.0, "measured", certain=False)
    assert judge(rate(150.0, bound=measured), None, None, noisy=False).verdict == Verdict.NO_REFERENCE


def test_one_error_in_any_window_fails() -> None:
    assert judge(rate(0, 0, better="zero"), None, None, noisy=True).verdict == Verdict.PASS
    assert judge(rate(0, 1, better="zero"), None, None, noisy=True).verdict == Verdict.FAIL


@pytest.mark.parametrize(
    ("speed", "count", "verdict"),
    [
        ("NO REFERENCE", "PASS", "NO REFERENCE"),
        ("PASS", "PASS", "PASS"),
        ("MARGINAL", "PASS", "MARGINAL"),
        ("NO REFERENCE", "FAIL", "FAIL"),
    ],
)
def test_error_counts_alone_do_not_make_a_machine_pass(speed: str, count: str, verdict: str) -> None:
    rates = {"verdict": speed, "values": [{"better": "higher", "verdict": speed}]}
    errors = {"verdict": count, "values": [{"better": "zero", "verdict": count}]}
    assert overall([rates, errors]) == verdict


@pytest.mark.parametrize("windows", [(), (math.nan,), (1.0, math.inf)])
def test_no_number_fails(windows: tuple[float, ...]) -> None:
    assert judge(rate(*windows), BAND, None, noisy=False).verdict == Verdict.FAIL


def test_errors_that_were_corrected_are_a_warning() -> None:
    one, none = rate(0.0, 3, better="rare"), rate(0.0, better="rare")
    found = judge(one, None, None, noisy=False)
    assert (found.verdict, found.reason) == ("MARGINAL", "3 GB/s; expected 0, a warning only")
    assert judge(none, None, None, noisy=False).verdict == "PASS"
    assert not is_noisy(one, 0.5)


def test_a_digest_is_judged_among_like_parts_only() -> None:
    assert judge(rate(4e9, better="same"), None, None, noisy=False).verdict == "NO REFERENCE"


def test_what_did_not_run_never_passes() -> None:
    judged = judge(NotRun("rate", "Rate", "no device", "plug one in"), BAND, None, noisy=False)
    assert judged.verdict == Verdict.NOT_RUN
    assert judged.reason == "no device; plug one in"


def test_a_baseline_allows_what_noise_explains() -> None:
    assert judge(rate(96.0), None, Earlier(100.0, 0.0), noisy=False).verdict == Verdict.PASS
    assert judge(rate(92.0), None, Earlier(100.0, 0.0), noisy=False).verdict == Verdict.MARGINAL
    assert judge(rate(85.0), None, Earlier(100.0, 0.0), noisy=False).verdict == Verdict.FAIL
    assert judge(rate(85.0), None, Earlier(100.0, 0.05), noisy=False).verdict == Verdict.PASS


@given(st.floats(0.01, 0.75, exclude_max=True), st.floats(0.0, 0.5), st.booleans(), st.booleans())
def test_a_value_far_behind_its_baseline_never_passes(share: float, spread: float, noisy: bool, lower: bool) -> None:
    value = rate(2 - share if lower else share, better="lower" if lower else "higher")
    judged = judge(value, None, Earlier(1.0, spread), noisy=noisy)
    assert judged.verdict in ((Verdict.MARGINAL,) if noisy or share >= 0.7125 else (Verdict.FAIL, Verdict.MARGINAL))
    assert ("repeat it on a quiet machine" in judged.reason) is noisy


@pytest.mark.parametrize(("runs", "runs_before", "allowed"), [(1, 1, 0.15), (2, 1, 0.15), (1, 2, 0.15), (2, 2, 0.05)])
def test_a_value_of_one_run_may_differ_as_much_as_two_runs_of_the_others_do(
    runs: int, runs_before: int, allowed: float
) -> None:
    drifts = [rate(100.0, 101.0), rate(100.0, 103.4), rate(100.0, 190.0), rate(1.0, 9.0, better="")]
    between_runs = spread_between_runs(drifts)  # of the second
    value = replace(rate(*[86.0] * runs), run_medians=[86.0] * runs if runs > 1 else ())
    earlier = Earlier(100.0, 0.0, runs_before)
    assert tolerance(value, earlier, between_runs) == pytest.approx(allowed, rel=0.02)
    assert tolerance(value, earlier) == 0.05
    verdict = judge(value, None, earlier, noisy=False, between_runs=between_runs).verdict
    assert verdict == (Verdict.PASS if allowed > 0.05 else Verdict.FAIL)
    assert tolerance(value, replace(earlier, runs=1), 9.0) == 0.25
    assert spread_between_runs([]) == 0.0


@pytest.mark.parametrize(
    ("windows", "better", "core_wait_share", "verdict"),
    [
        ((50.0, 71.0, 60.0), "higher", 0.0, "FAIL"),
        ((50.0, 71.0, 60.0), "higher", None, "FAIL"),
        ((50.0, 71.0, 60.0), "higher", 0.06, "MARGINAL"),  # the reason is known
        ((50.0, 71.3, 60.0), "higher", 0.0, "MARGINAL"),
        ((50.0, 71.0, 60.0, 99.0), "higher", 0.0, "MARGINAL"),
        ((200.0, 141.0, 160.0), "lower", 0.0, "FAIL"),
        ((200.0, 139.0, 160.0), "lower", 0.0, "MARGINAL"),
        ((200.0, 141.0, 160.0, 101.0), "lower", 0.0, "MARGINAL"),
    ],
)
def test_a_noisy_value_fails_if_its_fastest_window_is_far_behind_the_slowest_of_the_baseline(
    windows: tuple[float, ...], better: str, core_wait_share: float | None, verdict: str
) -> None:
    value, earlier = rate(*windows, better=better), Earlier(100.0, 0.05, slowest=100.0)
    assert is_noisy(value, core_wait_share, None, earlier)
    judged = judge(value, None, earlier, noisy=True, core_wait_share=core_wait_share)
    assert judged.verdict == verdict
    if verdict == "FAIL":
        assert (
            "in its fastest window; the baseline's slowest had 100 GB/s, " in judged.reason
            and "GB/s is allowed" in judged.reason
        )
    unknown = judge(value, None, replace(earlier, slowest=None), noisy=True, core_wait_share=core_wait_share)
    assert unknown.verdict == Verdict.MARGINAL


@pytest.mark.parametrize(
    ("windows", "better", "verdict"),
    [
        ((96.0, 97.0), "higher", "PASS"),
        ((60.0, 61.0), "higher", "MARGINAL"),
        ((48.0, 47.0), "higher", "MARGINAL"),
        ((47.0, 46.0), "higher", "FAIL"),
        ((182.0, 180.0), "lower", "MARGINAL"),
        ((209.0, 211.0), "lower", "MARGINAL"),
        ((211.0, 212.0), "lower", "FAIL"),
    ],
)
def test_on_a_virtual_machine_a_steady_value_fails_only_below_what_others_may_take(
    windows: tuple[float, ...], better: str, verdict: str
) -> None:
    value, earlier = rate(*windows, better=better), Earlier(100.0, 0.01, slowest=100.0)
    judged = judge(value, None, earlier, noisy=False, taken_share=0.5)
    assert judged.verdict == verdict, judged.reason
    if verdict == "MARGINAL":
        assert judged.reason.endswith("; other virtual machines of the host may take up to 50%: repeat it later")
    if verdict == "FAIL":
        limit = "211" if better == "lower" else "47.5"
        assert f"the baseline's slowest had 100 GB/s, {limit} GB/s is allowed" in judged.reason
        waited = judge(value, None, earlier, noisy=True, core_wait_share=0.2, taken_share=0.5)
        assert waited.verdict == "MARGINAL"
        assert waited.reason.endswith("it waited for a core 20% of its time: stop other work and repeat")


def test_the_slowest_window_of_a_baseline_is_the_longest_time_or_the_lowest_rate(tmp_path: Path) -> None:
    path = tmp_path / "qualify.json"
    common = {"title": "Rate", "unit": "GB/s", "median": 2.0, "spread": 0.7413, "verdict": "NO REFERENCE"}
    windows = {"higher": [3.0, 1.0, 2.0], "lower": [2.0, 3.0, 1.0], "": []}
    values = [common | {"name": better, "better": better, "windows": found} for better, found in windows.items()]
    values[-1]["median"] = None
    tests = [{"runs": 2, "verdict": "NO REFERENCE", "values": values}]
    path.write_text(json.dumps(WHOLE | {"verdict": "NO REFERENCE", "tests": tests}))
    slowest = [earlier.slowest for earlier in read_baseline(path, "H200").values()]
    assert slowest == [1.0, 3.0]


def test_a_baseline_that_waited_for_cores_is_no_reference(tmp_path: Path) -> None:
    value = {"name": "rate", "title": "Rate", "unit": "GB/s", "better": "higher", "verdict": "NO REFERENCE"}
    value |= {"median": 100.0, "spread": 0.0, "windows": [100.0, 100.0], "core_wait_share": 0.4}
    path = tmp_path / "qualify.json"
    tests = [{"name": "rates", "runs": 2, "verdict": "NO REFERENCE", "values": [value]}]
    path.write_text(json.dumps(WHOLE | {"verdict": "NO REFERENCE", "tests": tests}))
    (earlier,) = read_baseline(path, "H200").values()
    judged = judge(rate(300.0), None, earlier, noisy=False)
    assert (judged.verdict, judged.reason) == ("NO REFERENCE", "the baseline's value waited for cores: no reference")
    assert judge(rate(70.0), BAND, earlier, noisy=False).verdict == "FAIL", "published values still count"


def test_noise_of_a_baseline_does_not_hide_a_steady_value_far_behind_it() -> None:
    judged = judge(rate(70.0), None, Earlier(100.0, 0.3), noisy=False)
    assert judged.verdict == Verdict.FAIL
    assert judged.reason == "70.0 GB/s; the baseline had 100 GB/s, 25.0% worse is allowed"


def in_runs(*medians: float, better: str = "higher") -> Value:
    """A value whose runs are so even that neither spread nor drift of all windows shows one that differs."""
    windows = [share * median for median in medians for share in (1.0, 1.002, 0.998)]
    return replace(rate(*windows, better=better), run_medians=medians)


@pytest.mark.parametrize(
    ("medians", "better", "verdict"),
    [
        ((70.0, 70.0, 70.0, 70.0, 70.0, 70.0), "higher", "FAIL"),
        ((70.0, 70.0, 70.0, 70.0, 70.0, 99.0), "higher", "MARGINAL"),
        ((99.0, 70.0, 70.0, 70.0, 70.0, 70.0), "higher", "MARGINAL"),
        ((70.0, 70.0, 70.0, 70.0, 70.0, 91.0), "higher", "MARGINAL"),  # less than 5 % behind what is allowed
        ((70.0, 70.0, 70.0, 70.0, 70.0, 85.0), "higher", "FAIL"),  # faster, and still too slow
        ((140.0, 140.0, 140.0, 140.0, 140.0, 140.0), "lower", "FAIL"),
        ((140.0, 140.0, 140.0, 140.0, 140.0, 101.0), "lower", "MARGINAL"),
        ((140.0, 140.0, 140.0, 140.0, 140.0, 120.0), "lower", "FAIL"),
        ((100.0, 100.0, 100.0, 100.0, 100.0, 70.0), "higher", "PASS"),
    ],
)
@pytest.mark.parametrize(("band", "earlier"), [(None, Earlier(100.0, 0.0)), (Band(95.0, 105.0, ()), None)])
def test_a_slow_value_fails_only_if_it_is_slow_in_every_run(
    medians: tuple[float, ...], better: str, verdict: str, band: Band | None, earlier: Earlier | None
) -> None:
    value = in_runs(*medians, better=better)
    assert value.spread < 0.05 and value.drift < 0.025
    noisy = is_noisy(value, 0.0, band, earlier)
    assert noisy is (verdict == "MARGINAL")
    assert judge(value, band, earlier, noisy=noisy).verdict == verdict


def test_runs_that_differ_hide_no_wrong_result_and_no_error_of_the_measurement() -> None:
    wrong = replace(rate(0, 0, 1, better="zero"), run_medians=(0, 0, 1))
    assert not is_noisy(wrong, 0.0, None, Earlier(0.0, 0.0))
    assert judge(wrong, None, None, noisy=False).verdict == Verdict.FAIL
    above = replace(in_runs(110.0, 110.0, 90.0), bound=Bound(100.0, "data sheet"))
    assert judge(above, None, None, noisy=is_noisy(above, 0.0)).verdict == Verdict.FAIL
    recorded = in_runs(70.0, 70.0, 70.0, 70.0, 70.0, 99.0, better="")
    assert not is_noisy(recorded, 0.0, None, Earlier(100.0, 0.0))


@given(st.floats(1.0, 1e6), st.floats(0.0, 0.2))
def test_a_value_passes_against_itself(median: float, spread: float) -> None:
    assert judge(rate(median), None, Earlier(median, spread), noisy=False).verdict == Verdict.PASS


def test_the_worse_of_band_and_baseline_counts() -> None:
    assert judge(rate(96.0), BAND, Earlier(200.0, 0.0), noisy=False).verdict == Verdict.FAIL
    assert judge(rate(50.0), BAND, Earlier(50.0, 0.0), noisy=False).verdict == Verdict.FAIL


def test_a_value_without_a_direction_is_recorded_only() -> None:
    assert judge(rate(1.0, better=""), BAND, Earlier(100.0, 0.0), noisy=False).verdict == Verdict.NO_REFERENCE


def test_noise_is_spread_or_contention_but_never_of_error_counts() -> None:
    assert not is_noisy(rate(100, 101, 99), 0.0)
    assert is_noisy(rate(100, 120, 80), 0.0)
    assert is_noisy(rate(100, 101, 99), 0.06)
    assert not is_noisy(rate(0, 5, 9, better="zero"), 0.5)


def test_a_band_reaches_around_all_published_values() -> None:
    found = band("H200", "gemm_fp8_8192", "TFLOP/s")
    assert found is not None
    assert found.lowest == pytest.approx(0.95 * 1269.4)
    assert found.highest == pytest.approx(1.03 * 1300.6)
    assert len(found.sources) == 2
    assert band("H200", "gemm_fp8_8192", "GFLOP/s") is None
    assert band("a laptop", "gemm_fp8_8192", "TFLOP/s") is None


def test_no_reference_was_measured_on_another_part() -> None:
    for (part, _, _), values in _published().items():
        named = {word.upper() for _, source in values for word in re.split(r"[^A-Za-z0-9]+", source)} & gpus().keys()
        assert named <= {part}


def test_no_published_value_exceeds_its_data_sheet() -> None:
    for (part, name, unit), values in _published().items():
        sheet = gpus()[part]
        if name.startswith("hbm_"):
            assert unit == "GB/s"
            assert max(value for value, _ in values) < sheet.memory_bytes_per_second / 1e9
        if unit == "TFLOP/s":
            precision = "bf16" if "bf16" in name else "fp8"
            assert max(value for value, _ in values) < sheet.operations_per_second[precision] / 1e12  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090"),
    ],
)
def test_only_the_parts_of_the_data_sheets_have_references(name: str, part: str) -> None:
    assert part_name(name) == part


def test_a_power_cap_is_a_fact_and_published_values_do_not_apply() -> None:
    def gpu(watts: float) -> dict[str, object]:
        return {"name": "NVIDIA H200", "power_limit_watts": watts}

    assert power_cap("H200", gpu(700.0)) is None
    assert "500 W" in str(power_cap("H200", gpu(500.0)))
    assert power_cap("a laptop", gpu(500.0)) is None
    assert power_cap("H200", None) is None


@pytest.mark.parametrize(
    ("gpu", "visible", "index"),
    [("1", None, 1), ("GPU-b1", None, 1), (None, None, 0), (None, "1,0", 1), (None, "GPU-a0", 0), ("7", None, None)],
)
def test_name_and_power_limit_are_those_of_the_gpu_that_is_tested(
    gpu: str | None, visible: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tested = chosen_gpu([{"index": 0, "uuid": "GPU-a0"}, {"index": 1, "uuid": "GPU-b1"}], gpu)
    assert (tested and tested["index"]) == index


WHOLE = {"kind": "qualify", "schema_version": 1, "device": "H200", "machine": {}, "verdict": "NOT RUN"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not JSON"),
        ('{"kind": "audit", "schema_version": 1}', "not a qualify.json"),
        (json.dumps(WHOLE | {"device": "H100", "tests": []}), "is about H100"),
        (json.dumps(WHOLE | {"tests": []}), "has no measured value; give the file of a full run"),
    ],
)
def test_a_baseline_that_does_not_fit_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "qualify.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_baseline(path, "H200")


def test_a_drift_between_the_halves_of_the_windows_is_noisy_however_even_each_half_is() -> None:
    drifted = rate(100.0, 100.2, 99.9, 100.1, 100.0, 94.8, 94.6, 94.9, 94.7, 94.8)
    assert drifted.spread < 0.05
    assert drifted.drift == pytest.approx(0.053, abs=0.001)
    assert is_noisy(drifted, 0.0)
    assert not is_noisy(rate(100.0, 100.2, 99.9, 100.1, 100.0, 98.9, 99.2, 99.0, 99.1, 99.0), 0.0)
    assert not is_noisy(rate(100.0), None)


def test_sentences_about_one_value_or_none_say_what_was_judged() -> None:
    clock = {"name": "core_clock", "title": "Clock", "better": "higher", "windows": [2.5, 2.5], "noisy": True}
    clock |= {"verdict": "NO REFERENCE", "reason": "", "core_wait_share": 0.0}
    document = {"tests": [{"title": "Facts", "fault": None, "values": [clock]}]}
    health, _, steady = answer(document)
    assert health == "Nothing was judged: of 1 value, 1 has no reference and 0 did not run."
    assert steady == "1 of 1 speed is noisy and may differ by over 5 % next time."
    clock |= {"verdict": "PASS", "noisy": False}
    health, _, steady = answer(document)
    assert health == "No fault was found: 1 value passes, 0 are marginal, 0 have no reference and 0 did not run."
    assert steady == "The only speed was steady within 5 %, so later qualifications can be compared."
    clock |= {"taken_share": 0.25}
    slowed = "other virtual machines of the host may slow"
    assert answer(document)[2] == f"The only speed was steady within 5 %, but {slowed} it next time."
    document["tests"][0]["values"] = [clock, clock]
    assert answer(document)[2] == f"All 2 speeds were steady within 5 %, but {slowed} 2 of them next time."
    document["tests"][0]["values"] = [clock | {"noisy": True}, clock]
    assert answer(document)[2] == f"1 of 2 speeds is noisy and may differ by over 5 % next time, and {slowed} 1 more."
    document["tests"][0]["values"] = [clock]
    clock |= {"windows": [2.5]}
    assert answer(document)[2] == "No speed was measured in several windows."
    clock |= {"verdict": "NOT RUN", "windows": []}
    health, _, steady = answer(document)
    assert (health.partition(":")[0], steady) == ("Nothing was judged", "No speed was measured in several windows.")


def test_the_rate_of_all_cores_is_set_next_to_a_higher_one_of_one_core() -> None:
    one, together = (
        {"name": f"gemm_bf16_1024_{cores}", "title": cores, "better": "higher", "unit": "GFLOP/s", "windows": []}
        | {"median": median, "verdict": "PASS", "reason": ""}
        for cores, median in (("one_core", 985.0), ("all_cores", 414.0))
    )
    document = {"tests": [{"title": "Products", "fault": None, "values": [one, together]}]}
    assert answer(document)[1] == (
        "The machine multiplies matrices in bf16 at 414 GFLOP/s on all cores, less than one core alone "
        "(985; other work took cores, or the clock fell)."
    )
    one["median"] = 207.0
    assert answer(document)[1] == "The machine multiplies matrices in bf16 at 414 GFLOP/s."


@pytest.mark.parametrize(
    ("gigabytes", "with_baseline", "verdict", "words"),
    [
        (53.6, True, "PASS", ""),
        (51.0, True, "MARGINAL", "may take up to 5%: repeat it later"),
        (47.0, True, "FAIL", "other virtual machines take 5% at most"),
        (48.0, False, "MARGINAL", "may take up to 5%: repeat it later"),
        (45.0, False, "MARGINAL", "may take up to 5%: repeat it later"),
        (27.0, False, "FAIL", "other virtual machines take 5% at most"),
    ],
)
def test_a_link_on_a_virtual_machine_fails_where_others_cannot_be_the_cause(
    gigabytes: float, with_baseline: bool, verdict: str, words: str
) -> None:
    value, band = Value("copy_to_gpu", "Copy", "GB/s", [gigabytes] * 5), Band(49.4, 57.0, ("a source",))
    earlier = Earlier(55.4, 0.001, slowest=55.3) if with_baseline else None
    judged = judge(value, band, earlier, noisy=False, taken_share=0.05)
    assert judged.verdict == verdict and judged.reason.endswith(words), judged.reason


@pytest.mark.parametrize(
    ("device", "name", "share"),
    [
        ("cpu", "core_clock", 0.25),
        ("cpu", "memory_read", 0.625),
        ("cpu", "gemm_fp32_1024_all_cores", 0.625),
        ("gpu", "kernel_launch", 0.625),
        ("gpu", "disk_random_read_1", 0.625),
        ("gpu", "all_reduce_16384", 0.625),
        ("gpu", "all_reduce_134217728", 0.0),
        ("gpu", "graph_kernel", 0.0),
        ("gpu", "gemm_bf16_8192", 0.0),
        ("gpu", "copy_to_gpu", 0.05),
        ("gpu", "copy_both_ways", 0.0),
    ],
)
def test_what_other_virtual_machines_may_take_is_of_the_host(device: Device, name: str, share: float) -> None:
    assert taken_share(device, name) == share


def test_the_second_sentence_leaves_out_what_is_only_recorded() -> None:
    def value(name: str, median: float, better: str) -> dict[str, Any]:
        one = {"name": name, "title": name, "unit": "GFLOP/s", "better": better, "median": median, "noisy": False}
        return one | {"verdict": "NO REFERENCE", "reason": "", "windows": [median], "core_wait_share": None}

    squares, layers = value("gemm_bf16_2048_all_cores", 774.0, ""), value("layer_products_bf16_256", 1038.0, "higher")
    test = {"name": "t", "title": "T", "fault": None, "verdict": "NO REFERENCE"}
    assert answer({"tests": [test | {"values": [squares, layers]}]})[1].endswith("in bf16 at 1,038 GFLOP/s.")
    assert answer({"tests": [test | {"values": [squares]}]})[1].endswith("in bf16 at 774 GFLOP/s.")
    assert answer({"tests": [test | {"values": []}]})[1] == "Neither large products nor reads of memory were measured."


@pytest.mark.parametrize(
    ("name", "large"),
    [
        ("gemm_fp8_8192", True),
        ("gemm_fp8_random", True),
        ("gemm_fp8_zeros", False),
        ("gemm_fp8_ones", False),
        ("gemm_fp8_1024_one_core", False),
        ("layer_products_fp8_llama2-70b_1536", True),
        ("layer_products_fp8_1", False),
        ("gemm_bf16_8192", False),
    ],
)
def test_what_work_can_reach_is_shown_by_random_values_on_all_cores(name: str, large: bool) -> None:
    assert is_large_product(name, "fp8") is large
