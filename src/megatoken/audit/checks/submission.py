"""Whether a folder has the parts that an MLPerf submission must have, and none that it must not."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatoken.audit.discovery import DIVISIONS, Tree, below
from megatoken.audit.endpoints import ACCURACY, CONFIGURATIONS, is_endpoint_result
from megatoken.audit.evidence import System, Where
from megatoken.audit.finding import Observation, Severity, shown
from megatoken.audit.view import observe
from megatoken.files import UnreadableError, display, read_json_object, read_text
from megatoken.mlperf.accuracy_log import TRUNCATED_BYTES
from megatoken.mlperf.benchmarks import SCENARIOS, benchmark_of
from megatoken.mlperf.rounds import rules
from megatoken.text import count_of

MOST_FILE_BYTES = 50 * 2**20
ROOT_FILES = ("readme", "license", "notice", "contributing", "code_of_conduct", "summary", ".git")
ROOT_PAPERS = (".md", ".pdf")  # MLCommons' checker lets them be, at the root alone
RUN_FILES = {"mlperf_log_summary.txt", "mlperf_log_detail.txt"}
RUN_FILES_ALLOWED = RUN_FILES | {
    "mlperf_log_accuracy.json",
    "mlperf_log_trace.json",
    "results.json",
    ".gitkeep",
    "spl.txt",
}
ACCURACY_FILES = RUN_FILES | {"mlperf_log_accuracy.json", "accuracy.txt"}
_PASSED = {
    "TEST06": ("First token check pass: (?:True|Skipped)", "EOS check pass: True", "Sample length check pass: True")
}


@dataclass
class Submission:
    """One submitter's folder in one division."""

    path: str  # relative to the audited folder; "" if it is that
    division: str
    submitter: str
    results: dict[tuple[str, str, str], str] = field(default_factory=dict)  # system, benchmark, scenario -> folder


def submissions_in(tree: Tree) -> list[Submission]:
    """Every ``<division>/<submitter>`` with a results folder, also if the audited folder stands inside of one."""
    above = list(tree.root.parts[1:])
    found: dict[str, Submission] = {}
    for folder in tree.folders | {""}:
        parts = [*above, *(folder.split("/") if folder else [])]
        at = len(parts) - 1 - parts[::-1].index("results") if "results" in parts else -1
        if at < max(2, len(above)) or parts[at - 2] not in DIVISIONS:
            continue
        path = "/".join(parts[len(above) : at])
        entry = found.setdefault(path, Submission(path, parts[at - 2], parts[at - 1]))
        if len(parts) == at + 4:
            entry.results[parts[at + 1], parts[at + 2], parts[at + 3]] = folder
    return [entry for _, entry in sorted(found.items()) if entry.results]


def check_submission(tree: Tree, one: Submission, systems: Sequence[System], version: int) -> Iterator[Observation]:
    """One submitter's results.

    Args:
        tree: all files.
        one: the submission.
        systems: the system descriptions that were found.
        version: 5 or 6, whose layout is to be met.
    """
    mine = {system.name: system for system in systems if system.path.startswith(below(one.path, "systems/"))}
    scenarios: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (system, benchmark, scenario), folder in sorted(one.results.items()):
        scenarios[system, benchmark].append(scenario)
        yield observe(
            "submission.scenario_name",
            scenario.lower() in SCENARIOS,
            "a folder named as a scenario",
            shown(scenario),
            (Where(display(folder)),),
        )
        if is_endpoint_result(tree, folder):
            yield _endpoint(tree, folder)
            continue
        yield from _performance(tree, folder, version)
        yield from _accuracy(tree, folder, version)
        yield from _measurements(tree, one, (system, benchmark, scenario), folder, version)
        if one.division in ("closed", "network"):
            yield from _compliance(tree, one, (system, benchmark, scenario), folder, version)
    if version == 5:
        yield from _untested(tree, one)
    yield from _systems(one, mine)
    for (system, benchmark), names in scenarios.items():
        yield from _required(one, system, benchmark, names, mine.get(system))
    yield from _folders(tree, one, version)


def check_names(tree: Tree) -> Iterator[Observation]:
    """What no submission may hold anywhere."""
    problems: list[tuple[str, str]] = [(path, "a broken link") for path in tree.broken_links]
    problems += [(path, "a link out of the folder") for path in tree.outside_links]
    problems += [(path, "no regular file") for path in tree.special]
    problems += [
        (path, f"larger than {MOST_FILE_BYTES // 2**20} MiB")
        for path, size in tree.files.items()
        if size > MOST_FILE_BYTES
    ]
    problems += [(path, "an empty folder") for path in tree.empty_folders]
    if any(division in tree.folders for division in DIVISIONS):  # the root of a repository of results
        for folder in ("", *DIVISIONS):
            stray = [name for name in tree.children(folder) if not name.lower().startswith(ROOT_FILES)]
            if not folder:
                stray = [name for name in stray if not name.lower().endswith(ROOT_PAPERS)]
            problems += [(below(folder, name), "a stray file") for name in stray]
    for path in (*tree.files, *tree.folders):
        name = path.rpartition("/")[2]
        if " " in name:
            problems.append((path, "a blank in its name"))
        elif name == "__pycache__":
            problems.append((path, "left by Python"))
        elif name.startswith(".") and name not in (".gitkeep", ".gitignore", ".gitattributes") and not _in_git(path):
            problems.append((path, "a hidden name"))
    kinds: dict[str, int] = defaultdict(int)
    for _, what in problems:
        kinds[what] += 1
    yield observe(
        "submission.names",
        not problems,
        "no broken links, hidden or empty folders, names with blanks, stray files, or files over 50 MiB",
        "; ".join(f"{what}: {count}" for what, count in kinds.items()) or "none",
        tuple(Where(display(path)) for path, _ in problems[:50]),
        Severity.WARN,
    )


def _performance(tree: Tree, folder: str, version: int) -> Iterator[Observation]:
    run = f"{folder}/performance/run_1"
    names = set(tree.children(run))
    missing = sorted(RUN_FILES - names)
    extra = sorted(names - RUN_FILES_ALLOWED) if version == 5 else []
    found = "; ".join(filter(None, (_said("missing", missing), _said("not allowed", extra))))
    yield observe(
        "submission.performance",
        not missing and not extra,
        "performance/run_1 with LoadGen's summary and detail log",
        shown(found) or "they are there",
        (Where(display(run)),),
    )
    if f"{folder}/performance/run_2" in tree.folders:
        yield observe(
            "submission.performance",
            False,
            "one run, run_1: the rules ask for no other",
            "run_2 too, which of them counts?",
            (Where(display(f"{folder}/performance/run_2")),),
            Severity.WARN,
        )


def _endpoint(tree: Tree, folder: str) -> Observation:
    """The parts of a result of MLPerf Endpoints, which needs neither LoadGen's files nor compliance tests."""
    wanted = (CONFIGURATIONS, ("measurements.json",), (f"accuracy/{ACCURACY}",))
    missing = [names[0] for names in wanted if not any(f"{folder}/{name}" in tree.files for name in names)]
    return observe(
        "submission.performance",
        not missing,
        "config.yaml, measurements.json, performance/result_summary.json and accuracy/accuracy_results.json",
        shown(_said("missing", missing)) or "they are there",
        (Where(display(folder)),),
    )


def _accuracy(tree: Tree, folder: str, version: int) -> Iterator[Observation]:
    place = f"{folder}/accuracy"
    names = set(tree.children(place))
    missing = sorted(ACCURACY_FILES - names)
    extra = sorted(names - ACCURACY_FILES - {"mlperf_log_trace.json", ".gitkeep"}) if version == 5 else []
    size = tree.files.get(f"{place}/mlperf_log_accuracy.json", 0)
    whole = [f"{size:,} bytes"] if size > TRUNCATED_BYTES else []
    found = "; ".join(
        filter(None, (_said("missing", missing), _said("not allowed", extra), _said("log not truncated", whole)))
    )
    yield observe(
        "submission.accuracy",
        not missing and not extra and not whole,
        f"accuracy with {', '.join(sorted(ACCURACY_FILES))}, the log truncated to {TRUNCATED_BYTES:,} bytes",
        shown(found) or "they are there",
        (Where(display(place)),),
    )


def _measurements(
    tree: Tree, one: Submission, key: tuple[str, str, str], folder: str, version: int
) -> Iterator[Observation]:
    system, benchmark, scenario = key
    place = folder if version == 6 else below(one.path, f"measurements/{system}/{benchmark}/{scenario}")
    names = tree.children(place)
    described = [name for name in names if name.endswith(".json") and (version == 5 or name == "measurements.json")]
    missing = [
        name for name in ("user.conf", "README.md") if name not in names or not tree.files.get(f"{place}/{name}")
    ]
    if not described:
        missing.append("a JSON description")
    yield observe(
        "submission.measurements",
        not missing,
        f"user.conf, README.md and a description in {'results' if version == 6 else 'measurements'}",
        shown(_said("missing or empty", missing)) or "they are there",
        (Where(display(place)),),
    )
    for name in described:
        path = f"{place}/{name}"
        try:
            values, lines, _ = read_json_object(tree.path(path))
        except UnreadableError as error:
            yield observe("submission.measurement_keys", False, "a JSON object", str(error), (Where(display(path)),))
            continue
        empty = [key for key in rules()["measurement_keys"] if not str(values.get(key) or "").strip()]
        yield observe(
            "submission.measurement_keys",
            not empty,
            f"{', '.join(rules()['measurement_keys'])}, none of them empty",
            shown(_said("missing or empty", empty)) or "they are there",
            tuple(Where(display(path), lines.get(key)) for key in empty) or (Where(display(path)),),
        )


def _untested(tree: Tree, one: Submission) -> Iterator[Observation]:
    """Descriptions of v5 that belong to no result."""
    start = below(one.path, "measurements/")
    for folder in sorted(folder for folder in tree.folders if folder.startswith(start)):
        key = tuple(folder.removeprefix(start).split("/"))
        if len(key) == 3 and key not in one.results:
            yield observe(
                "submission.measurements",
                False,
                "results of each run that is described",
                shown(f"no results of {'/'.join(key)}"),
                (Where(display(folder)),),
            )


def _compliance(
    tree: Tree, one: Submission, key: tuple[str, str, str], folder: str, version: int
) -> Iterator[Observation]:
    system, benchmark, scenario = key
    known = benchmark_of(benchmark, None)
    if known is None:
        return
    place = folder if version == 6 else below(one.path, f"compliance/{system}/{benchmark}/{scenario}")
    for test in known.compliance:
        name = "verify_output_len.txt" if test == "TEST09" else "verify_accuracy.txt"
        path = f"{place}/{test}/{name}"
        if path not in tree.files:
            yield observe(
                "submission.compliance",
                False,
                f"{test} with {name}",
                "it is not there",
                (Where(display(path)),),
            )
            continue
        try:
            text, _ = read_text(tree.path(path))
        except UnreadableError as error:
            text = str(error)
        failed = [line for line in _PASSED.get(test, ("TEST PASS",)) if not re.search(line, text)]
        yield observe(
            "submission.compliance",
            not failed,
            f"{test}: {' and '.join(line.partition(':')[0] for line in _PASSED.get(test, ('TEST PASS',)))}",
            shown(_said("no line", [line.partition(":")[0] for line in failed])) or "passed",
            (Where(display(path)),),
        )


def _systems(one: Submission, mine: Mapping[str, System]) -> Iterator[Observation]:
    tested = {system for system, _, _ in one.results}
    undescribed, untested = sorted(tested - mine.keys()), sorted(mine.keys() - tested)
    found = "; ".join(filter(None, (_said("no description of", undescribed), _said("no results of", untested))))
    yield observe(
        "submission.systems",
        not undescribed and not untested,
        "a description of each system that has results, and results of each that is described",
        shown(found) or count_of(len(tested), "system"),
        tuple(Where(display(below(one.path, f"systems/{name}.json"))) for name in (*undescribed, *untested)),
    )
    for system in mine.values():
        network = str(system.values.get("is_network", False)).strip().lower() == "true"
        yield observe(
            "submission.network",
            one.division == "open" or network == (one.division == "network"),
            "is_network true or false in division open"
            if one.division == "open"
            else f"is_network {str(one.division == 'network').lower()} in division {one.division}",
            shown(system.values.get("is_network", "not said")),
            (system.where("is_network"),),
        )
        wrong = [
            (key, wanted)
            for key, wanted in (("submitter", one.submitter), ("division", one.division))
            if str(system.values.get(key, "")).strip().lower() != wanted.lower()
        ]
        yield observe(
            "submission.owner",
            not wrong,
            f"submitter {shown(one.submitter)} and division {one.division}, as the folders are named",
            shown(", ".join(f"{key} {system.values.get(key)!r}" for key, _ in wrong)) or "the same",
            tuple(system.where(key) for key, _ in wrong) or (system.where(),),
        )


def _required(
    one: Submission, system: str, benchmark: str, names: Sequence[str], description: System | None
) -> Iterator[Observation]:
    known = benchmark_of(benchmark, None)
    kind = str(description.values.get("system_type", "datacenter")) if description else "datacenter"
    if known is None or one.division == "open":
        return
    for part in kind.split(","):
        wanted = known.required.get(part.strip())
        if wanted is None:
            continue
        there = {SCENARIOS.get(name.lower(), name) for name in names}
        missing = [choice for choice in wanted if not set(choice.split("|")) & there]
        yield observe(
            "submission.required_scenarios",
            not missing,
            f"{benchmark}: {' and '.join(choice.replace('|', ' or ') for choice in wanted)}",
            shown(f"{system}: {', '.join(names)}"),
            (Where(display(below(one.path, f"results/{system}/{benchmark}"))),),
        )


def _folders(tree: Tree, one: Submission, version: int) -> Iterator[Observation]:
    code = below(one.path, "code" if version == 5 else "src")
    yield observe(
        "submission.code",
        code in tree.folders,
        f"a folder {code.rpartition('/')[2]}",
        code if code in tree.folders else "none",
        (Where(display(code)),),
    )
    if one.division == "closed" and version == 5:
        papers = [below(one.path, "calibration.md"), below(one.path, "documentation/calibration.md")]
        there = [path for path in papers if path in tree.files]
        yield observe(
            "submission.calibration",
            bool(there),
            "a calibration document",
            there[0] if there else "none",
            (Where(display(there[0] if there else papers[0])),),
        )


def _in_git(path: str) -> bool:
    return path == ".git" or path.startswith(".git/") or "/.git/" in path or path.endswith("/.git")


def _said(what: str, names: Sequence[str]) -> str:
    return f"{what}: {', '.join(names)}" if names else ""
