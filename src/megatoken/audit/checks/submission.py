"""Whether a folder has the parts that an MLPerf submission must have, and none that it must not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatoken.audit.discovery import DIVISIONS, Tree, below, last_of
from megatoken.audit.documents import json_document
from megatoken.audit.evidence import System, places
from megatoken.audit.finding import Observation, Outcome, Severity, check, free_of, outcome, parts, shown
from megatoken.audit.stated import CONFIGURATIONS, is_endpoint_result
from megatoken.files import UnreadableError, read_text
from megatoken.mlperf.accuracy_log import TRUNCATED_BYTES
from megatoken.mlperf.benchmarks import SCENARIOS, benchmark_of
from megatoken.mlperf.compliance import compliance_file, missing_lines, passed_lines
from megatoken.mlperf.endpoints_report import ACCURACY
from megatoken.mlperf.rounds import rules
from megatoken.mlperf.submission_layout import Key, Layout, layout_of
from megatoken.text import count_of

MOST_FILE_BYTES = 50 * 2**20
ROOT_FILES = ("readme", "license", "notice", "contributing", "code_of_conduct", "summary", ".git")
ROOT_PAPERS = (".md", ".pdf")  # MLCommons' checker accepts them at the root only
HIDDEN_FILES = (".gitkeep", ".gitignore", ".gitattributes")
RUN_FILES = {"mlperf_log_summary.txt", "mlperf_log_detail.txt"}
RUN_FILES_ALLOWED = RUN_FILES | {
    *("mlperf_log_accuracy.json", "mlperf_log_trace.json", "results.json", ".gitkeep", "spl.txt")
}
ACCURACY_FILES = RUN_FILES | {"mlperf_log_accuracy.json", "accuracy.txt"}
ACCURACY_FILES_ALLOWED = ACCURACY_FILES | {"mlperf_log_trace.json", ".gitkeep"}


@dataclass
class Submission:
    """One submitter's folder in one division."""

    path: str  # relative to the audited folder; "" if it is that
    division: str
    submitter: str
    results: dict[Key, str] = field(default_factory=dict)  # system, benchmark, scenario -> folder
    others: dict[Key, str] = field(default_factory=dict)  # results of which only the place is checked

    @property
    def places(self) -> dict[Key, str]:
        """All results."""
        return self.results | self.others

    @property
    def systems(self) -> set[str]:
        """Systems that have results."""
        return {system for system, _, _ in self.places}

    def describes(self, path: str) -> bool:
        """Whether a file describes a system that has results; no version of MLCommons' checker reads others."""
        folder, _, name = path.rpartition("/")
        return folder == below(self.path, "systems") and name.removesuffix(".json") in self.systems


def submissions_in(tree: Tree) -> list[Submission]:
    """Every ``<division>/<submitter>`` with a results folder, also if the audited folder stands inside of one."""
    above = list(tree.root.parts[1:])
    found: dict[str, Submission] = {}
    for folder in tree.folders | {""}:
        parts = [*above, *(folder.split("/") if folder else [])]
        at = last_of(parts, "results") if "results" in parts else -1
        if at < max(2, len(above)) or parts[at - 2] not in DIVISIONS:
            continue
        path = "/".join(parts[len(above) : at])
        entry = found.setdefault(path, Submission(path, parts[at - 2], parts[at - 1]))
        if len(parts) == at + 4:
            entry.results[Key(*parts[at + 1 : at + 4])] = folder
    return [entry for _, entry in sorted(found.items()) if entry.results]


def system_folders(submissions: Iterable[Submission]) -> list[str]:
    """Where the systems of submissions are described; other folders of that name hold inputs of their code."""
    return [below(one.path, "systems") for one in submissions]


def layout_in(tree: Tree, one: Submission, round: str | None) -> Layout:
    """The layout, by where the runs are described, otherwise by the round."""
    if any(f"{folder}/measurements.json" in tree.files for folder in one.places.values()):
        return Layout(6)
    return Layout(5) if below(one.path, "measurements") in tree.folders else layout_of(round or "v6")


def check_submission(
    tree: Tree, one: Submission, systems: Sequence[System], layout: Layout, *, ruled: bool = True
) -> Iterator[Observation]:
    """One submitter's results, in that layout; ``systems`` are all that were described.

    Where the rules of the round are not known (``ruled``), what only they demand is not checked.
    """
    mine = {system.name: system for system in systems if system.path.startswith(below(one.path, "systems/"))}
    scenarios: dict[tuple[str, str], list[str]] = defaultdict(list)
    version = layout.version
    for key, folder in sorted(one.results.items()):
        scenarios[key[:2]].append(key.scenario)
        yield from scenario_name(key.scenario, folder)
        if is_endpoint_result(tree, folder):
            yield from performance.observations(_endpoint(tree, folder))
            continue
        yield from performance(tree, folder, version)
        yield from accuracy(tree, folder, version)
        described = below(one.path, layout.description(key))
        yield from measurements(tree, described, version)
        yield from measurement_keys(tree, described, version, key.system)
        if ruled and one.division in ("closed", "network"):
            yield from compliance(tree, below(one.path, layout.compliance(key)), key.benchmark)
    if version == 5 and ruled:
        yield from measurements.observations(_without_results(tree, one))
    yield from described_systems(one, mine, demanded=version == 5 and ruled)
    for system in (system for name, system in mine.items() if name in one.systems):
        yield from network(one, system)
        yield from owner(one, system)
    yield from code(tree, one, layout)
    if ruled:
        for (system_name, benchmark), names in scenarios.items():
            yield from required_scenarios(one, system_name, benchmark, names, mine.get(system_name))
        yield from calibration(tree, one, version)


def _complete(missing: str, expected: str, path: str) -> Outcome:
    """Whether all parts exist; ``missing`` says which do not."""
    return outcome(not missing, expected, shown(missing) or "complete", places(path))


@check("submission.names", "No stray files", "The rules of a submission repository.")
def check_names(tree: Tree) -> Outcome:
    """What no submission may hold anywhere."""
    problems = list(_name_problems(tree))
    expected = "no broken links, hidden or empty folders, names with blanks, stray files, or files over 50 MiB"
    found = [f"{what}: {count}" for what, count in Counter(what for _, what in problems).items()]
    return free_of(found, expected, "none", places(*(path for path, _ in problems[:50])), Severity.WARN)


def _name_problems(tree: Tree) -> Iterator[tuple[str, str]]:
    large = [path for path, size in tree.files.items() if size > MOST_FILE_BYTES]
    for what, paths in {
        "a broken link": tree.broken_links,
        "a link out of the folder": tree.outside_links,
        "not a regular file": tree.special,
        f"larger than {MOST_FILE_BYTES // 2**20} MiB": large,
        "an empty folder": tree.empty_folders,
        "a stray file": list(_strays(tree)),
    }.items():
        yield from ((path, what) for path in paths)
    for path in (*tree.files, *tree.folders):
        name = path.rpartition("/")[2]
        if " " in name:
            yield path, "a blank in its name"
        elif name == "__pycache__":
            yield path, "left by Python"
        elif name.startswith(".") and name not in HIDDEN_FILES and ".git" not in path.split("/"):
            yield path, "a hidden name"


def _strays(tree: Tree) -> Iterator[str]:
    """Files at the root of a repository of results, and directly in its divisions, that it does not need."""
    if tree.folders.isdisjoint(DIVISIONS):
        return
    for folder in ("", *DIVISIONS):
        for name in tree.children(folder):
            allowed = name.lower().startswith(ROOT_FILES) or (not folder and name.lower().endswith(ROOT_PAPERS))
            if not allowed:
                yield below(folder, name)


@check("submission.scenario_name", "Scenario folders", "Folders with other names are not read.")
def scenario_name(scenario: str, folder: str) -> Outcome:
    return outcome(scenario.lower() in SCENARIOS, "a folder named as a scenario", shown(scenario), places(folder))


@check("submission.performance", "Performance logs are in their place", "Without them there is no result.")
def performance(tree: Tree, folder: str, version: int) -> Iterator[Outcome]:
    run, second = f"{folder}/performance/run_1", f"{folder}/performance/run_2"
    names = set(tree.children(run))
    extra = sorted(names - RUN_FILES_ALLOWED) if version == 5 else []
    missing = parts(missing=sorted(RUN_FILES - names), not_allowed=extra)
    yield _complete(missing, "performance/run_1 with LoadGen's summary and detail log", run)
    if second in tree.folders:
        expected, found = "one run, run_1: the rules ask for no other", "run_2 too, and nothing says which one counts"
        yield outcome(False, expected, found, places(second), Severity.WARN)


def _endpoint(tree: Tree, folder: str) -> Outcome:
    """The parts of a result of MLPerf Endpoints, which needs neither LoadGen's files nor compliance tests."""
    wanted = (CONFIGURATIONS, ("measurements.json",), (f"accuracy/{ACCURACY}",))
    missing = [names[0] for names in wanted if not any(f"{folder}/{name}" in tree.files for name in names)]
    expected = "config.yaml, measurements.json, performance/result_summary.json and accuracy/accuracy_results.json"
    return _complete(parts(missing=missing), expected, folder)


@check("submission.accuracy", "Accuracy logs are in their place", "Without them there is no valid result.")
def accuracy(tree: Tree, folder: str, version: int) -> Outcome:
    place = f"{folder}/accuracy"
    names = set(tree.children(place))
    size = tree.files.get(f"{place}/mlperf_log_accuracy.json", 0)
    problems = parts(
        missing=sorted(ACCURACY_FILES - names),
        not_allowed=sorted(names - ACCURACY_FILES_ALLOWED) if version == 5 else [],
        log_not_truncated=[f"{size:,} bytes"] if size > TRUNCATED_BYTES else [],
    )
    expected = f"accuracy with {', '.join(sorted(ACCURACY_FILES))}, the log truncated to {TRUNCATED_BYTES:,} bytes"
    return _complete(problems, expected, place)


@check("submission.measurements", "The run is described", "The description says how to repeat it.")
def measurements(tree: Tree, place: str, version: int) -> Outcome:
    wanted = ("user.conf", "README.md")
    missing = [name for name in wanted if not tree.files.get(f"{place}/{name}")]
    if not _descriptions(tree, place, version, ""):
        missing.append("a JSON description")
    expected = f"user.conf, README.md and a description in {'results' if version == 6 else 'measurements'}"
    return _complete(parts(missing_or_empty=missing), expected, place)


def _descriptions(tree: Tree, place: str, version: int, system: str) -> list[str]:
    """The JSON files that describe the runs: in v5 those named after the system, among other files."""
    names = [name for name in tree.children(place) if name.endswith(".json")]
    if version == 6:
        return [name for name in names if name == "measurements.json"]
    return [name for name in names if name.startswith(system)]


def _without_results(tree: Tree, one: Submission) -> Iterator[Outcome]:
    """Systems whose runs v5 describes and that have no results; a scenario that was withdrawn may stay described."""
    start = below(one.path, "measurements/")
    for folder in sorted(folder for folder in tree.folders if folder.startswith(start)):
        system = folder.removeprefix(start)
        if "/" not in system and system not in one.systems:
            found = shown(f"no results of {system}")
            yield outcome(False, "results of each system whose runs are described", found, places(folder))


@check("submission.measurement_keys", "The description is complete", "Data types and weights decide comparability.")
def measurement_keys(tree: Tree, place: str, version: int, system: str) -> Iterator[Outcome]:
    for name in _descriptions(tree, place, version, system):
        try:
            described = json_document(tree, f"{place}/{name}")
        except UnreadableError as error:
            yield outcome(False, "a JSON object", str(error), places(f"{place}/{name}"))
            continue
        empty = [key for key in rules()["measurement_keys"] if not str(described.values.get(key) or "").strip()]
        found, where = shown(parts(missing_or_empty=empty)) or "complete", tuple(map(described.where, empty))
        expected = f"{', '.join(rules()['measurement_keys'])}, none of them empty"
        yield outcome(not empty, expected, found, where or (described.where(),))


@check("submission.compliance", "Compliance tests passed", "They catch caching and false token counts.")
def compliance(tree: Tree, place: str, benchmark: str) -> Iterator[Outcome]:
    known = benchmark_of(benchmark, None)
    for test in known.compliance if known else ():
        path = f"{place}/{test}/{compliance_file(test)}"
        if path not in tree.files:
            yield outcome(False, f"{test} with {compliance_file(test)}", "no such file", places(path))
            continue
        try:
            text, _ = read_text(tree.path(path))
        except UnreadableError as error:
            text = str(error)
        missing, expected = missing_lines(test, text), f"{test}: {'; '.join(map(' or '.join, passed_lines(test)))}"
        yield outcome(not missing, expected, shown(parts(no_line=missing)) or "passed", places(path))


@check("submission.systems", "Systems and results match", "A result without a system says nothing.")
def described_systems(one: Submission, mine: Mapping[str, System], *, demanded: bool) -> Outcome:
    """Results of each system that is described are ``demanded`` by some rounds."""
    tested = one.systems
    undescribed, untested = sorted(tested - mine.keys()), sorted(mine.keys() - tested)
    where = places(*(below(one.path, f"systems/{name}.json") for name in (*undescribed, *untested)))
    found = shown(parts(no_description_of=undescribed, no_results_of=untested)) or count_of(len(tested), "system")
    expected = "a description of each system that has results, and results of each that is described"
    return outcome(not where, expected, found, where, Severity.FAIL if undescribed or demanded else Severity.NOTE)


@check("submission.network", "Networked or not", "The network division has its own rules.")
def network(one: Submission, system: System) -> Outcome:
    found = system.values.get("is_network", False)
    networked = str(found).strip().lower() == "true"
    wanted = "true or false" if one.division == "open" else str(one.division == "network").lower()
    holds = one.division == "open" or networked == (one.division == "network")
    found, where = shown(system.values.get("is_network", "not said")), (system.where("is_network"),)
    return outcome(holds, f"is_network {wanted} in division {one.division}", found, where)


@check("submission.owner", "Submitter and division are those of the folder", "Division decides the rules.")
def owner(one: Submission, system: System) -> Outcome:
    wanted = {"submitter": one.submitter, "division": one.division}
    wrong = [key for key, value in wanted.items() if str(system.values.get(key, "")).strip().lower() != value.lower()]
    found = shown(", ".join(f"{key} {system.values.get(key)!r}" for key in wrong)) or "the same"
    expected = f"submitter {shown(one.submitter)} and division {one.division}, as the folders are named"
    return outcome(not wrong, expected, found, tuple(map(system.where, wrong)) or (system.where(),))


@check("submission.required_scenarios", "Required scenarios exist", "One scenario alone can be a favourable choice.")
def required_scenarios(
    one: Submission, system: str, benchmark: str, names: Sequence[str], description: System | None
) -> Iterator[Outcome]:
    known = benchmark_of(benchmark, None)
    if known is None or one.division == "open":
        return
    kinds = str(description.values.get("system_type", "datacenter")) if description else "datacenter"
    shown_scenarios = {SCENARIOS.get(name.lower(), name) for name in names}
    found, where = shown(f"{system}: {', '.join(names)}"), places(below(one.path, f"results/{system}/{benchmark}"))
    for wanted in filter(None, (known.required.get(kind.strip()) for kind in kinds.split(","))):
        holds = all(set(choice.split("|")) & shown_scenarios for choice in wanted)
        expected = f"{benchmark}: {' and '.join(choice.replace('|', ' or ') for choice in wanted)}"
        yield outcome(holds, expected, found, where)


@check("submission.code", "The code is there", "It shows how to repeat the run.")
def code(tree: Tree, one: Submission, layout: Layout) -> Outcome:
    folder = below(one.path, layout.code("").rstrip("/"))
    there = folder in tree.folders or folder in tree.folder_links
    return outcome(there, f"a folder {folder.rpartition('/')[2]}", folder if there else "none", places(folder))


@check("submission.calibration", "The calibration of quantisation is described", "The closed division demands it.")
def calibration(tree: Tree, one: Submission, version: int) -> Outcome | None:
    if one.division != "closed" or version != 5:
        return None
    papers = [below(one.path, "calibration.md"), below(one.path, "documentation/calibration.md")]
    there = [path for path in papers if path in tree.files]
    found = there[0] if there else "none"
    return outcome(bool(there), "a calibration document", found, places((there or papers)[0]))
