"""How quantized linears are laid out in files: the tensors of each, and how they are read into one form.

A layout belongs to one maker and one number format. What it reads is an ``Fp8Weight`` or a ``Packed4``, which say
nothing of the maker. Letters: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from megatoken.engine.tensor_files import FETCH, StoredTensor, check_finite
from megatoken.errors import CheckpointError

if TYPE_CHECKING:  # looking at a checkpoint needs no PyTorch
    import torch
    from torch import Tensor

    from megatoken.engine.schemes.fp8_weight import Fp8Weight
    from megatoken.engine.schemes.packed4 import Packed4

SUPPORTED = (
    "supported are bf16, fp16 and fp32; fp8 of ModelOpt and compressed-tensors with a scale for each tensor or row; "
    "NVFP4, MXFP4 and INT4 of both; AWQ and GPTQ with 4 bits; take such an edition of the model"
)
PLAIN = ("BF16", "F16", "F32")
NVFP4_BLOCK, MXFP4_BLOCK = 16, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of eight in the order in which AWQ packs them, lowest bits first."""
_PRE_SCALE = "{}.pre_quant_scale"  # of a module: factors of its input
LARGEST_CODE, LARGEST_BLOCK_SCALE = 6.0, 448.0  # of e2m1, and of its e4m3 scales

Tensors = Mapping[str, StoredTensor]
Shape = tuple[int, int]


class Groups(NamedTuple):
    """How many neighbouring inputs share a scale, and whether they also have a zero."""

    columns: int
    zeros: bool
    kind: str = "int4"  # of the codes, as ``Packed4.kind``


def stacked_with(name: str, *stacks: tuple[str, ...]) -> list[str]:
    """The weights of the linear that ``name`` becomes a part of; alone, or one of projections such as ``q, k, v``."""
    module, _, projection = name.removesuffix("_proj.weight").rpartition(".")
    own = next((stack for stack in stacks if projection in stack), None)
    return [name] if own is None else [f"{module}.{one}_proj.weight" for one in own]


@dataclass(frozen=True, slots=True)
class Expected:
    """The shapes and dtypes of a tensor that ``source`` allows."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = PLAIN
    source: str = "config.json"
    if_other_dtype: str = SUPPORTED


class Layout(Protocol):
    """One linear's tensors. ``module`` is the linear's name in the files, without ``.weight``."""

    def expected(self, module: str, shape: Shape, present: Container[str], source: Path) -> dict[str, Expected]:
        """Its tensors, by name, the optional ones only if ``present``; raises CheckpointError if no such can be."""

    def scales(self, module: str, present: Container[str]) -> list[str]:
        """Its tensors whose values must be positive, those of blocks left out: none, unless a layout has others."""
        return []

    def read(self, module: str, shape: Shape, tensors: Tensors, device: torch.device | None) -> Fp8Weight | Packed4:
        """The weight [N, K]; raises CheckpointError if what is stored cannot be.

        What needs no other order is read straight to ``device``, the rest stays on the CPU.
        """

    def groups(self, module: str, shape: Shape, tensors: Tensors) -> Groups | None:
        """Of a ``Packed4`` without ``group_K`` and ``pre_scale_K``; None for any other weight. Reads no codes."""
        return None


@dataclass(frozen=True, slots=True)
class Fp8Layout(Layout):
    """e4m3 values, with ``X.weight_scale`` and, if inputs were measured, ``X.input_scale``."""

    row_scales: bool  # each row of a weight has its own scale; otherwise each weight has one
    input_scales: bool  # each linear has a scale for its input

    def expected(self, module: str, shape: Shape, present: Container[str], source: Path) -> dict[str, Expected]:
        """Values and scales."""
        rows, columns = shape
        one = Expected(((), (1,)), source=source.name)
        by_row = Expected(((rows,), (rows, 1)), source=source.name)
        expected = {
            f"{module}.weight": _declared(source, "e4m3", (rows, columns), "F8_E4M3"),
            f"{module}.weight_scale": by_row if self.row_scales else one,
        }
        return expected | ({f"{module}.input_scale": one} if self.input_scales else {})

    def scales(self, module: str, present: Container[str]) -> list[str]:
        """All."""
        return [f"{module}.weight_scale", *([f"{module}.input_scale"] if self.input_scales else ())]

    def read(self, module: str, shape: Shape, tensors: Tensors, device: torch.device | None) -> Fp8Weight:
        """As stored."""
        import torch

        from megatoken.engine.schemes.fp8_weight import Fp8Weight

        name = f"{module}.weight"
        values_ND = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
        for start, chunk in tensors[name].chunks(device):
            if (chunk.view(torch.uint8) & 0x7F).amax() == 0x7F:
                raise CheckpointError(f"{tensors[name].path}: tensor {name!r} holds NaN; {FETCH}")
            values_ND[start : start + len(chunk)] = chunk
        input_scale = read_scale(f"{module}.input_scale", tensors).item() if self.input_scales else None
        return Fp8Weight(values_ND, read_scale(f"{module}.weight_scale", tensors), input_scale)


@dataclass(frozen=True, slots=True)
class Fp4Layout(Layout):
    """e2m1 codes, two to a byte, and a scale for each block of inputs: NVFP4 (e4m3, a second scale) or MXFP4 (e8m0)."""

    block: int  # inputs that share a scale
    codes: str = "weight"  # name of the codes after the module's
    second: str | None = None  # name of the second scale; None without one
    input_scale: str | None = None  # name of the input's scale; None without one
    divides: bool = False  # the second scale, and the input's, divide
    input_range: float = LARGEST_CODE * LARGEST_BLOCK_SCALE  # largest magnitude of a scaled input

    def expected(self, module: str, shape: Shape, present: Container[str], source: Path) -> dict[str, Expected]:
        """Codes, scales and second scale; a measured input and factors of the input are optional."""
        rows, columns = shape
        _check_groups(module, columns, self.block, source)
        one = Expected(((), (1,)), source=source.name)
        dtypes = ("U8", "F8_E8M0") if self.second is None else ("F8_E4M3",)
        expected = {
            f"{module}.{self.codes}": _declared(source, "4-bit codes", (rows, columns // 2), "U8"),
            f"{module}.weight_scale": _declared(source, "scales of blocks", (rows, columns // self.block), *dtypes),
        }
        if self.second is not None:
            expected[f"{module}.{self.second}"] = one
        if self.input_scale is not None and (name := f"{module}.{self.input_scale}") in present:
            expected[name] = one
        return expected | _pre_scale_expected(module, columns, present, source)

    def scales(self, module: str, present: Container[str]) -> list[str]:
        """The second scale and the input's."""
        names = [f"{module}.{name}" for name in (self.second, self.input_scale) if name is not None]
        return [name for name in names if name in present]

    def read(self, module: str, shape: Shape, tensors: Tensors, device: torch.device | None) -> Packed4:
        """As stored."""
        import torch

        from megatoken.engine.schemes.packed4 import Packed4

        scale_NG = tensors[f"{module}.weight_scale"].whole()
        if scale_NG.dtype == torch.uint8:
            scale_NG = scale_NG.view(torch.float8_e8m0fnu)
        check_finite(f"{module}.weight_scale", tensors[f"{module}.weight_scale"].path, scale_NG)
        second_N1 = largest_input = None
        if self.second is not None:
            second_N1 = read_scale(f"{module}.{self.second}", tensors).double()
            second_N1 = (second_N1.reciprocal() if self.divides else second_N1).expand(shape[0], 1)
        if self.input_scale is not None and (name := f"{module}.{self.input_scale}") in tensors:
            scale = read_scale(name, tensors).item()
            largest_input = self.input_range * (1 / scale if self.divides else scale)
        return Packed4(
            tensors[f"{module}.{self.codes}"].whole(device),
            shape[1],
            "e2m1",
            scale_NG,
            second_N1,
            pre_scale_K=_read_pre_scale(module, tensors),
            largest_input=largest_input,
        )

    def groups(self, module: str, shape: Shape, tensors: Tensors) -> Groups | None:
        """Blocks."""
        return None if _PRE_SCALE.format(module) in tensors else Groups(self.block, zeros=False, kind="e2m1")


@dataclass(frozen=True, slots=True)
class ModelOptInt4Layout(Layout):
    """ModelOpt's INT4: bytes [N / 2, K] with rows 2j (low bits) and 2j + 1 as signed numbers, scales [N, G]."""

    group: int

    def expected(self, module: str, shape: Shape, present: Container[str], source: Path) -> dict[str, Expected]:
        """Codes and scales; factors of the input are optional."""
        rows, columns = shape
        _check_groups(module, columns, self.group, source)
        if rows % 2:
            raise CheckpointError(f"{source}: {module}, {rows} rows: ModelOpt packs two to a byte; {SUPPORTED}")
        expected = {
            f"{module}.weight": _declared(source, "4-bit codes", (rows // 2, columns), "U8"),
            f"{module}.weight_scale": Expected(((rows, columns // self.group),), source=source.name),
        }
        return expected | _pre_scale_expected(module, columns, present, source)

    def read(self, module: str, shape: Shape, tensors: Tensors, device: torch.device | None) -> Packed4:
        """Signed numbers become codes around 8."""
        import torch

        from megatoken.engine.schemes.packed4 import Packed4, pack

        stored = tensors[f"{module}.weight"].whole()
        codes_NK = torch.stack((stored & 15, stored >> 4), dim=1).view(shape) ^ 8
        scale_NG = _read_finite(f"{module}.weight_scale", tensors)
        return Packed4(pack(codes_NK), shape[1], "int4", scale_NG, pre_scale_K=_read_pre_scale(module, tensors))

    def groups(self, module: str, shape: Shape, tensors: Tensors) -> Groups | None:
        """As declared."""
        return None if _PRE_SCALE.format(module) in tensors else Groups(self.group, zeros=False)


@dataclass(frozen=True, slots=True)
class PackedInt4Layout(Layout):
    """compressed-tensors' INT4: words [N, K / 8, rounded up] with the lowest column lowest, scales [N, G].

    ``group`` None: a row is one group. Asymmetric zeros are packed along the rows.
    """

    group: int | None
    symmetric: bool

    def expected(self, module: str, shape: Shape, present: Container[str], source: Path) -> dict[str, Expected]:
        """Codes, scales, shape and zeros; the order of activations is optional."""
        rows, columns = shape
        groups = _check_groups(module, columns, self.group or columns, source)
        expected = {
            f"{module}.weight_packed": _declared(source, "4-bit codes", (rows, -(-columns // 8)), "I32"),
            f"{module}.weight_scale": Expected(((rows, groups),), source=source.name),
            f"{module}.weight_shape": _declared(source, "a shape", (2,), "I64", "I32"),
        }
        if not self.symmetric:
            expected[f"{module}.weight_zero_point"] = _declared(source, "zeros", (-(-rows // 8), groups), "I32")
        if (name := f"{module}.weight_g_idx") in present:
            expected[name] = _declared(source, "groups of columns", (columns,), "I32", "I64")
        return expected

    def read(self, module: str, shape: Shape, tensors: Tensors, device: torch.device | None) -> Packed4:
        """As stored; zeros are unpacked."""
        import torch

        from megatoken.engine.schemes.packed4 import Packed4

        stored_shape = tensors[f"{module}.weight_shape"]
        if (found := stored_shape.whole().tolist()) != list(shape):
            raise CheckpointError(
                f"{stored_shape.path}: tensor '{module}.weight_shape' holds {found}, config.json implies "
                f"{list(shape)}; fix config.json or {FETCH}"
            )
        words = tensors[f"{module}.weight_packed"].whole()
        zero_NG = None
        if not self.symmetric:
            zero_NG = _nibbles(tensors[f"{module}.weight_zero_point"].whole(), 0)[: shape[0]]
        scale_NG = _read_finite(f"{module}.weight_scale", tensors)
        group = self.group or shape[1]
        return Packed4(
            words.view(torch.uint8)[:, : -(-shape[1] // 2)].contiguous(),
            shape[1],
            "int4",
            scale_NG,
            zero_NG=zero_NG,
            group_K=_read_groups(f"{module}.weight_g_idx", tensors, shape[1], group),
        )

    def groups(self, module: str, shape: Shape, tensors: Tensors) -> Groups | None:
        """As declared, unless the activations have an order of their own."""
        group = self.group or shape[1]
        ordered = _read_groups(f"{module}.weight_g_idx", tensors, shape[1], group) is None
        return Groups(group, zeros=not self.symmetric) if ordered else None


@dataclass(frozen=True, slots=True)
class ColumnInt4Layout(Layout):
    """AWQ's and GPTQ's INT4, stored transposed: words of codes, words of zeros, fp16 scales [G, N].

    AWQ packs eight outputs into a word, in ``AWQ_ORDER``; GPTQ packs eight inputs, and may name each input's group.
    """

    maker: Literal["awq", "gptq", "gptq_v2"]  # "awq", "gptq" (which stores zeros less 1) or "gptq_v2"
    group: int | None  # inputs that share a scale; None for all

    def expected(self, module: str, shape: Shape, present: Container[str], source: Path) -> dict[str, Expected]:
        """Codes, zeros and scales; GPTQ's groups are optional."""
        rows, columns = shape
        groups = -(-columns // (self.group or columns))
        packed = rows if self.maker == "awq" else columns
        for side in {rows, packed}:
            if side % 8:
                raise CheckpointError(f"{source}: {module}, {rows} x {columns}: a word packs eight; {SUPPORTED}")
        codes = (columns, rows // 8) if self.maker == "awq" else (columns // 8, rows)
        expected = {
            f"{module}.qweight": _declared(source, "4-bit codes", codes, "I32"),
            f"{module}.qzeros": _declared(source, "zeros", (groups, rows // 8), "I32"),
            f"{module}.scales": Expected(((groups, rows),), source=source.name),
        }
        if self.maker != "awq" and (name := f"{module}.g_idx") in present:
            expected[name] = _declared(source, "groups of inputs", (columns,), "I32", "I64")
        return expected

    def read(self, module: str, shape: Shape, tensors: Tensors, device: torch.device | None) -> Packed4:
        """Transposed into rows of outputs."""
        from megatoken.engine.schemes.packed4 import Packed4, pack

        order = AWQ_ORDER if self.maker == "awq" else tuple(range(8))
        codes_KN = _nibbles(tensors[f"{module}.qweight"].whole(), 1 if self.maker == "awq" else 0, order)
        zero_GN = _nibbles(tensors[f"{module}.qzeros"].whole(), 1, order)
        if self.maker == "gptq":
            if (zero_GN == 15).any():
                raise CheckpointError(
                    f"{tensors[f'{module}.qzeros'].path}: tensor '{module}.qzeros' holds 15, which stands for a zero "
                    "of 0 or of 16 in checkpoint_format gptq; convert the checkpoint to gptq_v2"
                )
            zero_GN = zero_GN + 1
        scale_NG = _read_finite(f"{module}.scales", tensors).T.contiguous()
        group = self.group or shape[1]
        return Packed4(
            pack(codes_KN.T),
            shape[1],
            "int4",
            scale_NG,
            zero_NG=zero_GN.T.contiguous(),
            group_K=_read_groups(f"{module}.g_idx", tensors, shape[1], group),
        )

    def groups(self, module: str, shape: Shape, tensors: Tensors) -> Groups | None:
        """As declared, unless GPTQ names others."""
        group = self.group or shape[1]
        ordered = _read_groups(f"{module}.g_idx", tensors, shape[1], group) is None
        return Groups(group, zeros=True) if ordered else None


def read_scale(name: str, tensors: Tensors) -> Tensor:
    """fp32, one column, positive; CheckpointError otherwise."""
    import torch

    from megatoken.engine.schemes.fp8_weight import E4M3_MAX

    scale_N1 = tensors[name].whole().float().view(-1, 1)
    # Products with 448 and quotients of 1 must not overflow either.
    good_N1 = (scale_N1 >= torch.finfo(torch.float32).tiny) & (scale_N1 * E4M3_MAX).isfinite()
    if not good_N1.all():
        value = scale_N1[~good_N1][0].item()
        raise CheckpointError(
            f"{tensors[name].path}: tensor {name!r} holds {value}; expected a positive scale; {FETCH}"
        )
    return scale_N1


def _declared(source: Path, what: str, shape: tuple[int, ...], *dtypes: str) -> Expected:
    other = f"{source.name} says {what}; name a linear that is not quantized in its list of exceptions; {SUPPORTED}"
    return Expected((shape,), dtypes, source.name, other)


def _check_groups(module: str, columns: int, group: int, source: Path) -> int:
    """The number of groups."""
    if columns % group:
        raise CheckpointError(
            f"{source}: {module}, {columns} columns: no multiple of its groups of {group}; {SUPPORTED}"
        )
    return columns // group


def _pre_scale_expected(module: str, columns: int, present: Container[str], source: Path) -> dict[str, Expected]:
    name = _PRE_SCALE.format(module)
    return {name: Expected(((columns,),), source=source.name)} if name in present else {}


def _read_pre_scale(module: str, tensors: Tensors) -> Tensor | None:
    name = _PRE_SCALE.format(module)
    return _read_finite(name, tensors).float() if name in tensors else None


def _read_finite(name: str, tensors: Tensors) -> Tensor:
    values = tensors[name].whole()
    check_finite(name, tensors[name].path, values)
    return values


def _read_groups(name: str, tensors: Tensors, columns: int, group: int) -> Tensor | None:
    """The group of each column; None where they are equally many neighbours."""
    import torch

    groups = -(-columns // group)
    neighbours_K = torch.arange(columns) // group
    group_K = tensors[name].whole().long() if name in tensors else neighbours_K
    smallest, largest = (side.item() for side in group_K.aminmax())
    if smallest < 0 or largest >= groups:
        raise CheckpointError(
            f"{tensors[name].path}: tensor {name!r} holds {smallest} to {largest}, of {groups} groups; {FETCH}"
        )
    return None if columns == groups * group and torch.equal(group_K, neighbours_K) else group_K


def _nibbles(words: Tensor, side: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight uint8 for each int32 along ``side``; the i-th lowest four bits are the ``order[i]``-th of the eight."""
    import torch

    nibbles = [words >> 4 * order.index(place) & 15 for place in range(8)]
    return torch.stack(nibbles, dim=side + 1).flatten(side, side + 1).to(torch.uint8)
