"""Whatever a qualification writes is read again without an objection."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatoken.files import to_json
from megatoken.hardware.qualify import session
from megatoken.hardware.qualify.catalog import HardwareTest
from megatoken.hardware.qualify.document import check_document
from megatoken.hardware.qualify.judge import Band, Earlier, overall
from megatoken.hardware.qualify.processes import Ended, Returned
from megatoken.hardware.qualify.values import Bound, Value

RATES = st.floats(50.0, 150.0)
SHARES = st.sampled_from([0.0, 0.04, 0.06, 0.4])
VALUES = st.builds(
    Value,
    st.just("rate"),
    st.just("Rate"),
    st.just("GB/s"),
    st.lists(RATES | st.sampled_from([math.nan, math.inf]), max_size=9) | st.lists(RATES, min_size=3, max_size=9),
    st.sampled_from(["higher", "lower", "rare", "zero", "same", ""]),
    st.none() | st.builds(Bound, RATES, st.just("data sheet"), st.booleans()),
)
BANDS = st.none() | st.builds(lambda one, other: Band(min(one, other), max(one, other), ("source",)), RATES, RATES)
EARLIER = st.none() | st.builds(
    Earlier, RATES, SHARES, st.sampled_from([1, 2]), st.none() | RATES, st.booleans(), st.booleans()
)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(VALUES, min_size=1, max_size=3),
    published=BANDS,
    before=EARLIER,
    waited=st.none() | SHARES,
    shared_by=st.sampled_from([None, "cpu", "gpu"]),
    between_runs=SHARES,
)
def test_what_a_qualification_writes_is_read_again(
    runs: list[Value],
    published: Band | None,
    before: Earlier | None,
    waited: float | None,
    shared_by: Any,
    between_runs: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "band", lambda *_: published)
    earlier = {} if before is None else {("rate", "Rate", "GB/s"): before}
    ended = [Ended((Returned(runs[0] if one.better != runs[0].better else one, waited),), 1.0, None) for one in runs]
    test = session.entry_of_test(HardwareTest("rates", "Rates", ""), ended, "H200", earlier, between_runs, shared_by)
    document = {"kind": "qualify", "schema_version": 1, "device": "H200", "machine": {}, "tests": [test]}
    check_document(json.loads(to_json(document | {"verdict": overall([test])})), "file")
