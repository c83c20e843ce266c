"""OpenVINO GenAI's continuous batching, weights, compute and cache all in the same precision."""

from __future__ import annotations

import os
from collections.abc import Sequence

from peers.protocol import LoadedEngine, Specification, serve

KV_CACHE_GB = 1


def load(specification: Specification) -> LoadedEngine:
    os.environ["CI"] = "true"  # keeps the package from sending usage events
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = KV_CACHE_GB
    element_type = {"bf16": "bf16", "fp32": "f32"}[specification["precision"]]
    properties = {
        "INFERENCE_PRECISION_HINT": element_type,
        "KV_CACHE_PRECISION": element_type,
        "INFERENCE_NUM_THREADS": specification["threads"],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(specification["model"], scheduler, "CPU", properties)

    def generate(prompts: Sequence[list[int]], output_lengths: Sequence[int]) -> list[list[int]]:
        results = pipeline.generate(
            [openvino.Tensor([prompt]) for prompt in prompts],
            [
                openvino_genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
                for length in output_lengths
            ],
        )
        return [list(result.m_generation_ids[0]) for result in results]

    settings = {
        **properties,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "dynamic_split_fuse": scheduler.dynamic_split_fuse,
        "cache_size_gb": KV_CACHE_GB,
    }
    return LoadedEngine(generate, openvino_genai.__version__, settings)


if __name__ == "__main__":
    serve(load)
