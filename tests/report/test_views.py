"""Pages of documents: what they say, in the words and figures of the document."""

import json
import os

import pytest
from pages import parsed, table_rows, words
from report_documents import (
    DETAIL,
    DOCUMENTS,
    RATES,
    aggregate_document,
    audit_document,
    capacity_document,
    comparison_document,
    cost_document,
    finding,
    head,
)

from megatoken.errors import StorageError, UsageError
from megatoken.report import save_document, write_report
from megatoken.report.documents import checked
from megatoken.report.page import page
from megatoken.report.views import document_view


def page_of(document):
    return parsed(page(document_view(checked(document))))


def table(root, caption):
    return next(t for t in root.iter("table") if words(t.find("caption")) == caption)


def figure(root, title):
    return next(f for f in root.iter("figure") if words(f.find("figcaption")).startswith(title))


def test_findings_are_sorted_merged_and_can_be_chosen_by_severity():
    root = page_of(audit_document())
    rows = table(root, "Findings").findall("tbody/tr")
    assert [row.get("class") for row in rows] == ["is-fail", "is-warn", "is-unknown", "is-note", "is-pass", "is-pass"]
    first = [words(cell) for cell in rows[0]]
    assert first[0] == "✕ fail"
    assert first[2:4] == ["390, as in the detail log", "400"]
    assert f"{DETAIL}:33" in first[4]
    assert "and 17 more places" in words(rows[4])  # 18 nodes pass the same check
    boxes = {box.get("class"): box.get("checked") for box in root.iter("input") if box.get("class") != "show-holds"}
    assert boxes["show-pass"] is None
    assert all(boxes[f"show-{severity}"] == "checked" for severity in ("fail", "warn", "unknown", "note"))
    assert words(root.find(".//div[@class='verdict']")).startswith("✕ 1 fail ! 1 warn ? 1 unknown 1 note ✓ 19 pass")


def reported(verdict, *reasons, **more):
    return {"verdict": verdict, "reasons": list(reasons), **more}


TOO_SHORT = "MIN_DURATION ran 0.4 s of 600 s"
INVALID = reported("INVALID", TOO_SHORT, "LOADGEN_INVALID LoadGen result: INVALID (Min duration: NO; TTFT)")
OWN_REASON = reported(
    "INVALID", "LOADGEN_INVALID LoadGen result: INVALID (TTFT: NO; Early stopping: NO)", "DATA_SET_SIZE"
)
BY_LOADGEN = reported("INVALID", "Min duration satisfied: NO", "TTFT constrain not met")
PROBED = reported("INTERRUPTED", "OVER_LIMIT 40 samples over the TTFT limit")
AGREE = "The files agree with each other, but"


def of_run(severity, name, what):
    return {**finding(severity, name, "title", "clean", "INVALID: in one text", "why", 1), "reported": what}


@pytest.mark.parametrize(
    ("said", "validity", "sentence"),
    [
        ([], ["VALID"], "The results stand: none of 1 check fails."),
        (
            [("note", "run_folder.healthy", INVALID)],
            [],
            f"{AGREE} the run itself is INVALID: MIN_DURATION ran 0.4 s of ",
        ),
        ([("note", "run_folder.healthy", OWN_REASON)], [], "INVALID (TTFT: NO; Early stopping: NO)."),
        (
            [("note", "run_folder.healthy", reported("INVALID", stability="UNDECIDED"))],
            [],
            f"{AGREE} the run itself is INVALID, UNDECIDED: no reason given.",
        ),
        (
            [("note", "run_folder.healthy", INVALID), ("warn", "run_folder.healthy", OWN_REASON)],
            [],
            f"No check fails, but 2 runs report a problem; the first is INVALID: {TOO_SHORT}.",
        ),
        (
            [("warn", "run_folder.healthy", reported("DEGRADED", "LOST 1 replica."))],
            ["VALID"],
            "No check fails, but the run itself is DEGRADED: LOST 1 replica.",
        ),
        (
            [("note", "run_folder.healthy", reported("MEASURED", "CLIENT_SATURATED the client was late"))],
            ["INVALID"],
            f"{AGREE} the run itself doubts its measurement: CLIENT_SATURATED the client was late.",
        ),
        (
            [("note", "run_folder.healthy", INVALID)],
            ["VALID", "INVALID"],
            f"{AGREE} a run is INVALID: MIN_DURATION ran 0.4 s of 600 s.",
        ),
        (
            [("unknown", "run_folder.interrupted", reported("INTERRUPTED", "SIGINT after 3 s"))],
            [None],
            "No check fails, but the run itself is INTERRUPTED: SIGINT after 3 s.",
        ),
        ([("note", "run_folder.interrupted", PROBED)], ["VALID"], "The results stand: none of 2 checks fails."),
        (
            [("note", "rules.valid", BY_LOADGEN)],
            ["INVALID", "VALID", "INVALID"],
            f"{AGREE} LoadGen calls 2 of 3 runs INVALID, the first: Min duration satisfied: NO.",
        ),
        (
            [("unknown", "rules.valid", None), ("note", "rules.valid", BY_LOADGEN)],
            ["INVALID"],
            "No check fails, but LoadGen calls the run INVALID: Min duration satisfied: NO.",
        ),
        (
            [("fail", "rules.valid", BY_LOADGEN)],
            ["INVALID"],
            "The results do not stand as they are: 1 check of 2 fails; LoadGen calls the run INVALID: Min duration ",
        ),
        (
            [("warn", "log.dates", None), ("unknown", "accuracy.evidence", None)],
            ["VALID"],
            "No check fails; of 3, 1 needs an explanation and 1 cannot be answered.",
        ),
    ],
)
def test_the_first_sentence_of_an_audit_says_what_speaks_against_the_run(said, validity, sentence):
    findings = [finding("pass", "log.whole", "whole", "all", "all", "", 1)]
    findings += [of_run(severity, name, what) for severity, name, what in said]
    runs = [
        {"path": f"n{number}/mlperf", "role": "performance", "validity": one} for number, one in enumerate(validity)
    ]
    runs.append({"path": "probes/1/mlperf", "role": "performance", "validity": "INVALID"})
    root = page_of(head("audit", "t", findings=findings, artefacts=runs))
    assert sentence in words(root)
    unsound = "INVALID" in sentence or ", but" in sentence
    assert (", but the run itself reports a problem" in words(root)) is (unsound and said[0][0] != "fail")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("run_folder.healthy", "but the run itself reports INVALID: MIN_DURATION ran 0.4 s; TTFT (2 times)."),
        ("rules.valid", "but LoadGen calls the run INVALID."),
    ],
)
def test_an_audit_by_an_older_version_has_the_reasons_in_one_text(name, sentence):
    found = "INVALID: MIN_DURATION ran 0.4 s; TTFT (2 times)"
    runs = [{"path": "mlperf", "role": "performance", "validity": "INVALID"}]
    document = head("audit", "t", findings=[finding("note", name, "title", "clean", found, "why", 1)], artefacts=runs)
    assert sentence in words(page_of(document))


def test_a_claim_about_an_invalid_run_says_that_it_is_one():
    findings = [of_run("note", "run_folder.healthy", INVALID)]
    claim = {"id": "rate", "text": "5 tokens/s", "answer": "holds"}
    root = page_of(head("audit", "t", findings=findings, claims=[claim]))
    assert "The claim holds; the run itself is INVALID: MIN_DURATION ran 0.4 s of 600 s." in words(root)


def test_many_findings_are_cut_off_and_said_to_be():
    findings = [finding("warn", f"id-{n}", f"title {n}", n, n, "why", n) for n in range(1000)]
    root = page_of(head("audit", "t", findings=[*findings, finding("fail", "last", "grave", 1, 2, "")]))
    rows = table(root, "Findings").findall("tbody/tr")
    assert len(rows) == 400
    assert words(rows[0]).startswith("✕ failgrave")
    assert "601 more of the same or lower severity are in the JSON document." in words(root)


def test_claims_come_worst_first_with_the_right_value_or_what_would_settle_it():
    root = page_of(audit_document())
    rows = [[words(cell) for cell in row] for row in table(root, "Claims").findall("tbody/tr")]
    assert [row[0] for row in rows] == ["✕ does not hold", "? cannot be determined", "✓ holds"]
    assert rows[0][2:4] == ["1,100,000 tokens/sper VM", "62,803.9 tokens/sthe fastest of 18 nodes"]
    assert "evidence that would decide: power_begin and power_end of every node" in rows[1][4]


def test_errors_and_relations_of_a_claim_are_named():
    document = audit_document()
    document["claims"][0] |= {"errors": ["scope", "nameplate sold as measured"]}
    document["claims"][0]["claimed"] |= {"relation": "at least"}
    text = words(table(page_of(document), "Claims"))
    assert "Scope error" in text and "nameplate sold as measured" in text and "at least 1,100,948.3 tokens/s" in text


def test_the_three_rates_stand_together_with_what_each_means():
    rows = table_rows(page_of(aggregate_document()), "The same nodes by three rules")
    assert rows["Sum of node rates"][:2] == ["1,100,948.3", "100"]
    assert rows["First start to last end"][:2] == ["1,030,088.1", "93.56"]
    assert "conditional: not shown that they did" in rows["First start to last end"][2]
    assert rows["While all were running"][:2] == ["-", "-"]


def test_published_statistics_and_the_slow_group_are_on_the_page():
    root = page_of(aggregate_document())
    rows = table_rows(root, "How the nodes differ")
    assert rows["Fastest node"] == ["62,803.9 tokens/s (ND_GB300_v6_18)"]
    assert rows["Median of the nodes"] == ["62,111.7 tokens/s"]
    assert rows["Spread, (max - min) / max"] == ["8.287 %"]
    chart = figure(root, "Rate of each node")
    assert len(chart.findall(".//circle")) == 13
    assert [path.get("class") for path in chart.findall(".//path")] == ["dot apart"] * 5
    assert "slow group: ND_GB300_v6_4, ND_GB300_v6_8, ND_GB300_v6_13, ND_GB300_v6_14, ND_GB300_v6_16" in words(chart)
    assert len(table_rows(root, "Nodes")) == len(RATES) + 1


def test_too_many_nodes_for_a_row_each_become_a_distribution():
    document = aggregate_document()
    document["nodes"] *= 3
    assert figure(page_of(document), "Rates of the nodes").find(".//polyline") is not None


def test_verified_and_unverified_bars_differ_in_pattern_and_word():
    chart = figure(page_of(comparison_document()), "Per GPU")
    bars = [rect.get("class") for rect in chart.iter("rect")]
    assert bars == ["bar", "bar hatched", "bar", "bar", "bar outlined"]
    states = [words(text) for text in chart.iter("text") if text.get("class") == "value end"]
    assert states == ["verified", "unverified", "verified", "verified", "estimate"]
    rack = figure(page_of(comparison_document()), "Per rack")
    assert [words(text) for text in rack.iter("text") if text.get("class") == "value end"] == [
        "projection",
        "unverified",
    ]


def test_ratios_say_on_which_basis_and_whether_like_for_like():
    rows = table_rows(page_of(comparison_document()), "Ratios")
    b200 = rows["Lenovo 8x B200over Azure GB200 VM, 5.1-0008"]
    assert b200[0] == "0.9883×✓ like for like"
    assert b200[1] == "1.977×✕ not like for likeaccelerators per node: 8 vs 4"
    # What differs on every basis is said once, what one side does not state in one line.
    h100 = rows["DGX H100over Azure GB200 VM, 5.1-0008precision: fp8 vs fp4"]
    assert h100[0] == "0.2355×✕ not like for like"
    (paper,) = [name for name in rows if name.startswith("H100 rack as the paper says")]
    assert "state: estimate vs verified" in paper and "does not state: division" in paper


def test_differing_software_has_a_column_for_each_result():
    rows = table_rows(page_of(comparison_document()), "Software and settings that differ")
    assert rows["CUDA"] == ["12.9", "13.0"]


def test_a_plan_leads_with_its_first_result_and_every_figure_has_its_state():
    root = page_of(cost_document())
    assert words(root.find(".//p[@class='headline']")) == "0.067 $"
    assert table_rows(root, "Results") == {
        "Result": [],
        "cost per million output tokensdollars per hour / tokens per hour x 10^6": ["0.067", "$", "! estimate"],
    }
    assert table_rows(root, "Inputs")["power pricestatistics office"] == ["0.1", "", "$/kWh", "! assumed"]


def test_a_cost_has_its_waterfall_and_its_tornado():
    root = page_of(cost_document())
    assert table_rows(root, "Parts of the cost, $ per million output tokens")["All parts"] == ["0.067", "assumed"]
    swings = table_rows(root, "Sensitivity: cost per million output tokens, $")
    assert list(swings) == ["Input", "Utilisation", "Rack price", "PUE"]
    assert swings["Utilisation"] == ["0.3", "0.9", "0.156", "0.052"]


def test_capacity_has_its_table_and_shares_become_percent():
    document = capacity_document()
    document["results"].append({"name": "left", "value": 0.9444, "unit": "share", "formula": "", "state": "estimate"})
    root = page_of(document)
    assert table_rows(root, "What the rate means for users")["RAG"] == ["440", "5,280", "31,680"]
    assert table_rows(root, "Results")["left"] == ["94.4", "%", "! estimate"]
    assert figure(root, "What the rate means for users").find("svg/rect") is not None


def test_the_nodes_of_a_demand_curve_are_drawn():
    curve = {"name": "curve", "title": "Demand", "rows": [{"hour": n / 2, "nodes": n % 5} for n in range(24)]}
    root = page_of(head("plan_fleet", "t", tables=[curve], results=[]))
    assert "Nodes for each hour of the cycle" in words(root)
    assert "from 0 to 4" in words(figure(root, "Nodes needed for the demand").find("svg/desc"))


def test_few_objects_of_many_keys_stand_upright_and_what_all_share_is_said_once():
    profiles = [{"name": n, "turns": 4, **{f"key_{i}": f"{n}{i}" for i in range(8)}} for n in ("a", "b")]
    root = page_of(head("plan_capacity", "t", profiles=profiles))
    rows = table_rows(root, "Workload profiles")
    assert next(iter(rows)) == "Name"
    assert rows["Key 3"] == ["a3", "b3"]
    assert "The same for all: Turns: 4" in words(root)


def test_what_is_not_known_here_is_shown_all_the_same():
    root = page_of(head("plan_energy", "t", results=[], later={"idea": {"deep": [1, 2]}}))
    assert table_rows(root, "Further values") == {"later.idea.deep": ["1, 2"]}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"findings": 5}, "document: findings is not a list of objects"),
        ({"findings": [{"severity": []}]}, "document: findings[0]: severity is not a text"),
        ({"aggregate": [1]}, "document: aggregate is not an object"),
        ({"aggregate": {"sum_of_rates_tokens_per_second": "many"}}, "sum_of_rates_tokens_per_second is not a number"),
    ],
)
def test_a_wrong_shape_is_named_by_its_key(values, complaint):
    with pytest.raises(UsageError) as refusal:
        document_view(checked(head("audit", "t", **values)))
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "kind None is none of audit, aggregate"),
        ('{"kind": "poem", "schema_version": 1}', "kind 'poem' is none of"),
        ('{"kind": "audit", "schema_version": 2}', "schema_version 2; this megatoken reads 1"),
        ('{"kind": "audit", "schema_version": 1, "x": ' + "[" * 60 + "]" * 60 + "}", "nested more than 40 deep"),
        ("\udcff", "not JSON"),
    ],
)
def test_what_is_no_document_is_refused_in_one_line(tmp_path, content, complaint):
    path = tmp_path / "audit.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError) as refusal:
        write_report(path)
    assert complaint in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_a_folder_shows_its_one_document(tmp_path):
    with pytest.raises(UsageError, match="neither a run folder"):
        write_report(tmp_path)
    saved, report = save_document(cost_document(), tmp_path / "out" / "cost")
    assert (saved.name, report.name) == ("plan_cost.json", "plan_cost.html")
    first = report.read_bytes()
    assert json.loads(saved.read_text())["kind"] == "plan_cost"
    assert write_report(saved.parent) == write_report(saved) == report
    assert report.read_bytes() == first
    save_document(audit_document(), saved.parent)
    with pytest.raises(UsageError, match=r"holds audit\.json, plan_cost\.json; give the file"):
        write_report(saved.parent)
    with pytest.raises(UsageError, match="cannot be read"):
        write_report(tmp_path / "absent.json")


def test_a_document_that_cannot_be_saved_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        save_document(cost_document(), tmp_path / "file")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_saved_document_makes_the_same_page(name, tmp_path):
    document = DOCUMENTS[name]()
    saved, report = save_document(document, tmp_path)
    assert report.read_text(encoding="utf-8") == page(document_view(checked(document)))
    assert write_report(saved) == report
    assert report.read_text(encoding="utf-8") == page(document_view(checked(document)))


def test_two_plans_in_one_folder_keep_their_pages(tmp_path):
    pages = [save_document(DOCUMENTS[name](), tmp_path)[1] for name in ("plan_cost", "plan_capacity")]
    assert [path.name for path in pages] == ["plan_cost.html", "plan_capacity.html"]
    assert "Cost" in pages[0].read_text() and "Capacity" in pages[1].read_text()


def test_what_is_not_ours_is_never_overwritten(tmp_path):
    saved, page_of_it = save_document(cost_document(), tmp_path)
    for theirs in (b"<!DOCTYPE html><title>my notes</title>", b"", b"\xff" * 10_000):
        page_of_it.write_bytes(theirs)
        for write in (lambda: write_report(saved), lambda: save_document(cost_document(), tmp_path)):
            with pytest.raises(UsageError, match=r"plan_cost\.html: this file is not a megatoken page; move it"):
                write()
        assert page_of_it.read_bytes() == theirs
    page_of_it.unlink()
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.html: this file is not a megatoken page"):
        write_report(saved, notes)
    saved.write_text('{"my": "costs"}')
    with pytest.raises(UsageError, match=r"plan_cost\.json: this file is not a megatoken document"):
        save_document(cost_document(), tmp_path)
    assert (saved.read_text(), notes.read_text()) == ('{"my": "costs"}', "mine")


def test_a_pipe_is_refused_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "audit.json")
    with pytest.raises(UsageError, match="not a regular file"):
        write_report(tmp_path / "audit.json")
