"""MLPerf Inference submissions: build a tree from run folders, and check any tree by the rules of MLCommons."""

from megatoken.submission.build import Built, build
from megatoken.submission.check import Check, check
from megatoken.submission.runs import RefusedRunsError

__all__ = ["Built", "Check", "RefusedRunsError", "build", "check"]
