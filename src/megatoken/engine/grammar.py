"""Grammars of answers: compiled once, and which tokens each answer may have next, as masks of bits.

llguidance computes the masks. It builds no automaton of the whole vocabulary ahead: a grammar compiles within
milliseconds, and a mask takes some tens of microseconds.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatoken.engine.config import ModelConfig
from megatoken.engine.request import Grammar, GrammarKind, Request, Thought
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import RequestError, how_to_install

LARGEST_TEXT = 256 * 1024
"""Characters of a grammar."""
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,
    "max_items_in_row": 500,
    "max_lexer_states": 20_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
}
"""Of llguidance. By default regular expressions with nested repetitions and ambiguous grammars took seconds a token."""
JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
"""Room for indentation. With any number of spaces, as JSON has it, small models write spaces up to their limit."""
MOST_DEFINITIONS = 1000
"""Definitions of an EBNF grammar, and levels of a JSON schema along its references.

llguidance recurses along references, and a stack that overflows ends the process: 3,500 rules did so on 8 MiB.
"""
COMPILE_STACK_BYTES = 256 << 20
"""Stack of the thread that compiles: address space, of which only what is used takes memory."""
MASK_SECONDS = 1.0
"""Longest wait for a mask, which holds up the step: then the request ends, but its grammar is not to blame."""
MASK_CPU_SECONDS = 1.0
"""Longest time of a processor for a mask; a grammar that takes more is refused from then on."""
FIRST_MASK_SECONDS = 0.1
"""Longest time of a processor for the first mask, which is computed where the request is checked."""
KEPT_GRAMMARS = 256
MASK_THREADS = 8


class Guide:
    """What one answer may have next."""

    def __init__(self, grammars: Grammars, grammar: Grammar, matcher: Any, mask_words: int) -> None:
        self._grammars, self._grammar, self._matcher = grammars, grammar, matcher
        self._consumed = 0
        self.failed = False  # there is no next mask
        self._mask = np.zeros(mask_words, dtype=np.int32)

    def start(self, generated: Sequence[int]) -> Future[NDArray[np.int32]]:
        """Compute, on another thread, the mask of the token after ``generated``, which may only have grown.

        Bit t of the mask says whether token t is allowed. Its error is a RequestError.
        """
        new = list(generated[self._consumed :])
        self._consumed = len(generated)
        return self._grammars.threads.submit(self._next, new)

    def give_up(self) -> RequestError:
        """The error of a mask that was waited for too long, be it because all threads are busy."""
        self.failed = True
        return _refusal(
            f"the tokens that the grammar allows were not known within {MASK_SECONDS:g} s; try again, or simplify it"
        )

    def _next(self, new: list[int]) -> NDArray[np.int32]:
        matcher = self._matcher
        began = time.thread_time()
        try:
            if not new or matcher.consume_tokens(new):
                matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            problem = matcher.get_error()
        except BaseException as error:  # an error of the library, which as a panic is not an Exception
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.failed = True
            raise _refusal(f"the answer cannot follow its grammar any further: {_problem(problem)}")
        if time.thread_time() - began > MASK_CPU_SECONDS:
            self.failed = True
            refusal = _refusal(
                f"the grammar is too complex: a mask took over {MASK_CPU_SECONDS:g} s of a processor; simplify it"
            )
            self._grammars.refuse(self._grammar, refusal)
            raise refusal
        return self._mask


class Grammars:
    """Compiles the grammars of one model's requests, on the threads that ask, and keeps the latest."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelConfig) -> None:
        self._tokenizer, self._model = tokenizer, model
        self._mask_words = -(-model.vocabulary_size // 32)
        self._lock = threading.Lock()
        self._library_tokenizer: Any = None
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()  # matchers, or errors; the latest used last
        self._threads: ThreadPoolExecutor | None = None

    @property
    def threads(self) -> ThreadPoolExecutor:
        """That compute masks."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(MASK_THREADS, max(2, os.cpu_count() or 1)), "grammar masks")
        return self._threads

    def guide(self, request: Request, grammar: Grammar) -> Guide:
        """A new guide along the grammar of ``request``.

        Raises:
            RequestError: the grammar is wrong, too complex, or cannot be followed by this model or request.
        """
        if self._tokenizer is None or not self._model.end_token_ids:
            raise _refusal(f"{self._model.name} has no tokenizer.json or no end token, so grammar must be left out")
        if request.ignore_end_token:
            raise _refusal("grammar and ignore_end_token exclude each other: the end token ends what is complete")
        if len(grammar.text) > LARGEST_TEXT:
            raise _refusal(f"the grammar has {len(grammar.text):,} characters; at most {LARGEST_TEXT:,} are taken")
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
        if kept is None:
            check_depth(grammar)
            kept = self._compile_on_deep_stack(grammar)
            self._keep(grammar, kept)
        if isinstance(kept, RequestError):
            raise _refusal(str(kept))
        return Guide(self, grammar, kept.deep_copy(), self._mask_words)

    def refuse(self, grammar: Grammar, error: RequestError) -> None:
        """Raise ``error`` for later requests with this grammar."""
        self._keep(grammar, error)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _keep(self, grammar: Grammar, result: Any) -> None:
        with self._lock:
            self._kept[grammar] = result
            if len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)

    def _compile_on_deep_stack(self, grammar: Grammar) -> Any:
        """What ``_compile`` returns or raises, from a thread whose stack does not overflow."""
        result: Future[Any] = Future()

        def compile_it() -> None:
            try:
                result.set_result(self._compile(grammar))
            except BaseException as error:
                result.set_exception(error)

        thread = threading.Thread(target=compile_it, name="grammar")
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(COMPILE_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        return result.result()

    def _compile(self, grammar: Grammar) -> Any:
        """A matcher at the beginning, or a RequestError."""
        try:
            import llguidance
        except ImportError as error:
            raise _refusal(f"grammar needs llguidance; {how_to_install('serve')}") from error
        matcher_class = llguidance.LLMatcher
        try:
            match grammar.kind:
                case GrammarKind.JSON_OBJECT:
                    text = matcher_class.grammar_from_json_schema('{"type": "object"}', JSON_OPTIONS)
                case GrammarKind.JSON_SCHEMA:
                    text = matcher_class.grammar_from_json_schema(grammar.text, JSON_OPTIONS)
                case GrammarKind.REGEX:
                    text = matcher_class.grammar_from_regex(grammar.text)
                case GrammarKind.EBNF:
                    text = llguidance.grammar_from("ebnf", grammar.text)
                case _:
                    text = _ANY
            if grammar.thought is not None:
                text = _after_thought(text, grammar.thought, self._model.end_token_ids)
            limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
            matcher = matcher_class(self._tokenizer_of(llguidance), text, log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            return _refusal(f"the grammar of kind {grammar.kind} cannot be read: {_one_line(str(error))}")
        mask = np.zeros(self._mask_words, dtype=np.int32)
        first = matcher.deep_copy()
        began = time.thread_time()
        if not first.is_error():
            first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if first.is_error():
            return _refusal(f"the grammar of kind {grammar.kind} is refused: {_problem(first.get_error())}")
        if time.thread_time() - began > FIRST_MASK_SECONDS:
            return _refusal(
                f"the grammar of kind {grammar.kind} is too complex: its first mask took over {FIRST_MASK_SECONDS:g} s "
                "of a processor; simplify it"
            )
        return matcher

    def _tokenizer_of(self, llguidance: Any) -> Any:
        with self._lock:
            if self._library_tokenizer is None:
                assert self._tokenizer is not None
                ends = [one for one in self._model.end_token_ids if one < self._model.vocabulary_size]
                self._library_tokenizer = llguidance.LLTokenizer(
                    self._tokenizer.file.read_text(encoding="utf-8"), self._model.vocabulary_size, ends
                )
            return self._library_tokenizer


def _after_thought(grammar: str, thought: Thought, end_token_ids: Sequence[int]) -> str:
    """The library's grammar of a thought, which the model's end tokens do not end, and an answer of ``grammar``."""
    begin, end, most = thought.begin, thought.end, thought.most
    others = f"<[^{','.join(map(str, {end, *end_token_ids}))}]>"
    inner = "" if most == 0 else f"{others}*" if most is None else f"{others}{{0,{most}}}"
    answers: list[dict[str, Any]] = []
    if grammar == _ANY:
        answer, at_once = "<[*]>*", f"<[^{begin}]> <[*]>*"
    else:
        answers = json.loads(grammar)["grammars"] if grammar[:1] == "{" else [{"lark_grammar": grammar}]
        answers[0]["name"] = "answer"
        answer, at_once = r"/[ \n]{0,4}/ @answer", "@answer"
    start = f"{inner} <[{end}]> {answer}"
    if begin is not None:
        start = f"<[{begin}]> {start} | {at_once}"
    return json.dumps({"grammars": [{"lark_grammar": f"start: {start}"}, *answers]})


_ANY = "start: <[*]>*"  # any tokens
_STACK_SIZE_LOCK = threading.Lock()  # threading.stack_size holds for the whole process


def check_depth(grammar: Grammar) -> None:
    """Refuse a grammar along whose references the library could recurse too deeply.

    Raises:
        RequestError: it has more than ``MOST_DEFINITIONS`` definitions or levels.
    """
    if grammar.kind == GrammarKind.EBNF:
        count, what = len(re.findall(":(?!:)", grammar.text)), "definitions (colons)"
    elif grammar.kind == GrammarKind.JSON_SCHEMA:
        count, what = _schema_depth(grammar.text), "levels of objects, lists and references"
    else:
        return  # the library limits the nesting of regular expressions itself
    if count > MOST_DEFINITIONS:
        raise _refusal(
            f"the grammar of kind {grammar.kind} has {count:,} {what}; at most {MOST_DEFINITIONS:,} are taken"
        )


def _schema_depth(text: str) -> int:
    """An upper bound of the levels of a schema's longest path, each reference of which is followed once."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deeply" if isinstance(error, RecursionError) else _one_line(str(error))
        raise _refusal(f"the grammar of kind json_schema cannot be read: {problem}") from None
    deepest = 0
    references: dict[str, int] = {}  # the deepest place of each
    waiting = [(schema, 1)]
    while waiting:
        value, depth = waiting.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            for key, reference in value.items():
                if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(reference, str):
                    references[reference] = max(references.get(reference, 0), depth)
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(child, depth + 1) for child in children if isinstance(child, dict | list)]
    return deepest + sum(references.values())


def _one_line(message: str) -> str:
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]


def _problem(message: str) -> str:
    """What the library reports, in one line."""
    if message.startswith("NoExtensionBias"):
        return 'nothing may come next; look for a contradiction, or a reference such as {"$ref": "#"} to itself alone'
    return _one_line(message)


def _refusal(message: str) -> RequestError:
    return RequestError(message, "grammar")
