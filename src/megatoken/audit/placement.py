"""The benchmark and the system of a submission's results, by their folders and by model_mapping.json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatoken.audit.checks.submission import Submission
from megatoken.audit.discovery import Tree, below, innermost
from megatoken.audit.documents import json_values
from megatoken.audit.evidence import AccuracyResult
from megatoken.audit.view import RunFiles
from megatoken.files import display
from megatoken.mlperf.benchmarks import benchmarks, spelled
from megatoken.mlperf.submission_layout import MODEL_MAPPING, Layout


@dataclass(frozen=True, slots=True)
class Meaning:
    """System and benchmark of a folder of results, or of compliance tests."""

    system: str
    benchmark: str
    division: str
    is_result: bool  # not of compliance tests


def benchmark_names(tree: Tree, one: Submission) -> dict[str, str]:
    """The benchmark that each model's folder of a submission stands for, by model_mapping.json in the open division."""
    mapped = json_values(tree, below(one.path, MODEL_MAPPING)) if one.division == "open" else None
    names = {model: name for model, name in (mapped or {}).items() if isinstance(name, str)}
    own = {model: spelled(model) for _, model, _ in one.results}
    return {model: name if name in benchmarks() else names.get(model, model) for model, name in own.items()}


def meanings(tree: Tree, submissions: Sequence[Submission]) -> dict[str, Meaning]:
    """System and benchmark of every folder of results and of compliance tests."""
    found = {}
    for one in submissions:
        names = benchmark_names(tree, one)
        for key, folder in one.results.items():
            tested = below(one.path, Layout(5).compliance(key))
            for place in (tested, folder):
                found[place] = Meaning(key.system, names[key.benchmark], one.division, is_result=place == folder)
    return found


def results_above(folder: str, known: Mapping[str, Meaning]) -> str | None:
    """The folder of results, or of compliance tests, that the logs in ``folder`` belong to."""
    return innermost(folder.rpartition("/")[0], known.keys())


def meant(run: RunFiles, known: Mapping[str, Meaning]) -> RunFiles:
    """The run with the system and the benchmark of its folder; unchanged outside of results."""
    place = results_above(run.folder, known)
    if place is None:
        return run
    meaning = known[place]
    node = meaning.system if run.system is None else run.node
    return replace(run, system=meaning.system, benchmark=meaning.benchmark, node=node)


def scores_meant(results: Iterable[AccuracyResult], known: Mapping[str, Meaning]) -> Iterator[AccuracyResult]:
    """The scores with the benchmarks of their folders; of a submission only those of its accuracy runs."""
    displayed = {f"{display(folder)}/accuracy": meaning for folder, meaning in known.items() if meaning.is_result}
    for result in results:
        meaning = displayed.get(result.path.rpartition("/")[0])
        if meaning is not None:
            yield replace(result, benchmark=meaning.benchmark, division=meaning.division)
        elif not known:
            yield result
