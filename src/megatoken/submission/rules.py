"""The rules of MLCommons' submission checker, by the checks that test them: ``data/submission_rules.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

from megatoken.yaml_files import Strict, load_yaml

# Checks of an audit that repeat another check of the table, or that no rule is about.
COVERED = frozenset(
    {
        *("log.present", "accuracy.evidence", "accuracy.truncated", "accuracy.scores", "accuracy.hash"),
        *("submission.compliance", "submission.scenario_name", "rules.one_round", "rules.whole_passes"),
    }
)


class Rule(Strict):
    """One rule; ``submission_rules.yaml`` explains the fields."""

    id: str
    title: str
    fix: str
    source: str
    closed: list[Literal[5, 6]]
    open: list[Literal[5, 6]]
    ours: list[Literal["closed", "open"]] = []

    def by_mlcommons(self, division: str, version: int) -> bool:
        """Whether this version of MLCommons' checker refuses for the rule."""
        return version in (self.open if division == "open" else self.closed)

    def by_us(self, division: str) -> bool:
        """Whether we refuse for the rule even if MLCommons' checker does not."""
        return ("open" if division == "open" else "closed") in self.ours


@cache
def rules() -> Mapping[str, Rule]:
    """The rules by check."""
    text = files("megatoken").joinpath("data", "submission_rules.yaml").read_text(encoding="utf-8")
    return {check: Rule.model_validate(entry) for check, entry in load_yaml(text).items()}
