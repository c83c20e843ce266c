"""Real run folders whose tables were edited, with the metrics that follow from the edited tables."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_run_folder_fields import FP32, OPTIONS, TINY, Edit, edited, held_against, in_result, made

from cli_support import call_here
from megatoken.analysis.repeats import summarise_repeats
from megatoken.analysis.summary import summarise_run
from megatoken.audit import Severity, audit
from megatoken.files import plain
from megatoken.runs.run import read_run

EditTable = Callable[[pa.Table], pa.Table]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    load = ("--scenario", "server", "--rate", 12, "--min-duration", 3)
    return made(tmp_path_factory, "run", *load, *FP32)


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "run", "--samples", 64, *FP32)


def found(run: Path, tmp_path: Path, name: str, edit: EditTable) -> dict[str, str]:
    """What an audit finds in a copy with an edited table and the metrics of it."""
    folder = Path(shutil.copytree(run, tmp_path / run.name))
    pq.write_table(edit(pq.read_table(folder / name)), folder / name)
    one = read_run(folder)
    result = one.result | plain(summarise_run(one.result, one.requests, one.series))
    (folder / "result.json").write_text(json.dumps(result))
    return held_against(audit(folder).findings)


def set_column(table: pa.Table, name: str, values: object) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, type=table.schema.field(name).type))


def column(table: pa.Table, name: str) -> np.ndarray:
    return np.array(table[name].to_pylist(), dtype=float)


@pytest.mark.parametrize("kind", ["server", "offline"])
def test_what_was_not_edited_passes(kind: str, request: pytest.FixtureRequest) -> None:
    findings = audit(request.getfixturevalue(kind)).findings
    assert held_against(findings) == {}
    passed = {item.id for item in findings if item.severity is Severity.PASS}
    assert {"run_folder.latencies", "run_folder.series"} <= passed


def test_first_tokens_that_came_earlier(server: Path, tmp_path: Path) -> None:
    """All but the slowest, whose 99th percentile is compared with LoadGen's when the verdict is recomputed."""

    def earlier(table: pa.Table) -> pa.Table:
        due, first, last = (column(table, f"{name}_seconds") for name in ("scheduled", "first_token", "last_token"))
        slow = np.argsort(first - due)[-3:]
        new = due + 0.1 * (first - due)
        new[slow] = first[slow]
        new_last = new + (last - first)
        new_last[np.argmax(last)] = last.max()
        return set_column(set_column(table, "first_token_seconds", new), "last_token_seconds", new_last)

    text = found(server, tmp_path, "requests.parquet", earlier)["run_folder.latencies"]
    assert "p50 of TTFT" in text and "by LoadGen" in text


def test_answers_that_ended_earlier(server: Path, tmp_path: Path) -> None:
    def shorter(table: pa.Table) -> pa.Table:
        first, last = column(table, "first_token_seconds"), column(table, "last_token_seconds")
        return set_column(table, "last_token_seconds", np.where(last < last.max(), first + 0.2 * (last - first), last))

    text = found(server, tmp_path, "requests.parquet", shorter)["run_folder.latencies"]
    assert " of latency " in text and "by LoadGen" in text  # which percentiles depends on waits for cores


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("output_tokens", lambda values: 2 * values, "output tokens in series.parquet, "),
        ("elapsed_seconds", lambda values: 0.5 * values, "the last answer at "),
        ("elapsed_seconds", lambda values: values[::-1], "a row of series.parquet at "),
        ("output_tokens", lambda values: np.where(values < values.max(), 0, values), "0 output tokens at "),
    ],
)
def test_a_series_of_another_run(
    server: Path, tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray], text: str
) -> None:
    def edit(table: pa.Table) -> pa.Table:
        values = change(column(table, name))
        return set_column(table, name, values.astype(int) if name == "output_tokens" else values)

    assert text in found(server, tmp_path, "series.parquet", edit)["run_folder.series"]


@pytest.mark.parametrize(
    ("share", "check", "text"),
    [
        (0.0, "run_folder.loadgen", "no log that can be read"),
        (0.5, "run_folder.verdict", "LoadGen's log has no result_validity, so it was cut off before its results"),
    ],
)
def test_a_log_without_its_end_is_said_in_words(
    offline: Path, tmp_path: Path, share: float, check: str, text: str
) -> None:
    folder = Path(shutil.copytree(offline, tmp_path / offline.name))
    log = folder / "mlperf" / "mlperf_log_detail.txt"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: int(share * len(lines))]))
    findings = held_against(audit(folder).findings)
    assert findings[check] == text
    assert not [one for one in findings.values() if "TypeError" in one]


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("repeated")
    flags = (*TINY, "--samples", 8, "--repeat", 3, *OPTIONS, "--out", out)
    assert call_here("run", *flags)[0] == 0
    return next(out.iterdir())


def test_repeats_that_are_copies_or_missing_are_named(repeated: Path, tmp_path: Path) -> None:
    assert "run_folder.repeats" not in held_against(audit(repeated).findings)
    assert "run_folder.copies" not in held_against(audit(repeated).findings)
    folder = Path(shutil.copytree(repeated, tmp_path / "repeats"))
    shutil.rmtree(folder / "002")
    (folder / "repeats.json").unlink()
    said = "no repeats.json, which config.yaml of its run folders asks for; 002 of 3 repeats is missing"
    assert held_against(audit(folder).findings)["run_folder.repeats"] == said
    rest = [read_run(folder / name) for name in ("001", "003")]
    (folder / "repeats.json").write_text(json.dumps(plain(summarise_repeats(rest, 2))))
    assert held_against(audit(folder).findings)["run_folder.repeats"] == "002 of 3 repeats is missing"
    shutil.copytree(folder / "001", folder / "002")
    assert held_against(audit(folder).findings)["run_folder.copies"] == "001, 002 have logs of one run"
    code, _, err = call_here("compare", folder, repeated / "001")
    assert code == 2 and "002 is a copy of 001: their answers ended at the same moments; remove one of them" in err


def test_more_input_than_the_series_has(offline: Path, tmp_path: Path) -> None:
    def thrice(table: pa.Table) -> pa.Table:
        return set_column(table, "input_tokens", 3 * column(table, "input_tokens").astype(int))

    assert "input and output tokens in" in found(offline, tmp_path, "requests.parquet", thrice)["run_folder.series"]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            in_result(identity__files=lambda files: [one | {"sha256": "0" * 64} for one in files]),
            "identity.weights_sha256",
        ),
    ],
)
def test_hashes_that_other_fields_contradict(offline: Path, tmp_path: Path, edit: Edit, text: str) -> None:
    assert text in edited(offline, tmp_path, edit)["run_folder.configuration"]
