"""From a configuration to the backend that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatoken.config import RunConfig
from megatoken.targets.backend import Backend, Reporter
from megatoken.targets.in_process import InProcessBackend


@contextmanager
def open_backend(config: RunConfig, reporter: Reporter) -> Iterator[Backend]:
    """Opens the backend that ``config`` names: servers, a rack with ``rack.cluster``, or the engine in this process.

    Args:
        config: what to run.
        reporter: where to report how far it is.

    Raises:
        CheckpointError, ConfigError, CapacityError: the model cannot be used.
        UsageError: the rack, or a server, cannot be used.
    """
    if config.endpoint.urls is not None:
        from megatoken.targets.endpoint.backend import EndpointBackend

        with EndpointBackend(config, reporter).open() as endpoint:
            yield endpoint
        return
    if config.rack.cluster is None:
        backend = InProcessBackend(config, reporter)
        try:
            yield backend
        finally:
            backend.close()
        return
    from megatoken.targets.rack_backend import open_rack

    with open_rack(config, reporter) as rack:
        yield rack
