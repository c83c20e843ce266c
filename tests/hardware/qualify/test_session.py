"""Whole qualifications: processes that are really started, faults that are really there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatoken.errors import ExitCode, UsageError
from megatoken.files import plain, to_json
from megatoken.hardware.nvml import NvmlGpu
from megatoken.hardware.qualify import catalog, processor, session
from megatoken.hardware.qualify.catalog import SETTINGS, TESTS, HardwareTest, choose
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.session import CONFIRMATIONS, exit_code, qualify
from megatoken.hardware.qualify.timing import call_seconds
from megatoken.hardware.qualify.values import Setting, Value
from megatoken.report.documents import checked
from megatoken.report.page import page
from megatoken.report.views import document_view
from stand_in_nvml import NVMLError, StandInNvml

FAST = {"cpu": ["memory", "gemm", "layers", "exact", "latency", "kernels", "disk"]}


def test_errors_that_a_gpu_counts_are_named_with_the_test_during_which(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    corrected = chain([0, 3, 3 + 2], repeat(3 + 2))  # by the inventory, at the start, after the first test, later

    def count(gpu: int, uncorrected: int, counter: int) -> int:
        return 0 if uncorrected or gpu else next(corrected)

    library = StandInNvml(TotalEccErrors=count)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    first, second = qualify([fault("steady"), fault("one_layer")], tiny, "gpu")
    errors = {value["name"]: value for value in first["tests"][-1]["values"]}
    assert errors["errors_counted"]["verdict"] == "PASS"
    assert (errors["errors_corrected"]["verdict"], errors["errors_corrected"]["note"]) == (
        "MARGINAL",
        "2 corrected memory errors during Test steady",
    )
    assert first["tests"][-1]["verdict"] == "MARGINAL"
    library.xids = [48]
    *_, document = qualify([fault("steady")], tiny, "gpu")
    (failed,) = (value for value in document["tests"][-1]["values"] if value["verdict"] == "FAIL")
    assert failed["note"] == "XID 48 during Test steady"
    assert "Errors during the tests" in document["answer"][0] and second["complete"]


def test_a_slow_down_between_two_looks_is_found_by_its_time(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    nanoseconds = chain([5e9, 5e9 + 6e8], repeat(5e9 + 14e8))  # at the start, and after each test

    class Hot(StandInNvml):
        def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
            return "580.159.04"

        def nvmlDeviceGetFieldValues(self, gpu: int, wanted: list[Any]) -> list[Any]:  # noqa: N802
            if 270 in wanted:
                self.fields |= {75: 0.0, 270: next(nanoseconds)}
            return super().nvmlDeviceGetFieldValues(gpu, wanted)

    def slow_downs(document: dict[str, Any]) -> tuple[Any, ...]:
        (value,) = (one for one in document["tests"][-1]["values"] if one["name"] == "slow_downs")
        return value["verdict"], value["median"], value["note"]

    monkeypatch.setitem(sys.modules, "pynvml", Hot())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    first, second = qualify([fault("steady"), fault("one_layer")], tiny, "gpu")
    few = "0.6 s by heat (hardware) during Test steady"
    assert slow_downs(first) == ("PASS", 0, few)
    assert slow_downs(second) == ("FAIL", 1, f"{few}; 0.8 s by heat (hardware) during Test one_layer")
    assert "slow_downs" not in [value["name"] for value in counted(StandInNvml(), tiny, monkeypatch)]


@pytest.mark.parametrize(
    ("driver", "causes"),
    [("580.82.07", ["heat (driver)", "heat (hardware)"]), ("580.65.06", ["heat (driver)"]), ("", ["heat (driver)"])],
)
def test_older_drivers_count_other_things_under_the_numbers_of_slow_downs(driver: str, causes: list[str]) -> None:
    library = StandInNvml()
    library.fields |= {75: 1e9, 270: 2e9}
    library.nvmlSystemGetDriverVersion = lambda: driver  # type: ignore[method-assign]
    assert list(NvmlGpu(library, 0).slow_down_seconds()) == causes


def counted(library: StandInNvml, tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The values about errors after one test on the first GPU of a stand-in."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    *_, document = qualify([fault("steady")], tiny, "gpu")
    values: list[dict[str, Any]] = document["tests"][-1]["values"]
    return values


def test_a_critical_error_that_a_program_made_is_named_and_not_counted(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandInNvml()
    library.xids = [45]
    errors, _ = counted(library, tiny, monkeypatch)
    assert (errors["median"], errors["verdict"]) == (0, "PASS")
    assert errors["note"] == "XID 45 (made by programs, not counted) during Test steady"


def test_a_gpu_that_stops_answering_has_failed(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = chain([0, 0, 0], repeat(None))  # two GPUs in the inventory, and at the start
    library = StandInNvml(PcieReplayCounter=lambda gpu: next(replays))
    errors, _ = counted(library, tiny, monkeypatch)
    assert errors["verdict"] == "FAIL"
    assert errors["note"] == "no answer about repeated PCIe packets any more during Test steady"


def test_error_counts_that_nothing_reports_did_not_run(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(StandInNvml):
        def nvmlEventSetCreate(self) -> str:  # noqa: N802
            raise NVMLError("not supported")

    unknown = dict.fromkeys(("TotalEccErrors", "RemappedRows", "PcieReplayCounter"), NVMLError)
    assert [one["verdict"] for one in counted(Silent(**unknown), tiny, monkeypatch)] == ["NOT RUN", "NOT RUN"]


@pytest.mark.parametrize(
    ("visible", "together", "watched"), [("1", False, [1]), ("1", True, [1]), (None, True, [0, 1]), ("1,0", False, [1])]
)
def test_the_gpus_that_are_tested_are_watched(
    visible: str | None, together: bool, watched: list[int], tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    list(qualify([replace(fault("steady"), whole=together)], tiny, "gpu"))
    assert sorted(library.watched) == watched


def fault(name: str, limit_seconds: float = 60.0) -> HardwareTest:
    return HardwareTest(name, f"Test {name}", f"qualify_faults:{name}", limit_seconds)


def undisturbed(document: dict[str, Any]) -> str:
    """A baseline as of a quiet machine: next to other tests a value may wait for a core, and is then no reference."""
    for test in document["tests"]:
        for value in test["values"]:
            value["core_wait_share"] = 0.0
    return to_json(document)


def run(*names: str, setting: Setting, limit_seconds: float = 60.0, baseline: Path | None = None) -> dict[str, Any]:
    tests = [fault(name, limit_seconds) for name in names]
    *_, document = qualify(tests, setting, "cpu", baseline=baseline)
    return document


def test_a_healthy_machine_has_no_fault_and_later_tests_know_what_was_measured(tiny: Setting) -> None:
    document = run("steady", "steady", setting=tiny)
    assert [test["verdict"] for test in document["tests"]] == ["PASS", "PASS"]
    assert document["verdict"] == "NO REFERENCE"  # the rate has nothing to be compared with
    made = page(document_view(checked(plain(document))))
    assert "judged: 2 error counts and 0 of 2 speeds" in made
    assert document["tests"][1]["values"][2]["median"] == 3
    assert document["complete"]
    assert document["answer"][0].startswith("No fault was found: 2 values pass")
    assert exit_code(document) == ExitCode.OK
    rate = document["tests"][0]["values"][0]
    assert (rate["median"], rate["share"], rate["bound"]["formula"]) == (100.0, 0.5, "data sheet")
    assert rate["spread"] == pytest.approx(0.014826)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("impossible", 1, "measurement error: 1000% of what is possible"),
        ("no_windows", 1, "the test returned no finite number"),
        ("broken", 1, "RuntimeError: illegal memory access"),
        ("crash", 1, "was ended by SIGSEGV"),
    ],
)
def test_every_fault_is_found_and_named(name: str, values: int, words: str, tiny: Setting) -> None:
    document = run(name, setting=tiny)
    (test,) = document["tests"]
    assert len(test["values"]) == values
    assert document["verdict"] == test["verdict"] == "FAIL"
    assert words in document["answer"][0]
    assert exit_code(document) == ExitCode.INVALID


@pytest.mark.parametrize(
    ("name", "found", "title", "wrong"),
    [
        ("flipped_product", "exact_fp32", "fp32 products of whole numbers", 1),
        ("flipped_repeat", "repeat_fp32", "fp32 product repeated 4 times", 1),
        ("flipped_memory", "memory_pattern", "Pattern in ", 2),  # it is also not the inverse
        ("flipped_inverse", "memory_pattern", "Pattern in ", 1),
        ("lost_while_idle", "kept_pattern", "Pattern in ", 1),
    ],
)
def test_one_wrong_bit_is_found_and_named(name: str, found: str, title: str, wrong: int, tiny: Setting) -> None:
    document = run(name, setting=replace(tiny, repeats=4, precision="fp32", idle_seconds=0.01))
    (test,) = document["tests"]
    failed = {value["name"]: value["reason"] for value in test["values"] if value["verdict"] == "FAIL"}
    assert failed == {found: f"{wrong} wrong; expected 0"}
    assert document["answer"][0].startswith(f"1 fault found: {title}")
    assert exit_code(document) == ExitCode.INVALID


@pytest.mark.timing
def test_a_hanging_test_is_stopped_and_the_others_run(tiny: Setting) -> None:
    document = run("hang", "steady", setting=tiny, limit_seconds=2.0)
    hanging, steady = document["tests"]
    assert hanging["fault"] == "did not end within 2 s and was stopped"
    assert hanging["values"][0]["median"] == 100.0
    assert steady["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_run", "no such device; plug one in"),
        ("no_room", "does not fit"),
        ("no_room_for_more", "not enough memory; free memory, or stop other work"),
        ("no_room_for_a_tensor", "can't allocate memory: you tried to allocate 4503599627370496 bytes"),
    ],
)
def test_what_could_not_run_is_neither_a_pass_nor_a_fault(name: str, reason: str, tiny: Setting) -> None:
    document = run("steady", name, setting=tiny)
    assert document["tests"][1]["verdict"] == "NOT RUN"
    assert reason in document["tests"][1]["values"][-1]["reason"]
    assert exit_code(document) == ExitCode.DEGRADED


def test_a_slow_value_fails_against_the_baseline_of_the_same_machine(tiny: Setting, tmp_path: Path) -> None:
    saved = tmp_path / "earlier.json"
    saved.write_text(undisturbed(run("steady", setting=tiny)))
    (test,) = run("slow", setting=tiny, baseline=saved)["tests"]
    assert test["values"][0]["baseline"] == 100.0
    assert test["values"][0]["difference"] == pytest.approx(-0.4)
    assert test["values"][0]["tolerance"] >= 0.05
    if not test["values"][0]["noisy"]:  # other work on this machine
        assert test["verdict"] == "FAIL"
        assert "the baseline had 100 GB/s" in test["values"][0]["reason"]
    title = test["values"][0]["title"]
    saved.write_text(saved.read_text().replace(f'"{title}"', f'"{title}, bf16"'))
    (test,) = run("slow", setting=tiny, baseline=saved)["tests"]
    # it was another measurement then
    assert all(test["values"][0][key] is None for key in ("baseline", "difference", "tolerance"))


@pytest.mark.parametrize(("virtual", "verdict"), [(True, "MARGINAL"), (False, "FAIL")])
def test_a_slower_core_of_a_virtual_machine_is_no_fault(
    virtual: bool, verdict: str, tiny: Setting, tmp_path: Path, set_virtual: Callable[[bool], None]
) -> None:
    set_virtual(virtual)
    saved = tmp_path / "earlier.json"
    saved.write_text(undisturbed(run("steady", setting=tiny)))
    *_, document = qualify([fault("slow")], tiny, "cpu", baseline=saved)
    (value,) = document["tests"][0]["values"]
    assert value["taken_share"] == (0.625 if virtual else 0.0)
    assert any("others on its host may take up to 62%" in note for note in document["notes"]) is virtual
    if not value["core_wait_share"]:  # other work on this machine
        assert value["verdict"] == verdict, value["reason"]


def test_a_slow_disk_is_named(tiny: Setting, tmp_path: Path) -> None:
    if run("real_disk", setting=tiny)["verdict"] == "NOT RUN":
        pytest.skip("this file system has no O_DIRECT")
    saved = tmp_path / "earlier.json"
    saved.write_text(undisturbed(run("real_disk", setting=tiny)))
    (test,) = run("slow_disk", setting=tiny, baseline=saved)["tests"]
    slow = {value["name"] for value in test["values"] if value["verdict"] in ("FAIL", "MARGINAL")}
    assert {"disk_sequential_read", "disk_random_read_1"} <= slow


@pytest.mark.timing
def test_a_busy_neighbour_is_seen_and_not_taken_for_a_fault(tiny: Setting) -> None:
    longer = replace(tiny, seconds=0.6, windows=6)
    cores = os.cpu_count() or 1
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * cores)]
    try:
        document = run("busy_core", setting=longer)
    finally:
        for process in busy:
            process.kill()
            process.communicate()
    (value,) = document["tests"][0]["values"]
    assert value["core_wait_share"] > 0.05
    assert value["noisy"] and document["verdict"] != "FAIL"
    assert "waited for a core" in document["answer"][2]


def test_a_value_that_is_slow_once_is_noisy_and_no_fault(tiny: Setting, tmp_path: Path) -> None:
    saved = tmp_path / "earlier.json"
    saved.write_text(undisturbed(run("steady", setting=tiny)))
    (test,) = run("slow_once", setting=tiny, baseline=saved)["tests"]
    (value,) = test["values"]
    assert value["noisy"]
    if test["runs"] == 1:  # other work on this machine made it noisy at once
        assert test["verdict"] == "MARGINAL"
    else:
        assert (test["verdict"], value["windows"]) == ("PASS", [60.0] * 3 + [100.0] * 3)


@pytest.mark.parametrize(
    ("name", "verdict", "windows"),
    [
        ("slow_four_times", "MARGINAL", [60.0, 61.0, 59.0] * 4 + [100.0, 101.0, 99.0]),
        ("slow_always", "FAIL", [60.0, 61.0, 59.0] * (2 + CONFIRMATIONS)),
    ],
)
def test_a_slow_value_fails_only_if_it_stays_slow_at_the_end(
    name: str, verdict: str, windows: list[float], tiny: Setting, tmp_path: Path
) -> None:
    """Neither spread nor drift shows that the last of five runs differs."""
    saved = tmp_path / "earlier.json"
    saved.write_text(undisturbed(run("steady", setting=tiny)))
    (test,) = run(name, setting=tiny, baseline=saved)["tests"]
    (value,) = test["values"]
    assert (value["windows"], test["runs"]) == (windows, len(windows) // 3)
    assert value["spread"] < 0.05 and value["drift"] < 0.025
    assert (test["verdict"], value["noisy"]) == (verdict, verdict == "MARGINAL")


@pytest.mark.parametrize(
    ("name", "verdict", "runs"), [("noisy_four_times", "MARGINAL", 5), ("noisy_always", "FAIL", 6)]
)
def test_a_noisy_value_fails_only_if_it_stays_far_behind_in_every_window(
    name: str, verdict: str, runs: int, tiny: Setting, tmp_path: Path
) -> None:
    saved = tmp_path / "earlier.json"
    saved.write_text(undisturbed(run("steady", setting=tiny)))
    document = run(name, setting=tiny, baseline=saved)
    (test,) = document["tests"]
    (value,) = test["values"]
    assert value["noisy"]
    assert (test["verdict"], test["runs"]) == (verdict, runs)
    assert ("68.0 GB/s in its fastest window; the baseline's slowest had 99.0" in value["reason"]) is (
        verdict == "FAIL"
    )
    assert exit_code(document) == (ExitCode.INVALID if verdict == "FAIL" else ExitCode.OK)


@pytest.mark.parametrize(
    ("device", "order"),
    [
        ("cpu", ["slow", "other", "also slow"] + ["slow", "also slow"] * (1 + CONFIRMATIONS // 2)),
        ("gpu", ["slow", "other", "also slow", "slow", "also slow"]),  # no other machine has work on it
    ],
)
def test_slow_tests_share_the_confirmations(
    device: catalog.Device, order: list[str], tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tests are slow, the set does not take much longer."""
    ran: list[str] = []
    rate = 100.0

    def run_here(test: HardwareTest) -> Ended:
        ran.append(test.name)
        windows = [rate if test.name != "other" else 100.0] * 3
        return Ended((Returned(Value(test.name, "Rate", "GB/s", windows), 0.0),), 0.1, None)

    monkeypatch.setattr(session, "RunningTest", lambda test, *_: SimpleNamespace(ended=lambda: run_here(test)))
    tests = [HardwareTest(name, name, "") for name in ("slow", "other", "also slow")]
    saved = tmp_path / "earlier.json"
    *_, healthy = qualify(tests, tiny, device)
    saved.write_text(undisturbed(healthy))
    ran.clear()
    rate = 60.0
    *documents, last = qualify(tests, tiny, device, baseline=saved)
    assert ran == order
    assert [test["verdict"] for test in last["tests"]] == ["FAIL", "PASS", "FAIL"]
    assert last["complete"] and not any(document["complete"] for document in documents)


@pytest.mark.parametrize(("drift", "runs", "verdict"), [(0.0, 2 + CONFIRMATIONS, "FAIL"), (0.2, 1, "PASS")])
def test_a_test_that_runs_once_may_differ_as_much_as_the_runs_of_the_others(
    drift: float, runs: int, verdict: str, tiny: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is judged when the others have run again, so that a set takes no longer on a machine that drifts."""
    ran: list[str] = []
    rate = 100.0

    def run_here(test: HardwareTest) -> Ended:
        ran.append(test.name)
        window = rate if test.name == "once" else 100.0 * (1 - drift * (ran.count("twice") - 1))
        return Ended((Returned(Value(test.name, "Rate", "GB/s", [window] * 3), 0.0),), 0.1, None)

    monkeypatch.setattr(session, "RunningTest", lambda test, *_: SimpleNamespace(ended=lambda: run_here(test)))
    tests = [HardwareTest("once", "once", ""), HardwareTest("twice", "twice", "", twice=True)]
    saved = tmp_path / "earlier.json"
    *_, healthy = qualify(tests, tiny, "cpu")
    saved.write_text(undisturbed(healthy))
    ran.clear()
    rate = 80.0
    *_, last = qualify(tests, tiny, "cpu", baseline=saved)
    assert ran == ["once", "twice", "twice", *["once"] * (runs - 1)]
    assert last["tests"][0]["verdict"] == verdict
    assert last["tests"][0]["values"][0]["tolerance"] == (0.25 if drift else 0.05)
    assert last["tests"][1]["values"][0]["baseline_noisy"] is bool(drift)


@pytest.mark.parametrize(("gpu", "device", "capped"), [(None, "H200", True), ("1", "H100", False)])
def test_a_gpu_is_judged_by_its_own_name_and_power_limit(
    gpu: str | None, device: str, capped: bool, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names_and_watts = (("NVIDIA H200", 500.0), ("NVIDIA H100 80GB HBM3", 700.0))
    cards = [
        {"index": index, "uuid": f"GPU-{index}", "name": name, "power_limit_watts": watts}
        for index, (name, watts) in enumerate(names_and_watts)
    ]
    monkeypatch.setattr(session, "take_inventory", lambda: {"gpus": cards, "cpu": {"virtual": False}})
    monkeypatch.setattr(session, "RunningTest", lambda *_: SimpleNamespace(ended=lambda: Ended((), 0.1, None)))
    *_, document = qualify([HardwareTest("none", "None", "")], tiny, "gpu", gpu=gpu)
    assert (document["device"], bool(document["notes"])) == (device, capped)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ("a idle host1 host2 b", "+a -a +idle +host1 -host1 +host2 -host2 -idle +b -b"),
        ("idle a host", "+idle -idle +a -a +host -host"),
        ("host idle", "+host -host +idle -idle"),
    ],
)
def test_tests_of_the_host_run_while_one_idles(
    names: str, order: str, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Running:
        def __init__(self, test: HardwareTest, *_: object) -> None:
            self.test = test
            seen.append(f"+{test.name}")

        def ended(self) -> Ended:
            seen.append(f"-{self.test.name}")
            return Ended((Returned(Value(self.test.name, "Errors", "errors", [0], "zero"), None),), 0.1, None)

    monkeypatch.setattr(session, "RunningTest", Running)
    tests = [HardwareTest(name, name, "", idles=name == "idle", of_host="host" in name) for name in names.split()]
    counts: list[tuple[int, int]] = []
    *documents, last = qualify(tests, tiny, "cpu", progress=lambda *count: counts.append(count))
    assert " ".join(seen) == order
    assert [test["name"] for test in last["tests"]] == names.split(), "in their order, whichever ended first"
    assert last["complete"] and not any(document["complete"] for document in documents)
    assert counts == [(ended, len(tests)) for ended in range(len(tests))]


def test_a_qualification_that_is_given_up_leaves_no_process_that_idles(tiny: Setting) -> None:
    idle = replace(fault("kept_memory"), idles=True)
    host = replace(fault("steady"), of_host=True)
    documents = qualify([idle, host], replace(tiny, idle_seconds=60.0), "cpu")
    assert next(documents)["tests"][0]["verdict"] == "PASS"
    assert _left_of_tests(1) == 1
    documents.close()  # type: ignore[attr-defined]
    assert _left_of_tests(0) == 0


def _left_of_tests(expected: int) -> int:
    """Processes of tests that still run, once they are so many or 20 seconds have passed."""
    server = psutil.Process(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    until = time.monotonic() + 20
    while True:
        with suppress(psutil.NoSuchProcess):  # one that ends meanwhile
            left = sum(one.status() != psutil.STATUS_ZOMBIE for one in server.children())
            if left == expected or time.monotonic() > until:
                return left
        time.sleep(0.05)


def test_errors_while_a_test_idles_may_be_of_either(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    corrected = chain([0, 0, 2], repeat(2))  # by the inventory, at the start, after the test of the host
    library = StandInNvml(TotalEccErrors=lambda gpu, kind, counter: 0 if kind or gpu else next(corrected))
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    idle, host = replace(fault("kept_memory"), idles=True), replace(fault("steady"), of_host=True)
    *_, document = qualify([idle, host], replace(tiny, idle_seconds=0.01), "gpu")
    (errors,) = (value for value in document["tests"][-1]["values"] if value["name"] == "errors_corrected")
    assert errors["note"] == "2 corrected memory errors during Test steady and Test kept_memory"


@pytest.mark.timing
def test_an_idle_test_takes_no_time_of_its_own_next_to_those_of_the_host(tiny: Setting) -> None:
    idle = replace(fault("kept_memory"), idles=True)
    host = replace(fault("sleeps_a_second"), of_host=True)
    *_, document = qualify([idle, host, fault("steady")], replace(tiny, idle_seconds=1.5), "cpu")
    first, second, third = document["tests"]
    assert [test["verdict"] for test in (first, second, third)] == ["PASS", "PASS", "PASS"]
    assert first["values"][0]["title"].endswith("of memory after 1.5 s without work")
    assert first["seconds"] + second["seconds"] > 2.4 and document["seconds"] < first["seconds"] + second["seconds"]


def test_a_test_that_runs_twice_shows_drift(tiny: Setting) -> None:
    twice = replace(fault("slow_once"), twice=True)
    *_, first, document = qualify([twice, fault("steady")], tiny, "cpu")
    assert not first["complete"] and document["complete"]
    drifting, steady = document["tests"]
    assert (drifting["runs"], steady["runs"]) == (2, 1)
    assert drifting["values"][0]["median"] == 80.0
    assert drifting["values"][0]["noisy"]


def test_a_measured_bound_is_the_median_that_the_table_shows(tiny: Setting) -> None:
    both = [replace(fault(name), twice=True) for name in ("slow_once", "share_of_the_rate")]
    *_, document = qualify(both, tiny, "cpu")
    rate, part = (test["values"][0] for test in document["tests"])
    assert part["bound"]["value"] == rate["median"] == 80.0
    assert part["share"] == 0.5


def test_a_call_that_waits_at_the_end_of_the_warm_up_does_not_shorten_the_windows(tiny: Setting) -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            time.sleep(0.1)

    call_seconds(run, replace(tiny, seconds=0.003, warm_up_seconds=0.05))
    assert calls > 100


def test_an_interrupted_qualification_keeps_the_tests_that_ended(tiny: Setting) -> None:
    documents = qualify([fault("steady"), fault("hang")], tiny, "cpu")
    first = next(documents)
    documents.close()
    assert not first["complete"]
    assert exit_code(first) == ExitCode.DEGRADED
    assert "interrupted" in page(document_view(checked(plain(first))))


def test_all_tests_of_a_cpu_run_and_return_what_they_promise(tiny: Setting) -> None:
    """Whole steps of the engine take longer, so they have a test of their own."""
    tests = choose(TESTS["cpu"], FAST["cpu"], full=False)
    soon = [replace(test, function="qualify_faults:one_layer") if test.name == "layers" else test for test in tests]
    *_, document = qualify(soon, tiny, "cpu")
    found = {value["name"]: value for test in document["tests"] for value in test["values"]}
    assert [test["fault"] for test in document["tests"]] == [None] * len(tests)
    assert {"memory_read", "memory_triad", "gemm_fp32_64_one_core", "memory_pattern", "decode_attention"} <= set(found)
    assert found["memory_pattern"]["verdict"] == found["exact_fp32"]["verdict"] == "PASS"
    assert all(value["median"] > 0 for value in found.values() if value.get("better") in ("higher", "lower"))
    json.dumps(plain(document), allow_nan=False)
    made = page(document_view(checked(plain(document))))
    assert "Memory triad" in made and "Bounds and sources" in made and "Hardware and software" in made


def test_every_test_of_every_form_names_a_function() -> None:
    from importlib import import_module

    for tests in TESTS.values():
        assert len({test.name for test in tests}) == len(tests)
        for test in tests:
            module, _, name = test.function.partition(":")
            assert callable(getattr(import_module(module), name))
    assert SETTINGS.keys() == TESTS.keys()


def test_unknown_tests_are_refused_with_the_nearest() -> None:
    assert [test.name for test in choose(TESTS["cpu"], ["disk"], full=False)] == ["facts", "disk"]
    with pytest.raises(UsageError, match="did you mean latency"):
        choose(TESTS["cpu"], ["latncy"], full=False)
    for name, words in (("copies", "--tests copies: is a test of a GPU; known here are "), ("", "a name is empty")):
        with pytest.raises(UsageError, match=words):
            choose(TESTS["cpu"], ["facts", name], full=False)


def test_the_bound_of_a_product_is_cores_times_instructions_times_clock(
    tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = replace(tiny, measured={"core_clock": 2.5})
    monkeypatch.setattr(processor, "cpu", lambda: {"instruction_sets": ["avx2", "avx512f", "amx_bf16"]})
    for dtype, operations in (("fp32", 64), ("bf16", 1024)):
        bound = processor.peak(dtype, 4, measured)
        assert bound is not None
        assert bound.value == 4 * operations * 2.5
    assert processor.peak("fp32", 4, tiny) is None
    monkeypatch.setattr(processor, "cpu", lambda: {"instruction_sets": []})
    assert processor.peak("fp32", 4, measured) is None


@pytest.mark.parametrize(
    ("file", "visible", "device"), [("nvidia0", None, "gpu"), ("nvidia0", "", "cpu"), ("null", None, "cpu")]
)
def test_the_form_follows_the_driver_and_what_is_visible(
    file: str, visible: str | None, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (tmp_path / file).touch()
    assert catalog.device_here() == device
