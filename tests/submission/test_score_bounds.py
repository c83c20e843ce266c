"""Scores of accuracy.txt that have an upper bound alone: longer answers are refused, missing lengths are not."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.audit import Severity
from megatoken.audit.discovery import walk
from megatoken.mlperf.benchmarks import benchmarks
from megatoken.submission.evidence_checks import check_scores


@pytest.mark.parametrize(
    ("lengths", "holds", "found"),
    [
        ("", True, "exact_match 83"),
        ("'tokens_per_sample': 9999.0", True, "exact_match 83"),
        ("'tokens_per_sample': 10999.0", False, "tokens_per_sample 10999 above 10998.9"),
    ],
)
def test_long_answers_of_gpt_oss(tmp_path: Path, lengths: str, holds: bool, found: str) -> None:
    (tmp_path / "run/accuracy").mkdir(parents=True)
    scores = f"{{'exact_match': 83.0, {lengths}}}"
    (tmp_path / "run/accuracy/accuracy.txt").write_text(f"{scores}\nhash={'0' * 64}\n")
    # As published: the other tests of this folder make its rules small.
    benchmark = replace(benchmarks()["gpt-oss-120b"], tokens_per_sample=(0, 10998.9))
    first = next(iter(check_scores(walk(tmp_path), "run", benchmark)))
    assert (first.severity is Severity.PASS, found in first.found) == (holds, True), first
