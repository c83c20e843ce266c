"""The training: tokenizer, held-out set, steps with Muon and AdamW, and the exported folder."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor

from reference_model import export
from reference_model.data import (
    LONGEST_ANSWER_TOKENS,
    LONGEST_PROMPT_TOKENS,
    EncodedRow,
    Layout,
    ShardPlan,
    encode_rows,
    group_rows,
    held_out_rows,
    layout_tokens,
    plan_layout,
    train_tokenizer,
)
from reference_model.model import Llama, Shape
from reference_model.optimizer import Muon
from reference_model.shards import Shards, labelled
from reference_model.tasks import Row

WARM_UP_STEPS = 100
DECAY_SHARE = 0.5
MUON_LEARNING_RATE = 0.02
ADAM_LEARNING_RATE = 0.004
EVALUATIONS = 12
TOTALS = ("steps", "training_seconds", "rows", "tokens", "answer_tokens")  # of a record, earlier trainings included

_LONGEST_ROW = LONGEST_PROMPT_TOKENS + LONGEST_ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained, and on how much at a time."""

    shape: Shape
    tokens_per_step: int
    row_lengths: tuple[int, ...]
    tokenizer_rows: int
    layout_rows: int
    held_out_rows: int
    steps_per_shard: int
    loss_steps: int  # in a point of the curve


SIZES = {
    "full": Size(
        Shape(256, 768, layers=9, heads=8, kv_heads=4, vocabulary_size=3072),
        tokens_per_step=65_536,
        row_lengths=(64, 128, 192, 320, 512, _LONGEST_ROW),
        tokenizer_rows=30_000,
        layout_rows=8192,
        held_out_rows=2048,
        steps_per_shard=8,
        loss_steps=50,
    ),
    "small": Size(
        Shape(64, 192, layers=2, heads=2, kv_heads=1, vocabulary_size=768),
        tokens_per_step=2048,
        row_lengths=(128, 384, _LONGEST_ROW),
        tokenizer_rows=500,
        layout_rows=1024,
        held_out_rows=32,
        steps_per_shard=8,
        loss_steps=10,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; exactly one of ``steps`` and ``seconds`` ends the training."""

    output: Path
    size: str
    steps: int | None
    seconds: float | None
    start_from: Path | None
    seed: int
    workers: int
    compiled: bool


def run(options: Options) -> dict[str, Any]:
    """Train and export; returns what ``training.json`` holds.

    The folder can be used from the first evaluation on: weights and records are written again at each.
    """
    size = SIZES[options.size]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    tokenizer = train_tokenizer(options.seed, size.shape.vocabulary_size, size.tokenizer_rows)
    held_out = held_out_rows(tokenizer, options.seed, size.held_out_rows)
    layout = plan_layout(tokenizer, options.seed, size.row_lengths, size.tokens_per_step, size.layout_rows)
    export.write_static_files(options.output, size.shape, tokenizer, held_out)
    plan = ShardPlan(
        tokenizer.to_str(), layout, size.steps_per_shard, options.seed, frozenset(row.key for row in held_out)
    )

    model = Llama(size.shape, torch.bfloat16 if device.type == "cuda" else torch.float32, _generator(options.seed))
    before: dict[str, Any] = {"next_shard": 0} | dict.fromkeys(TOTALS, 0)
    if options.start_from is not None:
        previous = export.read_record(options.start_from)
        before = {key: previous[key] for key in before}
        stored = load_file(options.start_from / "model.safetensors")
        for name, view in model.hugging_face_tensors().items():
            view.copy_(stored[name])
    record: dict[str, Any] = {
        "seed": options.seed,
        "size": options.size,
        "shape": size.shape.as_dict(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "before": before,
        "layout_rows_and_lengths": layout,
        "step_tokens_with_padding": layout_tokens(layout),
        "learning_rates": {"muon": MUON_LEARNING_RATE, "adamw": ADAM_LEARNING_RATE},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "numpy": np.__version__,
        },
        "preparation_seconds": round(time.monotonic() - began, 1),
    }
    say(f"prepared in {record['preparation_seconds']} s: {record['parameters']:,} parameters, steps of {layout}")
    with Shards(plan, options.workers, before["next_shard"], device) as shards:
        _train(model.to(device), shards, layout, options, Examination(tokenizer, held_out, size, device), record)
    return record


class Examination:
    """The held-out set: a row is right if each token of its answer is the most likely one, given those before.

    That is exact match of greedy decoding, found without decoding.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, rows: list[Row], size: Size, device: torch.device) -> None:
        self._counts = Counter(row.task for row in rows)
        by_length: dict[int, list[tuple[str, EncodedRow]]] = {length: [] for length in size.row_lengths}
        for row, encoded in zip(rows, encode_rows(tokenizer, rows), strict=True):
            assert encoded is not None
            fitting = next(length for length in size.row_lengths if length >= len(encoded.token_ids))
            by_length[fitting].append((row.task, encoded))
        self._batches = []
        for length, members in by_length.items():
            most = max(1, size.tokens_per_step // length)
            for start in range(0, len(members), most):
                part = members[start : start + most]
                tensors = labelled(group_rows([encoded for _, encoded in part], length), device)
                self._batches.append(([task for task, _ in part], *tensors))

    @torch.no_grad()
    def by_task(self, model: Llama) -> dict[str, float]:
        """Share of right rows of each task, and under ``all`` of all rows."""
        right: Counter[str] = Counter()
        for tasks, token_ids_RS, labels_RS in self._batches:
            rows, length = labels_RS.shape
            best_RS = model.logits(token_ids_RS.flatten(), ((rows, length),)).argmax(-1).view_as(labels_RS)
            right_R = ((best_RS == labels_RS) | (labels_RS < 0)).all(dim=1).tolist()
            right.update(task for task, is_right in zip(tasks, right_R, strict=True) if is_right)
        shares = {task: round(right[task] / count, 4) for task, count in sorted(self._counts.items())}
        return {"all": round(right.total() / self._counts.total(), 4)} | shares


def _train(
    model: Llama, shards: Shards, layout: Layout, options: Options, examination: Examination, record: dict[str, Any]
) -> None:
    muon = Muon(list(model.matrices_LND.parameters()))
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("matrices")]
    adam = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    if options.compiled:
        model.compile_training()
    losses: list[Tensor] = []
    loss_steps = SIZES[options.size].loss_steps
    curve: list[dict[str, float]] = []
    examined: list[dict[str, Any]] = []
    launched = started = time.monotonic()
    batches = shards.steps()
    for step in counting():
        if step == 1:  # the first step compiles; the clock of the training starts after it
            _wait_for(model)
            started = time.monotonic()
            record["first_step_seconds"] = round(started - launched, 1)
        elapsed = time.monotonic() - started
        progress = step / options.steps if options.steps else elapsed / (options.seconds or math.inf) if step else 0.0
        if step and (progress >= 1 or progress >= (len(examined) + 1) / EVALUATIONS):
            examined.append({"step": step, "seconds": round(elapsed, 1), "exact_match": examination.by_task(model)})
            totals = {
                "steps": step,
                "training_seconds": round(time.monotonic() - started, 1),
                "rows": shards.rows,
                "tokens": shards.tokens,
                "answer_tokens": shards.answer_tokens,
            }
            record |= {key: record["before"][key] + value for key, value in totals.items()}
            record |= {
                "next_shard": shards.next_shard,
                "waited_for_data_seconds": round(shards.wait_seconds, 1),
                "loss_curve": curve,
                "examinations": examined,
            }
            export.write_tensors(options.output, model.hugging_face_tensors())
            export.write_record(options.output, record)
            say(f"step {step} {elapsed:.0f} s {_told(examined[-1]['exact_match'])}")
            if progress >= 1:
                return
        token_ids, labels = next(batches)
        rate = min(1.0, (step + 1) / WARM_UP_STEPS, (1 - progress) / DECAY_SHARE)
        loss = model(token_ids, labels, layout)
        loss.backward()
        muon.step(MUON_LEARNING_RATE * rate)
        for group in adam.param_groups:
            group["lr"] = ADAM_LEARNING_RATE * rate
        adam.step()
        adam.zero_grad()
        losses.append(loss.detach())
        if len(losses) == loss_steps:
            mean = float(torch.stack(losses).mean())
            losses.clear()
            curve.append({"step": step + 1, "loss": round(mean, 5)})
            if not math.isfinite(mean):
                raise SystemExit(f"the loss is {mean} at step {step + 1}; lower the learning rates")
            if (step + 1) % (10 * loss_steps) == 0 or step < 10 * loss_steps:
                say(f"step {step + 1} {elapsed:.0f} s loss {mean:.4f} waited for data {shards.wait_seconds:.0f} s")


def say(line: str) -> None:
    """Progress, at once."""
    print(line, file=sys.stderr, flush=True)


def _told(shares: dict[str, float]) -> str:
    return " ".join(f"{task} {100 * share:.1f}" for task, share in shares.items())


def _wait_for(model: Llama) -> None:
    if model.embedding_VD.is_cuda:
        torch.cuda.synchronize()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def default_workers() -> int:
    """All processors but the one that feeds the GPU."""
    return max(1, (os.cpu_count() or 1) - 1)
