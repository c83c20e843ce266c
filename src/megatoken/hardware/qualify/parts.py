"""Several like parts as one qualification: GPUs of a machine or nodes of a rack, and the slow one among them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megatoken.hardware.nvml import all_gpus, open_nvml
from megatoken.hardware.qualify.catalog import Device, HardwareTest, visible_names
from megatoken.hardware.qualify.document import MARK, SPREAD
from megatoken.hardware.qualify.fleet import FEWEST, different_parts, graded_parts
from megatoken.hardware.qualify.judge import (
    Judged,
    Verdict,
    answer,
    far_behind,
    overall,
    speed_without_others,
    verdict_of_test,
    worst,
)
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.session import entry_of_test, qualify
from megatoken.hardware.qualify.values import SPEEDS, Setting, Value
from megatoken.text import number

COMPILERS = ("triton", "cuda-bindings")
"""Packages that compile the engine's kernels."""
DIFFERENCES = HardwareTest(SPREAD, "Differences between like parts", "")


def gpus_here() -> list[str]:
    """Every GPU that this process may see, as CUDA_VISIBLE_DEVICES names it; empty if that is unknown."""
    if (names := visible_names()) is not None:
        return names
    library = open_nvml()
    return [] if library is None else [str(index) for index in range(len(all_gpus(library)))]


def qualify_gpus(
    tests: Sequence[HardwareTest],
    setting: Setting,
    device: Device,
    gpus: Sequence[str],
    *,
    together: bool,
    full: bool = False,
    baseline: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Test every GPU, in turn or all at once, and yield the document of all of them after each test.

    All at once shares the host, its memory and the power of the machine, as real work does. Tests of all GPUs together
    run once. Other arguments and errors as for ``qualify``.
    """
    shared = [test for test in tests if test.whole]
    own = [test for test in tests if not test.whole]
    documents: dict[str, dict[str, Any]] = {}
    done: dict[str, int] = {}

    def of(gpu: str) -> Iterator[dict[str, Any]]:
        def report(ended: int, _: int) -> None:
            done[gpu] = ended
            if progress:
                progress(sum(done.values()), len(gpus) * len(own) + len(shared))

        suffix = "" if gpu == gpus[0] else f"{MARK}{gpu}"
        yield from qualify(own, setting, device, full=full, baseline=baseline, gpu=gpu, suffix=suffix, progress=report)

    def all_of_them(more: Sequence[Mapping[str, Any]], *, complete: bool) -> dict[str, Any]:
        ordered = {name: documents[name] for name in gpus if name in documents}
        document = joined(ordered, "GPU", expected=len(gpus), seconds=time.monotonic() - began, more=more)
        return document | {"complete": complete and document["complete"]}

    began = time.monotonic()
    for gpu, document in _at_once(gpus, of) if together else _in_turn(gpus, of):
        documents[gpu] = document
        yield all_of_them((), complete=not shared)
    if shared:  # after the others, so that no GPU has other work
        for document in qualify(shared, setting, device, full=full, baseline=baseline):
            yield all_of_them(document["tests"], complete=document["complete"])


def _in_turn(
    names: Sequence[str], of: Callable[[str], Iterator[dict[str, Any]]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        for document in of(name):
            yield name, document


def _at_once(
    names: Sequence[str], of: Callable[[str], Iterator[dict[str, Any]]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    queue: SimpleQueue[tuple[str, dict[str, Any]] | BaseException | None] = SimpleQueue()

    def run(name: str) -> None:
        try:
            for document in of(name):
                queue.put((name, document))
            queue.put(None)
        except BaseException as error:
            queue.put(error)

    for name in names:
        Thread(target=run, args=(name,), daemon=True).start()
    left = len(names)
    while left:
        one = queue.get()
        if isinstance(one, BaseException):
            raise one
        if one is None:
            left -= 1
        else:
            yield one


def joined(
    documents: Mapping[str, Mapping[str, Any]],
    kind: str,
    *,
    expected: int,
    seconds: float,
    more: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """One document of several parts: the tests of all, and how their values differ.

    Names of the first part's tests and values stay; those of the others end in ``@`` and the part. Titles of tests,
    reasons, notes and ``part`` of each value name it. ``kind``: GPU or node. ``more``: tests of all parts together.
    """
    first, document = next(iter(documents.items()))
    tests: list[Mapping[str, Any]] = []
    for name, one in documents.items():
        suffix = "" if name == first else f"{MARK}{name}"
        of = " of " if "parts" in one else ", "  # GPU 1 of node beta
        for test in one["tests"]:
            values = [_of_part(value, suffix, f"{kind} {name}") for value in test["values"]]
            title = f"{test['title']}{of}{kind} {name}"
            tests.append(test | {"name": f"{test['name']}{suffix}", "title": title, "values": values})
    if len(documents) > 1:
        tests += spread(documents, kind)
    tests += more
    notes = [f"{kind} {name}: {note}" for name, one in documents.items() for note in one["notes"]]
    devices: dict[str, list[str]] = {}
    for name, one in documents.items():
        devices.setdefault(one["device"], []).append(name)
    if len(devices) > 1:
        unlike = "; ".join(f"{device}: {', '.join(names)}" for device, names in devices.items())
        notes.append(f"Not all {kind}s are alike, and only like ones are compared. {unlike}.")
    merged = dict(document) | {
        "notes": notes,
        "parts": {"kind": kind, "names": list(documents), "first": first},
        "tests": tests,
        "seconds": seconds,
        "verdict": overall(tests),
        "complete": len(documents) == expected and all(one["complete"] for one in documents.values()),
    }
    return merged | {"answer": answer(merged)}


def _of_part(value: Mapping[str, Any], suffix: str, part: str) -> dict[str, Any]:
    reason, inner = value.get("reason"), value.get("part")
    return {
        **value,
        "name": f"{value['name']}{suffix}",
        "part": f"{inner} of {part}" if inner else part,
        "reason": f"{part}: {reason}" if reason else "",
    }


def spread(documents: Mapping[str, Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """A test that compares each speed, and each result that must be the same, among parts of the same device.

    Of the speeds of two parts only the ratio is stated. Results must be the same for the same versions of PyTorch
    and cuBLAS. The list is empty if there is nothing to compare.
    """
    first = next(iter(documents.values()))
    first_libraries = _libraries(first)
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for part, document in documents.items():
        other_device = [document["device"]] if document["device"] != first["device"] else []
        other_libraries = [one for one in _libraries(document) if one not in first_libraries]
        for value in (value for test in document["tests"] for value in test["values"]):
            unlike = other_device + (other_libraries if value.get("better") == "same" else [])
            if value.get("median") is not None and value["better"] in (*SPEEDS, "same"):
                found.setdefault((value["name"], ", ".join(unlike)), {})[part] = value
    outcomes: list[Value] = []
    judged: dict[str, Judged] = {}
    for (name, of), values in found.items():
        one = next(iter(values.values()))
        title = f"{one['title']} ({one['part']})" if "part" in one else one["title"]  # a GPU of each node
        name, title = (f"{name}_{of}", f"{title}, {of}") if of else (name, title)
        medians = {part: value["median"] for part, value in values.items()}
        if one["better"] == "same" and len(values) > 1:
            wrong = different_parts(medians)
            title = f"{title}: results that differ from those of the other {kind}s"
            outcomes.append(Value(f"differ_{name}", title, f"{kind}s", [len(wrong)], "zero"))
            judged[f"differ_{name}"] = _different(wrong, len(values), kind)
        elif one["better"] in SPEEDS and len(values) >= FEWEST:
            slow = graded_parts(medians, one["better"])
            outcomes.append(Value(f"slow_{name}", f"{title}: slow {kind}s", f"{kind}s", [len(slow)], "zero"))
            judged[f"slow_{name}"] = _slow(values, slow, one["better"], kind)
        elif one["better"] in SPEEDS and len(values) == 2:
            lowest, highest = sorted(medians.values())
            ratio = lowest / highest if highest else 1.0
            outcomes.append(Value(f"ratio_{name}", f"{title}: lower over higher", "ratio", [ratio], ""))
    if not outcomes:
        return []
    entry = entry_of_test(DIFFERENCES, [Ended(tuple(Returned(one, None) for one in outcomes), 0.0, None)], "", {}, 0.0)
    for value in entry["values"]:
        if (known := judged.get(value["name"])) is not None:
            value |= {"verdict": known.verdict, "reason": known.reason}
    return [entry | {"verdict": verdict_of_test(entry)}]


def _libraries(document: Mapping[str, Any]) -> list[str]:
    """PyTorch, cuBLAS and compilers of kernels with their versions, on which the bits of a result depend."""
    machine = document["machine"]
    found = [version for name, version in machine["all_packages"].items() if name.startswith("nvidia-cublas")]
    compilers = [f"{name} {version}" for name in COMPILERS if (version := machine["packages"].get(name))]
    return [f"PyTorch {machine['packages']['torch']}", f"cuBLAS {', '.join(found) or 'unknown'}", *compilers]


def _different(wrong: Sequence[str], parts: int, kind: str) -> Judged:
    """The verdict on a result that all parts should have, and these have not."""
    if not wrong:
        return Judged(Verdict.PASS)
    names = f"{kind}{'s' * (len(wrong) > 1)} {', '.join(wrong)}"
    if parts == 2:
        reason = "one of the two computes wrong results, or uses another library"
    elif len(wrong) == parts:
        reason = "no result is that of most, so some compute wrong results, or use another library"
    else:
        reason = f"the result is not that of most {kind}s: wrong, or of another library"
    return Judged(Verdict.FAIL, f"{names}: {reason}")


def _slow(values: Mapping[str, Mapping[str, Any]], slow: Mapping[str, Verdict], better: str, kind: str) -> Judged:
    """The verdict on a speed of several parts, of which these are slow: the worst one decides, and all are named.

    A noisy one fails only if it is far behind the slowest windows of all parts; one that other machines of the host can
    slow does so, too, if it would be slow even without them.
    """
    medians = {part: value["median"] for part, value in values.items()}
    middle = statistics.median(medians.values())
    best_of, worst_of = (min, max) if better == "lower" else (max, min)
    slowest = statistics.median(worst_of(value["windows"]) for value in values.values())
    most_are_noisy = 2 * sum(value["noisy"] for value in values.values()) > len(values)
    verdicts, reasons = [Verdict.PASS], []
    for part, verdict in slow.items():
        value = values[part]
        waited, taken = value["core_wait_share"], value["taken_share"]
        alone = medians | {part: speed_without_others(value["median"], better, taken)}
        still = graded_parts(alone, better).get(part) is Verdict.FAIL
        counts = not (value["noisy"] or most_are_noisy) and (still or not taken)
        counts |= far_behind(best_of(value["windows"]), slowest, better, waited, taken)
        verdicts.append(verdict if counts else Verdict.MARGINAL)
        behind = f"{abs(value['median'] / middle - 1):.1%} {'above' if better == 'lower' else 'below'} the median"
        remark = ", noisy" if value["noisy"] else ""
        if taken and verdicts[-1] is not verdict:
            remark += f", of which other virtual machines of the host may take {taken:.0%}"
        reasons.append(f"{kind} {part}: {number(value['median'])} {value['unit']}, {behind}{remark}")
    if most_are_noisy and slow:
        reasons.append(f"the values of most {kind}s are noisy: repeat it on quiet machines")
    return Judged(worst(verdicts), "; ".join(reasons))
