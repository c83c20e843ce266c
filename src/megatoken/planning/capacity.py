"""``megatoken plan capacity``: how many interactions and users a rate of tokens serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatoken.planning.assumptions import Assumptions
from megatoken.planning.figures import Input, Plan, Result, State, Table, weakest
from megatoken.planning.pricing import Derating, Priced, derating, price, residence_seconds, service_seconds
from megatoken.planning.service_level import Verdict
from megatoken.planning.throughput import LIMITS, Throughput
from megatoken.planning.workloads import Profile
from megatoken.text import precise


def plan_capacity(
    throughput: Throughput,
    profiles: Sequence[Profile],
    assumptions: Assumptions,
    *,
    second: Throughput | None = None,
    factors: Sequence[Input] = (),
) -> Plan:
    """Interactions per second, requests in flight and users that a throughput serves.

    ``second`` is the same system with other token lengths, from which input and output tokens are priced; ``factors``
    are the user's own between peak and planning rate.

    Raises:
        UsageError: ``second`` cannot be the same system with other token lengths.
    """
    priced = price(throughput, assumptions, second)
    derated = derating(throughput, assumptions, factors)
    waits = _waits(throughput, assumptions)
    tables = [
        _interactions(throughput, profiles, priced, derated),
        _concurrency(profiles, priced, derated, waits),
        _derating(throughput, derated),
    ]
    if several := [profile for profile in profiles if profile.repeated_tokens]:
        tables.append(_prefix_cache(several, priced, derated))
    return Plan(
        kind="plan_capacity",
        title=f"Capacity of {throughput.label}",
        inputs=(*throughput.inputs, *priced.inputs, *derated.factors, *waits),
        results=tuple(_results(throughput, profiles, priced, derated)),
        tables=tuple(tables),
        profiles=tuple(profile.to_document() for profile in profiles),
        notes=(*throughput.notes, *_notes(throughput)),
    )


def _waits(throughput: Throughput, assumptions: Assumptions) -> tuple[Input, Input]:
    """Time to first token and per further token: means of the run if known, else the latency limits."""
    verdict = throughput.service
    means = (verdict.ttft_mean_seconds, verdict.tpot_mean_seconds) if verdict else (None, None)
    units, names = ("s", "s/token"), ("ttft_mean_seconds", "tpot_mean_seconds")
    ttft, tpot = (
        assumptions.entries[limit].to_input()
        if value is None
        else Input(name, value, unit, throughput.state, "the run")
        for limit, value, unit, name in zip(LIMITS, means, units, names, strict=True)
    )
    return ttft, tpot


def _interactions(throughput: Throughput, profiles: Sequence[Profile], priced: Priced, derated: Derating) -> Table:
    output = throughput.output_tokens_per_second
    rows = []
    for profile in profiles:
        document = output / profile.counted_tokens
        at_ends = [prices.interactions_per_second(profile) for prices in priced.range]
        peak = priced.prices.interactions_per_second(profile)
        rows.append(
            {
                "profile": profile.name,
                "counted_tokens": profile.counted_tokens,
                "document_interactions_per_second": document,
                "document_rounded_interactions_per_second": round(document / 10) * 10,
                "output_only_interactions_per_second": output / profile.written_tokens,
                "all_tokens_alike_interactions_per_second": throughput.total_tokens_per_second
                / (profile.read_tokens() + profile.written_tokens),
                "priced_interactions_per_second": peak,
                "priced_low_interactions_per_second": min(at_ends),
                "priced_high_interactions_per_second": max(at_ends),
                "planning_interactions_per_second": peak * derated.planning_share,
            }
        )
    return Table(
        "interactions",
        "Interactions per second at the peak rate, counted in five ways, and at the planning rate",
        tuple(rows),
        "document: output rate / (input + output tokens), each token of a conversation once. output only: input tokens"
        " cost nothing. all alike: input tokens cost as much as output tokens. priced: each at its own price; low and"
        " high are the ends of the range of their ratio. planning: priced, times the derating",
    )


def _concurrency(profiles: Sequence[Profile], priced: Priced, derated: Derating, waits: tuple[Input, Input]) -> Table:
    ttft, tpot = (float(one.value or 0.0) for one in waits)
    rows: list[Mapping[str, Any]] = []
    for profile in profiles:
        rate = priced.prices.interactions_per_second(profile) * derated.planning_share
        service, residence = service_seconds(profile, ttft, tpot), residence_seconds(profile, ttft, tpot)
        rows.append(
            {
                "profile": profile.name,
                "planning_interactions_per_second": rate,
                "service_seconds": service,
                "in_flight_requests": rate * service,
                "wait_seconds": residence,
                "think_seconds": profile.think_seconds,
                "users": rate * (residence + profile.think_seconds),
                "state": weakest((priced.state, derated.state, profile.state, *(one.state for one in waits))),
            }
        )
    return Table(
        "concurrency",
        "Requests in flight and users at the planning rate",
        tuple(rows),
        "in flight = rate x service time; users = rate x (wait + think time) (Little's law). The wait includes tools",
    )


def _derating(throughput: Throughput, derated: Derating) -> Table:
    peak = Input("peak", 1.0, "share", throughput.state, throughput.source)
    rows = [
        {
            "step": step.name,
            "factor_share": step.value,
            "output_tokens_per_second": rate,
            "state": step.state,
            "source": step.source,
        }
        for step, rate in zip((peak, *derated.factors), (derated.peak, *derated.rates), strict=True)
    ]
    return Table("derating", "From the peak rate to the planning rate", tuple(rows))


def _prefix_cache(profiles: Sequence[Profile], priced: Priced, derated: Derating) -> Table:
    rows = []
    for profile in profiles:
        without, perfect = (
            priced.prices.interactions_per_second(profile, share) * derated.planning_share for share in (0.0, 1.0)
        )
        rows.append(
            {
                "profile": profile.name,
                "turns": profile.turns,
                "new_input_tokens": profile.read_tokens(1.0),
                "repeated_input_tokens": profile.repeated_tokens,
                "without_cache_interactions_per_second": without,
                "perfect_cache_interactions_per_second": perfect,
            }
        )
    return Table(
        "prefix_cache",
        "Prefix cache: every turn of a conversation repeats the turns before it",
        tuple(rows),
        "at the planning rate; a perfect prefix cache computes every token once",
    )


def _results(throughput: Throughput, profiles: Sequence[Profile], priced: Priced, derated: Derating) -> list[Result]:
    peak, unit = throughput.output_tokens_per_second, "output tokens/s"
    total, total_state = throughput.total_tokens_per_second, weakest((throughput.state, throughput.mix_state))
    bound, factors = derated.latency_bound, [precise(factor.value) for factor in derated.factors]
    per_total = "peak rate x (1 + input tokens per output token)"
    results = [
        Result("Planning rate", derated.planning, unit, " x ".join(["peak rate", *factors]), derated.state),
        Result(
            "Latency-bound rate", bound, unit, " x ".join(["peak rate", *factors[:-1]]), derated.latency_bound_state
        ),
        Result("Peak rate", peak, unit, "as given or measured", throughput.state),
        Result("Peak rate, input and output", total, "input + output tokens/s", per_total, total_state),
    ]
    if throughput.accelerators:
        per = derated.planning / throughput.accelerators
        formula = f"planning rate / {throughput.accelerators}"
        results.append(Result("Planning rate per accelerator", per, unit, formula, derated.state))
    for name, seconds in (
        ("System time per input token", priced.prices.prefill_seconds_per_token),
        ("System time per output token", priced.prices.decode_seconds_per_token),
    ):
        results.append(Result(name, seconds * 1e6, "us", priced.formula, priced.state))
    if throughput.service is not None:
        results += _service_level(throughput.service, throughput.state)
    for profile in profiles:
        rate = priced.prices.interactions_per_second(profile) * derated.planning_share
        state = weakest((priced.state, derated.state, profile.state))
        formula = "planning share of the peak / (input tokens x input price + output tokens x output price)"
        results.append(Result(f"{profile.title} ({profile.name})", rate, "interactions/s", formula, state))
    return results


def _service_level(verdict: Verdict, state: State) -> list[Result]:
    completed = "99th percentile of completed requests"
    known = [
        ("Requests within the service level", verdict.good_share, "share", verdict.why),
        ("Goodput", verdict.good_requests_per_second, "requests/s", "requests that kept every limit"),
        ("Time to first token, p99", verdict.ttft_p99_seconds, "s", completed),
        ("Time per output token, p99", verdict.tpot_p99_seconds, "s/token", completed),
    ]
    bound = verdict.bound_output_tokens_per_second  # if unknown, shown with the reason
    return [
        Result("Rate within the service level", bound, "output tokens/s", verdict.why, state),
        *(Result(name, value, unit, why, state) for name, value, unit, why in known if value is not None),
    ]


def _notes(throughput: Throughput) -> list[str]:
    notes = [
        "The rate counts output tokens. The documents that published 1,100,948 tokens/s for a rack divide it by the"
        " input and output tokens of an interaction.",
        "Token prices apply to contexts about as long as the benchmark's; tokens of much longer contexts cost more.",
    ]
    if throughput.service is not None and not throughput.service.kept:
        notes.append(f"Service level: {throughput.service.why}.")
    if throughput.accelerators is None:
        notes.append("The number of accelerators is unknown, so there are no results per accelerator.")
    return notes
