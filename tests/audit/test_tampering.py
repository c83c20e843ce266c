"""Genuine logs, spoiled in one way each: the tampering is found, by the check that is meant to find it."""

import pytest
from tampering import TAMPERINGS, Tampering
from tampering_traces import TRACES

from megatoken.audit import Severity, audit

ALL = [*TAMPERINGS, *TRACES]


@pytest.mark.parametrize("tampering", ALL, ids=lambda tampering: tampering.name.replace(" ", "-"))
def test_tampering_is_found_and_named(twin, tampering: Tampering):
    folder = twin(*tampering.kind)
    before = {item.id for item in audit(folder).findings if item.severity in (Severity.FAIL, Severity.WARN)}
    tampering.spoil(folder)
    result = audit(folder)
    grave = {item.id: item for item in result.findings if item.severity in (Severity.FAIL, Severity.WARN)}
    assert before == set()
    assert tampering.found_by in grave, f"found only {sorted(grave)}"
    found = grave[tampering.found_by]
    assert found.where
    assert found.expected != found.found
    assert all(place.file for place in found.where)


def test_at_least_thirty():
    assert len({tampering.name for tampering in ALL}) == len(ALL) >= 100
    assert len({tampering.found_by for tampering in ALL}) >= 35
