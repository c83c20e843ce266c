"""The generated tasks: every answer follows from its prompt, and the held-out problems are not trained on."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from datetime import datetime
from itertools import islice
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer
from torch import device

from reference_model import arithmetic, data, words
from reference_model.data import BEGIN_ID, END_ID, LONGEST_ANSWER_TOKENS, LONGEST_PROMPT_TOKENS, ShardMaker, ShardPlan
from reference_model.problem import Problem
from reference_model.shards import labelled
from reference_model.tasks import TASKS, draw

DRAWS = 300


def problems(task: str) -> list[Problem]:
    rng = Random(task)
    return [TASKS[task][1](rng) for _ in range(DRAWS)]


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def test_no_word_is_of_two_kinds() -> None:
    assert [word for word, count in Counter(words.ALL).items() if count > 1] == []
    assert all(re.fullmatch(r"[A-Za-z]+", word) for word in words.ALL)


def test_arithmetic_is_right() -> None:
    for task, sign in (("add", "+"), ("subtract", "-"), ("multiply", "*")):
        for problem in problems(task):
            assert int(problem.answer) == eval(problem.given) >= 0
            assert sign in problem.given
    for problem in problems("add_columns"):
        *columns, total = problem.answer.split("\n")
        assert total == f"Sum: {eval(problem.given)}"
        assert [numbers(line)[3] for line in columns] == [eval(line.split("=")[0]) for line in columns]


def test_numbers_in_words() -> None:
    spelled = {0: "zero", 13: "thirteen", 40: "forty", 99: "ninety-nine", 105: "one hundred five"}
    spelled |= {7000: "seven thousand", 9218: "nine thousand two hundred eighteen"}
    assert {number: arithmetic.spelled(number) for number in spelled} == spelled
    assert len({arithmetic.spelled(number) for number in range(10_000)}) == 10_000


def test_lists_of_numbers() -> None:
    for problem in problems("sort_numbers"):
        assert numbers(problem.answer) == sorted(numbers(problem.given), reverse="largest" in problem.instruction)
    for problem in problems("filter_numbers"):
        (bound,), given = numbers(problem.instruction), numbers(problem.given)
        kept = [value for value in given if (value > bound if "above" in problem.instruction else value < bound)]
        assert numbers(problem.answer) == kept
        assert kept or problem.answer == "none"
    for problem in problems("progression"):
        first, last, step = numbers(problem.given)
        assert numbers(problem.answer) == list(range(first, last + 1, step))


def test_lists_of_words() -> None:
    for problem in problems("sort_words"):
        assert problem.answer.split(", ") == sorted(problem.given.split(", "))
    for problem in problems("reverse_list"):
        assert problem.answer.split(", ")[::-1] == problem.given.split(", ")
    for problem in problems("deduplicate"):
        assert problem.answer.split(", ") == list(Counter(problem.given.split(", ")))
    for problem in problems("tally"):
        counts = Counter(problem.given.split(", "))
        assert problem.answer == "\n".join(f"{word}: {count}" for word, count in counts.items())
    for problem in problems("count_word"):
        asked = [word for word in re.findall(r"[a-z]+", problem.instruction) if word in words.NOUNS]
        assert problem.answer == str(problem.given.split(", ").count(asked[0]))


def test_replaced_word_is_gone_and_all_else_stays() -> None:
    for problem in problems("replace_word"):
        new, old = (word for word in re.findall(r"[a-z]+", problem.instruction) if word in words.PLACES)
        assert f" {old}." in problem.given
        assert f" {old}." not in problem.answer
        assert problem.given.replace(f" {old}.", f" {new}.") == problem.answer


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.replace(" | ", "|").splitlines(), delimiter="|"))


def test_tables() -> None:
    for problem in problems("table_value"):
        rows = table(problem.given)
        if asked := re.search(r"the (\w+) of (\w+)", problem.instruction):
            assert [row[asked[1]] for row in rows if row["name"] == asked[2]] == [problem.answer]
        else:
            column, value = re.search(r"the (\w+) ([\w-]+)", problem.instruction).groups()  # type: ignore[union-attr]
            assert [row["name"] for row in rows if row[column] == value] == [problem.answer]
    for problem in problems("table_rows"):
        column, value = re.search(r"the (\w+) (\w+),", problem.instruction).groups()  # type: ignore[union-attr]
        names = [row["name"] for row in table(problem.given) if row[column] == value]
        assert problem.answer == (", ".join(names) or "none")
    for problem in problems("table_extreme"):
        column = re.search(r"(?:most|least) (\w+)", problem.instruction)[1]  # type: ignore[index]
        values = [int(row[column]) for row in table(problem.given)]
        extreme = max(values) if "most" in problem.instruction else min(values)
        first = table(problem.given)[values.index(extreme)]
        assert problem.answer == f"{first['name']}: {extreme}"
    for problem in problems("table_columns"):
        kept = problem.instruction.removeprefix("Write only the columns ").removesuffix(".").split(" and ")
        assert table(problem.answer) == [{key: row[key] for key in kept} for row in table(problem.given)]


def test_records_and_dates_keep_their_values() -> None:
    readers = {
        "a table": table,
        "CSV": lambda text: list(csv.DictReader(text.splitlines())),
        "JSON": lambda text: [
            {key: str(value) for key, value in json.loads(line).items()} for line in text.split("\n")
        ],
    }
    read = 0
    for problem in problems("convert_records"):
        wanted = problem.instruction.removesuffix(".").split(" to ")[-1].split(" as ")[-1]
        if wanted in readers:
            values = [value for record in readers[wanted](problem.answer) for value in record.values()]
            assert values
            assert all(value in problem.given for value in values)
            read += 1
    assert read > DRAWS // 3
    styles = {"2021-03-14": "%Y-%m-%d", "14/03/2021": "%d/%m/%Y", "14 March 2021": "%d %B %Y"}
    styles["March 14, 2021"] = "%B %d, %Y"

    def dates(text: str, style: str) -> list[datetime]:
        return [datetime.strptime(line, style) for line in text.split("\n")]

    for problem in problems("convert_dates"):
        wanted = styles[problem.instruction.removeprefix("Write the dates like ").removesuffix(".")]
        given = next(style for style in styles.values() if _parses(problem.given, style))
        assert dates(problem.answer, wanted) == dates(problem.given, given)


def _parses(text: str, style: str) -> bool:
    try:
        return bool(datetime.strptime(text.split("\n")[0], style))
    except ValueError:
        return False


def test_stories_answer_from_what_is_told() -> None:
    for problem in problems("story"):
        if asked := re.fullmatch(r"Where is (\w+) now\?", problem.instruction):
            last = re.findall(rf"{asked[1]} went to the (\w+)\.", problem.given)[-1]
            assert problem.answer == f"{asked[1]} is in the {last}."
        elif held := re.fullmatch(r"(\w+) is in the (\w+) and has the (\w+)\.", problem.answer):
            assert f"{held[1]} has the {held[3]}." in problem.given
            assert f"{held[1]} is in the {held[2]}." in problem.given
        else:
            facts = [fact for fact in problem.given.split(". ") if _subject(problem.instruction) in fact.split()]
            assert len(facts) == 1
            assert problem.answer.removesuffix(".").split()[-1] in facts[0].replace(".", "").split()


def _subject(question: str) -> str:
    return next(word for word in re.findall(r"\w+", question) if word in words.KINDS["things"])


def test_case_and_letters() -> None:
    for problem in problems("change_case"):
        assert problem.answer.lower() == problem.given.lower()
        assert problem.answer in (problem.given.upper(), problem.given.lower(), problem.given.title())
    for problem in problems("spell"):
        assert problem.answer.replace("-", "").replace("\n", ", ") == problem.given.replace("-", "").replace("\n", ", ")
    for problem in problems("filter_kind"):
        kind = next(kind for kind in words.KINDS if kind in problem.instruction)
        assert problem.answer == (", ".join(w for w in problem.given.split(", ") if w in words.KINDS[kind]) or "none")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return data.train_tokenizer(0, vocabulary_size=1024, rows=1000)


def test_rows_are_the_same_from_the_same_seed_and_of_every_task() -> None:
    first, again, other = (list(islice(data.rows_of(seed), 500)) for seed in ("a", "a", "b"))
    assert first == again
    assert not {row.key for row in first} & {row.key for row in other if len(row.answer) > 10}
    assert {row.task for row in first} == set(TASKS)


def test_wording_does_not_change_the_key() -> None:
    given = {draw(Random(seed)).key for seed in range(200)}
    assert len(given) > 190
    rng = Random(1)
    by_key: dict[bytes, set[str]] = {}
    for row in (draw(rng) for _ in range(60_000)):
        prompts = by_key.setdefault(row.key, set())
        prompts.add(row.prompt)
        if row.task == "multiply" and len(prompts) > 1:
            return
    pytest.fail("no problem was drawn in two wordings")


def test_text_survives_the_tokenizer_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    for row in islice(data.rows_of("text"), 200):
        encoded = tokenizer.encode(row.prompt)
        assert tokenizer.decode(encoded.ids) == row.prompt
        assert encoded.ids[0] == BEGIN_ID
        digits = [token for token in encoded.tokens if any(letter.isdigit() for letter in token)]
        assert all(len(token) == 1 for token in digits)


def test_held_out_problems_are_distinct_and_never_trained_on(tokenizer: Tokenizer) -> None:
    held_out = data.held_out_rows(tokenizer, seed=0, count=256)
    keys = frozenset(row.key for row in held_out)
    assert len(keys) == len(held_out) == 256
    layout = data.plan_layout(tokenizer, 0, (128, 384, LONGEST_PROMPT_TOKENS + LONGEST_ANSWER_TOKENS), 8192, 2000)
    assert abs(data.layout_tokens(layout) - 8192) < 1000
    # A shard that would hold problems of the held-out set: those that its own seed draws first.
    drawn = frozenset(row.key for row in islice(data.rows_of("training 0 3"), 20))
    plain = ShardPlan(tokenizer.to_str(), layout, 2, 0, keys)
    without = ShardPlan(tokenizer.to_str(), layout, 2, 0, keys | drawn)
    texts = {
        name: _texts(tokenizer, ShardMaker(plan).make(3)) for name, plan in (("plain", plain), ("without", without))
    }
    answers = {row.prompt + row.answer for row in islice(data.rows_of("training 0 3"), 20)}
    assert len(answers & texts["plain"]) > 10
    assert not answers & texts["without"]
    assert _texts(tokenizer, ShardMaker(plain).make(3)) == texts["plain"]
    assert not _texts(tokenizer, ShardMaker(plain).make(4)) & {text for text in texts["plain"] if len(text) > 80}


def _texts(tokenizer: Tokenizer, groups: list[data.Group]) -> set[str]:
    return {tokenizer.decode(row.tolist()) for group in groups for row in group.token_ids_RS}


def test_labels_are_the_answer_and_its_end(tokenizer: Tokenizer) -> None:
    rows = list(islice(data.rows_of("labels"), 50))
    encoded = [one for one in data.encode_rows(tokenizer, rows) if one is not None]
    assert len(encoded) == 50
    token_ids, labels = labelled(data.group_rows(encoded, LONGEST_PROMPT_TOKENS + LONGEST_ANSWER_TOKENS), device("cpu"))
    for row, ids, wanted in zip(rows, token_ids, labels, strict=True):
        answer = wanted[wanted >= 0].tolist()
        assert answer[-1] == END_ID
        assert tokenizer.decode(answer) == row.answer
        start = int((wanted >= 0).nonzero()[0])
        assert tokenizer.decode(ids[: start + 1].tolist()) == row.prompt
    assert np.mean([(row >= 0).sum() for row in labels]) > 10
