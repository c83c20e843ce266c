"""SQL over run folders: the same numbers as result.json, no way out, one line for every mistake."""

import builtins
import json
from pathlib import Path

import pytest

from megatoken.analysis.query import query
from megatoken.analysis.repeats import REPEATS
from megatoken.analysis.summary import summarise_run
from megatoken.errors import UsageError
from megatoken.runs.run import read_run
from megatoken.runs.tables import SampleRow, SeriesRow
from megatoken.runs.writer import RunFolder

duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")


def make_run(out: Path, name: str, samples: int = 40, config=None, **facts) -> Path:
    folder = RunFolder.create(
        out,
        name,
        config or {"seed": 1, "empty": {}},
        {"hostname": name},
        scenario="offline",
        summarise=summarise_run,
        facts={"model": "tiny", **facts},
    )
    for n in range(samples):
        folder.add_samples([SampleRow(n, n, 0.0, 0.0, 1.0 + n / 7, 3.0 + n / 5, 10, 20 + n, "length", "node")])
    for second in range(5):
        folder.add_series(SeriesRow(second + 1.0, "node", 0, 10 * second, 20 * second, 8, 8, 5, 10, 4, 0, 0))
    folder.finish({"verdict": "MEASURED", "reasons": []})
    return folder.path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("query") / "runs with [odd] *name"
    make_run(out, "a")
    make_run(out, "b", samples=70)
    return out


def test_percentiles_and_rates_equal_those_of_the_folder(runs):
    table = query(
        [runs],
        """select run, quantile_cont(last_token_seconds - scheduled_seconds, [0.5, 0.9, 0.95, 0.99]) as latency,
                  sum(output_tokens) / max(last_token_seconds) as rate
           from requests where error is null group by run order by run""",
    )
    for row in table.to_pylist():
        result = read_run(runs / row["run"]).result
        expected = [result["latency_seconds"][p] for p in ("p50", "p90", "p95", "p99")]
        assert row["latency"] == pytest.approx(expected, rel=1e-12)
        assert row["rate"] == pytest.approx(result["output_tokens_per_second"], rel=1e-12)
    assert table["run"].to_pylist() == ["a", "b"]


def test_every_field_of_a_result_and_what_ran_where_can_be_asked_for(runs):
    rows = query(
        [runs], "select run, verdict, ttft_seconds.p99 as p99, environment.hostname h, config.seed s from runs"
    )
    assert rows.to_pylist()[1] == {
        "run": "b",
        "verdict": "MEASURED",
        "p99": read_run(runs / "b").result["ttft_seconds"]["p99"],
        "h": "b",
        "s": 1,
    }
    columns = {row["column_name"] for row in query([runs], "describe runs").to_pylist()}
    assert set(read_run(runs / "a").result) | {"run", "path", "repeats", "environment", "config"} == columns


def test_the_three_tables_join(runs):
    sql = """select runs.run, count(*) n, max(series.output_tokens) t from runs join requests using (run)
             join (select run, max(output_tokens) output_tokens from series group by run) series using (run)
             group by runs.run order by n"""
    assert query([runs], sql).to_pylist() == [{"run": "a", "n": 40, "t": 40}, {"run": "b", "n": 70, "t": 40}]


def test_folders_of_one_name_are_told_apart_and_given_twice_counted_once(tmp_path):
    paths = [make_run(tmp_path / "x", "same"), make_run(tmp_path / "y", "same")]
    found = query([*paths, tmp_path / "x"], "select run from runs order by run").to_pylist()
    assert found == [{"run": str(path)} for path in paths]


def test_runs_that_say_things_differently_stand_side_by_side(tmp_path):
    make_run(tmp_path, "a", config={"value": 1, "deep": {"x": 1}}, note=5, huge=2**63)
    make_run(tmp_path, "b", config={"value": "text", "deep": []}, note={"x": 1}, extra=True)
    rows = query([tmp_path], "select note, extra, config, huge from runs order by run").to_pylist()
    assert [json.loads(row["note"]) for row in rows] == [5, {"x": 1}]
    assert [row["extra"] for row in rows] == [None, True]
    assert json.loads(rows[1]["config"])["value"] == "text"
    assert int(rows[0]["huge"]) == 2**63


def test_runs_without_samples_have_empty_tables(tmp_path):
    make_run(tmp_path, "a", samples=0)
    assert query([tmp_path], "select count(*) n from requests").to_pylist() == [{"n": 0}]


@pytest.mark.parametrize(
    "sql",
    [
        "select * from read_csv('{secret}')",
        "select * from read_text('{secret}')",
        "select * from read_blob('{secret}')",
        "select * from '{secret}'",
        "select * from glob('{folder}/*')",
        "select * from query('copy runs to ''{target}''')",
        "copy runs to '{target}'",
        "copy (select 1) to '{target}'",
        "export database '{target}'",
        "attach '{target}' as other",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "reset enable_external_access",
        "pragma enable_external_access",
        "set temp_directory = '{folder}'",
        "create table t as select 1",
        "insert into runs select * from runs",
        "drop view runs",
        "update runs set run = 'x'",
        "delete from runs",
        "select 1; copy runs to '{target}'",
        "call force_checkpoint()",
        "select * from os",
        "select * from hidden_table",
    ],
)
def test_nothing_but_the_three_tables_can_be_reached_or_changed(runs, tmp_path, sql, monkeypatch):
    monkeypatch.chdir(tmp_path)
    secret = tmp_path / "secret.csv"
    secret.write_text("secret\n42\n")
    hidden_table = query([runs], "select 1 as leaked")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError) as refusal:
        query([runs], sql.format(secret=secret, folder=tmp_path, target=tmp_path / "written"))
    assert len(str(refusal.value).splitlines()) == 1
    assert str(refusal.value).startswith("query: ")
    assert sorted(tmp_path.iterdir()) == before
    assert hidden_table is not None


@pytest.mark.parametrize(
    ("sql", "complaint"),
    [
        ("", "query: is empty; give one SELECT over requests, runs, series"),
        ("-- nothing", "query: is empty;"),
        ("select 1; select 2", "query: holds 2 statements; give one SELECT"),
        ("select '\udcff'", "query: not UTF-8 text"),
        ("selec 1", 'query: syntax error at or near "selec"'),
        ("select * from nope", "Table with name nope does not exist; the tables are requests, runs, series"),
        ("select verdit from runs", 'Referenced column "verdit" not found'),
        ("select 'x'::int", "Could not convert string 'x'"),
        ("select " + "(" * 200, "query: "),
    ],
)
def test_a_mistake_is_reported_in_one_line(runs, sql, complaint):
    with pytest.raises(UsageError) as refusal:
        query([runs], sql)
    assert complaint in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1
    assert len(str(refusal.value)) < 600


def test_folders_without_runs_and_damaged_runs_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no run folder and none below it"):
        query([tmp_path / "empty"], "select 1")
    with pytest.raises(UsageError, match="absent: no such folder"):
        query([tmp_path / "absent"], "select 1")
    (make_run(tmp_path, "b") / "series.parquet").write_bytes(b"junk")
    with pytest.raises(UsageError, match=r"b is not a complete run folder: series\.parquet is damaged"):
        query([tmp_path], "select 1")


def test_every_repeat_is_seen_and_says_what_it_repeats(tmp_path):
    for folder in ("x-repeats", "y-repeats"):
        for number in ("001", "002"):
            make_run(tmp_path / folder, number)
        (tmp_path / folder / REPEATS).write_text("{}")
    make_run(tmp_path, "alone")
    samples = "(select count(*) from requests where requests.run = runs.run)"
    answer = query([tmp_path], f"select run, repeats, {samples} from runs")
    assert list(zip(*answer.to_pydict().values(), strict=True)) == [
        ("alone", None, 40),
        *((f"{folder}/{number}", folder, 40) for folder in ("x-repeats", "y-repeats") for number in ("001", "002")),
    ]
    grouped = query([tmp_path], "select repeats, count(*) from runs group by 1 order by 1 nulls first").to_pydict()
    assert list(grouped.values()) == [[None, "x-repeats", "y-repeats"], [1, 2, 2]]
    twice = query([tmp_path, tmp_path / "x-repeats"], "select count(*) from runs").to_pydict()
    assert list(twice.values()) == [[5]]


def test_without_duckdb_the_extra_is_named(runs, monkeypatch):
    real_import = builtins.__import__

    def without(name, *rest, **more):
        if name == "duckdb":
            raise ImportError(name)
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install .*\[report\]'$"):
        query([runs], "select 1")
