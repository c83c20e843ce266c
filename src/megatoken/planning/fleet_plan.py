"""``megatoken plan fleet``: how many nodes a demand needs, with spares, and what a second class saves."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatoken.analysis.published import accelerator_facts
from megatoken.errors import UsageError
from megatoken.files import UnreadableError, read_text
from megatoken.planning.assumptions import Assumptions, read_shipped
from megatoken.planning.bounds import Served
from megatoken.planning.cost import UNPRICED, System, accelerator_hour
from megatoken.planning.figures import Input, Plan, Result, State, Table, weakest
from megatoken.planning.fleet import MOST_NODES, Size, SupplyClass, fit, nodes_for, parse_curve, policies, size
from megatoken.planning.pricing import CEILING, SCHEDULED, derating, interactions_of_users, price
from megatoken.planning.throughput import Throughput, check_count, check_positive, choose
from megatoken.planning.workloads import Profile
from megatoken.text import count_of, precise, significant, suggestion
from megatoken.yaml_files import LARGEST_FILE_BYTES, Strict

UNITS = {"output-tokens": "output tokens/s", "interactions": "interactions/s", "users": "users"}
LONGEST_CURVE_SHOWN = 200
SIZES_NOTE = (
    "at the planning rate, over the cycle of the demand. unserved: share of the demand. short time: share of the"
    " cycle in which some demand is not served. The utilisation ceiling is additional headroom"
)
POLICIES_NOTE = "means over the cycle; whole burst nodes are rented for each part of the cycle"
BURST_PRICE = "burst_dollars_per_accelerator_hour"


@dataclass(frozen=True, slots=True)
class Supply:
    """One class of nodes: a rate, the accelerators of a node, the nodes of a rack, and what the nodes cost.

    ``system`` has the rent or the power that the price needs; None: the price is unknown. ``whole_racks``: the part is
    sold as a rack.
    """

    throughput: Throughput
    accelerators_per_node: int | None = None
    nodes_per_rack: int | None = None
    system: System | None = None
    whole_racks: bool = False

    @classmethod
    def of(cls, system: System, accelerators_per_node: int | None = None, nodes_per_rack: int | None = None) -> Supply:
        """The supply of a system: shapes that are not given are those of its accelerator, if they are known."""
        throughput = system.throughput
        facts = accelerator_facts(throughput.accelerator)
        per_node = accelerators_per_node
        if facts and per_node is None and throughput.scope != "node":
            per_node = facts.per_node
        whole = bool(facts and facts.per_rack and nodes_per_rack is None)
        if facts and facts.per_rack and whole:
            nodes_per_rack = max(1, facts.per_rack // (per_node or throughput.accelerators or facts.per_node))
        return cls(throughput, per_node, nodes_per_rack, system, whole)


@dataclass(frozen=True, slots=True)
class Curve:
    """Demand over a cycle of equal parts, in one of ``UNITS``; each part begins at its hour."""

    hours: tuple[float, ...]
    levels: tuple[float, ...]
    unit: str
    state: State
    source: str


class _CurveEntry(Strict):
    title: str
    state: State
    source: str
    shares: list[float]


class _CurvesFile(Strict):
    curves: dict[str, _CurveEntry]


def load_demand(unit: str, level: float | None = None, curve: str | None = None) -> Curve:
    """Demand from the command line: a constant ``level``, or a curve scaled so that its peak is ``level``.

    ``unit`` is output-tokens, interactions or users. ``curve`` names a shipped curve, which needs a level, or a CSV
    file of hour and demand, which does not.

    Raises:
        UsageError: neither level nor curve is given, or one of them is invalid.
    """
    choose("--unit", unit, tuple(UNITS))
    if level is not None:
        check_positive("--demand", level, "100")
    if curve is None:
        if level is None:
            raise UsageError("no demand: pass --demand, --curve or --replace-nodes")
        return Curve((0.0,), (level,), unit, "given", "--demand")
    shipped = read_shipped("demand_curves.yaml", _CurvesFile).curves
    if curve in shipped:
        if level is None:
            raise UsageError(f"--curve {curve} has no absolute level; pass its peak with --demand")
        entry = shipped[curve]
        hours = tuple(map(float, range(len(entry.shares))))
        return Curve(hours, tuple(share * level for share in entry.shares), unit, entry.state, entry.source)
    hours, levels = _curve_file(Path(curve), shipped)
    scale = 1.0 if level is None else level / max(levels)
    return Curve(hours, tuple(one * scale for one in levels), unit, "given", curve)


def plan_fleet(
    supply: Supply,
    demand: Curve,
    assumptions: Assumptions,
    *,
    profile: Profile | None = None,
    spare_domains: int = 1,
    domain: str = "node",
    burst: Supply | None = None,
    factors: Sequence[Input] = (),
) -> Plan:
    """Nodes for a demand, with spares for ``spare_domains`` fault domains (node or rack) that may fail without loss.

    ``profile`` is the interaction, which a demand in output tokens does not need. ``burst`` is a second class of nodes,
    rented by the hour for demand beyond the first; ``factors`` lower the planning rate of both.

    Raises:
        UsageError: a profile is missing, or the accelerators per node are unknown.
    """
    levels, formula = _in_work(demand, profile)
    work_unit = UNITS["output-tokens" if demand.unit == "output-tokens" else "interactions"]
    most = max(levels)
    priced_by = profile if demand.unit != "output-tokens" else None
    base, state, inputs = _class("base", supply, priced_by, assumptions, factors)
    state = weakest((state, demand.state, *((profile.state,) if profile else ())))
    sized = size(most, base, spare_domains=spare_domains, domain=domain)
    counts = {max(1, sized.serving_nodes - 2), max(1, sized.serving_nodes - 1), sized.serving_nodes, sized.nodes}
    sizes = tuple(fit(levels, base, nodes) for nodes in sorted(counts))
    tables = [Table("sizes", "Fleet sizes: too small, sufficient, with spares", sizes, SIZES_NOTE)]
    results = _results(most, work_unit, base, sized, spare_domains, domain, state, assumptions[CEILING])
    if burst is not None:
        second, second_state, more = _class("burst", burst, priced_by, assumptions, factors)
        inputs += more
        burst_state = weakest((state, second_state))
        found = policies(levels, base, second, spare_domains=spare_domains, domain=domain)
        rows = tuple({**row, "state": burst_state} for row in found)
        tables.append(Table("policies", "Permanent base, burst nodes by the hour", rows, POLICIES_NOTE))
        alone = nodes_for(most, second.rate_per_node)
        formula_alone = f"ceiling(peak demand / {significant(second.rate_per_node)} {work_unit} per node)"
        results.append(Result("Burst nodes without any base", alone, "nodes", formula_alone, burst_state))
    if 1 < len(levels) <= LONGEST_CURVE_SHOWN:
        tables.append(_curve(demand, levels, base))
    peak = max(demand.levels)
    shown = precise(peak) if len(demand.levels) == 1 else f"a peak of {precise(peak)}"
    demand_inputs = [Input("demand_peak", peak, UNITS[demand.unit], "given", "given")]
    if len(demand.levels) > 1:
        demand_inputs.append(
            Input("demand_curve", len(demand.levels), "equal parts of a cycle", demand.state, demand.source)
        )
    return Plan(
        kind="plan_fleet",
        title=f"Fleet for {shown} {UNITS[demand.unit]}",
        inputs=tuple(dict.fromkeys([*demand_inputs, *inputs])),  # both classes share assumptions
        results=tuple(results),
        tables=tuple(tables),
        profiles=(profile.to_document(),) if profile else (),
        notes=(formula, *supply.throughput.notes) if formula else supply.throughput.notes,
    )


def plan_replacement(
    nodes_before: int, output_tokens_per_second_before: float, supply: Supply, *, state: State = "given"
) -> Plan:
    """How many nodes of ``supply`` replace ``nodes_before`` nodes of a known rate, at the same derating.

    Raises:
        UsageError: a number is out of range.
    """
    check_positive("--replace-rate", output_tokens_per_second_before, "12000")
    check_count("--replace-nodes", nodes_before, 1, MOST_NODES)
    old, new = output_tokens_per_second_before, supply.throughput.output_tokens_per_second * _node_share(supply)
    nodes = nodes_for(nodes_before * old, new)
    both = weakest((state, supply.throughput.state))
    fewer, why = (
        ("fewer", "one node is the minimum") if nodes == 1 else (f"{nodes - 1}", f"{nodes_before} / {nodes - 1}")
    )
    enough = nodes_before / (nodes - 1) if nodes > 1 else None
    exact, formula = nodes_before * old / new, "old nodes x old rate / new rate"
    results = (
        Result(f"Nodes that replace {nodes_before} old nodes", nodes, "nodes", f"ceiling({formula})", both),
        Result("Before rounding up", exact, "nodes", formula, both),
        Result("Nodes saved", nodes_before - nodes, "nodes", "old nodes - new nodes", both),
        Result("New rate over old", new / old, "ratio", "new rate / old rate", both),
        Result(f"Ratio at which {fewer} nodes suffice", enough, "ratio", why, both),
    )
    before = Input("old_rate", old, "output tokens/s per node", state, "given")
    return Plan(
        kind="plan_fleet",
        title=f"{count_of(nodes_before, 'node')} replaced by faster ones",
        inputs=(Input("old_nodes", nodes_before, "nodes", "given", "given"), before, *supply.throughput.inputs),
        results=results,
        tables=(),
        notes=supply.throughput.notes,
    )


def _curve_file(path: Path, shipped: dict[str, _CurveEntry]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not path.exists():
        fix = suggestion(str(path), shipped, f"shipped curves are {', '.join(shipped)}")
        raise UsageError(f"{path}: no such curve or file; {fix}")
    try:
        text, _ = read_text(path, LARGEST_FILE_BYTES)
        rows = list(csv.reader(io.StringIO(text)))
    except (UnreadableError, csv.Error) as error:
        raise UsageError(f"{path}: cannot be read as CSV: {error}") from None
    return parse_curve([row for row in rows if row and not row[0].startswith("#")], str(path))


def _in_work(demand: Curve, profile: Profile | None) -> tuple[tuple[float, ...], str]:
    """Work per second at each level, and a note on how it follows from a demand in users."""
    if demand.unit == "output-tokens":
        return demand.levels, ""
    if profile is None:
        raise UsageError(f"--unit {demand.unit} needs a workload profile; pass --profile")
    if demand.unit == "interactions":
        return demand.levels, ""
    pause = profile.pause_seconds
    note = f"Each user starts an interaction every {precise(pause)} s, and reads answers while they stream."
    return tuple(interactions_of_users(level, pause) for level in demand.levels), note


def _node_share(supply: Supply) -> float:
    """The share of the throughput that one node produces."""
    throughput, per_node = supply.throughput, supply.accelerators_per_node
    for flag, count in (("--accelerators-per-node", per_node), ("--nodes-per-rack", supply.nodes_per_rack)):
        if count is not None:
            check_count(flag, count, 1, MOST_NODES)
    known = throughput.accelerators
    if (
        per_node is not None
        and known is not None
        and ((throughput.scope == "node" and per_node != known) or (throughput.scope == "rack" and per_node > known))
    ):
        raise UsageError(
            f"--accelerators-per-node {per_node}: the rate is of a {throughput.scope} of {known} accelerators"
        )
    if throughput.scope == "node":
        return 1.0
    if per_node is None or known is None:
        raise UsageError(
            f"the rate is per {throughput.scope}; for one node pass --accelerators and --accelerators-per-node"
        )
    return per_node / known


def _class(
    name: str,
    supply: Supply,
    profile: Profile | None,
    assumptions: Assumptions,
    factors: Sequence[Input],
) -> tuple[SupplyClass, State, tuple[Input, ...]]:
    throughput, share = supply.throughput, _node_share(supply)
    per_node = supply.accelerators_per_node or throughput.accelerators
    if per_node is None:
        raise UsageError(f"accelerators per node of the {name} class unknown; pass --accelerators-per-node")
    derated = derating(throughput, assumptions, factors)
    prefix = "" if name == "base" else f"{name}_"
    own = [replace(one, name=f"{prefix}{one.name}") for one in throughput.inputs]
    factors = [replace(one, name=f"{prefix}{one.name}") if one.name == SCHEDULED else one for one in derated.factors]
    states, inputs = [derated.state], [*own, *factors]
    rate = derated.planning * share
    if profile is not None:
        priced = price(throughput, assumptions)
        served = Served(profile, throughput, priced, derated, assumptions)
        rate = served.planning * share
        states.append(served.state)
        inputs += priced.inputs
    inputs += [Input(f"{name}_accelerators_per_node", per_node, "accelerators", "given", throughput.source)]
    dollars, priced_inputs = _price(name, supply, assumptions)
    node_dollars = None if dollars is None else dollars * per_node
    built = SupplyClass(name, rate, per_node, node_dollars, supply.nodes_per_rack, supply.whole_racks)
    return built, weakest(states), (*inputs, *priced_inputs)


def _price(name: str, supply: Supply, assumptions: Assumptions) -> tuple[float | None, tuple[Input, ...]]:
    """Dollars per accelerator hour: of the base as ``plan cost`` computes it, of burst nodes as rented on demand."""
    if name == "burst":
        return assumptions[BURST_PRICE], assumptions.inputs([BURST_PRICE])
    found = accelerator_hour(supply.system, assumptions) if supply.system else None
    if found is None:
        return None, ()
    dollars, state, inputs = found
    source = "system $/h of plan cost / accelerators, at mean utilisation"
    return dollars, (Input("base_price", dollars, "$/(accelerator hour)", state, source), *inputs)


def _results(
    peak: float,
    unit: str,
    base: SupplyClass,
    sized: Size,
    spare_domains: int,
    domain: str,
    state: State,
    ceiling: float,
) -> list[Result]:
    per_node = f"{significant(base.rate_per_node)} {unit} per node"
    spares = f"for {domain}s that may fail without loss (--spare){', and to whole racks' if base.whole_racks else ''}"
    extra = "Spare nodes"
    if base.whole_racks and not spare_domains:
        extra, spares = "Nodes that fill the rack", "to whole racks; none is spare (--spare 0)"
    results = [
        Result("Nodes", sized.nodes, "nodes", "serving nodes + spare nodes", state),
        Result("Serving nodes", sized.serving_nodes, "nodes", f"ceiling(peak demand / {per_node})", state),
        Result("Before rounding up", sized.exact_nodes, "nodes", f"peak demand / {per_node}", state),
        Result(extra, sized.spare_nodes, "nodes", spares, state),
        Result("Accelerators", sized.accelerators, "accelerators", "nodes x accelerators per node", state),
    ]
    if sized.racks is not None:
        formula = f"ceiling(nodes / {base.nodes_per_rack} nodes per rack)"
        at = 0 if base.whole_racks else len(results)  # what is sold as a rack is answered in racks
        results.insert(at, Result("Racks", sized.racks, "racks", formula, state))
    lost = base.nodes_per_rack if domain == "rack" and base.nodes_per_rack else 1
    sustained = sized.serving_nodes * base.rate_per_node / ceiling
    headroom = 1 - peak / sustained if sustained else None
    formula = "1 - peak demand / rate of the serving nodes within the latency limits"
    results.append(Result("Headroom at the peak", headroom, "share", formula, state))
    left = max(0, sized.nodes - lost) / sized.nodes if sized.nodes else None
    formula = f"(nodes - {lost}) / nodes"
    results.append(Result(f"Capacity left after losing a {domain}", left, "share", formula, state))
    formula = "nodes x accelerators x price per accelerator hour" if base.dollars_per_node_hour else UNPRICED
    results.append(Result("Price", base.price(sized.nodes), "$/h", formula, state))
    return results


def _curve(demand: Curve, levels: Sequence[float], base: SupplyClass) -> Table:
    rows = [
        {"hour": hour, f"demand_{demand.unit.replace('-', '_')}": level, "nodes": nodes_for(work, base.rate_per_node)}
        for hour, level, work in zip(demand.hours, demand.levels, levels, strict=True)
    ]
    return Table(
        "curve", f"Demand over the cycle, in {UNITS[demand.unit]}", tuple(rows), "serving nodes, without spares"
    )
