"""The training and its export: the plain model is the Llama that transformers and the engine run; losses fall."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tool_runs import run_tool
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatoken.engine import Engine, EngineConfig, FinishReason, Request
from reference_model import data, export
from reference_model.model import Llama, Shape
from reference_model.optimizer import orthogonal

SHAPE = Shape(64, 96, layers=3, heads=4, kv_heads=2, vocabulary_size=600)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Llama]:
    """A model whose every weight matters, rounded to bf16 as it is stored."""
    model = Llama(SHAPE, torch.float32, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            drawn = torch.empty_like(parameter).normal_(mean, 0.15, generator=generator)
            parameter.copy_(drawn.bfloat16())
    folder = tmp_path_factory.mktemp("exported")
    tokenizer = data.train_tokenizer(0, SHAPE.vocabulary_size, rows=300)
    export.write_static_files(folder, SHAPE, tokenizer, data.held_out_rows(tokenizer, 0, 8))
    export.write_tensors(folder, model.hugging_face_tensors())
    return folder, model


def test_logits_are_those_of_transformers(exported: tuple[Path, Llama]) -> None:
    folder, model = exported
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 600, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = twin(ids).logits
        # Rows of two lengths in one line of tokens: the second group sees nothing of the first.
        line = torch.cat([ids[:2, :24].flatten(), ids[2]])
        found = model.logits(line, ((2, 24), (1, 40)))
    torch.testing.assert_close(found[:48].view(2, 24, -1), wanted[:2, :24], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[48:], wanted[2], atol=1e-4, rtol=1e-4)


def test_the_engine_and_transformers_write_the_same(exported: tuple[Path, Llama]) -> None:
    folder, _ = exported
    twin, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        AutoTokenizer.from_pretrained(folder),
    )
    engine = Engine(folder, EngineConfig(precision="fp32", device="cpu", threads=1))
    prompts = [row["prompt"] for row in export.read_held_out(folder)]
    completions = engine.generate([Request(prompt, max_tokens=30) for prompt in prompts])
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        assert ids.input_ids[0].tolist() == engine.encode(prompt)
        wanted = twin.generate(**ids, max_new_tokens=30)[0, ids.input_ids.shape[1] :].tolist()
        assert completion.token_ids == wanted


def test_orthogonal_keeps_directions_and_levels_their_sizes() -> None:
    matrices = torch.randn(4, 48, 96, generator=torch.Generator().manual_seed(0))
    for given in (matrices, matrices.mT):
        sizes = torch.linalg.svdvals(orthogonal(given).float())
        assert 0.6 < sizes.min() <= sizes.max() < 1.3
        overlap = (orthogonal(given).float() * given).sum((-2, -1)) / torch.linalg.svdvals(given).sum(-1)
        assert overlap.min() > 0.8


def test_a_training_learns_and_leaves_a_whole_folder(trained: Path) -> None:
    record = export.read_record(trained)
    first, *_, last = record["loss_curve"]
    assert last["loss"] < 0.8 * first["loss"]
    assert record["steps"] == record["examinations"][-1]["step"] == 60
    assert record["rows"] == sum(rows for rows, _ in record["layout_rows_and_lengths"]) * 60
    assert record["answer_tokens"] < record["tokens"] < record["step_tokens_with_padding"] * 60
    card = (trained / "model_card.md").read_text()
    assert f"{record['tokens']:,} tokens" in card
    rows = export.read_held_out(trained)
    assert len(rows) == 32
    assert set(rows[0]) == {"prompt", "max_tokens", "reference", "task"}
    engine = Engine(trained, EngineConfig(precision="fp32", device="cpu", threads=1))
    completion = engine.generate([Request(rows[0]["prompt"], max_tokens=5)])[0]
    assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_evaluation_adds_to_record_and_card(trained: Path) -> None:
    output = run_tool("reference_model.evaluate", str(trained), "bf16")
    greedy = export.read_record(trained)["greedy"]["bf16 on CPU"]
    assert f"'all': {greedy['exact_match']['all']}" in output
    assert "| bf16 on CPU |" in (trained / "model_card.md").read_text()


def test_a_training_goes_on_with_new_data(trained: Path, tmp_path: Path) -> None:
    before = export.read_record(trained)
    arguments = ("--size", "small", "--workers", "1", "--eager", "--steps", "2", "--start-from", str(trained))
    run_tool("reference_model", "--output", str(tmp_path), *arguments)
    after = export.read_record(tmp_path)
    assert after["before"]["next_shard"] == before["next_shard"] < after["next_shard"]
    assert after["steps"] == before["steps"] + 2
    assert after["rows"] > before["rows"]
