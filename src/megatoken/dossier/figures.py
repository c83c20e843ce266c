"""Figures of a dossier: what was measured, and what it costs in money and energy, with states and arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatoken.analysis.aggregation import aggregate_in
from megatoken.analysis.energy import run_energy, system_energy
from megatoken.analysis.history import machine_of
from megatoken.analysis.machine import accelerator_name, rate_state, run_accelerators
from megatoken.analysis.published import accelerator_facts
from megatoken.analysis.statistics import leading_rates
from megatoken.errors import UsageError
from megatoken.planning.commands import cost, energy, rate_of_nodes
from megatoken.planning.figures import Plan, State
from megatoken.planning.flags import Common, PowerFlags, Rate
from megatoken.planning.run_price import request_price
from megatoken.runs.run import Run

MOST_ARTEFACTS = 20
PER_TOKEN = "Energy of an output token"
About = Literal["cost", "energy"]
UNKNOWN: dict[About, tuple[str, str]] = {
    "cost": ("Cost of a million output tokens", "$"),
    "energy": (PER_TOKEN, "J"),
}
PLANS: dict[About, Callable[[Rate, Common, PowerFlags], Plan]] = {"cost": cost, "energy": energy}


@dataclass(frozen=True, slots=True)
class Cost:
    """A figure in money or energy of the run or audit ``of``; where it is unknown, ``how`` says why.

    ``about`` is "cost" or "energy"; ``settle`` says what would make an unknown figure known. A ``headline`` is named in
    the answer on the first page.
    """

    of: str
    name: str
    value: float | None
    unit: str
    state: State | None
    how: str
    headline: bool = True
    about: About = "cost"
    settle: str = ""


CONTENTION = ("CORE_WAIT", "DRIVER_CORE_WAIT")  # notes of a run whose result other work has reduced


def measured_by_run(run: Run) -> dict[str, Any]:
    """What a run measured, with its verdict."""
    result = run.result
    p99s = {f"{name}_p99": (result.get(f"{name}_seconds") or {}).get("p99") for name in ("ttft", "tpot", "latency")}
    if result.get("scenario") == "offline":
        p99s |= {"ttft_p99": None, "latency_p99": None}  # of samples that are all due at once
    names = ("model", "precision", "scenario", "data_set", "samples_completed")
    count, accelerator, machine = run_accelerators(run), accelerator_name(run), _machine(run)
    return {
        "of": run.path.name,
        "subject": _subject([result.get(name) for name in names[:3]], count, accelerator, machine),
        **{name: result.get(name) for name in names},
        "output_tokens_per_second": leading_rates(result)["output_tokens_per_second"],
        "duration_seconds": result.get("duration_seconds"),
        "machine": machine,
        "accelerator": accelerator,
        "accelerators": count,
        **{f"{name}_seconds": value for name, value in p99s.items()},
        "p99s_of_too_few": any(
            "p99" in (result.get(f"{name.removesuffix('_p99')}_seconds") or {}).get("unreliable", ())
            for name, value in p99s.items()
            if value is not None
        ),
        "loadgen_validity": result.get("loadgen_validity"),
        "state": rate_state(run),
        "verdict": run.verdict,
        "label": None,
        "if_together": None,
        "reduced_by": [one["message"] for one in result.get("notes") or () if one["code"] in CONTENTION],
        "remarks": [one["message"] for one in (*run.reasons, *run.doubts, *(result.get("notes") or ()))],
    }


def _subject(ran: Sequence[str | None], count: int | None, accelerator: str | None, machine: str | None) -> str:
    """Model, number format and scenario, and what they ran on: accelerators where there are any, else the machine."""
    on = f"{count:,} × {accelerator or 'accelerators'}" if count else machine
    return " on ".join(filter(None, (" ".join(filter(None, ran)), on)))


def _machine(run: Run) -> str:
    """Host and GPUs; without GPUs the processor."""
    cpu = run.environment.get("cpu") or {}
    cores = f"{cpu.get('usable_cores')} cores of {cpu.get('model')}" if cpu.get("model") else ""
    return ", ".join(filter(None, (machine_of(run), "" if run.environment.get("gpus") else cores)))


def measured_by_audit(audit: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the audited artefacts show: nodes as one result where they are that, else each performance run."""
    systems = audit.get("systems") or []
    accelerator = systems[0].get("accelerator_model_name") if len(systems) == 1 else None
    common: dict[str, Any] = {
        "accelerator": accelerator,
        "precision": None,
        "state": "unverified",
        "reduced_by": [],
        "remarks": [],
    }
    together = audit.get("aggregate") or {}
    if (found := aggregate_in(together)) is not None:
        makespan = together.get("makespan") or {}
        nodes = together.get("nodes") or []
        return [
            {
                **common,
                "of": audit["title"],
                "subject": _subject(
                    [found.workload["model"], found.workload["scenario"]], found.accelerators, accelerator, None
                ),
                "model": found.workload["model"],
                "scenario": found.workload["scenario"],
                "accelerators": found.accelerators,
                "machine": f"{len(nodes)} nodes",
                "samples_completed": sum(node.get("samples") or 0 for node in nodes) or None,
                "duration_seconds": makespan.get("seconds"),
                "output_tokens_per_second": found.sum_of_rates_tokens_per_second,
                "verdict": None,
                "loadgen_validity": None,
                "label": found.sum_label,
                "if_together": makespan.get("output_tokens_per_second") if makespan.get("conditional") else None,
            }
        ]
    runs = [one for one in audit.get("artefacts") or [] if one.get("role") == "performance"]
    return [
        {
            **common,
            "of": f"{audit['title']}: {one.get('path') or one.get('node')}",
            "subject": _subject([one.get("benchmark"), one.get("scenario")], None, None, one.get("node")),
            "model": one.get("benchmark"),
            "scenario": one.get("scenario"),
            "accelerators": None,
            "machine": one.get("node"),
            "samples_completed": one.get("samples_issued"),
            "duration_seconds": one.get("duration_seconds"),
            "output_tokens_per_second": one.get("output_tokens_per_second"),
            "verdict": one.get("validity"),
            "loadgen_validity": one.get("validity"),
            "label": "LoadGen's own result",
            "if_together": None,
        }
        for one in runs[:MOST_ARTEFACTS]
    ]


def costs_of_run(run: Run, dollars_per_hour: float | None) -> Iterator[Cost]:
    """The price of its tokens and of one of its requests on the busy machine, and the energy of its tokens."""
    of, price = run.path.name, request_price(run, dollars_per_hour)
    if price is None:
        why, settle = "the price of the machine is unknown", "its price: megatoken dossier --dollars-per-hour"
        yield Cost(of, "Price of a million output tokens", None, "$", None, why, settle=settle)
    else:
        millions = price.dollars_per_million_output_tokens
        if millions is not None:
            how = "the price of an hour over the output tokens of an hour"
            yield Cost(of, "Price of a million output tokens", millions, "$", price.state, how)
        yield Cost(of, "Price of a request", price.dollars, "$", price.state, price.formula)
    for boundary, found in (("accelerators", run_energy(run.series)), ("whole system", system_energy(run.series))):
        joules = found.joules_per_output_token
        if joules is not None or boundary == "accelerators":
            state = rate_state(run) if joules is not None else None
            settle = (
                "" if joules is not None else "a run on a machine whose power can be read; megatoken doctor shows it"
            )
            name = f"{PER_TOKEN}, {boundary}"
            yield Cost(of, name, joules, "J", state, found.why, about="energy", settle=settle)


def costs_of_audit(audit: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> Iterator[Cost]:
    """Cost and energy of the nodes of an audit by the assumptions of ``megatoken plan``."""
    of, found = str(audit["title"]), aggregate_in(audit.get("aggregate") or {})
    if found is None:
        return
    accelerator = measured[0]["accelerator"]
    facts = accelerator_facts(accelerator) if accelerator else None
    rate = rate_of_nodes(found, Rate(accelerator=facts.name if facts else None), of)
    for about, make in PLANS.items():
        try:
            plan = make(rate, Common(), PowerFlags())
        except UsageError as error:
            name, unit = UNKNOWN[about]
            yield Cost(of, name, None, unit, None, str(error), about=about)
            continue
        for place, result in enumerate(plan.results):
            unit = "$" if result.unit == "$/million output tokens" else result.unit
            yield Cost(of, result.name, result.value, unit, result.state, result.formula, not place, about)
