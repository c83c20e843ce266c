"""Tasks over tables and records: look-up, selection and reformatting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from reference_model import words
from reference_model.problem import Problem, length

Record = dict[str, str | int]

_COLUMNS: dict[str, Callable[[Random], str | int]] = {
    "city": lambda rng: rng.choice(words.CITIES),
    "job": lambda rng: rng.choice(words.JOBS),
    "colour": lambda rng: rng.choice(words.KINDS["colours"]),
    "food": lambda rng: rng.choice(words.KINDS["foods"]),
    "animal": lambda rng: rng.choice(words.KINDS["animals"]),
    "age": lambda rng: rng.randint(18, 89),
    "points": lambda rng: rng.randint(0, 999),
    "code": words.code,
}
_NUMERIC = ("age", "points")


def _draw(rng: Random, rows: int, columns: list[str]) -> list[Record]:
    """Records with different names."""
    names = rng.sample(words.NAMES, rows)
    return [{"name": name, **{column: _COLUMNS[column](rng) for column in columns}} for name in names]


def _columns(rng: Random, low: int, high: int) -> list[str]:
    return rng.sample(list(_COLUMNS), rng.randint(low, high))


def _table(records: list[Record]) -> str:
    lines = [" | ".join(records[0]), *(" | ".join(map(str, record.values())) for record in records)]
    return "\n".join(lines)


def table_value(rng: Random) -> Problem:
    """One cell of a table, or the row that a cell stands in."""
    records = _draw(rng, length(rng, 3, 36), _columns(rng, 2, 4))
    record = rng.choice(records)
    column = rng.choice(list(record)[1:])
    if rng.random() < 0.3 and sum(other[column] == record[column] for other in records) == 1:
        return Problem(f"Who has the {column} {record[column]}?", _table(records), str(record["name"]))
    wording = rng.choice(("What is the {} of {}?", "Look up the {} of {}."))
    return Problem(wording.format(column, record["name"]), _table(records), str(record[column]))


def table_rows(rng: Random) -> Problem:
    """Names of the rows with a value, in order."""
    column = rng.choice(("city", "job", "colour"))
    records = _draw(rng, length(rng, 3, 20), rng.sample(("food", "age", "code"), rng.randint(0, 2)))
    values = [_COLUMNS[column](rng) for _ in range(rng.randint(2, 4))]
    for record in records:
        record[column] = rng.choice(values)
    wanted = rng.choice(values)
    names = [str(record["name"]) for record in records if record[column] == wanted]
    wording = f"List the names with the {column} {wanted}, in order; if there are none, write none."
    return Problem(wording, _table(records), ", ".join(names) or "none")


def table_extreme(rng: Random) -> Problem:
    """Name and value of the row with the most or the least."""
    column = rng.choice(_NUMERIC)
    records = _draw(rng, length(rng, 3, 14), [*rng.sample(("city", "food"), rng.randint(0, 2)), column])
    most = rng.random() < 0.5
    # Of equals the first counts, as max and min see it.
    record = (max if most else min)(records, key=lambda record: int(record[column]))
    wording = f"Which name has the {'most' if most else 'least'} {column}, and how much? Of equals take the first."
    return Problem(wording, _table(records), f"{record['name']}: {record[column]}")


def table_columns(rng: Random) -> Problem:
    """Some columns of a table."""
    columns = _columns(rng, 2, 4)
    records = _draw(rng, length(rng, 2, 20), columns)
    kept = ["name", *sorted(rng.sample(columns, rng.randint(1, len(columns) - 1)), key=columns.index)]
    narrow = [{column: record[column] for column in kept} for record in records]
    return Problem(f"Write only the columns {' and '.join(kept)}.", _table(records), _table(narrow))


def _lines(records: list[Record]) -> str:
    return "\n".join(", ".join(f"{key}: {value}" for key, value in record.items()) for record in records)


def _csv(records: list[Record]) -> str:
    return "\n".join([",".join(records[0]), *(",".join(map(str, record.values())) for record in records)])


def _json(records: list[Record]) -> str:
    return "\n".join(map(json.dumps, records))


def _prose(records: list[Record]) -> str:
    return "\n".join(
        f"{record['name']} has the {' and the '.join(f'{key} {value}' for key, value in list(record.items())[1:])}."
        for record in records
    )


_FORMATS: dict[str, Callable[[list[Record]], str]] = {
    "a table": _table,
    "lines": _lines,
    "CSV": _csv,
    "JSON": _json,
    "sentences": _prose,
}


def convert(rng: Random) -> Problem:
    """Records from one notation to another."""
    records = _draw(rng, length(rng, 1, 12), _columns(rng, 1, 3))
    given, wanted = rng.sample(list(_FORMATS), 2)
    wording = rng.choice((f"Convert to {wanted}.", f"Write this as {wanted}."))
    return Problem(wording, _FORMATS[given](records), _FORMATS[wanted](records))


@dataclass(frozen=True, slots=True)
class _Date:
    year: int
    month: int
    day: int


_DATE_FORMATS: dict[str, Callable[[_Date], str]] = {
    "2021-03-14": lambda date: f"{date.year}-{date.month:02}-{date.day:02}",
    "14/03/2021": lambda date: f"{date.day:02}/{date.month:02}/{date.year}",
    "14 March 2021": lambda date: f"{date.day} {words.MONTHS[date.month - 1]} {date.year}",
    "March 14, 2021": lambda date: f"{words.MONTHS[date.month - 1]} {date.day}, {date.year}",
}


def convert_dates(rng: Random) -> Problem:
    """Dates from one notation to another, one a line."""
    dates = [_Date(rng.randint(1900, 2099), rng.randint(1, 12), rng.randint(1, 28)) for _ in range(rng.randint(1, 18))]
    given, wanted = rng.sample(list(_DATE_FORMATS), 2)
    wording = f"Write the dates like {wanted}."
    return Problem(wording, *("\n".join(map(_DATE_FORMATS[name], dates)) for name in (given, wanted)))
