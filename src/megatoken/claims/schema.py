"""Claims as YAML: what is claimed, of what scope, presented as what, and what it is said to follow from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from megatoken.errors import UsageError
from megatoken.yaml_files import CoreLoader, not_yaml

LARGEST_FILE_BYTES = 1_000_000
IDENTIFIER = r"^[A-Za-z][A-Za-z0-9_.-]*$"
PUBLISHED = r"^\d+\.\d+-\d{4}:[^:]+:[^:]+$"
RATE_UNITS = ("tokens/s", "token/s", "tok/s")
USER_UNITS = ("user", "session", "agent", "conversation")

Basis = Literal["total", "per_gpu", "per_node", "per_rack"]
Scope = Literal["gpu", "node", "rack"]
PresentedAs = Literal["measurement", "estimate", "nameplate", "forecast"]
Answered = Literal["holds", "does not hold", "cannot be determined"]


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):  # YAML's yes and "1" are numbers to pydantic
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic reports ValueError
    return value


Number = Annotated[float, BeforeValidator(_number)]
Positive = Annotated[float, Field(gt=0), BeforeValidator(_number)]
Count = Annotated[int, Field(gt=0), BeforeValidator(_number)]


class Strict(BaseModel):
    """Unknown keys are refused, numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Input(Strict):
    """A number that a formula uses, with where it comes from."""

    value: Number
    unit: str = ""
    source: str | None = None
    state: Literal["measured", "verified", "unverified", "estimate", "nameplate", "assumed"] = "unverified"
    accelerator: str | None = Field(None, description="with unit W: the GPUs whose power this is")
    accelerators: Count | None = None


class Side(Strict):
    """One side of a ratio: a stated value, a published row (``id:benchmark:scenario``) or the audited artefacts."""

    name: str
    value: Positive | None = None
    published: Annotated[str, Field(pattern=PUBLISHED)] | None = None
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
    """``of`` over ``to``; ``other_baselines`` are shown beside it and do not decide."""

    of: Side
    to: Side
    basis: Basis | None = Field(None, description="by default what the scope says")
    other_baselines: tuple[Side, ...] = ()


class Claim(Strict):
    """One claim: a value with unit and scope, and what it is to be recomputed from."""

    id: Annotated[str, Field(pattern=IDENTIFIER)]
    text: Annotated[str, Field(min_length=1)]
    source: str | None = None
    value: bool | float | str
    unit: str = ""
    scope: Scope | None = None
    presented_as: PresentedAs = "measurement"
    relation: Literal["equal", "at least", "at most"] = "equal"
    rounded_to: Positive | None = Field(None, description="step to which the value is rounded; default: its last digit")
    accelerators: Count | None = Field(None, description="how many the value is said to cover")
    formula: str | dict[str, str] | None = Field(None, description="one, or several definitions by name")
    inputs: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], Input] = {}
    ratio: RatioClaim | None = None
    settle: tuple[str, ...] = Field((), description="evidence that would settle it")

    @model_validator(mode="after")
    def _something_to_recompute(self) -> Self:
        if isinstance(self.value, str) and re.fullmatch(r"[\d.,_]*\d", self.value):
            raise ValueError(f"value {self.value!r} is a text; write the number without quotes, commas and underscores")
        if self.formula is not None and self.ratio is not None:
            raise ValueError("has both formula and ratio; give one of them")
        if self.formula in ("", {}):
            raise ValueError("formula names no definition")
        if self.ratio is not None and not self.is_number:
            raise ValueError("is a ratio, so value must be a number")
        if self.formula is None and self.ratio is None and not self.is_plain_rate and not self.settle:
            raise ValueError(
                "says nothing to recompute: give formula or ratio, or a value in tokens/s with its scope,"
                " or under settle the evidence that would decide it"
            )
        return self

    @property
    def is_number(self) -> bool:
        """Whether the value is a number, not a text or a yes."""
        return isinstance(self.value, float)

    @property
    def is_plain_rate(self) -> bool:
        """Whether unit and scope alone say what to recompute."""
        return self.is_number and self.unit in RATE_UNITS and self.scope is not None

    @property
    def counts_users(self) -> bool:
        """Whether the unit says people or agents present at once; ``users/s`` is a rate."""
        return any(word in self.unit.lower() for word in USER_UNITS) and "/" not in self.unit

    @property
    def tolerance(self) -> float:
        """Half a step of the value as it is written."""
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
    runs: str | None = Field(None, description="pattern of run folders, where the artefacts hold several results")
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _own_names(self) -> Self:
        names = [claim.id for claim in self.claims]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several claims have the id {', '.join(twice)}")
        return self


def load_claims(path: Path) -> ClaimsFile:
    """Read a claims file.

    Raises:
        UsageError: the file cannot be read, is no YAML, or does not fit the schema; one line names place and mend.
    """
    if not path.is_file():  # a pipe would wait for ever
        raise UsageError(f"{path}: no such file; give a file of claims")
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UsageError(f"{path}: larger than {LARGEST_FILE_BYTES:,} bytes; split the claims over several files")
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give a file of claims") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(not_yaml(path, error)) from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply; write fewer levels") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path}: must be a mapping with title, source and claims")
    try:
        return ClaimsFile.model_validate(content)
    except ValidationError as error:
        raise UsageError(f"{path}: {_explain(error, content)}") from error


class _Loader(CoreLoader):
    """Safe YAML without anchors (they can blow up) and without a key that comes twice."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem, mend = "anchors and aliases are not taken", "write the value out"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark, note=mend)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"key {key.value if isinstance(key, yaml.ScalarNode) else '?'} is no text"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark, note="write it in quotes")
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                problem = f"key {key.value!r} comes twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark, note="keep one")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)


_DEMANDS = {  # pydantic's types of errors
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:g}",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "dict_type": "must be a mapping of names to inputs; write NAME: {{value: ...}}",
    "literal_error": "must be {expected}",
    "missing": "is missing; add it",
    "model_type": "must be a mapping of keys to values; write KEY: VALUE",
    "string_too_short": "must not be empty",
    "string_type": "must be a text",
    "too_short": "must not be empty; write at least one",
    "tuple_type": "must be a list; begin each entry with a dash",
}
_OF_SEVERAL_KINDS = {
    "formula": "must be a formula, or definitions by name",
    "value": "must be a finite number, a text, or yes or no",
}
_PATTERNS = {
    "id": "must be a letter, then letters, digits, '.', '_' and '-'",
    "published": "must be like 5.1-0008:llama2-70b-99:Offline",
    "[key]": "a name must be a small letter, then small letters, digits and '_'",
}


def _explain(error: ValidationError, content: dict[str, Any]) -> str:
    """The first thing wrong, where it stands, and for an unknown key the nearest right one."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a typo also leaves its key missing
    location, kind = first["loc"], first["type"]
    if len(location) > 3 and location[2] in _OF_SEVERAL_KINDS:  # pydantic goes on to tell of each
        location, kind = location[:3], "several kinds"
    place = _place(location, content)
    key = next((part for part in reversed(location) if isinstance(part, str)), "claims")
    if kind == "extra_forbidden":
        known = _keys_at(location)
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        mend = f"did you mean {close[0]}?" if close else f"the keys here are {', '.join(known)}"
        return f"{place}unknown key {key!r}; {mend}"
    if kind == "value_error":
        message = first["msg"].removeprefix("Value error, ")
        return place + (f"{key}: {message}" if message.startswith("must") else message)
    if kind in ("several kinds", "string_pattern_mismatch"):
        demand = _OF_SEVERAL_KINDS.get(key) or _PATTERNS[key]
    else:
        demand = _DEMANDS[kind].format(**first.get("ctx", {})) if kind in _DEMANDS else first["msg"].lower()
    subject = "" if key == "[key]" or (place and key == "claims") else f"{key}: "
    return place + subject + demand


def _place(location: tuple[int | str, ...], content: dict[str, Any]) -> str:
    if len(location) < 2 or location[0] != "claims" or not isinstance(location[1], int):
        return ""
    claims = content["claims"]
    claim = claims[location[1]] if isinstance(claims, list) else None
    name = claim.get("id") if isinstance(claim, dict) else None
    inside = [part for part in location[2:-1] if isinstance(part, str)]
    return f"claim {name or location[1] + 1}: " + "".join(f"{part}: " for part in inside)


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    models: dict[str, type[Strict]] = {
        "ratio": RatioClaim,
        "of": Side,
        "to": Side,
        "other_baselines": Side,
        "inputs": Input,
    }
    inside = [models[part] for part in location[:-1] if isinstance(part, str) and part in models]
    model = inside[-1] if inside else Claim if location[0] == "claims" else ClaimsFile
    return list(model.model_fields)
