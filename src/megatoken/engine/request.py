"""What a user asks of an engine, what comes back, and which requests every engine refuses."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from operator import index
from typing import NamedTuple

from megatoken.errors import MegatokenError, RequestError

_LARGEST_SEED = 2**63 - 1
_LARGEST_TOP_K = 2**31 - 1
_LARGEST_MAX_TOKENS = 10**30  # far beyond any engine, which refuses what is too long with its own numbers
_MOST_LOGPROBS = 20
_LARGEST_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    The penalties and ``logit_bias`` change the logits first. Then ``temperature`` 0 is greedy (argmax) and ignores the
    rest; otherwise a token is drawn among those with at least ``min_p`` times the probability of the best, of these the
    ``top_k`` best (0: all), and of these the fewest best that hold ``top_p`` of the probability. A draw depends on
    ``seed``, the token's position and the logits, never on what else is in the batch. Without a seed the engine takes
    the request's id, so that equal prompts differ and a repeated run does not.

    ``repetition_penalty`` divides the logits above 0, and multiplies the others, of every token in prompt or answer.
    ``presence_penalty`` is subtracted once from the logit of a token in the answer, ``frequency_penalty`` once for each
    time that it is there. ``logit_bias`` is added to the logits of its token ids before the penalties. These are the
    definitions of OpenAI's API and, for ``repetition_penalty``, of CTRL (Keskar et al., 2019).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)


class GrammarKind(StrEnum):
    """In which language the text of a ``Grammar`` is written."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Thought:
    """What the model thinks before its answer, up to a token of its own.

    ``end``: id of the token that ends it. ``begin``: id of the token that begins it, where the model may also answer at
    once; None: the prompt has begun it. ``most``: tokens between the two, after which the end is forced; None: any.
    """

    end: int
    begin: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: any JSON object, or what a JSON schema, a regular expression or a grammar allows.

    ``text`` is empty for ``json_object`` and ``any``. The whole answer matches, unless ``max_tokens`` cuts it off; with
    ``thought``, what follows the thought does.
    """

    kind: GrammarKind
    text: str = ""
    thought: Thought | None = None


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how far to continue it.

    ``prompt`` is text (the checkpoint's tokenizer encodes it) or token ids. The request ends at the model's end
    token (unless ``ignore_end_token``), at any of ``stop_token_ids``, where its text holds one of the strings in
    ``stop``, or after ``max_tokens`` tokens. The ids that end it are not chosen before it has ``min_tokens`` tokens.

    ``logprobs``: how many of the best tokens to report with each generated one; 0 reports only the generated one.
    ``prompt_logprobs``: the same for the tokens of the prompt. ``cache_salt``: only requests of an equal salt share
    cached prefixes.

    ``bad_words``: texts that the answer does not get. Each is encoded without and with a space in front; where the
    answer ends with all tokens of an encoding but the last, that one is not chosen. Other tokens that spell the same
    text remain possible. ``allowed_token_ids``: the only ids that the answer gets; empty for all.

    Requests of several groups share the engine by ``weight``, so that a group that floods does not starve another. A
    rack does not know groups.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: tuple[int, ...] = ()
    ignore_end_token: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    cache_salt: str = ""
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    group: str = ""
    weight: float = 1.0

    @property
    def share(self) -> tuple[str, float]:
        """Its group and the weight of that group."""
        return self.group, self.weight


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one token, from the model's logits before any sampling option."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens, best first: token id and logprob."""
    rank: int = 0
    """Place of the token among all: 1 is the most probable."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: generated ids (the end token included when it was produced) and why it ended.

    ``text`` is the text of the generated ids up to a stop string, empty if the model has no tokenizer; ``logprobs`` has
    an entry for each id if the request asked for them; ``cached_tokens`` counts the prompt tokens that were taken from
    the prefix cache. ``prompt_logprobs`` has an entry for each token of the prompt but the first, if the request asked
    for them.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class TokenEvent(NamedTuple):
    """New tokens of one request after one step.

    ``finish_reason`` is set on the last event of a request and only there; with ``FinishReason.ERROR`` ``error`` says
    why this request, and no other, could not go on. ``logprobs`` has an entry for each token if the request asked for
    them; ``cached_tokens``, on the first event of a request, counts the prompt tokens taken from the prefix cache.
    ``prompt_logprobs``, on the first event of a request that asked for them, are those of its prompt's tokens but the
    first.
    ``text`` is the text that became certain, of requests that are streamed in this process or have stop strings: never
    half a character, and nothing from a stop string on.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: MegatokenError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    text: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def is_one_token(self) -> bool:
        """Whether it brings one token and nothing else."""
        return len(self.token_ids) == 1 and self[2:] == _NOTHING_ELSE


_NOTHING_ELSE = (None, None, (), 0, "", ())


def token_ids(prompt: Sequence[int]) -> list[int]:
    """The ids as plain integers, from a sequence of any integer type. Raises RequestError: it holds something else."""
    try:
        return list(map(index, prompt))
    except TypeError as error:
        raise RequestError(f"the prompt must be text or token ids, not {_shown(prompt)}", "prompt") from error


def check_request(prompt: Sequence[int], request: Request, vocabulary_size: int) -> None:
    """Refuse what can never be served, or would fail in a step, which requests share.

    Raises:
        RequestError: says which field and why.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocabulary_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"prompt token id {_shown(wrong)} is outside the vocabulary of {vocabulary_size:,}; "
            "use the model's own tokenizer",
            "prompt",
        )
    check_options(request)
    for name, ids in (("logit_bias", request.sampling.logit_bias), ("allowed_token_ids", request.allowed_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < vocabulary_size:
                raise RequestError(
                    f"{name} holds token id {token_id:,}, outside the vocabulary of {vocabulary_size:,}", name
                )


def check_options(request: Request) -> None:
    """Refuse every field but the prompt that has the wrong type or a value out of range.

    Raises:
        RequestError: says which field and why.
    """
    sampling = request.sampling
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling is {_shown(sampling)}; write Sampling(temperature=0.8)", "sampling")
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("allowed_token_ids", request.allowed_token_ids)):
        if not isinstance(ids, Collection) or not all(isinstance(one, Integral) for one in ids):
            raise RequestError(f"{name} is {_shown(ids)}; it must be a tuple of token ids", name)
    _check_count("max_tokens", request.max_tokens, 1, _LARGEST_MAX_TOKENS, "at least 1")
    _check_count("min_tokens", request.min_tokens, 0, request.max_tokens, "0 or more")
    for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None:
            _check_count(name, count, 0, _MOST_LOGPROBS, "0 or more")
    for name, strings in (("stop", request.stop), ("bad_words", request.bad_words)):
        if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
            raise RequestError(f"{name} is {_shown(strings)}; it must be a tuple of strings that are not empty", name)
    if not isinstance(request.cache_salt, str):
        raise RequestError(f"cache_salt is {_shown(request.cache_salt)}; it must be a string", "cache_salt")
    if not isinstance(request.group, str):
        raise RequestError(f"group is {_shown(request.group)}; it must be a string", "group")
    if not 0 < _number("weight", request.weight) < math.inf:
        raise RequestError(f"weight is {_shown(request.weight)}; it must be finite and above 0", "weight")
    if request.grammar is not None:
        _check_grammar(request.grammar)
        for name, given in (("bad_words", request.bad_words), ("allowed_token_ids", request.allowed_token_ids)):
            if given:
                raise RequestError(f"{name} and grammar exclude each other: the grammar may leave no other word", name)
    _check_sampling(sampling)


def used_options(request: Request) -> set[str]:
    """Names of the options that ``request`` uses and that not every runner or target has."""
    sampling = request.sampling
    used = {
        "min_p": sampling.min_p != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "presence_penalty": sampling.presence_penalty != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "logit_bias": len(sampling.logit_bias) > 0,
        "min_tokens": request.min_tokens > 0,
        "logprobs": request.logprobs is not None,
        "prompt_logprobs": request.prompt_logprobs is not None,
        "stop": len(request.stop) > 0,
        "grammar": request.grammar is not None,
        "cache_salt": request.cache_salt != "",
        "bad_words": len(request.bad_words) > 0,
        "allowed_token_ids": len(request.allowed_token_ids) > 0,
    }
    return {name for name, is_used in used.items() if is_used}


_ABOVE_0, _FINITE = math.ulp(0.0), sys.float_info.max
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, _FINITE, "finite and not negative"),
    "top_p": (_ABOVE_0, 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "at least 0 and at most 1"),
    "repetition_penalty": (_ABOVE_0, _FINITE, "finite and above 0"),
    "presence_penalty": (-2.0, 2.0, "at least -2 and at most 2"),
    "frequency_penalty": (-2.0, 2.0, "at least -2 and at most 2"),
}


def _check_sampling(sampling: Sampling) -> None:
    _check_count("top_k", sampling.top_k, 0, _LARGEST_TOP_K, "0 (all) or more")
    if sampling.seed is not None:
        _check_count("seed", sampling.seed, -_LARGEST_SEED - 1, _LARGEST_SEED, f"at least {-_LARGEST_SEED - 1:,}")
    for name, (lowest, highest, wanted) in _RANGES.items():
        value = getattr(sampling, name)
        if not lowest <= _number(name, value) <= highest:
            raise RequestError(f"{name} is {_shown(value)}; it must be {wanted}", name)
    bias = sampling.logit_bias
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {_shown(bias)}; it must map token ids to numbers", "logit_bias")
    for token_id, value in bias.items():
        _check_count("logit_bias", token_id, 0, _LARGEST_TOP_K, "0 or more", "logit_bias's token id")
        if not -_LARGEST_BIAS <= _number("logit_bias", value) <= _LARGEST_BIAS:
            raise RequestError(
                f"logit_bias of token id {token_id} is {_shown(value)}; it must be at least -100 and at most 100",
                "logit_bias",
            )


def _check_grammar(grammar: object) -> None:
    if not isinstance(grammar, Grammar):
        raise RequestError(f"grammar is {_shown(grammar)}; write Grammar('regex', '[0-9]+')", "grammar")
    if grammar.kind not in list(GrammarKind):
        kinds = ", ".join(GrammarKind)
        raise RequestError(f"the kind of grammar is {_shown(grammar.kind)}; it must be one of {kinds}", "grammar")
    if not isinstance(grammar.text, str):
        raise RequestError(f"the text of the grammar is {_shown(grammar.text)}; it must be a string", "grammar")
    if bool(grammar.text) == (grammar.kind in (GrammarKind.JSON_OBJECT, GrammarKind.ANY)):
        wanted = "no text" if grammar.text else "a text"
        raise RequestError(f"a grammar of kind {grammar.kind} needs {wanted}", "grammar")


def _check_count(field: str, value: object, lowest: int, highest: int, wanted: str, name: str | None = None) -> None:
    name = name or field
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} is {_shown(value)}; it must be a whole number", field)
    if not lowest <= value <= highest:
        wanted = wanted if value < lowest else f"at most {highest:,}"
        raise RequestError(f"{name} is {_shown(value)}; it must be {wanted}", field)


def _number(name: str, value: object) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{name} is {_shown(value)}; it must be a number", name)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"
