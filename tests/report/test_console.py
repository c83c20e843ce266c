"""What a person reads on the terminal."""

import io
import re

import pytest
import yaml
from report_documents import DETAIL, DOCUMENTS, aggregate_document
from rich.console import Console

from megatoken.report.blocks import Column, Table
from megatoken.report.console import show, show_table
from megatoken.report.documents import checked
from megatoken.report.page import page
from megatoken.report.views import document_view, run_view
from megatoken.report.words import sentence
from megatoken.runs.run import read_run


def shown(path, width: int, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    show(read_run(path), console)
    return console.file.getvalue()


def test_one_table_then_verdict_rules_and_folder(make_run, unmet):
    path = make_run(rules_unmet=unmet)
    text = shown(path, 80)
    lines = text.splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == ["Metric", "Unit", "Value", "p50", "p90", "p95", "p99"]
    assert text.count("Metric") == 1
    assert max(map(len, lines[: lines.index("MEASURED: run completed; no MLPerf compliance claimed")])) <= 80
    table = {line[:25].strip(): line[25:].split() for line in reversed(lines)}
    assert table["Output rate"] == ["tokens/s", "105"]  # 80 x 26 in 19.829 s
    assert table["Time per output token"] == ["ms", "21.6", "22.8", "23.0*", "23.1*"]
    assert table["First token since query"][0] == "s"
    assert table["Peak memory"] == ["MiB", "300"]
    assert "Samples failed" not in table
    tail = lines[-5:]
    assert tail[0].startswith("* too few samples")
    assert tail[1] == "MEASURED: run completed; no MLPerf compliance claimed"
    assert tail[2:] == [
        "MLPerf rules not met (none claimed): MIN_DURATION, SAMPLES",
        "Result not verified by MLCommons Association.",
        f"Run folder: {path}",
    ]


def test_a_doubt_about_the_measurement_is_no_rule_of_mlperf(make_run, unmet):
    path = make_run(rules_unmet=unmet[:1], doubts=[{"code": "SEND_LAG", "message": "samples were sent late"}])
    assert shown(path, 80).splitlines()[-5:-1] == [
        "MLPerf rules not met (none claimed): MIN_DURATION",
        "Result not verified by MLCommons Association.",
        "Doubts about the measurement:",
        "  SEND_LAG samples were sent late",
    ]


def test_reasons_follow_the_verdict(make_run):
    text = shown(make_run("INVALID", reasons=[{"code": "SEEDS", "message": "seeds [1] are not those of v5.1"}]), 80)
    assert "INVALID: a claimed MLPerf rule is not met\n" in text
    assert "met\n  SEEDS seeds [1] are not those of v5.1\n" in text


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        (["COMPLIANCE"], "the compliance test did not pass"),
        (["NO_VALID_RATE"], "the search found no valid rate"),
        (["ACCURACY", "ACCURACY"], "the answers are not accurate enough"),
        (["FAILED_SAMPLES", "SEEDS"], "samples failed; a claimed MLPerf rule is not met"),
        ([], "a required condition was not met"),
    ],
)
def test_an_invalid_run_says_what_is_wrong_with_it_and_nothing_else(make_run, codes, said):
    path = make_run("INVALID", reasons=[{"code": code, "message": "m"} for code in codes])
    assert f"INVALID: {said}\n" in shown(path, 80)
    assert f"{said}<" in page(run_view(read_run(path)))


def test_an_unsteady_soak_is_not_called_a_broken_rule(make_run):
    soak = {"duration_seconds": 9.0, "segments": [{"begins_seconds": 0.0, "started_at": "2026-11-20T09:12:33Z"}]}
    soak["interruptions"] = []
    path = make_run("INVALID", reasons=[{"code": "DRIFT", "message": "m"}], soak=soak)
    assert "INVALID: the rate is not shown to be steady\n" in shown(path, 80)


def test_a_simulated_run_says_so_beside_its_verdict(make_run):
    path = make_run()
    config = yaml.safe_load((path / "config.yaml").read_text())
    (path / "config.yaml").write_text(yaml.safe_dump({**config, "rack": {"simulated_gpu": "H200"}}))
    said = "simulated H200: rates and times come from a cost model; run completed; no MLPerf compliance claimed"
    assert f"MEASURED: {said}\n" in shown(path, 80)
    assert "simulated H200: rates and times come from a cost model" in page(run_view(read_run(path)))


@pytest.mark.parametrize("width", [36, 45, 60, 79])
def test_a_narrow_terminal_gets_one_line_per_percentile(make_run, width):
    path = make_run()
    text = shown(path, width)
    words = re.sub(r"\s+", " ", text)
    assert text.count("Metric") == 1
    assert f"Run folder: {path}\n" in text
    for percentile in ("p50", "p90", "p95", "p99"):
        assert words.count(percentile) == 3
    if width >= 45:
        assert "Time per output token p50" in words
        assert all(len(line) <= width for line in text.split("*")[0].splitlines())


@pytest.mark.parametrize("width", [1, 20, 33])
def test_names_of_metrics_stay_however_narrow_the_terminal(make_run, width):
    path = make_run()
    found = shown(path, width).splitlines()
    wide = [re.split(r"  +", line.strip()) for line in shown(path, 79).splitlines()]
    metrics = [(row[0], row[1], row[-1]) for row in wide[2:] if len(row) == 3]
    assert len(metrics) > 20
    assert set(found) >= {f"{name}: {value} {unit}" for name, unit, value in metrics}
    assert any(line.startswith("* too few samples") for line in found)
    assert f"Run folder: {path}" in found


def test_a_rouge_2_far_below_the_other_scores_is_explained(make_run):
    scores = {name: {"value": value} for name, value in (("exact_match", 98.8), ("rouge2", 77.2))}
    path = make_run(accuracy={"metrics": scores})
    assert "\nROUGE-2 counts pairs of words, so an answer of one word scores 0" in shown(path, 80)
    assert "an answer of one word scores 0" in page(run_view(read_run(path)))
    assert "ROUGE-2" not in shown(make_run(), 80)


def test_no_colour_unless_on_a_terminal(make_run):
    path = make_run()
    assert "\x1b" not in shown(path, 80)
    assert "\x1b[1;36mMEASURED" in shown(path, 80, terminal=True)


def test_a_run_that_did_nothing_still_prints(make_run):
    reasons = [{"code": "INTERRUPTED", "message": "stopped by Ctrl-C"}]
    text = shown(make_run("INTERRUPTED", samples=0, reasons=reasons), 80)
    assert re.search(r"(?m)^Output rate +tokens/s +-", text)
    assert "  INTERRUPTED stopped by Ctrl-C" in text


def test_server_latencies_are_called_by_their_names(make_run):
    text = shown(make_run(scenario="server"), 80)
    assert "Time to first token" in text
    assert "since query" not in text


def document_shown(name: str, width: int = 100, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    show(DOCUMENTS[name](), console, full=True)
    return console.file.getvalue()


def test_stages_are_shares_of_the_time_and_loadgen_has_its_own_word(make_run):
    path = make_run(scenario="server", loadgen_validity="INVALID", offered_samples_per_second=4.5)
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown(path, 100).splitlines()]
    table = {row[0]: row[1:] for row in rows}
    shares = {name: float(row[1]) for name, row in table.items() if name.startswith("Time in ")}
    assert shares.keys() == {"Time in prefill", "Time in decode"}  # the others are unknown in this run
    assert sum(shares.values()) == pytest.approx(100, abs=0.1)
    assert table["Offered"] == ["samples/s", "4.50"]
    assert "Issued late by" in table
    assert "LoadGen result: INVALID" in shown(path, 80)
    assert "LoadGen result" not in shown(make_run(samples=4), 80)


def test_a_terminal_shows_the_answer_of_a_plan_below_what_has_pushed_it_off_the_screen():
    title, headline, *_, last_title, last = (
        line.strip() for line in document_shown("plan_cost", terminal=True).splitlines()
    )
    assert (last_title, last) == (title, headline)
    in_a_file = document_shown("plan_cost").splitlines()
    assert in_a_file.count(in_a_file[1]) == 1


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("width", [40, 80, 140])
def test_every_document_prints_at_every_width(name, width):
    text = document_shown(name, width, terminal=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in plain
    assert DOCUMENTS[name]()["title"] in plain.replace("\n", " ")
    assert "\x1b" not in document_shown(name, width)


def test_findings_come_gravest_first_with_what_where_and_why():
    lines = document_shown("audit").splitlines()
    start = lines.index("Findings")
    assert lines[start + 1 : start + 8] == [
        "fail  Summary and detail log state different target_qps",
        "  LoadGen writes both from one value, so one file was changed after the run.",
        "  summary-target-qps",
        "  Expected: 390, as in the detail log",
        "  Found: 400",
        f"  Where: {DETAIL}:33 · {DETAIL}:71",
        "warn  Seven kinds of line that every genuine log has are missing",
    ]
    assert "Not shown: 2 pass." in lines
    severities = [line.split("  ")[0] for line in lines[start:] if re.match(r"(fail|warn|unknown|note|pass)  ", line)]
    assert severities == ["fail", "warn", "unknown", "note"]


def test_the_answers_are_the_first_thing_said_and_claims_have_their_right_value():
    text = document_shown("audit")
    lines = text.splitlines()
    assert lines[1] == "  1 of 3 claims holds; 1 check of the artefacts fails."
    assert lines[2].startswith("  What breaks: “more than 1.1 million tokens per second on a single VM” is ")
    assert lines[3].startswith("  What the artefacts cannot answer: “")
    assert lines[4].startswith("1 fail  1 warn  1 unknown  1 note  19 pass  the artefacts break rules")
    assert "does not hold  more than 1.1 million tokens per second on a single VM\n" in text
    assert "  Recomputed: 62,803.9 tokens/s · the fastest of 18 nodes\n" in text


def test_an_audit_fits_one_screen_unless_all_of_it_is_asked_for():
    console = Console(file=io.StringIO(), width=100, highlight=False)
    show(DOCUMENTS["audit"](), console)
    brief = console.file.getvalue().splitlines()
    assert len(brief) < 40 < len(document_shown("audit").splitlines())
    assert "Summary and detail log state different target_qps" in "\n".join(brief)
    assert brief[-1] == "Everything else: --full prints it, --out DIR makes a page of it."


def test_published_aggregates_are_printed_with_their_formulas():
    text = document_shown("aggregate", 120)
    assert "1,100,948.3 output tokens/s  sum of 18 node rates, not shown to be simultaneous" in text
    for words in ("62,803.9 tokens/s (ND_GB300_v6_18)", "57,599.1", "61,163.8", "62,111.7", "9.036 %", "3.052 %"):
        assert words in text


def test_what_moves_a_cost_is_told_on_the_terminal_too():
    text = document_shown("plan_cost", 120)
    for swing in DOCUMENTS["plan_cost"]()["sensitivities"]:
        assert sentence(swing["input"]) in text.partition("Sensitivity")[2]
    assert "\nAt a glance\n" not in document_shown("plan_energy", 120)  # its chart's numbers have a table of their own


def test_a_ratio_says_whether_it_compares_like_with_like():
    text = document_shown("comparison", 60)
    assert "Per GPU: 0.9883× · like for like\n" in text
    assert "Per GPU: 0.2355× · not like for like\n" in text
    assert text.partition("\nRatios\n")[2].count("precision: fp8 vs fp4") == 1  # whatever the number of bases


def test_long_tables_end_with_how_many_rows_more_the_page_has():
    table = Table("t", (Column("a"), Column("b", "s", numeric=True)), tuple((f"row {n}", str(n)) for n in range(100)))
    console = Console(file=io.StringIO(), width=80)
    show_table(table, console)
    assert "row 99" in console.file.getvalue()  # a table asked for by itself is printed whole
    document = aggregate_document()
    document["nodes"] *= 3
    console = Console(file=io.StringIO(), width=140)
    show(document, console)
    assert "14 more rows: see the page or the JSON document." in console.file.getvalue()


@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_names_are_not_broken_in_mid_word(width):
    names = ("5.1-0026:llama2-70b-99:Offline", "5.1-0008:llama2-70b-99:Offline")
    columns = (Column("Name"), Column("Source"), Column("Precision"), Column("Rate", "tokens/s", numeric=True))
    rows = tuple((name, "MLPerf Inference v5.1, line 42", "fp4", "13,015.4") for name in names)
    console = Console(file=io.StringIO(), width=width)
    show_table(Table("t", columns, rows), console)
    text = console.file.getvalue()
    assert all(name in text for name in names)
    assert max(map(len, text.splitlines())) <= width
    assert ("──" in text) == (width > 60)


def test_a_table_wider_than_the_terminal_becomes_records():
    table = Table("t", (Column("name"), Column("duration", "s", numeric=True)), (("a" * 30, "1" * 30),))
    console = Console(file=io.StringIO(), width=40)
    show_table(table, console)
    assert console.file.getvalue() == f"{'a' * 30}\n  duration: {'1' * 30} s\n"


def test_columns_move_together_before_a_table_becomes_records_whose_first_number_has_its_name():
    table = Table("t", tuple(Column(f"n{at}", numeric=True) for at in range(9)), (("1" * 6,) * 9,) * 2)  # 54 and gaps
    for width, grid in ((78, True), (70, True), (69, False)):
        console = Console(file=io.StringIO(), width=width)
        show_table(table, console)
        text = console.file.getvalue()
        assert ("──" in text, text.startswith("n0 111111\n  n1: 111111; n2: ")) == (grid, not grid)
        assert max(map(len, text.splitlines())) <= width


def test_a_cell_is_never_folded_into_a_tower():
    """A grid would fit, but its one sentence would stand in a column of a few letters."""
    columns = (Column("name"), Column("value", "W", numeric=True), Column("unit"), Column("why"))
    rows = tuple((f"input {n}", f"{n}", "W", "because " * 60) for n in range(2))
    console = Console(file=io.StringIO(), width=80)
    show_table(Table("t", columns, rows), console)
    lines = console.file.getvalue().splitlines()
    assert lines[:3] == ["input 0", "  value: 0 W; unit: W", f"  why: {('because ' * 60)}"]
    wide = Console(file=io.StringIO(), width=200)
    show_table(Table("t", columns, rows), wide)
    assert "──" in wide.file.getvalue()


def test_a_long_list_of_inputs_is_cut_on_the_terminal_alone():
    document = {**aggregate_document(), "inputs": [f"node-{n}" for n in range(18)]}
    console = Console(file=io.StringIO(), width=80)
    show(document, console)
    text = console.file.getvalue()
    assert "  node-4\n  and 13 more: all 18 are on the page and in the document\n" in text
    assert "node-5" not in text
    assert "node-17" in page(document_view(checked(document)))
    show({**document, "inputs": document["inputs"][:5]}, short := Console(file=io.StringIO(), width=80))
    assert "node-4" in short.file.getvalue() and "more:" not in short.file.getvalue()
