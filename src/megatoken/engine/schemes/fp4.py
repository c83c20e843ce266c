"""fp4, on simulated GPUs only: e2m1 weights and inputs with a scale for 16 values (NVFP4)."""

from __future__ import annotations

from megatoken.engine.schemes.linear_scheme import LinearScheme

FP4 = LinearScheme(
    "fp4",
    "bfloat16",
    activation_bytes=2,
    weight_bytes=0.5 + 1 / 16,
    quantised_format="e2m1",
    fp8_cache=True,
    simulated_only=True,
    gpu_input_bytes=8,
    spec_column="fp4_dense_tflops",
    published_column="measured_fp4_matmul_tflops",
    sustained_share=0.568,  # mean of what is published for GB200 and GB300
    sustained_basis="others are published to reach",
)
