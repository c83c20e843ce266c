"""KV memory and latency bound a plan: formulas of docs/planning.md recomputed, and what must hold for any numbers."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatoken.analysis.published import results_of
from megatoken.engine.config import find_shape
from megatoken.engine.cost_model import SECONDS_PER_SEQUENCE, CostModel
from megatoken.engine.gpus import find_gpu
from megatoken.engine.schemes import find_scheme
from megatoken.errors import UsageError
from megatoken.planning.assumptions import Assumptions, load_assumptions
from megatoken.planning.bounds import Served
from megatoken.planning.pricing import derating, price
from megatoken.planning.schedule import Lengths, Replica, curve, find_replica, offline_rate
from megatoken.planning.throughput import from_number
from megatoken.planning.workloads import Profile, load_profiles
from megatoken.text import significant

RAG = load_profiles(names=["rag"])[0]
DEFAULTS = load_assumptions()
GB300 = Replica("llama2-70b", "fp4", "GB300")
BENCHMARK = Lengths(0.815 * 272.73, 0.815 * 272.73, 272.73)


def served(profile: Profile = RAG, assumptions: Assumptions = DEFAULTS, rate: float = 1_100_948.3) -> Served:
    rack = from_number(rate, scope="rack", accelerators=72, accelerator="GB300", assumptions=assumptions)
    return Served(profile, rack, price(rack, assumptions), derating(rack, assumptions), assumptions)


def mean_step_seconds(lengths: Lengths, requests: int) -> float:
    """The formula of the docs, with a cost model that is made here."""
    costs = CostModel(
        find_shape("llama2-70b"), find_scheme("fp4"), find_gpu("GB300"),
        seconds_per_sequence=SECONDS_PER_SEQUENCE["published"],
    )  # fmt: skip
    prompts = math.ceil(requests / lengths.output)
    chunk = requests * lengths.computed / lengths.output / prompts
    chunks = [((lengths.sent - chunk) / 2, chunk)] * prompts
    cached = requests * (lengths.sent + lengths.output / 2)
    return costs.step_of(requests, cached, chunks, requests * (1 + 1 / lengths.output)).seconds


def test_the_curve_is_the_formula_of_the_docs():
    for point in curve(GB300, RAG.request_lengths)[::25]:
        step = mean_step_seconds(RAG.request_lengths, point.requests)
        assert point.tpot_seconds == pytest.approx(step)
        service = 1300 / (GB300.step_tokens - point.requests) * step
        busy = service * point.requests / 1200 / step
        wait = service * max(0.0, math.log(100 * busy)) / (2 * (1 - busy)) if busy < 1 else math.inf
        assert point.ttft_seconds == pytest.approx(step + service + wait)


def test_memory_holds_whole_contexts():
    """160 KiB a token (80 layers x 8 heads x 128 x keys and values in fp8) in what the weights leave of 284,208 MiB."""
    bytes_per_token = 2 * 80 * 8 * 128
    assert GB300.cache_tokens * bytes_per_token < 284_208 * 2**20 - 69e9 * 0.5
    assert GB300.memory_requests(RAG.request_lengths) == GB300.cache_tokens // (32 * math.ceil(2500 / 32))


def test_a_plan_of_the_documents_rack_by_hand():
    one = served()
    full = int(GB300.step_tokens / 1.815)
    speed = 1_100_948.3 / 72 / (full / mean_step_seconds(BENCHMARK, full))
    assert one.throughput.speed == pytest.approx(speed)
    allowed = [
        point
        for point in curve(GB300, RAG.request_lengths)
        if point.requests <= GB300.memory_requests(RAG.request_lengths)
        and point.tpot_seconds / speed * 2.5 <= 0.2
        and point.ttft_seconds / speed * 2.5 <= 2.0
    ]
    best = max(allowed, key=lambda point: point.output_tokens_per_second)
    rate = best.output_tokens_per_second * speed * 72 / 1200
    assert one.highest == pytest.approx(rate)
    assert one.planning == pytest.approx(rate * 0.7)
    assert one.users == pytest.approx(rate * 0.7 * 227)
    assert one.most_in_flight == pytest.approx(best.requests * 72)
    assert one.bound in one.why and "605 requests per replica" in one.why


def test_each_bound_can_hold():
    assert served().bound == "KV memory"
    impatient = load_assumptions(settings=["ttft_limit_seconds=1"])
    assert served(assumptions=impatient).bound == "latency: time to first token"
    patient = load_assumptions(settings=["ttft_limit_seconds=60", "tpot_limit_seconds=2"])
    assert served(assumptions=patient).bound == "KV memory"
    assert served(assumptions=load_assumptions(settings=["tpot_limit_seconds=0.05"])).bound.endswith("output token")
    short = RAG.model_copy(update={"input_tokens": 0, "context_tokens": 100, "output_tokens": 20})
    assert served(short, patient).bound == "compute"
    huge = RAG.model_copy(update={"context_tokens": 2_000_000})
    with pytest.raises(UsageError, match="does not fit in the KV cache"):
        _ = served(huge).highest


LIMITS = st.floats(0.03, 5)


@settings(max_examples=40, deadline=None)
@given(LIMITS, LIMITS, st.floats(0.5, 1), st.floats(0.5, 1), st.integers(1, 4000), st.integers(1, 2000))
def test_tighter_limits_never_raise_the_rate(ttft, tpot, less_ttft, less_tpot, prompt, answer):
    profile = RAG.model_copy(update={"context_tokens": prompt, "output_tokens": answer})
    loose, tight = (
        load_assumptions(settings=[f"ttft_limit_seconds={one!r}", f"tpot_limit_seconds={other!r}"])
        for one, other in ((10 * ttft, tpot), (10 * ttft * less_ttft, tpot * less_tpot))
    )
    try:
        tighter = served(profile, tight)
        assert tighter.highest <= served(profile, loose).highest
        assert tighter.derated.planning <= derating(tighter.throughput, loose).planning
    except UsageError:
        event("one request alone breaks a limit")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 5000), st.integers(1, 3000))
def test_more_context_is_never_more_users(context, more, answer):
    less, longer = (
        RAG.model_copy(update={"context_tokens": tokens, "output_tokens": answer})
        for tokens in (context, context + more)
    )
    try:
        found = served(longer)
        assert found.users <= served(less).users * (1 + 1e-9)
        assert found.most_in_flight <= found.memory_requests
    except UsageError:
        event("one request alone breaks a limit or does not fit")


@pytest.mark.parametrize("accelerator", ["H100", "H200", "B200", "GB200"])
def test_the_cost_model_gives_verified_offline_rates(accelerator):
    """Without calibration, within 15 % of the fastest verified row of llama2-70b, the basis of every bound."""
    replica = find_replica("llama2-70b", None, accelerator, BENCHMARK)
    best = results_of(accelerator, "llama2-70b-99", "offline")[0]
    simulated = offline_rate(replica, BENCHMARK) / replica.ranks
    assert simulated == pytest.approx(best.output_tokens_per_second / best.accelerators, rel=0.15)


@pytest.mark.parametrize(("accelerator", "fit"), [("H200", 1.5), ("GB200", 3.2), ("B200", 3.3)])
def test_limits_over_means_give_verified_interactive_rates(accelerator, fit):
    """The fits of the assumption ``p99_over_mean_latency``, made on v5.1; Interactive allows 0.45 s and 40 ms."""
    assumptions = load_assumptions(
        settings=["ttft_limit_seconds=0.45", "tpot_limit_seconds=0.04", f"p99_over_mean_latency={fit}"]
    )
    rows = results_of(accelerator, "llama2-70b-99", "offline", "v5.1")
    fastest = rows[0].output_tokens_per_second / rows[0].accelerators
    pairs = [
        (offline, interactive)
        for offline in rows
        for interactive in results_of(accelerator, "llama2-70b-99", "interactive", "v5.1")
        if offline.id == interactive.id and offline.output_tokens_per_second > 0.9 * fastest * offline.accelerators
    ]
    shares = []
    for offline, _ in pairs:
        rate = from_number(
            offline.output_tokens_per_second, scope="system", accelerators=offline.accelerators,
            accelerator=accelerator, assumptions=assumptions,
        )  # fmt: skip
        shares.append(derating(rate, assumptions).latency_share)
    verified = [
        interactive.output_tokens_per_second / offline.output_tokens_per_second for offline, interactive in pairs
    ]
    assert sum(shares) / len(shares) == pytest.approx(sum(verified) / len(verified), rel=0.1)


def test_an_unknown_part_says_that_memory_is_not_checked():
    node = from_number(1000, scope="node", accelerators=8, assumptions=DEFAULTS)
    assert node.replica is None and any("KV memory is not checked" in note for note in node.notes)
    slow = from_number(10, scope="node", accelerators=8, accelerator="H100", assumptions=DEFAULTS)
    assert slow.replica is None and any("--model" in note for note in slow.notes)


def test_the_numbers_of_the_documents_rack_are_those_of_the_docs():
    one = served()
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    stated = text[text.index("The rack of the documents, 1,100,948 tokens/s, serves") :].partition("\n\n")[0]
    in_flight = one.most_in_flight * one.derated.headroom_share
    for value in (one.planning, in_flight, one.memory_requests, round(1_100_948.3 / 2500, -1)):
        assert f" {significant(float(value))} " in f" {' '.join(re.sub('[.`]', ' ', stated).split())} "
    # 1,677 requests per GPU would take 520 GB of a KV cache where 288 GB exist
    assert one.most_in_flight / 72 * 2500 * 2 * 80 * 8 * 128 < 288e9
