"""Pages of what the commands really make: the published values stand on them."""

import io
import re

import pytest
from pages import parsed, table_rows, words
from rich.console import Console

from megatoken.analysis.comparison import compare
from megatoken.analysis.entries import accelerator_entry, published_entry
from megatoken.analysis.published import published_result
from megatoken.audit import audit
from megatoken.planning import commands
from megatoken.planning.assumptions import load_assumptions
from megatoken.report.console import show
from megatoken.report.documents import checked
from megatoken.report.page import page
from megatoken.report.views import document_view
from published import published_logs

RACK = commands.Rate(
    tokens_per_second=1_100_948.3,
    per="rack",
    accelerators=72,
    accelerator="NVIDIA GB300",
    state="unverified",
    source="vendor blog",
)


def page_of(document):
    return parsed(page(document_view(checked(document.to_document()))))


def captions(root) -> list[str]:
    return [words(figure.find("figcaption")) for figure in root.iter("figure")]


def test_capacity_prints_the_four_published_rates_beside_what_they_hide():
    root = page_of(commands.capacity(RACK, commands.Common()))
    rows = table_rows(root, "Interactions per second at the peak rate, counted in five ways, and at the planning rate")
    assert rows["Document rounded, interactions/s"] == ["1,690", "440", "440", "110"]
    assert len(rows) > 5


def test_efficiency_is_recomputed_and_nameplate_looks_unlike_measured():
    root = page_of(commands.energy(RACK, commands.Common(), commands.PowerFlags()))
    chart = next(f for f in root.iter("figure") if words(f.find("figcaption")).startswith("Published rates over power"))
    values = [words(text) for text in chart.iter("text") if text.get("class") == "value"]
    assert {"4.375", "10.01", "10.92", "9.894", "12.86"} <= set(values)
    styles = dict(zip(values, (rect.get("class") for rect in chart.iter("rect")), strict=True))
    assert styles["9.894"] == "bar" and styles["12.86"] == "bar outlined"


def test_cost_has_waterfall_tornado_and_only_sourced_assumptions():
    root = page_of(commands.cost(RACK, commands.Common(), commands.PowerFlags()))
    assert captions(root)[0].startswith("Cost of a million output tokens")
    assert captions(root)[1].startswith("Sensitivity: Cost per million output tokens")
    inputs = table_rows(root, "Inputs")
    assumed = [name for name, cells in inputs.items() if cells and cells[3] == "! assumed"]
    shipped = {f"{name}{' '.join(one.source.split())}" for name, one in load_assumptions().entries.items()}
    of_the_part = ("model", "precision", "system_price_dollars_per_accelerator")  # named, or from its own price list
    others = {name for name in assumed if not name.startswith(of_the_part)}
    assert len(others) > 10 and others <= shipped  # each beside its source
    assert not {*of_the_part} & {*assumed}  # these have a source too
    assert next(cells for name, cells in inputs.items() if name.startswith("pue"))[1] == "1.1 … 1.6"
    assert len(root.findall(".//figure[2]/svg/rect")) == 20  # two ends of the ten widest


def test_a_fleet_for_a_curve_of_demand_is_drawn():
    flags = commands.FleetFlags(demand=5000, curve="office_day", accelerators_per_node=4, nodes_per_rack=18)
    root = page_of(commands.fleet(RACK, commands.Common(profile=["agent"]), flags))
    assert captions(root) == ["Nodes needed for the demand nodes"]


def test_generations_side_by_side_are_verified_and_divisions_kept_apart():
    generations = ("H100", "H200", "B200", "GB200", "MI355X")
    entries = [accelerator_entry(name, "llama2-70b-99", "Offline") for name in generations[:-1]]
    entries.append(published_entry(published_result("5.1-0098", "llama2-70b-99", "Offline")))  # open division
    root = page_of(compare(entries))
    chart = next(figure for figure in root.iter("figure") if words(figure.find("figcaption")).startswith("Per GPU"))
    names = [words(text) for text in chart.iter("text") if text.get("class") == "name"]
    assert all(generation in name for generation, name in zip(generations, names, strict=True))
    (pair, cells), *_ = [row for row in table_rows(root, "Ratios").items() if row[0].startswith("5.1-0098")]
    assert "✕ not like for like" in cells[0] and "division: open vs closed" in pair


def test_the_audit_of_the_published_logs_fits_a_page_with_its_acceptance_values():
    document = audit(published_logs()).to_document()
    html = page(document_view(checked(document)))
    assert len(html.encode()) < 1_000_000
    root = parsed(html)
    text = words(root)
    for value in ("1,100,948.3", "62,803.9", "57,599.1", "61,163.8", "62,111.7", "8.287 %", "3.052 %", "1,030,087.6"):
        assert value in text
    assert len([path for path in root.iter("path") if path.get("class") == "dot apart"]) == 5


@pytest.mark.parametrize("tokens_per_second", [0.02, 1_100_948.3, 3e9])
@pytest.mark.parametrize("users", [2_000_000, 12_345_678.9])
def test_no_number_has_an_exponent(tokens_per_second, users):
    small = commands.Rate(tokens_per_second=tokens_per_second, per="rack", accelerators=72, accelerator="GB300")
    qa = commands.Common(profile=["simple_qa"])
    demand = commands.FleetFlags(
        demand=users * tokens_per_second / 1e6, unit="users", curve="office_day", accelerators_per_node=4
    )
    plans = [
        commands.capacity(small, commands.Common()),
        commands.fleet(small, qa, demand),
        commands.energy(small, commands.Common(), commands.PowerFlags()),
        commands.cost(small, commands.Common(), commands.PowerFlags()),
    ]
    comparison = compare([accelerator_entry(name, "llama2-70b-99", "Offline") for name in ("H100", "GB200")])
    for document in (*(plan.to_document() for plan in plans), comparison.to_document()):
        printed = io.StringIO()
        show(document, Console(file=printed, width=200))
        for text in (printed.getvalue(), words(parsed(page(document_view(checked(document)))))):
            assert not re.findall(r"\S*\d[eE][-+]\d+\S*", text)


def test_two_million_users_are_written_out():
    plan = commands.fleet(
        RACK,
        commands.Common(profile=["simple_qa"]),
        commands.FleetFlags(demand=2e6, unit="users", curve="office_day", accelerators_per_node=4),
    )
    assert plan.title == "Fleet for a peak of 2,000,000 users"
