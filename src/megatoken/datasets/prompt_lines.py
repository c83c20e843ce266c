"""The lines of a prompt file: JSON -> checked prompt and options, or an error with its place."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatoken.datasets.lines import read_lines
from megatoken.engine.request import Sampling
from megatoken.errors import DatasetError

_LARGEST_INTEGER = 2**31 - 1
_LARGEST_SEED = 2**63 - 1
_LONGEST_VALUE_SHOWN = 40
_EXAMPLE = '{"prompt": "text"}'


@dataclass(frozen=True, slots=True)
class PromptLine:
    """What one line asks for: non-empty text or token ids (not yet checked against a vocabulary), and how to continue.

    ``messages`` are those of a chat as (role, content); ``prompt`` is then their text.
    ``reference`` is the answer expected and ``task`` the kind of work, for scores; the model never sees them.
    """

    prompt: str | list[int]
    max_tokens: int | None
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    ignore_end_token: bool
    reference: str | None
    task: str | None
    messages: tuple[tuple[str, str], ...] = ()


def read_prompt_lines(
    path: Path, defaults: Sampling, update: Callable[[bytes], None]
) -> Iterator[tuple[str, PromptLine]]:
    """Yield (place for error messages, line) of JSON lines; blank ones are skipped. ``update`` gets every byte.

    ``defaults`` are the sampling values for keys that a line leaves out.

    Raises:
        DatasetError: The file cannot be read, or a line of it is wrong.
    """
    for place, line in read_lines(path, update):
        if not line.isspace():
            yield place, _parse(line, defaults, place)


def _parse(line: bytes, defaults: Sampling, place: str) -> PromptLine:
    """Parses and checks one line: a UTF-8 JSON object of the keys in ``_RULES``; ``place`` begins every error."""
    fields = _parse_object(line, place)
    for key, value in fields.items():
        if key not in _RULES:
            close = difflib.get_close_matches(key, _RULES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(_RULES)}"
            raise DatasetError(f"{place}: unknown key {_shown(key)}; {hint}")
        accepts, wanted = _RULES[key]
        if not accepts(value):
            raise DatasetError(f"{place}: {key} is {_shown(value)}; it must be {wanted}")
    if len(_PROMPT_KEYS & fields.keys()) != 1:
        raise DatasetError(f"{place}: give one of prompt, prompt_token_ids and messages")
    messages = tuple((one["role"], one["content"]) for one in fields.get("messages", ()))
    stated = {key: fields[key] for key in _SAMPLING_KEYS & fields.keys()}
    prompt: str | list[int] = "\n".join(content for _, content in messages)
    for key in ("prompt", "prompt_token_ids"):
        prompt = fields.get(key, prompt)
    return PromptLine(
        prompt=prompt,
        max_tokens=fields.get("max_tokens"),
        sampling=replace(defaults, **stated) if stated else defaults,
        stop_token_ids=tuple(fields.get("stop_token_ids", ())),
        ignore_end_token=fields.get("ignore_end_token", False),
        reference=fields.get("reference"),
        task=fields.get("task"),
        messages=messages,
    )


class _DuplicateKeyError(Exception):
    pass


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _DuplicateKeyError
    return fields


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_pairs)


def _parse_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        fields = _DECODER.decode(line.decode().rstrip())
    except UnicodeDecodeError as error:
        problem = f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8"
    except json.JSONDecodeError as error:
        problem = f"column {error.colno}: {error.msg}; each line must be one JSON object such as {_EXAMPLE}"
    except _DuplicateKeyError:
        problem = "a key is given twice; keep one"
    except RecursionError:
        problem = f"lists are nested too deeply; each line must be one flat JSON object such as {_EXAMPLE}"
    except ValueError:  # Python refuses to parse an integer of thousands of digits
        problem = "a number has too many digits; shorten it"
    else:
        if isinstance(fields, dict):
            return fields
        problem = f"{_shown(fields)} is not a JSON object; each line must be one such as {_EXAMPLE}"
    raise DatasetError(f"{place}: {problem}")


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        odd = next((index for index, item in enumerate(value) if type(item) is not int), None)
        nested = odd is not None and isinstance(value[odd], list)
        entry = "" if odd is None else f" whose entry {odd} is {'a list' if nested else _shown(value[odd])}"
        return f"a list{entry}" if value else "an empty list"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE_SHOWN else f"{text[:_LONGEST_VALUE_SHOWN]}..."


def _whole(smallest: int, largest: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and smallest <= value <= largest


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and value != []
        and all(isinstance(one, dict) and one.keys() == {"role", "content"} for one in value)
        and all(isinstance(text, str) and text != "" and _encodable(text) for one in value for text in one.values())
    )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (lambda value: isinstance(value, str) and value != "" and _encodable(value), "Unicode text, not empty"),
    "prompt_token_ids": (lambda value: _whole_numbers(value) and value != [], "a list of token ids, not empty"),
    "messages": (_chat, 'a list of {"role": text, "content": text}, not empty'),
    "max_tokens": (_whole(1, _LARGEST_INTEGER), f"a whole number from 1 to {_LARGEST_INTEGER}"),
    "temperature": (
        lambda value: _number(value) and 0 <= value <= sys.float_info.max,
        "a finite number, 0 (greedy) or more",
    ),
    "top_k": (_whole(0, _LARGEST_INTEGER), f"a whole number from 0 (all tokens) to {_LARGEST_INTEGER}"),
    "top_p": (lambda value: _number(value) and 0 < value <= 1, "a number above 0 and at most 1"),
    "seed": (_whole(0, _LARGEST_SEED), "a whole number from 0 to 2**63 - 1"),
    "stop_token_ids": (_whole_numbers, "a list of token ids"),
    "ignore_end_token": (lambda value: isinstance(value, bool), "true or false"),
    "reference": (lambda value: isinstance(value, str) and _encodable(value), "Unicode text"),
    "task": (lambda value: isinstance(value, str) and value != "" and _encodable(value), "Unicode text, not empty"),
}
_PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "messages"))
_SAMPLING_KEYS = frozenset(("temperature", "top_k", "top_p", "seed"))
