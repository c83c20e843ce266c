"""The schema of claims files."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from megatoken.analysis.published import SUBMISSION_ID
from megatoken.claims.units import RATE, parse
from megatoken.yaml_files import Strict, read_strict, refuse_repeated_ids

BASIS_OF = {"gpu": "per_gpu", "node": "per_node", "rack": "per_rack"}  # by scope
USERS = re.compile(r"user|session|agent|conversation|people|person|chat|customer|employee|visitor", re.I)
PER_TIME = re.compile(r"/|\b(per|an?) (second|minute|hour|day|month|year)\b")
SCOPE_OF = {"gpu": "gpu", "accelerator": "gpu", "node": "node", "rack": "rack"}  # by what a unit is per
PER_PART = re.compile(rf"(?:/|\bper )\s*({'|'.join(SCOPE_OF)})s?\b", re.I)

Basis = Literal["total", "per_gpu", "per_node", "per_rack"]
Scope = Literal["gpu", "node", "rack"]
PresentedAs = Literal["measurement", "estimate", "nameplate", "forecast"]
Answered = Literal["holds", "does not hold", "cannot be determined"]


def _like(pattern: str, demand: str) -> AfterValidator:
    """A validator of text with a readable message instead of the pattern."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {demand}")
        return text

    return AfterValidator(check)


Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
Identifier = Annotated[str, _like(r"[A-Za-z][A-Za-z0-9_.-]*", "a letter, then letters, digits, '.', '_' and '-'")]
InputName = Annotated[str, _like(r"[a-z][a-z0-9_]*", "a small letter, then small letters, digits and '_'")]
PublishedRow = Annotated[str, _like(SUBMISSION_ID.pattern + ":[^:]+:[^:]+", "like 5.1-0008:llama2-70b-99:Offline")]


class Input(Strict):
    """A number that a formula uses, and its source."""

    value: float
    unit: str = ""
    source: str | None = None
    state: Literal["measured", "verified", "unverified", "estimate", "nameplate", "assumed"] = "unverified"
    accelerator: str | None = Field(None, description="with unit W: the GPUs that draw this power")
    accelerators: Count | None = None


class Side(Strict):
    """One side of a ratio: a stated value, a published row (``id:benchmark:scenario``) or the audited artefacts."""

    name: str
    value: Positive | None = None
    published: PublishedRow | None = None
    evidence: Literal[True] | None = None
    source: str | None = None
    state: Literal["verified", "unverified", "measured", "estimate", "projection"] = "unverified"
    division: str | None = None
    scenario: str | None = None
    model: str | None = None
    precision: str | None = None
    accelerator: str | None = None
    accelerators: Count | None = None
    nodes: Count | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if [self.value, self.published, self.evidence].count(None) != 2:
            raise ValueError("needs exactly one of value, published and evidence: true")
        return self


class RatioClaim(Strict):
    """``of`` divided by ``to``; ``other_baselines`` are reported and do not decide."""

    of: Side
    to: Side
    basis: Basis | None = Field(None, description="default: the basis of the scope")
    other_baselines: list[Side] = []


class Claim(Strict):
    """One claim: a value with unit and scope, and how to recompute it."""

    id: Identifier
    text: Annotated[str, Field(min_length=1)]
    source: str | None = None
    value: bool | float | str
    unit: str = ""
    scope: Scope | None = None
    one_run: bool = Field(False, description="the text says that one run had this rate")
    presented_as: PresentedAs = "measurement"
    relation: Literal["equal", "at least", "at most"] = "equal"
    rounded_to: Positive | None = Field(None, description="step to which the value is rounded; default: its last digit")
    accelerators: Count | None = Field(None, description="number of accelerators that the value covers")
    formula: str | dict[str, str] | None = Field(None, description="one formula, or several definitions by name")
    inputs: dict[InputName, Input] = {}
    ratio: RatioClaim | None = None
    settle: list[str] = Field([], description="evidence that would settle it")

    @model_validator(mode="after")
    def _something_to_recompute(self) -> Self:
        if isinstance(self.value, str) and re.fullmatch(r"[\d.,_]*\d", self.value):
            raise ValueError(f"value {self.value!r} is text; write the number without quotes, commas and underscores")
        if self.rounded_to is not None and isinstance(self.value, float) and self.rounded_to > (abs(self.value) or 1):
            raise ValueError(
                f"rounded_to {self.rounded_to:g} is more than the value {self.value:g}, so any number would agree; "
                "give the step of its last certain digit"
            )
        if self.scope and (of := PER_PART.search(self.unit)) and SCOPE_OF[of[1].lower()] != self.scope:
            raise ValueError(f"unit {self.unit} is of a {of[1]}, and scope is {self.scope}; correct one of them")
        if self.formula is not None and self.ratio is not None:
            raise ValueError("has formula and ratio; give one of them")
        if self.formula in ("", {}):
            raise ValueError("formula is empty")
        if self.ratio is not None and not self.is_number:
            raise ValueError("value must be a number, because the claim is a ratio")
        if self.formula is None and self.ratio is None and not self.is_plain_rate and not self.settle:
            fix = "give formula or ratio, a value in tokens/s with scope, or the missing evidence under settle"
            raise ValueError(f"nothing to recompute: {fix}")
        return self

    @property
    def is_number(self) -> bool:
        """Whether the value is a number."""
        return isinstance(self.value, float)

    @property
    def is_plain_rate(self) -> bool:
        """Whether unit and scope are enough to recompute the value."""
        return self.is_number and self.tokens_per_second is not None and self.scope is not None

    @property
    def tokens_per_second(self) -> float | None:
        """How many tokens/s one of the unit is: a million for M tokens/s; None if it is no unit of a rate of tokens."""
        unit = parse(self.unit)
        return unit.scale if unit and unit.dimensions == RATE else None

    @property
    def counts_users(self) -> bool:
        """Whether the unit counts users or agents at one time; ``users/s`` is a rate."""
        return bool(USERS.search(self.unit)) and not PER_TIME.search(self.unit)

    @property
    def tolerance(self) -> float:
        """Half a step of the last written digit, or of ``rounded_to``."""
        if self.rounded_to is not None:
            return self.rounded_to / 2
        if not isinstance(self.value, float) or self.value.is_integer():
            return 0.5
        return 0.5 * 10.0 ** int(Decimal(repr(self.value)).as_tuple().exponent)


class ClaimsFile(Strict):
    """Claims of one source."""

    schema_version: Literal[1] = 1
    title: str
    source: str
    runs: str | None = Field(None, description="pattern of run folders, if the artefacts contain several results")
    claims: list[Claim] = Field(min_length=1)

    @model_validator(mode="after")
    def _own_names(self) -> Self:
        refuse_repeated_ids([claim.id for claim in self.claims], "claims")
        return self


def load_claims(path: Path) -> ClaimsFile:
    """Read a claims file. Raises ConfigError, with file and line, if it cannot be read or does not fit the schema."""
    return read_strict(path, ClaimsFile)
