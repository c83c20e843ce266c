"""How long this process waited for a core: what a busy machine takes from a measurement."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")


class CoreWait:
    """Watch the threads of this process, or of another, from now on.

    The kernel counts for each thread how long it ran and how long it could have run but had no core (``schedstat`` in
    Documentation/scheduler/sched-stats.rst of Linux). A thread that ends takes its count with it.
    """

    def __init__(self, process_id: int | None = None) -> None:
        """Store the counts to compare later ones with."""
        self._tasks = TASKS if process_id is None else Path(f"/proc/{process_id}/task")
        self._before = _counts(self._tasks)

    def share(self) -> float | None:
        """Share of the time since the start in which threads were ready to run and had no core, 0 to 1.

        None where the kernel does not report it.
        """
        ran, waited = self._since()
        return waited / (ran + waited) if ran + waited else None

    def waited_seconds(self) -> float:
        """Time in which threads were ready to run and had no core, summed over the threads; 0 if it is not reported."""
        return self._since()[1] / 1e9

    def _since(self) -> tuple[int, int]:
        """Nanoseconds that the threads ran and waited."""
        ran = waited = 0
        for thread, (ran_ns, waited_ns) in _counts(self._tasks).items():
            ran_before_ns, waited_before_ns = self._before.get(thread, (0, 0))
            ran += ran_ns - ran_before_ns
            waited += waited_ns - waited_before_ns
        return ran, waited


def _counts(tasks: Path) -> dict[str, tuple[int, int]]:
    """Nanoseconds that each thread ran and waited; empty where the kernel does not report them."""
    counts = {}
    for file in tasks.glob("*/schedstat"):
        with suppress(OSError):  # a thread that ended just now
            ran, waited, _ = file.read_text().split()
            counts[file.parent.name] = int(ran), int(waited)
    return counts
