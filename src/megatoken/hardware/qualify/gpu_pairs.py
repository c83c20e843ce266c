"""Copies between every two GPUs, one way and both ways at once, with their data checked; the slow pair is named."""

from __future__ import annotations

import time
from itertools import combinations

import torch

from megatoken.engine.gpus import gpus
from megatoken.hardware.qualify.exact import different_elements
from megatoken.hardware.qualify.fleet import slow_parts
from megatoken.hardware.qualify.values import Bound, NotRun, Outcomes, Setting, Value
from megatoken.hardware.specification import part_name

MOST_BYTES = 2**29


@torch.inference_mode()
def pairs(setting: Setting) -> Outcomes:
    """The windows of a value are of all pairs; a pair that is slower than the others is a fault."""
    count, title = torch.cuda.device_count(), "Copies between GPUs"
    if count < 2:
        yield NotRun("p2p", title, f"this machine has {count} GPU", "take a machine with two GPUs or more")
        return
    sheet = gpus().get(part_name(torch.cuda.get_device_name(0)))
    link = None if sheet is None else sheet.link_bytes_per_second
    size, wrong, blocked = min(MOST_BYTES, setting.buffer_bytes), 0, []
    one_way: dict[str, float] = {}
    both_ways: dict[str, float] = {}
    for first, second in combinations(range(count), 2):
        name = f"{first}-{second}"
        if not torch.cuda.can_device_access_peer(first, second):
            blocked.append(name)
        here, there = (torch.device("cuda", index) for index in (first, second))
        source = torch.randint(256, (size,), dtype=torch.uint8, device=here)
        other = torch.randint(256, (size,), dtype=torch.uint8, device=there)
        target, back = torch.empty_like(other), torch.empty_like(source)
        seconds = _seconds([(target, source)], setting)
        one_way[name] = size / 1e9 / seconds
        both_ways[name] = 2 * size / 1e9 / _seconds([(target, source), (back, other)], setting)
        wrong += different_elements(target.cpu().view(torch.int32), source.cpu().view(torch.int32))
        wrong += different_elements(back.cpu().view(torch.int32), other.cpu().view(torch.int32))
        del source, other, target, back
        torch.cuda.empty_cache()
    note = f"without direct access: {', '.join(blocked)}" if blocked else ""
    bound = None if link is None else Bound(link / 1e9, "data sheet of the links, one direction")
    yield Value(
        "p2p_one_way", f"{title}, one direction, all pairs", "GB/s", list(one_way.values()), bound=bound, note=note
    )
    bound = bound and Bound(2 * bound.value, "data sheet of the links, both directions")
    yield Value("p2p_both_ways", f"{title}, both directions, all pairs", "GB/s", list(both_ways.values()), bound=bound)
    slow = slow_parts(one_way, "higher")
    note = ", ".join(f"GPUs {name}: {one_way[name]:.0f} GB/s" for name in slow)
    yield Value(
        "p2p_slow_pairs", "Pairs of GPUs that are slower than the others", "pairs", [len(slow)], "zero", note=note
    )
    yield Value("p2p_errors", "Data after the copies between GPUs", "wrong", [wrong], "zero")


def _seconds(copies: list[tuple[torch.Tensor, torch.Tensor]], setting: Setting) -> float:
    """Mean seconds of one round of copies, all at once."""
    streams = [torch.cuda.Stream(source.device) for _, source in copies]  # type: ignore[no-untyped-call]

    def run(count: int) -> float:
        for device in {source.device for _, source in copies} | {target.device for target, _ in copies}:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(count):
            for stream, (target, source) in zip(streams, copies, strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        return time.perf_counter() - began

    once = run(2) / 2
    count = max(2, round(setting.seconds / setting.windows / max(once, 1e-6)))
    return run(count) / count
