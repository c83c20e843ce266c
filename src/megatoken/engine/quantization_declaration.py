"""What a checkpoint's files say of its quantized linears: each one's layout, and the scales of the KV cache.

``config.json`` has the object ``quantization_config`` of the program that made the checkpoint; ModelOpt also writes
``hf_quant_config.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from megatoken.engine.json_keys import Keys
from megatoken.engine.quantized_layouts import (
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    SUPPORTED,
    ColumnInt4Layout,
    Fp4Layout,
    Fp8Layout,
    Layout,
    ModelOptInt4Layout,
    PackedInt4Layout,
)
from megatoken.engine.tensor_files import FETCH, read_json
from megatoken.errors import CheckpointError

_CLASS = "Linear"  # compressed-tensors' target that means every linear
_MODELOPT_CACHE = ("k_proj.k_scale", "v_proj.v_scale")
_COMPRESSED_TENSORS_CACHE = ("k_scale", "v_scale")
_MODELOPT_NVFP4 = Fp4Layout(NVFP4_BLOCK, second="weight_scale_2", input_scale="input_scale")
_MODELOPT_MXFP4 = Fp4Layout(MXFP4_BLOCK)
_MODELOPT: dict[str, Layout] = {
    "FP8": Fp8Layout(row_scales=False, input_scales=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Layout(row_scales=True, input_scales=False),
    **dict.fromkeys(("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4"), _MODELOPT_NVFP4),
    "W4A8_NVFP4_FP8": Fp4Layout(NVFP4_BLOCK, second="weight_scale_2", input_scale="input_scale", input_range=448.0),
    **dict.fromkeys(("MXFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8"), _MODELOPT_MXFP4),
}
_MODELOPT_INT4 = ("W4A16_AWQ", "INT4_AWQ")
_COMPRESSED_NVFP4 = Fp4Layout(
    NVFP4_BLOCK, "weight_packed", second="weight_global_scale", input_scale="input_global_scale", divides=True
)
_COMPRESSED_MXFP4 = Fp4Layout(MXFP4_BLOCK, "weight_packed")
_LONGEST_PATTERN, _MOST_REPETITIONS = 500, 4


@dataclass(frozen=True, slots=True)
class Declaration:
    """What one file says."""

    source: Path  # the file
    layouts: Mapping[str, Layout]  # of the quantized linears of the layers; no others are
    # names of the scales of keys and of values in a layer's attention; None for an unscaled cache
    cache_scales: tuple[str, str] | None = None


def read_declaration(directory: Path, modules: Iterable[str]) -> Declaration | None:
    """What the files say of the linears ``modules``; None if no file mentions quantization.

    Raises:
        CheckpointError: a format is not supported, or the files contradict each other.
    """
    modules = list(modules)
    found = []
    path, other = directory / "config.json", directory / "hf_quant_config.json"
    keys = Keys(read_json(path), path)
    if keys.get("quantization_config") is not None:
        section = keys.section("quantization_config")
        if section.get("quant_method") == "mxfp4":  # of experts alone, see stacked_experts
            return None
        # Some versions of ModelOpt list the linears of mixed checkpoints in their own file only.
        if (
            section.get("quant_algo") != "MIXED_PRECISION"
            or not section.absent("quantized_layers")
            or not other.is_file()
        ):
            found.append(_of_config(section, path, modules))
    if other.is_file():
        keys = Keys(read_json(other), other)
        if keys.get("quantization") is None:
            raise CheckpointError(f"{other}: the object quantization, which describes the format, is missing; {FETCH}")
        found.append(
            _of_modelopt(keys.section("quantization"), other, modules, "exclude_modules", "kv_cache_quant_algo")
        )
    if len(found) > 1 and found[0].layouts != found[1].layouts:
        raise CheckpointError(f"{other}: contradicts quantization_config in config.json; remove the one that is wrong")
    # Some versions of ModelOpt mention the cache in one of their files only.
    return next((one for one in found if one.cache_scales), found[0]) if found else None


def _of_config(keys: Keys, path: Path, modules: list[str]) -> Declaration:
    match keys.get("quant_method"):
        case "modelopt":
            return _of_modelopt(keys, path, modules, "ignore", "kv_cache_scheme")
        case "compressed-tensors":
            return _of_compressed_tensors(keys, path, modules)
        case "awq":
            return _of_awq(keys, path, modules)
        case "gptq":
            return _of_gptq(keys, path, modules)
    raise keys.refuse("quant_method", SUPPORTED)


# ModelOpt


def _of_modelopt(keys: Keys, path: Path, modules: list[str], exceptions: str, cache_key: str) -> Declaration:
    cache = _MODELOPT_CACHE if _has_cache_scales(keys, cache_key) else None
    if keys.get("quant_algo") == "MIXED_PRECISION":
        layers = keys.section("quantized_layers")
        named = [name for name in modules if not layers.absent(name)]
        if not named:
            raise keys.refuse("quantized_layers", f"expected the linears that are quantized, by name; {SUPPORTED}")
        return Declaration(path, {name: _modelopt_layout(layers.section(name)) for name in named}, cache)
    layout = _modelopt_layout(keys)
    excluded = _texts(keys, exceptions)
    quantized = [name for name in modules if not any(_modelopt_match(name, pattern) for pattern in excluded)]
    return Declaration(path, dict.fromkeys(quantized, layout), cache)


def _modelopt_layout(keys: Keys) -> Layout:
    algorithm = keys.get("quant_algo")
    if isinstance(algorithm, str) and algorithm in _MODELOPT_INT4:
        return ModelOptInt4Layout(_modelopt_group(keys) or 128)
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise keys.refuse("quant_algo", SUPPORTED)
    layout = _MODELOPT[algorithm]
    if isinstance(layout, Fp4Layout) and _modelopt_group(keys) not in (None, layout.block):
        raise keys.refuse("group_size", f"{algorithm} has groups of {layout.block}; {SUPPORTED}")
    return layout


def _modelopt_group(keys: Keys) -> int | None:
    if keys.get("group_size") is not None:
        return keys.integer("group_size")
    groups = keys.section("config_groups")
    weights = groups.section("group_0").section("weights")
    return None if weights.get("group_size") is None else weights.integer("group_size")


def _modelopt_match(name: str, pattern: str) -> bool:
    """A name, a name with wildcards, or the name of a module that holds it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


# compressed-tensors


def _of_compressed_tensors(keys: Keys, path: Path, modules: list[str]) -> Declaration:
    sparsity = keys.section("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise sparsity.refuse("format", f"sparse weights are not supported; {SUPPORTED}")
    if keys.get("transform_config") not in (None, {}, {"config_groups": {}}):
        raise keys.refuse("transform_config", f"transforms are not supported; {SUPPORTED}")
    groups = keys.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(name.isprintable() for name in groups):
        raise keys.refuse("config_groups", f"expected groups of linears; {SUPPORTED}")
    sections = [keys.section("config_groups").section(name) for name in groups]
    layouts = [_compressed_layout(group, keys) for group in sections]
    targets = [[_Target(group, "targets", target) for target in _texts(group, "targets")] for group in sections]
    ignored = [_Target(keys, "ignore", pattern) for pattern in _texts(keys, "ignore")]
    chosen = {}
    for name in modules:
        ranks = [max((target.rank(name) for target in of_group), default=0) for of_group in targets]
        if max(ranks) and not any(target.rank(name) for target in ignored):
            chosen[name] = layouts[ranks.index(max(ranks))]
    cache = _COMPRESSED_TENSORS_CACHE if _has_cache_scales(keys, "kv_cache_scheme") else None
    return Declaration(path, chosen, cache)


class _Target:
    """A name, the class of all linears, or ``re:`` with a regular expression that a name must begin with."""

    def __init__(self, keys: Keys, key: str, text: str) -> None:
        self._text = text
        self._expression: re.Pattern[str] | None = None
        if text.startswith("re:"):
            pattern = text.removeprefix("re:")
            # A repeated group can take exponential time, and each further repetition multiplies it.
            if (
                len(pattern) > _LONGEST_PATTERN
                or re.search(r"\)[*+{]", pattern)
                or len(re.findall(r"(?<!\\)[*+{]", pattern)) > _MOST_REPETITIONS
            ):
                raise keys.refuse(key, f"expected patterns of at most {_MOST_REPETITIONS} repetitions, not of groups")
            try:
                self._expression = re.compile(pattern)
            except re.error as error:
                raise keys.refuse(key, f"expected regular expressions ({error})") from None

    def rank(self, name: str) -> int:
        """3 for this name, 2 for a pattern that fits it, 1 for every linear, 0 for another."""
        if self._expression is not None:
            return 2 if self._expression.match(name) else 0
        return 3 if name == self._text else int(self._text == _CLASS)


def _compressed_layout(group: Keys, keys: Keys) -> Layout:
    form = group.get("format") or keys.get("format")
    weights = group.section("weights")
    if group.get("output_activations") is not None:
        raise group.refuse("output_activations", f"outputs are not quantized; {SUPPORTED}")
    match form:
        case "float-quantized":
            row_scales = _static_strategy(weights, "tensor", "channel") == "channel"
            return Fp8Layout(row_scales, _has_input_scales(group))
        case "nvfp4-pack-quantized":
            _check_four_bits(weights, NVFP4_BLOCK, "tensor_group")
            return _COMPRESSED_NVFP4
        case "mxfp4-pack-quantized":
            _check_four_bits(weights, MXFP4_BLOCK, "group")
            return _COMPRESSED_MXFP4
        case "pack-quantized":
            return _packed_int4(weights)
    raise (group if group.get("format") else keys).refuse("format", SUPPORTED)


def _check_four_bits(weights: Keys, block: int, strategy: str) -> None:
    _expect(weights, num_bits=(4, None), type=("float", "int"), symmetric=(True, True))
    if weights.get("group_size") != block:
        raise weights.refuse("group_size", f"expected {block}; {SUPPORTED}")
    _expect(weights, strategy=(strategy, strategy))


def _expect(keys: Keys, **expected: tuple[object, object]) -> None:
    """Refuse another value of a key than the first of its pair; the second is what an absent key means."""
    for key, (wanted, default) in expected.items():
        value = keys.get(key, default)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):
            raise keys.refuse(key, SUPPORTED)


def _packed_int4(weights: Keys) -> PackedInt4Layout:
    _expect(weights, num_bits=(4, None), type=("int", "int"))
    if weights.boolean("dynamic"):
        raise weights.refuse("dynamic", f"expected scales in the files; {SUPPORTED}")
    symmetric = weights.get("symmetric")
    if symmetric is not None and not isinstance(symmetric, bool):
        raise weights.refuse("symmetric", "expected true or false")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if size in (None, -1) else "group")
    match strategy:
        case "channel":
            return PackedInt4Layout(None, symmetric is not False)
        case "group":
            return PackedInt4Layout(weights.integer("group_size"), symmetric is not False)
    raise weights.refuse("strategy", SUPPORTED)


def _has_input_scales(group: Keys) -> bool:
    if group.get("input_activations") is None:  # weights alone were quantized
        return False
    inputs = group.section("input_activations")
    static = not inputs.boolean("dynamic")
    _e4m3_strategy(inputs, *(("tensor",) if static else ("tensor", "token")))
    return static


def _has_cache_scales(keys: Keys, key: str) -> bool:
    scheme = keys.get(key)
    if isinstance(scheme, dict):
        _static_strategy(keys.section(key), "tensor")
    elif scheme not in (None, "FP8"):
        raise keys.refuse(key, f"keys and values can be e4m3 with one scale for each layer; {SUPPORTED}")
    return scheme is not None


def _static_strategy(arguments: Keys, *supported: str) -> str:
    if arguments.boolean("dynamic"):
        raise arguments.refuse("dynamic", f"expected scales in the files; {SUPPORTED}")
    return _e4m3_strategy(arguments, *supported)


def _e4m3_strategy(arguments: Keys, *supported: str) -> str:
    """What shares one scale, from compressed-tensors' arguments of a quantization, which must be to e4m3."""
    _expect(arguments, num_bits=(8, 8), type=("float", None), symmetric=(True, True))
    strategy = arguments.get("strategy")
    if strategy is None and arguments.get("group_size") is None:
        strategy = "tensor"
    if not isinstance(strategy, str) or strategy not in supported:
        raise arguments.refuse("strategy", SUPPORTED)
    return strategy


# AWQ and GPTQ


def _of_awq(keys: Keys, path: Path, modules: list[str]) -> Declaration:
    if keys.get("bits", keys.get("w_bit")) != 4:
        raise keys.refuse("bits", f"expected 4; {SUPPORTED}")
    version = keys.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise keys.refuse("version", f"only the layout gemm is read; {SUPPORTED}")
    if keys.get("zero_point", True) is not True:
        raise keys.refuse("zero_point", f"expected true; {SUPPORTED}")
    layout = ColumnInt4Layout("awq", _group_size(keys, "group_size" if keys.absent("q_group_size") else "q_group_size"))
    excluded = _texts(keys, "modules_to_not_convert")
    return Declaration(path, {name: layout for name in modules if not any(part in name for part in excluded)})


def _of_gptq(keys: Keys, path: Path, modules: list[str]) -> Declaration:
    if keys.get("bits") != 4:
        raise keys.refuse("bits", f"expected 4; {SUPPORTED}")
    for key in ("dynamic", "lm_head"):
        if keys.get(key) not in (None, {}, False):
            raise keys.refuse(key, f"expected one form for all linears of the layers; {SUPPORTED}")
    group = _group_size(keys, "group_size")
    maker = keys.get("checkpoint_format", "gptq")
    if maker != "gptq" and maker != "gptq_v2":
        raise keys.refuse("checkpoint_format", f"expected gptq or gptq_v2; {SUPPORTED}")
    layout = ColumnInt4Layout(maker, group)
    blocks = keys.get("modules_in_block_to_quantize")
    if blocks is None:
        return Declaration(path, dict.fromkeys(modules, layout))
    if not isinstance(blocks, list):
        raise keys.refuse("modules_in_block_to_quantize", "expected a list of names")
    named = [name for block in blocks for name in (block if isinstance(block, list) else [block])]
    return Declaration(path, {name: layout for name in modules if any(name.endswith(f".{part}") for part in named)})


def _group_size(keys: Keys, key: str) -> int | None:
    return None if keys.get(key) == -1 else keys.integer(key, 128)


def _texts(keys: Keys, key: str) -> list[str]:
    """A list of texts; empty if absent."""
    values = keys.get(key)
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise keys.refuse(key, "expected a list of names")
    return values
