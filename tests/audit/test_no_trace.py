"""What docs/audit.md lists as leaving no trace: genuine logs that were changed so and still look genuine."""

import re
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tampering import DETAIL, Spoil, both, do, edit, number, put, say, value, whole
from tampering_traces import PERCENTILES

from megatoken.audit import Severity, audit

LONGER = 1.25
STAMP = '"%m-%d-%Y %H:%M:%S.%f"'


def stamps(folder: Path) -> None:
    """All time stamps, and the end of the power window, as of a run that lasted longer."""
    edit(
        folder,
        DETAIL,
        lambda log: re.sub(r'("time_ms": )([\d.]+)', lambda found: f"{found[1]}{float(found[2]) * LONGER:.6f}", log),
    )
    begun, ended = (datetime.strptime(value(folder, f"power_{end}"), STAMP) for end in ("begin", "end"))
    later = (begun + (ended - begun) * LONGER + timedelta(microseconds=500)).strftime(STAMP)
    put(folder, "power_end", f'{later[:-4]}"')


def third_place(folder: Path) -> None:
    """The 99th percentile of TTFT just above the 97th."""
    lowered = int(number(folder, "result_first_token_97.00_percentile_latency_ns")) + 1
    put(folder, "result_first_token_99.00_percentile_latency_ns", str(lowered))
    say(folder, "99.00 percentile first token latency (ns)", str(lowered))


SCALED = do(
    stamps,
    *(whole(f"result_{p}_percentile_latency_ns", f"{p} percentile latency (ns)", LONGER) for p in PERCENTILES),
    *(whole(f"result_{word}_latency_ns", f"{word.title()} latency (ns)", LONGER) for word in ("min", "max", "mean")),
    both("result_samples_per_second", "Samples per second", 1 / LONGER),
    both("result_tokens_per_second", "Tokens per second", 1 / LONGER),
)


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        pytest.param(SCALED, ("Offline",), id="all times scaled"),
        pytest.param(both("result_tokens_per_second", "Tokens per second", 0.95), ("Offline",), id="tokens"),
        pytest.param(third_place, ("Server",), id="a percentile lowered"),
    ],
)
def test_what_leaves_no_trace(twin, spoil: Spoil, kind: tuple[str, ...]):
    folder = twin(*kind)
    spoil(folder)
    assert [item.id for item in audit(folder).findings if item.severity in (Severity.FAIL, Severity.WARN)] == []
