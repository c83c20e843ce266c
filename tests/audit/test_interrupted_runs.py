"""Run folders of runs that were killed: the audit reports that first, and a folder that claims a result fails."""

import json
import shutil
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cli_results import document_of
from cli_support import TIMEOUT_SECONDS, started
from megatoken.analysis.statistics import summarise
from megatoken.audit import Finding, Severity, audit
from megatoken.report.documents import checked
from megatoken.report.views.audit import audit_view
from megatoken.runs.run import read_run

CAUSES = {signal.SIGINT: "INTERRUPTED: SIGINT after ", signal.SIGKILL: "INTERRUPTED: NOT_FINISHED "}
TINY = ("--model", "tiny", "--random-weights", "--warm-up", 0.1, "--engine.threads", 1)


def killed(out: Path, number: int, *arguments: object, samples: int = 1) -> Path:
    """The folder of a run that got a signal once so many samples of a test that goes on had ended."""
    lengths = out.parent / "lengths.csv"
    lengths.write_text("input_tokens,output_tokens\n" + "".join(f"{20 + row},{5 + row % 7}\n" for row in range(90)))
    with started("run", *TINY, "--lengths", lengths, "--out", out, *arguments) as process:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while sum(map(ended, filter(goes_on, out.glob("2*/**/requests.parquet")))) < samples:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
    (folder,) = out.glob("2*")
    return folder


def goes_on(rows: Path) -> bool:
    """Between two probes of a search none does; a probe that ends is renamed, so what was listed may be gone."""
    try:
        return bool(json.loads((rows.parent / "result.json").read_text())["verdict"] == "INTERRUPTED")
    except FileNotFoundError:
        return False


def ended(rows: Path) -> int:
    try:
        return sum(reason.as_py() != "cancelled" for reason in pq.read_table(rows)["finish_reason"])
    except FileNotFoundError:
        return 0


@pytest.fixture(scope="module", params=CAUSES, ids=lambda number: number.name)
def interrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    out = tmp_path_factory.mktemp("killed") / "runs"
    return request.param, killed(out, request.param, "--samples", 5000)


def findings(folder: Path) -> dict[str, Finding]:
    """By id, the gravest of each."""
    return {item.id: item for item in reversed(audit(folder).findings)}


def graver_than_unknown(folder: Path) -> set[str]:
    return {item.id for item in audit(folder).findings if item.severity in (Severity.FAIL, Severity.WARN)}


def say(folder: Path, **changes: object) -> None:
    path = folder / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_audit_says_interrupted_first_and_accuses_nobody(interrupted: tuple[int, Path]) -> None:
    number, folder = interrupted
    document = document_of("audit", folder)  # exit code 0
    assert document["counts"]["fail"] == document["counts"]["warn"] == 0, document["findings"]
    first = document["findings"][0]
    assert (first["id"], first["severity"]) == ("run_folder.interrupted", "unknown")
    assert first["found"].startswith(CAUSES[number])
    assert first["found"].endswith(f"samples that had ended: {ended(folder / 'requests.parquet')}")
    assert first["reported"]["verdict"] == "INTERRUPTED"
    assert f"INTERRUPTED: {first['reported']['reasons'][0]}".startswith(CAUSES[number])
    assert document["notes"][0].startswith(CAUSES[number])
    (_, sentence), *_ = audit_view(checked(document)).summary[0].points
    assert sentence.startswith(f"No check fails, but the run itself is {CAUSES[number]}")
    found = {item["id"]: item["severity"] for item in document["findings"]}
    assert {found[name] for name in ("log.whole", "summary.counts", "rules.valid")} == {"unknown"}
    assert found["run_folder.metrics"] == found["settings.library_order"] == found["build.sources"] == "pass"


@pytest.mark.parametrize("verdict", ["VALID", "MEASURED", "INVALID"])
def test_the_same_folder_as_a_result_fails(interrupted: tuple[int, Path], tmp_path: Path, verdict: str) -> None:
    number, folder = interrupted
    claim = Path(shutil.copytree(folder, tmp_path / "run"))
    say(claim, verdict=verdict, reasons=[])
    found = graver_than_unknown(claim)
    assert {"log.whole", "summary.counts"} <= found
    if number == signal.SIGINT:
        assert "log.abandoned" in found
    shutil.rmtree(claim / "mlperf")
    if verdict != "INVALID":  # as a search that finds no rate ends without a test of its own
        assert "run_folder.loadgen" in graver_than_unknown(claim)


def test_what_is_there_is_held_against_it_all_the_same(interrupted: tuple[int, Path], tmp_path: Path) -> None:
    _, folder = interrupted
    spoiled = Path(shutil.copytree(folder, tmp_path / "run"))
    log = spoiled / "mlperf" / "mlperf_log_detail.txt"
    seed = '"effective_qsl_rng_seed", "value": '
    log.write_text(log.read_text().replace(f"{seed}1", f"{seed}2"))
    say(spoiled, output_tokens_per_second=9999.0)
    found = graver_than_unknown(spoiled)
    assert "settings.effective" in found
    assert found & {"run_folder.metrics", "run_folder.whole"}  # the latter where no sample was completed


def test_answers_that_were_cut_off_count_in_the_rate_with_the_tokens_that_were_seen(
    interrupted: tuple[int, Path],
) -> None:
    number, folder = interrupted
    run = read_run(folder)
    cut = [row for row in run.requests.to_pylist() if row["finish_reason"] == "cancelled"]
    assert bool(cut) == (number == signal.SIGINT)  # a killed process writes nothing
    assert all(row["output_tokens"] > 0 and row["last_token_seconds"] is None for row in cut)
    result = run.result
    assert result["samples_cancelled"] == len(cut)
    if cut:
        last = run.series.to_pylist()[-1]
        assert result["rated_seconds"] == last["elapsed_seconds"]
        assert result["output_tokens_per_second"] == pytest.approx(last["output_tokens"] / last["elapsed_seconds"])
        assert last["output_tokens"] == sum(row["output_tokens"] for row in run.requests.to_pylist())
        assert f"when {5000 - result['samples_completed']:,} of the" in (folder / "mlperf/ABANDONED.txt").read_text()


def test_rows_written_after_the_metrics(interrupted: tuple[int, Path], tmp_path: Path) -> None:
    """The tables are written first: a process that is killed in between leaves metrics of the rows before."""
    _, folder = interrupted
    torn = Path(shutil.copytree(folder, tmp_path / "run"))
    run = read_run(torn)
    rows = len(run.requests) - 1
    say(torn, **summarise(run.requests.slice(0, rows), run.series, scenario="offline", finished=False))
    stored = json.loads((torn / "result.json").read_text())
    assert stored["samples_completed"] + stored["samples_cancelled"] == rows
    assert graver_than_unknown(torn) == set()
    say(torn, output_tokens=json.loads((torn / "result.json").read_text())["output_tokens"] + 1)
    assert graver_than_unknown(torn) == {"run_folder.metrics"}


def test_a_run_without_any_log_yet(interrupted: tuple[int, Path], tmp_path: Path) -> None:
    _, folder = interrupted
    early = Path(shutil.copytree(folder, tmp_path / "run"))
    for path in (early / "mlperf").iterdir():
        path.unlink()
    result = audit(early)
    assert result.findings[0].id == "run_folder.interrupted"
    assert graver_than_unknown(early) == set()
    for cut in (0, 1, 100, 30_000):  # where a file system keeps but the beginning of what was written
        log = (folder / "mlperf" / "mlperf_log_detail.txt").read_bytes()
        (early / "mlperf" / "mlperf_log_detail.txt").write_bytes(log[:cut])
        assert graver_than_unknown(early) == set(), cut


def test_logs_apart_from_their_folder(interrupted: tuple[int, Path]) -> None:
    """What says that LoadGen was stopped lies beside its logs, if there was time to say it."""
    number, folder = interrupted
    found = findings(folder / "mlperf")
    assert found["log.whole"].severity is (Severity.UNKNOWN if number == signal.SIGINT else Severity.FAIL)
    assert audit(folder / "mlperf", round="v5.1").exit_code == 3


def test_a_search_that_is_killed(tmp_path: Path) -> None:
    config = ("--scenario", "server", "--find-rate", "--rate", 8, "--min-duration", 120)  # on any machine
    folder = killed(tmp_path / "runs", signal.SIGKILL, *config)
    result = audit(folder)
    assert result.counts["fail"] == result.counts["warn"] == 0, result.findings
    assert result.findings[0].id == "run_folder.interrupted"
    assert result.notes[0].startswith("INTERRUPTED: NOT_FINISHED")
    assert sum(note.count("INTERRUPTED") for note in result.notes) == 1  # of the probe it is the search's own word
    by_severity = {item.severity for item in result.findings if item.id == "run_folder.interrupted"}
    assert by_severity == {Severity.UNKNOWN, Severity.NOTE}
