"""What travels in frames between HTTP processes and the engine process, on a Unix socket.

A rack's router and its replicas talk in the same way. There is one frame per step and HTTP process, never one per
token. Most events are one token of one request; they travel as two lists through marshal, which costs 0.15 us per event
for both ends together, where pickling the events costs 4.6 us. Requests travel through marshal too.
"""

from __future__ import annotations

import io
import marshal
import pickle
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megatoken.engine.request import Request, Sampling, TokenEvent
from megatoken.engine.state import ReplicaState
from megatoken.errors import MegatokenError
from megatoken.framing import frame
from megatoken.serve.tenants import Tenant

# What a frame may be made of. A replica on another node has proved that it knows the key of this server, but the frames
# that follow carry no proof, and a plain unpickler would call whatever they name.
_MODULES = frozenset(
    f"megatoken.{name}" for name in ("engine.request", "engine.state", "errors", "serve.messages", "serve.tenants")
)
_OTHERS = frozenset(
    {
        ("array", "array"),
        ("array", "_array_reconstructor"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)
_PLAIN_FIELDS = tuple(one.name for one in fields(Request) if one.name not in ("prompt", "sampling", "grammar"))
_plain_fields, _sampling_fields, _tenant_fields = (
    attrgetter(*names)
    for names in (_PLAIN_FIELDS, [one.name for one in fields(Sampling)], [one.name for one in fields(Tenant)])
)
_tenant = lru_cache(Tenant)
_WITHOUT_REFERENCES = 2  # a version of marshal's format, which looks for no value that comes twice


class Health(StrEnum):
    """What the server can do now."""

    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"  # answers, with a part of its replicas
    DRAINING = "draining"
    STUCK = "stuck"
    DEAD = "dead"

    @property
    def serves(self) -> bool:
        """Whether new requests are taken."""
        return self in (Health.READY, Health.DEGRADED)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What an HTTP process must know of the model. Sizes in tokens."""

    name: str
    max_length: int
    vocabulary_size: int
    folder: Path | None  # of the model's files; None for a named shape
    created: int  # seconds since 1970, when the engine was ready

    @property
    def tokenizer_file(self) -> Path | None:
        """The model's tokenizer.json; None if it has none."""
        file = self.folder / "tokenizer.json" if self.folder is not None else None
        return file if file is not None and file.is_file() else None


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How much an engine takes at once: what the fair queue and the router must know of it."""

    max_sequences: int
    max_batched_tokens: int
    cache_tokens: int
    page_size: int

    def __add__(self, other: EngineSizes) -> EngineSizes:
        """Of two engines together."""
        return EngineSizes(
            self.max_sequences + other.max_sequences,
            self.max_batched_tokens + other.max_batched_tokens,
            self.cache_tokens + other.cache_tokens,
            self.page_size,
        )


NO_SIZES = EngineSizes(0, 0, 0, 0)


class Replicas(NamedTuple):
    """How many replicas of a rack serve, and how many should."""

    serving: int
    expected: int

    @property
    def share(self) -> float:
        """The share that is left."""
        return self.serving / self.expected if self.expected else 0.0


class Status(NamedTuple):
    """The engine process, once a second. ``model`` is known from READY on; ``replicas`` only of a rack."""

    health: Health
    message: str
    model: ServedModel | None
    sizes: EngineSizes = NO_SIZES
    state: ReplicaState = ReplicaState()
    replicas: Replicas | None = None


class Submission(NamedTuple):
    """A request on its way to the engine; ``request_id`` is that of its HTTP process."""

    request_id: int
    request: Request
    tenant: Tenant
    arrival_ns: int  # time.monotonic_ns() of the HTTP process; Linux has one such clock for all processes
    priority: int = 0  # the lowest first, among the requests of one tenant that wait
    whole: bool = False  # the client gets its answer in one piece, so that it can be computed again until then
    answers: int = 1  # that were asked for to its prompt, if it is the first of them; else 0


class Busy(MegatokenError):  # noqa: N818
    """A queue or limit is full; another try after ``retry_after_seconds`` may succeed."""

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[type[Busy], tuple[str, int]]:
        return Busy, (str(self), self.retry_after_seconds)


class Unavailable(MegatokenError):  # noqa: N818
    """The engine does not answer requests now: it starts, is stuck or has failed."""


class StartedOver(MegatokenError):  # noqa: N818
    """The tokens of a request so far are void: its replica was lost, and another computes the answer from its start.

    The error of an event without a finish reason, of a request that was submitted as ``whole``.
    """


class Kind(IntEnum):
    """What the payload of a frame is."""

    SUBMIT = 1  # Submission
    CANCEL = 2  # request id, and whether its answer is complete: it ended with a stop string
    METRICS = 3  # to the engine: nothing; back: text
    STEP = 4  # events
    STATUS = 5  # Status


def pickled(kind: Kind, value: object) -> bytes:
    """A frame of a pickled value."""
    return frame(kind, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def unpickled(payload: bytes) -> Any:
    """The value of a frame made by ``pickled``.

    Raises:
        pickle.UnpicklingError: it holds something that no message is made of.
    """
    return _Unpickler(io.BytesIO(payload)).load()


class _Unpickler(pickle.Unpickler):
    found: ClassVar[dict[tuple[str, str], Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.found:
            return self.found[module, name]
        if (module in _MODULES and "." not in name) or (module, name) in _OTHERS:
            self.found[module, name] = super().find_class(module, name)
            return self.found[module, name]
        raise pickle.UnpicklingError(f"no message holds {module}.{name}")


def submission_frame(submission: Submission) -> bytes:
    """A frame of a request on its way to the engine."""
    request_id, request, tenant, *rest = submission
    grammar = None if request.grammar is None else pickle.dumps(request.grammar, pickle.HIGHEST_PROTOCOL)
    of_request = array("i", request.prompt), _plain_fields(request), _sampling_fields(request.sampling), grammar
    content = request_id, of_request, _tenant_fields(tenant), rest
    return frame(Kind.SUBMIT, marshal.dumps(content, _WITHOUT_REFERENCES))


def submission_of(payload: bytes) -> Submission:
    """The argument of ``submission_frame``."""
    request_id, (prompt, plain, sampling, grammar), tenant, rest = marshal.loads(payload)
    request = Request(
        array("i", prompt),
        sampling=Sampling(*sampling),
        grammar=None if grammar is None else unpickled(grammar),
        **dict(zip(_PLAIN_FIELDS, plain, strict=True)),
    )
    return Submission(request_id, request, _tenant(*tenant), *rest)


def step_frame(request_ids: list[int], token_ids: list[int], others: Sequence[TokenEvent]) -> bytes:
    """A frame of one step's events.

    Args:
        request_ids: of the requests that got one token and nothing else.
        token_ids: these tokens, in the same order.
        others: all other events.
    """
    rest = pickle.dumps([tuple(event) for event in others], pickle.HIGHEST_PROTOCOL) if others else b""
    return frame(Kind.STEP, marshal.dumps((request_ids, token_ids, rest)))


def step_parts(payload: bytes) -> tuple[list[int], list[int], list[TokenEvent]]:
    """The arguments of ``step_frame``."""
    request_ids, token_ids, rest = marshal.loads(payload)
    return request_ids, token_ids, [TokenEvent(*event) for event in unpickled(rest)] if rest else []


def step_events(payload: bytes) -> Iterator[TokenEvent]:
    """The events of a frame made by ``step_frame``."""
    request_ids, token_ids, others = step_parts(payload)
    for request_id, token_id in zip(request_ids, token_ids, strict=True):
        yield TokenEvent(request_id, (token_id,), None)
    yield from others
