"""A run folder of megatoken: its numbers and its verdict follow from its logs and tables, and its files agree."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Set

from megatoken.accuracy.gate import Judgement
from megatoken.analysis.machine import rate_state, simulated_gpu
from megatoken.audit import replay, replay_answers, run_facts
from megatoken.audit.discovery import Tree, below
from megatoken.audit.evidence import Run, Where
from megatoken.audit.finding import Observation, Severity, check, shown
from megatoken.audit.view import observe
from megatoken.errors import MegatokenError
from megatoken.files import UnreadableError, display, mapping, read_json_object
from megatoken.mlperf.detail_log import DetailLog, read_detail_log
from megatoken.runs.run import CONFIG, MLPERF, REQUESTS, RESULT, SERIES, Verdict, read_run
from megatoken.runs.run import Run as RunFolder
from megatoken.text import count_of, natural

Problems = Iterable[object]

for _id, _title, _why in (
    ("run_folder.interrupted", "The run finished", "An interrupted run has no result, so none is checked."),
    ("run_folder.simulated", "The hardware exists", "Figures of a cost model are estimates, not a benchmark's result."),
    (
        "accuracy.recomputed",
        "Scores follow from the logged answers",
        "A score shows whether speed was bought with worse answers.",
    ),
    (
        "compliance.recomputed",
        "TEST06 follows from the logged answers",
        "Its rules are arithmetic on the answers, whatever a file says of them.",
    ),
    (
        "compliance.end_tokens",
        "TEST06 was verified with the end tokens of the run",
        "With others it says nothing about the model that answered.",
    ),
    ("run_folder.whole", "The run folder is whole", "Its rows are the raw data."),
    ("run_folder.metrics", "Metrics follow from the tables", "Every number can be recomputed from the rows."),
    ("run_folder.loadgen", "LoadGen logged the run", "Without its log nothing shows that the run took place."),
    ("run_folder.counts", "LoadGen's counts are those of the rows", "Two counters saw the same samples."),
    (
        "run_folder.verdict",
        "Verdict, reasons and LoadGen's figures follow from log and rows",
        "A number may be quoted only as its verdict allows.",
    ),
    (
        "run_folder.nodes",
        "A rack's result follows from its nodes",
        "Where each node had a LoadGen, no log covers the whole rack.",
    ),
    (
        "run_folder.replicas",
        "A rack has the replicas of its time series",
        "Rates for each GPU or replica divide by their number.",
    ),
    (
        "run_folder.configuration",
        "The run was configured as it says",
        "A number of one model, precision, data set or machine is not that of another.",
    ),
    (
        "run_folder.notes",
        "Every note has its cause",
        "Notes say what a reader must know: random weights, simulated GPUs, a busy machine.",
    ),
    (
        "run_folder.memory",
        "Sizes fit model and machine",
        "Weights and cache of another size belong to another model or precision.",
    ),
    ("run_folder.times", "Dates are in order", "A folder with other dates may be of another run."),
    (
        "run_folder.healthy",
        "The run reports nothing against itself",
        "An audit without a fail does not make a run healthy.",
    ),
):
    check(_id, _title, _why)(lambda: None)


def run_folders_in(tree: Tree) -> list[str]:
    """Folders that look like run folders of megatoken."""
    names = (path.removesuffix(RESULT) for path in tree.files if path == RESULT or path.endswith(f"/{RESULT}"))
    return sorted((name.rstrip("/") for name in names if f"{name}{REQUESTS}" in tree.files), key=natural)


def without_result(tree: Tree) -> str | None:
    """The first folder that would look like a run folder if it had a result; soaks have no logs of LoadGen either."""
    names = (path.removesuffix(REQUESTS) for path in tree.files if path == REQUESTS or path.endswith(f"/{REQUESTS}"))
    lost = (
        name.rstrip("/") for name in names if f"{name}{CONFIG}" in tree.files and f"{name}{RESULT}" not in tree.files
    )
    return min(lost, key=natural, default=None)


def owner(path: str, folders: Set[str]) -> str | None:
    """The innermost of ``folders`` that is or holds ``path``."""
    while path and path not in folders:
        path = path.rpartition("/")[0]
    return path if path in folders else None


def interruptions(tree: Tree, folders: Iterable[str]) -> dict[str, str]:
    """Those of the run folders that say INTERRUPTED, and why, in their own words."""
    found: dict[str, str] = {}
    for folder in folders:
        try:
            result, _, _ = read_json_object(tree.path(below(folder, RESULT)))
        except UnreadableError:
            continue  # run_folder.whole says why
        if result.get("verdict") == Verdict.INTERRUPTED:
            reasons = result.get("reasons")
            stated = [reason for reason in reasons if isinstance(reason, dict)] if isinstance(reasons, list) else []
            why = "; ".join(f"{reason.get('code')} {reason.get('message')}" for reason in stated)
            why = why.removeprefix(f"{Verdict.INTERRUPTED} ")
            found[folder] = f"{Verdict.INTERRUPTED}: {shown(why or 'no reason given')}"
    return found


def check_run_folder(tree: Tree, path: str, runs: Sequence[Run]) -> Iterator[Observation]:
    """One run folder.

    Args:
        tree: all files.
        path: the folder in it.
        runs: all runs that LoadGen logged; those below the folder are its own.
    """
    prefix = f"{display(path)}/" if path else ""
    result = (Where(prefix + RESULT),)
    try:
        folder = read_run(tree.path(path))
    except MegatokenError as error:
        yield observe("run_folder.whole", False, "a whole run folder", shown(str(error)), result)
        return
    logged = next((run for run in runs if run.path == display(below(path, MLPERF))), None)
    try:
        yield from _RunFolder(tree, path, folder, logged, _detail_log(tree, path), prefix).check()
    except Exception as error:  # fields of a type that no run writes can break any step
        found = shown(f"{type(error).__name__}: {error}")
        yield observe("run_folder.whole", False, "fields of the types that a run writes", found, result)


class _RunFolder:
    """One run folder that can be read, and LoadGen's log of it."""

    def __init__(
        self, tree: Tree, path: str, run: RunFolder, logged: Run | None, log: DetailLog | None, prefix: str
    ) -> None:
        self._tree, self._path, self._run = tree, path, run
        self._logged, self._log = logged, log
        self._prefix = prefix
        self._tables = self._places(RESULT, REQUESTS, SERIES)
        self._logs = self._tables if logged is None else (*self._tables, logged.where("result_validity"))

    def check(self) -> Iterator[Observation]:
        run, result, log = self._run, self._run.result, self._log
        rows = count_of(len(run.requests), "row")
        yield observe("run_folder.whole", True, "a whole run folder", rows, self._tables)
        part = owner(self._path.rpartition("/")[0], set(run_folders_in(self._tree)) - {self._path}) is not None
        if why := interruptions(self._tree, [self._path]).get(self._path):
            severity = Severity.NOTE if part else Severity.UNKNOWN  # a search ends probes whose answer is clear
            found = f"{why}; samples that had ended: {len(run.requests):,}"
            yield Observation("run_folder.interrupted", severity, "a run that finished", found, self._places(RESULT))
        if rate_state(run) == "estimate":
            found = f"simulated {shown(simulated_gpu(run))}: a cost model computes rates and times"
            places = self._places(CONFIG, RESULT)
            yield Observation("run_folder.simulated", Severity.NOTE, "GPUs that compute", found, places)
        yield self._found("metrics", "metrics that its tables give", lambda: replay.metrics(run), self._tables)
        yield self._configuration()
        yield self._found("notes", "the notes that its fields call for", lambda: replay.notes(run))
        yield self._found("memory", "sizes that fit model, machine and series", lambda: run_facts.memory(run))
        ours = None if self._logged is None else self._logged.figures
        dates = "dates and segments in order, which fit LoadGen's log and the series"
        yield self._found("times", dates, lambda: run_facts.times(run, ours), self._logs)
        if run.verdict is Verdict.INTERRUPTED:
            return
        if not part:
            yield from self._health()
        if (absent := self._rack_fields()) is not None:
            fits = "as many replicas as the series shows, except for those lost"
            yield self._found("replicas", fits, lambda: absent or run_facts.replicas_of_rack(run), self._tables)
        if "soak" in result:
            yield self._concluded("verdict and stability that its tables give", lambda: replay.soak(run))
        elif "node_verdicts" in result:
            yield from self._nodes()
        elif log is None or ours is None:
            # A search that found no rate ends INVALID without a test.
            holds = False if run.verdict is not Verdict.INVALID else None
            expected = f"LoadGen's log of a run that ended {run.verdict}"
            yield observe("run_folder.loadgen", holds, expected, "no log that can be read", self._tables)
        else:
            counted = "as many samples and tokens, and as long a run, as LoadGen logged"
            yield self._found("counts", counted, lambda: run_facts.counts(run, log, ours), self._logs)
            judged = yield from self._answers()
            expected = "verdict, reasons and figures that LoadGen's log and the tables give"
            yield self._concluded(expected, lambda: replay.conclusion(run, log, judged))

    def _places(self, *names: str) -> tuple[Where, ...]:
        return tuple(Where(self._prefix + name) for name in names)

    def _found(
        self, check: str, expected: str, problems: Callable[[], Problems], where: tuple[Where, ...] = ()
    ) -> Observation:
        """Runs a check; fields of a kind that no run writes can break any step of it."""
        where = where or self._places(RESULT, CONFIG)
        try:
            found = "; ".join(map(str, problems()))
        except Exception as error:
            found = _not_computed(error)
        return observe(f"run_folder.{check}", not found, expected, shown(found) or "nothing differs", where)

    def _configuration(self) -> Observation:
        run, model = self._run, run_facts.model_name(self._run)
        renamed = [] if model is None else [f"model {run.result.get('model')}, {CONFIG} {model}"]
        expected = "a run as it was configured, on one data set and one machine"
        found = self._found("configuration", expected, lambda: [*run_facts.configuration(run, self._log), *renamed])
        if renamed and "/" in str(model) and found.found == shown(renamed[0]):
            return Observation(found.id, Severity.WARN, found.expected, found.found, found.where)  # it may be a link
        return found

    def _concluded(self, expected: str, replayed: Callable[[], list[replay.Difference]]) -> Observation:
        """Differences of sentences alone weigh less: another version may have worded them in another way."""
        kept: list[replay.Difference] = []

        def problems() -> Problems:
            kept.extend(replayed())
            return kept

        found = self._found("verdict", expected, problems, self._logs)
        if kept and all(one.field.endswith((".message", ".finding")) for one in kept):
            return Observation(found.id, Severity.WARN, found.expected, found.found, found.where)
        return found

    def _rack_fields(self) -> list[str] | None:
        """Fields that a rack lacks; None where nothing can be said of replicas.

        A soak that went on after an interruption has the nodes of its last segment alone.
        """
        run, result = self._run, self._run.result
        absent = [f"no {name}" for name in ("rack", "rack_nodes") if not result.get(name)]
        asked = mapping(run.config.get("rack")).get("cluster") is not None or "ray" in mapping(result.get("target"))
        resumed = mapping(result.get("soak")).get("interruptions")
        return None if resumed or (absent and not (asked and len(run.requests))) else absent

    def _nodes(self) -> Iterator[Observation]:
        run = self._run
        try:
            problems = [*replay.nodes(self._tree, self._path, run)]
        except MegatokenError as error:  # the checks of the nodes' folders say so too
            yield observe("run_folder.nodes", None, "the run folder of each node", shown(str(error)), self._tables)
            return
        except Exception as error:
            problems = [_not_computed(error)]
        expected = "tables, starts, verdict and aggregate that the run folders of its nodes give"
        yield self._found("nodes", expected, lambda: problems, self._tables)
        if far := [*replay.far_clocks(run)]:
            expected = "clocks that differ by less than a minute and by less than a node ran"
            found = shown("; ".join(far))
            yield Observation("run_folder.nodes", Severity.WARN, expected, found, self._places(RESULT))

    def _answers(self) -> Generator[Observation, None, Judgement | None]:
        """Returns what the answers show, None where that is not known here."""
        run = self._run
        tested = run.config.get("compliance") is not None or "compliance" in run.result
        if run.result.get("mode") != "accuracy" and not tested:
            return Judgement({}, ())
        check, expected = "compliance.recomputed", "the outcome of TEST06 that the logged answers give"
        if not tested:
            check, expected = "accuracy.recomputed", "scores, counts and targets that the logged answers give"
        other = None
        try:
            answers = replay_answers.logged_answers(self._tree, self._path)
            if answers is None:
                return None
            if tested:
                judged, problems, other = replay_answers.compliance(self._tree, self._path, run, answers)
            else:
                judged, problems = replay_answers.accuracy(self._tree, self._path, run, answers)
        except replay_answers.UnknownError as error:
            yield observe(check, None, expected, shown(str(error)), self._logs)
            return None
        except Exception as error:
            problems, judged = [_not_computed(error)], None
        found = f"{count_of(len(self._run.requests), 'answer')}, nothing differs"
        yield observe(check, not problems, expected, shown("; ".join(problems)) or found, self._logs)
        if other is not None:
            expected = "a file that was verified with the end tokens of the run"
            yield Observation("compliance.end_tokens", Severity.NOTE, expected, shown(other), self._places(RESULT))
        return judged

    def _health(self) -> Iterator[Observation]:
        """What a finished run reports against itself: an audit without a fail does not make it healthy.

        A compliance test that was not passed breaks a rule. A check of our own that was not, and lost replicas, leave
        results that are less than they look.
        """
        run = self._run
        if run.verdict not in (Verdict.INVALID, Verdict.DEGRADED) and not run.doubts:
            return
        against = [f"{reason['code']} {reason['message']}" for reason in (*run.reasons, *run.doubts)]
        word = mapping(run.result.get("stability")).get("verdict")
        severity = Severity.WARN if run.verdict is Verdict.DEGRADED else Severity.NOTE
        if any(reason["code"] == "COMPLIANCE" for reason in run.reasons):
            passed = mapping(run.result.get("compliance")).get("passed") is True
            severity = Severity.WARN if passed else Severity.FAIL
        found = f"{run.verdict}{f', {word}' if word else ''}: {'; '.join(against) or 'no reason given'}"
        expected = "a run that reports nothing against itself"
        yield Observation("run_folder.healthy", severity, expected, shown(found), self._places(RESULT))


def _not_computed(error: Exception) -> str:
    why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
    return f"cannot be computed: {why}"


def _detail_log(tree: Tree, path: str) -> DetailLog | None:
    name = below(path, f"{MLPERF}/mlperf_log_detail.txt")
    try:
        return read_detail_log(tree.path(name)) if name in tree.files else None
    except UnreadableError:
        return None  # log.readable says why
