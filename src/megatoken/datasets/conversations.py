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


@dataclass(frozen=True, slots=True)
class RecordedConversations:
    """The texts of a file, whose tokens are not counted yet: that needs the model's tokenizer."""

    path: Path
    content_hash: str
    conversations: tuple[_Texts, ...]
    left_out: int

    def counted(self, count: Callable[[str], int] | None) -> Conversations:
        """The conversations with their lengths in tokens.

        Args:
            count: tokens of a text; None: a token for every four characters, which a note says.
        """
        tokens = count or (lambda words: math.ceil(len(words) / CHARACTERS_PER_TOKEN))

        def turn(asked: str, answer: str | None) -> Turn:
            return Turn(tokens(asked), ANSWER_TOKENS if answer is None else max(1, tokens(answer)), asked)

        found = tuple(Conversation(tuple(turn(*pair) for pair in one.turns), one.system) for one in self.conversations)
        notes = []
        if self.left_out:
            notes.append(f"{count_of(self.left_out, 'conversation')} without a turn of a user left out")
        if count is None:
            notes.append(f"lengths of answers are estimated: a token for every {CHARACTERS_PER_TOKEN} characters")
        return Conversations(self.path.name, str(self.path), self.content_hash, found, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Texts:
    """One conversation: what the user says in each turn with the recorded answer, and the system's text."""

    turns: tuple[tuple[str, str | None], ...]
    system: str | None


def read_conversations(path: Path) -> RecordedConversations:
    """Reads ShareGPT, or JSON lines; conversations without a turn of a user are left out, which a note counts.

    Raises:
        DatasetError: the file cannot be read, or holds no conversation.
    """
    try:
        text, _ = read_text(path, MOST_BYTES)
    except UnreadableError as error:
        raise DatasetError(f"{path}: {error}; give ShareGPT, or JSON lines of messages") from None
    found, left_out = [], 0
    for place, messages in _recorded(path, text):
        conversation = _conversation(place, messages)
        if conversation is None:
            left_out += 1
        else:
            found.append(conversation)
    if not found:
        raise DatasetError(f"{path}: no conversation with a turn of a user; expected ShareGPT, or lines of messages")
    return RecordedConversations(path, hashlib.sha256(text.encode()).hexdigest(), tuple(found), left_out)


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


def _conversation(place: str, messages: list[Any]) -> _Texts | None:
    turns: list[tuple[str, str | None]] = []
    system: str | None = None
    for message in messages:
        if not isinstance(message, dict):
            raise DatasetError(f"{place}: a message is no object; expected from and value, or role and content")
        role, words = message.get("from", message.get("role")), message.get("value", message.get("content"))
        if not isinstance(words, str) or not words:
            continue
        if role in HUMAN:
            turns.append((words, None))
        elif role in MODEL and turns:
            turns[-1] = (turns[-1][0], words)
        elif role in SYSTEM:
            system = words
    return _Texts(tuple(turns), system) if turns else None
