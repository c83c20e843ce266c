import json
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import making
import pytest

from megatoken.audit import facts
from megatoken.submission import build

SCENARIOS = ("offline", "server")
MEAN = sum(map(making.answer_tokens, range(making.ROWS))) / making.ROWS
SCORES = {"rouge1": 44.5, "rouge2": 22.1, "rougeL": 28.7, "rougeLsum": 41.9, "gen_len": 5000, "gen_num": making.ROWS}
PASSED = "First token check pass: Skipped\nEOS check pass: True\nSample length check pass: True\nTEST06 verification complete\n"
SEEDS = {name: list(seeds) for name, seeds in facts.round_seeds().items()}

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def short_round() -> Iterator[None]:
    """The rules of all rounds, cut down to what ``making`` makes."""
    rules = facts.rules()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rules, "min_duration_ms", round(making.SECONDS * 1000))
        for benchmark in rules["benchmarks"].values():
            patch.setitem(benchmark, "rows", making.ROWS)
            if "tokens_per_sample" in benchmark:
                patch.setitem(benchmark, "tokens_per_sample", [0.9 * MEAN, 1.1 * MEAN])
        facts.benchmarks.cache_clear()
        yield
    facts.benchmarks.cache_clear()


def evaluate(run: Path, **scores: float) -> Path:
    """What ``megatoken accuracy`` leaves in a run folder."""
    log = (run / "mlperf" / "mlperf_log_accuracy.json").read_bytes()
    tokens = sum(len(entry["data"]) // 8 for entry in json.loads(log)) / making.ROWS
    told = {**SCORES, "tokens_per_sample": round(tokens, 1), **scores}
    (run / "accuracy").mkdir(exist_ok=True)
    (run / "accuracy" / "accuracy.txt").write_text(f"{told}\nhash={sha256(log).hexdigest()}\n")
    return run


def verify(run: Path, text: str = PASSED) -> Path:
    """What the compliance test leaves in a run folder."""
    (run / "compliance").mkdir(exist_ok=True)
    (run / "compliance" / "verify_accuracy.txt").write_text(text)
    return run


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Run folders of every kind, each made once a session."""
    made: dict[str, Path] = {}

    def original(scenario: str, role: str = "performance", **options: object) -> Path:
        key = json.dumps([scenario, role, options], sort_keys=True)
        if key not in made:
            out = str(tmp_path_factory.mktemp("runs"))
            mode = "accuracy" if role == "accuracy" else "performance"
            if scenario == "offline" and role != "compliance" and options.keys() <= {"seeds"}:
                run = making.make("offline", out=out, mode=mode, facts={**making.MODEL, "notes": []}, **options)
            else:
                run = making.make(
                    "direct", out=out, scenario=scenario, mode=mode, test06=role == "compliance", **options
                )
            made[key] = {"accuracy": evaluate, "compliance": verify}.get(role, lambda one: one)(run)
        return made[key]

    return original


@pytest.fixture
def copies(originals: Make, tmp_path: Path) -> Make:
    """A copy of such a run folder that a test may spoil."""

    def copy(*kind: str, **options: object) -> Path:
        run = originals(*kind, **options)
        return Path(shutil.copytree(run, tmp_path / "runs" / "-".join(kind) / run.name))

    return copy


def all_runs(make: Make, scenarios: tuple[str, ...] = SCENARIOS, **options: object) -> list[Path]:
    roles = ("performance", "accuracy", "compliance")
    return [make(scenario, role, **options) for scenario in scenarios for role in roles]


def fill(root: Path) -> Path:
    """What a person does after a build."""
    own = {"status": "available", "retraining": "no"}
    for path in root.rglob("*.json"):
        if path.name == "mlperf_log_accuracy.json":
            continue
        values = json.loads(path.read_text())
        for key, value in values.items():
            if str(value).startswith("TO FILL"):
                values[key] = own.get(key, "as told by its maker")
        path.write_text(json.dumps(values, indent=1))
    for path in root.rglob("*.md"):
        path.write_text(path.read_text().replace("TO FILL", "Filled in"))
    return root


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
