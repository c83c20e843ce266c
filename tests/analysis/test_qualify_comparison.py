"""Published tables next to our values: every row of the Azure guide has a value or a reason, and units are right."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli_support import call_here
from megatoken.analysis.qualify_comparison import compare_with, converted, counterpart_of, table_of
from megatoken.errors import UsageError

OURS = {
    "gemm_fp8_4096": (1250.0, "TFLOP/s"),
    "gemm_bf16_8192": (700.0, "TFLOP/s"),
    "gemm_bf16_1024_all_cores": (500.0, "GFLOP/s"),
    "prompt_attention": (61.0, "GFLOP/s"),
    "hbm_copy": (4270.0, "GB/s"),
    "hbm_triad": (4300.0, "GB/s"),
    "hbm_read": (4500.0, "GB/s"),
    "copy_to_gpu": (55.5, "GB/s"),
    "disk_sequential_read": (2500.0, "MB/s"),
    "disk_random_read_32": (50_000.0, "reads/s"),
    "disk_random_write_32": (40_000.0, "writes/s"),
    "all_reduce_1073741824": (354.0, "GB/s"),
    "layer_products_fp8_llama3.1-8b_1536": (1000.0, "TFLOP/s"),
}


def document(device: str = "H200") -> dict[str, Any]:
    common = {"better": "higher", "verdict": "NO REFERENCE"}
    values = [
        common | {"name": name, "median": one, "unit": unit, "windows": [one]} for name, (one, unit) in OURS.items()
    ]
    return {
        "kind": "qualify",
        "schema_version": 1,
        "created_at": "2026-11-25T00:00:00Z",
        "title": "Qualification",
        "device": device,
        "verdict": "NO REFERENCE",
        "complete": True,
        "set": "full",
        "seconds": 1.0,
        "answer": [],
        "machine": {"memory": {}},
        "tests": [
            {"name": "t", "title": "T", "verdict": "NO REFERENCE", "fault": None, "seconds": 1.0, "values": values}
        ],
    }


def test_every_row_has_our_value_or_a_reason() -> None:
    found = compare_with(document(), "azure")
    rows = found["rows"]
    assert len(rows) == 450
    assert all(row["note"] for row in rows if row["ours"] is None)
    known = {(row["sku"], row["benchmark"], row["parameter"]): row for row in rows}
    copy = known["H200", "hbm_stream", "op=copy"]
    assert (copy["unit"], copy["ours"]) == ("TB/s", pytest.approx(4.27))
    add = known["H200", "hbm_stream", "op=add"]
    assert (add["ours"], add["note"]) == (pytest.approx(4.3), "triad moves the same bytes")
    square = known["H200", "gemm_cublaslt", "dtype=FP8;m=4096;n=4096;k=4096"]
    assert square["ours"] == 1250.0
    assert square["ratio"] == pytest.approx(1250 / square["theirs"])
    disk = known["H200", "fio", "pattern=sequential_read;block_size=1M"]
    assert (disk["unit"], disk["ours"], disk["note"]) == ("GB/s", pytest.approx(2.5), "")
    reads = known["H200", "fio", "pattern=random_read;block_size=1k"]
    assert (reads["ours"], reads["note"]) == (None, "blocks of 1k; ours are of 4k")
    attention = next(row for row in rows if row["benchmark"] == "attention")
    assert attention["ours"] is None and "of 8192 tokens" in attention["note"]
    reduce = next(row for row in rows if "message_bytes=1073741824" in row["parameter"] and row["sku"] == "GB200")
    assert reduce["ours"] == 354.0
    rates = [row for row in rows if row["benchmark"].startswith("llm_offline") and ";tp=1;" in row["parameter"]]
    assert Counter(row["ours"] is not None for row in rates if "8b" in row["parameter"])[True] >= 6
    assert all(row["unit"] == "tokens/s (whole replica)" and row["ours"] > 1000 for row in rates if row["ours"])
    assert found["measured"] == sum(row["ours"] is not None for row in rows) > 80


def test_ours_of_a_processor_is_named_so() -> None:
    rows = compare_with(document("A processor, 2 cores"), "azure")["rows"]
    known = {row["parameter"]: row for row in rows if row["benchmark"] == "gemm_cublaslt"}
    product = known["dtype=FP16;m=1024;n=1024;k=1024"]
    assert (product["ours"], product["note"]) == (0.5, "ours: bf16 on a processor")
    assert "bf16 has the same rate" not in "".join(row["note"] for row in rows)
    reduce = next(row for row in rows if "message_bytes=1073741824" in row["parameter"])
    assert (reduce["ours"], reduce["note"]) == (354.0, "ours: processes on a processor")
    on_gpu = compare_with(document(), "azure")["rows"]
    same = [row for row in on_gpu if "dtype=FP16;m=8192;n=8192" in row["parameter"]]
    assert {(row["ours"], row["note"]) for row in same} == {(700.0, "bf16 has the same rate as fp16")}


def test_units_are_converted_and_others_refused() -> None:
    assert converted(1500, "GFLOP/s", "TFLOPS") == 1.5
    assert converted(0.9, "TB/s", "MB/s") == 900_000
    for unit, wanted in (("GB/s", "TFLOPS"), ("GB/s", "furlongs")):
        with pytest.raises(UsageError):
            converted(1, unit, wanted)
    assert counterpart_of("gemm_cublaslt", {"dtype": "FP4", "m": "8", "n": "8", "k": "8"}).name is None


def test_random_writes_of_a_table_have_ours_of_the_same_blocks() -> None:
    ours = counterpart_of("fio", {"pattern": "random_write", "block_size": "4k"}).name
    assert ours is not None
    rate, unit = OURS[ours]
    assert converted(rate, unit, "GB/s") == pytest.approx(0.16384)


def test_a_damaged_field_of_a_stored_qualification_names_the_file_that_has_it(tmp_path: Path) -> None:
    stored, damaged = tmp_path / "qualify.json", document("A processor, 2 cores")
    damaged["tests"][0]["values"][0] |= {"baseline": 1.0, "baseline_noisy": "x"}
    stored.write_text(json.dumps(damaged))
    code, out, err = call_here("qualify", "--compare", "azure", "--of", stored, "--out", tmp_path / "compared.json")
    assert (code, out) == (2, "")
    assert err.startswith(f"megatoken: {stored}: tests[0]: values[0]: baseline_noisy is not true or false")


def test_the_command_compares_a_stored_qualification(tmp_path: Path) -> None:
    stored, out_file = tmp_path / "qualify.json", tmp_path / "compared.json"
    stored.write_text(json.dumps(document("A processor, 2 cores")))
    code, out, err = call_here("qualify", "--compare", "azure", "--of", stored, "--out", out_file)
    assert (code, err) == (0, "")
    assert "450 rows have a value of ours" in out
    table = out.partition("450 rows have a value of ours")[2].partition("rows have none")[0]
    stream = [row for row in json.loads(out_file.read_text())["comparison"]["rows"] if row["name"] == "hbm_triad"]
    assert table.count("op=triad") + table.count("op=add") == len(stream) and "more rows" not in table
    assert "more rows: see the page" in out
    assert len(json.loads(out_file.read_text())["comparison"]["rows"]) == 450
    assert json.loads(out_file.read_text())["inputs"] == [str(stored)]
    table = tmp_path / "mine.csv"
    table.write_text("sku,benchmark,parameter,value,unit\nX,hbm_stream,op=copy,much,TB/s\n")
    empty = tmp_path / "empty.csv"
    empty.write_text("sku,benchmark,parameter,value,unit\n")
    for flags, words in (
        (("--compare", empty), "has no row after its header"),
        (("--compare", table), "row 1: value 'much' is no number"),
        (("--compare", tmp_path / "none"), "give a CSV table, or azure"),
        (("--of", stored), "needs --compare"),
        (("--compare", stored), "expected the columns"),
    ):
        code, _, err = call_here("qualify", *flags, "--out", out_file)
        assert (code, len(err.splitlines())) == (2, 1)
        assert words in err
    assert table_of("azure")[0].name == "azure_guide_microbenchmarks.csv"


GEMM, LLM = "dtype=FP16;m=8;n=8;k=8", "llm_offline_throughput,model=llama3.1-8b;tp=1"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("X,gemm", "parameter is missing"),
        (f"X,gemm,{GEMM},1", "unit is missing"),
        (f"X,gemm,{GEMM},,TFLOPS", "value '' is no number"),
        (f"X,gemm,{GEMM},inf,TFLOPS", "value 'inf' is no number from 0 on"),
        (f"X,gemm,{GEMM},nan,TFLOPS", "value 'nan' is no number from 0 on"),
        (f"X,gemm,{GEMM},-1,TFLOPS", "value '-1' is no number from 0 on"),
        (f"X,gemm,{GEMM},1,furlongs", "unit 'furlongs' is unknown; known are TFLOPS, "),
        (f"X,gemm,{GEMM},1,GB/s", "unit GB/s does not measure gemm, which is in operations/s"),
        (f"X,{LLM},1,GB/s", "unit GB/s does not measure llm_offline_throughput, which is in tokens/s"),
        (f"X,{LLM},1,tokens/s", "parameter: isl is '', not a whole number from 1 to 1,000,000"),
        (f"X,{LLM};isl=8;osl=0,1,tokens/s", "parameter: osl is '0', not"),
        (f"X,{LLM};isl=8;osl=8;requests=z,1,tokens/s", "parameter: requests is 'z', not"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_before_a_test_runs(row: str, words: str, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"sku,benchmark,parameter,value,unit\nX,gemm,{GEMM},1,TFLOPS\n{row}\n")
    code, out, err = call_here("qualify", "--compare", table, "--out", tmp_path / "new")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"--compare {table}: row 2: {words}" in err and err.endswith("; correct it\n")
    assert not (tmp_path / "new").exists()


def test_a_table_of_a_spreadsheet_is_read_and_rows_without_a_value_of_ours_say_why(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    rows = ("cpu_stream,op=read,1,GB/s", "nvbandwidth,direction=up,1,GB/s", f"{LLM};isl=1000000;osl=8,1,tokens/s")
    text = "".join(f"X,{row}\n" for row in rows)
    table.write_text(f"sku,benchmark,parameter,value,unit\n{text}", encoding="utf-8-sig")
    stream, copies, offline = compare_with(document(), str(table))["rows"]
    assert stream["note"] == "qualify has no op 'read'; it has those of copy, mul, add, triad, dot"
    assert copies["note"] == "qualify has no direction 'up'; it has h2d, d2h, d2d_bidirectional_read"
    assert (offline["ours"], "exceed the longest sequence" in offline["note"]) == (None, True)
