"""Targets of benchmarks and baselines, and the files that an evaluation leaves."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from accuracy_files import make_tokenizer, write_405b, write_lines, write_log, write_openorca
from cli_support import call_here
from megatoken.accuracy import scores as scoring
from megatoken.accuracy.evaluate import Mean, Scores
from megatoken.accuracy.judge import Judged, judge
from megatoken.accuracy.targets import missed, of_benchmark
from megatoken.datasets.references import References
from megatoken.errors import StorageError, UsageError
from megatoken.mlperf.accuracy_log import read_accuracy_scores, read_answers
from megatoken.mlperf.compliance import check_test07
from megatoken.runs.run import Verdict

WORDS = [f"word{row}" for row in range(20)]


@pytest.fixture
def references(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "r.jsonl", [{"prompt": "p", "reference": word} for word in WORDS])


def judged(folder: Path, answers: Sequence[str], references: Path, **options: object) -> Judged:
    """A log of its own folder, judged."""
    folder.mkdir(exist_ok=True)
    tokenizer = make_tokenizer(folder / "model")
    write_log(folder / "mlperf_log_accuracy.json", [tokenizer.encode(text).ids for text in answers])
    return judge(folder, references=references, model=folder / "model", **options)  # type: ignore[arg-type]


def messages(result: Judged) -> list[str]:
    return [note["message"] for note in result.document["notes"]]


def reasons(result: Judged) -> list[str]:
    return [reason["message"] for reason in result.document["reasons"]]


# --- against a baseline -----------------------------------------------------------------------------------------------


def test_without_targets_an_evaluation_is_a_measurement(tmp_path: Path, references: Path) -> None:
    result = judged(tmp_path / "a", WORDS, references)
    assert result.verdict is Verdict.MEASURED
    assert result.folder == tmp_path / "a"
    assert json.loads((tmp_path / "a" / "accuracy.json").read_text()) == result.document


def test_what_cannot_be_written_names_no_flag_that_accuracy_and_verify_lack(tmp_path: Path, references: Path) -> None:
    for name, compute in (
        ("accuracy.txt", lambda: judged(tmp_path / "a", WORDS, references)),
        ("accuracy.json", lambda: judged(tmp_path / "b", WORDS, references)),
        ("verify_accuracy.txt", lambda: check_test07(60.7, 990).write(tmp_path / "c")),
    ):
        folder = tmp_path / {"accuracy.txt": "a", "accuracy.json": "b"}.get(name, "c")
        folder.mkdir()
        (folder / name).symlink_to("/proc/no-file-can-be-made-there")
        with pytest.raises(StorageError, match="cannot be written") as caught:
            compute()
        assert "--out" not in str(caught.value)
        assert str(caught.value).startswith(f"{folder / name}: ")


@pytest.mark.parametrize(("wrong", "share", "verdict"), [(0, 0.99, "VALID"), (1, 0.99, "INVALID"), (1, 0.95, "VALID")])
def test_a_share_of_every_metric_of_the_baseline_must_be_reached(
    wrong: int, share: float, verdict: str, tmp_path: Path, references: Path
) -> None:
    judged(tmp_path / "fp32", WORDS, references)
    answers = ["other", *WORDS[1:]] if wrong else [f"{WORDS[0]} ", *WORDS[1:]]
    result = judged(tmp_path / "fp8", answers, references, baseline=tmp_path / "fp32", share=share)
    assert result.verdict == verdict
    assert result.document["targets"]["source"] == f"{share:g} of {tmp_path / 'fp32' / 'accuracy.json'}"
    if verdict == "INVALID":
        assert any(message.startswith("exact_match is 95; 0.99 of ") for message in reasons(result))


@pytest.mark.parametrize(
    ("last_two", "found"),
    [
        (["word18", f"word19{' ' * 10}"], []),
        (["word18", f"word19{' ' * 12}"], ["allows at most 6.05"]),
        (["", "word19"], []),
        (["", ""], ["requires 4.95 or more"]),
    ],
)
def test_answers_must_be_as_long_as_the_baselines(
    last_two: list[str], found: list[str], tmp_path: Path, references: Path
) -> None:
    """The baseline has 110 tokens in 20 answers, a byte each."""
    judged(tmp_path / "fp32", WORDS, references)
    result = judged(tmp_path / "b", [*WORDS[:-2], *last_two], references, baseline=tmp_path / "fp32", share=0.5)
    assert [message.partition("accuracy.json ")[2] for message in reasons(result)] == found


@pytest.mark.parametrize(
    ("words", "short", "rouge_2"),
    [
        (["one", "two", "3.5"], "2 of 3 expected answers have fewer than two words", 100 / 3),
        (["a b", "c-d"], "", 100.0),
    ],
)
def test_answers_without_pairs_of_words_are_told(tmp_path: Path, words: list[str], short: str, rouge_2: float) -> None:
    lines = write_lines(tmp_path / "few.jsonl", [{"prompt": "p", "reference": word} for word in words])
    document = judged(tmp_path / "few", words, lines).document
    assert document["metrics"]["exact_match"]["value"] == 100.0
    assert document["metrics"]["rouge2"]["value"] == pytest.approx(rouge_2)
    notes = [note for note in document["notes"] if note["code"] == "ONE_WORD_REFERENCES"]
    assert len(notes) == bool(short)
    assert short in "".join(note["message"] for note in notes)


def test_a_baseline_of_other_references_or_another_number_of_answers(tmp_path: Path, references: Path) -> None:
    other = write_lines(tmp_path / "o.jsonl", [{"prompt": "p", "reference": word} for word in [*WORDS[:-1], "x"]])
    judged(tmp_path / "fp32", WORDS, other)
    with pytest.raises(UsageError, match="scored against other expected answers than"):
        judged(tmp_path / "b", WORDS, references, baseline=tmp_path / "fp32")
    judged(tmp_path / "fp32", WORDS, references)
    result = judged(tmp_path / "c", WORDS[:10], references, baseline=tmp_path / "fp32", partial=True, share=0.5)
    assert reasons(result)[0].startswith("10 answers; 0.5 of ")
    assert "10 of 20 rows have an answer" in messages(result)


NOT_A_NUMBER = (
    '{"metrics": {"rouge1": {"value": NaN}}, "tokens_per_sample": 5, "gen_num": 20, "references_sha256": "", '
    '"log_sha256": ""}'
)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"metrics": {"a": 1}}', '{"metrics": []}', NOT_A_NUMBER])
def test_a_baseline_that_is_none(content: str, tmp_path: Path, references: Path) -> None:
    (tmp_path / "accuracy.json").write_text(content)
    with pytest.raises(UsageError, match="not a result of megatoken accuracy"):
        judged(tmp_path / "b", WORDS, references, baseline=tmp_path / "accuracy.json")
    with pytest.raises(UsageError, match=r"no accuracy\.json there"):
        judged(tmp_path / "b", WORDS, references, baseline=tmp_path / "absent")


@pytest.mark.parametrize("copied", [False, True])
def test_a_baseline_of_the_same_log(copied: bool, tmp_path: Path, references: Path) -> None:
    judged(tmp_path / "a", WORDS, references)
    before = (tmp_path / "a" / "accuracy.json").read_bytes()
    with pytest.raises(UsageError, match="scored from the same log, or a copy of it"):
        judged(tmp_path / ("b" if copied else "a"), WORDS, references, baseline=tmp_path / "a")
    assert (tmp_path / "a" / "accuracy.json").read_bytes() == before
    assert not (tmp_path / "b" / "accuracy.json").exists()


def test_a_baseline_that_the_result_would_replace(tmp_path: Path, references: Path) -> None:
    judged(tmp_path / "a", WORDS, references)
    before = (tmp_path / "a" / "accuracy.json").read_bytes()
    with pytest.raises(UsageError, match=r"accuracy\.json: would be replaced by the new result"):
        judged(tmp_path / "a", ["other", *WORDS[1:]], references, baseline=tmp_path / "a")
    assert (tmp_path / "a" / "accuracy.json").read_bytes() == before


@pytest.mark.parametrize(
    ("answers", "share", "problem"),
    [(["x"] * 20, 0.99, "every score in it is 0, so nothing could fail"), (WORDS, 0.0, "the share is 0, so nothing")],
)
def test_a_baseline_that_nothing_could_fail(
    answers: list[str], share: float, problem: str, tmp_path: Path, references: Path
) -> None:
    judged(tmp_path / "a", answers, references)
    with pytest.raises(UsageError, match=problem):
        judged(tmp_path / "b", ["y"] * 20, references, baseline=tmp_path / "a", share=share)


def test_a_single_score_of_0_judges_nothing_and_is_told(tmp_path: Path, references: Path) -> None:
    judged(tmp_path / "a", WORDS, references)
    (note,) = [
        note
        for note in judged(tmp_path / "b", ["x", *WORDS[1:]], references, baseline=tmp_path / "a").document["notes"]
        if note["code"] == "UNFAILING_TARGETS"
    ]
    assert note["metrics"] == ["rouge2"]


def test_one_yardstick_at_a_time(tmp_path: Path, references: Path) -> None:
    judged(tmp_path / "a", WORDS, references)
    with pytest.raises(UsageError, match="--benchmark and --baseline"):
        judged(tmp_path / "b", WORDS, references, baseline=tmp_path / "a", benchmark="llama2-70b-99")


# --- against a benchmark ----------------------------------------------------------------------------------------------


def openorca_scores(rouge1: float, rouge2: float, rouge_l: float, tokens: int, answers: int = 24_576) -> Scores:
    values = {"rouge1": rouge1, "rouge2": rouge2, "rougeL": rouge_l}
    metrics = {name: Mean(value, 0.1, answers) for name, value in values.items()}
    return Scores(metrics, {}, answers, tokens, None, None, 0, 0)


def references_of(data_set: str | None) -> References:
    return References(Path("here"), ("a",), ("summary",), (), data_set, "")


REFERENCE = (44.4312, 22.0352, 28.6162)  # of the README of MLPerf's llama2-70b reference, with 294.45 tokens a sample


@pytest.mark.parametrize(
    ("factor", "tokens_per_sample", "benchmark", "found"),
    [
        (1.0, 294.45, "llama2-70b-99.9", []),
        (0.9991, 294.45, "llama2-70b-99.9", []),
        (0.9989, 294.45, "llama2-70b-99.9", ["rouge1", "rouge2", "rougeL"]),
        (0.9989, 294.45, "llama2-70b-99", []),
        (0.9899, 294.45, "llama2-70b-99", ["rouge1", "rouge2", "rougeL"]),
        (1.0, 265.1, "llama2-70b-99", []),
        (1.0, 264.9, "llama2-70b-99", ["tokens_per_sample"]),
        (1.0, 323.8, "llama2-70b-99", []),
        (1.0, 324.0, "llama2-70b-99", ["tokens_per_sample"]),
    ],
)
def test_targets_of_llama2_70b(factor: float, tokens_per_sample: float, benchmark: str, found: list[str]) -> None:
    values = (round(factor * value, 4) for value in REFERENCE)
    scores = openorca_scores(*values, tokens=round(24_576 * tokens_per_sample))
    messages = [reason["message"] for reason in missed(scores, of_benchmark(benchmark, references_of("llama2-70b")))]
    assert [message.split()[0] for message in messages] == found


def test_a_part_of_the_data_set_reaches_no_targets() -> None:
    of_llama = of_benchmark("llama2-70b-99", references_of("llama2-70b"))
    (reason,) = missed(openorca_scores(*REFERENCE, tokens=29_445, answers=100), of_llama)
    assert reason["message"] == "100 answers; MLPerf llama2-70b-99 requires 24,576"


@pytest.mark.skipif(scoring.sentence_splitter() is None, reason="NLTK's sentence data is not here")
def test_targets_of_the_other_benchmarks() -> None:
    """Figures of the references' READMEs, times 0.99, and their lengths with 10 % to either side."""

    def bounds(name: str) -> dict[str, tuple[float, float | None]]:
        return {one.name: (one.at_least, one.at_most) for one in of_benchmark(name, references_of(name)).targets}

    assert bounds("llama3.1-405b") == {
        "rougeL": (pytest.approx(0.99 * 21.6666), None),
        "exact_match": (pytest.approx(0.99 * 90.1335), None),
        "tokens_per_sample": (pytest.approx(0.9 * 684.68), pytest.approx(1.1 * 684.68)),
    }
    assert bounds("llama3.1-8b") == {
        "rouge1": (pytest.approx(0.99 * 38.7792), None),
        "rouge2": (pytest.approx(0.99 * 15.9075), None),
        "rougeL": (pytest.approx(0.99 * 24.4957), None),
        "rougeLsum": (pytest.approx(0.99 * 35.793), None),
        "gen_len": (pytest.approx(0.9 * 8_167_644), pytest.approx(1.1 * 8_167_644)),
    }


@pytest.mark.parametrize(
    ("name", "data_set", "problem"),
    [
        ("llama2-7b", "llama2-70b", r"--benchmark llama2-7b: cannot be scored; did you mean llama2-70b"),
        ("gpt-oss-120b", None, r"--benchmark gpt-oss-120b: cannot be scored"),
        ("nothing-like-it", None, r"cannot be scored; known are "),
        ("llama2-70b-99", None, r"expected MLPerf's llama2-70b data set, got here, which is not one of MLPerf's"),
        (
            "llama2-70b-99",
            "llama3.1-8b",
            r"expected MLPerf's llama2-70b data set, got here, which is that of llama3.1-8b",
        ),
    ],
)
def test_benchmarks_that_cannot_be_judged_by_these_answers(name: str, data_set: str | None, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        of_benchmark(name, references_of(data_set))


def test_what_is_judged_by_sentences_is_not_scored_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.accuracy.targets.sentence_splitter", lambda: None)
    with pytest.raises(UsageError, match=r"nltk\.downloader punkt_tab"):
        of_benchmark("llama3.1-8b", references_of("llama3.1-8b"))
    of_benchmark("llama2-70b-99", references_of("llama2-70b"))


# --- the files --------------------------------------------------------------------------------------------------------

# As tools/submission/submission_checker/constants.py of mlcommons/inference reads accuracy.txt, restated.
CHECKER = {
    "rouge1": r".*'rouge1':\s+'?([\d.]+)'?.*",
    "rougeL": r".*'rougeL':\s+'?([\d.]+)'?.*",
    "exact_match": r".*'exact_match':\s([\d.]+).*",
    "tokens_per_sample": r".*'tokens_per_sample':\s([\d.]+).*",
}


def test_accuracy_txt_is_read_by_the_patterns_of_mlcommons_and_by_our_auditor(tmp_path: Path) -> None:
    needle = "0a1b2c3d-0000-1111-2222-333344445555"
    references = write_405b(tmp_path / "l.pkl", ["a b c", needle], ["rouge", "niah_em"])
    result = judged(tmp_path / "a", ["a b d", needle.replace("5", "f")], references)
    text = (tmp_path / "a" / "accuracy.txt").read_text()
    line = next(line for line in text.splitlines() if line.startswith("{"))
    for name in ("rougeL", "exact_match"):
        found = re.match(CHECKER[name], line)
        assert found is not None
        assert float(found.group(1)) == pytest.approx(result.document["metrics"][name]["value"], abs=1e-9)
    assert re.match(CHECKER["tokens_per_sample"], line).group(1) == "20.5"  # type: ignore[union-attr]
    digest = read_answers(tmp_path / "a" / "mlperf_log_accuracy.json").sha256
    assert text.splitlines()[-1] == f"hash={digest}"
    audited = read_accuracy_scores(tmp_path / "a" / "accuracy.txt")
    assert audited.hash == digest
    assert audited.scores["rougel"] == pytest.approx(66.6667, abs=1e-4)


def test_scores_below_a_millionth_are_still_digits_and_a_point(tmp_path: Path) -> None:
    long = " ".join(["word"] * 20)
    references = write_openorca(tmp_path / "o.pkl", [long, "z"])
    judged(tmp_path / "a", ["word", "none"], references)
    text = (tmp_path / "a" / "accuracy.txt").read_text()
    assert "e-" not in text
    assert re.search(r"'rouge2': 0\.0,", text)


# --- what it needs to know --------------------------------------------------------------------------------------------


def test_a_log_alone_needs_references_and_a_model(tmp_path: Path, references: Path) -> None:
    write_log(tmp_path / "mlperf_log_accuracy.json", [[1]])
    with pytest.raises(UsageError, match="name the data set with --references"):
        judge(tmp_path)
    with pytest.raises(UsageError, match="name the folder of the model that answered with --model"):
        judge(tmp_path, references=references)


def test_lines_without_references(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "p", "reference": "x"}, {"prompt": "q"}])
    with pytest.raises(UsageError, match=r"p\.jsonl, line 2: no reference"):
        judged(tmp_path / "a", ["x", "y"], path)


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_one_answer_has_no_standard_error(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "reference": f"word{row}", "task": "spell" if row else "sort"} for row in range(3)]
    lines = write_lines(tmp_path / "r.jsonl", rows)
    tokenizer = make_tokenizer(tmp_path / "model")
    write_log(tmp_path / "mlperf_log_accuracy.json", [tokenizer.encode(f"word{row}").ids for row in range(3)])
    code, out, _ = call_here("accuracy", tmp_path, "--references", lines, "--model", tmp_path / "model")
    assert code == 0
    assert "100.0000 ± -" in out and "100.0000 ± 0.00" in out and "nan" not in out


def test_a_note_on_sentences_speaks_of_scores_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.accuracy.evaluate.sentence_splitter", lambda: None)
    texts = ["one two", "three four"]
    (note,) = judged(tmp_path / "a", texts, write_openorca(tmp_path / "a.pkl", texts)).document["notes"]
    assert note["message"] == "no NLTK sentence data: rougeLsum and gen_len are left out"
    questions = write_405b(tmp_path / "b.pkl", texts, ["rouge", "qa_em"])
    (note,) = judged(tmp_path / "b", texts, questions).document["notes"]
    expected = "no NLTK sentence data: gen_len is left out, and exact_match compares texts that are not split"
    assert note["message"] == expected
