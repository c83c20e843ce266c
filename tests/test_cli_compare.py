"""``megatoken compare``."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cli_results import REPOSITORY, document_of, hostile_paths, refused, two_runs
from cli_support import ENVIRONMENT, call, redirected
from published import published_logs


def test_published_rows_by_id_and_by_accelerator(tmp_path: Path) -> None:
    code, stdout, err = call("compare", "5.1-0016", "GB200", "Rubin", "4.1-0043", "--out", tmp_path)
    assert (code, err) == (0, "")
    for words in ("5.1-0008:llama2-70", "not like for like", "precision: fp4", "no data", "verified"):
        assert words in " ".join(stdout.split())
    document = json.loads((tmp_path / "comparison.json").read_text())
    assert document["kind"] == "comparison"
    assert [row["state"] for row in document["rows"]] == ["verified", "verified", "no data", "verified"]
    assert document["rows"][3]["per_gpu_tokens_per_second"] == 24_524.9 / 8
    assert (tmp_path / "comparison.html").read_text().startswith("<!")


def test_another_benchmark_and_scenario() -> None:
    flags = ("--benchmark", "llama3.1-405b", "--scenario", "Server")
    document = document_of("compare", "GB200", "H200", *flags)
    assert {row["model"] for row in document["rows"]} == {"llama3.1-405b"}
    assert {row["scenario"].lower() for row in document["rows"]} == {"server"}


def test_a_claim_and_the_logs_it_is_about() -> None:
    claims = REPOSITORY / "examples" / "claims" / "vendor-blog.yaml"
    document = document_of("compare", published_logs(), f"{claims}#median")
    assert [row["state"] for row in document["rows"]] == ["unverified", "claimed"]
    assert document["rows"][0]["output_tokens_per_second"] == pytest.approx(1_100_948.3, abs=0.1)
    assert any("1,136,100 tokens/s (v6.1, CoreWeave)" in note for note in document["notes"])


def test_repeats_have_an_interval_and_what_an_engine_ran_with_is_told(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    first, _ = two_runs(tmp_path_factory)
    others = Path(shutil.copytree(first.parent, tmp_path / "others"))
    for run in others.iterdir():
        result = json.loads((run / "result.json").read_text())
        result["rated_seconds"] /= 2
        for name in ("output_tokens_per_second", "processed_tokens_per_second"):
            result[name] *= 2
        result["target"]["threads"] += 1
        (run / "result.json").write_text(json.dumps(result))
    document = document_of("compare", first.parent, others)
    (ratio,) = (ratio for ratio in document["ratios"] if ratio["basis"] == "total")
    low, high = ratio["interval"]
    assert low < ratio["value"] < high
    assert ratio["value"] == pytest.approx(2)
    (difference,) = document["software_differences"]
    assert "target.threads" in difference.values()


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    for path in hostile_paths(tmp_path).values():
        assert str(path) in refused("compare", path, "GB200")
    for references, why in (
        (("GB200",), "at least two results"),
        (("GB200", "ZX81"), "ZX81: not a folder, a published id or an accelerator"),
        (
            ("GB200", "H100", "--benchmark", "llama2-7b"),
            "--benchmark llama2-7b: no published result has it",
        ),
        (("GB200", "H100", "--scenario", "Sever"), "did you mean Server?"),
        (("GB200", "5.1-9999"), "5.1-9999"),
        (("GB200", "absent.yaml#median"), "absent.yaml: cannot be read: No such file"),
        (("GB200", "H200", "--benchmrak", "x"), "--benchmrak: unknown flag; did you mean --benchmark?"),
    ):
        assert why in refused("compare", *references)


def test_outputs_that_are_closed_or_know_few_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = redirected(">&-", "compare", "5.1-0016", "GB200")
    assert (code, err) == (1, "megatoken: cannot write to standard output: Bad file descriptor\n")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONIOENCODING", "ascii")
    assert os.environ.get("PYTHONIOENCODING") != "ascii"
    code, stdout, err = redirected("", "compare", "5.1-0016", "GB200")
    assert (code, err) == (0, "")
    assert "\\xd7" in stdout
    code, stdout, err = redirected("", "compare", "5.1-0016", "GB200", "--json")
    assert (code, err, json.loads(stdout)["kind"]) == (0, "", "comparison")


def test_rows_of_different_rounds_are_named_and_rows_without_data_come_last() -> None:
    code, out, _ = call("compare", "GB300", "GB200")
    lines = out.splitlines()
    assert (
        code == 0 and lines[2].startswith("  Rows of different rounds of MLPerf: 6.1-") and "5.1-0008 is of v5.1" in out
    )
    [cells] = [line.split() for line in lines if line.startswith("Round ")]
    assert cells == ["Round", "v6.1", "v5.1"]
    code, out, _ = call("compare", "GB300@v5.1", "GB200@v5.1")
    assert code == 0 and "different rounds" not in out
    assert "no data does not mean slower; published are llama3.1-405b (--benchmark)" in out.split("Figures")[0]
    document = document_of("compare", "GB300@v5.1", "GB200@v5.1")
    assert [row["state"] for row in document["rows"]] == ["verified", "no data"]
    assert {(row["model"], row["scenario"]) for row in document["rows"]} == {("llama2-70b", "Offline")}
    both = document_of("compare", "GB300@v5.1", "GB200@v5.1", "--benchmark", "llama3.1-405b")
    assert {row["round"] for row in both["rows"]} == {"v5.1"} and both["ratios"]
