"""Exact match of an exported folder in megatoken's engine: ``python -m reference_model.evaluate FOLDER bf16 fp8``."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

from megatoken.engine import Engine, EngineConfig, Request
from megatoken.engine.config import Precision
from reference_model import export


def evaluate(folder: Path, precision: Precision) -> dict[str, Any]:
    """Greedy answers to the held-out prompts: exact match by task and over ``all``, and a few wrong ones."""
    rows = export.read_held_out(folder)
    engine = Engine(folder, EngineConfig(precision=precision))
    assert engine.tokenizer is not None
    began = time.monotonic()
    completions = engine.generate([Request(row["prompt"], row["max_tokens"]) for row in rows])
    counts, right, wrong = Counter(row["task"] for row in rows), Counter[str](), []
    for row, completion in zip(rows, completions, strict=True):
        answer = engine.tokenizer.decode(completion.token_ids)
        if answer == row["reference"]:
            right[row["task"]] += 1
        else:
            wrong.append({"task": row["task"], "reference": row["reference"], "answer": answer})
    return {
        "device": str(engine.describe()["device"]).replace("cpu", "CPU"),
        "seconds": round(time.monotonic() - began, 1),
        "answer_tokens": sum(len(completion.token_ids) for completion in completions),
        "exact_match": {"all": round(right.total() / len(rows), 4)}
        | {task: round(right[task] / count, 4) for task, count in sorted(counts.items())},
        "wrong": wrong[:6],
    }


def main(arguments: list[str]) -> None:
    """Evaluate in each precision named, and add the figures to the folder's record and card."""
    folder, precisions = Path(arguments[0]), cast("list[Precision]", arguments[1:])
    for precision in precisions:
        result = evaluate(folder, precision)
        name = f"{precision} on {result['device']}"
        for example in result.pop("wrong"):
            print(f"{name} {example['task']}: {example['reference'][-60:]!r} was {example['answer'][-60:]!r}")
        print(f"{name} {result}", flush=True)
        record = export.read_record(folder)
        record.setdefault("greedy", {})[name] = result
        export.write_record(folder, record)


if __name__ == "__main__":
    main(sys.argv[1:])
