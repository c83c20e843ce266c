"""Gates: checks of a run's answers that its verdict depends on.

Answers of the reference model must be nearly as accurate as in fp32; those of a compliance test must pass that test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatoken.accuracy.answer_log import find_log
from megatoken.accuracy.decoding import AnswerDecoder
from megatoken.accuracy.files import write_results
from megatoken.accuracy.judge import scored
from megatoken.accuracy.scores import check_installed
from megatoken.accuracy.targets import FOLDER, Targets, of_baseline
from megatoken.accuracy.verify import cut_samples, write_result
from megatoken.datasets.references import HELD_OUT, References, load_references
from megatoken.engine.config import REFERENCE, model_folder
from megatoken.mlperf.accuracy_log import read_answers
from megatoken.mlperf.compliance import ComplianceResult, check_test06
from megatoken.runs.reasons import Reason, reason

if TYPE_CHECKING:
    import pyarrow as pa

BASELINE = model_folder(REFERENCE) / "baseline.json"
SHARE = 0.99  # of every score of the baseline
FACTS = ("metrics", "tokens_per_sample", "targets")  # of accuracy.json, that result.json has too


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a gate adds to ``result.json``, and the reasons that make the run INVALID."""

    facts: Mapping[str, Any]
    reasons: Sequence[Reason]


class Gate(Protocol):
    """A check of the answers before a run gets its verdict."""

    def judge(self, run_folder: Path, requests: pa.Table) -> Judgement:
        """Judges the answers in LoadGen's log; ``requests`` is the table of ``SampleRow`` of all samples."""


@dataclass(frozen=True, slots=True)
class AccuracyGate:
    """Scores the answers of an accuracy run and compares them with targets."""

    references: References
    decoder: AnswerDecoder
    targets: Targets | None  # None: only some rows are answered, too few to judge

    def judge(self, run_folder: Path, requests: pa.Table) -> Judgement:
        """Scores the answers in LoadGen's accuracy log; ``accuracy.txt`` and ``accuracy.json`` go into the run folder.

        Raises UsageError: The log does not fit the expected answers; StorageError: The results cannot be written.
        """
        answers, partial = read_answers(find_log(run_folder)), self.targets is None
        # Further processes would outlive a run that a signal ends at once.
        judged, scores = scored(answers, self.references, self.decoder, self.targets, partial=partial, processes=1)
        write_results(run_folder / FOLDER, answers, scores, judged)
        return accuracy_judgement(judged)


@dataclass(frozen=True, slots=True)
class ComplianceGate:
    """TEST06: MLPerf's check, and our own check of the model's end tokens."""

    offline: bool  # the scenario reports no first tokens
    end_token_ids: Sequence[int]

    def judge(self, run_folder: Path, requests: pa.Table) -> Judgement:
        """Checks the answers; writes the file that a submission carries, and ours, into the run folder.

        Raises UsageError: The log holds no answers; StorageError: The file cannot be written.
        """
        answers, cut = read_answers(find_log(run_folder)), cut_samples(requests)
        result = check_test06(answers, offline=self.offline, end_token_ids=self.end_token_ids, cut_samples=cut)
        write_result(result, run_folder)
        return compliance_judgement(result)


def accuracy_judgement(document: Mapping[str, Any]) -> Judgement:
    """What an ``accuracy.json`` adds to ``result.json``, and the reasons that it gives."""
    return Judgement({"accuracy": {name: document[name] for name in FACTS}}, document["reasons"])


def compliance_judgement(result: ComplianceResult) -> Judgement:
    """What the outcome of a compliance test adds to ``result.json``, and the reasons that it gives."""
    reasons = [reason("COMPLIANCE", finding=one["message"], check=one["code"]) for one in result.findings]
    return Judgement({"compliance": result.to_document()}, reasons)


def reference_gate(content_hash: str, rows: int) -> AccuracyGate | None:
    """The gate of a run of the reference model; None unless it answers the first ``rows`` rows of its held-out set.

    Raises UsageError: rouge-score is not installed, or the baseline cannot be read.
    """
    references = load_references(HELD_OUT)
    if content_hash != references.content_hash or rows > len(references.texts):
        return None
    check_installed()
    targets = None
    if rows == len(references.texts):
        source = f"the reference model's gate ({100 * SHARE:.0f} % of fp32)"
        targets = replace(of_baseline(BASELINE, SHARE, references), source=source)
    return AccuracyGate(references, AnswerDecoder(model_folder(REFERENCE)), targets)
