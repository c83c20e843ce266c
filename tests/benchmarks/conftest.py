"""Benchmarks are scripts beside the package: their folder goes on the import path, as it does when one is run.

So does that of the tests of kernels, whose cases a kernel that only a benchmark runs is held to as well.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "engine" / "gpu")]
