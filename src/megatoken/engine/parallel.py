"""Tensor parallelism inside a node: a rank for each device, each with its share of heads and feed-forward features.

Query, key, value, gate and up projections are cut by rows, output and down projections by columns (also those of each
expert, so every rank computes all the experts that a token chooses, and has the routers whole), and what these two
add to the residual stream is summed over the ranks: two all-reduces a layer (Shoeybi et al., Megatron-LM, 2019).
Where GPUs reach each other's memory over NVLink, each rank keeps and norms its own rows (``ops.fused_all_reduce``).
Where the ranks divide hidden size and vocabulary, the embedding is cut by columns and the head by rows, and their
outputs are gathered; otherwise every rank has both, as it has the norms.
Rank 0 is in the engine's process and plans; the others run its commands (``tensor_parallel_worker``).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from megatoken.engine.batch import StepArrays
from megatoken.engine.config import EngineConfig, model_folder, sharded
from megatoken.engine.memory import MemoryPlan
from megatoken.engine.model import WeightSource
from megatoken.engine.quantized_source import QuantizedSource
from megatoken.engine.schemes import LinearScheme
from megatoken.engine.schemes.fp8_weight import share
from megatoken.errors import MegatokenError

if TYPE_CHECKING:
    from megatoken.engine.ops.fused_all_reduce import FusedAllReduce

_c10d: Any = torch.distributed  # groups made by hand: the module's own are global

WORKER_MODULE = "megatoken.engine.tensor_parallel_worker"

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
_CUT_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "self_attn", _HEAD)  # its sinks
_CUT_BY_COLUMNS = ("o_proj", "down_proj", "w2", _EMBEDDING)
_FIELDS = [field.name for field in dataclasses.fields(StepArrays) if field.name != "decodes"]
NO_PLACES: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_LAST_WORDS_SECONDS = 1.0  # between the end of a rank's sockets and that of its process
_ABORT_SECONDS = 10.0  # most that NCCL may take to give up
_RUNNING_SUMS_SECONDS = 0.3  # of these, for what runs on the GPU to end; microseconds are enough
_RENDEZVOUS_TIMEOUT = datetime.timedelta(seconds=60)  # of ranks that are all loaded; one may have ended since
_NO_TIMEOUT = datetime.timedelta(days=30)  # an idle engine sends no steps; a rank that dies closes its sockets


class RankWeights:
    """The weights of one rank: what ``source`` holds, cut. A bias that all ranks would add is rank 0's."""

    def __init__(self, source: WeightSource, rank: int, ranks: int) -> None:
        self.config = sharded(source.config, ranks)
        self.quantized = None if source.quantized is None else _RankQuantized(source.quantized, rank, ranks)
        self._source = source
        self._rank = rank
        self._ranks = ranks

    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor on ``device``, which for a moment holds the whole one too."""
        part, kind = name.split(".")[-2:]
        if part == _HEAD and self._source.config.tied_embeddings:
            name = f"model.{_EMBEDDING}.weight"
        whole = self._source.read(name, dtype, device)
        if part in _CUT_BY_COLUMNS and kind == "bias":
            return whole if self._rank == 0 else whole.zero_()
        if part in (_EMBEDDING, _HEAD) and self.config.vocabulary_ranks == 1:
            return whole
        side = _cut_side(part)
        return whole if side is None else share(whole, side, self._rank, self._ranks)


class _RankQuantized(QuantizedSource):
    """The quantised linears of one rank; ranks multiply their parts of four-bit ones out."""

    def __init__(self, whole: QuantizedSource, rank: int, ranks: int) -> None:
        self.expanded = whole.expanded
        self._whole, self._rank, self._ranks = whole, rank, ranks

    def read(self, name: str, scheme: LinearScheme, device: torch.device) -> Any | None:
        side = _cut_side(name.split(".")[-2])
        whole = self._whole.read(name, scheme, device)
        return whole if side is None or whole is None else whole.share(side, self._rank, self._ranks)

    def cache_scales(self, layer: int) -> tuple[float, float]:
        return self._whole.cache_scales(layer)


def _cut_side(part: str) -> int | None:
    """0 for rows, 1 for columns, None for a part that every rank has whole."""
    return 0 if part in _CUT_BY_ROWS else 1 if part in _CUT_BY_COLUMNS else None


class Order(IntEnum):
    """What rank 0 commands the others to do."""

    STEP = 0
    FIX_INPUT_SCALES = 1
    RECORD_NEXT = 2


class RankGroup:
    """The ranks of one model as one of them sees them: sums and gathers over all, and commands from rank 0.

    Commands travel over sockets of the loopback device; what GPUs send goes through NCCL, without NVLink multicast.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, device: torch.device) -> None:
        """Connects to the others through a file in ``folder``; waits for all of them."""
        self.rank = rank
        self.ranks = ranks
        self.shared: FusedAllReduce | None = None
        self._name = folder.name
        self._store = _c10d.FileStore(str(folder / "store"), ranks)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = _RENDEZVOUS_TIMEOUT
        host = _c10d.PrefixStore("host", self._store)
        self._host: Any = _c10d.ProcessGroupGloo(host, rank, ranks, options)
        self._host._set_default_timeout(_NO_TIMEOUT)
        self._device: Any = self._host
        if device.type == "cuda":
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = _c10d.ProcessGroupNCCL.Options()
            self._device = _c10d.ProcessGroupNCCL(_c10d.PrefixStore("device", self._store), rank, ranks, nccl)
        self._from_rank_0 = _c10d.BroadcastOptions()
        self._from_rank_0.rootRank = 0
        self.recordings: MutableMapping[Any, Any] = {}
        """CUDA graphs that have sums of this group in them."""
        self._aborted = Event()
        self._aborting: Thread | None = None
        if rank == 0 and self._device is not self._host:
            # Started now, since Python starts no thread in a process that is about to end.
            self._aborting = Thread(target=_abort_when, args=(self._aborted, self._device), daemon=True)
            self._aborting.start()

    def share_rows(self, max_rows: int, hidden: int, check: Callable[[], None]) -> None:
        """Give steps of up to so many rows, bf16 [T, ``hidden``], ``shared`` memory, if the GPUs support it.

        ``check`` raises if a rank has ended; it is called while this one waits for the others.
        """
        from megatoken.engine.ops.fused_all_reduce import FusedAllReduce

        if FusedAllReduce.reachable(self.ranks):
            store = _c10d.PrefixStore("shared", self._store)
            self.shared = FusedAllReduce.rendezvous(self._name, store, self.rank, self.ranks, max_rows, hidden, check)

    def add(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks, in place."""
        self._device.allreduce([x]).wait()
        return x

    def all_columns(self, x_TN: Tensor) -> Tensor:
        """The columns of all ranks, each of which has N -> [T, N x ranks], in the order of the ranks."""
        rows, columns = x_TN.shape
        by_rank_TN = x_TN.new_empty(self.ranks * rows, columns)
        self._device._allgather_base(by_rank_TN.view(torch.uint8), x_TN.view(torch.uint8)).wait()
        return by_rank_TN.view(self.ranks, rows, columns).transpose(0, 1).reshape(rows, -1)

    def share(self, x: Tensor) -> None:
        """Broadcast what rank 0 has in ``x``."""
        if x.numel():
            self._device.broadcast([x], self._from_rank_0).wait()

    def send(self, order: Order, arrays: StepArrays | None = None, places: NDArray[np.int64] = NO_PLACES) -> None:
        """Command the other ranks; on rank 0. ``places``: as ``PromptTokens.places``."""
        header = np.full(2 + 2 * (len(_FIELDS) + 1), -1, dtype=np.int64)
        header[0] = order
        parts = [] if arrays is None else [*(getattr(arrays, name) for name in _FIELDS), places]
        for number, part in enumerate(parts):
            header[2 + 2 * number : 2 + 2 * number + part.ndim] = part.shape
        if arrays is not None:
            header[1] = arrays.decodes
        self._broadcast(header)
        if parts:
            self._broadcast(np.concatenate([part.reshape(-1).astype(np.int32) for part in parts]))

    def receive(self) -> tuple[Order, StepArrays | None, NDArray[np.int64]]:
        """Wait for a command of rank 0."""
        header = self._broadcast(np.empty(2 + 2 * (len(_FIELDS) + 1), dtype=np.int64))
        order = Order(header[0])
        if order is not Order.STEP:
            return order, None, NO_PLACES
        shapes = [[int(side) for side in shape if side >= 0] for shape in header[2:].reshape(-1, 2)]
        sizes = [math.prod(shape) for shape in shapes]
        values = self._broadcast(np.empty(sum(sizes), dtype=np.int32))
        *parts, places = np.split(values, np.cumsum(sizes)[:-1])
        fields = {name: part.reshape(shape) for name, part, shape in zip(_FIELDS, parts, shapes, strict=False)}
        fields["sampled"] = fields["sampled"].astype(np.int64)
        return order, StepArrays(decodes=int(header[1]), **fields), places.astype(np.int64)

    def abort(self) -> None:
        """Abort the group; on rank 0. A sum on the GPU that waits for an ended rank would block this process for ever.

        NCCL first ends what runs, then waits until no graph has one of its sums. A graph must not be destroyed before
        what runs has ended: that can wait for it, and holds the lock without which Python starts no other thread.
        """
        if self.shared is not None:
            self.shared.release()
        if self._aborting is not None:
            self._aborted.set()
            self._aborting.join(_RUNNING_SUMS_SECONDS)
            self.recordings.clear()
            self._aborting.join(_ABORT_SECONDS)

    def _broadcast(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        self._host.broadcast([torch.from_numpy(values)], self._from_rank_0).wait()
        return values


def _abort_when(aborted: Event, device: Any) -> None:
    aborted.wait()
    device.abort()


def worker_specification(
    model: str | Path, random_weights: bool, seed: int, config: EngineConfig, memory: MemoryPlan, threads: int
) -> bytes:
    """What a worker reads from its standard input: the model, the engine's configuration, and rank 0's sizes."""
    folder = model_folder(model)
    return json.dumps(
        {
            "model": str(folder.resolve()) if folder.is_dir() else str(model),
            "random_weights": random_weights,
            "seed": seed,
            "config": dataclasses.asdict(config),
            "memory": dataclasses.asdict(memory),
            "threads": threads,
            "parent": os.getpid(),
        }
    ).encode()


class TPWorkers:
    """Ranks 1 and up, each in a process of its own, which end with this process or with the engine."""

    def __init__(self, ranks: int, specification: bytes) -> None:
        """Starts them.

        ``ranks`` includes rank 0. ``specification``: see ``worker_specification``.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="megatoken-ranks-"))
        self._groups: list[RankGroup] = []  # one, once the ranks are connected
        self._processes: list[subprocess.Popen[bytes]] = []
        self.end = weakref.finalize(self, _end, self._groups, self._processes, self.folder)
        for rank in range(1, ranks):
            with (self.folder / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", WORKER_MODULE, str(self.folder), str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                )
            self._processes.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:  # of a rank that has ended, see ``check``
                pipe.write(specification)

    def init_group(self, device: torch.device) -> RankGroup:
        """The group, once every rank has its weights. Raises MegatokenError if one has ended instead."""
        while not all(_loaded(self.folder, rank).exists() for rank in range(1, len(self._processes) + 1)):
            self.check()
            time.sleep(0.02)
        self._groups.append(RankGroup(self.folder, 0, len(self._processes) + 1, device))
        return self._groups[0]

    def check(self) -> None:
        """Raises MegatokenError with the last line of its output if a rank has ended, and ends the others."""
        if not self.end.alive:
            raise MegatokenError("the engine's ranks have ended after an error; make a new engine")
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                lines = (self.folder / f"rank{rank}.log").read_text(errors="replace").strip().splitlines()
                code = process.returncode
                ended = signal.Signals(-code).name if code < 0 else f"code {code}"
                self.end()
                raise MegatokenError(f"rank {rank} ended with {ended}: {lines[-1] if lines else 'it said nothing'}")

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Reports an ended rank as the cause where a sum or a command fails. Raises MegatokenError.

        After any other error the ranks are no longer at the same place of a step, so they are ended.
        """
        try:
            yield
        except Exception as error:
            deadline = time.monotonic() + _LAST_WORDS_SECONDS
            while self.end.alive and time.monotonic() < deadline:
                self.check()
                time.sleep(0.01)
            self.end()
            if isinstance(error, _c10d.DistBackendError):
                raise MegatokenError(f"the ranks' GPUs cannot sum: {str(error).strip().splitlines()[-1]}") from error
            raise
        except BaseException:
            self.end()
            raise


def _loaded(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.loaded"


def join_group(folder: Path, rank: int, ranks: int, device: torch.device) -> RankGroup:
    """The group as seen by a rank that has its weights."""
    _loaded(folder, rank).touch()
    return RankGroup(folder, rank, ranks, device)


def _end(groups: Sequence[RankGroup], processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for group in groups:  # afterwards: a living rank could undo what releases this one
        group.abort()
    shutil.rmtree(folder, ignore_errors=True)
