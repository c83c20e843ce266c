"""Observations of one check become one finding."""

from megatoken.audit.checks.rules import valid
from megatoken.audit.finding import Ledger, Outcome, Reported, Severity


def test_a_finding_has_the_reasons_of_the_text_that_it_states_first():
    short, late = (Reported("INVALID", (reason, "TTFT: NO")) for reason in ("Min duration: NO; in all", "TPOT: NO"))
    ledger = Ledger()
    for reported in (late, short, short):
        outcome = Outcome(Severity.NOTE, "VALID", reported.text, reported=reported)
        ledger.add(valid.observations(outcome))
    (finding,) = ledger.findings()
    assert finding.found.startswith("INVALID: Min duration: NO; in all; TTFT: NO (2 times); INVALID: TPOT: NO")
    assert finding.reported == short


def test_a_finding_that_repeats_no_verdict_has_no_reasons():
    ledger = Ledger()
    ledger.add(valid.observations(Outcome(Severity.PASS, "VALID", "VALID")))
    assert [finding.reported for finding in ledger.findings()] == [None]
