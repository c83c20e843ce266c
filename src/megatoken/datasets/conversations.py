"""Conversations: turns of a user, as recorded text or as lengths, whose answers come from the target that is measured.

Files: ShareGPT (a JSON list of ``{"conversations": [{"from": "human", "value": ...}, ...]}``), or JSON lines with
``messages`` as for prompts. Recorded answers give the lengths of the new ones, and are not sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.errors import DatasetError
from megatoken.files import UnreadableError, read_text
from megatoken.text import count_of

MOST_BYTES = 2 << 30
CHARACTERS_PER_TOKEN = 4  # of text without a tokenizer
ANSWER_TOKENS = 128  # of a turn whose answer was not recorded
HUMAN, MODEL, SYSTEM = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard"), ("system",)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user sends: a text, or without one ``tokens`` random tokens; and the tokens of the answer."""

    tokens: int
    answer_tokens: int
    text: str | None = None
    think_seconds: float | None = None  # before the next turn; None: as the load says


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns one after the other. ``carries``: each sends all turns and answers before it again."""

    turns: tuple[Turn, ...]
    system: str | None = None
    carries: bool = True


@dataclass(frozen=True, slots=True)
class Conversations:
    """The conversations of a file or a profile, and where they come from."""

    name: str
    source: str
    content_hash: str
    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()


def read_conversations(path: Path, count: Callable[[str], int] | None) -> Conversations:
    """Reads a file; conversations without a turn of a user are left out, which a note counts.

    Args:
        path: ShareGPT, or JSON lines.
        count: tokens of a text; None: a token for every four characters, which a note says.

    Raises:
        DatasetError: the file cannot be read, or holds no conversation.
    """
    try:
        text, _ = read_text(path, MOST_BYTES)
    except UnreadableError as error:
        raise DatasetError(f"{path}: {error}") from None
    tokens = count or (lambda words: math.ceil(len(words) / CHARACTERS_PER_TOKEN))
    found, left_out = [], 0
    for place, messages in _recorded(path, text):
        conversation = _conversation(place, messages, tokens)
        if conversation is None:
            left_out += 1
        else:
            found.append(conversation)
    if not found:
        raise DatasetError(f"{path}: no conversation with a turn of a user; expected ShareGPT, or lines of messages")
    notes = []
    if left_out:
        notes.append(f"{count_of(left_out, 'conversation')} without a turn of a user left out")
    if count is None:
        notes.append(f"lengths of answers are estimated: a token for every {CHARACTERS_PER_TOKEN} characters")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Conversations(path.name, str(path), digest, tuple(found), tuple(notes))


def _recorded(path: Path, text: str) -> Iterator[tuple[str, list[Any]]]:
    """The messages of each conversation, with its place."""
    try:
        if text.lstrip()[:1] == "[":
            for at, one in enumerate(json.loads(text), 1):
                yield f"{path}: conversation {at}", _messages(one)
            return
        for at, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{path}:{at}", _messages(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: not JSON ({error}); expected ShareGPT, or lines of messages") from None


def _messages(one: Any) -> list[Any]:
    if not isinstance(one, dict):
        return []
    messages = one.get("conversations", one.get("messages"))
    return messages if isinstance(messages, list) else []


def _conversation(place: str, messages: list[Any], count: Callable[[str], int]) -> Conversation | None:
    turns: list[Turn] = []
    system: str | None = None
    for message in messages:
        if not isinstance(message, dict):
            raise DatasetError(f"{place}: a message is no object; expected from and value, or role and content")
        role, words = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if not isinstance(words, str) or not words:
            continue
        if role in HUMAN:
            turns.append(Turn(count(words), ANSWER_TOKENS, words))
        elif role in MODEL and turns:
            last = turns[-1]
            turns[-1] = Turn(last.tokens, max(1, count(words)), last.text)
        elif role in SYSTEM:
            system = words
    return Conversation(tuple(turns), system) if turns else None
