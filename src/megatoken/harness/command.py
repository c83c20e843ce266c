"""What ``run`` and ``soak`` share: open a backend, prepare, load, and have a test leave a run folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatoken.config import RunConfig
from megatoken.harness.loadgen_plan import with_target_step
from megatoken.harness.per_node import run_per_node
from megatoken.harness.prepare import Prepared, prepare, resolve
from megatoken.harness.progress import Progress
from megatoken.harness.qualification import qualify_first
from megatoken.targets import Target
from megatoken.targets.backend import Backend
from megatoken.targets.factory import open_backend
from megatoken.targets.rack_backend import RackBackend

Test = Callable[[Prepared, RunConfig, Target, Progress], Path]
Check = Callable[[Mapping[str, Any]], None]


def measure(
    config: RunConfig,
    test: Test,
    progress: Progress,
    *,
    check: Check | None = None,
    dry_run: bool = False,
    brings_requests: bool = False,
) -> tuple[Prepared, Path | None]:
    """Opens the backend of ``config``, prepares, loads and runs ``test``.

    ``test`` leaves a run folder; it gets the configuration with the sizes that the engines took. ``check`` may refuse
    what is known before the weights are loaded: fields of ``result.json``, with a rack's nodes. With ``dry_run`` it
    stops once everything is checked. With ``brings_requests`` the test has requests of its own.

    Returns:
        What was prepared, and the run folder; None of a dry run.

    Raises:
        KeyboardInterrupt: the user interrupted; says where the run is if it was written.
    """
    config = with_target_step(config)
    written: list[Path] = []

    def kept(prepared: Prepared, config: RunConfig, target: Target, progress: Progress) -> Path:
        written.append(test(prepared, config, target, progress))
        return written[-1]

    try:
        # Twice, because the backend keeps the log of its server only after an interruption that names a run.
        with _naming_the_run(written), open_backend(config, progress) as backend, _naming_the_run(written):
            prepared, path = measure_on(
                backend, config, kept, progress, check=check, dry_run=dry_run, brings_requests=brings_requests
            )
            written += [path] if path is not None else []
            return prepared, path
    finally:
        progress.clear()


@contextmanager
def _naming_the_run(written: Sequence[Path]) -> Iterator[None]:
    """Lets an interruption that comes after a run was written say where it is."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        if interruption.args or not written:
            raise
        page = f"megatoken report {shlex.quote(str(written[-1]))} writes its page"
        raise KeyboardInterrupt(f"interrupted after the measurement; the run is in {written[-1]}; {page}") from None


def measure_on(
    backend: Backend,
    config: RunConfig,
    test: Test,
    progress: Progress,
    *,
    check: Check | None = None,
    dry_run: bool = False,
    brings_requests: bool = False,
) -> tuple[Prepared, Path | None]:
    """The same on a backend that is open."""
    prepared = prepare(config, backend, brings_requests=brings_requests)
    if check is not None:
        check({**prepared.facts(), **backend.facts()})
    if dry_run:
        return prepared, None
    if config.qualify:
        prepared = replace(prepared, qualification=qualify_first(resolve(prepared.config, prepared.model), progress))
    for warning in prepared.warnings:
        progress.note(f"warning: {warning}")
    if config.rack.count == "per_node" and isinstance(backend, RackBackend):
        return prepared, run_per_node(backend, prepared, progress)
    with backend.load() as target:
        return prepared, test(prepared, resolve(prepared.config, backend.served()), target, progress)
