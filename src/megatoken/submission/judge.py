"""Decide which observations of checks refuse a submission."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from megatoken.audit.checks.submission import ACCURACY_FILES, Submission
from megatoken.audit.discovery import Tree
from megatoken.audit.evidence import Role, Run, Where
from megatoken.audit.finding import Observation, Severity, outcome
from megatoken.files import display
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.mlperf.rounds import rules as round_rules
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


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that is not met, or with ``rule`` None a contradiction that an audit finds and no rule covers."""

    check: str  # the check that found it
    rule: Rule | None
    refused: bool
    by_mlcommons: bool  # MLCommons' checker refuses too
    expected: str
    found: str
    where: tuple[Where, ...]

    @property
    def first(self) -> tuple[str, int]:
        """File and line of the first place; line 0: the whole file."""
        place = self.where[0] if self.where else Where("")
        return place.file or ".", place.line or 0

    @property
    def place(self) -> str:
        """The first place, and the number of further places."""
        file, line = self.first
        more = f" and {len(self.where) - 1} more" if len(self.where) > 1 else ""
        return (f"{file}:{line}" if line else file) + more

    def to_document(self) -> dict[str, Any]:
        """Plain JSON."""
        rule = self.rule
        return {
            "check": self.check,
            "rule": rule and rule.id,
            "title": rule and rule.title,
            "refused": self.refused,
            "refused_by_mlcommons_checker": self.by_mlcommons,
            "expected": self.expected,
            "found": self.found,
            "where": list(map(asdict, self.where)),
            "fix": rule and rule.fix,
            "source": rule and rule.source,
        }


class Judge:
    """Collects observations and decides which of them refuse."""

    def __init__(self, tree: Tree, submissions: Sequence[Submission], version: int) -> None:
        self.version = version
        self._tree = tree
        self._submissions = submissions
        self._problems: dict[tuple[str, str, tuple[Where, ...]], Problem] = {}

    def take(self, observations: Iterable[Observation], run: Run | None = None) -> None:
        """Add the observations of checks, of one run or of the tree."""
        for observation in observations:
            if observation.id in COVERED or observation.severity in (Severity.PASS, Severity.NOTE):
                continue
            problem = self._problem(observation, run)
            if problem is not None:
                self._problems.setdefault((problem.check, problem.found, problem.where), problem)

    def problems(self) -> list[Problem]:
        """Refusals first, by their places."""
        return sorted(
            self._problems.values(),
            key=lambda problem: (not problem.refused, problem.rule is None, problem.first, problem.check),
        )

    def _problem(self, observation: Observation, run: Run | None) -> Problem | None:
        of_accuracy = run is not None and run.role is Role.ACCURACY
        rule = rules().get(observation.id)
        if of_accuracy and observation.id.startswith("rules."):
            other = rule if observation.id == "rules.mode" else None  # neither version tests the settings of these runs
            rule = rules().get(f"{observation.id} of accuracy", other)
        if run is not None and run.role is Role.RANGING:
            rule = None  # covered by the power checks
        if rule is None:
            if observation.severity is Severity.UNKNOWN:
                return None
            refused = by_mlcommons = False
        else:
            division = self._division(observation)
            seen = not self._overlooked(observation, division, run)
            by_mlcommons = seen and rule.by_mlcommons(division, self.version)
            refused = by_mlcommons or rule.by_us(division)
            if observation.severity is Severity.WARN and observation.id == "submission.performance":
                refused = by_mlcommons = False  # a second run, which no version reads
        found = (observation.expected, observation.found, observation.where)
        return Problem(observation.id, rule, refused, by_mlcommons, *found)

    def _division(self, observation: Observation) -> str:
        """The division of the first place; for a place outside the submissions, the strictest division of the tree."""
        for place in observation.where[:1]:
            for one in self._submissions:
                if not one.path or f"{place.file}/".startswith(f"{display(one.path)}/"):
                    return one.division
        return "closed" if any(one.division != "open" for one in self._submissions) else "open"

    def _overlooked(self, observation: Observation, division: str, run: Run | None) -> bool:
        """Whether MLCommons' checker misses this case of a rule that it tests."""
        place = observation.where[0].file if observation.where else ""
        if self.version == 6:
            if observation.id == "submission.performance":
                return f"{place}/mlperf_log_detail.txt" in self._tree.files
            if observation.id == "rules.latency_limits" and run is not None and run.folder_scenario == "Interactive":
                return self._within_server_limits(run)
        elif observation.id == "submission.accuracy" and division == "open":
            return set(self._tree.children(place)) == ACCURACY_FILES  # not truncated
        elif observation.id == "rules.latency_limits" and run is not None:
            return run.folder_scenario not in ("Server", "Interactive")
        elif observation.id == "rules.scenario" and run is not None:  # it looks for the TTFT of a Server log
            return run.folder_scenario not in ("Server", "Interactive") or "p99" in run.figures.ttft_seconds
        if observation.id == "rules.no_errors":
            return observation.fields.get("num_errors") == 0  # it believes LoadGen's count, where there is one
        if observation.id == "system.values":
            status = str(observation.fields.get("status", "")).strip().lower()
            return status in round_rules()["system_status"]
        return False

    @staticmethod
    def _within_server_limits(run: Run) -> bool:
        benchmark = benchmarks().get(run.benchmark or "")
        ttft, tpot = run.figures.ttft_seconds.get("p99"), run.figures.tpot_seconds.get("p99")
        limits = benchmark.limits.get("Server") if benchmark else None
        return limits is not None and ttft is not None and tpot is not None and limits.kept_by(ttft, tpot)


def observe(
    id_: str,
    holds: bool | None,
    expected: str,
    found: str,
    where: tuple[Where, ...] = (),
    otherwise: Severity = Severity.FAIL,
) -> Observation:
    """An observation of a check that another room defines; see ``outcome``."""
    seen = outcome(holds, expected, found, where, otherwise)
    return Observation(seen.severity, expected, found, where, id=id_)
