"""Submissions broken in one place each: refused by the right rule, with place, found value and fix."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples import every
from megatoken.mlperf.rounds import rules
from megatoken.submission import Check, check

DETAIL = "mlperf_log_detail.txt"
SUMMARY = "mlperf_log_summary.txt"
ANSWERS = "mlperf_log_accuracy.json"


@dataclass(frozen=True)
class Tree:
    """A submission to spoil, with its paths in the layout that it has."""

    root: Path
    division: str

    @property
    def vendor(self) -> Path:
        return self.root / self.division / "Vendor"

    @property
    def version(self) -> int:
        return 5 if (self.vendor / "measurements").exists() else 6

    @property
    def benchmark(self) -> Path:
        return next(path for path in (self.vendor / "results/sys").iterdir())

    @property
    def system(self) -> Path:
        return self.vendor / "systems/sys.json"

    def run(self, scenario: str = "Offline") -> Path:
        return self.benchmark / scenario / "performance/run_1"

    def accuracy(self, scenario: str = "Offline") -> Path:
        return self.benchmark / scenario / "accuracy"

    def described(self, scenario: str = "Offline") -> Path:
        folder = self.benchmark / scenario
        return self.vendor / "measurements/sys" / folder.parent.name / scenario if self.version == 5 else folder

    def description(self, scenario: str = "Offline") -> Path:
        name = f"sys_megatoken_{scenario}.json" if self.version == 5 else "measurements.json"
        return self.described(scenario) / name

    def test06(self, scenario: str = "Offline") -> Path:
        folder = self.vendor / "compliance/sys" / self.benchmark.name if self.version == 5 else self.benchmark
        return folder / scenario / "TEST06"


def logged(log: Path, key: str, value: object) -> None:
    """Changes one value of a detail log."""
    lines = log.read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if f'"key": "{key}"' in line)
    lines[place] = re.sub(r'"value": .*?, "time_ms"', f'"value": {json.dumps(value)}, "time_ms"', lines[place])
    log.write_text("".join(lines))


def without(log: Path, key: str) -> None:
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if f'"key": "{key}"' not in line))


def erring(log: Path) -> None:
    """Marks a line as an error, as LoadGen marks those of double completions and of a second configuration."""
    log.write_text(log.read_text().replace('"is_error": false', '"is_error": true', 1))


def changed(path: Path, **values: object) -> None:
    """Changes keys of a JSON file; None takes one out."""
    content = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=1))


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def scored(tree: Tree, name: str, value: str) -> None:
    path = tree.accuracy() / "accuracy.txt"
    path.write_text(re.sub(rf"('{name}': )[\d.]+", rf"\g<1>{value}", path.read_text()))


def moved(path: Path, name: str) -> None:
    path.rename(path.with_name(name))


def renamed_everywhere(tree: Tree, name: str) -> None:
    old = tree.benchmark.name
    for path in [path for path in tree.vendor.rglob(old) if path.is_dir()]:
        moved(path, name)


def offline_in_place_of_server(tree: Tree) -> None:
    for name in (DETAIL, SUMMARY):
        shutil.copy(tree.run("Offline") / name, tree.run("Server") / name)


def accuracy_in_place_of_performance(tree: Tree) -> None:
    for name in (DETAIL, SUMMARY):
        shutil.copy(tree.accuracy() / name, tree.run() / name)


def performance_in_place_of_accuracy(tree: Tree) -> None:
    for name in (DETAIL, SUMMARY):
        shutil.copy(tree.run() / name, tree.accuracy() / name)


def with_scenario(tree: Tree, name: str, like: str = "Offline") -> None:
    for folder in dict.fromkeys((tree.benchmark, tree.described().parent, tree.test06().parents[1])):
        if (folder / like).exists():
            shutil.copytree(folder / like, folder / name)
    if tree.version == 5:
        moved(tree.described(name) / f"sys_megatoken_{like}.json", f"sys_megatoken_{name}.json")


def scenario_in_lower_case(tree: Tree) -> None:
    for folder in dict.fromkeys((tree.benchmark, tree.described().parent, tree.test06().parents[1])):
        if (folder / "Offline").exists():
            moved(folder / "Offline", "offline")


def large(tree: Tree) -> None:
    with (tree.vendor / "README.md").open("wb") as file:
        file.truncate(51 * 2**20)


def stray(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")


def without_scenario(tree: Tree, scenario: str) -> None:
    for folder in dict.fromkeys((tree.benchmark, tree.described().parent, tree.test06().parents[1])):
        shutil.rmtree(folder / scenario)


# Whether a break is refused: True by MLCommons' checker and by us, False by us alone, None by nobody.
T, F, N, X = True, False, None, "not tried"
NS = 1_000_000
TTFT99 = "result_first_token_99.00_percentile_latency_ns"
TPOT99 = "result_time_per_output_token_99.00_percentile_ns"

# name: rule, words of expected or found, (v5.1 closed, v6.1 closed, v5.1 open), what breaks it
Breaking = tuple[str, str, tuple[object, object, object], Callable[[Tree], object]]
BREAKS: dict[str, Breaking] = {
    "no detail log": ("P1", "missing: mlperf_log_detail.txt", (T, T, T), lambda t: (t.run() / DETAIL).unlink()),
    "no summary": ("P1", "missing: mlperf_log_summary.txt", (T, F, T), lambda t: (t.run() / SUMMARY).unlink()),
    "stray file": ("P1", "not allowed: notes.txt", (T, N, T), lambda t: (t.run() / "notes.txt").write_text("x")),
    "invalid": ("P2", "INVALID", (T, F, T), lambda t: logged(t.run() / DETAIL, "result_validity", "INVALID")),
    "no verdict": ("P2", "no verdict", (T, F, T), lambda t: without(t.run() / DETAIL, "result_validity")),
    "errors": (
        *("P3", "1 error, ", (T, F, T)),
        lambda t: (erring(t.run() / DETAIL), logged(t.run() / DETAIL, "num_errors", 1)),
    ),
    "errors that LoadGen did not count": ("P3", "1 error, ", (F, F, F), lambda t: erring(t.run() / DETAIL)),
    "no equal issue": (
        *("P4", "effective_sample_concatenate_permutation: false", (T, F, T)),
        lambda t: logged(t.run() / DETAIL, "effective_sample_concatenate_permutation", False),
    ),
    "small library": (
        *("P5", "at least 24", (T, T, T)),
        lambda t: logged(t.run() / DETAIL, "effective_performance_sample_count", 12),
    ),
    "other data set": (
        *("P5", "30 rows", (F, F, N)),
        lambda t: logged(t.run() / DETAIL, "qsl_reported_total_count", 30),
    ),
    "seed": ("P6", "7", (T, T, T), lambda t: logged(t.run() / DETAIL, "effective_schedule_rng_seed", 7)),
    "short": ("P7", "0.299 s", (T, T, T), lambda t: logged(t.run() / DETAIL, "effective_min_duration_ms", 299)),
    "ended early": ("P7", "0.2 s", (F, F, N), lambda t: logged(t.run() / DETAIL, "result_max_latency_ns", 200 * NS)),
    "few samples": (
        *("P8 P9", "at least 24 samples", (T, T, T)),
        lambda t: logged(t.run() / DETAIL, "effective_samples_per_query", 23),
    ),
    "no query asked": (
        *("P8 P9", "at least 24 samples", (T, T, T)),
        lambda t: logged(t.run() / DETAIL, "effective_min_query_count", 0),
    ),
    "no line of queries": (
        *("P8 P9", "at least 24 samples", (T, T, T)),
        lambda t: without(t.run() / DETAIL, "effective_min_query_count"),
    ),
    "early stopping": (
        *("P10", "False", (F, T, F)),
        lambda t: logged(t.run("Server") / DETAIL, "early_stopping_met", False),
    ),
    "target latency": (
        *("P11", "at most 20000000000", (T, T, T)),
        lambda t: logged(t.run("Server") / DETAIL, "effective_target_latency_ns", 20_000 * NS + 1),
    ),
    "no token latencies": (
        *("P12", "token latencies switched on", (T, T, T)),
        lambda t: logged(t.run() / DETAIL, "requested_use_token_latencies", False),
    ),
    "TTFT at the limit": (
        *("P13", "2000 ms and", (T, T, T)),
        lambda t: logged(t.run("Server") / DETAIL, TTFT99, 2_000 * NS),
    ),
    "TPOT over the limit": ("P13", "201 ms", (T, T, T), lambda t: logged(t.run("Server") / DETAIL, TPOT99, 201 * NS)),
    "no TTFT": ("P13", "figures missing", (T, T, T), lambda t: without(t.run("Server") / DETAIL, TTFT99)),
    "own limits": (
        *("P13", "9000000000", (F, F, N)),
        lambda t: logged(t.run("Server") / DETAIL, "requested_server_ttft_latency", 9_000 * NS),
    ),
    "log of another scenario": ("P14", "scenario Offline", (T, T, T), offline_in_place_of_server),
    "no figure": (
        *("P15", "result_tokens_per_second", (T, T, T)),
        lambda t: without(t.run() / DETAIL, "result_tokens_per_second"),
    ),
    "binary log": ("P15", "is binary", (T, T, T), lambda t: (t.run() / DETAIL).write_bytes(bytes(9999))),
    "accuracy as performance": (
        *("P15", "number under result_tokens_per_second", (T, T, T)),
        accuracy_in_place_of_performance,
    ),
    "performance as accuracy": ("P15", "AccuracyOnly; PerformanceOnly", (F, F, N), performance_in_place_of_accuracy),
    "networked": ("P16", "true", (T, T, X), lambda t: changed(t.system, is_network="true")),
    "no Server": ("P17", "Server or Interactive", (T, T, N), lambda t: without_scenario(t, "Server")),
    "no Offline": ("P17", "Offline and Server", (T, T, N), lambda t: without_scenario(t, "Offline")),
    "other scenario": ("P17", "Interactive, Offline, Server", (T, T, X), lambda t: with_scenario(t, "SingleStream")),
    "mapping that is no JSON": (
        *("P17", "a JSON object", (N, N, T)),
        lambda t: (t.vendor / "model_mapping.json").write_text("{"),
    ),
    "unknown scenario": ("P17", "Burst", (T, T, T), lambda t: with_scenario(t, "Burst")),
    "server log in another folder": (
        *("P13", "limits or figures missing", (X, X, F)),
        lambda t: with_scenario(t, "MultiStream", "Server"),
    ),
    "scenario in lower case": ("P17", "offline", (N, N, N), scenario_in_lower_case),
    "unknown benchmark": ("P17", "llama2-70b-98", (T, T, T), lambda t: renamed_everywhere(t, "llama2-70b-98")),
    "no accuracy.txt": ("A1 A4", "accuracy.txt", (T, T, T), lambda t: (t.accuracy() / "accuracy.txt").unlink()),
    "no accuracy run": ("A1 A4", "missing", (T, T, T), lambda t: shutil.rmtree(t.accuracy())),
    "whole accuracy log": (
        *("A1 A4", "not truncated: 10,241 bytes", (T, T, N)),
        lambda t: (t.accuracy() / ANSWERS).write_text((t.accuracy() / ANSWERS).read_text().ljust(10_241)),
    ),
    "low score": ("A2", "rouge1 44.386 below", (T, T, N), lambda t: scored(t, "rouge1", "44.386")),
    "short answers": ("A2", "tokens_per_sample 50 below", (T, T, N), lambda t: scored(t, "tokens_per_sample", "50.0")),
    "long answers": ("A2", "tokens_per_sample 80 above", (T, T, N), lambda t: scored(t, "tokens_per_sample", "80.0")),
    "score of NumPy": (
        *("A2", "rouge2 22.1, not written as 'rouge2': NUMBER", (T, T, N)),
        lambda t: replaced(t.accuracy() / "accuracy.txt", "22.1", "np.float64(22.1)"),
    ),
    "no score": (
        *("A2", "no rougel", (T, T, N)),
        lambda t: replaced(t.accuracy() / "accuracy.txt", "rougeL'", "rougeX'"),
    ),
    "no score at all": ("A2", "no rouge1", (T, T, T), lambda t: replaced(t.accuracy() / "accuracy.txt", "'", "")),
    "no hash": ("A3", "none", (T, T, N), lambda t: replaced(t.accuracy() / "accuracy.txt", "hash=", "sha256: ")),
    "hash with words": ("A3", "none", (T, T, N), lambda t: replaced(t.accuracy() / "accuracy.txt", "hash=", "hash= ")),
    "errors of accuracy": ("A5", "1 error, ", (T, T, T), lambda t: erring(t.accuracy() / DETAIL)),
    "part of the data set": (
        *("A6", "12 rows", (F, T, N)),
        lambda t: logged(t.accuracy() / DETAIL, "effective_accuracy_sample_count", 12),
    ),
    "no TEST06": ("C1", "no folder TEST06", (T, T, N), lambda t: t.division == "open" or shutil.rmtree(t.test06())),
    "TEST06 failed": (
        *("C1", "no line EOS check pass: True", (T, T, N)),
        lambda t: (
            t.division == "open"
            or replaced(t.test06() / "verify_accuracy.txt", "EOS check pass: True", "EOS check pass: True (99 of 100)")
        ),
    ),
    "no user.conf": ("M1", "user.conf", (T, T, T), lambda t: (t.described() / "user.conf").unlink()),
    "empty README": ("M1", "README.md", (T, T, T), lambda t: (t.described() / "README.md").write_text("")),
    "no description": ("M1", "a JSON description", (T, T, T), lambda t: t.description().unlink()),
    "description of another": (
        *("M1", "begins with sys", (T, N, T)),
        lambda t: t.version == 5 and moved(t.description(), "other_Offline.json"),
    ),
    "empty key": ("M1", "retraining", (T, T, T), lambda t: changed(t.description(), retraining="")),
    "missing key": ("M1", "weight_data_types", (T, T, T), lambda t: changed(t.description(), weight_data_types=None)),
    "no code": (
        *("M1", "a folder", (T, T, T)),
        lambda t: shutil.rmtree(t.vendor / ("code" if t.version == 5 else "src")),
    ),
    "code of another benchmark": (
        *("M1", "code/llama2-70b-99.9", (T, N, T)),
        lambda t: t.version == 5 and moved(t.vendor / "code" / t.benchmark.name, "other"),
    ),
    "no system": ("S2", "no description of: sys", (T, T, T), lambda t: t.system.unlink()),
    "broken system": ("S1", "is not JSON", (T, T, T), lambda t: t.system.write_text("{")),
    "missing system key": ("S1", "missing: cooling", (T, T, T), lambda t: changed(t.system, cooling=None)),
    "empty system key": ("S1", "empty: framework", (T, T, T), lambda t: changed(t.system, framework="")),
    "number as value": (
        *("S1", "accelerators_per_node: 0", (T, T, T)),
        lambda t: changed(t.system, accelerators_per_node=0),
    ),
    "boolean as text": ("S1", "is_network: False", (T, T, T), lambda t: changed(t.system, is_network=False)),
    "unknown status": ("S1", "someday", (T, T, T), lambda t: changed(t.system, status="someday")),
    "status in capitals": ("S1", "Available", (N, N, N), lambda t: changed(t.system, status="Available")),
    "unknown type": ("S1", "laptop", (T, T, T), lambda t: changed(t.system, system_type="laptop")),
    "other submitter": ("S2", "Rival", (T, T, T), lambda t: changed(t.system, submitter="Rival")),
    "other division": ("S2", "network", (T, T, T), lambda t: changed(t.system, division="network")),
    "untested system": (
        *("S2", "no results of: spare", (T, N, T)),
        lambda t: shutil.copy(t.system, t.system.with_name("spare.json")),
    ),
    "another division, untested": (
        *("S2", "no results of: spare", (T, N, T)),
        lambda t: changed(
            Path(shutil.copy(t.system, t.system.with_name("spare.json"))), division="network", cooling=""
        ),
    ),
    "no calibration": ("S3", "none", (T, N, N), lambda t: shutil.rmtree(t.vendor / "documentation", True)),
    "blank in a name": ("F1", "a blank in its name", (T, N, T), lambda t: (t.vendor / "read me.md").write_text("x")),
    "hidden file": ("F1", "a hidden name", (T, N, T), lambda t: (t.vendor / ".cache").write_text("x")),
    "empty folder": ("F1", "an empty folder", (T, N, T), lambda t: (t.vendor / "documents").mkdir()),
    "Python's leftovers": ("F1", "left by Python", (T, N, T), lambda t: (t.vendor / "__pycache__").mkdir()),
    "stray file at the root": ("F1", "a stray file", (T, N, T), lambda t: (t.root / "notes.txt").write_text("x")),
    "licence at the root": ("F1", "LICENSE", (T, N, T), lambda t: (t.root / "LICENSE").write_text("x")),
    "paper at the root": ("F1", "", (N, N, N), lambda t: (t.root / "paper.pdf").write_text("x")),
    "readme of a division": (
        "F1",
        "README.md",
        (T, N, T),
        lambda t: (t.root / t.division / "README.md").write_text("x"),
    ),
    "stray file of a division": (
        *("F1", "a stray file", (T, N, T)),
        lambda t: (t.root / t.division / "notes.txt").write_text("x"),
    ),
    "stray folder of results": (
        *("F1", "stray files, folders or links: stray", (T, T, T)),
        lambda t: stray(t.benchmark.parents[1] / "stray/f"),
    ),
    "stray benchmark": ("F1", "sys/other", (T, T, T), lambda t: stray(t.benchmark.parent / "other/f")),
    "stray folder of a scenario": (
        *("F1", "Offline/old", (N, N, N)),
        lambda t: stray(t.benchmark / "Offline/old/f"),
    ),
    "stray file of a scenario": ("F1", "junk.bin", (N, N, N), lambda t: stray(t.benchmark / "Offline/junk.bin")),
    "stray file of a system": ("F1", "sys/notes.txt", (N, N, N), lambda t: stray(t.benchmark.parent / "notes.txt")),
    "link to a folder": ("F1", "Offline/loop", (N, N, N), lambda t: (t.benchmark / "Offline/loop").symlink_to(".")),
    "what does no harm": (
        *("F1", "", (N, N, N)),
        lambda t: [stray(t.benchmark / f"Offline/{name}") for name in ("notes.md", "mlperf.conf", "audit.config")],
    ),
    "impossible score": ("A2", "rouge1 999", (F, F, F), lambda t: scored(t, "rouge1", "999")),
    "described and not run": (
        *("M1", "no results of other", (T, N, T)),
        lambda t: t.version == 5 and shutil.copytree(t.described(), t.described().parents[2] / "other/model/Offline"),
    ),
    "described and withdrawn": (
        *("M1", "", (N, N, N)),
        lambda t: t.version == 5 and shutil.copytree(t.described(), t.described().parents[1] / "other/Offline"),
    ),
    "broken link": ("F1", "a broken link", (T, N, T), lambda t: (t.vendor / "link").symlink_to("nowhere")),
    "large file": ("F1", "larger than 50 MiB", (T, N, T), large),
    "field to fill": ("FILL", "cooling", (F, F, F), lambda t: changed(t.system, cooling="TO FILL: such as air")),
    "paragraph to fill": (
        *("FILL", "a paragraph", (F, F, F)),
        lambda t: (t.described() / "README.md").write_text("TO FILL: how\n"),
    ),
}
SHAPES = (("v5.1", "closed"), ("v6.1", "closed"), ("v5.1", "open"))


def cases() -> Iterator[tuple[str, int]]:
    """Each break in every shape; of shapes that decide alike about it one, in turn, and the others on demand."""
    for place, (name, (_, _, decisions, _)) in enumerate(BREAKS.items()):
        for decision in dict.fromkeys(decisions):
            shapes = [shape for shape in range(len(SHAPES)) if decisions[shape] is decision]
            one = shapes.pop(place % len(shapes))
            if decision is not X:
                yield from ((name, shape) for shape in (one, *every(*shapes)))


@pytest.mark.parametrize(
    ("name", "shape"), [pytest.param(*case, id="-".join((case[0], *SHAPES[case[1]]))) for case in cases()]
)
def test_a_break_is_refused_by_its_rule(
    built: Callable[[str, str], Path], tmp_path: Path, name: str, shape: int
) -> None:
    rule, words, decisions, spoil = BREAKS[name]
    round_, division = SHAPES[shape]
    root = Path(shutil.copytree(built(round_, division), tmp_path / "tree"))
    spoil(Tree(root, division))
    result = check(root, round=round_)
    found = [problem for problem in result.problems if problem.rule and problem.rule.id == rule]
    if decisions[shape] is None:
        assert [problem for problem in result.refusals if problem in found] == []
        assert (result.exit_code, result.mlcommons_refuses) == (0, False), list(result.describe())
        return
    found = [problem for problem in found if words in f"{problem.expected}; {problem.found}"]
    assert found, [(p.rule and p.rule.id, p.expected, p.found) for p in result.problems]
    assert all(problem.refused for problem in found)
    assert found[0].by_mlcommons is decisions[shape], list(result.describe())
    assert result.exit_code == 3
    if decisions[shape] is False:
        assert not result.mlcommons_refuses, list(result.describe())
    assert found[0].where and found[0].rule is not None and found[0].rule.fix and found[0].rule.source
    assert found[0].where[0].file.startswith((division, "notes.txt", "LICENSE"))


def refused(result: Check) -> list[str]:
    return sorted({problem.rule.id for problem in result.refusals if problem.rule})


def test_a_networked_system_in_the_open_division(built: Callable[[str, str], Path], tmp_path: Path) -> None:
    tree = Tree(Path(shutil.copytree(built("v5.1", "open"), tmp_path / "tree")), "open")
    changed(tree.system, is_network="true")
    assert refused(check(tree.root)) == ["P16", "S1"]
    changed(tree.system, **dict.fromkeys(rules()["network_keys"], "as stated by its maker"))
    for scenario in ("Offline", "Server"):
        logged(tree.run(scenario) / DETAIL, "sut_name", "A Network SUT")
    assert check(tree.root).refusals == ()
