"""Muon: momentum whose matrix is made orthogonal before it is applied. https://kellerjordan.github.io/posts/muon/"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The quintic iteration's coefficients and its number of rounds, from the source above.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Muon:
    """For stacks of matrices [L, N, D], each orthogonalised for itself and all of a stack at once.

    Args:
        parameters: The stacks.
        momentum: Of the running mean of gradients (Nesterov's).
        weight_decay: Share of a weight that a step of learning rate 1 would take away.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        self._parameters = parameters
        self._means = [torch.zeros_like(parameter) for parameter in parameters]
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply the gradients and drop them."""
        for parameter, mean in zip(self._parameters, self._means, strict=True):
            assert parameter.grad is not None
            mean.lerp_(parameter.grad, 1 - self._momentum)
            update = orthogonal(parameter.grad.lerp_(mean, self._momentum))
            outputs, inputs = parameter.shape[-2:]
            parameter.mul_(1 - learning_rate * self._weight_decay)
            parameter.add_(update.to(parameter.dtype), alpha=-learning_rate * max(1.0, outputs / inputs) ** 0.5)
            parameter.grad = None


def orthogonal(matrices_LND: Tensor) -> Tensor:
    """The same shape, on a GPU in bf16: the singular vectors as they are, every singular value about 1."""
    wide = matrices_LND.shape[-2] <= matrices_LND.shape[-1]
    x = matrices_LND.float() if wide else matrices_LND.float().mT
    x = x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)
    x = x.bfloat16() if x.is_cuda else x  # a processor may multiply bf16 ten times as slowly as fp32
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = linear * x + (cubic * gram + quintic * gram @ gram) @ x
    return x if wide else x.mT
