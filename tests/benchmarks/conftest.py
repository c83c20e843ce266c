"""Benchmarks are scripts beside the package: their folder goes on the import path, as it does when one is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
