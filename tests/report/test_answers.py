"""Answers to queries as tables, CSV and JSON."""

import csv
import io
import json
from decimal import Decimal

import pyarrow as pa
from rich.console import Console

from megatoken.report import answer_csv, answer_json, answer_table
from megatoken.report.console import show_table

ANSWER = pa.table(
    {
        "run": ["a,b", 'c"d', None],
        "output_tokens_per_second": [1100948.3, float("nan"), 5.0],
        "total": [Decimal(3), Decimal("2.5"), None],
        "deep": [{"x": [1, 2]}, None, None],
    }
)


def test_an_answer_is_shown_under_the_names_of_the_query_and_numbers_to_the_right():
    console = Console(file=io.StringIO(), width=100)
    show_table(answer_table(ANSWER), console)
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["run", "output_tokens_per_second", "total", "deep"]
    assert lines[2].split() == ["a,b", "1,100,948.3", "3", "X:", "1,", "2"]
    assert lines[3].split() == ['c"d', "-", "2.5", "-"]


def test_no_unit_stands_behind_a_whole_struct():
    answer = pa.table({"ttft_seconds": [{"p50_seconds": 0.5}], "output_tokens_per_second": [[1.5, 2.5]]})
    columns = answer_table(answer).columns
    assert [(one.name, one.unit) for one in columns] == [(name, "") for name in answer.column_names]


def test_an_answer_survives_csv_and_json():
    objects = json.loads(answer_json(ANSWER))
    assert objects[0] == {"run": "a,b", "output_tokens_per_second": 1100948.3, "total": 3, "deep": {"x": [1, 2]}}
    assert objects[1]["output_tokens_per_second"] is None
    rows = list(csv.reader(io.StringIO(answer_csv(ANSWER))))
    assert rows[0] == ANSWER.column_names
    assert rows[1] == ["a,b", "1100948.3", "3", '{"x": [1, 2]}']
    assert rows[2][0] == 'c"d'
    assert len(rows) == 4


def test_a_long_answer_is_cut_off_and_says_so_and_an_empty_one_is_empty():
    table = answer_table(pa.table({"n": list(range(1000))}))
    assert len(table.rows) == 200
    assert table.note.startswith("800 more rows")
    empty = pa.table({"n": pa.array([], pa.int64())})
    assert answer_table(empty).rows == ()
    assert json.loads(answer_json(empty)) == []
    assert answer_csv(empty) == "n\n"


def test_columns_of_one_name_are_both_shown():
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert answer_table(twice).rows == (("1", "2"),)
    assert answer_csv(twice) == "a,a\n1,2\n"
