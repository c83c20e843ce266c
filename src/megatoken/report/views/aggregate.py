"""Many nodes as one result: three rates, how the nodes differ, what remains without one of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatoken.report.bars import Dot, dot_chart
from megatoken.report.blocks import Column, Figure, Headline, Points, Section, Table, View, section
from megatoken.report.curves import distribution_chart
from megatoken.report.documents import Document
from megatoken.report.views.common import facts_table, records_table, view
from megatoken.text import ABSENT, count_of, precise

SUM = "sum_of_rates_tokens_per_second"
MANY_NODES = 40
REFERENCES = {"mean_tokens_per_second": "mean", "median_tokens_per_second": "median"}
TOGETHER = (
    *("accelerators", "output_tokens", "output_tokens_per_second_per_accelerator", "baseline_tokens_per_second"),
    "scaling_efficiency",
)


def aggregate_view(document: Document) -> View:
    """The report on ``megatoken aggregate``."""
    nodes, accelerators = len(document.parts("nodes")), document.number("accelerators")
    size = f"{count_of(nodes, 'node')}" + (
        f", {precise(accelerators)} accelerator{'s' * (accelerators != 1)}" if accelerators else ""
    )
    label = document.text("sum_label", "sum of the node rates")
    summary = (Headline(precise(document.number(SUM)), "output tokens/s", f"{label} · {size}"),)
    return view(document, "aggregate", summary, aggregate_sections(document))


def aggregate_sections(document: Document) -> tuple[Section, ...]:
    """Sections about the nodes of an aggregate; empty ones where the document has none."""
    nodes, losses = document.parts("nodes"), document.parts("without_fault_domain")
    own_domains = all(node.text("fault_domain") == node.text("node") for node in nodes)
    own_losses = all(loss.texts("nodes_lost") == [loss.text("fault_domain")] for loss in losses)
    return (
        section("Three rates", _rates(document), _simultaneity(document)),
        section("Nodes", *node_figures(nodes, document), _spread(document), _together(document)),
        section(
            "Every node",
            records_table("Nodes", nodes, without=("source", "fault_domain") if own_domains else ("source",)),
        ),
        section(
            "Without one fault domain",
            records_table(
                "Remaining when one is lost and the others continue",
                losses,
                without=("nodes_lost",) if own_losses else (),
            ),
        ),
    )


def node_figures(nodes: list[Document], aggregate: Document) -> Iterator[Figure]:
    """The rates of all nodes, slow ones marked; as a distribution where they are too many for a row each."""
    rated = [
        (node.text("node"), rate, node.text("group") == "slow")
        for node in nodes
        if (rate := node.number("output_tokens_per_second")) is not None
    ]
    if len(rated) < 2:
        return
    marks = [(name, value) for key, name in REFERENCES.items() if (value := aggregate.number(key)) is not None]
    if len(rated) <= MANY_NODES:
        dots = [Dot(name, rate, slow) for name, rate, slow in rated]
        yield dot_chart("Rate of each node", "output tokens/s", dots, marks)
    else:
        rates = np.array([rate for _, rate, _ in rated], dtype=float)
        yield distribution_chart(
            "Rates of the nodes", "tokens/s", [("nodes", rates)], x_label="output tokens/s", from_zero=False
        )


def _rates(document: Document) -> Table:
    total = document.number(SUM)
    rows = []
    if total is not None:
        label = document.text("sum_label", "sum of the nodes' own rates, each over its own time")
        rows.append(("Sum of node rates", precise(total), _of_sum(total, total), label))
    for name, key in (("First start to last end", "makespan"), ("While all were running", "common_window")):
        window = document.part(key)
        if window.values:
            rate = window.number("output_tokens_per_second")
            rows.append((name, precise(rate), _of_sum(rate, total), _basis(window)))
    numbers = (Column("Output", "tokens/s", numeric=True), Column("Of the sum", "%", numeric=True))
    columns = (Column("Rule"), *numbers, Column("Meaning"))
    return Table("The same nodes by three rules", columns, tuple(rows), stacked=True)


def _simultaneity(document: Document) -> Points | None:
    evidence = document.part("evidence_of_simultaneity")
    overlap, most = document.number("overlap_share"), document.number("overlap_share_at_most")
    points = [evidence.text("statement")]
    if overlap is not None:
        points.append(f"All nodes ran at once for {precise(100 * overlap)} % of the time.")
    elif most is not None:
        points.append(f"Started together, they would have shared at most {precise(100 * most)} % of the time.")
    found = tuple(("", point) for point in (*points, *evidence.texts("observations")) if point)
    return Points("Did they run at the same time?", found) if found else None


def _of_sum(rate: float | None, total: float | None) -> str:
    return precise(100 * rate / total) if rate is not None and total else ABSENT


def _basis(window: Document) -> str:
    seconds = window.number("seconds")
    over = f"over {precise(seconds)} s" if seconds is not None else ""
    conditional = "conditional: not shown that they did" if window.flag("conditional") else ""
    return "; ".join(filter(None, (window.text("basis"), over, conditional, window.text("reason"))))


def _spread(document: Document) -> Table:
    rows: list[tuple[str, str]] = []
    for key, name in (("max", "Fastest node"), ("min", "Slowest node")):
        if key in document:
            extreme = document.part(key)
            rate = precise(extreme.number("output_tokens_per_second"))
            rows.append((name, f"{rate} tokens/s ({extreme.text('node')})"))
    for key, name in REFERENCES.items():
        if (value := document.number(key)) is not None:
            rows.append((f"{name.capitalize()} of the nodes", f"{precise(value)} tokens/s"))
    for spread in document.parts("spread"):
        rows.append((f"Spread, {spread.text('formula')}", _percent(spread.number("value"))))
    variation = document.number("coefficient_of_variation")
    if variation is not None:
        formula = document.text("coefficient_of_variation_formula", "standard deviation / mean")
        rows.append((f"Coefficient of variation, {formula}", _percent(variation)))
    rows += _stragglers(document.part("stragglers"))
    return Table("How the nodes differ", (Column("Name"), Column("Value")), tuple(rows), narrow=True)


def _together(document: Document) -> Table:
    facts = {key: document.values[key] for key in TOGETHER if key in document}
    facts |= {key: value for key, value in document.part("workload").values.items() if value is not None}
    return facts_table("All nodes", facts)


def _stragglers(stragglers: Document) -> Iterator[tuple[str, str]]:
    names = ", ".join(stragglers.texts("nodes"))
    if stragglers.values:
        yield f"Stragglers, {stragglers.text('formula')}", names or "none"
    if names and stragglers.flag("separate"):
        gap = precise(stragglers.number("gap_tokens_per_second"))
        yield "Separate group", f"yes: {gap} tokens/s below all others"


def _percent(value: float | None) -> str:
    return f"{precise(100 * value)} %" if value is not None else ABSENT
