"""The prompts of a step while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatoken.engine.fair_share import Group, Waiting
from megatoken.engine.page_forecast import PageForecast


@dataclass(slots=True)
class Chunks:
    """Prompts computed in part, then those that the step starts."""

    start: list[int]  # tokens of each that are in the cache
    given: list[int]  # tokens that each gets in the step
    unfinished: dict[Group, tuple[int, int]]  # by group: place of its prompt that lacks tokens, ascending; how many
    spare_pages: int
    most_started: int
    slots: list[int] = field(default_factory=list)  # of those that it starts
    started: list[Waiting] = field(default_factory=list)
    forecast: PageForecast | None = None
    heavy_tokens: int | None = None  # as in StepPlan
