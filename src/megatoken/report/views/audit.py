"""The report on an audit: answers to claims, findings by severity, nodes, artefacts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from megatoken.claims.formula import recomputed_text
from megatoken.report.blocks import Badge, Block, Cell, Column, Fold, Points, Table, Verdict, View, Words, section
from megatoken.report.documents import Document
from megatoken.report.views.aggregate import aggregate_sections, node_figures
from megatoken.report.views.common import records_table, view
from megatoken.report.words import plain_text
from megatoken.text import count_of, exact, is_number, precise

_SEVERITY_TONES = {"fail": "bad", "warn": "warn", "unknown": "quiet", "note": "plain", "pass": "good"}
_ANSWER_TONES = {"does not hold": "bad", "cannot be determined": "quiet", "holds": "good"}
SEVERITIES = {word: Badge(word, tone) for word, tone in _SEVERITY_TONES.items()}
ANSWERS = {word: Badge(word, tone) for word, tone in _ANSWER_TONES.items()}
ARTEFACT_KEYS = (
    *("path", "role", "division", "submitter", "benchmark", "scenario", "mode", "validity", "round"),
    *("loadgen_version", "output_tokens_per_second", "samples_per_second", "tokens_per_sample", "samples_issued"),
    *("target_qps", "duration_seconds", "began_at", "process_id"),
)
LEGIBLE_FINDINGS = 400
LEGIBLE_PLACES = 2
NAMED = 2  # claims or findings in a sentence; further ones are counted
BRIEF_ROWS = 12


def audit_view(document: Document) -> View:
    """The report on ``megatoken audit``."""
    findings, claims = document.parts("findings"), document.parts("claims")
    aggregate = document.part("aggregate")
    own_nodes = [] if aggregate.parts("nodes") else document.parts("nodes")
    sections = (
        section("Claims", claims_table(claims)),
        section("Findings", findings_table(findings)),
        *(aggregate_sections(aggregate) if aggregate.values else ()),
        section("Nodes", *node_figures(own_nodes, aggregate), records_table("Nodes", own_nodes)),
        section("Artefacts", _artefacts(document.parts("artefacts"))),
    )
    but = ", but the run itself reports a problem" if _against(document) else ""
    counts = [Verdict(tuple(_counts(findings)), _meaning(findings, but))]
    if claims:
        answers = Counter(claim.text("answer") for claim in claims)
        badges = tuple(Badge(f"{count} {word}", ANSWERS[word].tone) for word in ANSWERS if (count := answers[word]))
        counts.append(Verdict(badges, f"of {len(claims)} claims" if len(claims) > 1 else "the claim"))
    summary: tuple[Block, ...] = (_answers(document), *counts)
    brief = tuple(table for table in (_brief_claims(claims), _brief_findings(findings)) if table.rows)
    return view(document, _subject(findings, but), summary, sections, brief, derived=("counts", "nodes"))


def _answers(document: Document) -> Points:
    """Whether it holds, what breaks, what cannot be known and, of a sealed folder, who signed it: a sentence each."""
    claims, findings = document.parts("claims"), document.parts("findings")
    fails, unknowns = ([one for one in findings if one.text("severity") == word] for word in ("fail", "unknown"))
    wrong, open_claims = (
        [claim for claim in claims if claim.text("answer") == word]
        for word in ("does not hold", "cannot be determined")
    )
    breaks = [*(f"\u201c{claim.text('text')}\u201d is {right_value(claim)}" for claim in wrong)]
    breaks += dict.fromkeys(f"the check “{finding.text('title')}”" for finding in fails)
    unknown = [*(f"\u201c{claim.text('text')}\u201d" for claim in open_claims)]
    unknown += dict.fromkeys(f"the check “{finding.text('title')}”" for finding in unknowns)
    sealed = [one.text("found") for one in findings if one.text("id") == "run_folder.sealed"]
    against = _against(document)
    holds = _claims_hold(claims, len(fails), against) if claims else _results_stand(findings, against)
    return Points(
        "",
        (
            ("", f"{holds}."),
            ("", f"What breaks: {some(breaks)}."),
            ("", f"What the artefacts cannot answer: {some(unknown)}."),
            *(("", f"Seal: {found}.") for found in sealed[:1]),
        ),
    )


def _claims_hold(claims: Sequence[Document], fails: int, against: str) -> str:
    answers = Counter(claim.text("answer") for claim in claims)
    right = answers["holds"]
    holds = f"{right} of {len(claims)} claims {'holds' if right == 1 else 'hold'}"
    if len(claims) == 1:
        holds = f"The claim {claims[0].text('answer')}"
    failing = f"{count_of(fails, 'check')} of the artefacts {'fails' if fails == 1 else 'fail'}" if fails else ""
    return "; ".join(filter(None, (holds, failing, against)))


def _results_stand(findings: Sequence[Document], against: str) -> str:
    """A run can be INVALID although its files agree."""
    counts = Counter(one.text("severity") for one in findings)
    fails, warns, unknowns = (counts[severity] for severity in ("fail", "warn", "unknown"))
    if fails:
        broken = f"{count_of(fails, 'check')} of {len(findings)} {'fails' if fails == 1 else 'fail'}"
        return f"The results do not stand as they are: {'; '.join(filter(None, (broken, against)))}"
    if against:
        return f"{'No check fails' if warns or unknowns else 'The files agree with each other'}, but {against}"
    if warns or unknowns:
        explained = f"{warns} {'needs' if warns == 1 else 'need'} an explanation" if warns else ""
        answered = f"{unknowns} cannot be answered" if unknowns else ""
        return f"No check fails; of {len(findings)}, {' and '.join(filter(None, (explained, answered)))}"
    return f"The results stand: none of {count_of(len(findings), 'check')} fails" if findings else "Nothing was checked"


def _against(document: Document) -> str:
    """What runs, or LoadGen, report against results whose files agree; empty if they report nothing."""
    said = [
        one
        for one in document.parts("findings")
        if (one.text("id") == "run_folder.healthy" and one.text("severity") != "pass")
        or (one.text("id") == "run_folder.interrupted" and one.text("severity") == "unknown")  # a note: a probe
    ]
    if not said:
        return _invalid_by_loadgen(document)
    what = _reported_by_run(said[0])
    if (count := sum(int(one.number("count") or 1) for one in said)) > 1:
        return f"{count:,} runs report a problem; the first {what}"
    return f"{'the run itself' if len(_performance_runs(document)) < 2 else 'a run'} {what}"


def _reported_by_run(finding: Document) -> str:
    reported = finding.part("reported")
    if not reported.values:  # an audit by an older version
        return f"reports {finding.text('found').rstrip('.')}"
    if reported.text("verdict") in ("MEASURED", "VALID"):
        return f"doubts its measurement: {_first_reason(reported)}"
    verdict = ", ".join(filter(None, (reported.text("verdict"), reported.text("stability"))))
    return f"is {verdict}: {_first_reason(reported)}"


def _first_reason(reported: Document) -> str:
    return next(iter(reported.texts("reasons")), "no reason given").rstrip(".")


def _invalid_by_loadgen(document: Document) -> str:
    runs = _performance_runs(document)
    invalid = sum(one.text("validity") == "INVALID" for one in runs)
    if not invalid:
        return ""
    said = [one.part("reported") for one in document.parts("findings") if one.text("id") == "rules.valid"]
    why = next((f": {_first_reason(one)}" for one in said if one.text("verdict") == "INVALID"), "")
    which = "the run" if len(runs) == 1 else f"{invalid:,} of {len(runs):,} runs"
    return f"LoadGen calls {which} INVALID{', the first' if invalid > 1 and why else ''}{why}"


def _performance_runs(document: Document) -> list[Document]:
    """Probes of a search, which may end INVALID, do not count."""
    runs = [one for one in document.parts("artefacts") if one.text("role") == "performance"]
    return [one for one in runs if "/probes/" not in f"/{one.text('path')}"]


def some(names: Sequence[str], most: int = NAMED) -> str:
    """The first ``most`` of them, and how many more there are."""
    more = len(names) - most
    return "; ".join(names[:most]) + (f"; and {more:,} more" if more > 0 else "") if names else "nothing"


def right_value(claim: Document) -> str:
    """What a claim should say, or why it is wrong."""
    claimed, recomputed = claim.part("claimed"), claim.part("recomputed")
    if claim.texts("errors")[:1] in (["arithmetic"], ["fact"]) and recomputed.values:
        return _recomputed(recomputed, claimed.values.get("value"))[0].text
    return f"wrong ({claim.text('reason') or claim.text('why')})"  # older versions stated no reason apart


def _brief_claims(claims: Sequence[Document]) -> Table:
    """Claims worst first, a line each."""
    rows = tuple(
        (
            _answer(claim),
            claim.text("text"),
            claimed(claim.part("claimed"))[0].text,
            next(
                (
                    words.text
                    for words in _recomputed(claim.part("recomputed"), claim.part("claimed").values.get("value"))
                ),
                "",
            ),
            ", ".join(claim.texts("errors")),
        )
        for claim in _worst_first(claims)
    )
    names = ("Answer", "Claim", "Claimed", "Recomputed", "Error")
    more = len(rows) - BRIEF_ROWS
    note = f"{more:,} more claims." if more > 0 else ""
    return Table("Claims", tuple(map(Column, names)), rows[:BRIEF_ROWS], note=note)


def _brief_findings(findings: Sequence[Document]) -> Table:
    """What fails or needs an explanation, gravest first, a line each; the others are counted above."""
    grave = [finding for finding in findings if finding.text("severity") in ("fail", "warn")]
    merged = _merged(sorted(grave, key=lambda finding: finding.text("severity") != "fail"))
    rows = tuple(
        (severity_badge(one.text("severity")), one.text("title"), _place(places[0]) if places else "")
        for one, places in merged
    )
    more = len(rows) - BRIEF_ROWS
    note = f"{more:,} more findings that fail or need an explanation." if more > 0 else ""
    columns = (Column("Severity"), Column("Finding"), Column("First place"))
    return Table("Findings", columns, rows[:BRIEF_ROWS], note=note)


def severity_badge(severity: str) -> Badge:
    """A severity's badge; an unknown one is shown unchanged."""
    return SEVERITIES.get(severity, Badge(severity, "quiet"))


def _subject(findings: Sequence[Document], but: str) -> str:
    fails = sum(finding.text("severity") == "fail" for finding in findings)
    return f"{fails} fail" if fails else f"no fail{but}"


def _counts(findings: Sequence[Document]) -> Iterator[Badge]:
    counts = Counter(finding.text("severity") for finding in findings)
    for severity in (*SEVERITIES, *sorted(set(counts) - set(SEVERITIES))):
        if counts[severity]:
            yield Badge(f"{counts[severity]:,} {severity}", severity_badge(severity).tone)


def _meaning(findings: Sequence[Document], but: str) -> str:
    severities = {finding.text("severity") for finding in findings}
    if "fail" in severities:
        return "the artefacts break rules, or contradict each other or known facts"
    if "warn" in severities:
        return f"no check fails{but}; some findings need an explanation"
    if "unknown" in severities:
        return f"the checks found no problem{but}; the artefacts cannot answer some questions"
    return f"the checks found no problem{but}" if findings else "nothing to check"


def findings_table(findings: Sequence[Document]) -> Table:
    """Findings, gravest first, equal ones as one row."""
    order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    ranked = sorted(findings, key=lambda finding: order.get(finding.text("severity"), len(order)))
    merged = _merged(ranked)
    shown = merged[:LEGIBLE_FINDINGS]
    heads = {"Severity": 11, "Finding": 28, "Expected": 17, "Found": 22, "Where": 22}
    columns = tuple(Column(name, width_percent=width) for name, width in heads.items())
    more = len(merged) - len(shown)
    return Table(
        "Findings",
        columns,
        tuple(_finding_row(finding, places) for finding, places in shown),
        kinds=tuple(severity_badge(finding.text("severity")) for finding, _ in shown),
        hidden=frozenset({"pass"}) if len(findings) > 1 else frozenset(),
        stacked=True,
        note=f"{more:,} more of the same or lower severity are in the JSON document." if more else "",
    )


def _merged(findings: Sequence[Document]) -> list[tuple[Document, list[Document]]]:
    """Identical findings as one, with all their places."""
    merged: dict[tuple[str, ...], tuple[Document, list[Document]]] = {}
    for finding in findings:
        sameness = [plain_text(finding.values.get(key)) for key in ("severity", "id", "title", "why")]
        if finding.text("severity") != "pass":
            sameness += [plain_text(finding.values.get(key)) for key in ("expected", "found")]
        _, places = merged.setdefault(tuple(sameness), (finding, []))
        places += finding.parts("where")
    return list(merged.values())


def _finding_row(finding: Document, places: Sequence[Document]) -> tuple[Cell, ...]:
    why = finding.text("why")
    count = finding.number("count") or 1
    title = finding.text("title") + (f" ({precise(count)} times)" if count > 1 else "")
    what = [Words(title, "strong"), *([Words(why, "quiet")] if why else [])]
    what.append(Words(finding.text("id"), "code"))
    expected, found = (plain_text(finding.values[key]) if key in finding else "" for key in ("expected", "found"))
    return (severity_badge(finding.text("severity")), tuple(what), expected, found, _places(places))


def _places(places: Sequence[Document]) -> tuple[Words | Fold, ...]:
    words = tuple(Words(_place(place), "code") for place in places)
    if len(words) <= LEGIBLE_PLACES:
        return words
    return (*words[:1], Fold(f"and {len(words) - 1:,} more places", words[1:]))


def _place(place: Document) -> str:
    line = place.text("line")
    return place.text("file") + (f":{line}" if line else "")


def claims_table(claims: Sequence[Document]) -> Table:
    """Claims, worst first, each with what it should say and why."""
    heads = {"Answer": 19, "Claim": 20, "Claimed": 12, "Recomputed": 22, "Why": 27}
    columns = tuple(Column(name, width_percent=width) for name, width in heads.items())
    claims = _worst_first(claims)
    rows = tuple(
        (
            _answer(claim),
            (
                Words(claim.text("text"), "strong"),
                Words(claim.text("source"), "quiet"),
                Words(claim.text("id"), "code"),
            ),
            claimed(claim.part("claimed")),
            _recomputed(claim.part("recomputed"), claim.part("claimed").values.get("value")),
            tuple(_reasons(claim)),
        )
        for claim in claims
    )
    return Table("Claims", columns, rows, kinds=tuple(_answer(claim) for claim in claims), stacked=True)


def _worst_first(claims: Sequence[Document]) -> list[Document]:
    rank = list(ANSWERS)
    return sorted(claims, key=lambda claim: rank.index(answer) if (answer := claim.text("answer")) in rank else -1)


def _answer(claim: Document) -> Badge:
    answer = claim.text("answer")
    return ANSWERS.get(answer, Badge(answer, "quiet"))


def claimed(claim: Document) -> tuple[Words, ...]:
    """What was claimed: the value with its unit, and what it is of."""
    relation, scope = claim.text("relation"), claim.text("scope")
    value = claim.values.get("value")
    amount = exact(value) if is_number(value) else plain_text(value)
    words = (relation if relation != "equal" else "", amount, claim.text("unit"))
    return (Words(" ".join(filter(None, words))), *([Words(f"per {scope}", "quiet")] if scope else []))


def _recomputed(recomputed: Document, claimed: object) -> tuple[Words, ...]:
    """With as many decimals as the claim has, at least."""
    if not recomputed.values:
        return ()
    formula = recomputed.text("formula")
    value = recomputed.values.get("value")
    amount = recomputed_text(float(value), claimed) if is_number(value) else plain_text(value)
    return (
        Words(f"{amount} {recomputed.text('unit')}".rstrip(), "strong"),
        *([Words(formula, "quiet")] if formula else []),
    )


def _reasons(claim: Document) -> Iterator[Words | Fold]:
    for error in claim.texts("errors"):
        yield Words(f"{error[:1].upper()}{error[1:]} error" if " " not in error else error, "strong")
    yield Words(claim.text("why"))
    for evidence in claim.texts("evidence_that_would_settle"):
        yield Words(f"evidence that would decide: {evidence}", "quiet")
    yield from _places(claim.parts("where"))


def _artefacts(artefacts: Sequence[Document]) -> Table:
    """The runs that were read; what else the document says of each is left to it."""
    rows = [{key: artefact.values.get(key) for key in ARTEFACT_KEYS} for artefact in artefacts]
    notes = ["Duration: until the last sample ended" if any(row.get("duration_seconds") for row in rows) else ""]
    notes += dict.fromkeys(f"Output: {said}" for one in artefacts if (said := one.text("rates_of")))
    return records_table("Artefacts read", rows, note=". ".join(filter(None, notes)))
