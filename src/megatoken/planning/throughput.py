"""What a plan starts from: a rate with its unit, scope and state, out of a run folder or as a bare number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions
from megatoken.planning.figures import Input, State

if TYPE_CHECKING:
    from megatoken.results import Run

Scope = Literal["accelerator", "node", "rack", "system"]
Counted = Literal["output", "total"]

_Choice = TypeVar("_Choice")

MIX = "benchmark_input_tokens_per_output_token"


@dataclass(frozen=True, slots=True)
class Throughput:
    """A rate of output tokens at which all requests were of one mix.

    ``accelerators`` is what produces the rate, None where nobody says. ``input_tokens_per_output_token`` is the mix of
    requests it was reached with. ``scenario`` is offline, server, interactive or None.
    """

    output_tokens_per_second: float
    scope: Scope
    accelerators: int | None
    accelerator: str | None
    input_tokens_per_output_token: float
    scenario: str | None
    inputs: tuple[Input, ...]
    state: State
    source: str
    mix_state: State
    notes: tuple[str, ...] = ()

    @property
    def total_tokens_per_second(self) -> float:
        """Input and output tokens together."""
        return self.output_tokens_per_second * (1 + self.input_tokens_per_output_token)

    @property
    def label(self) -> str:
        """What the rate is of, for titles."""
        count = f", {self.accelerators} accelerators" if self.accelerators and self.scope != "accelerator" else ""
        return f"{self.output_tokens_per_second:,.1f} output tokens/s per {self.scope}{count} ({self.state})"


def from_number(
    tokens_per_second: float,
    *,
    scope: str,
    counted: str = "output",
    accelerators: int | None = None,
    accelerator: str | None = None,
    scenario: str | None = None,
    state: str = "unverified",
    source: str = "given on the command line",
    input_tokens_per_output_token: float | None = None,
    assumptions: Assumptions,
) -> Throughput:
    """A published or otherwise known rate.

    Args:
        tokens_per_second: the number.
        scope: what it is the rate of: accelerator, node, rack or system.
        counted: output, or total when input tokens were counted too.
        accelerators: how many produce it.
        accelerator: their name, as in ``gpu_specs.csv``.
        scenario: offline, server or interactive, if known; server and interactive rates already respect latencies.
        state: how far it can be trusted.
        source: where it is from.
        input_tokens_per_output_token: mix of the requests it was reached with; None: the assumption.
        assumptions: for that mix.

    Raises:
        UsageError: a number, scope, unit or state that is none.
    """
    _positive("the rate", tokens_per_second)
    checked_scope: Scope = _choice("scope", scope, get_args(Scope))
    checked_counted: Counted = _choice("counted tokens", counted, get_args(Counted))
    checked_state: State = _choice("state", state, get_args(State))
    if scenario is not None:
        _choice("scenario", scenario, ("offline", "server", "interactive"))
    if accelerators is not None and accelerators < 1:
        raise UsageError(f"accelerators is {accelerators}; give how many produce the rate")
    if checked_scope == "accelerator":
        if accelerators not in (None, 1):
            raise UsageError(
                f"a rate per accelerator is the rate of 1, not of {accelerators}; or is its scope another?"
            )
        accelerators = 1
    if input_tokens_per_output_token is None:
        mix, mix_input = assumptions[MIX], assumptions.inputs([MIX])[0]
    else:
        mix = input_tokens_per_output_token
        if not (math.isfinite(mix) and mix >= 0):
            raise UsageError(f"the mix is {mix} input tokens per output token; give a number from 0 on")
        mix_input = Input(MIX, mix, "input tokens / output token", "given", source)
    rate = tokens_per_second / (1 + mix) if checked_counted == "total" else tokens_per_second
    unit = f"{checked_counted} tokens/s per {checked_scope}"
    return Throughput(
        output_tokens_per_second=rate,
        scope=checked_scope,
        accelerators=accelerators,
        accelerator=accelerator,
        input_tokens_per_output_token=mix,
        scenario=scenario,
        inputs=(Input("rate", tokens_per_second, unit, checked_state, source), mix_input),
        state=checked_state,
        source=source,
        mix_state=mix_input.state,
    )


def from_run(run: Run, *, accelerators: int | None = None, accelerator: str | None = None) -> Throughput:
    """The rate over the whole of a run, from its first scheduled time to its last completion.

    Args:
        run: a run folder as read.
        accelerators: how many the run used, where its folder does not say (an engine on CPUs).
        accelerator: their name.

    Raises:
        UsageError: the run completed nothing.
    """
    from megatoken.results.nodes import run_accelerators

    result = run.result
    rate, tokens = result.get("output_tokens_per_second"), result.get("output_tokens") or 0
    if not rate or not tokens:
        raise UsageError(f"{run.path}: no sample was completed, so there is no rate to plan with")
    nodes = len(result.get("nodes") or [None])
    per_node = run_accelerators(run)
    used = accelerators or (per_node * nodes if per_node else None)
    source = f"{run.path} ({run.verdict})"
    mix = result["input_tokens"] / tokens
    notes = [f"{run.path}: {note}" for note in result.get("notes") or ()]
    if run.verdict not in ("MEASURED", "VALID"):
        notes.append(f"{run.path} ended {run.verdict}: the plan is no better than that run")
    return Throughput(
        output_tokens_per_second=rate,
        scope="system" if nodes > 1 else "node",
        accelerators=used,
        accelerator=accelerator or _accelerator_name(run),
        input_tokens_per_output_token=mix,
        scenario=result.get("scenario"),
        inputs=(
            Input("rate", rate, "output tokens/s, whole run", "measured", source),
            Input(MIX, mix, "input tokens / output token", "measured", source),
        ),
        state="measured",
        source=source,
        mix_state="measured",
        notes=tuple(notes),
    )


def _accelerator_name(run: Run) -> str | None:
    gpus = run.environment.get("gpus") or []
    return gpus[0].get("name") if gpus and isinstance(gpus[0], dict) else None


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{name} is {value}; give a number above 0")


def _choice(name: str, value: str, known: tuple[_Choice, ...]) -> _Choice:
    for one in known:
        if one == value:
            return one
    raise UsageError(f"{name} is '{value}'; it must be one of {', '.join(map(str, known))}")
