"""What a model thinks before it answers: how models mark it, and its parts as they arrive."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import StrEnum

from megatoken.serve.tool_calls import (
    CallArguments,
    CallParser,
    CallStart,
    Piece,
    ThoughtText,
    new_call_id,
    partial_tag,
)

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
_HEADER_END = "<|message|>"
_BODY_END = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_PERHAPS_TAG = re.compile(r"<(?:\|[a-z]{0,9}\|?)?\Z")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HEADER_BEGIN = re.compile(r"<\|(?:channel|start)\|>|\s*to=")


class ReasoningFormat(StrEnum):
    """How a model marks what it thinks."""

    AUTO = "auto"  # found in its chat template
    OFF = "off"  # it does not, or what it thinks is part of the answer
    THINK = "think"  # <think>...</think>; of Qwen3 and DeepSeek-R1
    HARMONY = "harmony"  # channels of messages, of which "final" is the answer; of gpt-oss


def reasoning_format_of(templates: Iterable[str]) -> ReasoningFormat:
    """The format that a model's chat templates show."""
    text = "\n".join(templates)
    if _HEADER_END in text and "<|channel|>" in text:
        return ReasoningFormat.HARMONY
    return ReasoningFormat.THINK if THOUGHT_END in text else ReasoningFormat.OFF


class PromptEnd(StrEnum):
    """Where a prompt leaves a model that marks its thoughts with tags."""

    THINKING = "thinking"  # the thought has begun
    ANSWERING = "answering"  # it is over
    OPEN = "open"  # the model may begin with either


def prompt_end(prompt: str, continued: str) -> PromptEnd:
    """Where a prompt ends; ``continued``: the text of the message that the answer goes on with, or empty."""
    if continued:
        return (
            PromptEnd.THINKING if continued.rfind(THOUGHT_BEGIN) > continued.rfind(THOUGHT_END) else PromptEnd.ANSWERING
        )
    prompt = prompt[-1024:].rstrip()
    if prompt.endswith(THOUGHT_BEGIN):
        return PromptEnd.THINKING
    return PromptEnd.ANSWERING if prompt.endswith(THOUGHT_END) else PromptEnd.OPEN


class ThinkParser:
    """A thought between tags, then an answer; white space around the thought is dropped."""

    def __init__(self, inner: CallParser | None, prompt: PromptEnd) -> None:
        """``inner``: separates calls from text in the answer."""
        self._inner = inner
        self._undecided = prompt is PromptEnd.OPEN  # nothing but white space or the beginning of a tag has come
        self._thinking = prompt is PromptEnd.THINKING
        self._at_edge = self._thinking  # nothing but white space has come since the tag
        self._held = ""

    def add(self, text: str) -> list[Piece]:
        """What a piece of the answer's text brings."""
        pieces: list[Piece] = []
        self._held += text
        if self._undecided:
            stripped = self._held.lstrip()
            if len(stripped) < len(THOUGHT_BEGIN) and THOUGHT_BEGIN.startswith(stripped):
                return []
            self._undecided = False
            if stripped.startswith(THOUGHT_BEGIN):
                self._held = stripped.removeprefix(THOUGHT_BEGIN)
                self._thinking = self._at_edge = True
        if self._thinking:
            thought, tag, rest = self._held.partition(THOUGHT_END)
            if self._at_edge:
                thought = thought.lstrip()
            certain = thought if tag else thought[: len(thought) - partial_tag(thought, THOUGHT_END)]
            certain = certain.rstrip()
            if certain:
                pieces.append(ThoughtText(certain))
                self._at_edge = False
            if not tag:
                self._held = thought[len(certain) :]
                return pieces
            self._thinking, self._at_edge, self._held = False, True, rest
        if self._at_edge:
            self._held = self._held.lstrip()
        answer, self._held = self._held, ""
        if answer:
            self._at_edge = False
            pieces += [answer] if self._inner is None else self._inner.add(answer)
        return pieces

    def end(self) -> list[Piece]:
        """What was held back, when the answer has ended."""
        held, self._held = self._held.rstrip() if self._thinking else self._held, ""
        if self._thinking:
            return [ThoughtText(held)] if held else []
        pieces: list[Piece] = []
        if held:
            pieces += [held] if self._inner is None else self._inner.add(held)
        return pieces if self._inner is None else [*pieces, *self._inner.end()]


class HarmonyParser:
    """Messages with headers that say of what channel they are, and which function they call.

    It needs the special tokens in the text. An answer begins in the header of its first message.
    """

    def __init__(self, names: Collection[str]) -> None:
        """``names``: of functions; a call of another one is text."""
        self._names = names
        self._calls = 0
        self._held = ""
        self._first = True  # no header has come
        self._in_header = True
        self._kind: type[str] | type[ThoughtText] | type[CallArguments] = str  # of the message
        self._texts = 0  # messages of text with something in them
        self._in_text = False  # the last piece was text of this message

    def add(self, text: str) -> list[Piece]:
        """What a piece of the answer's text brings."""
        pieces: list[Piece] = []
        self._held += text
        while self._held:
            if self._in_header:
                if self._first and not self._may_be_header():
                    self._in_header = False  # a model that does not follow the format
                    continue
                header, tag, rest = self._held.partition(_HEADER_END)
                if not tag:
                    break
                self._in_header = self._first = self._in_text = False
                self._held = rest
                pieces += self._begin(header)
                continue
            found = _BODY_END.search(self._held)
            perhaps = _PERHAPS_TAG.search(self._held)
            certain = found.start() if found else perhaps.start() if perhaps else len(self._held)
            if certain:
                pieces += self._body(self._held[:certain])
            self._held = self._held[certain:]
            if found is None:
                break
            self._in_header, self._first = True, False
            self._held = self._held.removeprefix(found[0]) if found[0] != "<|channel|>" else self._held
        return pieces

    def end(self) -> list[Piece]:
        """What was held back, when the answer has ended, unless it can only be the beginning of a header."""
        return [] if self._in_header or not self._held else self._body(self._held)

    def _may_be_header(self) -> bool:
        found = _HEADER_BEGIN.match(self._held) or _PERHAPS_TAG.match(self._held)
        return found is not None or "to=".startswith(self._held.lstrip())

    def _begin(self, header: str) -> list[Piece]:
        """A message begins."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._kind = CallArguments
            self._calls += 1
            return [CallStart(self._calls - 1, new_call_id(), recipient[1])]
        self._kind = ThoughtText if channel is not None and channel[1] == "analysis" else str
        return []

    def _body(self, text: str) -> list[Piece]:
        if self._kind is CallArguments:
            return [CallArguments(self._calls - 1, text)]
        if self._kind is ThoughtText:
            return [ThoughtText(text)]
        if not self._in_text:
            self._in_text = True
            self._texts += 1
            if self._texts > 1:
                text = f"\n\n{text}"
        return [text]
