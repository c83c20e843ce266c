"""A dossier: five answers from an audit, a run, limits and a form; nothing passes without evidence."""

import json
import re
import shutil
from pathlib import Path

import pytest

from cli_support import call_here
from megatoken.dossier.form import read_form, shipped_form
from megatoken.report.pdf import BROWSERS
from published import published_logs
from run_folders import run_folder

CLAIMS = Path(__file__).parents[2] / "examples" / "claims"
QUESTIONS = (
    "What was measured?",
    "Is the number true?",
    "Are my limits met?",
    "What does it cost?",
    "How much energy?",
)


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved audit of the published record, by the claims of the vendor."""
    out = tmp_path_factory.mktemp("audit")
    assert call_here("audit", published_logs(), "--claims", CLAIMS / "vendor-blog.yaml", "--out", out)[0] == 3
    return out


def make(*arguments: object) -> dict:
    code, out, err = call_here("dossier", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_published_record_and_a_run_by_my_limits(audit: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs", "mine", "host", "2026-01-01T00:00:00Z").path
    (tmp_path / "limits.yaml").write_text("output_tokens_per_second: 20\ntpot_seconds: {p99: 9}\n")
    flags = ("--run", run, "--slo", tmp_path / "limits.yaml", "--dollars-per-hour", 3.6)
    document = make("--audit", audit, *flags)
    published, mine = document["measured"]
    assert published["output_tokens_per_second"] == pytest.approx(1_100_948.3)
    assert published["if_together"] == pytest.approx(1_030_087.6, rel=1e-7)
    assert (published["accelerators"], published["state"]) == (72, "unverified")
    assert (mine["output_tokens_per_second"], mine["verdict"]) == (11.0, "MEASURED")
    assert [one["answer"] for one in document["limits"][0]["limits"]] == ["CANNOT TELL", "NOT MET"]
    costs = {(one["of"], one["name"]): one for one in document["costs"]}
    assert document["title"].startswith("Dossier: llama2-70b Offline on 72 × NVIDIA GB300; ")
    million = costs["mine", "Price of a million output tokens"]
    assert million["value"] == pytest.approx(3.6 / (11 * 3600) * 1e6)  # $3.6 an hour, 11 tokens a second
    assert {one["about"] for one in document["costs"]} == {"cost", "energy"}
    assert all(one["settle"] for one in document["open"] if one["kind"] == "cost")
    price = costs["mine", "Price of a request"]
    assert (price["value"], price["state"]) == (pytest.approx(0.001), "given")  # $3.6 an hour, one request a second
    assert costs["mine", "Energy of an output token, accelerators"]["value"] is None
    assert costs["Audit of azure_gb300_1m", "Tokens per joule, accelerators only"]["state"] == "nameplate"
    saved = json.loads((audit / "audit.json").read_text())
    answers = [claim["answer"] for claim in saved["claims"]]
    kinds = [one["kind"] for one in document["open"]]
    unknown = sum(finding["severity"] == "unknown" for finding in saved["findings"])
    assert kinds.count("claim") == answers.count("cannot be determined") > 0
    assert kinds.count("check") >= unknown > 0 and kinds.count("limit") == kinds.count("cost") == 1
    assert kinds.count("form") == len(document["form"]["items"])
    assert [Path(one["input"]).name for one in document["inputs"]] == ["audit.json", "mine", "limits.yaml"]
    assert all(re.fullmatch("[0-9a-f]{64}", one["sha256"]) for one in document["inputs"])


def test_a_run_and_an_audit_that_are_given_twice_count_once(audit: Path, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs", "mine", "host", "2026-01-01T00:00:00Z").path
    once = make("--audit", audit, "--run", run)
    twice = make("--audit", audit, "--audit", audit / "audit.json", "--run", run, "--run", tmp_path / "runs")
    assert len(twice["measured"]) == len(once["measured"]) == 2
    assert len(twice["inputs"]) == len(once["inputs"])


def test_an_audit_that_was_edited_is_not_believed(audit: Path, tmp_path: Path) -> None:
    saved = json.loads((audit / "audit.json").read_text())
    assert "cannot be noticed" not in " ".join(make("--audit", audit)["audits"][0]["notes"])
    (tmp_path / "audit.json").write_text(json.dumps(saved))  # the same content in another layout
    make("--audit", tmp_path)
    wrong = next(claim for claim in saved["claims"] if claim["answer"] == "does not hold")
    wrong["answer"] = "holds"
    (tmp_path / "audit.json").write_text(json.dumps(saved))
    code, _, err = call_here("dossier", "--audit", tmp_path)
    assert code == 2 and "edited after the audit: its content does not give its content_sha256" in err
    assert call_here("report", tmp_path) == (2, "", err)
    assert not (tmp_path / "audit.html").exists()
    del saved["content_sha256"]
    (tmp_path / "audit.json").write_text(json.dumps(saved))
    assert "states no content_sha256, so an edit" in " ".join(make("--audit", tmp_path)["audits"][0]["notes"])
    assert "states no content_sha256, so an edit" in call_here("dossier", "--audit", tmp_path)[1].replace("\n", " ")
    assert call_here("report", tmp_path)[0] == 0


def test_the_first_table_of_page_and_terminal_answers_the_five_questions(audit: Path, tmp_path: Path) -> None:
    code, out, _ = call_here("dossier", "--audit", audit, "--out", tmp_path)
    assert code == 0
    page = (tmp_path / "dossier.html").read_text()
    first = page.partition("</table>")[0]
    for text in (*QUESTIONS, "What is open?", "1,030,087.6 as one run", "does not hold", "No limits were given"):
        assert text in first and text in out.partition("\n\n")[0], text
    assert [path.name for path in (tmp_path / "dossier.json", tmp_path / "dossier.html") if str(path) not in out] == []
    if any(map(shutil.which, BROWSERS)):
        assert f"Saved: {tmp_path / 'dossier.pdf'}" in out
        printed = (tmp_path / "dossier.pdf").read_bytes()
        assert printed.startswith(b"%PDF") and len(printed) > 50_000
    assert call_here("report", tmp_path)[0] == 0 and (tmp_path / "dossier.html").read_text() == page


def test_the_answers_name_units_sources_and_what_is_missing(audit: Path, tmp_path: Path) -> None:
    facts = {"loadgen_validity": "INVALID"}
    run = run_folder(tmp_path / "runs", "mine", "host", "2026-01-01T00:00:00Z", **facts).path
    (tmp_path / "limits.yaml").write_text("tpot_seconds: {p99: 9}\n")
    flags = ("--audit", audit, "--run", run, "--slo", tmp_path / "limits.yaml", "--out", tmp_path / "out")
    assert call_here("dossier", *flags)[0] == 0
    page = (tmp_path / "out" / "dossier.html").read_text()
    first = page.partition("</table>")[0]
    assert "<title>Dossier: llama2-70b Offline on 72 × NVIDIA GB300; " in page
    assert "azure_gb300_1m: Cost per million output tokens: $" in first
    assert "mine: Price of a million output tokens: unknown, the price of the machine is unknown." in first
    assert "mine: Energy of an output token, accelerators: unknown, " in first
    assert "11 output tokens/s, 10 samples in 10.0 s: tiny bf16 offline" in first
    assert "LoadGen: INVALID" in first and "Too few samples for a p99 with 99 % confidence." in first
    assert "checklist: 17 open" in first and "Of the checklist 17 questions are open too." in first
    assert "17 questions of the checklist" not in first
    assert "are needed" in first.partition("CANNOT TELL: ")[2].partition("</td>")[0]  # how many samples are missing


@pytest.mark.parametrize(
    ("limit", "settle"),
    [
        ("dollars_per_request: 1", "the price of an hour of the machine: megatoken dossier --dollars-per-hour"),
        ("ttft_seconds: {p99: 1}", "a run with --scenario server"),
        ("itl_seconds: {p99: 1}", "a run of a server that streams (--endpoint), or a sweep"),
        ("accuracy: {rouge1: 40}", "a run with --mode accuracy"),
        ("tpot_seconds: {p999: 9}", "at least 6,636 values"),
    ],
)
def test_each_limit_that_cannot_be_judged_says_what_would_settle_it(limit: str, settle: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "runs", "mine", "host", "2026-01-01T00:00:00Z").path
    (tmp_path / "limits.yaml").write_text(f"{limit}\n")
    opened = make("--run", run, "--slo", tmp_path / "limits.yaml")["open"]
    assert [one["settle"] for one in opened if one["kind"] == "limit"] == [settle]


def test_without_a_browser_the_page_is_there_and_one_line_says_so(audit, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = call_here("dossier", "--audit", audit, "--out", tmp_path)
    assert code == 0 and err.startswith("megatoken: no PDF: ") and err.count("\n") == 1
    assert (tmp_path / "dossier.html").is_file() and not (tmp_path / "dossier.pdf").exists()


def test_no_answer_of_the_form_counts_as_yes_without_evidence_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "proof.txt").write_text("as agreed")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    cases = {  # answer and evidence -> what counts
        ("yes", ()): "unknown",
        ("yes", ("lost.txt",)): "unknown",
        ("yes", ("empty.txt",)): "unknown",
        ("yes", ("folder",)): "unknown",
        ("yes", ("proof.txt",)): "yes",
        ("yes", ("lost.txt", "proof.txt")): "yes",
        ("yes", ("https://example.com/contract",)): "yes",
        ("yes", ("http://",)): "unknown",
        ("yes", ("https:///contract",)): "unknown",
        ("yes", ("https://[contract",)): "unknown",
        ("yes", ("form.yaml",)): "unknown",
        ("yes", ("folder/../form.yaml",)): "unknown",
        ("no", ()): "no",
        ("unknown", ("proof.txt",)): "unknown",
    }
    items = [
        {"id": f"q{number}", "group": "g", "question": "q?", "shows": "s", "answer": answer, "evidence": list(evidence)}
        for number, (answer, evidence) in enumerate(cases)
    ]
    form = tmp_path / "form.yaml"
    form.write_text(json.dumps({"title": "Form", "items": items}))
    found = read_form(form, tmp_path / "out")["items"]
    assert [one["counts_as"] for one in found] == list(cases.values())
    assert all(one["why"] for one in found if one["answer"] != one["counts_as"] or one["answer"] == "no")
    (proof,) = found[4]["evidence"]
    assert proof["address"] == "../proof.txt" and len(proof["sha256"]) == 64
    assert {one["counts_as"] for one in read_form(None)["items"]} == {"unknown"}
    for topic in ("isolation", "secrets", "residency", "support", "exit"):
        assert f"- id: {topic}\n" in shipped_form()


@pytest.mark.parametrize("key", ["kind", "title", "counts", "findings", "notes"])
def test_a_damaged_audit_is_refused_in_one_line(audit: Path, tmp_path: Path, key: str) -> None:
    document = json.loads((audit / "audit.json").read_text())
    (tmp_path / "audit.json").write_text(json.dumps(document | {key: 7}))
    code, out, err = call_here("dossier", "--audit", tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and key in err and "megatoken audit" in err


def test_nothing_to_report_on_and_what_is_no_audit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "audit.json").write_text("{")
    for arguments in ((), ("--audit", tmp_path), ("--audit", tmp_path / "none"), ("--run", tmp_path)):
        code, out, err = call_here("dossier", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
