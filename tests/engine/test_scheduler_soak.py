"""Very many requests; which token each row holds is left to the simulated engine of ``test_scheduler``."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from over_admission import expect_short_answers

from examples import ALL
from megatoken.engine.scheduler import Scheduler
from megatoken.engine.step_plan import StepPlan


@pytest.mark.parametrize(
    ("requests", "longest_prompt", "sizes", "expected_share", "fewest_preemptions"),
    [
        (900_000, 16, {"max_batched_tokens": 2048, "max_sequences": 1024, "page_size": 4, "num_pages": 4096}, 1, 0),
        (100_000, 2, {"max_batched_tokens": 256, "max_sequences": 256, "page_size": 1, "num_pages": 1024}, 0, 10_000),
    ],
    ids=["full steps", "short of pages"],
)
def test_very_many_requests(
    requests: int, longest_prompt: int, sizes: dict, expected_share: int, fewest_preemptions: int
):
    part = 1 if ALL else 10
    soak = Soak(requests // part, longest_prompt, expected_share, **sizes)
    soak.run()
    assert soak.scheduler.preemptions >= fewest_preemptions // part


class Soak:
    WAITING, RESIDENT, DONE, ENDED = range(4)

    LONGEST = 24

    def __init__(self, requests: int, longest_prompt: int, expected_share: int, **sizes: int) -> None:
        self.random = np.random.default_rng(7)
        self.max_batched_tokens, self.max_sequences = sizes["max_batched_tokens"], sizes["max_sequences"]
        self.page_size, self.num_pages = sizes["page_size"], sizes["num_pages"]
        self.scheduler = Scheduler(**sizes, max_length=self.LONGEST)
        self.expected_share = expected_share
        if not expected_share:
            expect_short_answers(self.scheduler)
        self.prompt = self.random.integers(1, longest_prompt + 1, requests)
        self.length = self.prompt + self.random.integers(1, self.LONGEST - longest_prompt + 1, requests)
        self.known, self.computed, self.from_host = self.prompt.copy(), np.zeros_like(self.prompt), self.prompt.copy()
        self.received = np.zeros_like(self.prompt)
        self.state = np.full(requests, self.WAITING)
        self.owner = np.full(self.num_pages, -1)
        self.table = np.full((self.max_sequences, self.LONGEST // self.page_size), -1)
        self.added = self.resident = 0

    def run(self) -> None:
        in_flight: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        while True:
            for request_id in range(self.added, min(self.added + 1024, len(self.state))):
                if self.scheduler.waiting > 4096:
                    break
                self.scheduler.add(
                    request_id, int(self.prompt[request_id]), int(self.length[request_id] - self.prompt[request_id])
                )
                self.added += 1
            plan = self.scheduler.plan()
            if plan is not None:
                self.follow(plan)
            self.read(in_flight)
            if plan is None:
                break
            in_flight = plan.request_id[plan.sample]
        assert self.added == len(self.state)
        assert np.isin(self.state, (self.DONE, self.ENDED)).all()
        done = self.state == self.DONE
        assert done.mean() > 0.5
        assert (self.received[done] == (self.length - self.prompt)[done]).all(), "no token lost or repeated"
        assert (self.owner == -1).all()
        assert self.scheduler.free_pages == self.num_pages

    def follow(self, plan: StepPlan) -> None:
        request_id, end = plan.request_id, plan.start + plan.count
        if plan.preempted:
            assert min(plan.preempted) > request_id.max()
            self.leave(np.array(plan.preempted), self.WAITING)
            self.computed[list(plan.preempted)] = 0
        admitted = request_id[self.state[request_id] == self.WAITING]
        self.from_host[admitted] = self.known[admitted]
        self.state[admitted] = self.RESIDENT
        self.resident += len(admitted)
        assert (np.diff(request_id[plan.decodes :]) > 0).all()
        assert (np.diff(plan.start[: plan.decodes]) <= 0).all()
        assert (self.state[request_id] == self.RESIDENT).all() and self.resident == len(
            request_id
        ) <= self.max_sequences

        ticket_of_slot = np.full(self.max_sequences, -1)
        ticket_of_slot[plan.slot] = request_id
        assert (self.owner[plan.page] == -1).all() and len(np.unique(plan.page)) == len(plan.page)
        self.owner[plan.page] = ticket_of_slot[plan.page_slot]
        self.table[plan.page_slot, plan.page_index] = plan.page
        for index in range(self.table.shape[1]):
            used = end > index * self.page_size
            assert (self.owner[self.table[plan.slot[used], index]] == request_id[used]).all()

        rows = plan.count.sum()
        assert rows <= self.max_batched_tokens
        assert (plan.start == self.computed[request_id]).all()
        assert (end == self.known[request_id])[:-1].all()
        assert end[-1] == self.known[request_id[-1]] or rows == self.max_batched_tokens
        assert (plan.sample == (end == self.known[request_id])).all()
        assert ((plan.start >= self.from_host[request_id]) == (np.arange(len(request_id)) < plan.decodes)).all()
        if self.scheduler.waiting and not plan.preempted and len(request_id) < self.max_sequences:
            longest = self.LONGEST // self.page_size
            spare = (self.owner == -1).sum() - longest
            grown = self.length[request_id] if self.expected_share else self.known[request_id]
            crowded = (-(-grown // self.page_size)).sum() + longest > self.num_pages
            assert rows == self.max_batched_tokens or spare < 0 or crowded
        self.computed[request_id] = end
        self.known[request_id] += plan.sample
        self.leave(request_id[self.known[request_id] == self.length[request_id]], self.DONE)

    def read(self, sampled: NDArray[np.int64]) -> None:
        """The results of the step before: some requests stop, some are cancelled, wherever they are by now."""
        sampled = sampled[self.state[sampled] != self.ENDED]
        self.received[sampled] += 1
        stopped = sampled[self.random.random(len(sampled)) < 0.03]
        cancelled = self.random.integers(0, max(self.added, 1), 2)
        ended = np.unique(np.concatenate((stopped, cancelled)))
        ended = ended[(self.state[ended] == self.WAITING) | (self.state[ended] == self.RESIDENT)]
        for request_id in ended.tolist():
            self.scheduler.end(request_id, answered=False)
        self.leave(ended, self.ENDED)

    def leave(self, request_ids: NDArray[np.int64], state: int) -> None:
        self.resident -= int((self.state[request_ids] == self.RESIDENT).sum())
        self.state[request_ids] = state
        self.owner[(self.owner >= 0) & (self.state[self.owner] != self.RESIDENT)] = -1
