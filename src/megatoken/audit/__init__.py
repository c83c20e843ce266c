"""Published artefacts -> findings: LoadGen's logs, MLPerf submissions, run folders."""

from megatoken.audit.audit import Audit, audit, read_evidence
from megatoken.audit.evidence import Evidence
from megatoken.audit.finding import Finding, Severity

__all__ = ["Audit", "Evidence", "Finding", "Severity", "audit", "read_evidence"]
