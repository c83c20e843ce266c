"""The router of a rack, as pure code: prefixes first, then load; bounded, and never a replica that is not there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatoken.serve.routing import MOST_SLACK, Load, PrefixRouter

PAGE = 4
PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=60)


def router_of(replicas: int, cache_tokens: int = 1 << 20) -> PrefixRouter:
    router = PrefixRouter(PAGE)
    for replica in range(replicas):
        router.add(replica, cache_tokens)
    return router


def common_pages(one: list[int], other: list[int]) -> int:
    """Full pages that two prompts begin with: what the keys of the router must say."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return same // PAGE


@given(PROMPTS, st.integers(1, 4))
def test_equal_loads_go_to_the_replica_that_saw_the_longest_prefix(prompts: list[list[int]], replicas: int) -> None:
    router = router_of(replicas)
    loads = {replica: Load(0, 64) for replica in range(replicas)}
    seen: dict[int, list[list[int]]] = {replica: [] for replica in range(replicas)}
    for prompt in prompts:
        best = {one: max((common_pages(prompt, old) for old in seen[one]), default=0) for one in seen}
        keys = router.keys(prompt, "")
        assert {one: router.cached_pages(one, keys) for one in seen} == best
        chosen = router.choose(keys, loads)
        assert best[chosen] == max(best.values())
        router.sent(chosen, keys)
        seen[chosen].append(prompt)


@given(PROMPTS, st.lists(st.integers(0, 100), min_size=2, max_size=5), st.integers(1, 512))
def test_no_prefix_is_worth_more_than_the_slack(prompts: list[list[int]], held: list[int], sequences: int) -> None:
    router = router_of(len(held))
    loads = {replica: Load(requests, sequences) for replica, requests in enumerate(held)}
    for prompt in prompts:
        keys = router.keys(prompt, "")
        chosen = router.choose(keys, loads)
        assert held[chosen] - min(held) <= loads[chosen].slack <= MOST_SLACK
        if not router.cached_pages(chosen, keys):
            assert held[chosen] == min(held)
        router.sent(chosen, keys)


@given(PROMPTS, st.integers(1, 12))
def test_memory_is_that_of_the_cache_and_ends_of_chains_go_first(prompts: list[list[int]], pages: int) -> None:
    router = router_of(1, pages * PAGE)
    for prompt in prompts:
        keys = router.keys(prompt, "")
        router.sent(0, keys)
        assert len(router._sent[0]) <= pages
        assert router.cached_pages(0, keys) == min(pages, len(keys))


@given(st.integers(2, 6), st.integers(2, 8), st.integers(2, 5))
def test_conversations_stay_where_they_began_while_others_come(replicas: int, talks: int, turns: int) -> None:
    """All begin with one system prompt, so that only the rest of a conversation can say where it was."""
    router = router_of(replicas)
    open_requests = dict.fromkeys(range(replicas), 0)
    system = [9] * 8 * PAGE
    history = {talk: [*system, talk + 1000] for talk in range(talks)}
    home: dict[int, int] = {}
    for turn in range(turns):
        taken = []
        for talk in range(talks):
            history[talk] += [turn, talk] * PAGE
            keys = router.keys(history[talk], "key\n")
            chosen = router.choose(keys, {one: Load(count, 64) for one, count in open_requests.items()})
            router.sent(chosen, keys)
            assert home.setdefault(talk, chosen) == chosen
            open_requests[chosen] += 1
            taken.append(chosen)
        for chosen in taken:
            open_requests[chosen] -= 1


def test_salts_share_nothing_and_a_lost_replica_is_forgotten() -> None:
    router = router_of(2)
    prompt = [1] * 3 * PAGE
    router.sent(1, router.keys(prompt, "a"))
    idle = {0: Load(0, 8), 1: Load(0, 8)}
    assert router.choose(router.keys(prompt, "a"), idle) == 1
    assert router.cached_pages(1, router.keys(prompt, "b")) == 0
    router.remove(1)
    router.add(1, 1 << 20)
    assert router.cached_pages(1, router.keys(prompt, "a")) == 0


def test_without_a_prefix_cache_only_loads_count() -> None:
    router = PrefixRouter(0)
    for replica in (0, 1):
        router.add(replica, 1000)
    keys = router.keys([1] * 100, "")
    router.sent(0, keys)
    assert router.choose(keys, {0: Load(1, 8), 1: Load(0, 8)}) == 1
    assert router.choose(keys, {0: Load(1, 100), 1: Load(1, 8)}) == 0, "shares, not counts"
