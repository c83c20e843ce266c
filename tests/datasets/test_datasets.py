"""Data files become checked requests, or one line that says what is wrong, where, and how to mend it."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from examples import examples
from megatoken.datasets.lengths import LLAMA2_70B_LENGTHS, load_lengths
from megatoken.datasets.mlperf import load_mlperf
from megatoken.datasets.prompts import load_prompts
from megatoken.datasets.requests import Dataset
from megatoken.engine.request import Request, Sampling
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import DatasetError, ExitCode

VOCABULARY, CONTEXT = 1000, 64


def encode(text: str) -> list[int]:
    """A tokenizer for tests: begin token, then one id per character."""
    return [1, *(ord(letter) % VOCABULARY for letter in text)]


def write(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prompts(path: Path, **changes: object) -> Dataset:
    options = {"encode": encode, "vocabulary_size": VOCABULARY, "max_length": CONTEXT} | changes
    return load_prompts(path, **options)


def lengths(path: Path | None, **changes: object) -> Dataset:
    return load_lengths(path, **({"vocabulary_size": VOCABULARY, "max_length": 4096} | changes))


def refusal(load: object, path: Path, **changes: object) -> str:
    with pytest.raises(DatasetError) as caught:
        load(path, **changes)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300
    assert caught.value.exit_code == ExitCode.USAGE
    return message.removeprefix(str(path))


# --- JSON lines -------------------------------------------------------------------------------------------------------


def test_prompts_with_and_without_options(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "héllo"}\n'
        "\n"
        '{"prompt_token_ids": [5, 0, 999], "max_tokens": 7, "temperature": 1, "top_k": 40, "top_p": 0.9, "seed": 3,'
        ' "stop_token_ids": [2, 8], "ignore_end_token": true}\r\n'
        '  {"prompt_token_ids": [4], "seed": 9223372036854775807}  ',
    )
    dataset = prompts(path, default_max_tokens=12, sampling=Sampling(temperature=0.5, top_k=3))
    assert list(dataset.requests) == [
        Request(encode("héllo"), 12, Sampling(0.5, 3)),
        Request([5, 0, 999], 7, Sampling(1.0, 40, 0.9, 3), (2, 8), True),
        Request([4], 12, Sampling(0.5, 3, 1.0, 2**63 - 1)),
    ]
    assert dataset.input_tokens.tolist() == [6, 3, 1]
    assert dataset.output_limits.tolist() == [12, 7, 12]
    assert dataset.notes == ()
    assert (dataset.name, dataset.source) == ("prompts.jsonl", str(path))
    assert dataset.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()


def test_requests_are_a_sequence(tmp_path: Path) -> None:
    requests = prompts(write(tmp_path, "".join(f'{{"prompt_token_ids": [{n}]}}\n' for n in range(10)))).requests
    assert len(requests) == 10
    assert requests[-1] == requests[9] == requests[np.int64(9)] == Request([9], 63)
    assert requests[2:8:3] == [requests[2], requests[5]]
    with pytest.raises(IndexError):
        requests[10]


def test_byte_order_mark_of_other_editors_is_no_error(tmp_path: Path) -> None:
    assert len(prompts(write(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\n')).requests) == 1


def test_default_length_is_cut_to_the_context_and_noted(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f'{{"prompt_token_ids": {[5] * count}}}\n' for count in (1, 53, 54, 55, 63)))
    dataset = prompts(path, default_max_tokens=10)
    assert dataset.output_limits.tolist() == [10, 10, 10, 9, 1]
    (note,) = dataset.notes
    assert "2 of 5 prompts" in note
    assert "10 tokens" in note
    assert "context of 64" in note


def test_stated_length_may_fill_the_context_exactly(tmp_path: Path) -> None:
    dataset = prompts(write(tmp_path, '{"prompt_token_ids": [1, 2], "max_tokens": 62}'))
    assert dataset.requests[0].max_tokens == 62


BAD_LINES = {
    "broken JSON": ('{"prompt": "a"', "column 15"),
    "broken JSON inside": ('{"prompt": "a" "max_tokens": 1}', "column 16"),
    "not an object": ("[1, 2]", "a list is not a JSON object"),
    "a number": ("17", "17 is not a JSON object"),
    "two objects": ('{"prompt": "a"} {"prompt": "b"}', "column 17"),
    "no prompt": ('{"max_tokens": 3}', "give one of prompt, prompt_token_ids and messages"),
    "nothing": ("{}", "give one of prompt, prompt_token_ids and messages"),
    "both prompts": ('{"prompt": "a", "prompt_token_ids": [1]}', "give one of prompt, prompt_token_ids and messages"),
    "empty prompt": ('{"prompt": ""}', 'prompt is ""'),
    "prompt no text": ('{"prompt": 3}', "prompt is 3"),
    "half a character": ('{"prompt": "\\ud800"}', "it must be Unicode text"),
    "empty ids": ('{"prompt_token_ids": []}', "prompt_token_ids is an empty list"),
    "ids no list": ('{"prompt_token_ids": 5}', "prompt_token_ids is 5"),
    "id no number": ('{"prompt_token_ids": [1, "2"]}', 'a list whose entry 1 is "2"'),
    "id a fraction": ('{"prompt_token_ids": [1.0]}', "a list whose entry 0 is 1.0"),
    "id true": ('{"prompt_token_ids": [3, true]}', "a list whose entry 1 is true"),
    "id null": ('{"prompt_token_ids": [null]}', "a list whose entry 0 is null"),
    "ids nested": ('{"prompt_token_ids": [[1]]}', "a list whose entry 0 is a list"),
    "id too large": ('{"prompt_token_ids": [1, 1000]}', "token id 1000 at index 1 is outside the vocabulary of 1,000"),
    "id negative": ('{"prompt_token_ids": [-1]}', "token id -1 at index 0 is outside the vocabulary of 1,000"),
    "id huge": ('{"prompt_token_ids": [' + "9" * 3000 + "]}", "of more than 64 bits at index 0 is outside"),
    "stop id too large": ('{"prompt": "a", "stop_token_ids": [1000]}', "stop token id 1000 at index 0 is outside"),
    "stop id no list": ('{"prompt": "a", "stop_token_ids": 2}', "stop_token_ids is 2"),
    "prompt too long": ('{"prompt_token_ids": ' + str([7] * 64) + "}", "64 tokens leaves no room for an answer"),
    "text too long": ('{"prompt": "' + "x" * 99 + '"}', "100 tokens leaves no room"),
    "answer too long": ('{"prompt": "abc", "max_tokens": 61}', "lower max_tokens to 60"),
    "max_tokens zero": (
        '{"prompt": "a", "max_tokens": 0}',
        "max_tokens is 0; it must be a whole number from 1 to 2147483647",
    ),
    "max_tokens negative": ('{"prompt": "a", "max_tokens": -5}', "max_tokens is -5"),
    "max_tokens fraction": ('{"prompt": "a", "max_tokens": 2.0}', "max_tokens is 2.0"),
    "max_tokens text": ('{"prompt": "a", "max_tokens": "2"}', 'max_tokens is "2"'),
    "max_tokens true": ('{"prompt": "a", "max_tokens": true}', "max_tokens is true"),
    "max_tokens null": ('{"prompt": "a", "max_tokens": null}', "max_tokens is null"),
    "max_tokens huge": ('{"prompt": "a", "max_tokens": ' + "9" * 400 + "}", "max_tokens is 999"),
    "max_tokens absurd": ('{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}", "too many digits"),
    "temperature NaN": ('{"prompt": "a", "temperature": NaN}', "temperature is NaN; it must be a finite number"),
    "temperature infinite": ('{"prompt": "a", "temperature": 1e999}', "temperature is Infinity"),
    "temperature negative": ('{"prompt": "a", "temperature": -0.1}', "temperature is -0.1"),
    "temperature huge": ('{"prompt": "a", "temperature": ' + "9" * 400 + "}", "temperature is 999"),
    "temperature true": ('{"prompt": "a", "temperature": true}', "temperature is true"),
    "top_k negative": ('{"prompt": "a", "top_k": -1}', "top_k is -1"),
    "top_k fraction": ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5"),
    "top_p zero": ('{"prompt": "a", "top_p": 0}', "top_p is 0; it must be a number above 0 and at most 1"),
    "top_p above one": ('{"prompt": "a", "top_p": 1.01}', "top_p is 1.01"),
    "seed negative": ('{"prompt": "a", "seed": -1}', "seed is -1"),
    "seed too large": ('{"prompt": "a", "seed": 9223372036854775808}', "seed is 9223372036854775808"),
    "flag a number": ('{"prompt": "a", "ignore_end_token": 1}', "ignore_end_token is 1; it must be true or false"),
    "misspelt key": ('{"prompt": "a", "max_token": 3}', 'unknown key "max_token"; did you mean max_tokens?'),
    "foreign key": ('{"prompt": "a", "zzz": 3}', 'unknown key "zzz"; the keys are prompt, prompt_token_ids'),
    "key twice": ('{"prompt": "a", "prompt": "b"}', "a key is given twice"),
    "key with a line break": ('{"prompt": "a", "x\\ny": 3}', 'unknown key "x\\ny"'),
    "nested too deep": ('{"prompt": ' + "[" * 100_000, "nested too deeply"),
    "not UTF-8": (b'{"prompt": "caf\xe9"}', "byte 16 of the line is not UTF-8"),
    "another encoding": ('{"prompt": "a"}'.encode("utf-16"), "byte 1 of the line is not UTF-8"),
    "zero bytes": (b"\x00\x00\x00", "column 1"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_its_number_and_its_mend(kind: str, tmp_path: Path) -> None:
    line, problem = BAD_LINES[kind]
    content = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b'{"prompt": "good"}\n\n' + content + b'\n{"prompt": "good"}\n')
    message = refusal(prompts, path)
    assert message.startswith(", line 3: ")
    assert problem in message


def test_text_without_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt_token_ids": [1]}\n{"prompt": "a"}\n')
    message = refusal(prompts, path, encode=None)
    assert message.startswith(", line 2: ")
    assert "tokenizer.json" in message


def test_what_the_tokenizer_returns_is_checked_too(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "a"}')
    assert "prompt is empty" in refusal(prompts, path, encode=lambda text: [])
    assert "token id 5000" in refusal(prompts, path, encode=lambda text: [5000])


def test_text_that_the_tokenizer_has_no_token_for(tmp_path: Path) -> None:
    words_only = FastTokenizer(models.WordLevel({"good": 0}, unk_token="?"))
    words_only.save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path, '{"prompt": "good"}\n{"prompt": "bad"}\n')
    message = refusal(prompts, path, encode=Tokenizer(tmp_path / "tokenizer.json").encode)
    assert message.startswith(", line 2: the prompt cannot be encoded")


def test_which_answers_surely_fill_their_limit(tmp_path: Path) -> None:
    forced = '"prompt_token_ids": [1], "ignore_end_token": true'
    path = write(tmp_path, f'{{{forced}}}\n{{{forced}, "stop_token_ids": [3]}}\n{{"prompt": "a"}}\n')
    assert prompts(path).fills_limit.tolist() == [True, False, False]
    assert lengths(None).fills_limit.all()
    assert not openorca(table(tmp_path, [[1], [2]])).fills_limit.any()


@pytest.mark.parametrize("content", ["", "\n \n\t\r\n"])
def test_a_file_without_prompts(content: str, tmp_path: Path) -> None:
    assert "no prompts" in refusal(prompts, write(tmp_path, content))


@pytest.mark.parametrize("load", [prompts, lengths, load_mlperf])
def test_files_that_cannot_be_opened(load: object, tmp_path: Path) -> None:
    changes = {"vocabulary_size": VOCABULARY, "max_length": CONTEXT}
    assert "No such file" in refusal(load, tmp_path / "absent", **changes)
    assert "directory" in refusal(load, tmp_path, **changes)
    assert "null" in refusal(load, tmp_path / "a\0b", **changes)


ROWS = st.lists(
    st.fixed_dictionaries(
        {"prompt_token_ids": st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)},
        optional={
            "max_tokens": st.integers(1, 34),
            "temperature": st.floats(0, 100) | st.integers(0, 5),
            "top_k": st.integers(0, 2**31 - 1),
            "top_p": st.floats(0, 1, exclude_min=True),
            "seed": st.integers(0, 2**63 - 1),
            "stop_token_ids": st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
            "ignore_end_token": st.booleans(),
        },
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(ROWS)
def test_every_good_line_comes_back_as_its_request(tmp_path_factory: pytest.TempPathFactory, rows: list[dict]) -> None:
    path = write(tmp_path_factory.getbasetemp(), "\n".join(map(json.dumps, rows)))
    expected = [
        Request(
            row["prompt_token_ids"],
            row.get("max_tokens", 20),
            Sampling(row.get("temperature", 0.0), row.get("top_k", 0), row.get("top_p", 1.0), row.get("seed")),
            tuple(row.get("stop_token_ids", ())),
            row.get("ignore_end_token", False),
        )
        for row in rows
    ]
    assert list(prompts(path, default_max_tokens=20).requests) == expected


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["prompt", "prompt_token_ids", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids", "x"]
)
LINES = st.dictionaries(KEYS, JSON_VALUES, max_size=4).map(lambda fields: json.dumps(fields).encode()) | st.binary(
    max_size=60
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(LINES, max_size=3).map(b"\n".join), st.integers(0), st.binary(max_size=2))
def test_any_other_content_is_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, at: int, noise: bytes
) -> None:
    position = at % (len(content) + 1)
    path = write(tmp_path_factory.getbasetemp(), content[:position] + noise + content[position:])
    for load in (prompts, lengths):
        try:
            dataset = load(path)
        except DatasetError as error:
            lines = str(error).splitlines()
            assert len(lines) == 1
        else:
            assert all(0 <= token < VOCABULARY for request in dataset.requests for token in request.prompt)


def test_a_million_prompts_would_fit_in_memory(tmp_path: Path) -> None:
    """What stays per row is the tokens, 4 bytes each, and under 100 bytes of everything else."""
    rows, tokens = 2000, 50
    path = write(tmp_path, f'{{"prompt_token_ids": {[7] * tokens}, "seed": 1, "temperature": 0.5}}\n' * rows)
    prompts(path)
    tracemalloc.start()
    dataset = prompts(path)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(dataset.requests) == rows
    assert kept_bytes / rows < 4 * tokens * 1.25 + 100


# --- token lengths ----------------------------------------------------------------------------------------------------


def test_the_shipped_lengths() -> None:
    dataset = lengths(None)
    assert len(dataset.requests) == 24_576
    assert dataset.input_tokens.mean() == pytest.approx(222.3, abs=0.1)
    assert dataset.output_limits.mean() == pytest.approx(292.3, abs=0.1)
    assert (dataset.input_tokens.min(), dataset.input_tokens.max()) == (48, 1021)
    assert (dataset.output_limits.min(), dataset.output_limits.max()) == (18, 1014)
    assert dataset.source.startswith("Synthetic workload with the token lengths of the MLPerf llama2-70b")
    assert dataset.content_hash == hashlib.sha256(LLAMA2_70B_LENGTHS.read_bytes()).hexdigest()
    assert dataset.notes == ()


def test_lengths_become_random_prompts_whose_answers_run_to_the_end(tmp_path: Path) -> None:
    path = write(
        tmp_path, "\ufeff# made by hand\n#second\n\ninput_tokens,output_tokens\r\n3,4\r\n\n 5 , 1 \n", "own.csv"
    )
    dataset = lengths(path)
    assert dataset.source == "made by hand second"
    assert dataset.input_tokens.tolist() == [3, 5]
    assert dataset.output_limits.tolist() == [4, 1]
    for request, count, limit in zip(dataset.requests, (3, 5), (4, 1), strict=True):
        assert len(request.prompt) == count
        assert request == Request(request.prompt, limit, ignore_end_token=True)
        assert all(type(token) is int for token in request.prompt)


def test_a_table_without_comments_is_its_own_source(tmp_path: Path) -> None:
    path = write(tmp_path, "input_tokens,output_tokens\n3,4\n", "own.csv")
    assert lengths(path).source == str(path)


def test_ids_depend_on_seed_and_row_alone() -> None:
    whole = lengths(None, seed=5)
    assert whole.requests[7] == lengths(None, seed=5).requests[7] == whole.requests[7]
    assert whole.requests[7].prompt[:48] != whole.requests[8].prompt[:48]
    assert whole.requests[7].prompt != lengths(None, seed=6).requests[7].prompt
    shorter = lengths(None, seed=5, max_length=200).requests[0].prompt
    assert shorter == whole.requests[0].prompt[: len(shorter)]


def test_ids_are_the_same_on_every_machine_and_release(tmp_path: Path) -> None:
    path = write(tmp_path, "input_tokens,output_tokens\n4,1\n4,1\n", "own.csv")
    dataset = load_lengths(path, vocabulary_size=32_000, max_length=100, seed=7)
    assert [request.prompt for request in dataset.requests] == [
        [22692, 11655, 20120, 29522],
        [12573, 5974, 10231, 2132],
    ]


def test_ids_cover_the_vocabulary_evenly(tmp_path: Path) -> None:
    path = write(tmp_path, "input_tokens,output_tokens\n" + "1000,1\n" * 20, "own.csv")
    counts = Counter(token for request in lengths(path, vocabulary_size=7).requests for token in request.prompt)
    assert sorted(counts) == list(range(7))
    assert max(counts.values()) < 1.1 * 20_000 / 7
    assert min(counts.values()) > 0.9 * 20_000 / 7


def test_rows_beyond_the_context_are_scaled_and_noted(tmp_path: Path) -> None:
    path = write(
        tmp_path, "input_tokens,output_tokens\n50,50\n30,30\n300,100\n1,999\n999,1\n2147483647,2147483647\n", "a.csv"
    )
    dataset = lengths(path, max_length=100)
    assert dataset.input_tokens.tolist() == [50, 30, 75, 1, 99, 50]
    assert dataset.output_limits.tolist() == [50, 30, 25, 99, 1, 50]
    (note,) = dataset.notes
    assert "4 of 6 rows" in note
    assert "context of 100 tokens" in note
    assert len(dataset.requests[5].prompt) == 50


@pytest.mark.parametrize("max_length", [2, 3, 50, 100, 1000, 2044, 2045, 4096])
def test_shipped_rows_scaled_to_a_context_fit_and_none_is_empty(max_length: int) -> None:
    whole, dataset = lengths(None), lengths(None, max_length=max_length)
    wanted = whole.input_tokens + whole.output_limits
    totals = dataset.input_tokens + dataset.output_limits
    assert totals.tolist() == np.minimum(wanted, max_length).tolist()
    assert dataset.input_tokens.min() >= 1
    assert dataset.output_limits.min() >= 1
    assert np.all(abs(dataset.input_tokens - whole.input_tokens * totals / wanted) <= 1)
    assert bool(dataset.notes) == bool((wanted > max_length).any())


BAD_TABLES = {
    "no header": ("3,4\n", 1, "the header is '3,4'; it must be input_tokens,output_tokens"),
    "another header": ("# x\nprompt,answer\n3,4\n", 2, "the header is 'prompt,answer'"),
    "columns exchanged": ("output_tokens,input_tokens\n3,4\n", 1, "the header is"),
    "one value": ("input_tokens,output_tokens\n3\n", 2, "1 value;"),
    "three values": ("input_tokens,output_tokens\n3,4,5\n", 2, "3 values"),
    "negative": ("input_tokens,output_tokens\n3,4\n3,-4\n", 3, "output_tokens is '-4'"),
    "zero": ("input_tokens,output_tokens\n0,4\n", 2, "input_tokens is '0'"),
    "blank": ("input_tokens,output_tokens\n3,\n", 2, "output_tokens is ''"),
    "fraction": ("input_tokens,output_tokens\n3,4.0\n", 2, "output_tokens is '4.0'"),
    "exponent": ("input_tokens,output_tokens\n1e2,4\n", 2, "input_tokens is '1e2'"),
    "underscore": ("input_tokens,output_tokens\n1_0,4\n", 2, "input_tokens is '1_0'"),
    "other digits": ("input_tokens,output_tokens\n٣,4\n", 2, "input_tokens is"),
    "superscript": ("input_tokens,output_tokens\n3²,4\n", 2, "input_tokens is"),
    "too large": ("input_tokens,output_tokens\n2147483648,4\n", 2, "input_tokens is '2147483648'"),
    "far too large": ("input_tokens,output_tokens\n" + "9" * 5000 + ",4\n", 2, "input_tokens is '9999"),
    "text": ("input_tokens,output_tokens\nthree,4\n", 2, "input_tokens is 'three'"),
    "NaN": ("input_tokens,output_tokens\nnan,4\n", 2, "input_tokens is 'nan'"),
    "not UTF-8": (b"input_tokens,output_tokens\n3,4\n\xff\xfe\n", 3, "byte 1 of the line is not UTF-8"),
    "control character": ("input_tokens,output_tokens\n3,4\x1b[2J\n", 2, r"output_tokens is '4\x1b[2J'"),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_bad_table_is_named_with_its_line(kind: str, tmp_path: Path) -> None:
    content, line, problem = BAD_TABLES[kind]
    message = refusal(lengths, write(tmp_path, content, "own.csv"))
    assert message.startswith(f", line {line}: ")
    assert problem in message


@pytest.mark.parametrize("content", ["", "# only a comment\n", "input_tokens,output_tokens\n"])
def test_a_table_without_rows(content: str, tmp_path: Path) -> None:
    assert "no rows" in refusal(lengths, write(tmp_path, content, "own.csv"))


# --- OpenOrca ---------------------------------------------------------------------------------------------------------


def openorca(path: Path, **changes: object) -> Dataset:
    return load_mlperf(path, **({"vocabulary_size": VOCABULARY, "max_length": 2048} | changes))


def table(tmp_path: Path, prompts: list[object], **columns: object) -> Path:
    path = tmp_path / "open_orca.pkl"
    pd.DataFrame({"id": [f"flan.{row}" for row in range(len(prompts))], "tok_input": prompts, **columns}).to_pickle(
        path
    )
    return path


def test_openorca_rows_become_greedy_requests_in_row_order(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [4], [5, 999]]
    path = tmp_path / "open_orca.pkl"
    frame = pd.DataFrame({"tok_input": rows, "tok_input_length": [3, 1, 2]})
    frame.to_pickle(path)
    dataset = openorca(path)
    assert list(dataset.requests) == [Request(ids, max_tokens=1024) for ids in rows]
    assert dataset.input_tokens.tolist() == [3, 1, 2]
    assert dataset.output_limits.tolist() == [1024] * 3
    assert dataset.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert dataset.notes == ()


def test_openorca_prompts_may_be_arrays(tmp_path: Path) -> None:
    path = table(tmp_path, [np.array([1, 2], dtype=np.int64), np.array([3], dtype=np.uint8)])
    assert [request.prompt for request in openorca(path).requests] == [[1, 2], [3]]


def test_openorca_answers_are_cut_to_the_context_and_noted(tmp_path: Path) -> None:
    dataset = openorca(table(tmp_path, [[1] * 10, [1] * 90]), max_length=1100)
    assert dataset.output_limits.tolist() == [1024, 1010]
    assert "1 of 2 prompts" in dataset.notes[0]


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([[1], [1000]], "row 1: token id 1000 at index 0 is outside the vocabulary of 1,000"),
        ([[1], [2], [-3]], "row 2: token id -3"),
        ([[1], [2**200]], "token id of more than 64 bits"),
        ([[1], [2**100]], "row 1: token id of more than 64 bits"),
        ([[], [1]], "row 0: the prompt is empty"),
        ([[1] * 2048], "row 0: a prompt of 2,048 tokens leaves no room"),
        ([[1], None], "row 1: tok_input is not a list of token ids"),
        ([[1], "text"], "row 1: tok_input is not a list of token ids"),
        ([[1], 7], "row 1: tok_input is not a list of token ids"),
        ([[1], [1.5]], "row 1: tok_input is not a list of token ids"),
        ([[1], [True]], "row 1: tok_input is not a list of token ids"),
        ([[1], [[2]]], "row 1: tok_input is not a list of token ids"),
        ([[1], np.array([1.0])], "row 1: tok_input is not a list of token ids"),
        ([[1], np.array([[1]])], "row 1: tok_input is not a list of token ids"),
        ([], "no prompts"),
    ],
)
def test_openorca_rows_that_cannot_be_served(cells: list[object], problem: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": ["x"] * len(cells), "tok_input": pd.Series(cells, dtype=object)})
    frame.to_pickle(tmp_path / "open_orca.pkl")
    assert problem in refusal(openorca, tmp_path / "open_orca.pkl")


def test_openorca_without_its_column_or_with_wrong_lengths(tmp_path: Path) -> None:
    pd.DataFrame({"prompt": [[1]]}).to_pickle(tmp_path / "open_orca.pkl")
    assert "no column tok_input" in refusal(openorca, tmp_path / "open_orca.pkl")
    for wrong in ([1, 3], [1, None], [1, np.array([2, 2])], [1, [2]], [1.0, 2.5], ["1", "2"]):
        path = table(tmp_path, [[1], [2, 3]], tok_input_length=pd.Series(wrong))
        assert " but tok_input_length says otherwise" in refusal(openorca, path)


def test_a_small_file_cannot_claim_much_memory_by_sharing_rows(tmp_path: Path) -> None:
    shared = list(range(900))
    assert "repeat each other" in refusal(openorca, table(tmp_path, [shared] * 3000))


@pytest.mark.parametrize("content", [b"", b'{"prompt": "a"}', b"PK\x03\x04 zip"])
def test_openorca_that_is_no_pickle(content: bytes, tmp_path: Path) -> None:
    assert "not a pickle" in refusal(openorca, write(tmp_path, content, "open_orca.pkl"))
