"""The dossier: five answers first, then what each rests on; made to be printed, read and signed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatoken.analysis.limits import Answer
from megatoken.report.blocks import Badge, Block, Cell, Column, Link, Part, Table, View, Words, section
from megatoken.report.documents import Document
from megatoken.report.metrics import NOT_VERIFIED, TRADEMARK, verdict_badge
from megatoken.report.views.audit import ANSWERS, claimed, claims_table, findings_table, right_value, some
from megatoken.report.views.common import facts_table, state_cell, view
from megatoken.report.views.limits import answer_badge, fallen_runs, limits_table
from megatoken.runs.run import Verdict
from megatoken.text import ABSENT, count_of, number, precise, significant

KINDS = {  # of open questions: one and many
    "limit": ("limit", "limits"),
    "claim": ("claim", "claims"),
    "check": ("check", "checks"),
    "cost": ("figure of cost or energy", "figures of cost or energy"),
    "form": ("question of the checklist", "questions of the checklist"),
}
BRIEF_ROWS = 12
WRONG = "does not hold"
FORM_TONES = {"yes": "good", "no": "bad", "unknown": "quiet"}
CLAIMS_NAMED = 3
MEASURED_NAMED = 3
COSTS_NAMED = 4
FEW = "Too few samples for a p99 with 99 % confidence."


def dossier_view(document: Document) -> View:
    """The report on ``megatoken dossier``."""
    claims, checks, opened = (document.parts(name) for name in ("claims", "checks", "open"))
    measured, limits, costs = (document.parts(name) for name in ("measured", "limits", "costs"))
    form = document.part("form")
    summary: tuple[Block, ...] = (_answers(document),)
    sections = (
        section("What was measured", _measured(measured), _remarks(measured)),
        section("Limits", *_limits(limits)),
        section("Cost and energy", _costs(costs)),
        section("What is open", _open(opened)),
        section(form.text("title", "Checklist"), _form(form)),
        section("Claims that do not hold", claims_table([one for one in claims if one.text("answer") == WRONG])),
        section("Claims that hold", _right(claims)),
        section("Checks that fail or need an explanation", findings_table(checks)),
        section("What ran", *map(_identity, document.parts("identities"))),
        section("Signature", Table("Signature", tuple(map(Column, ("Name", "Place and date", "Signature"))), _LINES)),
    )
    made = view(document, "dossier", summary, sections, (_open(opened, BRIEF_ROWS),), derived=("audits",))
    own = any(one.text("state") != "unverified" for one in measured)
    return (
        replace(made, footer=f"{made.footer} {NOT_VERIFIED} {TRADEMARK}") if own and _names_mlperf(document) else made
    )


def _names_mlperf(document: Document) -> bool:
    return "MLPerf" in str(document.values)


_LINES = (("\u00a0", "", ""), ("\u00a0", "", ""))


def _answers(document: Document) -> Table:
    """What was measured, then the five questions of a decision maker, each with a badge and a few sentences."""
    costs = document.parts("costs")
    sources = len({one.text("of") for one in costs})
    rows = (
        ("What was measured?", *_what(document.parts("measured"))),
        ("Is the number true?", *_holds(document)),
        ("Are my limits met?", *_met(document.parts("limits"))),
        ("What does it cost?", *_figures([one for one in costs if not _of_energy(one)], sources)),
        ("How much energy?", *_figures([one for one in costs if _of_energy(one)], sources)),
        ("What is open?", *_unknown(document.parts("open"))),
    )
    heads = {"Question": 21, "Answer": 23, "In short": 56}
    columns = tuple(Column(name, width_percent=width) for name, width in heads.items())
    return Table("In one minute", columns, tuple(((Words(row[0], "strong"),), *row[1:]) for row in rows), stacked=True)


def _holds(document: Document) -> tuple[Cell, Cell]:
    claims = document.parts("claims")
    counts = Counter(claim.text("answer") for claim in claims)
    fails = [one for one in document.parts("checks") if one.text("severity") == "fail"]
    words: list[Part] = []
    badges: list[Part] = []
    if fails:
        badges.append(Badge(count_of(len(fails), "failed check"), "bad"))
        titles = [f"“{one.text('title')}”" for one in fails]
        words.append(Words(f"Failed checks: {some([*dict.fromkeys(titles)])}."))
    replayed = sum(int(count) for one in document.parts("replays") for count in one.part("counts").values.values())
    if replayed:
        broken = sum(int(one.part("counts").number("fail") or 0) for one in document.parts("replays"))
        done = f"{broken:,} fail" if broken > 1 else "1 fails" if broken else "none fails"
        words.append(Words(f"Own results, computed again from their raw data: of {replayed:,} checks {done}."))
        if not claims and not broken:
            badges.append(Badge("agrees with its raw data", "good"))
    if not claims:
        words.append(Words("No published claim was given; megatoken audit --claims checks them."))
    for answer, badge in ANSWERS.items():
        if counts[answer]:
            badges.append(Badge(f"{counts[answer]} of {count_of(len(claims), 'claim')}: {badge.word}", badge.tone))
    wrong = [claim for claim in claims if claim.text("answer") == WRONG]
    words += [Words(f"Claim “{claim.text('text')}”: {right_value(claim)}.") for claim in wrong[:CLAIMS_NAMED]]
    if (more := len(wrong) - CLAIMS_NAMED) > 0:
        words.append(Words(f"and {count_of(more, 'more claim does', 'more claims do')} not hold."))
    if claims and not wrong:
        words.append(Words("No claim is shown to be wrong."))
    return tuple(badges), tuple(words)


def _what(measured: Sequence[Document]) -> tuple[Cell, Cell]:
    badges = tuple(dict.fromkeys(badge for one in measured for badge in _state(one)))
    words = []
    for one in measured[:MEASURED_NAMED]:
        words += [Words(_measurement(one)), *([Words(FEW)] if one.flag("p99s_of_too_few") else [])]
    reduced = [Words(f"{reason}.") for one in measured[:MEASURED_NAMED] for reason in one.texts("reduced_by")]
    if reduced:
        badges += (Badge("reduced by other work", "warn"),)
    words += reduced
    if len(measured) > MEASURED_NAMED:
        words.append(Words(f"and {len(measured) - MEASURED_NAMED:,} more"))
    return badges, tuple(words)


def _state(one: Document) -> Iterator[Badge]:
    """The verdict of a run of our own, and the state of a rate that was not measured here."""
    verdict, state = one.text("verdict"), one.text("state")
    if verdict in Verdict.__members__ and state != "unverified":
        yield verdict_badge(Verdict(verdict))
    badge = state_cell(state)
    if state != "measured" and isinstance(badge, Badge):
        yield badge
    if one.text("loadgen_validity") == Verdict.INVALID:
        yield Badge("LoadGen: INVALID", "bad")


def _measurement(one: Document) -> str:
    """Rate, model, scenario and machine of one measurement in one sentence."""
    label = f" ({one.text('label')})" if one.text("label") else ""
    together = one.number("if_together")
    more = f"; {precise(together)} as one run, had all nodes started together" if together is not None else ""
    ran = one.text("subject", one.text("of"))
    return f"{precise(one.number('output_tokens_per_second'))} output tokens/s{label}, {_amount_of(one)}: {ran}{more}."


def _amount_of(one: Document) -> str:
    """How much work a rate rests on."""
    samples, seconds = one.number("samples_completed"), one.number("duration_seconds")
    return f"{'unknown samples' if samples is None else count_of(round(samples), 'sample')} in {number(seconds)} s"


def _met(limits: Sequence[Document]) -> tuple[Cell, Cell]:
    if not limits:
        return Badge("not asked", "quiet"), "No limits were given; --slo names a file of them."
    every = [(run, one) for run in limits for one in run.parts("limits")]
    answers = {one.text("answer") for _, one in every}
    worst = next(one for one in (Answer.NOT_MET, Answer.CANNOT_TELL, Answer.MET) if one in answers)
    words: list[Part] = []
    if fallen := fallen_runs(limits):
        worst = Answer.DOES_NOT_STAND
        words.append(Words(fallen))
    for answer in (Answer.NOT_MET, Answer.CANNOT_TELL, Answer.MET):
        if named := [_limit(one) for _, one in every if one.text("answer") == answer]:
            words.append(Words(f"{answer}: {some([*dict.fromkeys(named)], 3)}."))
    return answer_badge(str(worst)), tuple(words)


def _limit(one: Document) -> str:
    """A limit with the value that was found; one that cannot be judged with why."""
    found, unit = one.number("found"), one.text("unit")
    why = f": {one.text('why')}" if one.text("answer") == Answer.CANNOT_TELL and one.text("why") else ""
    if found is None:
        return f"{one.text('label')}{why}"
    amounts = [
        f"${precise(value)}" if unit == "$" else f"{precise(value)} {unit}" for value in (found, one.number("limit"))
    ]
    return f"{one.text('label')} is {amounts[0]} (limit {amounts[1]}){why}"


def _of_energy(one: Document) -> bool:
    return one.text("about") == "energy"


def _figures(costs: Sequence[Document], sources: int) -> tuple[Cell, Cell]:
    """The headlines among figures of cost or of energy, and why others are unknown; with their sources if several."""
    known = [one for one in costs if one.number("value") is not None]
    unknown = [
        Words(f"{_of_source(one, sources)}{one.text('name')}: unknown, {one.text('how')}.")
        for one in costs
        if one.number("value") is None
    ]
    if not known:
        return Badge("unknown", "quiet"), tuple(unknown) or "The inputs state no figure."
    named = [one for one in known if one.flag("headline")]
    states = dict.fromkeys(one.text("state") for one in named)
    badges = tuple(badge for state in states if isinstance(badge := state_cell(state), Badge))
    words = [
        Words(f"{_of_source(one, sources)}{one.text('name')}: {_amount(one)} ({one.text('state')}).")
        for one in named[:COSTS_NAMED]
    ]
    if len(named) > COSTS_NAMED:
        words.append(Words(f"and {len(named) - COSTS_NAMED} more"))
    return badges, (*words, *unknown[:COSTS_NAMED])


def _of_source(one: Document, sources: int) -> str:
    return f"{one.text('of')}: " if sources > 1 else ""


def _amount(one: Document) -> str:
    value, unit = one.number("value"), one.text("unit")
    if value is None:
        return ABSENT
    shown = significant(value) if one.text("state") != "measured" else precise(value)
    return f"${shown}{unit[1:]}" if unit.startswith("$") else f"{shown} {unit}"


def _unknown(opened: Sequence[Document]) -> tuple[Cell, Cell]:
    if not opened:
        return Badge("nothing open", "good"), "Every question has an answer."
    counts = Counter(one.text("kind") for one in opened)
    parts = [count_of(counts[kind], *names) for kind, names in KINDS.items() if counts[kind] and kind != "form"]
    others, of_form = len(opened) - counts["form"], counts["form"]
    words = [Words(f"{', '.join(parts)}.")] if others else []
    for kind in ("claim", "check"):
        if names := [f"“{one.text('question')}”" for one in opened if one.text("kind") == kind]:
            words.append(Words(f"No answer to the {KINDS[kind][len(names) > 1]} {some([*dict.fromkeys(names)])}."))
    badges = [Badge(f"{others} open", "warn")] if others else []
    if of_form:
        badges.append(Badge(f"checklist: {of_form} open", "warn"))
        words.append(Words(f"Of the checklist {count_of(of_form, 'question is', 'questions are')} open too."))
    return tuple(badges), tuple(words)


def _measured(measured: Sequence[Document]) -> Table:
    rows = []
    for one in measured:
        together = one.number("if_together")
        rate: list[Part] = [Words(precise(one.number("output_tokens_per_second")), "strong")]
        if one.text("label"):
            rate.append(Words(one.text("label"), "quiet"))
        if together is not None:
            rate.append(Words(f"{precise(together)} if all nodes had started together", "quiet"))
        state = tuple(_state(one))
        count, accelerator = one.number("accelerators"), one.text("accelerator")
        machine = [Words(one.text("machine"))]
        if count:
            machine.append(Words(f"{count:,.0f} × {accelerator or 'accelerators'}", "quiet"))
        ran = [Words(one.text("model"), "strong")]
        ran += [Words(one.text(name), "quiet") for name in ("precision", "scenario", "data_set") if one.text(name)]
        p99s = [f"{name} {precise(value)} s" for name, key in _P99S.items() if (value := one.number(key)) is not None]
        few = [Words(FEW, "quiet")] if one.flag("p99s_of_too_few") else []
        rows.append(
            (
                (Words(one.text("of"), "strong"),),
                tuple(ran),
                tuple(machine),
                tuple(rate),
                _amount_of(one),
                (Words("; ".join(p99s)), *few),
                state,
            )
        )
    heads = ("Source", "What ran", "Machine", "Output tokens/s", "Amount", "p99", "State")
    return Table("What was measured", tuple(map(Column, heads)), tuple(rows), stacked=True)


_P99S = {"first token": "ttft_p99_seconds", "per token": "tpot_p99_seconds", "whole answer": "latency_p99_seconds"}


def _remarks(measured: Sequence[Document]) -> Table:
    rows = tuple((one.text("of"), remark) for one in measured for remark in one.texts("remarks"))
    return Table("What the measurements say about themselves", (Column("Source"), Column("Remark")), rows, stacked=True)


def _limits(limits: Sequence[Document]) -> Iterator[Table]:
    for run in limits:
        verdict = f" ({run.text('verdict')})" if run.text("verdict") else ""
        yield limits_table(run.parts("limits"), f"{run.text('run')}{verdict}")


def _costs(costs: Sequence[Document]) -> Table:
    rows = tuple(
        (
            (Words(one.text("name"), "strong"), Words(one.text("of"), "quiet")),
            _amount(one),
            one.text("how"),
            state_cell(one.text("state")) or Badge("unknown", "quiet"),
        )
        for one in costs
    )
    note = "Assumptions and their ranges: megatoken plan cost and megatoken plan energy."
    columns = tuple(map(Column, ("Figure", "Value", "How", "State")))
    return Table("Cost and energy", columns, rows, stacked=True, note=note if rows else "")


def _open(opened: Sequence[Document], most: int = 0) -> Table:
    """Open questions but those of the checklist, which has its own table; the first ``most``, 0: all."""
    listed = [one for one in opened if one.text("kind") != "form"]
    shown = listed[: most or None]
    rows = tuple(
        (
            (Words(one.text("question"), "strong"), *([Words(one.text("of"), "quiet")] if one.text("of") else [])),
            KINDS[one.text("kind")][0] if one.text("kind") in KINDS else one.text("kind"),
            one.text("why"),
            one.text("settle") or ABSENT,
        )
        for one in shown
    )
    more, of_form = len(listed) - len(shown), len(opened) - len(listed)
    heads = {"Question": 34, "Kind": 12, "Why it is open": 28, "What would settle it": 26}
    columns = tuple(Column(name, width_percent=width) for name, width in heads.items())
    notes = [f"{more:,} more open questions."] if more else []
    if of_form:
        notes.append(f"Of the checklist {count_of(of_form, 'question is', 'questions are')} open too.")
    return Table("What is open", columns, rows, stacked=True, note=" ".join(notes))


def _right(claims: Sequence[Document]) -> Table:
    """A line for each claim that holds; those that cannot be determined are open questions."""
    rows = tuple(
        ((Words(one.text("text"), "strong"),), claimed(one.part("claimed")), one.text("source"))
        for one in claims
        if one.text("answer") == "holds"
    )
    return Table("Claims that hold", tuple(map(Column, ("Claim", "Value", "Source"))), rows, stacked=True)


def _identity(one: Document) -> Table:
    """The hashes of one run; those that it does not have are absent."""
    return facts_table(one.text("run"), {name: value for name, value in one.without(["run"]).items() if value})


def _form(form: Document) -> Table:
    """The evidence form: what counts, and each link; an answer without evidence says so."""
    rows = []
    for item in form.parts("items"):
        counts, given = item.text("counts_as"), item.text("answer")
        evidence = tuple(part for one in item.parts("evidence") for part in _evidence(one))
        answer: list[Part] = [Badge(counts, FORM_TONES.get(counts, "quiet"))]
        if item.text("why"):
            answer.append(
                Words(item.text("why") if given == counts else f"given as {given}: {item.text('why')}", "quiet")
            )
        question = [Words(item.text("question"), "strong"), Words(f"What would show it: {item.text('shows')}", "quiet")]
        remark = [Words(item.text("note"))] if item.text("note") else []
        rows.append((tuple(question), item.text("group"), tuple(answer), (*evidence, *remark) or ABSENT))
    heads = {"Question": 44, "About": 13, "Answer": 18, "Evidence": 25}
    columns = tuple(Column(name, width_percent=width) for name, width in heads.items())
    note = "Nothing here was measured. A yes counts only with evidence that is there; web addresses were not fetched."
    return Table(form.text("title", "Checklist"), columns, tuple(rows), stacked=True, note=note if rows else "")


def _evidence(one: Document) -> Iterator[Part]:
    link, address = one.text("link"), one.text("address")
    web = address.startswith(("https://", "http://"))
    yield Link(link, address) if address and (web or ":" not in address) else Words(link, "code")
    if one.text("problem"):
        yield Words(one.text("problem"), "quiet")
    if one.text("sha256"):
        yield Words(f"SHA-256 {one.text('sha256')}", "code")
