"""Arithmetic of capacity: prices of tokens, interactions per second, requests in flight, users, planning values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatoken.errors import UsageError
from megatoken.planning.figures import State
from megatoken.planning.workloads import Profile
from megatoken.text import precise

LIKE_MIXES = 1.25


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of the whole system that one token takes when the system is full."""

    prefill_seconds_per_token: float
    decode_seconds_per_token: float

    def interaction_seconds(self, profile: Profile, prefix_cache_share: float | None = None) -> float:
        """Seconds of the whole system that one interaction takes."""
        read = profile.read_tokens(prefix_cache_share) * self.prefill_seconds_per_token
        return read + profile.written_tokens * self.decode_seconds_per_token

    def interactions_per_second(self, profile: Profile, prefix_cache_share: float | None = None) -> float:
        """The rate at which a full system finishes interactions of this kind alone."""
        return 1 / self.interaction_seconds(profile, prefix_cache_share)

    def scaled(self, factor: float) -> Prices:
        """Prices of a system ``factor`` times as fast."""
        return Prices(self.prefill_seconds_per_token / factor, self.decode_seconds_per_token / factor)


@dataclass(frozen=True, slots=True)
class Factor:
    """One step from a peak to a planning value."""

    name: str
    factor: float
    state: State
    source: str


@dataclass(frozen=True, slots=True)
class Step:
    """A factor and the rate after it."""

    name: str
    factor: float
    output_tokens_per_second: float
    state: State
    source: str


def document_interactions_per_second(tokens_per_second: float, tokens_per_interaction: float) -> float:
    """The source documents' formula: the benchmark's output rate over all tokens of an interaction."""
    return tokens_per_second / tokens_per_interaction


def to_tens(value: float) -> int:
    """As the source documents round: 1,693.8 is 1,690."""
    return round(value / 10) * 10


def prices_from_ratio(
    output_tokens_per_second: float, input_tokens_per_output_token: float, prefill_to_decode_cost: float
) -> Prices:
    """Prices from one measured rate, its mix of tokens, and what an input token costs relative to an output token.

    Per output token the system spends ``decode + input_tokens_per_output_token * prefill`` = 1 / rate.
    """
    decode = 1 / (output_tokens_per_second * (1 + input_tokens_per_output_token * prefill_to_decode_cost))
    return Prices(decode * prefill_to_decode_cost, decode)


def prices_from_two_rates(
    first_output_tokens_per_second: float,
    first_mix: float,
    second_output_tokens_per_second: float,
    second_mix: float,
) -> Prices:
    """Both prices from two rates of one system under different mixes (input tokens per output token).

    Raises:
        UsageError: the mixes are too alike to tell the prices apart, or no two positive prices give both rates.
    """
    low, high = sorted((first_mix, second_mix))
    if high <= low * LIKE_MIXES:
        raise UsageError(
            f"the two runs read {precise(first_mix)} and {precise(second_mix)} tokens per token written: too alike to"
            f" price reading and writing apart; make one of them read at least {LIKE_MIXES:g} times as much"
        )
    prefill = (1 / second_output_tokens_per_second - 1 / first_output_tokens_per_second) / (second_mix - first_mix)
    decode = 1 / first_output_tokens_per_second - first_mix * prefill
    if prefill <= 0 or decode <= 0:
        raise UsageError(
            "no positive price of reading and of writing a token explains both runs: they differ in more than their mix"
        )
    return Prices(prefill, decode)


def service_seconds(profile: Profile, ttft_seconds: float, tpot_seconds: float) -> float:
    """Seconds that one interaction is in flight: every turn from its arrival to its last token."""
    return profile.turns * (ttft_seconds + (profile.output_tokens - 1) * tpot_seconds)


def residence_seconds(profile: Profile, ttft_seconds: float, tpot_seconds: float) -> float:
    """Seconds that a user waits for one interaction: in flight, and tools between the turns."""
    return service_seconds(profile, ttft_seconds, tpot_seconds) + (profile.turns - 1) * profile.tool_seconds


def in_flight(interactions_per_second: float, seconds_in_flight: float) -> float:
    """Little's law: mean number in a system = arrivals per second x mean seconds in it."""
    return interactions_per_second * seconds_in_flight


def users(interactions_per_second: float, waiting_seconds: float, think_seconds: float) -> float:
    """People who make that many interactions per second, each waiting, then thinking, then asking again."""
    return interactions_per_second * (waiting_seconds + think_seconds)


def interactions_of_users(people: float, waiting_seconds: float, think_seconds: float) -> float:
    """The reverse of ``users``."""
    cycle = waiting_seconds + think_seconds
    if cycle <= 0:
        raise UsageError("users who neither wait nor think ask without end; give think_seconds in the profile")
    return people / cycle


def derate(peak_output_tokens_per_second: float, factors: Sequence[Factor]) -> tuple[Step, ...]:
    """The rate after each factor in turn."""
    products = [math.prod(factor.factor for factor in factors[: at + 1]) for at in range(len(factors))]
    return tuple(
        Step(factor.name, factor.factor, peak_output_tokens_per_second * product, factor.state, factor.source)
        for factor, product in zip(factors, products, strict=True)
    )
