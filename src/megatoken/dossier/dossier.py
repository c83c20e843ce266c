"""The dossier: a document on what holds, what was measured, which limits are met, what it costs and what is open."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatoken.analysis.limits import (
    DOLLARS,
    FROM_THE_QUERY,
    Answer,
    Judged,
    answer_for,
    asked_limits,
    limit_documents,
    not_judged,
)
from megatoken.audit import audit as audited
from megatoken.dossier.figures import Cost, costs_of_audit, costs_of_run, measured_by_audit, measured_by_run
from megatoken.dossier.saved_audit import NO_HASH
from megatoken.errors import UsageError
from megatoken.files import new_document
from megatoken.planning.run_price import judge_run
from megatoken.runs.plan_hash import IDENTITY, plan_hash, plan_of_run
from megatoken.runs.run import Run, Verdict
from megatoken.runs.seal import file_hashes_in, seal_state
from megatoken.text import count_of

GRAVE = ("fail", "warn")
SUBJECTS_NAMED = 3
SETTLES = {
    "itl_seconds": "a run of a server that streams (--endpoint), or a sweep",
    "accuracy": "a run with --mode accuracy",
    DOLLARS: "the price of an hour of the machine: megatoken dossier --dollars-per-hour",
}
"""What gives a run the value that a limit is on."""


def dossier(
    audits: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
    asked: Mapping[str, Any],
    form: Mapping[str, Any],
    inputs: Iterable[Path] = (),
) -> dict[str, Any]:
    """The document.

    Args:
        audits: saved documents of ``megatoken audit``.
        runs: runs of our own; each is audited too, so its result is computed again from its raw data.
        asked: the user's limits and the price of an hour, as ``config.load_limits`` returns them.
        form: as ``form.read_form`` returns it.
        inputs: files that were read, whose SHA-256 is stated.

    Raises:
        UsageError: neither an audit nor a run, or a run cannot be audited.
    """
    if not audits and not runs:
        raise UsageError("nothing to report on: give --audit AUDIT.json (megatoken audit --out), --run RUN, or both")
    price = asked.get("dollars_per_hour")
    replays = [audited(run.path).to_document() for run in runs]
    names = [run.path.name for run in runs]
    others = [audit for audit in audits if _own_run(audit) not in names]  # of a run that is given too, only the claims
    of_audits = [(audit, measured_by_audit(audit)) for audit in others]
    measured = [*(one for _, found in of_audits for one in found), *map(measured_by_run, runs)]
    costs = [
        *(one for audit, found in of_audits for one in costs_of_audit(audit, found)),
        *(one for run in runs for one in costs_of_run(run, price)),
    ]
    claims = [{**claim, "where": claim["where"][:1]} for audit in audits for claim in audit.get("claims") or []]
    checked = [*others, *replays]
    subjects = list(dict.fromkeys(one["subject"] for one in measured))
    if not subjects:
        subjects = [Path(audit["inputs"][0]).name for audit in audits]
    more = f"; and {len(subjects) - SUBJECTS_NAMED} more" if len(subjects) > SUBJECTS_NAMED else ""
    limits = _limits(runs, asked)
    return new_document(
        "dossier",
        title=f"Dossier: {'; '.join(subjects[:SUBJECTS_NAMED])}{more}",
        inputs=[{"input": path, "sha256": _sha256(path)} for path in inputs],
        notes=[f"{one['title']}: {NO_HASH}" for one in audits if NO_HASH in one["notes"]],
        claims=claims,
        audits=[{"title": one["title"], "counts": one["counts"], "notes": one["notes"]} for one in audits],
        replays=[{"title": one["title"], "counts": one["counts"]} for one in replays],
        checks=[
            {**finding, "where": finding["where"][:1], "audit": audit["title"]}
            for audit in checked
            for finding in audit["findings"]
            if finding["severity"] in GRAVE
        ],
        measured=measured,
        limits=limits,
        costs=[asdict(one) for one in costs],
        open=list(_open(claims, checked, limits, costs, form)),
        form=form,
        identities=list(map(_identity, runs)),
    )


def _own_run(audit: Mapping[str, Any]) -> str | None:
    """The name of the run folder that an audit is of; None of other artefacts."""
    return Path(audit["inputs"][0]).name if audit.get("artefact_kind") == "megatoken_run" else None


def _sha256(path: Path) -> str:
    """Of a file; of a folder over the lines ``SHA-256  name`` of all its files, as ``sha256sum`` prints them."""
    if path.is_dir():
        lines = "".join(f"{sha256}  {name}\n" for name, sha256 in file_hashes_in(path).items())
        return hashlib.sha256(lines.encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _limits(runs: Sequence[Run], asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every run by the limits that were asked for, else by its own; without a run, no limit can be judged."""
    limits = asked_limits(asked)
    judged: list[tuple[str, Verdict | None, list[Judged]]] = [
        (run.path.name, run.verdict, judge_run(run, asked if limits else None)) for run in runs
    ]
    if limits and not runs:
        judged = [("no run", None, not_judged(limits, "no run of your own was measured; give --run"))]
    scenarios = {run.path.name: run.result.get("scenario") for run in runs}
    return [
        {
            "run": name,
            "verdict": verdict,
            "answer": answer_for(verdict, answers),
            "limits": [
                one | {"settle": _settles(one, verdict, scenarios.get(name))} for one in limit_documents(answers)
            ],
        }
        for name, verdict, answers in judged
        if answers
    ]


def _settles(judged: Mapping[str, Any], verdict: Verdict | None, scenario: str | None) -> str:
    """What would show whether a limit is met that cannot be judged; empty of all others."""
    if judged["answer"] != Answer.CANNOT_TELL:
        return ""
    if verdict is None:
        return "a run of your own: --run"
    if judged["needed"]:
        return f"at least {judged['needed']:,} values"
    metric = judged["key"].partition(".")[0]
    if metric in FROM_THE_QUERY and scenario == "offline":
        return "a run with --scenario server"
    if verdict is Verdict.INTERRUPTED and judged["found"] is not None:
        return "a run that is not interrupted"
    return SETTLES.get(metric, "a run that completes samples")


def _open(
    claims: Sequence[Mapping[str, Any]],
    checked: Sequence[Mapping[str, Any]],
    limits: Sequence[Mapping[str, Any]],
    costs: Sequence[Cost],
    form: Mapping[str, Any],
) -> Iterator[dict[str, Any]]:
    """What is not known: ``kind``, the question, why it is open, and what would settle it."""
    if not limits:
        settle = "megatoken dossier --slo limits.yaml"
        yield _question("limit", "Are my limits met?", "no limits were given", settle)
    for judged in limits:
        for one in judged["limits"]:
            if one["answer"] == Answer.CANNOT_TELL:
                yield _question("limit", f"{one['label']}: is the limit met?", one["why"], one["settle"], judged["run"])
    for claim in claims:
        if claim["answer"] == "cannot be determined":
            yield _question("claim", claim["text"], claim["why"], "; ".join(claim["evidence_that_would_settle"]))
    for audit in checked:
        for finding in audit["findings"]:
            if finding["severity"] == "unknown":
                yield _question("check", finding["title"], finding["found"], finding["expected"], audit["title"])
    for cost in costs:
        if cost.value is None:
            yield _question("cost", cost.name, cost.how, cost.settle, cost.of)
    for item in form["items"]:
        if item["counts_as"] == "unknown":
            yield _question("form", item["question"], item["why"] or "not answered", item["shows"])


def _question(kind: str, question: str, why: str, settle: str, of: str = "") -> dict[str, Any]:
    return {"kind": kind, "of": of, "question": question, "why": why, "settle": settle}


def _identity(run: Run) -> dict[str, Any]:
    """What ran, by its hashes, and whether its folder is sealed."""
    identity = run.result.get("identity") or {}
    return {
        "run": run.path.name,
        **{name: identity.get(name) for name in IDENTITY},
        "plan_sha256": plan_hash(plan_of_run(run)),
        "result_sha256": _sha256(run.path / "result.json"),
        "source_revision": (run.environment.get("source") or {}).get("revision"),
        "sealed": _sealed(run.path),
    }


def _sealed(folder: Path) -> str:
    try:
        state = seal_state(folder)
    except (OSError, ValueError):
        return "broken: the seal cannot be read"
    if state is None:
        return "no"
    if not state.whole:
        return "broken: files were changed after sealing"
    more = f"; {count_of(len(state.added), 'file')} added since" if state.added else ""
    signed = {None: "signature not checked", True: f"signed by {state.public_key}"}
    return f"{state.sealed_at}, {signed[state.signature] if state.public_key else 'not signed'}{more}"
