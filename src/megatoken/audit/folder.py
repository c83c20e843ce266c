"""A run folder of megatoken as its checks see it, and checks that compare what it states with what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from megatoken.audit.differences import is_doubt
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Run, Where, places
from megatoken.audit.finding import Check, Outcome, Severity, check, free_of, outcome, shown
from megatoken.audit.replay_answers import Rejudged, UnknownError, judged_again, not_computed
from megatoken.mlperf.detail_log import DETAIL_LOG, DetailLog
from megatoken.mlperf.run_figures import RunFigures
from megatoken.runs.run import CONFIG, MLPERF, REQUESTS, RESULT, SERIES, Verdict
from megatoken.runs.run import Run as RunOfFolder

LOG = f"{MLPERF}/{DETAIL_LOG}"
STATED = (RESULT, CONFIG)
TABLES = (RESULT, REQUESTS, SERIES)
LOGGED = (*TABLES, LOG)


@dataclass(frozen=True)
class RunFolder:
    """One run folder that can be read."""

    tree: Tree
    path: str
    run: RunOfFolder
    logged: Run | None  # what LoadGen logged of the run
    log: DetailLog | None
    is_part: bool  # of another run folder: a node, or a probe of a search

    def places(self, *names: str) -> tuple[Where, ...]:
        """Files of the folder; of LoadGen's log the line with its verdict."""
        files = places(*(below(self.path, name) for name in names if name != LOG))
        return (*files, self.logged.where("result_validity")) if LOG in names and self.logged else files

    @property
    def figures(self) -> RunFigures | None:
        """Of LoadGen's log."""
        return None if self.logged is None or self.log is None else self.logged.figures

    @property
    def on_rack(self) -> bool:
        """Whether replicas of a rack ran."""
        return "rack_nodes" in self.run.result

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.run.verdict is not Verdict.INTERRUPTED

    @property
    def has_one_log(self) -> bool:
        """Whether the run ended with a test that one LoadGen logged."""
        return self.finished and not {"soak", "load", "node_verdicts"} & self.run.result.keys()

    @property
    def is_logged(self) -> bool:
        """Whether that log can be read."""
        return self.has_one_log and self.figures is not None

    @property
    def is_compliance_test(self) -> bool:
        """Whether TEST06 was asked for or reported."""
        return self.run.config.get("compliance") is not None or "compliance" in self.run.result

    @cached_property
    def answers(self) -> Rejudged:
        """What the logged answers of a run show, where its verdict depends on them."""
        return judged_again(self.tree, self.path, self.run, compliance=self.is_compliance_test)


def compared(
    id: str, title: str, why: str, files: tuple[str, ...] = STATED, when: Callable[[RunFolder], bool] = lambda _: True
) -> Callable[[Callable[[RunFolder], Iterable[object]]], Check[[RunFolder]]]:
    """Decorator: a ``check`` of run folders, whose function gives everything that differs or contradicts itself.

    ``files`` are where its findings point to.
    """

    def register(function: Callable[[RunFolder], Iterable[object]]) -> Check[[RunFolder]]:
        @check(id, title, why, when)
        def compare(folder: RunFolder) -> Outcome:
            expected, where = "what its logs, its tables and its other fields give", folder.places(*files)
            try:
                found = list(function(folder))
            except UnknownError as error:
                return outcome(None, expected, shown(str(error)), where)
            except Exception as error:  # fields of a type that no run writes can break any step
                found = [not_computed(error)]
            severity = Severity.WARN if all(map(is_doubt, found)) else Severity.FAIL
            return free_of(map(str, found), expected, "nothing differs", where, severity)

        return compare

    return register
