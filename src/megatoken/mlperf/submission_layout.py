"""The folders and files of a submission.

Layouts: submission_structure.md and the paths in constants.py of mlcommons/inference, tools/submission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatoken.errors import UsageError
from megatoken.mlperf.rounds import known_round

ROUNDS = ("v5.1", "v6.0", "v6.1")
TO_FILL = "TO FILL"  # `build` writes it for unknown values; `check` refuses it
IMPLEMENTATION = "megatoken"
MODEL_MAPPING = "model_mapping.json"  # of a submission to the open division: model's folder -> benchmark


class Key(NamedTuple):
    """The system, benchmark and scenario of a result, as folder names."""

    system: str
    benchmark: str
    scenario: str

    @property
    def path(self) -> str:
        """The three as a path."""
        return f"{self.system}/{self.benchmark}/{self.scenario}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below ``<division>/<submitter>``; version 5 is for v5.1, version 6 for v6.0 and v6.1."""

    version: int

    def results(self, key: Key) -> str:
        """Folder of the logs."""
        return f"results/{key.path}"

    def description(self, key: Key) -> str:
        """Folder of user.conf, README.md and the description of the model."""
        return self.results(key) if self.version == 6 else f"measurements/{key.path}"

    def description_name(self, key: Key) -> str:
        """File name of that description; the checker of v5.1 finds it by prefix and suffix."""
        return "measurements.json" if self.version == 6 else f"{key.system}_{IMPLEMENTATION}_{key.scenario}.json"

    def compliance(self, key: Key) -> str:
        """Folder of the compliance tests."""
        return self.results(key) if self.version == 6 else f"compliance/{key.path}"

    def code(self, benchmark: str) -> str:
        """Folder with the code or a reference to it."""
        return "src" if self.version == 6 else f"code/{benchmark}"


def layout_of(round_: str) -> Layout:
    """The layout of a supported round."""
    return Layout(6 if round_.startswith("v6") else 5)


def supported_round(name: str) -> str:
    """The normalised name of a supported round; UsageError for others."""
    wanted = known_round(name, ROUNDS)
    if wanted not in ROUNDS:
        raise UsageError(f"--round {name}: supported rounds are {', '.join(ROUNDS)}")
    return wanted
