"""Grammars: answers that match, neighbours that do not notice, and grammars that no engine should follow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from engines import assert_idle, drain, make_engine, request

from examples import every
from megatoken.engine import (
    Engine,
    EngineConfig,
    EngineThread,
    FinishReason,
    Grammar,
    GrammarKind,
    Request,
    Sampling,
    Thought,
)
from megatoken.engine import grammar as grammar_module
from megatoken.engine import sampling as sampling_module
from megatoken.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
NUMBER = r"[1-9][0-9]{2}-[a-f]{3,6}!"
LIST = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z] | [0-9] [0-9]'
LARK = 'start: "yes" | "no" " " NAME\nNAME: /[A-Z][a-z]{1,5}/'
GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Grammar(GrammarKind.REGEX, NUMBER),
    Grammar(GrammarKind.EBNF, LIST),
    Grammar(GrammarKind.EBNF, LARK),
    Grammar(GrammarKind.JSON_OBJECT),
]
HOSTILE = {
    "nested repetition": Grammar(GrammarKind.REGEX, "(((a{100}){100}){100}){100}"),
    "repetition after a prefix": Grammar(GrammarKind.REGEX, "[a-z]*(((a{100}){100}){100}){100}"),
    "ambiguous": Grammar(GrammarKind.EBNF, 'start: s\ns: s s s | s s | "a" | "b" | '),
    "intersections": Grammar(GrammarKind.EBNF, "start: BOTH\nBOTH: /(.*[ab].{30}){30}/ & /(.*[bc].{31}){30}/"),
    "deep": Grammar(GrammarKind.JSON_SCHEMA, '{"not":' * 3000 + "{}" + "}" * 3000),
    "large": Grammar(GrammarKind.REGEX, "a" * 300_000),
}


def matches(grammar: Grammar, text: str) -> bool:
    if grammar.text == LIST:
        return re.fullmatch(r"\[([a-z]|[0-9]{2})(,([a-z]|[0-9]{2}))*\]", text) is not None
    if grammar.text == LARK:
        return re.fullmatch(r"yes|no [A-Z][a-z]{1,5}", text) is not None
    if grammar.kind == GrammarKind.REGEX:
        return re.fullmatch(grammar.text, text) is not None
    value = json.loads(text)
    if grammar.kind == GrammarKind.JSON_OBJECT:
        return isinstance(value, dict)
    kinds = {key: type(one) for key, one in value.items()}
    return kinds == {"name": str, "age": int, "ok": bool} and len(value["name"]) <= 8


def new_engine(**options: object) -> Engine:
    return Engine("reference", EngineConfig(precision="fp32", threads=1, **options))


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "overlapped"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return new_engine(overlap=request.param)


def guided(seed: int, grammar: Grammar, tokens: int = 40, **options: object) -> Request:
    sampling = options.pop("sampling", Sampling(seed % 3, seed=seed, top_p=0.95, repetition_penalty=1.05))
    return Request(f"Write down number {seed}.", tokens, sampling, grammar=grammar, **options)


@pytest.mark.parametrize("engine", [True, *every(False)], indirect=True)
def test_answers_match_their_grammars_and_neighbours_do_not_notice(engine: Engine) -> None:
    """All kinds in one batch with plain, drawing and penalised neighbours; complete answers match as a whole."""
    asked = [guided(seed, GRAMMARS[seed % 5]) for seed in range(10)]
    others = [
        Request(f"Tell me about {word}.", 12, sampling)
        for word in ("water", "trees")
        for sampling in (Sampling(), Sampling(1.0, seed=4), Sampling(frequency_penalty=1.0))
    ]
    alone = [engine.generate([one])[0] for one in others]
    completions = engine.generate([*asked[:5], *others, *asked[5:]])
    assert completions[5:11] == alone
    guided_ones = [*completions[:5], *completions[11:]]
    ended = 0
    for one, completion in zip(asked, guided_ones, strict=True):
        assert one.grammar is not None
        if completion.finish_reason is FinishReason.STOP:
            ended += 1
            assert matches(one.grammar, completion.text), completion.text
    assert ended >= 4
    for one, completion in list(zip(asked, guided_ones, strict=True))[:2]:
        assert engine.generate([one]) == [completion], "does not depend on the batch"
    drain(engine)
    assert_idle(engine)


def test_preempted_answers_match_too() -> None:
    from over_admission import expect_short_answers

    engine = new_engine(overlap=True, cache_tokens=112, page_size=16, max_length=80, max_batched_tokens=40)
    expect_short_answers(engine._scheduler)
    asked = [guided(seed, GRAMMARS[seed % 4], logprobs=1) for seed in range(6)]
    completions = engine.generate(asked)
    assert engine.state().preemptions > 0
    for completion, free in zip(completions, new_engine().generate(asked), strict=True):
        assert completion.token_ids == free.token_ids
        assert len(completion.logprobs) == len(completion.token_ids)


@pytest.fixture(scope="module")
def neighbour() -> tuple[Request, list[int]]:
    """A request and the tokens of its answer."""
    asked = Request("Tell me about rivers.", 30, ignore_end_token=True)
    return asked, new_engine().generate([asked])[0].token_ids


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_or_are_refused_and_stall_no_step(name: str, neighbour: tuple[Request, list[int]]) -> None:
    """Submitted from another thread; meanwhile an answer is streamed, whose steps wait a bounded time."""
    with EngineThread(new_engine()) as shared:
        events = shared.stream(neighbour[0])
        tokens = list(next(events).token_ids)
        began = time.monotonic()
        with suppress(RequestError):  # most are refused or end with an error; a few are only slow
            for _ in shared.stream(guided(0, HOSTILE[name], sampling=Sampling(5.0, seed=1))):
                pass
        assert time.monotonic() - began < 30
        tokens += [token for event in events for token in event.token_ids]
    assert tokens == neighbour[1]


def test_a_grammar_whose_first_mask_takes_long_is_refused_where_it_is_checked(engine: Engine) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="the grammar of kind regex is too complex: its first mask took over"):
            engine.check(guided(0, Grammar(GrammarKind.REGEX, "(((ab{200}){200}){200}){200}")))


def test_a_mask_that_takes_too_long_ends_its_request_and_refuses_its_grammar(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MASK_CPU_SECONDS", 0.0)
    slow = Grammar(GrammarKind.REGEX, "(.*[ab].{30}){30}")
    other = Request("Tell me about rivers.", 12, ignore_end_token=True)
    with pytest.raises(RequestError, match="too complex: a mask took over"):
        engine.generate([other, guided(0, slow)])
    with pytest.raises(RequestError, match="too complex"):
        engine.check(guided(1, slow))
    assert len(engine.generate([other])[0].token_ids) == 12


def test_a_mask_that_had_to_wait_ends_its_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = guided(0, Grammar(GrammarKind.REGEX, "[p-q]{8}"))
    with monkeypatch.context() as patch:
        patch.setattr(sampling_module, "MASK_SECONDS", -1.0)
        patch.setattr(engine._grammars.threads, "submit", lambda *_: Future())
        with pytest.raises(RequestError, match="were not known within"):
            engine.generate([waiting])
    assert engine.generate([waiting])[0].text


def chained(length: int) -> dict[str, Grammar]:
    rules = [f"r{number}: r{number + 1}" for number in range(length)]
    schema = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    whole = json.dumps({"$ref": "#/$defs/d0", "$defs": schema | {f"d{length}": {"type": "string"}}})
    return {
        "rules": Grammar(GrammarKind.EBNF, "\n".join(["start: r0", *rules, f'r{length}: "a"'])),
        "schema": Grammar(GrammarKind.JSON_SCHEMA, whole),
        "schema in rules": Grammar(GrammarKind.EBNF, f"start: %json {whole}"),
    }


@pytest.mark.parametrize("kind", chained(1))
def test_long_chains_of_references_are_refused_before_they_overflow_a_stack(engine: Engine, kind: str) -> None:
    with pytest.raises(RequestError, match=r"the grammar of kind \w+ has [\d,]+ .*; at most 1,000 are taken"):
        engine.check(guided(0, chained(3500)[kind]))
    engine.check(guided(0, chained(300)[kind]))


def test_the_deepest_grammars_taken_compile_on_a_thread_with_a_small_stack() -> None:
    """In another process, which an overflow would end."""
    code = """
import json, threading
from megatoken.engine import Engine, EngineConfig, Grammar, GrammarKind, Request
from megatoken.errors import RequestError
engine = Engine("reference", EngineConfig(precision="fp32", threads=1))
rules = ["start: r0", *(f'r{n}: ' + '("b" ' * 9 + f'r{n + 1}' + ')?' * 9 for n in range(990)), 'r990: "a"']
nested = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(190)}
schema = json.dumps({"$ref": "#/$defs/d0", "$defs": {**nested, "d190": {"type": "string"}}})
def check():
    for grammar in (Grammar(GrammarKind.EBNF, "\\n".join(rules)), Grammar(GrammarKind.JSON_SCHEMA, schema)):
        try:
            engine.check(Request("x", 5, grammar=grammar))
        except RequestError as error:
            assert "are taken" not in str(error), error
    print("alive")
threading.stack_size(1 << 20)
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout == "alive\n", (ended.returncode, ended.stderr)


WRONG = [
    (Grammar(GrammarKind.JSON_SCHEMA, "{"), "the grammar of kind json_schema"),
    (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "nothing"}'), "the grammar of kind json_schema"),
    (Grammar(GrammarKind.REGEX, "(a"), "the grammar of kind regex is refused"),
    (Grammar(GrammarKind.EBNF, "root = x"), "the grammar of kind ebnf"),
    (Grammar(GrammarKind.EBNF, "start: absent"), "the grammar of kind ebnf is refused"),
    (Grammar(GrammarKind.REGEX, "a" * 300_000), "the grammar has 300,000 characters; at most 262,144"),
]


@pytest.mark.parametrize(("grammar", "words"), WRONG, ids=[one.text[:20] for one, _ in WRONG])
def test_wrong_grammars_are_refused_in_one_line(engine: Engine, grammar: Grammar, words: str) -> None:
    for _ in range(2):  # also from the cache
        with pytest.raises(RequestError) as caught:
            engine.submit(guided(0, grammar))
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_a_grammar_cannot_go_with(directory: Path, engine: Engine) -> None:
    grammar = GRAMMARS[1]
    with pytest.raises(RequestError, match="grammar and ignore_end_token exclude each other"):
        engine.submit(guided(0, grammar, ignore_end_token=True))
    with pytest.raises(RequestError, match=r"has no tokenizer.json or no end token"):
        make_engine(directory).submit(request(grammar=grammar))
    with pytest.raises(RequestError, match="grammar is not supported by this engine"):
        Engine.simulated("llama3.1-8b").submit(Request([1], grammar=grammar))
    complete = guided(0, Grammar(GrammarKind.REGEX, "ab"), min_tokens=30)
    with pytest.raises(RequestError, match="no token is left to choose"):
        engine.generate([complete])


def test_stop_strings_and_limits_cut_guided_answers(engine: Engine) -> None:
    one = guided(0, Grammar(GrammarKind.REGEX, "[a-z]{3}-[0-9]{40}"), stop=("-",))
    [cut] = engine.generate([one])
    assert cut.finish_reason is FinishReason.STOP and re.fullmatch("[a-z]{3}", cut.text)
    [short] = engine.generate([Request("x", 3, grammar=Grammar(GrammarKind.REGEX, "[a-z]{90}"))])
    assert short.finish_reason is FinishReason.LENGTH and len(short.token_ids) == 3


def test_equal_grammars_are_compiled_once(engine: Engine) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[xyz]{4,9}")
    first = engine.check(guided(0, grammar))
    compiled = engine._grammars._kept[grammar]
    again = engine.check(guided(1, Grammar(GrammarKind.REGEX, "[xyz]{4,9}")))
    assert engine._grammars._kept[grammar] is compiled
    assert first.adjustments is not None and again.adjustments is not None
    assert first.adjustments.guide is not again.adjustments.guide


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["yes"]}'), '"yes"'),
        (Grammar(GrammarKind.JSON_OBJECT), r"\{.*"),
        (Grammar(GrammarKind.REGEX, "[a-c]{3}"), "[a-c]{3}"),
        (Grammar(GrammarKind.EBNF, "root ::= [a-c] [a-c] [a-c]"), "[a-c]{3}"),
        (Grammar(GrammarKind.EBNF, 'start: "yes" | "no"'), "yes|no"),
        (Grammar(GrammarKind.ANY), ".*"),
    ],
)
@pytest.mark.parametrize(
    ("engine", "begin"),
    [(False, None), (True, 7), *every((False, 7), (True, None))],
    indirect=["engine"],
)
def test_an_answer_begins_after_a_thought_with_a_limit(
    engine: Engine, answer: Grammar, form: str, begin: int | None
) -> None:
    """The end of the thought is forced; the model's end token, which it likes best, does not end it."""

    def generated(most: int, bias: dict[int, float]) -> list[int]:
        grammar = replace(answer, thought=Thought(9, begin, most))
        sampling = Sampling(logit_bias=bias | {2: 50.0, 9: -50.0})
        return engine.generate([guided(3, grammar, most + 10, sampling=sampling)])[0].token_ids

    assert engine.tokenizer is not None
    for most in (0, 1, 5):
        token_ids = generated(most, {} if begin is None else {begin: 100.0})
        if begin is not None:
            assert token_ids.pop(0) == begin
        assert token_ids.index(9) == most and 2 not in token_ids[:most]
        if begin is None:
            text = engine.tokenizer.decode(token_ids[most + 1 :]).strip()
            assert re.fullmatch(form, text, re.DOTALL), text
    if begin is not None:  # the model may answer at once
        token_ids = generated(5, {begin: -50.0})
        assert begin not in token_ids and re.fullmatch(form, engine.tokenizer.decode(token_ids).strip(), re.DOTALL)
