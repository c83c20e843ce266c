"""``megatoken plan capacity``: how many interactions and users a rate of tokens serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatoken.planning.assumptions import Assumptions
from megatoken.planning.bounds import Served
from megatoken.planning.figures import Input, Plan, Result, State, Table, weakest
from megatoken.planning.pricing import Derating, Priced, derating, price, residence_seconds, service_seconds
from megatoken.planning.service_level import Verdict
from megatoken.planning.throughput import LIMITS, P99_OVER_MEAN, Throughput
from megatoken.planning.workloads import Profile
from megatoken.text import precise, significant


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
    served = [Served(profile, throughput, priced, derated, assumptions) for profile in profiles]
    tables = [_concurrency(served, waits), _interactions(throughput, served), _derating(throughput, derated)]
    if several := [one for one in served if one.profile.repeated_tokens]:
        tables.append(_prefix_cache(several))
    return Plan(
        kind="plan_capacity",
        title=f"Capacity of {throughput.label}",
        inputs=(*throughput.inputs, *priced.inputs, *derated.factors, *_latency_inputs(throughput, assumptions, waits)),
        results=tuple(_results(throughput, served, priced, derated)),
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


def _latency_inputs(throughput: Throughput, assumptions: Assumptions, waits: tuple[Input, Input]) -> tuple[Input, ...]:
    return waits if throughput.replica is None else assumptions.inputs((*LIMITS, P99_OVER_MEAN))


def _interactions(throughput: Throughput, served: Sequence[Served]) -> Table:
    output = throughput.output_tokens_per_second
    rows = []
    for one in served:
        profile = one.profile
        document = output / profile.counted_tokens
        at_ends = [prices.interactions_per_second(profile) for prices in one.priced.range]
        rows.append(
            {
                "profile": profile.name,
                "counted_tokens": profile.counted_tokens,
                "document_interactions_per_second": document,
                "document_rounded_interactions_per_second": round(document / 10) * 10,
                "output_only_interactions_per_second": output / profile.written_tokens,
                "all_tokens_alike_interactions_per_second": throughput.total_tokens_per_second
                / (profile.read_tokens() + profile.written_tokens),
                "priced_interactions_per_second": one.peak,
                "priced_low_interactions_per_second": min(at_ends),
                "priced_high_interactions_per_second": max(at_ends),
                "planning_interactions_per_second": one.planning,
            }
        )
    return Table(
        "interactions",
        "Interactions per second at the peak rate, counted in five ways, and at the planning rate",
        tuple(rows),
        "document: output rate / (input + output tokens), each token of a conversation once. output only: input tokens"
        " cost nothing. all alike: input tokens cost as much as output tokens. priced: each at its own price; low and"
        " high are the ends of the range of their ratio. planning: within KV memory and latency, times the utilisation"
        " ceiling",
    )


def _concurrency(served: Sequence[Served], waits: tuple[Input, Input]) -> Table:
    rows: list[Mapping[str, Any]] = []
    for one in served:
        profile = one.profile
        ttft, tpot = one.waits or (float(wait.value or 0.0) for wait in waits)
        service, most = service_seconds(profile, ttft, tpot), one.most_in_flight
        rows.append(
            {
                "profile": profile.name,
                "planning_interactions_per_second": one.planning,
                "bound": one.bound,
                "in_flight_requests": one.planning * service if most is None else most * one.derated.headroom_share,
                "memory_holds_requests": one.memory_requests,
                "ttft_p99_seconds": ttft,
                "tpot_p99_milliseconds": 1000 * tpot,
                "wait_seconds": residence_seconds(profile, ttft, tpot),
                "pause_seconds": profile.pause_seconds,
                "users": one.users,
                "state": weakest((one.state, *(wait.state for wait in waits))),
            }
        )
    return Table(
        "concurrency",
        "Requests in flight and users at the planning rate",
        tuple(rows),
        "users = rate x pause from one interaction to the next: answers are read while they stream. Latencies are 99th"
        " percentiles at the highest rate. Where memory holds is empty, KV memory is not checked and in flight = rate x"
        " service time",
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


def _prefix_cache(served: Sequence[Served]) -> Table:
    rows = []
    for one in served:
        profile = one.profile
        without, perfect = (
            replace(one, profile=profile.model_copy(update={"prefix_cache_share": share})).planning
            for share in (0.0, 1.0)
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
        "at the planning rate; a perfect prefix cache computes every token once, and needs memory between turns that"
        " is not counted here",
    )


def _results(throughput: Throughput, served: Sequence[Served], priced: Priced, derated: Derating) -> list[Result]:
    peak, unit = throughput.output_tokens_per_second, "output tokens/s"
    total, total_state = throughput.total_tokens_per_second, weakest((throughput.state, throughput.mix_state))
    bound, factors = derated.latency_bound, [significant(factor.value) for factor in derated.factors]
    per_total = "peak rate x (1 + input tokens per output token)"
    planning = Result("Planning rate", derated.planning, unit, " x ".join(["peak rate", *factors]), derated.state)
    answers = list(_of_profiles(served))
    results = [
        *([*reversed(answers), planning] if len(served) == 1 else [planning, *answers]),  # one profile: users first
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
    return results


def _of_profiles(served: Sequence[Served]) -> Iterator[Result]:
    """The answer for each profile: interactions and users, and the bound that holds."""
    for one in served:
        title = f"{one.profile.title} ({one.profile.name})"
        yield Result(title, one.planning, "interactions/s", one.why, one.state)
        if one.users:
            each = f"interactions/s x {precise(one.profile.pause_seconds)} s between the interactions of a user"
            yield Result(f"Users of {one.profile.name}", one.users, "users", each, one.state)


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
    ]
    if throughput.replica is None:
        notes.append("Token prices apply to contexts about as long as the benchmark's; longer ones cost more.")
    if throughput.service is not None and not throughput.service.kept:
        notes.append(f"Service level: {throughput.service.why}.")
        if throughput.service.ttft_mean_seconds and throughput.service.tpot_mean_seconds is None:
            notes.append(
                "The run has no time per output token, so the limit takes its place. If answers came in one piece, the"
                " time to first token has that of all tokens already: waits and requests in flight are too high."
            )
    if throughput.accelerators is None:
        notes.append("The number of accelerators is unknown, so there are no results per accelerator.")
    return notes
