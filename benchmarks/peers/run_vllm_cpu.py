"""vLLM's CPU back end: compiled (its default), paged cache of 2 GiB, no tokenizer, no prefix cache."""

from __future__ import annotations

import os
from collections.abc import Sequence

from peers.protocol import LoadedEngine, Specification, serve

KV_CACHE_GIB = 2
MODEL_LENGTH_TOKENS = 2048


def load(specification: Specification) -> LoadedEngine:
    threads = specification["threads"]
    # "auto", vLLM's default, keeps one core for its scheduler: half the machine where there are two.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_CACHE_GIB)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm

    arguments: dict[str, str | int | bool] = {
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[specification["precision"]],
        "max_model_len": MODEL_LENGTH_TOKENS,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    engine = vllm.LLM(model=specification["model"], **arguments)

    def generate(prompts: Sequence[list[int]], output_lengths: Sequence[int]) -> list[list[int]]:
        outputs = engine.generate(
            [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            [
                vllm.SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
                for length in output_lengths
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    settings = {
        "mode": "compiled",
        "threads": threads,
        "VLLM_CPU_OMP_THREADS_BIND": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB,
        **arguments,
    }
    return LoadedEngine(generate, vllm.__version__, settings)


if __name__ == "__main__":
    serve(load)
