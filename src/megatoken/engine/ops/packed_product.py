"""Four-bit weights that stay packed in a GPU's memory: products of few tokens, and expansion to e4m3 for many.

Few tokens are bound by the bytes of a weight, so a kernel (``packed_product.cu``) multiplies the codes themselves,
decoded to fp16, by e4m3 inputs. For many tokens the whole weight is expanded into memory that is used again at once,
just as it would be when it is loaded, and multiplied as any other fp8 weight. Shape letters: T tokens, N outputs, K
inputs, G groups of inputs that share a scale.

Codes are stored in the order in which the lanes of a warp multiply them, tile by tile of 16 outputs and 64 inputs:
[N / 16, K / 64, 8, 4, 4, 4] bytes for outputs of half a tile, lanes that share them, words of a lane, bytes of a word.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatoken.engine.ops import nvrtc
from megatoken.engine.ops.fused import require_contiguous
from megatoken.engine.schemes.packed4 import Packed4, expand, pack, unpack

OUTPUTS, DEPTH = 16, 64
"""Outputs and inputs of a tile."""
GROUPS = (16, 32)
_LARGEST_SCALE_EXPONENT = 15
"""Of fp16, in which a row's scales that are powers of two are held, so that its largest has this one."""
_HALVED = {16: 7, 32: 0}
"""Powers of two by which the kernel multiplies scales of a group."""
_CODE_EXPONENT = -14
"""Codes are decoded to their values times this power of two."""


class Launch(NamedTuple):
    """How the kernel for few tokens is compiled, see ``packed_product.cu``."""

    token_tiles: int
    output_tiles: int
    warps: int
    ahead: int

    def of(self, output_tiles: int) -> Launch:
        """For a weight of so many tiles of outputs: a program takes a divisor of them."""
        return self if output_tiles % self.output_tiles == 0 else self._replace(output_tiles=1)

    def shared_bytes(self, group: int) -> int:
        """Of a program: what finishes its outputs; the ring of pieces of each warp, or their sums."""
        piece = 512 * (self.token_tiles + self.output_tiles) + self.output_tiles * 16 * DEPTH // group
        sums = self.output_tiles * self.token_tiles * 8 * OUTPUTS * 4
        return self.output_tiles * OUTPUTS * 8 + self.warps * max(self.ahead * piece, sums)


LAUNCHES = (
    *(Launch(1, 5, 16, 3), Launch(1, 4, 16, 3), Launch(1, 2, 8, 3), Launch(1, 1, 8, 4)),
    *(Launch(2, 4, 8, 3), Launch(2, 2, 8, 3), Launch(4, 2, 8, 3), Launch(8, 2, 4, 3)),
)
"""For up to 8, 16, 32 and any number of tokens; the first of several that are equally good is taken."""
_WHOLE = 16
"""Warps of a program that takes a whole multiprocessor: its end is idle if another follows."""
_SINGLE_TILE = 1.2
"""What a tile takes in a program of one tile, in those of more: it shares its inputs with none."""
EXPANSION = Launch(1, 1, 8, 4)


def obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "they are written for compute capability 8.9 and more"
    return nvrtc.compiler_obstacle()


def fits(weight: Packed4) -> bool:
    """Whether the kernels can multiply this weight."""
    rows, groups = weight.scale_NG.shape
    if weight.kind != "e2m1" or weight.group_K is not None or weight.pre_scale_K is not None:
        return False
    dtype = {16: torch.float8_e4m3fn, 32: torch.float8_e8m0fnu}.get(weight.columns // groups)
    return weight.scale_NG.dtype == dtype and fit(rows, weight.columns)


def fit(rows: int, columns: int) -> bool:
    """Whether a weight of these sides has whole tiles."""
    return rows % OUTPUTS == 0 and columns % DEPTH == 0


@dataclass(frozen=True, slots=True)
class PackedTiles:
    """A weight [N, K] in the order of the kernels."""

    codes: Tensor  # uint8 [N / 16, K / 64, 8, 4, 4, 4]
    scales: Tensor  # uint8 [N / 16, K / 64, 8, 64 / group, 2]: e4m3, or of powers of two the high byte of fp16
    factor_N: Tensor  # fp32, multiplies the sums of products with few tokens
    first_N: Tensor  # fp32, multiplies values before they are rounded to e4m3 for the first time
    second_N: Tensor  # fp32, multiplies these before they are rounded again
    weight_scale: Tensor  # fp32, one element: of the expanded weight

    @classmethod
    def pack(cls, weight: Packed4) -> Self:
        """``weight`` must be one that ``fits``."""
        rows, groups = weight.scale_NG.shape
        second_N1 = torch.ones(1, 1, dtype=torch.float64) if weight.second_N1 is None else weight.second_N1
        second_N1 = second_N1.to(weight.codes_NB.device).expand(rows, 1)
        expanded, _ = expand(weight)
        exponent_N1 = (expanded.scale_N1.double() / second_N1).log2().round()
        scale = expanded.scale_N1.amax()  # as ``with_one_scale``
        bytes_NG = weight.scale_NG.view(torch.uint8)
        largest_N1 = torch.zeros_like(exponent_N1)  # power of two that scales are stored divided by
        if weight.columns // groups == 32:
            exponents_NG = bytes_NG.double() - 127
            largest_N1 = exponents_NG.amax(1, keepdim=True) - _LARGEST_SCALE_EXPONENT
            bytes_NG = (exponents_NG - largest_N1).exp2().half().view(torch.uint8)[:, 1::2]
        powers = largest_N1 - _CODE_EXPONENT - _HALVED[weight.columns // groups]
        return cls(
            _tiled_codes(unpack(weight.codes_NB, weight.columns)),
            _tiled_scales(bytes_NG, weight.columns // DEPTH),
            (second_N1 * powers.exp2()).float()[:, 0],
            (largest_N1 - exponent_N1).exp2().float()[:, 0],
            (expanded.scale_N1 / scale)[:, 0],
            scale,
        )

    @property
    def sides(self) -> tuple[int, int]:
        """N and K."""
        return len(self.codes) * OUTPUTS, self.codes.shape[1] * DEPTH

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return DEPTH // self.scales.shape[3]

    def in_order(self, order_N: Tensor) -> Self:
        """With other rows, given by their numbers."""
        codes_NK = _untiled_codes(self.codes)[order_N]
        bytes_NG = self.scales.permute(0, 4, 2, 1, 3).reshape(len(codes_NK), -1)[order_N]
        vectors = {name: getattr(self, name)[order_N] for name in ("factor_N", "first_N", "second_N")}
        return replace(
            self, codes=_tiled_codes(codes_NK), scales=_tiled_scales(bytes_NG, self.codes.shape[1]), **vectors
        )

    def product(
        self,
        x_TK: Tensor,  # e4m3
        x_scale: Tensor,  # fp32, one element
        bias_N: Tensor | None,  # bf16
        out_TN: Tensor | None = None,
        config: Launch | None = None,  # its output tiles divide those of the weight; None: ``launch_on``
        overlapping: bool | None = None,  # copy weights, which are older, while the kernel before runs
    ) -> Tensor:
        """``x W^T + b``, bf16 [T, N]: sums in fp32, in the order of its launch. Raises CapacityError: no launch."""
        (tokens, depth), (outputs, _) = x_TK.shape, self.sides
        out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=x_TK.device) if out_TN is None else out_TN
        require_contiguous(x_TK, x_scale, bias_N, out)
        if not tokens:
            return out
        if config is None:
            config = launch_on(x_TK.device.index, tokens, len(self.codes))
        kernel = compiled(x_TK.device.index, "packed_product", self.group, config)
        grid = len(self.codes) // config.output_tiles, -(-tokens // (8 * config.token_tiles))
        tensors = (self.codes, self.scales, self.factor_N, x_TK, x_scale, bias_N, out)
        shared_bytes = config.shared_bytes(self.group)
        arguments = (*tensors, tokens, outputs, depth)
        overlapping = nvrtc.overlaps(x_TK.device, tokens) if overlapping is None else overlapping
        nvrtc.launch(kernel, grid, 32 * config.warps, shared_bytes, arguments, x_TK.device, overlapping)
        return out

    def expand(self, config: Launch = EXPANSION) -> Tensor:
        """e4m3 [N, K], with ``weight_scale``: the bytes of ``with_one_scale(expand(weight))``."""
        out_NK = torch.empty(self.sides, dtype=torch.float8_e4m3fn, device=self.codes.device)
        kernel = compiled(out_NK.device.index, "packed_expansion", self.group, config)
        tensors = (self.codes, self.scales, self.first_N, self.second_N, out_NK)
        arguments = (*tensors, self.sides[1])
        nvrtc.launch(kernel, (len(self.codes), 1), 32 * config.warps, 0, arguments, out_NK.device)
        return out_NK


def _tiled_codes(codes_NK: Tensor) -> Tensor:
    """Codes, one in each uint8, in the order of the kernels."""
    rows, tiles = codes_NK.shape[0] // OUTPUTS, codes_NK.shape[1] // DEPTH
    # Half of a tile and output in it; tile, lane, word, pair of inputs in the word, input of the pair.
    parts = codes_NK.view(rows, 2, 8, tiles, 4, 4, 2, 2).permute(0, 3, 2, 4, 5, 7, 6, 1).flip(7)
    return _kernel_bits(pack(parts.reshape(-1, 8)).view(rows, tiles, 8, 4, 4, 4))


def _untiled_codes(codes: Tensor) -> Tensor:
    """The inverse."""
    parts = unpack(_plain_bits(codes).view(-1, 4), 8).view(*codes.shape[:5], 2, 2, 2).flip(7)
    return parts.permute(0, 7, 2, 1, 3, 4, 6, 5).reshape(len(codes) * OUTPUTS, codes.shape[1] * DEPTH)


def _kernel_bits(bytes_: Tensor) -> Tensor:
    """Of two codes in each byte: the first's sign and magnitude where one mask of the kernel takes both."""
    return bytes_ & 0x80 | bytes_ >> 3 & 0x0E | (bytes_ & 0x07) << 4 | bytes_ >> 3 & 0x01


def _plain_bits(bytes_: Tensor) -> Tensor:
    """The inverse."""
    return bytes_ & 0x80 | (bytes_ & 0x0E) << 3 | bytes_ >> 4 & 0x07 | (bytes_ & 0x01) << 3


def _tiled_scales(bytes_NG: Tensor, tiles: int) -> Tensor:
    """Scales of the two outputs of a lane next to each other."""
    return bytes_NG.reshape(len(bytes_NG) // OUTPUTS, 2, 8, tiles, -1).permute(0, 3, 2, 4, 1).contiguous()


def choose(tokens: int, output_tiles: int, processors: int) -> Launch:
    """The launch for a weight: the one whose fullest multiprocessor has the least to do."""
    token_tiles = next((one.token_tiles for one in LAUNCHES if tokens <= 8 * one.token_tiles), LAUNCHES[-1].token_tiles)
    candidates = [one for one in LAUNCHES if one.token_tiles == token_tiles]

    def most_programs(launch: Launch) -> int:
        return -(-output_tiles // launch.output_tiles // processors)

    def work(launch: Launch) -> float:
        return most_programs(launch) * (launch.output_tiles if launch.output_tiles > 1 else _SINGLE_TILE)

    fitting = [
        one
        for one in candidates
        if output_tiles % one.output_tiles == 0 and (one.warps < _WHOLE or most_programs(one) == 1)
    ]
    return min(fitting or [candidates[-1].of(output_tiles)], key=work)


@lru_cache
def launch_on(device: int, tokens: int, output_tiles: int) -> Launch:
    """``choose`` for a device."""
    return choose(tokens, output_tiles, torch.cuda.get_device_properties(device).multi_processor_count)


@lru_cache
def compiled(device: int, name: str, group: int, config: Launch) -> Any:
    """A kernel on a device, compiled at the first call. Raises CapacityError: it cannot be compiled or loaded."""
    major, minor = torch.cuda.get_device_capability(device)
    shared_bytes = config.shared_bytes(group) if name == "packed_product" else 0
    return nvrtc.load(machine_code(f"sm_{major}{minor}", group, config), name, device, shared_bytes)


@lru_cache
def compile_all(device: int, group: int, output_tiles: int) -> None:
    """Both kernels for weights of so many tiles of outputs and any number of tokens, so that no step has to.

    Raises:
        CapacityError: as ``compiled``.
    """
    for tokens in {8 * one.token_tiles for one in LAUNCHES}:
        compiled(device, "packed_product", group, launch_on(device, tokens, output_tiles))
    compiled(device, "packed_expansion", group, EXPANSION)


@lru_cache
def machine_code(architecture: str, group: int, config: Launch) -> bytes:
    """Both kernels. Raises CapacityError: they cannot be compiled."""
    constants = {name.upper(): value for name, value in config._asdict().items()}
    return nvrtc.machine_code(
        nvrtc.source_of(__file__), "packed_product.cu", architecture, {"GROUP": group, **constants}
    )
