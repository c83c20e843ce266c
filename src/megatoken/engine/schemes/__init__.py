"""Number formats of the layers' linears: ``find_scheme`` looks one up by its precision and option.

A format is a module here with its ``LinearScheme``, and the classes of its weights and of its linears on a GPU.
"""

from __future__ import annotations

from megatoken.engine.config import EngineConfig
from megatoken.engine.schemes.fp4 import FP4
from megatoken.engine.schemes.fp8 import FP8, FP8_PACKED, FP8_ROWS
from megatoken.engine.schemes.linear_scheme import LinearScheme
from megatoken.engine.schemes.plain import BF16, FP32
from megatoken.errors import ConfigError

__all__ = ["BF16", "FP8", "FP8_PACKED", "SCHEMES", "LinearScheme", "find_scheme", "has_bf16_activations", "scheme_of"]

SCHEMES: tuple[LinearScheme, ...] = (FP32, BF16, FP8, FP8_ROWS, FP8_PACKED, FP4)


def find_scheme(precision: str, fp8_scales: str | None = None, *, packed: bool = False) -> LinearScheme:
    """The scheme of a precision; ``fp8_scales`` picks among several, None the first. ``packed``: one that stays so.

    Raises:
        ConfigError: there is no such precision, or it has no such scales or packed weights.
    """
    schemes = [scheme for scheme in SCHEMES if scheme.precision == precision]
    if not schemes:
        raise unknown_precision(precision)
    if packed:
        schemes = [scheme for scheme in schemes if scheme.stays_packed and fp8_scales != "row"]
        if not schemes:
            raise ConfigError(
                f"packed_weights in precision {precision}: on a GPU four-bit weights stay packed in precision fp8 with "
                "fp8_scales tensor alone; take --precision fp8, or leave packed_weights on null"
            )
    for scheme in schemes:
        if fp8_scales in (None, scheme.fp8_scales or "tensor"):
            return scheme
    raise ConfigError(f"fp8_scales is {fp8_scales} in precision {precision}; take tensor, or row in precision fp8")


def scheme_of(config: EngineConfig) -> LinearScheme:
    """The scheme that an engine is asked for; weights whose ``packed_weights`` is undecided do not stay packed.

    Raises:
        ConfigError: there is none.
    """
    return find_scheme(config.precision, config.fp8_scales, packed=bool(config.packed_weights))


def has_bf16_activations(precision: str | None) -> bool:
    """Whether a precision multiplies values in bf16, which some processors must widen first."""
    return any(scheme.precision == precision and scheme.activation_type == BF16.activation_type for scheme in SCHEMES)


def unknown_precision(precision: str, place: str = "precision") -> ConfigError:
    """The error to raise where no device here can compute in ``precision``, which was set at ``place``."""
    *others, last = dict.fromkeys(repr(scheme.precision) for scheme in SCHEMES if not scheme.simulated_only)
    simulated = any(scheme.precision == precision for scheme in SCHEMES)
    why = f"; {precision} is supported on simulated GPUs only" if simulated else f", got {precision!r}"
    return ConfigError(f"{place}: must be {', '.join(others)} or {last}{why}")
