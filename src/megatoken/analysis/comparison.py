"""Results side by side: per GPU, node and rack, and which ratios compare like with like."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.analysis.lookup import names_of
from megatoken.analysis.machine import Occupation, name_of
from megatoken.analysis.nodes import HASH_SHOWN, data_set_of
from megatoken.analysis.published import accelerator_facts
from megatoken.analysis.standing import verified_standing
from megatoken.errors import UsageError
from megatoken.files import new_document
from megatoken.text import count_of, is_number, precise

BASES = ("total", "per_gpu", "per_node", "per_rack")
CONFIDENCE = 0.95
INTERVAL_METHOD = "95 % confidence, Welch's t on the logarithms of the rates, from repeats of both"
MATCHED = ("division", "state", "verdict", "scenario", "mode", "model", "tokens", "accuracy_target", "precision")
FILES = ("weights", "tokenizer_sha256", "chat_template_sha256")  # they differ with the model
MATCHED_WHERE_KNOWN = (*FILES, "rows_sha256", "formats", "ttft_limit_seconds", "tpot_limit_seconds")
LENGTHS = ("input_tokens_per_sample", "output_tokens_per_sample")
LENGTHS_TOLERANCE = 0.05  # of the shorter
OFFERED_TOLERANCE = 0.01  # of the lower; a shorter run rounds its offered rate
CPU_WAIT_TOLERANCE = 0.1  # of the time, absolute
UNUSABLE = ("INTERRUPTED", "INVALID", "DEGRADED")  # not comparable
LONGER = 2.0
UNSTATED = "not stated"
OF_A_MODEL, MADE_UP_TOKENS = "of a model", "made up"
HASH = re.compile("[0-9a-f]{64}")


_APART = ("software", "occupations", "paths")  # of an entry: not in its row


@dataclass(frozen=True, slots=True)
class Entry:
    """One result to compare, whole system; what is not known is None.

    ``state`` is verified (peer-reviewed), measured (own run), unverified, estimate, projection or claimed.
    ``accelerators`` is None where CPUs computed. ``repeats`` are the rates of equal runs whose mean is the rate.
    ``offered_samples_per_second`` is None where a search found the rate. ``cpu_wait_share`` is the share of the time
    that a run waited for a core, 0 where too small to be noted. ``occupations`` say when its runs had their machines,
    ``shared_with`` with what else those were busy meanwhile.
    """

    name: str
    source: str
    state: str
    output_tokens_per_second: float | None
    round: str | None = None  # of MLPerf, that a published row is of
    division: str | None = None
    scenario: str | None = None
    model: str | None = None
    tokens: str | None = OF_A_MODEL  # or MADE_UP_TOKENS
    accuracy_target: str | None = None
    precision: str | None = None
    accelerator: str | None = None
    accelerators: int | None = None
    nodes: int | None = None
    racks: int | None = None  # where no accelerator count gives it
    verdict: str | None = None
    mode: str | None = None  # performance or accuracy
    weights: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    formats: str | None = None  # of weights, activations and KV cache
    rows_sha256: str | None = None  # of the data set as it was sent
    data_set: str | None = None
    data_set_sha256: str | None = None
    input_tokens_per_sample: float | None = None
    output_tokens_per_sample: float | None = None
    duration_seconds: float | None = None
    ttft_limit_seconds: float | None = None
    tpot_limit_seconds: float | None = None
    limits: str | None = None  # the user's own, judged: MET, or which are not
    offered_samples_per_second: float | None = None
    cpu_wait_share: float | None = None
    shared_with: str | None = None
    occupations: tuple[Occupation, ...] = ()
    paths: tuple[str, ...] = ()  # of run folders
    measured_watts: float | None = None
    repeats: tuple[float, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None

    def data_set_differs_from(self, other: Entry) -> bool:
        """By content if both hashes are known, else by name."""
        if self.data_set_sha256 and other.data_set_sha256:
            return self.data_set_sha256 != other.data_set_sha256
        return self.data_set != other.data_set

    @property
    def accelerators_per_node(self) -> float | None:
        """Mean over the nodes."""
        return self.accelerators / self.nodes if self.accelerators and self.nodes else None

    @property
    def rack_is_measured(self) -> bool:
        """Whether the system is at least one whole rack."""
        rack = self._per_rack_accelerators
        return bool(self.racks or (rack and self.accelerators and self.accelerators >= rack))

    @property
    def _per_rack_accelerators(self) -> int | None:
        facts = accelerator_facts(self.accelerator)
        return facts.per_rack if facts else None

    def rate(self, basis: str) -> float | None:
        """Output tokens per second on one of ``BASES``; None where a count is missing or there is no such rack."""
        per = {
            "total": 1.0,
            "per_gpu": self.accelerators,
            "per_node": self.nodes,
            "per_rack": self.racks
            or (
                self.accelerators / self._per_rack_accelerators
                if self.accelerators and self._per_rack_accelerators
                else None
            ),
        }[basis]
        return None if self.output_tokens_per_second is None or not per else self.output_tokens_per_second / per

    def to_row(self) -> dict[str, Any]:
        """The entry with its rates per GPU, node and rack, and its power: measured, or nameplate of the GPUs alone."""
        facts = accelerator_facts(self.accelerator)
        nameplate = facts.tdp_watts * self.accelerators if facts and facts.tdp_watts and self.accelerators else None
        rate, measured = self.output_tokens_per_second, self.measured_watts
        return {
            **{name: value for name, value in asdict(self).items() if name not in _APART},
            "per_gpu_tokens_per_second": self.rate("per_gpu"),
            "per_node_tokens_per_second": self.rate("per_node"),
            "per_rack_tokens_per_second": self.rate("per_rack"),
            "per_rack_measured": None if self.rate("per_rack") is None else self.rack_is_measured,
            "nameplate_watts": nameplate,
            "measured_over_nameplate": measured / nameplate if measured and nameplate else None,
            "tokens_per_joule_measured": rate / measured if rate and measured else None,
            "tokens_per_joule_nameplate": rate / nameplate if rate and nameplate else None,
            "software": dict(self.software),
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """Why a ratio does not compare like with like."""

    field: str
    of: str
    to: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """``of`` over ``to`` on one basis."""

    of: str
    to: str
    basis: str
    value: float
    interval: tuple[float, float] | None
    like_for_like: bool
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class SoftwareDifference:
    """One setting or version in which two entries differ."""

    of: str
    to: str
    key: str
    of_value: str | None
    to_value: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Entries side by side; every ratio is of a later one to the first."""

    title: str
    inputs: tuple[str, ...]
    notes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    ratios: tuple[Ratio, ...]
    interval_method: str
    software_differences: tuple[SoftwareDifference, ...]

    def to_document(self) -> dict[str, Any]:
        """Plain JSON of the kind ``comparison``."""
        return new_document("comparison", **asdict(self))


def compare(entries: Sequence[Entry], *, title: str = "Comparison") -> Comparison:
    """Compare entries to the first of them that has a rate. Raises UsageError: fewer than two entries."""
    if len(entries) < 2:
        raise UsageError("compare needs at least two results: run folders, folders of logs, published ids or claims")
    basis = next((entry for entry in entries if entry.output_tokens_per_second is not None), entries[0])
    entries = [basis, *(entry for entry in entries if entry is not basis)]
    entries = _contended(_numbered(_named_shortly(entries)))
    baseline, *others = entries
    return Comparison(
        title=title,
        inputs=tuple(path for entry in entries for path in entry.paths or (entry.source,)),
        notes=tuple(_notes(entries)),
        rows=tuple(entry.to_row() for entry in entries),
        ratios=tuple(ratio for entry in others for ratio in ratios(entry, baseline)),
        interval_method=INTERVAL_METHOD,
        software_differences=tuple(one for entry in others for one in software_differences(entry, baseline)),
    )


def ratios(of: Entry, to: Entry) -> list[Ratio]:
    """``of`` over ``to`` on every basis that both have."""
    found = []
    for basis in BASES:
        over, under = of.rate(basis), to.rate(basis)
        if over is not None and under:
            unlike = tuple(differences(of, to, basis))
            found.append(Ratio(of.name, to.name, basis, over / under, _interval(of, to, basis), not unlike, unlike))
    return found


def differences(of: Entry, to: Entry, basis: str) -> list[Difference]:
    """Why a ratio on ``basis`` does not compare like with like; hardware generation and software may differ."""
    pairs = {name: (getattr(of, name), getattr(to, name)) for name in (*MATCHED, *MATCHED_WHERE_KNOWN, *LENGTHS)}
    unlike = [name for name in MATCHED if _comparable(pairs[name][0]) != _comparable(pairs[name][1])]
    if "verdict" not in unlike and of.verdict in UNUSABLE:
        unlike.append("verdict")
    if of.data_set_differs_from(to):
        pairs["data_set"] = (data_set_of(of.data_set, of.data_set_sha256), data_set_of(to.data_set, to.data_set_sha256))
        unlike.append("data_set")
    known = {name: pair for name, pair in pairs.items() if None not in pair}
    if "model" in unlike:
        known = {name: pair for name, pair in known.items() if name not in FILES}
    unlike += [name for name in MATCHED_WHERE_KNOWN if name in known and known[name][0] != known[name][1]]
    unlike += [name for name in LENGTHS if name in known and _lengths_differ(*known[name])]
    found = [Difference(name.replace("_", " "), *map(_shown, pairs[name])) for name in unlike]
    offered, waits = (
        [getattr(one, name) for one in (of, to)] for name in ("offered_samples_per_second", "cpu_wait_share")
    )
    if None not in offered and abs(offered[0] - offered[1]) > OFFERED_TOLERANCE * min(offered):
        found.append(Difference("offered rate", *(f"{precise(one)} samples/s" for one in offered)))
    if None not in waits and abs(waits[0] - waits[1]) > CPU_WAIT_TOLERANCE:
        found.append(Difference("CPU contention", *(f"{precise(100 * one)} % of the time" for one in waits)))
    if of.shared_with or to.shared_with:
        machines = [f"shared with {one.shared_with}" if one.shared_with else "not shared" for one in (of, to)]
        found.append(Difference("machine", *machines))
    sizes: dict[str, Callable[[Entry], Any]] = {
        "total": lambda entry: (
            entry.accelerators or (f"unknown ({count_of(entry.nodes, 'node')})" if entry.nodes else None)
        ),
        "per_node": lambda entry: entry.accelerators_per_node,
        "per_rack": lambda entry: "whole rack" if entry.rack_is_measured else "projection",
    }
    if basis in sizes and sizes[basis](of) != sizes[basis](to):
        name = {"total": "accelerators", "per_node": "accelerators per node", "per_rack": "rack"}[basis]
        found.append(Difference(name, _shown(sizes[basis](of)), _shown(sizes[basis](to))))
    return found


def software_differences(of: Entry, to: Entry) -> list[SoftwareDifference]:
    """Versions and settings in which two entries differ, or that only one states; empty where one states none.

    Empty for a run and a published row too: they state different things, so that everything would differ.
    """
    if not (of.software and to.software) or bool(of.paths) != bool(to.paths):
        return []
    keys = sorted(set(of.software) | set(to.software))
    pairs = [(key, of.software.get(key), to.software.get(key)) for key in keys]
    return [SoftwareDifference(of.name, to.name, key, one, other) for key, one, other in pairs if one != other]


def ratio_interval(of: Sequence[float], to: Sequence[float]) -> tuple[float, float] | None:
    """Confidence interval of the ratio of geometric means, ``of`` over ``to``, by ``INTERVAL_METHOD``.

    None without two positive repeats of each.
    """
    if min(len(of), len(to)) < 2 or min(*of, *to) <= 0:
        return None
    logarithms = [[math.log(value) for value in values] for values in (of, to)]
    errors = [statistics.variance(values) / len(values) for values in logarithms]
    ratio, error = statistics.geometric_mean(of) / statistics.geometric_mean(to), math.sqrt(sum(errors))
    if error == 0:
        return (ratio, ratio)
    freedom = sum(errors) ** 2 / sum(
        square**2 / (len(values) - 1) for square, values in zip(errors, (of, to), strict=True)
    )
    margin = student_t(0.5 + CONFIDENCE / 2, freedom) * error
    return (ratio * math.exp(-margin), ratio * math.exp(margin))


def student_t(probability: float, freedom: float) -> float:
    """Quantile of Student's t, ``probability`` above one half: the density integrated by angle, then bisected.

    With t = sqrt(n) tan(a) the density becomes cos(a)^(n - 1), smooth and bounded however few the degrees of freedom.
    """
    angles = np.linspace(0.0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(2 * probability - 1, area / area[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)


def _lengths_differ(one: float, other: float) -> bool:
    return abs(one - other) > LENGTHS_TOLERANCE * min(one, other)


def _named_shortly(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, those of run folders under short unique names."""
    measured = [entry.name for entry in entries if entry.paths]
    short = dict(zip(measured, names_of([Path(name) for name in measured]), strict=True))
    taken = {entry.name for entry in entries if not entry.paths}
    return [
        replace(entry, name=short[entry.name]) if entry.paths and short[entry.name] not in taken else entry
        for entry in entries
    ]


def _numbered(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, a result that is given again with a number: an accelerator stands for its fastest published row."""
    seen: Counter[str] = Counter()
    found = []
    for entry in entries:
        seen[entry.name] += 1
        count = seen[entry.name]
        found.append(entry if count == 1 else replace(entry, name=f"{entry.name} ({count})"))
    return found


def _contended(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, each with the runs that shared its machine."""
    everything = [occupation for entry in entries for occupation in entry.occupations]
    found = []
    for entry in entries:
        shared = {
            other.run: seconds
            for one in entry.occupations
            for other in everything
            if (seconds := one.seconds_shared_with(other))
        }
        shares = [f"{name_of(run)} for {precise(seconds)} s" for run, seconds in shared.items()]
        more = f" and {len(shares) - 1} more" if len(shares) > 1 else ""
        found.append(replace(entry, shared_with=f"{shares[0]}{more}") if shares else entry)
    return found


def _interval(of: Entry, to: Entry, basis: str) -> tuple[float, float] | None:
    interval = ratio_interval(of.repeats, to.repeats) if of.repeats and to.repeats else None
    if interval is None or not of.output_tokens_per_second or not to.output_tokens_per_second:
        return None
    over, under = of.rate(basis), to.rate(basis)
    scale = (over or 0.0) / (under or 1.0) / (of.output_tokens_per_second / to.output_tokens_per_second)
    return (interval[0] * scale, interval[1] * scale)


def _notes(entries: Sequence[Entry]) -> list[str]:
    notes = [f"{entry.name}: {entry.note}" for entry in entries if entry.note]
    notes += [
        f"{entry.name}: shared the machine with {entry.shared_with}; measure runs one after the other"
        for entry in entries
        if entry.shared_with
    ]
    notes += [
        f"{entry.name}: {entry.verdict}, so its rate is not a result" for entry in entries if entry.verdict in UNUSABLE
    ]
    notes += [
        f"{entry.name}: {standing}"
        for entry in entries
        if entry.state == "unverified" and entry.output_tokens_per_second
        if (standing := verified_standing(*_work(entry), entry.output_tokens_per_second))
    ]
    notes += [note for entry in entries[1:] if (note := _in_samples(entry, entries[0]))]
    timed = {entry.duration_seconds: entry for entry in entries if entry.duration_seconds}
    if timed and max(timed) > LONGER * min(timed):
        ends = [f"{timed[end].name} {precise(end)} s" for end in (min(timed), max(timed))]
        notes.append(f"durations: {' vs '.join(ends)}; ramp and drain weigh more in shorter runs")
    sizes = {entry.accelerators for entry in entries if entry.accelerators}
    if len(sizes) > 1:
        shown = ", ".join(f"{size:,}" for size in sorted(sizes))
        notes.append(f"systems of {shown} accelerators: rates per accelerator of small systems do not project linearly")
    if any(entry.state != "verified" for entry in entries):
        notes.append("MLCommons reviewed only results in state verified")
    return notes


def _work(entry: Entry) -> tuple[str | None, str | None, str | None, int | None]:
    return entry.model, entry.scenario, entry.accelerator, entry.accelerators


def _in_samples(of: Entry, to: Entry) -> str | None:
    """Answers of different lengths give another ratio in samples/s than in tokens/s."""
    if not (of.output_tokens_per_second and to.output_tokens_per_second):
        return None
    of_length, to_length = of.output_tokens_per_sample, to.output_tokens_per_sample
    if not (of_length and to_length and _lengths_differ(of_length, to_length)):
        return None
    ratio = of.output_tokens_per_second / to.output_tokens_per_second
    in_samples = f"{precise(ratio * to_length / of_length)} in samples/s"
    answers = f"answers of {precise(of_length)} vs {precise(to_length)} tokens"
    return f"{of.name} over {to.name}: {precise(ratio)} in tokens/s, {in_samples} ({answers})"


def _comparable(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _shown(value: Any) -> str:
    if value is None:
        return UNSTATED
    if isinstance(value, str) and HASH.fullmatch(value):
        return f"{value[:HASH_SHOWN]}..."
    return precise(value) if is_number(value) else str(value)
