"""Prices of tokens, Little's law, and the derating from a peak rate to a planning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.figures import Input, State, weakest
from megatoken.planning.schedule import schedule
from megatoken.planning.throughput import LIMITS, MIX, P99_OVER_MEAN, Throughput
from megatoken.planning.workloads import Profile
from megatoken.text import precise

LIKE_MIXES = 1.25


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of tokens: seconds of the whole system per token, when the system is full."""

    prefill_seconds_per_token: float
    decode_seconds_per_token: float

    def interaction_seconds(self, profile: Profile) -> float:
        """Seconds of the whole system that one interaction takes."""
        read = profile.read_tokens() * self.prefill_seconds_per_token
        return read + profile.written_tokens * self.decode_seconds_per_token

    def interactions_per_second(self, profile: Profile) -> float:
        """The rate at which a full system completes interactions of this kind only."""
        return 1 / self.interaction_seconds(profile)

    def scaled(self, factor: float) -> Prices:
        """Prices on a system that is ``factor`` times as fast."""
        return Prices(self.prefill_seconds_per_token / factor, self.decode_seconds_per_token / factor)


def prices_from_ratio(
    output_tokens_per_second: float, input_tokens_per_output_token: float, prefill_to_decode_cost: float
) -> Prices:
    """Prices from one rate, its input tokens per output token, and the price ratio of input to output tokens.

    Per output token the system spends ``decode + input_tokens_per_output_token * prefill`` = 1 / rate.
    """
    decode = 1 / (output_tokens_per_second * (1 + input_tokens_per_output_token * prefill_to_decode_cost))
    return Prices(decode * prefill_to_decode_cost, decode)


def prices_from_two_rates(
    first_output_tokens_per_second: float, first_mix: float, second_output_tokens_per_second: float, second_mix: float
) -> Prices:
    """Both prices from two rates of one system under different mixes (input tokens per output token).

    Raises:
        UsageError: the mixes are too similar, or no two positive prices give both rates.
    """
    low, high = sorted((first_mix, second_mix))
    if high <= low * LIKE_MIXES:
        raise UsageError(
            f"the two runs have {precise(first_mix)} and {precise(second_mix)} input tokens per output token, too"
            f" similar to price input and output separately; the ratios must differ by at least {LIKE_MIXES:g} times"
        )
    prefill = (1 / second_output_tokens_per_second - 1 / first_output_tokens_per_second) / (second_mix - first_mix)
    decode = 1 / first_output_tokens_per_second - first_mix * prefill
    if prefill <= 0 or decode <= 0:
        raise UsageError(
            "no positive prices of input and output tokens fit both runs; they differ in more than token lengths"
        )
    return Prices(prefill, decode)


def service_seconds(profile: Profile, ttft_seconds: float, tpot_seconds: float) -> float:
    """Seconds that one interaction is in flight: every turn from its arrival to its last token."""
    return profile.turns * (ttft_seconds + (profile.output_tokens - 1) * tpot_seconds)


def residence_seconds(profile: Profile, ttft_seconds: float, tpot_seconds: float) -> float:
    """Seconds that a user waits for one interaction: in flight, and for tools between the turns."""
    return service_seconds(profile, ttft_seconds, tpot_seconds) + (profile.turns - 1) * profile.tool_seconds


def interactions_of_users(people: float, pause_seconds: float) -> float:
    """Interactions per second of so many users, one in ``pause_seconds`` each. UsageError if they never pause."""
    if pause_seconds <= 0:
        raise UsageError("users who never pause have no finite rate; set think_seconds in the profile")
    return people / pause_seconds


RATIO = "prefill_to_decode_cost"
LATENCY = "server_to_offline_share"
CEILING = "utilisation_ceiling_share"
SCHEDULED = "schedule_share"


@dataclass(frozen=True, slots=True)
class Priced:
    """Prices at the peak rate, their formula and inputs, and the prices at the ends of the ratio's range."""

    prices: Prices
    range: tuple[Prices, ...]
    state: State
    formula: str
    inputs: tuple[Input, ...]


def price(throughput: Throughput, assumptions: Assumptions, second: Throughput | None = None) -> Priced:
    """Prices of an input token and an output token on the system of ``throughput``.

    They follow from the assumed ratio of the two, or from ``second``: the same system with another number of input
    tokens per output token.

    Raises:
        UsageError: the two rates cannot be those of one system.
    """
    rate, mix = throughput.output_tokens_per_second, throughput.input_tokens_per_output_token
    if second is not None:
        if throughput.accelerators and second.accelerators not in (None, throughput.accelerators):
            raise UsageError(
                f"the two runs used {throughput.accelerators} and {second.accelerators} accelerators; prices need two"
                " runs of one system"
            )
        prices = prices_from_two_rates(rate, mix, second.output_tokens_per_second, second.input_tokens_per_output_token)
        inputs = tuple(Input(f"second_{one.name}", one.value, one.unit, one.state, one.source) for one in second.inputs)
        state = weakest((throughput.state, throughput.mix_state, second.state, second.mix_state))
        return Priced(prices, (prices,), state, "solved from the two runs", inputs)
    entry = assumptions.entries[RATIO]
    ratios = (entry.value,) if entry.low is None or entry.high is None else (entry.low, entry.value, entry.high)
    state = weakest((throughput.state, throughput.mix_state, entry.state))
    formula = f"output price = 1 / (rate x (1 + {MIX} x {RATIO})); input price = output price x {RATIO}"
    at_ratios = tuple(prices_from_ratio(rate, mix, ratio) for ratio in ratios)
    return Priced(prices_from_ratio(rate, mix, entry.value), at_ratios, state, formula, (entry.to_input(),))


@dataclass(frozen=True, slots=True)
class Derating:
    """From peak to planning rate by ``factors``: the user's own, the latency bound, last the utilisation ceiling."""

    peak: float
    peak_state: State
    factors: tuple[Input, ...]

    @property
    def rates(self) -> list[float]:
        """Output tokens per second after each factor."""
        shares = [float(factor.value or 0.0) for factor in self.factors]
        return [self.peak * math.prod(shares[: count + 1]) for count in range(len(shares))]

    @property
    def latency_bound(self) -> float:
        """The estimated highest rate at which users are served within the latency limits."""
        return self.rates[-2]

    @property
    def planning(self) -> float:
        """The planning rate."""
        return self.rates[-1]

    @property
    def latency_share(self) -> float:
        """The share of the peak that serves users within the latency limits."""
        return float(self.factors[-2].value or 0.0)

    @property
    def share_is_assumed(self) -> bool:
        """Whether neither the run, nor its scenario, nor a schedule gives ``latency_share``."""
        return self.factors[-2].name == LATENCY

    @property
    def shown_share(self) -> float:
        """``latency_share`` where the run or its scenario shows it, else 1."""
        return 1.0 if self.factors[-2].name in (LATENCY, SCHEDULED) else self.latency_share

    @property
    def user_share(self) -> float:
        """The user's factors together."""
        return math.prod(float(factor.value or 0.0) for factor in self.factors[:-2])

    @property
    def headroom_share(self) -> float:
        """The user's factors and the utilisation ceiling together."""
        return self.user_share * float(self.factors[-1].value or 0.0)

    @property
    def latency_bound_state(self) -> State:
        """State of the latency-bound rate."""
        return weakest((self.peak_state, *(factor.state for factor in self.factors[:-1])))

    @property
    def state(self) -> State:
        """State of the planning rate."""
        return weakest((self.latency_bound_state, self.factors[-1].state))


def derating(throughput: Throughput, assumptions: Assumptions, more: Sequence[Input] = ()) -> Derating:
    """The planning rate of a throughput: by the user's own factors, within the latency limits, and with headroom."""
    factors = (*more, _latency_input(throughput, assumptions), assumptions.entries[CEILING].to_input())
    return Derating(throughput.output_tokens_per_second, throughput.state, factors)


def parse_factor(text: str) -> Input:
    """A factor of the user, ``name=share``. Raises UsageError unless 0 < share <= 1."""
    name, _, value = text.partition("=")
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not name.strip() or not 0 < factor <= 1:
        raise UsageError(
            f"--factor {text}: expected NAME=SHARE with a share above 0 and up to 1, such as makespan=0.936"
        )
    return Input(name.strip(), factor, "share", "given", "--factor")


def _latency_input(throughput: Throughput, assumptions: Assumptions) -> Input:
    """The share of the rate that serves users within the limits: from the run, from its scenario, or assumed.

    If a run broke the service level, no rate that keeps it is known. Its goodput at its own rate is then an estimate,
    and a poor one if its queue grew.
    """
    service, assumed = throughput.service, assumptions.entries[LATENCY].to_input()
    if service is None:
        if throughput.scenario in ("server", "interactive"):
            return Input(
                "latencies_already_kept", 1.0, "share", "given", f"the rate is of scenario {throughput.scenario}"
            )
        return _scheduled(throughput, assumptions) or assumed
    if service.kept:
        return Input("service_level_kept", 1.0, "share", throughput.state, service.why)
    if service.kept is False and service.good_output_tokens_per_second is not None:
        share = service.good_output_tokens_per_second / throughput.output_tokens_per_second
        if not share:
            raise UsageError(f"no request kept the service level, so there is no planning rate: {service.why}")
        why = f"goodput of a run that broke the service level, not a measured bound: {service.why}"
        return Input("goodput_share", share, "share", "estimate", why)
    found = _scheduled(throughput, assumptions) or assumed
    return replace(found, source=f"{found.source}; the run does not show it: {service.why}")


def _scheduled(throughput: Throughput, assumptions: Assumptions) -> Input | None:
    """The share by the schedule of the cost model, for requests of the lengths at which the rate was reached."""
    if throughput.replica is None:
        return None
    ttft, tpot = (assumptions[name] / assumptions[P99_OVER_MEAN] for name in LIMITS)
    lengths, speed = throughput.lengths, throughput.speed
    found = schedule(throughput.replica, lengths, speed=speed, ttft_limit_seconds=ttft, tpot_limit_seconds=tpot)
    share = min(1.0, found.output_tokens_per_second * throughput.replicas / throughput.output_tokens_per_second)
    where = f"schedule of the cost model on {throughput.replica.gpu}; bound: {found.bound}"
    return Input(SCHEDULED, share, "share", "estimate", where)
