"""What an engine holds and has done: one record, passed on unchanged by targets and racks up to the time series."""

from __future__ import annotations

from dataclasses import dataclass

TOTALS = (
    *("steps", "processed_tokens", "output_tokens", "decoded_tokens", "context_tokens", "preemptions"),
    *("recomputed_tokens", "computed_seconds", "prefix_cache_queries", "prefix_cache_hits"),
)
"""Fields of ``ReplicaState`` that only grow while an engine lives; ``replicas`` aside, the others are levels."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One engine at one moment, or the sum over several. 0 where the source does not know."""

    in_flight: int = 0  # requests submitted and not ended
    waiting: int = 0  # of these, in the queue: they hold no pages
    running: int = 0  # of these, with a slot and pages
    batched_tokens: int = 0  # in the last step
    max_batched_tokens: int = 0  # token budget of a step
    pages_free: int = 0
    pages: int = 0
    steps: int = 0
    processed_tokens: int = 0  # computed in all steps: prompts and generated tokens
    output_tokens: int = 0  # reported in events
    decoded_tokens: int = 0  # of the processed tokens, those of decodes
    context_tokens: int = 0  # cached tokens in front of those, summed
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed, and dropped by preemptions
    computed_seconds: float = 0.0  # spent in steps
    prefix_cache_queries: int = 0  # prompt tokens of the requests that were admitted, with a prefix cache
    prefix_cache_hits: int = 0  # of these tokens, those that were in the cache
    replicas: int = 1  # how many this is the sum of
