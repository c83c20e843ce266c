"""A checkpoint against the one that it was made from: verdict, then each piece of evidence with its interval."""

from __future__ import annotations

from megatoken.report.bars import Bar, bar_chart
from megatoken.report.blocks import Badge, Cell, Column, Facts, Figure, Points, Table, Verdict, View, section
from megatoken.report.documents import Document
from megatoken.report.views.common import Field, figure, table_of, view, word
from megatoken.text import count_of, number, precise

TONES = {"VALID": "good", "INVALID": "bad"}


def accuracy_view(document: Document) -> View:
    """The report on ``megatoken accuracy DIR --against DIR``."""
    verdict, samples = document.text("verdict"), int(document.number("samples") or 0)
    failed = document.texts("failed")
    share = f"{100 * (document.number('share') or 0):g} %"
    if failed:
        meaning = f"missed: {', '.join(failed)}"
    elif verdict == "MEASURED":
        meaning = _too_few(document, share)
    else:
        meaning = f"every score keeps at least {share} with 95 % confidence, and answers are as long within 10 %"
    summary = (
        Verdict((Badge(verdict, TONES.get(verdict, "quiet")),), meaning),
        Points("", tuple(("", sentence) for sentence in _sentences(document, samples))),
    )
    sections = (
        section("Scores", _tasks(document)),
        section(
            "Next tokens",
            _next_tokens("In answers", document.part("next_tokens_of_answers")),
            _next_tokens("In prompts and answers", document.part("next_tokens")),
        ),
        section("Lengths of answers", _lengths(document.part("lengths"))),
        section("Error of the weights", _weights(document), _chart(document)),
        section("Decoders", _decoders(document)),
        section("Checkpoints", Facts("Checkpoints", {name: document.text(name) for name in ("model", "against")})),
    )
    return view(document, verdict, summary, sections)


def _too_few(document: Document, share: str) -> str:
    needed, can_fail = (
        document.number("samples_needed"),
        count_of(int(document.number("samples_that_can_fail") or 0), "prompt"),
    )
    if needed is None:
        return f"no score is below the other's, but no number of prompts shows {share} with confidence; lower --share"
    return (
        f"no score is below {share}, but only {can_fail} can fail, and {needed:,.0f} without a failure are needed to "
        "show it with 95 % confidence; compare more prompts"
    )


def _sentences(document: Document, samples: int) -> list[str]:
    tokens, lengths = document.part("next_tokens_of_answers"), document.part("lengths")
    same, ratio = tokens.part("same_best_token"), lengths.part("ratio")
    shorter = 100 * ((ratio.number("value") or 1) - 1)
    identical = int(document.number("identical_answers") or 0)
    return [
        f"{document.text('model')} against {document.text('against')}, both in {document.text('precision')}, "
        f"{count_of(samples, 'prompt')}",
        f"The best next token is the same at {_percent(same)} of {number(tokens.number('positions'))} answer tokens; "
        f"KL divergence {_interval(tokens.part('kl_nats'))} nats a token",
        f"Answers have {shorter:+.1f} % tokens ({_interval(ratio)} of the other's); {identical:,} of {samples:,} are "
        "identical",
    ]


def _interval(interval: Document) -> str:
    value, low, high = (interval.number(key) for key in ("value", "low", "high"))
    return f"{precise(value)} ({precise(low)} to {precise(high)})"


def _percent(interval: Document) -> str:
    value, low, high = (100 * (interval.number(key) or 0) for key in ("value", "low", "high"))
    return f"{value:.2f} % ({low:.2f} to {high:.2f})"


def _tasks(document: Document) -> Table:
    tasks = document.part("tasks")
    fields = (
        Field("Score", lambda task: task[0]),
        Field("Model", lambda task: f"{task[1].number('model') or 0:.2f}", numeric=True),
        Field("Against", lambda task: f"{task[1].number('against') or 0:.2f}", numeric=True),
        Field("Difference", lambda task: _interval(task[1].part("difference")), numeric=True),
        Field("Of it", lambda task: _percent(task[1].part("ratio")), numeric=True),
        Field("Only full", lambda task: _only_full(task[1]), numeric=True),
        Field("McNemar p", lambda task: f"{task[1].number('mcnemar_p') or 0:.2f}", numeric=True),
    )
    note = (
        "Intervals of 95 % by paired bootstrap. Only full: answers with the full score of the model alone / the other"
    )
    return table_of("Scores", [(name, tasks.part(name)) for name in tasks.values], fields, note=note)


def _only_full(task: Document) -> str:
    return " / ".join(f"{task.number(key) or 0:.0f}" for key in ("only_model_full", "only_against_full"))


def _next_tokens(caption: str, tokens: Document) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("Same best token", _percent(tokens.part("same_best_token"))),
        ("KL divergence, nats a token", _interval(tokens.part("kl_nats"))),
        ("KL divergence of the worst text", precise(tokens.number("kl_largest_text_nats"))),
        ("Positions, texts", f"{number(tokens.number('positions'))}, {number(tokens.number('texts'))}"),
    )
    note = "Text: each prompt with the other's answer. Intervals of 95 %: Wilson's, and bootstrap over texts"
    return Table(caption, (Column("Measure"), Column("Value", numeric=True)), rows, note=note)


def _lengths(lengths: Document) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = (
        ("Mean tokens, model", precise(lengths.number("model"))),
        ("Mean tokens, against", precise(lengths.number("against"))),
        ("Ratio", _interval(lengths.part("ratio"))),
        ("Ended by themselves, model", _percent(lengths.part("model_ended"))),
        ("Ended by themselves, against", _percent(lengths.part("against_ended"))),
    )
    return Table("Lengths", (Column("Measure"), Column("Value", numeric=True)), rows)


def _weights(document: Document) -> Table:
    fields = (
        word("Linears", "linears"),
        figure("Count", "count"),
        word("Form", "form"),
        Field("Error", lambda one: f"{100 * (one.number('relative_rms_error') or 0):.2f}", "%", numeric=True),
        Field("Worst block", lambda one: f"{100 * (one.number('worst_block_error') or 0):.1f}", "%", numeric=True),
    )
    note = "Root mean square of the error, relative to that of the linear's weights; blocks of up to 16 columns"
    return table_of("Weights", document.parts("weights"), fields, note=note)


def _chart(document: Document) -> Figure | None:
    bars = [
        Bar(one.text("linears"), 100 * (one.number("relative_rms_error") or 0), "") for one in document.parts("weights")
    ]
    return bar_chart("Error of the weights", "%", bars) if bars else None


def _decoders(document: Document) -> Table:
    note = "Values of every code with every scale, compared with exact arithmetic on the formats' definitions"
    fields = (word("Format", "name"), figure("Values", "values"), figure("Wrong", "wrong"))
    return table_of("Decoders", document.parts("decoders"), fields, note=note)
