import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import making
import pytest
from submission_trees import MEAN, SEEDS, Make, all_runs, evaluate, fill

from megatoken.mlperf import rounds as facts
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.submission import build


@pytest.fixture(autouse=True)
def short_round() -> Iterator[None]:
    """The rules of all rounds, shortened to what ``making`` makes."""
    rules = facts.rules()
    assert rules["min_duration_ms"] == 600_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rules, "min_duration_ms", round(making.SECONDS * 1000))
        for benchmark in rules["benchmarks"].values():
            patch.setitem(benchmark, "rows", making.ROWS)
            if benchmark.get("tokens_per_sample", [0])[0]:
                patch.setitem(benchmark, "tokens_per_sample", [0.9 * MEAN, 1.1 * MEAN])
        benchmarks.cache_clear()
        yield
    benchmarks.cache_clear()


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Run folders of every kind, each made once a session."""
    made: dict[str, Path] = {}

    def original(scenario: str, role: str = "performance", **options: object) -> Path:
        key = json.dumps([scenario, role, options], sort_keys=True)
        if key not in made:
            out = str(tmp_path_factory.mktemp("runs"))
            mode = "accuracy" if role == "accuracy" else "performance"
            kind = {"mode": mode, "test06": role == "compliance", **options}
            if scenario == "offline" and options.keys() <= {"seeds"}:
                notes = [making.RULES_NOTE, *([making.COMPLIANCE_NOTE] if role == "compliance" else [])]
                run = making.offline(out=out, facts={**making.MODEL, "notes": notes}, **kind)
            else:
                run = making.make(out=out, scenario=scenario, **kind)
            made[key] = evaluate(run) if role == "accuracy" else run
        return made[key]

    return original


@pytest.fixture
def copies(originals: Make, tmp_path: Path) -> Make:
    """A copy of such a run folder that a test may spoil."""

    def copy(*kind: str, **options: object) -> Path:
        run = originals(*kind, **options)
        return Path(shutil.copytree(run, tmp_path / "runs" / "-".join(kind) / run.name))

    return copy


@pytest.fixture(scope="session")
def built(originals: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A whole submission of a round and division, filled in."""
    made: dict[tuple[str, str], Path] = {}

    def whole(round_: str, division: str) -> Path:
        if (round_, division) not in made:
            out = tmp_path_factory.mktemp("submission") / "tree"
            seeds = {} if round_ == "v5.1" else {"seeds": SEEDS[round_]}
            runs = all_runs(originals, **seeds)
            build(runs, submitter="Vendor", division=division, round_=round_, out=out, system="sys")
            made[round_, division] = fill(out)
        return made[round_, division]

    return whole


@pytest.fixture(params=["v5.1", "v6.1"])
def tree(request: pytest.FixtureRequest, built: Callable[[str, str], Path], tmp_path: Path) -> Path:
    """A copy of the closed submission of a round."""
    return Path(shutil.copytree(built(request.param, "closed"), tmp_path / request.param))
