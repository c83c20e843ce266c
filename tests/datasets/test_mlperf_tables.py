"""MLPerf's tables in their three forms become the same requests and references, or one line that says why not."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlperf_files import INSTRUCTION, OUTPUTS, TEXTS, make_tokenizer, write_405b, write_cnn, write_openorca
from tokenizers import Tokenizer as FastTokenizer

from megatoken.datasets.check import convert
from megatoken.datasets.mlperf import load_mlperf
from megatoken.datasets.references import load_references
from megatoken.engine.request import Request
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import DatasetError, ExitCode

FORMS = {
    "llama2-70b": (write_openorca, "open_orca.pkl", 1024),
    "llama3.1-405b": (write_405b, "l405b.pkl", 2000),
    "llama3.1-8b": (write_cnn, "cnn_eval.json", 128),
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> FastTokenizer:
    return make_tokenizer(tmp_path / "model")


def decode_of(folder: Path) -> Callable[[list[int]], str]:
    return Tokenizer(folder / "tokenizer.json").decode


def load(path: Path, **changes: object) -> object:
    return load_mlperf(path, **({"vocabulary_size": 256, "max_length": 4096} | changes))  # type: ignore[arg-type]


def refusal(action: Callable[[], object], path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        action()
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert caught.value.exit_code == ExitCode.USAGE
    return message.removeprefix(str(path))


@pytest.mark.parametrize("name", FORMS)
def test_a_table_and_its_parquet_are_the_same_requests_and_references(
    name: str, tmp_path: Path, tokenizer: FastTokenizer
) -> None:
    write, file, most = FORMS[name]
    source = write(tmp_path / file, tokenizer)
    converted = convert(source, tmp_path / "converted.parquet")
    assert (converted.data_set, converted.rows) == (name, len(TEXTS))
    prompts = [tokenizer.encode(INSTRUCTION.format(text) if name == "llama3.1-8b" else text).ids for text in TEXTS]
    if name == "llama2-70b":
        prompts = [[*ids, 7] for ids in prompts]
    for path in (source, converted.path):
        data_set = load(path, decode=decode_of(tmp_path / "model"))
        assert list(data_set.requests) == [Request(ids, max_tokens=most) for ids in prompts]
        assert data_set.content_hash == hashlib.sha256(source.read_bytes()).hexdigest()
        references = load_references(path)
        assert references.texts == tuple(OUTPUTS)
        assert references.data_set == name
        assert references.content_hash == data_set.content_hash
        expected = ("rouge", "niah_em", "qa_em") if name == "llama3.1-405b" else ("summary",) * 3
        assert references.scorings == expected


def test_converting_twice_gives_the_same_content(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    source = write_openorca(tmp_path / "o.pkl", tokenizer)
    first = convert(source, tmp_path / "a.parquet")
    assert convert(source, tmp_path / "b.parquet").content_sha256 == first.content_sha256
    other = write_openorca(tmp_path / "p.pkl", tokenizer, [*TEXTS[:-1], f"{TEXTS[-1]}!"])
    assert convert(other, tmp_path / "c.parquet").content_sha256 != first.content_sha256


# --- a changed file ---------------------------------------------------------------------------------------------------


def changed(table: pa.Table, name: str, cells: list[object]) -> pa.Table:
    index = table.column_names.index(name)
    return table.set_column(index, table.schema.field(index), pa.array(cells, table.schema.field(index).type))


def moved(rows: list[list[int]]) -> list[list[int]]:
    return [rows[0][:-1], [rows[0][-1], *rows[1]], *rows[2:]]


CHANGES = {
    "one token": lambda table: changed(
        table, "tokens", [[9, *cell[1:]] if row == 1 else cell for row, cell in enumerate(table["tokens"].to_pylist())]
    ),
    "a token moved to the next row": lambda table: changed(table, "tokens", moved(table["tokens"].to_pylist())),
    "one answer": lambda table: changed(table, "reference", ["x", *table["reference"].to_pylist()[1:]]),
    "an answer gone": lambda table: changed(table, "reference", [None, *table["reference"].to_pylist()[1:]]),
    "rows in another order": lambda table: table.take([1, 0, 2]),
    "a row gone": lambda table: table.slice(0, 2),
    "a row doubled": lambda table: table.take([0, 1, 2, 2]),
    "a column gone": lambda table: table.drop_columns(["reference"]),
    "a column more": lambda table: table.append_column("more", pa.array([1, 2, 3])),
    "another hash": lambda table: table.replace_schema_metadata(
        {**table.schema.metadata, b"megatoken.content_sha256": b"0" * 64}
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_parquet_that_was_changed_is_refused_at_every_use(
    change: str, tmp_path: Path, tokenizer: FastTokenizer
) -> None:
    path = convert(write_openorca(tmp_path / "o.pkl", tokenizer), tmp_path / "o.parquet").path
    pq.write_table(CHANGES[change](pq.read_table(path)), path)
    for action in (load, load_references):
        message = refusal(lambda action=action: action(path), path)  # type: ignore[misc]
        assert message.startswith(": changed since it was converted: the SHA-256 of its content is ")
        assert "megatoken dataset convert" in message


def test_rewriting_without_a_change_is_no_change(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    path = convert(write_openorca(tmp_path / "o.pkl", tokenizer), tmp_path / "o.parquet").path
    pq.write_table(pq.read_table(path), path, compression="none", row_group_size=1)
    assert len(load(path).requests) == len(TEXTS)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PAR1 no table PAR1"),
        lambda path: pq.write_table(pa.table({"tokens": pa.array([[1]], pa.list_(pa.int32()))}), path),
        lambda path: path.mkdir(),
    ],
)
def test_a_parquet_of_somebody_else(write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "o.parquet"
    write(path)
    assert "megatoken dataset convert" in refusal(lambda: load(path), path)


def test_parquet_is_not_converted_again(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    path = convert(write_openorca(tmp_path / "o.pkl", tokenizer), tmp_path / "o.parquet").path
    assert "already converted" in refusal(lambda: convert(path, tmp_path / "p.parquet"), path)


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[0, 2, 1], [0, 0, 1], [1, 2, 3], ["a", "b", "c"]])
def test_rows_out_of_order_doubled_or_missing(labels: list[object], tmp_path: Path, tokenizer: FastTokenizer) -> None:
    """MLPerf's references look up expected answers by label and prompts by position: they must be the same."""
    path = write_openorca(tmp_path / "o.pkl", tokenizer)
    pd.read_pickle(path).set_axis(labels, axis=0).to_pickle(path)
    for action in (lambda: load(path), lambda: load_references(path), lambda: convert(path, tmp_path / "o.parquet")):
        assert "rows are missing, doubled or out of order" in refusal(action, path)
    assert not (tmp_path / "o.parquet").exists()


def test_columns_that_are_not_there(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    path = write_openorca(tmp_path / "o.pkl", tokenizer, output=None)
    assert "the table has no column output; fetch MLPerf's llama2-70b data set again" in refusal(
        lambda: load_references(path), path
    )
    path = write_405b(tmp_path / "l.pkl", tokenizer, metric=["rouge", "bleu", "qa_em"])
    assert ", row 1: metric is 'bleu', known are rouge, niah_em, qa_em" in refusal(lambda: load_references(path), path)
    path = write_405b(tmp_path / "l.pkl", tokenizer, gt_output=["a", None, "c"])
    assert ", row 1: gt_output is not text" in refusal(lambda: load_references(path), path)
    path = write_405b(tmp_path / "l.pkl", tokenizer, tok_input_len=[1, 2, 3])
    assert "tokens but tok_input_len says otherwise" in refusal(lambda: load(path), path)


BAD_JSON = {
    "nothing": ("", ", line 1: not JSON"),
    "broken": ('[{"tok_input": [1]},\n]', ", line 2: not JSON"),
    "no list": ('{"tok_input": [1]}', ": not a list of articles"),
    "no objects": ("[1, 2]", ", row 0: no tok_input; fetch MLPerf's llama3.1-8b data set again, or name"),
    "no ids": ('[{"tok_input": [1]}, {"input": "a"}]', ", row 1: no tok_input"),
    "ids no list": ('[{"tok_input": 5}]', ", row 0: tok_input is not a list of token ids"),
    "id no number": ('[{"tok_input": ["1"]}]', ", row 0: tok_input is not a list of token ids"),
    "id outside": ('[{"tok_input": [1]}, {"tok_input": [256]}]', ", row 1: token id 256 at index 0 is outside"),
    "empty": ('[{"tok_input": []}]', ", row 0: the prompt is empty"),
    "no rows": ("[]", ": the file holds no prompts"),
    "nested": ("[" * 100_000, ": nested too deeply"),
    "not UTF-8": (b'[{"tok_input": [1], "input": "\xff"}]', ": not JSON in UTF-8"),
    "endless number": ('[{"tok_input": [' + "9" * 5000 + "]}]", ": not JSON in UTF-8"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_json_that_is_no_data_set(kind: str, tmp_path: Path) -> None:
    content, problem = BAD_JSON[kind]
    path = tmp_path / "cnn_eval.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refusal(lambda: load(path), path).startswith(problem)


@pytest.mark.parametrize("name", FORMS)
def test_prompts_longer_than_the_context(name: str, tmp_path: Path, tokenizer: FastTokenizer) -> None:
    write, file, most = FORMS[name]
    path = write(tmp_path / file, tokenizer)
    assert ", row 0: a prompt of " in refusal(lambda: load(path, max_length=20), path)
    data_set = load(path, max_length=200)
    assert data_set.output_limits.max() <= 200
    if most > 200:
        assert "their answers end there" in data_set.notes[0]


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["source", "parquet"])
@pytest.mark.parametrize("name", FORMS)
def test_a_data_set_of_another_tokenizer_is_refused(
    name: str, form: str, tmp_path: Path, tokenizer: FastTokenizer
) -> None:
    """Its ids are all inside the vocabulary: only what they say tells."""
    write, file, _ = FORMS[name]
    path = write(tmp_path / file, tokenizer)
    if form == "parquet":
        path = convert(path, tmp_path / "c.parquet").path
    make_tokenizer(tmp_path / "other", shift=40)
    message = refusal(lambda: load(path, decode=decode_of(tmp_path / "other")), path)
    assert message.startswith(", row 0: tok_input does not decode to input: 0 % of its words match; ")
    assert len(load(path).requests) == 3  # a model without a tokenizer cannot tell


def test_one_row_of_another_tokenizer_among_those_looked_at(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    other = make_tokenizer(tmp_path / "other", shift=40)
    tokens = [tokenizer.encode(text).ids for text in TEXTS[:2]] + [other.encode(TEXTS[2]).ids]
    path = write_openorca(
        tmp_path / "o.pkl", tokenizer, tok_input=tokens, tok_input_length=[len(one) for one in tokens]
    )
    assert ", row 2: tok_input does not decode" in refusal(
        lambda: load(path, decode=decode_of(tmp_path / "model")), path
    )


def test_texts_of_few_words_tell_nothing(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    make_tokenizer(tmp_path / "other", shift=40)
    path = write_openorca(tmp_path / "o.pkl", tokenizer, ["Two words", "", "One"])
    assert len(load(path, decode=decode_of(tmp_path / "other")).requests) == 3


# --- files that are not there or not what they are called -------------------------------------------------------------


def test_a_missing_file_of_mlperf_is_answered_with_how_to_get_it(tmp_path: Path) -> None:
    for name, uri in (
        ("open_orca_gpt4_tokenized_llama.sampled_24576.pkl", "llama-2-70b-open-orca-dataset.uri"),
        ("mlperf_llama3.1_405b_dataset_8313_processed_fp16_eval.pkl", "llama3-1-405b-dataset-8313.uri"),
        ("cnn_eval.json", "llama3-1-8b-cnn-eval.uri"),
        ("sample_cnn_eval_5000.json", "llama3-1-8b-sample-cnn-eval-5000.uri"),
    ):
        path = tmp_path / name
        message = refusal(lambda path=path: load(path), path)  # type: ignore[misc]
        assert message.startswith(": no such file; it is MLPerf's ")
        assert f"https://inference.mlcommons-storage.org/metadata/{uri}" in message
        assert message.endswith(f"put it at {path}")
    assert "No such file or directory" in refusal(lambda: load(tmp_path / "own.pkl"), tmp_path / "own.pkl")


def test_a_compressed_file(tmp_path: Path, tokenizer: FastTokenizer) -> None:
    path = write_openorca(tmp_path / "o.pkl", tokenizer)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert refusal(lambda: load(path), path) == ": compressed; unpack it with gunzip"
    packed = path.rename(tmp_path / "o.pkl.gz")  # as MLCommons names it, and taken for JSON lines
    assert refusal(lambda: load_references(packed), packed) == ": compressed; unpack it with gunzip"


def test_nothing_in_a_pickle_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "executed",)

    path = tmp_path / "o.pkl"
    path.write_bytes(pickle.dumps(Evil()))
    for action in (load, load_references, lambda one: convert(one, tmp_path / "o.parquet")):
        assert "nothing was executed" in refusal(lambda action=action: action(path), path)  # type: ignore[misc]
    assert not (tmp_path / "executed").exists()


# --- answers expected of JSON lines -----------------------------------------------------------------------------------


def test_references_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a", "reference": "x", "task": "copy"}, {"prompt": "b", "reference": "", "max_tokens": 3}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    references = load_references(path)
    assert references.texts == ("x", "")
    assert references.tasks == ("copy", "")
    assert references.scorings == ("exact", "exact")
    assert references.data_set is None
    assert references.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt": "a"}', ", line 1: no reference; add the expected answer"),
        ('{"prompt": "a", "reference": 3}', ", line 1: reference is 3; it must be Unicode text"),
        ('{"prompt": "a", "reference": "x", "task": ""}', ', line 1: task is ""; it must be Unicode text, not empty'),
        ('{"prompt": "a", "refrence": "x"}', "did you mean reference?"),
        ("", ": the file holds no prompts"),
    ],
)
def test_lines_that_expect_nothing(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{line}\n")
    assert problem in refusal(lambda: load_references(path), path)
