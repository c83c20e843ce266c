"""Token ids to text, piece by piece: never half a character, and cut where a stop string begins."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from megatoken.engine.token_texts import TokenTexts
from megatoken.engine.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_TOKENS = 8


class TextStream:
    """Turns one answer's token ids into pieces of text, as soon as they are certain.

    Without stop strings the pieces add up to the tokenizer's decoding of all ids. One difference: a byte-fallback
    tokenizer decodes bytes that are not UTF-8 together with the valid characters right before them as replacement
    characters; here a character that was complete stays.

    After a stop string no more text comes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,  # of the model
        stop: Iterable[str] = (),  # strings that end the text; of several, the one that is complete first
        include_stop: bool = False,  # the text ends after the stop string instead of before it
        keep_special: bool = False,  # special tokens, such as the end token, are part of the text
        min_tokens: int = 0,  # stop strings do not count in the text of so many tokens
    ) -> None:
        """Begins an empty text."""
        texts = tokenizer.token_texts(keep_special=keep_special)
        self._decoder = _WindowDecoder(tokenizer, keep_special) if texts is None else _TableDecoder(texts)
        self._cutter = _StopCutter(stop, include_stop) if stop else None
        self._before_stop = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._cutter is None else self._cutter.stopped

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        if self._cutter is None:
            return self._decoder.add(token_ids)
        before = ""
        if self._before_stop:
            first, token_ids = token_ids[: self._before_stop], token_ids[self._before_stop :]
            self._before_stop -= len(first)
            before = self._decoder.add(first)
        return before + self._cutter.add(self._decoder.add(token_ids))

    def flush(self) -> str:
        """What was held back, when the answer has ended."""
        text = self._decoder.flush()
        return text if self._cutter is None else self._cutter.add(text) + self._cutter.flush()


class _TableDecoder:
    """Looks every token up; bytes of an unfinished character wait for the rest."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._rest = b""
        self._strip = texts.leading_spaces

    def add(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            text = self._texts[token_ids[0]]
            if type(text) is not str or self._rest:
                text = self._join(text)
        else:
            text = "".join(map(self._join, map(self._texts.__getitem__, token_ids)))
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        text = self._rest.decode(errors="replace")
        self._rest = b""
        return text

    def _join(self, added: str | bytes) -> str:
        if not added:
            return ""
        data = self._rest + (added.encode() if isinstance(added, str) else added)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def _stripped(self, text: str) -> str:
        kept = text.lstrip(" ")
        spaces = min(len(text) - len(kept), self._strip)
        self._strip = 0 if kept else self._strip - spaces
        return text[spaces:]


class _WindowDecoder:
    """Decodes the last few tokens again at each new one, for tokenizers whose tokens depend on their neighbours."""

    def __init__(self, tokenizer: Tokenizer, keep_special: bool) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._window: list[int] = []
        self._shown = ""

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._add, token_ids))

    def flush(self) -> str:
        text = self._decode(self._window)
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def _add(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        if piece and len(self._window) > WINDOW_TOKENS:
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Keep the last tokens as context, because some tokenizers drop the space before the first token of a decode.

        Where a character spans tokens, the first one kept must begin one: bytes of half a character spoil their
        neighbours.
        """
        for kept in range(WINDOW_TOKENS // 2, WINDOW_TOKENS):
            text = self._decode(self._window[-kept:])
            if not text.startswith(REPLACEMENT):
                self._window, self._shown = self._window[-kept:], text
                return

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, keep_special=self._keep_special)


class _StopCutter:
    """Ends a text at the first stop string that is complete, however its characters are spread over pieces."""

    def __init__(self, stop: Iterable[str], include_stop: bool) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop))
        self._any = re.compile("|".join(map(re.escape, self._stop)))
        self._first = re.compile(f"[{re.escape(''.join(one[0] for one in self._stop))}]")
        self._include_stop = include_stop
        self._held = ""  # the longest end of the text so far that begins a stop string
        self.stopped: str | None = None

    def add(self, text: str) -> str:
        if not text or self.stopped is not None:
            return ""
        text = self._held + text
        if self._any.search(text):
            ends = ((start + len(stop), start, stop) for stop in self._stop if (start := text.find(stop)) >= 0)
            end, start, self.stopped = min(ends)
            self._held = ""
            return text[: end if self._include_stop else start]
        certain = self._certain(text)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _certain(self, text: str) -> int:
        """How many characters of ``text`` cannot belong to a stop string that later text completes."""
        found = self._first.search(text, max(0, len(text) - self._longest + 1))
        while found:
            end = text[found.start() :]
            if any(stop.startswith(end) for stop in self._stop):
                return found.start()
            found = self._first.search(text, found.end())
        return len(text)
