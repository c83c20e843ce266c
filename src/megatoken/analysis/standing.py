"""What published results say about another rate: verified rows of the same work, and answers shorter than usual."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatoken.analysis.published import (
    PublishedResult,
    accelerator_facts,
    model_of,
    published_results,
    reference_tokens_per_sample,
)
from megatoken.text import count_of, exact, precise

MOST_ROWS = 3
NOTICEABLE = 0.01  # of the reference's mean answer


def verified_rows(model: str, scenario: str, accelerator: str, accelerators: int) -> list[PublishedResult]:
    """Closed rows in tokens/s of the same work: model, scenario, accelerator and number of them; fastest first.

    One row of each submission: both accuracy targets usually share one run.
    """
    return _fastest(_same_hardware(scenario, accelerator, accelerators, lambda row: model_of(row.benchmark) == model))


def verified_standing(
    model: str | None, scenario: str | None, accelerator: str | None, accelerators: int | None, tokens_per_second: float
) -> str | None:
    """A sentence: which verified rows exist for the same work, and what they change about a rate.

    None if model, scenario, accelerator or their number are not known.
    """
    facts = accelerator_facts(accelerator)
    if not (model and scenario and facts and accelerators):
        return None
    model = model_of(model)
    work = f"{model} {scenario} on {accelerators} {facts.name}"
    rows = verified_rows(model, scenario, facts.name, accelerators)
    if not rows:
        return f"no verified closed row exists for the same work ({work}); that does not make the rate wrong"
    over = (rows[0].output_tokens_per_second or 0.0) / tokens_per_second - 1
    change = f"{precise(abs(100 * over))} % {'above' if over > 0 else 'below'} these {precise(tokens_per_second)}"
    found = [
        f"{count_of(len(rows), 'verified closed row')} for the same work ({work}):"
        f" {', '.join(map(_short, rows[:MOST_ROWS]))}",
        f"the fastest is {change}, which {'is no longer a record' if over > 0 else 'no verified row reaches'}",
    ]
    best = _fastest(_same_hardware(scenario, facts.name, accelerators, lambda row: True))[0]
    if model_of(best.benchmark) != model:
        found.append(f"the highest of any model on them is {_short(best)} of {model_of(best.benchmark)}")
    return "; ".join(found)


def answer_length(benchmark: str | None, tokens_per_sample: float | None) -> str | None:
    """A sentence if the mean answer differs from the reference's by 1 % or more; None if not, or not known.

    Within the 10 % that a round allows, shorter answers raise samples/s at the same tokens/s.
    """
    reference = reference_tokens_per_sample().get(benchmark or "")
    if not reference or not tokens_per_sample or abs(tokens_per_sample / reference - 1) < NOTICEABLE:
        return None
    share = tokens_per_sample / reference - 1
    longer, higher = ("longer", "lower") if share > 0 else ("shorter", "higher")
    return (
        f"answers {abs(share):.1%} {longer} than the reference's ({precise(tokens_per_sample)} of {exact(reference)}"
        f" tokens a sample), so samples/s looks {abs(1 / (1 + share) - 1):.1%} {higher} than tokens/s does"
    ).replace("%", " %")


def _same_hardware(
    scenario: str, accelerator: str, accelerators: int, chosen: Callable[[PublishedResult], bool]
) -> Iterable[PublishedResult]:
    return (
        row
        for row in published_results()
        if row.division == "closed" and row.scenario.lower() == scenario.lower()
        if row.accelerators == accelerators and row.output_tokens_per_second and chosen(row)
        if (facts := accelerator_facts(row.accelerator)) and facts.name == accelerator
    )


def _fastest(rows: Iterable[PublishedResult]) -> list[PublishedResult]:
    by_rate = sorted(rows, key=lambda row: -(row.output_tokens_per_second or 0.0))
    first = {(row.id, model_of(row.benchmark)): row for row in reversed(by_rate)}
    return [row for row in by_rate if first[row.id, model_of(row.benchmark)] is row]


def _short(row: PublishedResult) -> str:
    return f"{exact(row.output_tokens_per_second or 0.0)} tokens/s ({row.round}, {row.submitter})"
