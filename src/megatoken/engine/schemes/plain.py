"""Weights in the type of the activations."""

from __future__ import annotations

from megatoken.engine.schemes.linear_scheme import LinearScheme

FP32 = LinearScheme("fp32", "float32", activation_bytes=4, weight_bytes=4)
BF16 = LinearScheme(
    "bf16",
    "bfloat16",
    activation_bytes=2,
    weight_bytes=2,
    lowest_capability=(8, 0),
    spec_column="fp16_bf16_dense_tflops",
    product_share=0.984,  # sustained products
    sustained_share=0.727,
    watts_per_operation=0.830e-12,
    product_operations_per_second=0.65e15,
)
