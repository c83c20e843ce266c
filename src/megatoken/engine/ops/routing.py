"""How a mixture of experts chooses: the definition, which the CPU computes with too.

Shape letters: X experts of a layer, C choices of a token; others as in ``ops``.
"""

from __future__ import annotations

from torch import Tensor

from megatoken.engine.config import ExpertsConfig


def choose_experts(logits_TX: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, of which the highest ``config.active`` compute the token.

    Divided by their sum, their weights are the softmax over these alone, as gpt-oss defines them.

    Args:
        logits_TX: scores of the experts, fp32.
        config: number of choices, and whether their weights are divided by their sum.

    Returns:
        The weights of the choices, fp32 [T, C], and the experts chosen, int64 [T, C].
    """
    weights_TC, chosen_TC = logits_TX.softmax(-1).topk(config.active)
    if config.normalized:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return weights_TC, chosen_TC
