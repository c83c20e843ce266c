"""How an engine on the CPU says which kernels it has. Here, for who reads that of a run needs no PyTorch."""

NO_KERNELS = "PyTorch only: "
"""How ``ops.native.status`` begins where there are none."""
WIDENED = ", bf16 widened"
"""How it ends where the processor lacks the one instruction for products of bf16 that the kernels know."""
