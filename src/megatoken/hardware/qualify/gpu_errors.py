"""What GPUs count while the tests run, and during which test: errors of memory, links and driver, and slow-downs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from megatoken.hardware.nvml import HARDWARE_XIDS, NvmlGpu, gpus_of
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.values import NotRun, Outcome, Value
from megatoken.hardware.telemetry import ERROR_WORDS

CORRECTED = {"ecc_corrected_errors", "pcie_replays", "nvlink_errors", "c2c_errors"}
"""Counters whose growth loses no data. It is a warning; growth of any other is a fault."""
XIDS = "xid_errors"
MOST_SLOWED_SECONDS = 1.0
"""By one cause in all tests together: a change of the clock alone is sometimes counted, for milliseconds."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Something that a GPU reported: under which counter, how many errors that is, and all of it in words."""

    counter: str
    errors: int
    words: str


class ErrorWatch:
    """Counters and critical errors of some GPUs, named ``GPU-...``, from now on."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._gpus: list[NvmlGpu] = gpus_of(uuids) or []
        self._counts = [asdict(gpu.counters()) for gpu in self._gpus]
        self._known = {name for counts in self._counts for name, count in counts.items() if count is not None}
        watched = [gpu.watch_xids() for gpu in self._gpus]
        if any(watched):
            self._known.add(XIDS)
        self._seen: list[_Seen] = []
        self._slow = [gpu.slow_down_seconds() for gpu in self._gpus]
        self._slowed: defaultdict[tuple[int, str], float] = defaultdict(float)  # seconds, by GPU and cause
        self._slowed_words: list[str] = []

    def look(self, during: str) -> None:
        """Ascribe what is new to a test that has just ended, or to several at the same time, by their titles."""
        for index, gpu in enumerate(self._gpus):
            where = f" during {during}" + (f", GPU {index}" if len(self._gpus) > 1 else "")
            before, self._counts[index] = self._counts[index], asdict(gpu.counters())
            for name, count in self._counts[index].items():
                if before[name] is None:
                    continue
                if count is None:  # a card that fell off the bus answers no more
                    self._seen.append(_Seen(XIDS, 1, f"no answer about {ERROR_WORDS[name]} any more{where}"))
                elif count > before[name]:
                    more = count - before[name]
                    self._seen.append(_Seen(name, more, f"{more} {ERROR_WORDS[name]}{where}"))
            for code in gpu.new_xids() or ():
                of_hardware = code in HARDWARE_XIDS
                cause = "" if of_hardware else " (made by programs, not counted)"
                self._seen.append(_Seen(XIDS, int(of_hardware), f"XID {code}{cause}{where}"))
            before_seconds, self._slow[index] = self._slow[index], gpu.slow_down_seconds()
            for cause, seconds in self._slow[index].items():
                if (more_seconds := seconds - before_seconds.get(cause, seconds)) > 0:
                    self._slowed[index, cause] += more_seconds
                    self._slowed_words.append(f"{more_seconds:.3g} s by {cause}{where}")

    def ended(self) -> Ended:
        """All of it, as if a test had returned it. Without NVML there is nothing: the test ``facts`` says so."""
        outcomes = self._outcomes() if self._gpus else ()
        return Ended(tuple(Returned(outcome, None) for outcome in outcomes), 0.0, None)

    def _outcomes(self) -> Iterator[Outcome]:
        errors, note = self._sum(corrected=False)
        yield self._value("errors_counted", "Errors during the tests", errors, note, corrected=False)
        errors, note = self._sum(corrected=True)
        yield self._value("errors_corrected", "Corrected errors during the tests", errors, note, corrected=True)
        if any(self._slow) or self._slowed:  # a card that fell off the bus answers no more
            title = f"Slow-downs by heat or hardware that took over {MOST_SLOWED_SECONDS:.0f} s in all"
            long = sum(seconds > MOST_SLOWED_SECONDS for seconds in self._slowed.values())
            yield Value("slow_downs", title, "causes", [long], "zero", note="; ".join(self._slowed_words))

    def _sum(self, *, corrected: bool) -> tuple[int, str]:
        of_kind = [one for one in self._seen if (one.counter in CORRECTED) is corrected]
        return sum(one.errors for one in of_kind), "; ".join(one.words for one in of_kind)

    def _value(self, name: str, title: str, errors: int, note: str, *, corrected: bool) -> Outcome:
        if not any((counter in CORRECTED) is corrected for counter in self._known):
            return NotRun(name, title, "NVML does not report them", "take a GPU and driver that report them")
        return Value(name, title, "errors", [errors], "rare" if corrected else "zero", note=note)
