"""MLPerf Inference submissions: a tree built of run folders, and MLCommons' checker's decision on any tree."""

from megatoken.submission.build import Built, build
from megatoken.submission.check import Check, check
from megatoken.submission.runs import RefusedRunsError

__all__ = ["Built", "Check", "RefusedRunsError", "build", "check"]
