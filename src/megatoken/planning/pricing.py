"""From a throughput to prices of tokens and to the rate to plan with: what all four plans have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.capacity import Factor, Prices, Step, derate, prices_from_ratio, prices_from_two_rates
from megatoken.planning.figures import Input, State, weakest
from megatoken.planning.throughput import MIX, Throughput

RATIO = "prefill_to_decode_cost"
LATENCY = "server_to_offline_share"
CEILING = "utilisation_ceiling_share"


@dataclass(frozen=True, slots=True)
class Priced:
    """Prices at the peak of a throughput, where they come from, and the prices at the ends of the ratio's range."""

    prices: Prices
    range: tuple[Prices, ...]
    state: State
    formula: str
    inputs: tuple[Input, ...]


def price(throughput: Throughput, assumptions: Assumptions, second: Throughput | None = None) -> Priced:
    """What an input and an output token cost on the system of ``throughput``.

    Args:
        throughput: the rate and the mix of tokens it was reached with.
        assumptions: for the ratio of the two prices, unless ``second`` gives them.
        second: the same system under another mix.

    Raises:
        UsageError: two rates that cannot be of one system under two mixes.
    """
    rate, mix = throughput.output_tokens_per_second, throughput.input_tokens_per_output_token
    if second is not None:
        if throughput.accelerators and second.accelerators not in (None, throughput.accelerators):
            raise UsageError(
                f"the two runs used {throughput.accelerators} and {second.accelerators} accelerators; prices need one"
                " system under two mixes"
            )
        prices = prices_from_two_rates(rate, mix, second.output_tokens_per_second, second.input_tokens_per_output_token)
        inputs = tuple(Input(f"second_{one.name}", one.value, one.unit, one.state, one.source) for one in second.inputs)
        state = weakest((throughput.state, throughput.mix_state, second.state, second.mix_state))
        return Priced(prices, (prices,), state, "two rates, two mixes, two prices", inputs)
    entry = assumptions.entries[RATIO]
    ratios = (entry.value,) if entry.low is None or entry.high is None else (entry.low, entry.value, entry.high)
    state = weakest((throughput.state, throughput.mix_state, entry.state))
    formula = f"output price = 1 / (rate x (1 + {MIX} x {RATIO})); input price = output price x {RATIO}"
    at_ratios = tuple(prices_from_ratio(rate, mix, ratio) for ratio in ratios)
    return Priced(prices_from_ratio(rate, mix, entry.value), at_ratios, state, formula, (entry.to_input(),))


@dataclass(frozen=True, slots=True)
class Derating:
    """From a peak to the rate to plan with: the user's own factors, the latency bound, then the ceiling of use."""

    peak_output_tokens_per_second: float
    steps: tuple[Step, ...]
    latency_inputs: tuple[Input, ...]  # of the steps up to the latency bound
    ceiling_input: Input
    latency_bound_state: State

    @property
    def latency_bound(self) -> float:
        """The highest rate at which users are served in time, as far as that is known."""
        return self.steps[-2].output_tokens_per_second

    @property
    def planning(self) -> float:
        """The rate to plan with."""
        return self.steps[-1].output_tokens_per_second

    @property
    def latency_bound_share(self) -> float:
        """Of the peak."""
        return self.latency_bound / self.peak_output_tokens_per_second

    @property
    def planning_share(self) -> float:
        """Of the peak."""
        return self.planning / self.peak_output_tokens_per_second

    @property
    def state(self) -> State:
        """Of the rate to plan with."""
        return weakest((self.latency_bound_state, self.ceiling_input.state))

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Of all steps."""
        return (*self.latency_inputs, self.ceiling_input)


def derating(throughput: Throughput, assumptions: Assumptions, more: Sequence[Factor] = ()) -> Derating:
    """What remains of a peak when users must be served in time, with headroom.

    Args:
        throughput: the peak.
        assumptions: shares to apply where nothing was measured.
        more: the user's own factors, applied first.
    """
    latency = _latency_input(throughput, assumptions)
    own = [Input(one.name, one.factor, "share", one.state, one.source) for one in more]
    ceiling = assumptions.entries[CEILING]
    inputs = (*own, latency)
    factors = [
        *more,
        Factor(latency.name, float(latency.value or 0.0), latency.state, latency.source),
        Factor(CEILING, ceiling.value, ceiling.state, ceiling.source),
    ]
    return Derating(
        peak_output_tokens_per_second=throughput.output_tokens_per_second,
        steps=derate(throughput.output_tokens_per_second, factors),
        latency_inputs=inputs,
        ceiling_input=ceiling.to_input(),
        latency_bound_state=weakest((throughput.state, *(one.state for one in inputs))),
    )


def parse_factor(text: str) -> Factor:
    """A factor of the user, ``name=share``.

    Raises:
        UsageError: not of this form, or no share above 0 and up to 1.
    """
    name, _, value = text.partition("=")
    try:
        factor = float(value)
    except ValueError:
        factor = 0.0
    if not name.strip() or not 0 < factor <= 1:
        raise UsageError(f"--factor {text}: give NAME=SHARE with a share above 0 and up to 1, such as makespan=0.936")
    return Factor(name.strip(), factor, "given", "--factor")


def _latency_input(throughput: Throughput, assumptions: Assumptions) -> Input:
    """What share of the rate serves users in time: by the run itself, by its scenario, else by assumption.

    Of a run that broke the level no rate is known that keeps it. Its goodput is what it served in time at its own rate:
    an estimate, and of a queue that grew a poor one.
    """
    service, assumed = throughput.service, assumptions.entries[LATENCY].to_input()
    if service is None:
        if throughput.scenario in ("server", "interactive"):
            return Input("latencies_already_kept", 1.0, "share", "given", f"a rate of scenario {throughput.scenario}")
        return assumed
    if service.kept:
        return Input("service_level_kept", 1.0, "share", throughput.state, service.why)
    if service.kept is False and service.good_output_tokens_per_second is not None:
        share = service.good_output_tokens_per_second / throughput.output_tokens_per_second
        if not share:
            raise UsageError(f"no request kept the service level, so there is no rate to plan with: {service.why}")
        why = f"goodput of a run that broke the level, at its own rate; no measured bound: {service.why}"
        return Input("goodput_share", share, "share", "estimate", why)
    return replace(assumed, source=f"{assumed.source}; the run cannot tell: {service.why}")
