"""How an engine says what it computes with. Here, for who reads that of a run needs no PyTorch."""

SIMULATED = "simulated "
"""Before the name of the GPU that ``describe``'s device pretends to be."""
NO_KERNELS = "PyTorch only: "
"""How ``ops.native.status`` begins where there are none on the CPU."""
WIDENED = ", bf16 widened"
"""How it ends where the processor lacks the one instruction for products of bf16 that the kernels know."""
