"""From runs to figures and to the text that is printed. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OWN = "megatoken"
BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4}
# Above this share of the processor taken by other processes, figures are not worth comparing.
QUIET_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """One engine through all requests once, in a process of its own.

    ``timed_seconds`` runs from the submission of all requests to the last token; ``startup_seconds`` from the start of
    the process to an engine ready for requests.
    """

    engine: str
    version: str
    settings: Mapping[str, str | int | float | bool]
    output_tokens_per_second: float
    timed_seconds: float
    startup_seconds: float
    peak_memory_bytes: int
    processor_share_of_others: float | None
    token_ids: list[list[int]] = field(repr=False)


def wrong_lengths(token_ids: Sequence[Sequence[int]], output_lengths: Sequence[int]) -> str | None:
    """Say which request got another number of tokens than it asked for; None when all are right."""
    if len(token_ids) != len(output_lengths):
        return f"{len(token_ids)} answers to {len(output_lengths)} requests"
    for index, (ids, length) in enumerate(zip(token_ids, output_lengths, strict=True)):
        if len(ids) != length:
            return f"request {index} got {len(ids)} token{'s' * (len(ids) != 1)} instead of {length}"
    return None


def equal_tokens(own: Sequence[Sequence[int]], peer: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Share of positions with the same token, and the number of requests equal throughout.

    Greedy continuations that part at a near-tie stay apart, so one differing logit can cost a whole tail.
    """
    pairs = list(zip(own, peer, strict=True))
    equal = sum(left == right for ids in pairs for left, right in zip(*ids, strict=True))
    return equal / sum(map(len, own)), sum(list(left) == list(right) for left, right in pairs)


def memory_bound_bytes(parameters: int, precision: str) -> int:
    """What the engine may use at most: 1.5 times its weights and 300 MB."""
    return int(1.5 * parameters * BYTES_PER_WEIGHT[precision]) + 300_000_000


def summarise(runs: Sequence[Run], peer: str, parameters: int, precision: str) -> dict[str, Any]:
    """All figures of a comparison, ready for JSON; the runs' tokens are compared and left out."""
    own_runs, peer_runs = ([run for run in runs if run.engine == name] for name in (OWN, peer))
    own, other = _engine(own_runs), _engine(peer_runs)
    own_rates, peer_rates = ([run.output_tokens_per_second for run in group] for group in (own_runs, peer_runs))
    share, whole = equal_tokens(own_runs[0].token_ids, peer_runs[0].token_ids)
    return {
        "ratio": own["mean_output_tokens_per_second"] / other["mean_output_tokens_per_second"],
        "ratio_lowest": min(own_rates) / max(peer_rates),
        "ratio_highest": max(own_rates) / min(peer_rates),
        "memory_bound_bytes": memory_bound_bytes(parameters, precision),
        "within_memory_bound": own["peak_memory_bytes"] <= memory_bound_bytes(parameters, precision),
        "equal_tokens_share": share,
        "equal_requests": whole,
        "engines": {OWN: own, peer: other},
        "runs": [_without_tokens(run) for run in runs],
    }


def report(title: str, figures: Mapping[str, Any]) -> str:
    """The figures of ``summarise`` as text."""
    lines = [
        title,
        "",
        f"{'run':<22}{'output tokens/s':>16}{'timed s':>9}{'start-up s':>12}{'peak MB':>9}{'CPU of others':>15}",
    ]
    for run in figures["runs"]:
        others = run["processor_share_of_others"]
        lines.append(
            f"{run['engine']:<22}{run['output_tokens_per_second']:>16,.1f}{run['timed_seconds']:>9.2f}"
            f"{run['startup_seconds']:>12.1f}{run['peak_memory_bytes'] / 1e6:>9,.0f}"
            f"{'unknown' if others is None else f'{others:.1%}':>15}"
        )
    lines.append("")
    for name, engine in figures["engines"].items():
        lines.append(
            f"{name} {engine['version']}: mean {engine['mean_output_tokens_per_second']:,.1f} output tokens/s, "
            f"spread {engine['spread']:.1%}"
        )
        lines.append("  " + ", ".join(f"{key}={value}" for key, value in engine["settings"].items()))
    own, peer = figures["engines"].values()
    lines += [
        "",
        f"ratio {' / '.join(figures['engines'])}: {figures['ratio']:.2f} "
        f"(lowest {figures['ratio_lowest']:.2f}, highest {figures['ratio_highest']:.2f})",
        f"peak memory {own['peak_memory_bytes'] / 1e6:,.0f} MB against {peer['peak_memory_bytes'] / 1e6:,.0f} MB; "
        f"1.5 x weights + 300 MB is {figures['memory_bound_bytes'] / 1e6:,.0f} MB: "
        f"{'within' if figures['within_memory_bound'] else 'ABOVE'}",
        f"greedy tokens equal to the peer's: {figures['equal_tokens_share']:.1%}, {figures['equal_requests']} requests "
        "from end to end (informational: roundings differ)",
    ]
    disturbed = [run["processor_share_of_others"] or 0.0 for run in figures["runs"]]
    if max(disturbed) > QUIET_SHARE:
        lines.append(
            f"NOT COMPARABLE: others took up to {max(disturbed):.0%} of the processor; repeat when it is quiet"
        )
    return "\n".join(lines)


def _engine(runs: Sequence[Run]) -> dict[str, Any]:
    rates = [run.output_tokens_per_second for run in runs]
    mean = sum(rates) / len(rates)
    return {
        "version": runs[0].version,
        "settings": dict(runs[0].settings),
        "mean_output_tokens_per_second": mean,
        "spread": (max(rates) - min(rates)) / mean,
        "peak_memory_bytes": max(run.peak_memory_bytes for run in runs),
        "startup_seconds": min(run.startup_seconds for run in runs),
    }


def _without_tokens(run: Run) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name not in ("token_ids", "settings", "version")}
