"""megatoken, with its own defaults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from peers.protocol import LoadedEngine, Specification, serve


def load(specification: Specification) -> LoadedEngine:
    from megatoken import Engine, EngineConfig, Request, __version__
    from megatoken.engine.config import Precision

    precision = cast(Precision, specification["precision"])
    engine = Engine(
        specification["model"], EngineConfig(precision=precision, device="cpu", threads=specification["threads"])
    )

    def generate(prompts: Sequence[list[int]], output_lengths: Sequence[int]) -> list[list[int]]:
        requests = [
            Request(prompt=prompt, max_tokens=length, ignore_end_token=True)
            for prompt, length in zip(prompts, output_lengths, strict=True)
        ]
        return [completion.token_ids for completion in engine.generate(requests)]

    plan = engine.memory_plan
    settings = {
        "precision": precision,
        "threads": specification["threads"],
        "max_batched_tokens": plan.max_batched_tokens,
        "max_sequences": plan.max_sequences,
        "page_size": plan.page_size,
        "cache_tokens": plan.cache_tokens,
    }
    return LoadedEngine(generate, __version__, settings)


if __name__ == "__main__":
    serve(load)
