"""All GPUs of a machine as one qualification, in turn and at once, and collectives between real processes."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatoken.errors import CapacityError, MegatokenError, UsageError
from megatoken.hardware.qualify import collectives, rank_process
from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.document import check_document
from megatoken.hardware.qualify.judge import Verdict
from megatoken.hardware.qualify.parts import gpus_here, joined, qualify_gpus
from megatoken.hardware.qualify.values import NotRun, Setting, Value

TESTS = (
    HardwareTest("rate", "Rate", "qualify_faults:by_gpu"),
    HardwareTest("all", "All GPUs", "qualify_faults:together", whole=True),
)


@pytest.mark.timing
@pytest.mark.parametrize("together", [False, True])
def test_every_gpu_is_tested_and_the_slow_one_is_named(
    together: bool, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert gpus_here() == ["0", "1", "2", "3"]
    counts: list[tuple[int, int]] = []
    *before, document = qualify_gpus(
        TESTS, tiny, "cpu", gpus_here(), together=together, progress=lambda *done: counts.append(done)
    )
    names = {test["name"]: test for test in document["tests"]}
    assert set(names) == {"rate", "all", "rate@1", "rate@2", "rate@3", "spread"}
    (slow,) = [value for value in names["spread"]["values"] if value["name"] == "slow_rate"]
    assert (slow["verdict"], slow["reason"]) == (Verdict.FAIL, "GPU 2: 80.0 GB/s, 20.4% below the median")
    assert document["verdict"] == Verdict.FAIL
    assert "Rate: slow GPUs (GPU 2: 80.0 GB/s, " in document["answer"][0]
    assert document["complete"] and not before[0]["complete"]
    assert max(counts)[1] == 5


def part_with(
    windows: Sequence[float],
    *,
    device: str = "H200",
    pytorch: str = "2.9",
    cublas: str = "",
    better: str = "higher",
    **more: Any,
) -> dict[str, Any]:
    """The document of a part that measured one rate."""
    value = {"name": "rate", "title": "Rate", "unit": "GB/s", "better": better, "median": statistics.median(windows)}
    value |= {"verdict": "PASS", "windows": list(windows), "noisy": False, "reason": ""}
    value |= {"band": {"lowest": 0.0, "highest": 1e9, "sources": []}}
    value |= {"core_wait_share": None, "taken_share": 0.0} | more
    test = {"name": "t", "title": "T", "verdict": "PASS", "fault": None, "seconds": 1.0, "values": [value]}
    packages = {"nvidia-cublas-cu12": cublas, "nvidia-nccl-cu12": "2.27"} if cublas else {}
    machine = {"packages": {"torch": pytorch}, "all_packages": packages}
    document = {"tests": [test], "device": device, "machine": machine, "complete": True}
    return document | {"verdict": "PASS", "notes": [f"has {windows[0]:.0f}"]}


def compared(*parts: dict[str, Any]) -> dict[str, Any]:
    """All of them as GPUs 0, 1 and on."""
    documents = {str(number): part for number, part in enumerate(parts)}
    return joined(documents, "GPU", expected=len(parts), seconds=1.0)


def test_of_two_parts_only_the_ratio_is_stated() -> None:
    both = compared(part_with([50.0]), part_with([100.0]))
    (value,) = both["tests"][-1]["values"]
    assert (value["name"], value["median"], value["verdict"]) == ("ratio_rate", 0.5, "NO REFERENCE")
    assert both["notes"] == ["GPU 0: has 50", "GPU 1: has 100"]


@pytest.mark.parametrize("wrong", [0, 2])
def test_the_answer_names_the_gpu_of_a_value_that_fails(wrong: int) -> None:
    def part(number: int) -> dict[str, Any]:
        found = {"verdict": "FAIL", "reason": "1 wrong; expected 0"} if number == wrong else {}
        return part_with([float(number == wrong)], better="zero", **found)

    document = compared(*map(part, range(3)))
    assert document["answer"][0].startswith(f"1 fault found: Rate (GPU {wrong}: 1 wrong; expected 0)")


@pytest.mark.parametrize(
    ("windows", "more", "verdict", "words"),
    [
        ([98.0] * 3, {}, "PASS", ""),
        ([94.0] * 3, {}, "MARGINAL", "GPU 3: 94.0 GB/s, 6.0% below the median"),
        ([90.0] * 3, {}, "FAIL", "GPU 3: 90.0 GB/s, 10.0% below the median"),
        ([80.0, 90.0, 95.0], {"noisy": True}, "MARGINAL", "GPU 3: 90.0 GB/s, 10.0% below the median, noisy"),
        ([60.0, 65.0, 78.0], {"noisy": True}, "MARGINAL", "GPU 3: 65.0 GB/s, 35.0% below the median, noisy"),
        ([50.0, 60.0, 70.0], {"noisy": True}, "FAIL", "GPU 3: 60.0 GB/s, 40.0% below the median, noisy"),
        ([50.0, 60.0, 70.0], {"noisy": True, "core_wait_share": 0.3}, "MARGINAL", "GPU 3: 60.0 GB/s, 40.0% below"),
        ([50.0, 60.0, 61.0], {"taken_share": 0.5}, "MARGINAL", "GPU 3: 60.0 GB/s, 40.0% below the median"),
        ([45.0, 46.0, 47.0], {"taken_share": 0.5}, "FAIL", "GPU 3: 46.0 GB/s, 54.0% below the median"),
    ],
)
def test_a_noisy_part_fails_only_far_behind_the_others(
    windows: Sequence[float], more: dict[str, Any], verdict: str, words: str
) -> None:
    others = [part_with([100.0] * 3) for _ in range(3)]
    document = compared(*others, part_with(windows, **more))
    spread = document["tests"][-1]
    (value,) = spread["values"]
    assert (spread["verdict"], value["verdict"]) == (verdict, verdict)
    assert value["reason"].startswith(words)
    slower = [1e4 / window for window in windows]  # the same as times
    (value,) = compared(
        *(part_with([100.0] * 3, better="lower") for _ in range(3)), part_with(slower, better="lower", **more)
    )["tests"][-1]["values"]
    assert value["verdict"] == verdict


def test_documents_of_gpus_and_of_racks_of_them_are_whole() -> None:
    node = compared(*(part_with([rate]) for rate in (100.0, 100.0, 100.0, 94.0)))
    (slow,) = node["tests"][-1]["values"]
    assert (slow["name"], slow["windows"], slow["verdict"]) == ("slow_rate", [1], Verdict.MARGINAL)
    rack = joined(dict.fromkeys("abc", node), "node", expected=3, seconds=1.0)
    assert [test["name"] for test in rack["tests"]].count("spread") == 2
    for document in (node, rack):
        check_document(document, "file")
    with pytest.raises(UsageError, match="windows counts 1 where any error is a FAIL"):
        check_document(node | {"tests": [*node["tests"][:-1], node["tests"][-1] | {"name": "other"}]}, "file")


def test_where_most_parts_are_noisy_the_steady_one_is_not_the_slow_one() -> None:
    noisy = [part_with([80.0, 100.0, 120.0], noisy=True) for _ in range(3)]
    (value,) = compared(*noisy, part_with([85.0] * 3))["tests"][-1]["values"]
    assert value["verdict"] == "MARGINAL"
    assert "most GPUs are noisy" in value["reason"]


def test_healthy_racks_do_not_fail() -> None:
    """Steady values of 18 like nodes that differ by 2 %, 27 of them, in 20 racks: one in 10 would name a node."""
    random_numbers = random.Random(1)
    for _ in range(20 * 27):
        nodes = [part_with([random_numbers.gauss(100, 2)] * 3) for _ in range(18)]
        assert compared(*nodes)["verdict"] != "FAIL"


def test_only_like_parts_are_compared() -> None:
    fast, slow = (
        [part_with([rate] * 3, device=device) for _ in range(3)]
        for device, rate in (("H200", 4000.0), ("H100", 2900.0))
    )
    document = compared(*fast, *slow)
    assert [value["name"] for value in document["tests"][-1]["values"]] == ["slow_rate", "slow_rate_H100"]
    assert document["tests"][-1]["verdict"] == "PASS"
    assert document["notes"][-1] == (
        "Not all GPUs are alike, and only like ones are compared. H200: 0, 1, 2; H100: 3, 4, 5."
    )


def with_digest(digest: int, **more: str) -> dict[str, Any]:
    """The document of a part that multiplied, and whose result has these bits."""
    return part_with([float(digest)], better="same", title="bf16 product, all bits", unit="digest", **more)


NOT_OF_MOST = "the result is not that of most GPUs: wrong, or of another library"
NONE_OF_MOST = "no result is that of most, so some compute wrong results, or use another library"


@pytest.mark.parametrize(
    ("digests", "verdict", "reason"),
    [
        ([5, 5], "PASS", ""),
        ([5, 6], "FAIL", "GPUs 0, 1: one of the two computes wrong results, or uses another library"),
        ([5, 5, 5], "PASS", ""),
        ([2**32 - 2, 2**32 - 1, 2**32 - 1], "FAIL", f"GPU 0: {NOT_OF_MOST}"),
        ([7, 5, 5, 6, 5], "FAIL", f"GPUs 0, 3: {NOT_OF_MOST}"),
        ([5, 5, 6, 6], "FAIL", f"GPUs 0, 1, 2, 3: {NONE_OF_MOST}"),
    ],
)
def test_results_that_differ_among_like_parts_are_wrong(digests: Sequence[int], verdict: str, reason: str) -> None:
    document = compared(*map(with_digest, digests))
    (value,) = document["tests"][-1]["values"]
    assert value["name"] == "differ_rate"
    assert value["title"] == "bf16 product, all bits: results that differ from those of the other GPUs"
    assert (value["verdict"], value["reason"]) == (verdict, reason)
    assert document["verdict"] == ("FAIL" if reason else "NO REFERENCE")
    assert reason in document["answer"][0]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"pytorch": "2.8"}, "PyTorch 2.8"),
        ({"cublas": "12.9.1.4"}, "cuBLAS 12.9.1.4"),
        ({"cublas": ""}, "cuBLAS unknown"),
        ({"device": "H100"}, "H100"),
    ],
)
def test_results_are_compared_for_the_same_device_pytorch_and_cublas_alone(other: dict[str, str], name: str) -> None:
    first = {"cublas": "12.8.4.1"}
    one, another = (with_digest(5, **first), with_digest(6, **(first | other)))
    document = compared(one, another, one, another, with_digest(7, device="A100", **first))
    found = [(value["name"], value["verdict"]) for value in document["tests"][-1]["values"]]
    assert found == [("differ_rate", "PASS"), (f"differ_rate_{name}", "PASS")]


@pytest.mark.parametrize("together", [False, True])
def test_a_gpu_whose_product_has_one_other_bit_is_named(
    together: bool, tiny: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    tests = [HardwareTest("exact", "Exact", "qualify_faults:digest_by_gpu")]
    *_, document = qualify_gpus(tests, tiny, "cpu", gpus_here(), together=together)
    assert document["answer"][0].startswith(
        "1 fault found: bf16 product, all bits: results that differ from those of the other GPUs (GPU 1: "
    )


def test_parts_without_a_speed_have_nothing_to_compare() -> None:
    errors = {"better": "zero", "median": 0}
    document = compared(part_with([0.0], **errors), part_with([0.0], **errors))
    assert [test["name"] for test in document["tests"]] == ["t", "t@1"]


def test_collectives_between_processes_have_the_right_results(tiny: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CPU_SIZES", (2**12,))
    monkeypatch.setattr(collectives, "cores_within_quota", lambda: 3)
    found = {one.name: one for one in collectives.on_cpu(tiny)}
    assert list(found) == [f"{name}_4096" for name in collectives.TITLES] + ["collective_errors"]
    errors = found["collective_errors"]
    assert isinstance(errors, Value) and errors.windows == [0]
    assert all(isinstance(one, Value) and one.median > 0 for one in list(found.values())[:4])
    assert (collectives.bus_share("all_reduce", 4), collectives.bus_share("all_to_all", 4)) == (1.5, 0.75)


def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(MegatokenError, match=r"(?i)rank [01] ended with exit code 1: .*no-such-backend"):
        list(collectives.run_ranks("no-such-backend", 2, (64,), 1, 0.01))


@pytest.fixture
def in_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lines of Python that each rank runs when its group is ready, with its number as ``rank``."""

    def write(lines: str) -> None:
        path = tmp_path / "sitecustomize.py"
        path.write_text(
            "import os, time\nimport torch.distributed as dist\nready = dist.init_process_group\n"
            "def init(*arguments, rank, **options):\n    ready(*arguments, rank=rank, **options)\n"
            f"{textwrap.indent(lines, '    ')}\ndist.init_process_group = init\n"
        )
        others = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{others}" if others else str(tmp_path))

    return write


def test_what_nccl_prints_is_no_result(in_every_rank: Callable[[str], None]) -> None:
    in_every_rank("for file in (1, 2): os.write(file, b'NCCL INFO Channel 00/24 : 0 1\\n' * 10_000)")
    found = list(collectives.run_ranks("gloo", 2, (64,), 1, 0.01))
    assert [(one["operation"], one["wrong"]) for one in found] == [(name, 0) for name in collectives.TITLES]


def test_the_rank_that_ended_first_is_named(in_every_rank: Callable[[str], None]) -> None:
    in_every_rank("if rank == 1: os.kill(os.getpid(), 11)")
    with pytest.raises(MegatokenError, match="rank 1 was ended by SIGSEGV: no message"):
        list(collectives.run_ranks("gloo", 2, (64,), 1, 0.01))


def test_ranks_that_hang_are_a_fault(in_every_rank: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    in_every_rank("if rank == 1: time.sleep(1000)")
    monkeypatch.setattr(collectives, "LIMIT_SECONDS", 8.0)
    with pytest.raises(MegatokenError, match="2 ranks did not end within 8 s and had to be stopped; see"):
        list(collectives.run_ranks("gloo", 2, (64,), 1, 0.01))


WAITING = """
from megatoken.hardware.qualify.collectives import Task, run_tasks
task = Task("gloo", 2, 1, 0, "tcp://127.0.0.1:1", (64,), 1, 0.01, limit_seconds=1000.0)
list(run_tasks([task], 1000.0))
"""


@pytest.mark.parametrize("loads_pytorch", [True, False])
def test_a_rank_ends_with_the_process_that_started_it(loads_pytorch: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING]) as parent:
        try:
            until(lambda: bool(psutil.Process(parent.pid).children()))
            (rank,) = psutil.Process(parent.pid).children()
            if not loads_pytorch:
                until(lambda: "libtorch_cpu" in Path(f"/proc/{rank.pid}/maps").read_text())
                time.sleep(3.0)  # by then it waits for the other rank
        finally:
            parent.kill()
    until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_without_memory_is_no_fault(in_every_rank: Callable[[str], None]) -> None:
    in_every_rank("import torch\nraise torch.OutOfMemoryError('CUDA out of memory')")
    with pytest.raises(CapacityError, match="CUDA out of memory"):
        list(collectives.run_ranks("gloo", 2, (64,), 1, 0.01))


def test_a_wrong_sum_is_counted() -> None:
    run, check = rank_process.prepared("all_reduce", 64, 4, 1, rank_process.torch.device("cpu"))
    assert callable(run)
    assert check() == 16  # nothing was added up: all elements are wrong


def test_on_one_gpu_collectives_say_what_they_need(tiny: Setting) -> None:
    (outcome,) = collectives.on_gpus(tiny)
    assert isinstance(outcome, NotRun) and "two GPUs" in outcome.enable
