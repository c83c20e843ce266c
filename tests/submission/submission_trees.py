"""What stands around a run folder and a tree: evaluations, compliance tests, and a person who fills in."""

import json
from collections.abc import Callable
from pathlib import Path

import making

from megatoken.accuracy.evaluate import Mean, Scores
from megatoken.accuracy.files import document, write_results
from megatoken.accuracy.verify import verify as verify_log
from megatoken.datasets.references import References
from megatoken.mlperf import rounds as facts
from megatoken.mlperf.accuracy_log import read_answers
from megatoken.runs.run import read_run

SCENARIOS = ("offline", "server")
MEAN = sum(map(making.answer_tokens, range(making.ROWS))) / making.ROWS
SCORES = {"rouge1": 44.5, "rouge2": 22.1, "rougeL": 28.7, "rougeLsum": 41.9, "gen_len": 5000}
SEEDS = {name: list(seeds) for name, seeds in facts.round_seeds().items()}

Make = Callable[..., Path]


def evaluate(run: Path, **scores: float) -> Path:
    """What ``megatoken accuracy`` leaves in a run folder; the scores are made up, the counts are those of the log."""
    answers = read_answers(run / "mlperf" / "mlperf_log_accuracy.json")
    given = {**SCORES, **scores}
    means = {name: Mean(given[name], 0.1, making.ROWS) for name in ("rouge1", "rouge2", "rougeL", "rougeLsum")}
    tokens = sum(map(len, answers.token_ids()))
    found = Scores(means, {}, len(answers.records), tokens, int(given["gen_len"]), None, 0, 0)
    references = References(
        path=Path("rows.jsonl"),  # not here, so no audit can score the answers
        texts=("",) * making.ROWS,
        scorings=("summary",) * making.ROWS,
        tasks=(),
        data_set="llama2-70b",
        content_hash=read_run(run).result["data_set_sha256"],
    )
    write_results(run / "accuracy", answers, found, document(answers, references, found, None, [], []))
    return run


def verify(run: Path) -> Path:
    """What ``megatoken verify`` leaves in a run folder."""
    verify_log("TEST06", run, end_tokens="2")
    return run


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
                values[key] = own.get(key, "as its maker says")
        path.write_text(json.dumps(values, indent=1))
    for path in root.rglob("*.md"):
        path.write_text(path.read_text().replace("TO FILL", "Filled in"))
    return root
