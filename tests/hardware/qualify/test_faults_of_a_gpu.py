"""Faults on a real GPU: each is found, and its name stands in the first sentence of the answer."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.session import qualify
from megatoken.hardware.qualify.values import Setting, Value
from stand_in_nvml import StandInNvml

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NEIGHBOUR = """
import torch
a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
a @ a
torch.cuda.synchronize()
print("busy", flush=True)
while True:
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
"""


@pytest.fixture
def brief(tmp_path: Path) -> Setting:
    return Setting(
        seconds=0.2,
        warm_up_seconds=0.3,
        windows=5,
        sides=(4096,),
        buffer_bytes=2**28,
        pattern_bytes=2**30,
        file_bytes=2**24,
        repeats=8,
        power_seconds=1.0,
        folder=tmp_path,
    )


def run(*names: str, setting: Setting, limit_seconds: float = 90.0) -> dict[str, Any]:
    tests = [HardwareTest(name, f"Test {name}", f"gpu_faults:{name}", limit_seconds) for name in names]
    *_, document = qualify(tests, setting, "gpu")
    return document


def failed(document: dict[str, Any]) -> set[str]:
    return {value["name"] for test in document["tests"] for value in test["values"] if value["verdict"] == "FAIL"}


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("throttled", {"slow_down"}, "Slow-down by heat or hardware"),
        ("missing_lanes", {"rows_pending", "lanes_missing"}, "PCIe lanes that are not in use"),
        ("missing_links", {"links_missing"}, "NVLinks that the other GPUs have"),
        ("flipped_product", {"exact_fp8"}, "fp8 products of whole numbers"),
        ("flipped_repeat", {"repeat_bf16"}, "bf16 product repeated 8 times"),
        ("flipped_memory", {"memory_pattern"}, "Pattern in 1 GiB of memory"),
        ("flipped_copy", {"copy_errors"}, "Data after all copies"),
        ("lost_while_idle", {"kept_pattern"}, "Pattern in 1 GiB of memory after 60 s without work"),
        ("flipped_weight", {"repeat_answers_bf16", "repeat_answers_fp8"}, "answers of the reference model in bf16"),
    ],
)
def test_wrong_results_and_errors_are_found_and_named(name: str, values: set[str], words: str, brief: Setting) -> None:
    document = run(name, setting=brief)
    assert document["verdict"] == "FAIL", document["answer"]
    assert values <= failed(document), document["tests"]
    assert words in document["answer"][0]


def test_errors_under_load_are_found_and_named(brief: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real load, during which memory has errors and the driver reports a critical one."""
    counted = iter([0, 0, 0, 0, 3, 0, 3 + 2, 1])  # two GPUs in the inventory; corrected and not, before and after
    library = StandInNvml(TotalEccErrors=lambda gpu, kind, counter: next(counted))
    library.xids = [48]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    document = run("products", setting=brief)
    assert {"errors_counted"} == failed(document), document["tests"]
    assert "Errors during the tests" in document["answer"][0]
    (of_test,) = (test for test in document["tests"] if test["name"] == "errors")
    serious, corrected = (value["note"] for value in of_test["values"])
    assert serious == "; ".join(
        f"{what} during Test products" for what in ("1 memory errors that could not be corrected", "XID 48")
    )
    assert corrected == "2 corrected memory errors during Test products"


def test_a_slow_clock_is_found(brief: Setting) -> None:
    healthy = run("products", setting=brief)
    assert healthy["verdict"] != "FAIL", healthy["answer"]
    slow = run("slow_products", setting=brief)
    rates = [{one["name"]: one["median"] for one in each["tests"][0]["values"]} for each in (healthy, slow)]
    assert all(rates[1][name] < 0.8 * rate for name, rate in rates[0].items()), rates
    assert "gemm_fp8_4096" in failed(slow) and slow["verdict"] == "FAIL", slow["answer"]


@pytest.mark.parametrize("kernels", [1, 10])
def test_a_slow_host_does_not_slow_what_is_measured_of_the_gpu(kernels: int, brief: Setting) -> None:
    from megatoken.hardware.qualify.gpu_timing import gpu_seconds

    number = torch.zeros(1, device="cuda")

    def slowly_launched() -> None:
        time.sleep(2e-4)
        number.add_(1.0)

    assert max(gpu_seconds(slowly_launched, brief, kernels)) < 2e-5


@pytest.mark.parametrize(
    "test",
    ["gpu_memory:hbm", "gpu_memory:cache", "gpu_products:gemm", "gpu_products:layer_products", "gpu_kernels:kernels"],
)
def test_all_that_a_slow_host_would_slow_can_be_captured(
    test: str, brief: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatoken.hardware.qualify import gpu_timing

    monkeypatch.setattr(gpu_timing, "MOST_LAUNCHING", 0.0)
    monkeypatch.setattr(gpu_timing, "SWING_SECONDS", 0.1)
    module, _, name = test.partition(":")
    function = getattr(import_module(f"megatoken.hardware.qualify.{module}"), name)
    outcomes = list(function(replace(brief, warm_up_seconds=0.1)))
    assert all(isinstance(one, Value) and min(one.windows) > 0 for one in outcomes)


def test_a_busy_neighbour_makes_no_pass(brief: Setting) -> None:
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdout=subprocess.PIPE) as neighbour:
        try:
            assert neighbour.stdout is not None and neighbour.stdout.readline() == b"busy\n"
            document = run("products", setting=brief)
        finally:
            neighbour.kill()
    assert document["verdict"] in ("FAIL", "MARGINAL"), document["tests"]


def test_a_power_cap_is_a_setting_and_no_fault(brief: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    name = torch.cuda.get_device_name(0)
    capped = StandInNvml(Name=name, PowerManagementLimit=400_000, EnforcedPowerLimit=400_000)
    monkeypatch.setitem(sys.modules, "pynvml", capped)
    document = run("slow_products", setting=brief)  # slower than any published value
    assert document["verdict"] != "FAIL"
    assert "That is a setting, not a fault." in document["notes"][0]


def test_a_kernel_that_hangs_is_stopped_and_the_others_run(brief: Setting) -> None:
    document = run("hanging_kernel", "flipped_memory", "products", setting=brief, limit_seconds=25.0)
    hanging, _, healthy, _ = document["tests"]
    assert hanging["fault"] == "did not end within 25 s and was stopped"
    assert hanging["values"][0]["median"] == 100.0
    assert healthy["fault"] is None and healthy["verdict"] != "FAIL"
    assert "Test hanging_kernel" in document["answer"][0]


def test_a_kernel_that_crashes_is_named_and_the_others_run(brief: Setting) -> None:
    document = run("crashing_kernel", "products", setting=brief)
    crashed, healthy, _ = document["tests"]
    assert crashed["verdict"] == "FAIL" and "CUDA error" in crashed["fault"]
    assert healthy["fault"] is None and healthy["verdict"] != "FAIL"
