"""Where the parts of a submission stand, and what is left in them for a person to fill in.

Layouts: submission_structure.md and the paths in constants.py of mlcommons/inference, tools/submission.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatoken.errors import UsageError
from megatoken.mlperf.rounds import known_round

ROUNDS = ("v5.1", "v6.0", "v6.1")
TO_FILL = "TO FILL"  # what `build` writes where nothing is known, and `check` refuses
IMPLEMENTATION = "megatoken"


@dataclass(frozen=True, slots=True)
class Key:
    """What a result is of: names of folders."""

    system: str
    benchmark: str
    scenario: str

    @property
    def path(self) -> str:
        """As folders."""
        return f"{self.system}/{self.benchmark}/{self.scenario}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths below ``<division>/<submitter>``; version 5 is that of v5.1, version 6 that of v6.0 and v6.1."""

    version: int

    def results(self, key: Key) -> str:
        """Folder of the logs."""
        return f"results/{key.path}"

    def description(self, key: Key) -> str:
        """Folder of user.conf, README.md and the description of how the model was made."""
        return self.results(key) if self.version == 6 else f"measurements/{key.path}"

    def description_name(self, key: Key) -> str:
        """File name of that description; MLCommons' checker of v5.1 finds it by its beginning and its end."""
        return "measurements.json" if self.version == 6 else f"{key.system}_{IMPLEMENTATION}_{key.scenario}.json"

    def compliance(self, key: Key) -> str:
        """Folder of the compliance tests."""
        return self.results(key) if self.version == 6 else f"compliance/{key.path}"

    def code(self, benchmark: str) -> str:
        """Folder that leads to the code."""
        return "src" if self.version == 6 else f"code/{benchmark}"


def layout_of(round_: str) -> Layout:
    """The layout of a round that submissions are built and checked for."""
    return Layout(6 if round_.startswith("v6") else 5)


def supported_round(name: str) -> str:
    """``name`` as the tables spell it; UsageError if its rules are not known here."""
    wanted = known_round(name, ROUNDS)
    if wanted not in ROUNDS:
        raise UsageError(f"--round {name}: submissions are built and checked for {', '.join(ROUNDS)}")
    return wanted
