"""The machine of a run: its GPUs, when the run used it, and which other runs shared it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from megatoken.addresses import is_loopback
from megatoken.files import mapping
from megatoken.text import precise

if TYPE_CHECKING:
    from megatoken.runs.reasons import Reason
    from megatoken.runs.run import Run

MADE_UP = ("MADE_UP_TOKENS", "SIMULATED_GPU")  # codes of notes


@dataclass(frozen=True, slots=True)
class Occupation:
    """One run on its machine; times are Unix seconds, ``gpu`` the one that it computed on, None for the CPUs."""

    run: Path
    host: str
    gpu: str | None
    began_seconds: float
    ended_seconds: float

    @classmethod
    def of(cls, run: Run) -> Occupation | None:
        """That of a run folder; None if its time or machine is unknown."""
        host, began = run.environment.get("hostname"), unix_seconds(run.result.get("started_at"))
        if not host or began is None:
            return None
        lasted = max(run.series["elapsed_seconds"].to_pylist(), default=0.0)
        ended = began + max(lasted, run.result.get("duration_seconds") or 0.0)
        return cls(run.path, str(host), _gpu(run), began, ended)

    def seconds_shared_with(self, other: Occupation) -> float:
        """How long both ran on the same processors.

        0 for a run and itself, which a copy of its folder is too, and for runs on two GPUs of one machine.
        """
        apart = self.gpu is not None and other.gpu is not None and self.gpu != other.gpu
        if self.host != other.host or apart or self.began_seconds == other.began_seconds:
            return 0.0
        return max(0.0, min(self.ended_seconds, other.ended_seconds) - max(self.began_seconds, other.began_seconds))


def name_of(run: Path) -> str:
    """The last two parts of a run folder's path, because repeats have the same last part."""
    return "/".join(run.absolute().parts[-2:])


def contentions(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence for every two of ``runs`` that ran at the same time on one machine."""
    known = [found for run in runs if (found := Occupation.of(run))]
    for one, other in combinations(known, 2):
        if shared := one.seconds_shared_with(other):
            both = f"{name_of(one.run)} and {name_of(other.run)}"
            yield (
                f"{both} ran at the same time on {one.host} for {precise(shared)} s and shared it; measure them one"
                " after the other"
            )


def unix_seconds(text: Any) -> float | None:
    """Seconds since 1970 of an aware ISO time; None for anything else."""
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return moment.timestamp() if moment.tzinfo else None


def utc_text(moment: datetime) -> str:
    """A moment as result.json has it: ISO 8601 in UTC with a Z."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def is_of_server(result: Mapping[str, Any]) -> bool:
    """Whether a run measured a server at an address, and no engine of its own; ``result``: of ``result.json``."""
    return mapping(result.get("target")).get("kind") == "endpoint"


def simulated_gpu(run: Run) -> str | None:
    """The GPU that every replica of the run pretended to be; None where replicas computed.

    Configuration or target: one that names it is enough.
    """
    name = (run.config.get("rack") or {}).get("simulated_gpu") or (run.result.get("target") or {}).get("simulated_gpu")
    return str(name) if name else None


def made_up(run: Run) -> Reason | None:
    """The note of a run whose tokens no model computed, which every figure from it needs; None of any other run."""
    return next((note for note in run.result.get("notes") or () if note["code"] in MADE_UP), None)


def rate_state(run: Run) -> Literal["measured", "estimate"]:
    """The state of the rates and times of a run: those of simulated GPUs come from a cost model."""
    return "estimate" if simulated_gpu(run) else "measured"


def run_accelerators(run: Run, node: str | None = None) -> int | None:
    """GPUs that one node of the run used or simulated, or all of them; None where CPUs computed, or others' GPUs.

    Which GPUs a server uses is not known over HTTP, except on this machine when it has only one.
    """
    if addresses := (run.config.get("endpoint") or {}).get("urls"):
        here = all(_on_this_machine(address) for address in str(addresses).split(","))
        return 1 if here and len(run.environment.get("gpus") or []) == 1 else None
    ranks = (run.result.get("target") or {}).get("tensor_parallel")
    ranks = ranks if isinstance(ranks, int) else 1
    gpus = {
        entry.get("node"): entry["replicas"] * ranks if simulated_gpu(run) else entry.get("gpus") or 0
        for entry in run.result.get("rack_nodes") or []
    }
    if gpus:
        return (sum(gpus.values()) if node is None else gpus.get(node, 0)) or None
    device = (run.config.get("engine") or {}).get("device", "cpu")
    if device == "cuda" or (device == "auto" and run.environment.get("gpus")):
        nodes = 1 if node is not None else len(run.result.get("nodes", [])) or 1
        return nodes * ranks
    return None


def _on_this_machine(address: str) -> bool:
    try:
        return is_loopback(urlsplit(address.strip()).hostname or "")
    except ValueError:  # no address
        return False


def accelerator_name(run: Run) -> str | None:
    """Name of the GPUs of the run, simulated ones too; None if unknown."""
    gpus = run.environment.get("gpus") or []
    return simulated_gpu(run) or (gpus[0].get("name") if gpus and isinstance(gpus[0], dict) else None)


def _gpu(run: Run) -> str | None:
    """The engine computes on the first GPU that its process may see; simulated ones are on the CPUs."""
    if simulated_gpu(run) or run_accelerators(run) is None:
        return None
    visible = (run.environment.get("variables") or {}).get("CUDA_VISIBLE_DEVICES")
    return str(visible).split(",")[0].strip() if visible else "0"
