"""The Llama of the reference model, for training: all rows of a step in one line of tokens, weights stacked by layer.

Shape letters: T tokens of a step, D hidden size, F feed-forward size, V vocabulary, L layers, H heads, K key-value
heads, E head size, N a linear's outputs. The same function as Hugging Face's ``LlamaForCausalLM`` with tied embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_model.data import Layout

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MATRICES = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")  # in the order in which a layer takes them


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary_size: int
    rope_theta: float = 10_000.0
    rms_norm_epsilon: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.heads

    def as_dict(self) -> dict[str, int | float]:
        """For records."""
        return asdict(self)


class Llama(nn.Module):
    """Decoder with fp32 weights that computes in ``dtype``; residual stream in ``dtype`` too, as at inference."""

    def __init__(self, shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        hidden, ffn, kv = shape.hidden_size, shape.intermediate_size, shape.kv_heads * shape.head_dim
        sizes = {
            "q_proj": (hidden, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, hidden),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }

        def drawn(*size: int, deviation: float) -> nn.Parameter:
            return nn.Parameter(torch.empty(size).normal_(0.0, deviation, generator=generator))

        self.embedding_VD = drawn(shape.vocabulary_size, hidden, deviation=0.02)
        # What a layer adds starts at zero, so that depth does no harm at first.
        self.matrices_LND = nn.ParameterDict(
            {
                name: nn.Parameter(torch.zeros(shape.layers, *size))
                if name in ("o_proj", "down_proj")
                else drawn(shape.layers, *size, deviation=size[1] ** -0.5)
                for name, size in sizes.items()
            }
        )
        self.input_norms_LD = nn.Parameter(torch.ones(shape.layers, hidden))
        self.post_norms_LD = nn.Parameter(torch.ones(shape.layers, hidden))
        self.norm_D = nn.Parameter(torch.ones(hidden))
        self._layer_in_training: Callable[..., Tensor] = self._layer
        self._loss_in_training: Callable[..., Tensor] = self._loss

    def compile_training(self) -> None:
        """From now on ``forward`` runs compiled: one layer, used by all, and the loss."""
        self._layer_in_training = torch.compile(self._layer, dynamic=False)
        self._loss_in_training = torch.compile(self._loss, dynamic=False)

    def forward(self, token_ids_T: Tensor, labels_T: Tensor, layout: Layout) -> Tensor:
        """Mean cross-entropy of the labels; -100 marks a position without one."""
        return self._loss_in_training(self._hidden(token_ids_T, layout, self._layer_in_training), labels_T)

    def logits(self, token_ids_T: Tensor, layout: Layout) -> Tensor:
        """[T, V] in ``dtype``. Positions start at 0 in every row, and rows see nothing of each other."""
        return self._head(self._hidden(token_ids_T, layout, self._layer))

    def hugging_face_tensors(self) -> dict[str, Tensor]:
        """Views of every weight, by the name that ``LlamaForCausalLM`` gives it."""
        tensors: dict[str, Tensor] = {"model.embed_tokens.weight": self.embedding_VD, "model.norm.weight": self.norm_D}
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}"
            for name, stacked in self.matrices_LND.items():
                part = "self_attn" if name in _ATTENTION else "mlp"
                tensors[f"{prefix}.{part}.{name}.weight"] = stacked[layer]
            tensors[f"{prefix}.input_layernorm.weight"] = self.input_norms_LD[layer]
            tensors[f"{prefix}.post_attention_layernorm.weight"] = self.post_norms_LD[layer]
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _hidden(self, token_ids_T: Tensor, layout: Layout, layer: Callable[..., Tensor]) -> Tensor:
        cos_TE, sin_TE = self._rotary(layout, token_ids_T.device)
        matrices = [weight.to(self.dtype).unbind(0) for weight in (self.matrices_LND[name] for name in _MATRICES)]
        norms = [self.input_norms_LD.unbind(0), self.post_norms_LD.unbind(0)]
        x_TD = F.embedding(token_ids_T, self.embedding_VD).to(self.dtype)
        for weights in zip(*norms, *matrices, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, layout, *weights)
        return x_TD

    def _layer(
        self,
        x_TD: Tensor,
        cos_TE: Tensor,
        sin_TE: Tensor,
        layout: Layout,
        input_norm_D: Tensor,
        post_norm_D: Tensor,
        *matrices: Tensor,
    ) -> Tensor:
        query, key, value, output, gate, up, down = matrices
        qkv_TN = F.linear(self._norm(x_TD, input_norm_D), torch.cat([query, key, value]))
        x_TD = x_TD + F.linear(self._attention(qkv_TN, cos_TE, sin_TE, layout), output)
        gate_TF, up_TF = F.linear(self._norm(x_TD, post_norm_D), torch.cat([gate, up])).chunk(2, dim=-1)
        return x_TD + F.linear(F.silu(gate_TF) * up_TF, down)

    def _head(self, x_TD: Tensor) -> Tensor:
        return F.linear(self._norm(x_TD, self.norm_D), self.embedding_VD.to(self.dtype))

    def _loss(self, x_TD: Tensor, labels_T: Tensor) -> Tensor:
        return F.cross_entropy(self._head(x_TD).float(), labels_T, ignore_index=-100)

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        x32_TD = x_TD.float()
        scale_T1 = torch.rsqrt(x32_TD.square().mean(-1, keepdim=True) + self.shape.rms_norm_epsilon)
        return (x32_TD * scale_T1 * weight_D).to(self.dtype)

    def _rotary(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
        positions_T = torch.cat([torch.arange(length, device=device).repeat(rows) for rows, length in layout])
        exponents = torch.arange(0, self.shape.head_dim, 2, device=device).float() / self.shape.head_dim
        angles = positions_T.float()[:, None] * self.shape.rope_theta**-exponents
        angles_TE = torch.cat([angles, angles], dim=-1)
        return angles_TE.cos().to(self.dtype), angles_TE.sin().to(self.dtype)

    def _attention(self, qkv_TN: Tensor, cos_TE: Tensor, sin_TE: Tensor, layout: Layout) -> Tensor:
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        qkv_THE = qkv_TN.view(len(qkv_TN), heads + 2 * kv_heads, head_dim)
        qk_THE, v_TKE = torch.split(qkv_THE, [heads + kv_heads, kv_heads], dim=1)
        first, second = qk_THE.chunk(2, dim=-1)
        qk_THE = qk_THE * cos_TE[:, None] + torch.cat([-second, first], dim=-1) * sin_TE[:, None]
        q_THE, k_TKE = torch.split(qk_THE, [heads, kv_heads], dim=1)
        k_THE, v_THE = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k_TKE, v_TKE))
        parts, start = [], 0
        for rows, length in layout:
            span = slice(start, start + rows * length)
            q, k, v = (part[span].view(rows, length, heads, head_dim).transpose(1, 2) for part in (q_THE, k_THE, v_THE))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            parts.append(mixed.transpose(1, 2).reshape(rows * length, heads * head_dim))
            start = span.stop
        return torch.cat(parts)
