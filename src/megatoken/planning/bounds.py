"""What a system serves of one kind of interaction, within compute, KV memory and latency, and which of them holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatoken.planning.assumptions import Assumptions
from megatoken.planning.figures import State, weakest
from megatoken.planning.pricing import Derating, Priced
from megatoken.planning.schedule import Schedule, schedule
from megatoken.planning.throughput import LIMITS, P99_OVER_MEAN, Throughput
from megatoken.planning.workloads import Profile
from megatoken.text import significant


@dataclass(frozen=True)
class Served:
    """Interactions of one profile on a whole system.

    ``schedule`` is that of a replica, with latencies as means; None where the cost model knows none, so that only
    compute and the assumed latency share bound the rate.
    """

    profile: Profile
    throughput: Throughput
    priced: Priced
    derated: Derating
    assumptions: Assumptions

    @cached_property
    def schedule(self) -> Schedule | None:
        """The highest rate of a replica within KV memory and the latency limits."""
        throughput = self.throughput
        if throughput.replica is None:
            return None
        ttft, tpot = (self.assumptions[name] / self.assumptions[P99_OVER_MEAN] for name in LIMITS)
        return schedule(
            throughput.replica,
            self.profile.request_lengths,
            speed=throughput.speed,
            ttft_limit_seconds=ttft,
            tpot_limit_seconds=tpot,
        )

    @property
    def peak(self) -> float:
        """Interactions/s at the peak rate: compute alone."""
        return self.priced.prices.interactions_per_second(self.profile)

    @property
    def _compute(self) -> float:
        """``peak``, times the share of the rate that kept the limits if the run or its scenario shows one."""
        return self.peak * self.derated.shown_share

    @property
    def _scheduled(self) -> float | None:
        """Interactions/s of all replicas by the schedule."""
        if self.schedule is None:
            return None
        return self.schedule.output_tokens_per_second * self.throughput.replicas / self.profile.written_tokens

    @property
    def highest(self) -> float:
        """Interactions/s within all bounds, before the user's factors and the utilisation ceiling."""
        if self._scheduled is None:
            return self.peak * self.derated.latency_share
        return min(self._compute, self._scheduled)

    @property
    def bound(self) -> str:
        """What holds: compute, KV memory, or a latency."""
        if self.schedule is None or self._scheduled is None:
            return "latency, by an assumed share" if self.derated.share_is_assumed else "compute"
        return "compute" if self._compute < self._scheduled else self.schedule.bound

    @property
    def planning(self) -> float:
        """Interactions/s to plan with: ``highest`` times the user's factors and the utilisation ceiling."""
        return self.highest * self.derated.headroom_share

    @property
    def highest_with_factors(self) -> float:
        """``highest`` times the user's factors, which is what a busy system serves."""
        return self.highest * self.derated.user_share

    @property
    def waits(self) -> tuple[float, float] | None:
        """99th percentiles of the time to first token and the time per output token, at the highest rate."""
        if self.schedule is None:
            return None
        tail = self.assumptions[P99_OVER_MEAN]
        return self.schedule.ttft_seconds * tail, self.schedule.tpot_seconds * tail

    @property
    def most_in_flight(self) -> float | None:
        """Requests in flight on all replicas at the highest rate; never more than KV memory holds."""
        if self.schedule is None or self._scheduled is None:
            return None
        return self.schedule.requests * self.throughput.replicas * self.highest / self._scheduled

    @property
    def memory_requests(self) -> float | None:
        """Requests whose contexts fit in the KV caches of all replicas."""
        return None if self.schedule is None else self.schedule.memory_requests * self.throughput.replicas

    @property
    def users(self) -> float | None:
        """Users at the planning rate, each with one interaction in ``pause_seconds``; None if they never pause."""
        return self.planning * self.profile.pause_seconds or None

    @property
    def why(self) -> str:
        """The bound in numbers."""
        found = self.schedule
        if found is None:
            return f"bound: {self.bound}"
        limits = [f"KV memory holds {significant(found.memory_requests)} requests per replica"]
        if found.latency_requests is not None:
            limits.append(f"latency allows {significant(found.latency_requests)}")
        return f"bound: {self.bound}; {', '.join(limits)}"

    @property
    def state(self) -> State:
        """Of the rate to plan with."""
        names = () if self.schedule is None else (*LIMITS, P99_OVER_MEAN)
        modelled: tuple[State, ...] = () if self.schedule is None else ("estimate",)
        states = (self.priced.state, self.derated.state, self.profile.state, *modelled)
        return weakest((*states, *self.assumptions.states(names)))
