"""The folder that ships is what this training leaves: its held-out set, its card, the baseline of its weights."""

from __future__ import annotations

import hashlib
import json

from tokenizers import Tokenizer

from megatoken.engine.checkpoint import Checkpoint
from megatoken.engine.config import REFERENCE, model_folder
from reference_model import baseline, data, export

FOLDER = model_folder(REFERENCE)


def test_the_held_out_set_is_what_its_seed_draws() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    shipped = export.read_held_out(FOLDER)
    drawn = data.held_out_rows(tokenizer, export.read_record(FOLDER)["seed"], len(shipped))
    assert len(shipped) == 2048
    assert [(row["prompt"], row["reference"], row["task"]) for row in shipped] == [
        (row.prompt, row.answer, row.task) for row in drawn
    ]
    assert {row["max_tokens"] for row in shipped} == {export.MAX_ANSWER_TOKENS}


def test_the_card_says_what_the_record_says() -> None:
    assert (FOLDER / "model_card.md").read_text() == export.model_card(export.read_record(FOLDER))


def test_the_baseline_is_of_these_weights_and_this_set() -> None:
    measured = json.loads((FOLDER / baseline.BASELINE).read_text())
    assert measured["references_sha256"] == hashlib.sha256((FOLDER / export.HELD_OUT).read_bytes()).hexdigest()
    assert measured["weights"] == Checkpoint.open(FOLDER).content_hash
    assert (measured["precision"], measured["target"]["device"]) == ("fp32", "cpu")
    assert len(measured["source"]["revision"]) == 40
    exact_match = export.read_record(FOLDER)["greedy"]["fp32 on CPU"]["exact_match"]
    assert abs(measured["metrics"]["exact_match"]["value"] - 100 * exact_match["all"]) < 0.11  # two rows of 2,048


def test_the_whole_folder_is_small_enough_to_ship() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 25e6
