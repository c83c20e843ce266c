"""What a step sampled, on its way from the device to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megatoken.engine.parallel import TPWorkers

WORKERS_CHECK_SECONDS = 0.0002


class SampledIds:
    """Ids of one step, and logprobs of some, on their way to the host; made right after the step was launched."""

    def __init__(
        self,
        ids_S: Tensor,
        logprobs: Tensor | None = None,
        prompt_logprobs: Tensor | None = None,
        workers: TPWorkers | None = None,
    ) -> None:
        self._ids, self._logprobs, self._prompt_logprobs = ids_S, logprobs, prompt_logprobs
        self._workers = workers
        self._arrived: torch.cuda.Event | None = None
        if ids_S.is_cuda:
            self._ids = _on_its_way(ids_S)
            self._logprobs = None if logprobs is None else _on_its_way(logprobs)
            self._prompt_logprobs = None if prompt_logprobs is None else _on_its_way(prompt_logprobs)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[int]:
        """The ids, once they have arrived. Raises MegatokenError if a rank has ended that they depend on."""
        if self._arrived is not None:
            while self._workers is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
                self._workers.check()
                time.sleep(WORKERS_CHECK_SECONDS)
            self._arrived.synchronize()
        return self._ids.tolist()

    def logprobs(self) -> list[list[float]]:
        """Rows of ``best_logprobs``, once ``wait`` has returned."""
        return [] if self._logprobs is None else self._logprobs.tolist()

    def prompt_logprobs(self) -> list[list[float]]:
        """The same of tokens of prompts."""
        return [] if self._prompt_logprobs is None else self._prompt_logprobs.tolist()


def _on_its_way(on_device: Tensor) -> Tensor:
    host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
    return host.copy_(on_device, non_blocking=True)
