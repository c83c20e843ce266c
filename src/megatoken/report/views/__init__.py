"""Results as views: one module for each kind, each a pure function of what was read."""

from __future__ import annotations

from megatoken.report.blocks import View
from megatoken.report.documents import Document
from megatoken.report.views.accuracy import accuracy_view
from megatoken.report.views.aggregate import aggregate_view
from megatoken.report.views.audit import audit_view
from megatoken.report.views.comparison import comparison_view
from megatoken.report.views.dossier import dossier_view
from megatoken.report.views.limits import check_view
from megatoken.report.views.plan import plan_view
from megatoken.report.views.qualify import qualify_view
from megatoken.report.views.repeats import repeats_view
from megatoken.report.views.rerun import rerun_view
from megatoken.report.views.run import run_view
from megatoken.report.views.sweep import sweep_comparison_view, sweep_view

__all__ = ["document_view", "run_view"]

VIEWS = {
    "accuracy_against": accuracy_view,
    "audit": audit_view,
    "aggregate": aggregate_view,
    "check": check_view,
    "comparison": comparison_view,
    "dossier": dossier_view,
    "qualify": qualify_view,
    "repeats": repeats_view,
    "rerun": rerun_view,
    "sweep": sweep_view,
    "sweep_comparison": sweep_comparison_view,
}


def document_view(document: Document) -> View:
    """The report on a document of any kind; UsageError names the key where its shape is not the kind's."""
    return VIEWS.get(document.text("kind"), plan_view)(document)
