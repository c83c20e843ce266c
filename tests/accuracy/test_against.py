"""``megatoken accuracy DIR --against DIR``: intervals, exact decoders, and sound, equal and broken checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from cli_support import call_here
from megatoken.accuracy import against
from megatoken.accuracy.against import bootstrap, mcnemar, ratio, wilson
from megatoken.engine.config import model_folder
from megatoken.engine.schemes import packed4
from megatoken.quantization.write import quantize
from megatoken.report.documents import checked
from megatoken.report.views import document_view

SAMPLES = 4


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("against") / "nvfp4"
    quantize(model_folder("reference"), "nvfp4", folder)
    return folder


def compared(model: Path | str, *options: object) -> tuple[int, dict[str, Any]]:
    code, out, err = call_here(
        "accuracy", model, "--against", "reference", "--samples", SAMPLES, "--precision", "fp32", "--json", *options
    )
    assert code in (0, 3), err
    return code, json.loads(out)


# Statistics


def test_wilson_and_mcnemar_by_hand() -> None:
    assert wilson(9, 10) == pytest.approx((0.9, 0.5958500, 0.9821238), abs=1e-6)
    assert wilson(10, 10) == pytest.approx((1.0, 0.7224672, 1.0), abs=1e-6)
    assert wilson(0, 10).low == 0
    assert mcnemar(0, 0) == 1
    assert mcnemar(1, 9) == pytest.approx(22 / 1024)
    assert mcnemar(5, 5) == 1


def test_bootstrap_is_paired_and_covers() -> None:
    """A constant factor has no spread however the rows vary; the interval of a mean is that of its standard error."""
    draw = np.random.default_rng(1)
    rows = draw.uniform(1, 9, 400)
    assert bootstrap(ratio, 0.97 * rows, rows) == pytest.approx((0.97, 0.97, 0.97))
    mean = bootstrap(lambda one: one, rows)
    error = 1.96 * rows.std(ddof=1) / 20
    assert mean.value == rows.mean()
    assert (mean.value - mean.low, mean.high - mean.value) == pytest.approx((error, error), rel=0.1)
    assert bootstrap(ratio, np.zeros(5), np.zeros(5)) == (1, 1, 1)


def test_prompts_that_a_statement_with_confidence_needs() -> None:
    assert [against.prompts_needed(share) for share in (0.5, 0.9, 0.99, 1.0)] == [5, 29, 299, None]
    assert 1 - 0.05 ** (1 / 299) <= 0.01 < 1 - 0.05 ** (1 / 298)


def test_a_wrong_decoder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = against.check_decoders()
    assert [one.wrong for one in checks] == [0] * 5
    assert sum(one.values for one in checks) > 40_000
    wrong = {**packed4.VALUES, "e2m1": (*packed4.VALUES["e2m1"][:7], 7.0, *packed4.VALUES["e2m1"][8:])}
    monkeypatch.setattr(packed4, "VALUES", wrong)
    assert against.check_decoders()[0].wrong == 252  # all scales but zero and minus zero


# Checkpoints


def test_a_sound_checkpoint(quantized: Path, tmp_path: Path) -> None:
    code, document = compared(quantized, "--out", tmp_path)
    assert (code, document["verdict"], document["failed"]) == (0, "MEASURED", [])  # of too few prompts to say VALID
    assert document["samples"] == document["samples_that_can_fail"] == SAMPLES
    assert document["samples_needed"] == 299
    assert {one["form"] for one in document["weights"]} == {"e2m1"}
    assert all(0.08 < one["relative_rms_error"] < 0.09 < one["worst_block_error"] for one in document["weights"])
    for name in ("next_tokens", "next_tokens_of_answers"):
        tokens = document[name]
        assert tokens["texts"] == SAMPLES
        assert 0 < tokens["kl_nats"]["low"] < tokens["kl_nats"]["value"] < tokens["kl_nats"]["high"] < 0.2
        assert tokens["same_best_token"]["low"] < tokens["same_best_token"]["value"] <= 1
    assert document["next_tokens_of_answers"]["positions"] == document["lengths"]["against"] * SAMPLES
    assert set(document["tasks"]) == {"exact_match", "rouge1", "rouge2", "rougeL"}
    page = (tmp_path / "accuracy_against.html").read_text()
    assert "The best next token is the same at" in page
    assert "only 4 prompts can fail, and 299 without a failure are needed" in page
    assert document_view(checked(document)).subject == "MEASURED"
    code, out, _ = call_here("report", tmp_path)
    assert code == 0, out


def test_a_checkpoint_against_itself() -> None:
    code, document = compared("reference", "--share", 0.4)
    assert (code, document["verdict"], document["samples_needed"]) == (0, "VALID", 4)
    assert document["identical_answers"] == SAMPLES
    assert document["next_tokens"]["kl_nats"]["high"] == pytest.approx(0, abs=1e-9)
    assert document["next_tokens"]["same_best_token"]["value"] == 1
    assert document["lengths"]["ratio"] == {"value": 1, "low": 1, "high": 1}
    assert all(one["relative_rms_error"] == 0 for one in document["weights"])


def test_a_broken_scale_fails(quantized: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(quantized, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_global_scale"):
            tensors[name] = tensors[name] / 2
    save_file(tensors, broken / "model.safetensors")
    code, document = compared(broken)
    assert (code, document["verdict"]) == (3, "INVALID")
    assert "exact_match" in document["failed"]
    assert document["next_tokens"]["kl_nats"]["low"] > 0.5
    assert all(0.9 < one["relative_rms_error"] < 1.1 for one in document["weights"])


def test_refusals(quantized: Path, tmp_path: Path) -> None:
    hopeless = tmp_path / "hopeless.jsonl"
    hopeless.write_text(json.dumps({"prompt": "2 3", "reference": "zebra", "max_tokens": 2}) + "\n")
    plain = Path(shutil.copytree(quantized, tmp_path / "plain"))
    (plain / "tokenizer.json").write_text("{}")
    narrow = Path(shutil.copytree(model_folder("reference"), tmp_path / "narrow"))
    tensors = load_file(narrow / "model.safetensors")
    for name in [*tensors]:
        if ".layers.8." in name:
            del tensors[name]
    save_file(tensors, narrow / "model.safetensors")
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    cases = [
        ((plain, "--against", "reference"), "name prompts with expected answers (JSON lines) with --references"),
        ((narrow, "--against", "reference"), "has other shapes than"),
        ((quantized, "--against", tmp_path / "none"), "no such file"),
        ((quantized, "--against", "reference", "--precision", "int8"), "'bf16' or 'fp8', got 'int8'"),
        ((quantized, "--against", "reference", "--baseline", tmp_path), "leave out --model, --benchmark"),
        ((quantized, "--against", "reference", "--references", hopeless), "scores 0 in every prompt, so nothing could"),
        ((quantized, "--against", "reference", "--share", 0), "--share 0: nothing could fail"),
        ((tmp_path, "--samples", 5), "--samples and --out: are for --against"),
    ]
    for arguments, problem in cases:
        code, out, err = call_here("accuracy", *arguments)
        assert (code, out) == (2, "")
        assert problem in err
        assert err.count("\n") == 1
