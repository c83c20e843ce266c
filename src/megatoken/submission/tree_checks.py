"""Check names, folders and descriptions as MLCommons' checker looks them up, beyond the checks of an audit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from megatoken.audit.checks.submission import ROOT_FILES, Submission, check_names
from megatoken.audit.discovery import DIVISIONS, Tree, below
from megatoken.audit.documents import json_document
from megatoken.audit.evidence import System, Where, places
from megatoken.audit.finding import Observation, shown
from megatoken.files import UnreadableError, display, read_text
from megatoken.mlperf.benchmarks import SCENARIOS, benchmarks, is_other_benchmark, spelled
from megatoken.mlperf.rounds import rules
from megatoken.mlperf.submission_layout import MODEL_MAPPING, TO_FILL, Key, Layout
from megatoken.submission.judge import observe

MOST_STRAYS = 50
# Folders of a scenario in any round; descriptions belong there from v6.0 on and are allowed in v5.1.
_FOLDERS_OF_RESULTS = re.compile(r"performance|accuracy|TEST\d\d|images")
_WITH_RESULTS = re.compile(r"\.(?:md|json|conf|config|ya?ml)$|^\.git")
_FILLED_IN = re.compile(
    r"/(?:README\.md|calibration\.md|measurements\.json|systems/[^/]+\.json|measurements/(?:[^/]+/){3}[^/]+\.json)$"
)


def check_files(tree: Tree) -> Iterator[Observation]:
    """The audit's check of names, and files outside the submissions: only .md and .pdf, only at the root."""
    papers = {path for path in tree.children("") if path.lower().endswith((".md", ".pdf"))}
    yield from check_names(replace(tree, files={path: size for path, size in tree.files.items() if path not in papers}))
    if not tree.folders.isdisjoint(DIVISIONS):
        outside = [name for name in tree.children("") if name not in papers]
        outside += [f"{division}/{name}" for division in DIVISIONS for name in tree.children(division)]
        named = tuple(name for name in ROOT_FILES if name != ".git")
        outside = [path for path in outside if path.rpartition("/")[2].lower().startswith(named)]
        expected = "no file outside the submissions except .md and .pdf at the root"
        yield observe("check.root", not outside, expected, shown(", ".join(outside)) or "none", places(*outside))


def check_strays(tree: Tree, one: Submission, round_: str) -> Iterator[Observation]:
    """Files, folders and links in the results folder that belong to no result."""
    results = below(one.path, "results")
    known = {key[:depth] for key in one.places for depth in range(len(key) + 1)}
    undescribed: list[str] = []
    models: list[str] = []
    others = [link for link in tree.folder_links if link.startswith(f"{results}/")]
    for folder in sorted(folder for folder in tree.folders if f"{folder}/".startswith(f"{results}/")):
        levels = tuple(folder.removeprefix(results).split("/")[1:])
        match levels:
            case (system,) if levels not in known:
                described = below(one.path, f"systems/{system}.json") in tree.files
                (others if described else undescribed).append(folder)
            case (system, model) if levels not in known:
                if (system,) in known:  # otherwise the whole system is a stray
                    there = spelled(model) in benchmarks() or is_other_benchmark(model, round_)
                    (others if there else models).append(folder)
            case (_, _, _, part) if not _FOLDERS_OF_RESULTS.fullmatch(part):
                others.append(folder)
            case _ if levels in known or levels[3:] == ("performance",):
                others += [f"{folder}/{name}" for name in tree.children(folder) if not _WITH_RESULTS.search(name)]
    expected = "results/SYSTEM/BENCHMARK/SCENARIO with performance, accuracy and compliance tests, and nothing else"
    kinds = {"check.stray_system": undescribed, "check.stray_model": models, "check.strays": others}
    for id_, strays in kinds.items():
        names = ", ".join(path.removeprefix(results)[1:] for path in strays)
        found = shown(f"stray files, folders or links: {names}") if strays else "nothing else"
        yield observe(id_, not strays, expected, found, places(*strays[:MOST_STRAYS]))


def check_mapping(tree: Tree, one: Submission) -> Iterator[Observation]:
    """Whether model_mapping.json of the open division, where there is one, can be read."""
    path = below(one.path, MODEL_MAPPING)
    if one.division != "open" or path not in tree.files:
        return
    try:
        json_document(tree, path)
    except UnreadableError as error:
        yield observe("check.mapping", False, "a JSON object", str(error), places(path))


def check_scenario(key: Key, folder: str, benchmark: str, system: System | None, round_: str) -> Iterator[Observation]:
    """Whether the benchmark belongs to the round, and has the scenario for this type of system."""
    known = benchmarks().get(benchmark)
    kind = str(system.values.get("system_type", "datacenter")) if system else "datacenter"
    kinds = [part.strip() for part in kind.split(",")]
    place = places(folder)
    there = known is not None and round_ in known.rounds
    of_kind = known is None or not known.required or any(part in known.required for part in kinds)
    expected = ", ".join(name for name, entry in benchmarks().items() if round_ in entry.rounds)
    found = shown(key.benchmark if key.benchmark == benchmark else f"{key.benchmark}, mapped to {benchmark}")
    expected = f"a benchmark of {kind} systems" if there else f"a benchmark of {round_} ({expected})"
    yield observe("check.benchmark", there and of_kind, expected, found, place)
    if known is not None and there and of_kind:
        named = chain.from_iterable(known.required.get(part, ()) for part in kinds)
        allowed = set(chain.from_iterable(choice.split("|") for choice in named)) or set(SCENARIOS.values())
        allowed -= known.missing_in(round_)
        scenario, expected = SCENARIOS.get(key.scenario.lower()), f"one of {', '.join(sorted(allowed))}"
        id_ = "check.scenario" if scenario else "check.unknown_scenario"
        yield observe(id_, scenario in allowed, expected, key.scenario, place)


def check_description(tree: Tree, one: Submission, key: Key, layout: Layout) -> Iterator[Observation]:
    """The name of the description, which begins with the system name, and the folder with the code."""
    if layout.version != 5:
        return
    place, code = below(one.path, layout.description(key)), below(one.path, layout.code(key.benchmark))
    if described := [name for name in tree.children(place) if name.endswith(".json")]:
        holds, expected = any(name.startswith(key.system) for name in described), f"begins with {key.system}"
        found = shown(", ".join(described))
        yield observe("check.description_name", holds, f"a JSON file whose name {expected}", found, places(place))
    holds, found = code in tree.folders or code in tree.files, "present" if code in tree.folders else "none"
    yield observe("check.code", holds, f"a folder {layout.code(key.benchmark)}", found, places(code))


def check_system_values(system: System) -> Iterator[Observation]:
    """Values that MLCommons' checker takes for empty, or cannot read, because they are not text."""
    empty = [key for key in rules()["system_keys_not_empty"] if system.values.get(key, True) in (0, False, [], {})]
    texts = ["submitter", "division", "status", "is_network"]
    odd = [key for key in texts if not isinstance(system.values.get(key, ""), str) and key not in empty]
    found = shown(", ".join(f"{key}: {system.values[key]!r}" for key in (*empty, *odd)))
    expected = "text values: 0 and false count as empty; submitter, division, status and is_network must be text"
    where = tuple(map(system.where, (*empty, *odd))) or (system.where(),)
    yield observe("check.system_values", not found, expected, found or "all text", where)
    if is_networked(system):
        missing = [key for key in rules()["network_keys"] if key not in system.values]
        found_keys = f"missing: {', '.join(missing)}" if missing else "all keys"
        yield observe("system.keys", not missing, "the keys of a networked system", found_keys, (system.where(),))


def is_networked(system: System | None) -> bool:
    """Whether a description states that queries come over a network."""
    return system is not None and str(system.values.get("is_network", "")).lower() == "true"


def check_to_fill(tree: Tree) -> Iterator[Observation]:
    """Fields that a build left to fill in."""
    for path in sorted(path for path in tree.files if _FILLED_IN.search(f"/{path}")):
        try:
            text, _ = read_text(tree.path(path))
        except UnreadableError:
            continue
        left = {number: _field(line) for number, line in enumerate(text.split("\n"), 1) if TO_FILL in line}
        if left:
            where = tuple(Where(display(path), number) for number in left)
            found = shown(f"{len(left)} left: {', '.join(left.values())}")
            yield observe("check.to_fill", False, f"no '{TO_FILL}'", found, where)


def _field(line: str) -> str:
    before, _, _ = line.partition(TO_FILL)
    return before.strip(' \t":-*') or "a paragraph"
