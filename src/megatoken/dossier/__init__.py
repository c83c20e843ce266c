"""Audits, runs, limits and an evidence form -> one dossier: what holds, was measured, costs and is not known."""

from megatoken.dossier.dossier import dossier

__all__ = ["dossier"]
