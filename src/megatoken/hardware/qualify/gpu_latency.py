"""What a launch costs: kernels one after the other, kernels of a CUDA graph, and a round trip to the GPU."""

from __future__ import annotations

import torch

from megatoken.hardware.qualify.gpu_timing import DEVICE, gpu_seconds
from megatoken.hardware.qualify.timing import call_seconds
from megatoken.hardware.qualify.values import Outcomes, Setting, Value

GRAPH_KERNELS, BATCH = 100, 100


@torch.inference_mode()
def launch(setting: Setting) -> Outcomes:
    """A kernel that adds 1 to one number."""
    torch.cuda.set_device(DEVICE)
    one = torch.zeros(1, device=DEVICE)
    one.add_(1.0)
    torch.cuda.synchronize()

    def batch() -> None:
        for _ in range(BATCH):
            one.add_(1.0)
        torch.cuda.synchronize()

    def round_trip() -> None:
        one.add_(1.0)
        torch.cuda.synchronize()

    seconds = call_seconds(batch, setting)
    yield Value("kernel_launch", "Launch of a small kernel", "us", [1e6 * each / BATCH for each in seconds], "lower")
    seconds = call_seconds(round_trip, setting)
    title = "Launch of a small kernel and wait for it"
    yield Value("kernel_round_trip", title, "us", [1e6 * each for each in seconds], "lower")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_KERNELS):
            one.add_(1.0)
    seconds = gpu_seconds(graph.replay, setting)
    title = "Small kernel in a CUDA graph"
    yield Value("graph_kernel", title, "us", [1e6 * each / GRAPH_KERNELS for each in seconds], "lower")
