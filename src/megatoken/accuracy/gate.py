"""The accuracy that a run must have to be healthy: of the reference model, nearly what it has in fp32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from megatoken.accuracy.answers import find_log
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.judge import Judged, judge_log
from megatoken.accuracy.scores import check_installed
from megatoken.accuracy.targets import FOLDER, Targets, of_baseline
from megatoken.datasets.references import HELD_OUT, References, load_references
from megatoken.engine.config import REFERENCE, model_folder

BASELINE = model_folder(REFERENCE) / "baseline.json"
SHARE = 0.99  # of every score of the baseline


@dataclass(frozen=True, slots=True)
class AccuracyGate:
    """What the answers of an accuracy run are held against before there is a verdict.

    Attributes:
        references: The answers expected.
        decoder: Of the model that answers.
        targets: What must be reached; None: only some rows are answered, which shows too little to judge by.
    """

    references: References
    decoder: AnswerDecoder
    targets: Targets | None

    def judge(self, run_folder: Path) -> Judged:
        """Scores the answers in LoadGen's accuracy log; ``accuracy.txt`` and ``accuracy.json`` go into the run folder.

        Raises:
            UsageError: The log is not that of the rows expected.
            StorageError: The results cannot be written.
        """
        return judge_log(
            find_log(run_folder),
            run_folder / FOLDER,
            self.references,
            self.decoder,
            self.targets,
            partial=self.targets is None,
            processes=1,  # they would outlive a run that a signal ends at once
        )


def reference_gate(content_hash: str, rows: int) -> AccuracyGate | None:
    """The gate of a run of the reference model; None where it answers anything but rows of its held-out set, once each.

    Args:
        content_hash: Of the run's data set.
        rows: How many rows are answered, from the first.

    Raises:
        UsageError: What scores need is not installed, or the baseline cannot be read.
    """
    references = load_references(HELD_OUT)
    if content_hash != references.content_hash or rows > len(references.texts):
        return None
    check_installed()
    targets = None
    if rows == len(references.texts):
        source = f"the reference model's gate ({SHARE:.0%} of fp32)"
        targets = replace(of_baseline(BASELINE, SHARE, references), source=source)
    return AccuracyGate(references, AnswerDecoder(model_folder(REFERENCE)), targets)
