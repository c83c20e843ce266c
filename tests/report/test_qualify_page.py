"""The page of a qualification: roofline with what was measured under it, and published ranges."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from cli_support import call_here
from megatoken.hardware.qualify.parts import joined
from megatoken.report.blocks import Table
from megatoken.report.console import show
from megatoken.report.documents import checked
from megatoken.report.page import page
from megatoken.report.roofline import Point, roofline_chart
from megatoken.report.views import document_view

CPU = {
    "memory_read": (20.0, "GB/s"),
    "gemm_fp32_1024_all_cores": (150.0, "GFLOP/s"),
    "layer_products_fp32_1": (18.0, "GB/s"),
    "layer_products_fp32_64": (110.0, "GFLOP/s"),
    "decode_attention": (6.0, "GB/s"),
    "decode_step": (70.0, "ms"),
}
GPU = {
    "hbm_read": (4300.0, "GB/s"),
    "gemm_bf16_8192": (700.0, "TFLOP/s"),
    "gemm_fp8_8192": (1260.0, "TFLOP/s"),
    "layer_products_fp8_llama2-70b_64": (230.0, "TFLOP/s"),
    "layer_products_fp8_llama2-70b_1536": (1200.0, "TFLOP/s"),
    "decode_attention": (3700.0, "GB/s"),
    "decode_step": (6.0, "ms"),
}


def document(values: dict[str, tuple[float, str]], step: str, band: dict[str, Any] | None) -> dict[str, Any]:
    entries = [
        {
            "name": name,
            "title": step if name == "decode_step" else name,
            "precision": ("fp8" if "hbm_read" in values else "fp32") if name == "decode_step" else None,
            "unit": unit,
            "better": "higher",
            "median": median,
            "spread": 0.01,
            "noisy": False,
            "band": band if name == "hbm_read" else None,
            "verdict": "PASS",
            "reason": "",
            "note": "",
        }
        for name, (median, unit) in values.items()
    ]
    test = {"name": "t", "title": "T", "verdict": "PASS", "fault": None, "seconds": 1.0, "runs": 1, "values": entries}
    return {
        "kind": "qualify",
        "schema_version": 1,
        "created_at": "2026-11-25T00:00:00Z",
        "title": "Qualification of X",
        "inputs": [],
        "notes": [],
        "set": "quick",
        "device": "X",
        "machine": {},
        "complete": True,
        "seconds": 1.0,
        "verdict": "PASS",
        "answer": ["No fault was found."],
        "tests": [test],
    }


@pytest.mark.parametrize(
    ("values", "step", "points"),
    [
        (CPU, "Decode step", 4),
        (GPU, "Decode step of 256 sequences", 4),
    ],
)
def test_the_page_has_a_roofline_with_steps_as_points(
    values: dict[str, tuple[float, str]], step: str, points: int
) -> None:
    band = {"lowest": 4000.0, "highest": 4500.0, "sources": ["somewhere"]}
    made = page(document_view(checked(document(values, step, band), "qualify.json")))
    assert "Roofline, measured" in made
    assert made.count('r="3.2"') == points
    assert step in made
    assert ("Measured and published" in made) is (values is GPU)
    assert made.count('r="3.6"') == (values is GPU)


def test_points_under_the_roof_are_drawn_below_it() -> None:
    points = [Point("memory bound", 0.5, 9e9), Point("compute bound", 100.0, 90e9)]
    figure = roofline_chart("Roofline", 20e9, [("fp32", 100e9)], points)
    shares = [row[4] for row in figure.data.rows]
    assert shares == ["90", "90"]
    assert "nan" not in figure.drawing
    assert all(math.isfinite(float(part)) for part in figure.drawing.split('cy="')[1].split('"')[:1])


def test_a_compared_value_shows_the_baseline_the_difference_and_the_tolerance(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = document({"memory_read": (18.0, "GB/s"), "decode_step": (11.0, "ms")}, "Step", None)
    for value, better, baseline in zip(one["tests"][0]["values"], ("higher", "lower"), (20.0, 10.0), strict=True):
        value |= {"better": better, "baseline": baseline, "difference": value["median"] / baseline - 1}
        value["tolerance"] = 0.075
    show(checked(one, "qualify.json"))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["memory_read", "18.0", "GB/s", "20.0", "-10.0", "-7.5", "PASS"] in rows
    assert ["Step", "11.0", "ms", "10.0", "+10.0", "+7.5", "PASS"] in rows
    one["tests"][0]["values"][0]["baseline_noisy"] = True
    show(checked(one, "qualify.json"))
    out = capsys.readouterr().out
    assert "20.0 !" in out and "10.0 !" not in out
    assert "the baseline's value is noisy, 1 of 2; repeat it" in out
    assert "Allowed" in page(document_view(checked(one, "qualify.json")))


def test_a_share_above_a_measured_bound_is_marked_and_rates_without_a_verdict_are_counted_apart() -> None:
    one = document({"memory_read": (20.0, "GB/s"), "decode_attention": (15.1, "GB/s")}, "Step", None)
    cache, attention = one["tests"][0]["values"]
    cache |= {"better": "", "verdict": "NO REFERENCE"}
    bound = {"value": 15.0, "formula": "reading of memory", "certain": False}
    attention |= {"share": 1.007, "bound": bound, "verdict": "NO REFERENCE"}
    made = page(document_view(checked(one, "qualify.json")))
    assert "judged: nothing; 1 speed without a reference; 1 rate only recorded" in made
    assert "101 *" in made and "which was measured itself" in made
    attention["bound"] = bound | {"certain": True}
    assert "101 *" not in page(document_view(checked(one, "qualify.json")))


def test_the_headline_names_the_values_that_are_worse_and_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    one = document(CPU, "Step", None)
    one["verdict"] = "MARGINAL"
    differences = {
        "memory_read": -0.312,
        "gemm_fp32_1024_all_cores": -0.43,
        "layer_products_fp32_1": -0.1,
        "layer_products_fp32_64": 0.2,
        "decode_attention": -0.2,
        "decode_step": 0.35,
    }
    for value in one["tests"][0]["values"]:
        value |= {"difference": differences[value["name"]], "better": "lower" if value["unit"] == "ms" else "higher"}
        value["verdict"] = "PASS" if value["name"] == "layer_products_fp32_64" else "MARGINAL"
    named = "memory_read 31.2% below the baseline"
    show(checked(one, "qualify.json"))
    assert (
        "worse than a reference, but not certainly a fault: gemm_fp32_1024_all_cores 43.0% below the baseline; "
        f"Step 35.0% above the baseline; {named}; and 2 more (judged" in capsys.readouterr().out
    )
    read, product, *_ = one["tests"][0]["values"]
    one["verdict"] = read["verdict"] = product["verdict"] = "FAIL"
    read |= {"difference": None, "band": {"lowest": 25.0, "highest": 30.0, "sources": ["somewhere"]}}
    product |= {"difference": None, "better": "zero", "reason": "3 wrong; expected 0"}
    show(checked(one, "qualify.json"))
    failed = "gemm_fp32_1024_all_cores (3 wrong; expected 0); memory_read 20.0% below published values; and 3 values"
    assert f"a fault was found: {failed} MARGINAL (judged" in capsys.readouterr().out


def test_the_report_ends_with_the_command_that_predicts_a_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"layer_products_fp32_16": (100.0, "GFLOP/s"), "layer_products_fp32_256": (120.0, "GFLOP/s")}
    rates |= {"prompt_attention": (60.0, "GFLOP/s"), "rms_norm": (30.0, "GB/s"), "decode_step_tiny": (9.0, "ms")}
    values = document(CPU | rates, "Step", None) | {"machine": {"memory": {"available_bytes": 2**33}}}
    for value in values["tests"][0]["values"]:
        value |= {"windows": [value["median"]], "spread": 0.0, "band": {"lowest": 1.0, "highest": 1e3, "sources": []}}
    file = tmp_path / "my results" / "qualify.json"
    file.parent.mkdir()
    file.write_text(json.dumps(values))
    whole = checked(values, str(file))
    show(whole, full=True)
    command = f"megatoken plan throughput --machine '{file}' --model 125m"
    assert " ".join(capsys.readouterr().out.split()).endswith(f"What should this machine serve? {command}")
    assert "plan throughput --machine" in page(document_view(whole))
    code, out, err = call_here(*shlex.split(command)[1:])
    assert (code, err) == (0, "") and out.startswith("125m in fp32 on ")
    show(checked(document(CPU, "Step", None), "qualify.json"), full=True)
    assert "plan throughput" not in capsys.readouterr().out


def table_of_values(found: dict[str, Any]) -> Table:
    (values,) = [
        block
        for part in document_view(checked(found, "qualify.json")).sections
        for block in part.blocks
        if isinstance(block, Table) and block.caption == "Values"
    ]
    return values


def names_in_table(found: dict[str, Any]) -> list[str]:
    """The first column of the table of values."""
    return [row[0] for row in table_of_values(found).rows]


def test_a_value_names_its_gpu_and_node_once() -> None:
    gpu = document({"hbm_read": (4300.0, "GB/s")}, "step", None)
    gpu["machine"] = {"packages": {"torch": "2.9"}, "all_packages": {}}
    gpu["tests"][0]["values"][0] |= {"title": "Memory read", "core_wait_share": None}
    host = joined({"0": gpu, "1": gpu}, "GPU", expected=2, seconds=1.0)
    ratio = "Memory read: lower over higher"
    assert names_in_table(host) == ["Memory read (GPU 0)", "Memory read (GPU 1)", ratio]
    assert host["answer"][1] == "GPU 0 reads memory at 4,300 GB/s."
    refused = {"name": "node@gamma", "title": "Tests of node gamma", "verdict": "NOT RUN", "reason": "no PyTorch"}
    more = [gpu["tests"][0] | {"verdict": "NOT RUN", "values": [refused]}]
    rack = joined({"alpha": host, "beta": host}, "node", expected=2, seconds=1.0, more=more)
    assert names_in_table(rack) == [
        *("Memory read (GPU 0 of node alpha)", "Memory read (GPU 1 of node alpha)", f"{ratio} (node alpha)"),
        *("Memory read (GPU 0 of node beta)", "Memory read (GPU 1 of node beta)", f"{ratio} (node beta)"),
        *("Memory read (GPU 0): lower over higher", "Memory read (GPU 1): lower over higher"),
        "Tests of node gamma",
    ]
    assert rack["answer"][1] == "GPU 0 of node alpha reads memory at 4,300 GB/s."


def test_steady_values_that_others_on_the_host_may_slow_are_marked() -> None:
    made = document(CPU, "Decode step", None)
    assert {row[2].strip() for row in table_of_values(made).rows} == {""}
    for value, noisy in zip(made["tests"][0]["values"], (False, True), strict=False):
        value |= {"taken_share": 0.625, "windows": [value["median"]] * 2, "noisy": noisy}
    found = table_of_values(made)
    assert [row[2].strip() for row in found.rows[:3]] == ["1.0 ~", "1.0 !", ""]
    assert "~: steady, but other virtual machines of the host may slow it next time." in found.note
