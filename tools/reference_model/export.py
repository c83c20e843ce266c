"""The folder that comes out: a Hugging Face checkpoint, the held-out set, the training's record, the model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from reference_model.data import BEGIN, BEGIN_ID, END, END_ID, LONGEST_ANSWER_TOKENS, LONGEST_PROMPT_TOKENS, PAD, PAD_ID
from reference_model.model import Shape
from reference_model.tasks import Row

MAX_POSITIONS = 2048
MAX_ANSWER_TOKENS = LONGEST_ANSWER_TOKENS + 20  # an answer that runs on is cut here, and is wrong

HELD_OUT = "held_out.jsonl"
RECORD = "training.json"


def write_static_files(output: Path, shape: Shape, tokenizer: Tokenizer, held_out: list[Row]) -> None:
    """All but weights, record and card; the held-out set as a file of prompts that ``megatoken run`` takes."""
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / "tokenizer.json"))
    _write(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
        },
    )
    _write(
        output / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocabulary_size,
            "max_position_embeddings": MAX_POSITIONS,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_epsilon,
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": BEGIN_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
        },
    )
    _write(
        output / "generation_config.json",
        {
            "bos_token_id": BEGIN_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "do_sample": False,
            "max_new_tokens": MAX_ANSWER_TOKENS,
        },
    )
    rows = (
        {"prompt": row.prompt, "max_tokens": MAX_ANSWER_TOKENS, "reference": row.answer, "task": row.task}
        for row in held_out
    )
    (output / HELD_OUT).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_tensors(output: Path, tensors: dict[str, Tensor]) -> None:
    """The weights, in bf16."""
    stored = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, output / "model.safetensors", metadata={"format": "pt"})


def write_record(output: Path, record: dict[str, Any]) -> None:
    """``training.json``, and the model card made from it."""
    _write(output / RECORD, record)
    (output / "model_card.md").write_text(model_card(record))


def read_record(folder: Path) -> dict[str, Any]:
    """What ``write_record`` wrote."""
    record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return record


def read_held_out(folder: Path) -> list[dict[str, Any]]:
    """Rows with ``prompt``, ``max_tokens``, ``reference`` and ``task``."""
    with (folder / HELD_OUT).open() as lines:
        return [json.loads(line) for line in lines]


def model_card(record: dict[str, Any]) -> str:
    """Markdown; every figure in it comes from the record."""
    shape, last = record["shape"], record["examinations"][-1]["exact_match"]
    greedy: dict[str, dict[str, Any]] = record.get("greedy", {})
    columns = ["while training", *greedy]
    rows = []
    for task in last:
        figures = [last[task], *(result["exact_match"][task] for result in greedy.values())]
        rows.append(f"| {task} | {' | '.join(f'{100 * figure:.1f} %' for figure in figures)} |")
    table = "\n".join([f"| task | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}", *rows])
    return f"""# megatoken reference model

A Llama of {record["parameters"]:,} parameters that answers short tasks with one right answer each: questions about a
given text, look-up in tables, reformatting, copying, sorting, counting and arithmetic. It exists so that a benchmark
has natural end tokens, and an accuracy that number formats can lose.

**What it is not.** It knows some hundred English words and some dozen forms of sentences, all made by the project, and
no facts. It follows the instructions it was trained on, word for word, and no others. It is of no use as an assistant,
and its speed says nothing about that of larger models.

## Shape

{shape["layers"]} layers, hidden size {shape["hidden_size"]}, feed-forward size {shape["intermediate_size"]},
{shape["heads"]} heads, {shape["kv_heads"]} key-value heads, vocabulary {shape["vocabulary_size"]:,} (byte-level BPE),
tied embeddings, bf16. Trained on at most {LONGEST_PROMPT_TOKENS} tokens of prompt and {LONGEST_ANSWER_TOKENS} of
answer; positions up to {MAX_POSITIONS:,} run, but were never seen.

## Training

{record["steps"]:,} steps in {record["training_seconds"]:,} s on one {record["device"]}, seed {record["seed"]}:
{record["rows"]:,} generated rows, {record["tokens"]:,} tokens, of which {record["answer_tokens"]:,} in answers.
No text from elsewhere was used. Generator and training are in `tools/reference_model`. Equal seeds give equal data;
weights differ between runs, because a GPU adds in no fixed order and a training limited by time ends where it is.

## Accuracy on the held-out set

Exact match, greedy, over the whole set; no problem of it was trained on, in whatever wording. "While training" is the
plain PyTorch model in the training's own precision, token by token given the reference; other columns are answers of
megatoken's engine running freely. `baseline.json` next to this card holds the scores that a run in accuracy
mode is compared with: fp32 on a CPU, through LoadGen, with command and revision.

{table}
"""


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
