"""Reads the answers of a server: streams of events frame by frame, whole bodies at once.

A frame that differs from the ones before only in its piece of text is recognised by its first and last bytes, which
costs a tenth of parsing its JSON; many at once by ``frames.take_apart``. All other frames are parsed.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from enum import IntFlag
from typing import Any, TypeGuard

from megatoken.targets.endpoint.bodies import Api
from megatoken.targets.endpoint.frames import Pieces
from megatoken.text import printable

MOST_FRAME_BYTES = 8 << 20
MOST_BODY_BYTES = 64 << 20
ADDED_TOKENS = 4096  # at most, that a server puts before a prompt, such as a system prompt of its own
_MOST_LESSONS = 3  # without use in between: a server whose frames always differ is not learnt again and again
_DONE = b"[DONE]"
_PIECE = re.compile(rb'"(?:content|text|delta|reasoning_content|reasoning)"\s*:\s*"((?:[^"\\]|\\.)+)"')
_ENDS = {"eos": "stop", "stop_sequence": "stop", "completed": "stop", "max_output_tokens": "length"}


class Flag(IntFlag):
    """What one answer showed about its server."""

    EMPTY_FIRST = 1  # frames without text came before the first text
    NO_DONE = 2  # the stream ended without [DONE]
    EARLY_DONE = 4  # frames after [DONE], or no finish reason before it
    NO_USAGE = 8
    OVER_LIMIT = 16  # more tokens than max_tokens
    CUT = 32  # fewer tokens than were asked for, and the server says length
    NOT_FORCED = 64  # ended early although ignore_eos asked for the full length
    FEWER_THAN_FRAMES = 128  # the usage has fewer tokens than frames brought text
    OVER_REQUEST = 256  # the usage has more prompt tokens than the request can have


class BrokenAnswerError(Exception):
    """An answer that cannot be read; the text says why."""


class Answer:
    """One answer. ``times`` has one entry for each frame that brought text, or for each token where ids were sent.

    Tokens of one frame have the same time; frames that one read brought are 1 ns apart.
    """

    def __init__(self, api: Api, *, keep_text: bool) -> None:
        self.times = array("q")
        self.frames = 0
        self.ended_ns = 0  # when the finish reason came, if its frame has no text
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.output_tokens = self.input_tokens = self.cached_tokens = -1
        self.no_count: str | None = None  # what the usage has instead of a count of output tokens, as JSON
        self.flags = Flag(0)
        self.text_hash = self.first_piece_hash = 0
        self.done = False  # [DONE], or the API's own last event
        self.streamed = True
        self._api = api
        self._pieces: list[str] | None = [] if keep_text else None
        self._rest = b""
        self.head = self.tail = b"\0"  # around the text of a frame that was learnt; no frame has a null byte
        self._lessons = 0
        self._empty = 0  # frames before the first text, the one with the role not counted

    @property
    def text(self) -> str:
        """The text, if it was to be kept."""
        return "".join(self._pieces or ())

    @property
    def first_characters(self) -> int:
        """Characters of the first frame that brought text, if the text was to be kept."""
        return len(self._pieces[0]) if self._pieces else 0

    def feed(self, data: bytes, now_ns: int) -> None:
        """Takes part of a stream, which arrived at ``now_ns``. Raises BrokenAnswerError."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if not data.endswith(b"\n\n"):
            cut = data.rfind(b"\n\n") + 2
            if cut == 1:
                cut = 0
            self._rest = data[cut:]
            if len(self._rest) > MOST_FRAME_BYTES:
                raise BrokenAnswerError(f"a frame is larger than {MOST_FRAME_BYTES >> 20} MiB")
            data = data[:cut]
        head, tail = self.head, self.tail
        for frame in data[:-2].split(b"\n\n") if data else ():
            if frame.startswith(head) and frame.endswith(tail) and not self.done:
                piece = frame[len(head) : -len(tail)]
                if piece and b'"' not in piece and b"\\" not in piece and piece.isascii():
                    self._take_piece(piece, now_ns)
                    self._lessons = 0
                    if self._pieces is not None:
                        self._pieces.append(piece.decode())
                    continue
            if frame:
                try:
                    self._take_frame(frame, now_ns)
                except BrokenAnswerError:
                    raise
                except Exception:  # a document can have any form
                    raise _not_of_the_api(frame) from None
                head, tail = self.head, self.tail

    @property
    def between_frames(self) -> bool:
        """Whether all bytes so far were whole frames, and more are expected."""
        return not self._rest and not self.done

    def take_pieces(self, pieces: Pieces, times_ns: array[int]) -> None:
        """Takes frames like the one learnt; ``times_ns`` has the time of each read [reads]. The first text has come."""
        if len(pieces.counts) < (count := sum(pieces.counts)):
            read = zip(times_ns, pieces.counts, strict=True)
            times_ns = array("q", (at + number for at, many in read for number in range(many)))
        self.frames += count
        self.times += times_ns
        self.text_hash = zlib.crc32(pieces.text, self.text_hash)
        self._lessons = 0
        if self._pieces is not None:
            self._pieces.append(pieces.text.decode("utf-8", "surrogatepass"))

    def end(self) -> None:
        """The stream has ended. Raises BrokenAnswerError if it was cut off in the middle of a frame."""
        if self._rest.strip():
            raise BrokenAnswerError("the stream ended in the middle of a frame")
        if not self.done:
            self.flags |= Flag.NO_DONE
        if not self.finish_reason:
            raise BrokenAnswerError("the stream ended before the answer did: no finish reason came")

    def take_body(self, body: bytes) -> None:
        """Takes an answer that is no stream. Raises BrokenAnswerError."""
        self.streamed = False
        try:
            self._take_whole(body)
        except BrokenAnswerError:
            raise
        except Exception:  # a document can have any form
            raise _not_of_the_api(body) from None

    def check_prompt_tokens(self, request_bytes: int) -> None:
        """Leaves out a count of prompt tokens that cannot be true: a token is at least one byte of the request."""
        if self.input_tokens > request_bytes + ADDED_TOKENS:
            self.input_tokens = self.cached_tokens = -1
            self.flags |= Flag.OVER_REQUEST

    def _take_whole(self, body: bytes) -> None:
        document = _json(body)
        if self._api == "responses":
            self._take_response(document)
            parts = [part for item in document.get("output") or () for part in item.get("content") or ()]
            text = "".join(str(part.get("text") or "") for part in parts)
        else:
            choice = _choice(document)
            if choice is None:
                raise BrokenAnswerError(f"no choices in the answer: {_shown(body)}")
            text = _text(choice, self._api)
            self.finish_reason = str(choice.get("finish_reason") or "")
            self.token_ids = list(choice.get("token_ids") or ())
            self._take_usage(document.get("usage"))
        if not self.finish_reason:
            raise BrokenAnswerError("the answer has no finish reason")
        self.finish_reason = _ENDS.get(self.finish_reason, self.finish_reason)
        self.text_hash = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        if self._pieces is not None:
            self._pieces.append(text)

    def _take_piece(self, piece: bytes, now_ns: int) -> None:
        self.frames += 1
        self.times.append(self._after_last(now_ns))
        self.text_hash = zlib.crc32(piece, self.text_hash)
        if self.frames == 1:
            self.first_piece_hash = self.text_hash
            if self._empty:
                self.flags |= Flag.EMPTY_FIRST

    def _take_frame(self, frame: bytes, now_ns: int) -> None:
        if len(frame) > MOST_FRAME_BYTES:
            raise BrokenAnswerError(f"a frame is larger than {MOST_FRAME_BYTES >> 20} MiB")
        lines = [line[5:].lstrip(b" ") for line in frame.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            if frame.lstrip().startswith((b":", b"event:", b"id:", b"retry:")):
                return  # a comment that keeps the connection open
            raise BrokenAnswerError(f"not a frame of server-sent events: {_shown(frame)}")
        data = b"\n".join(lines)
        if data.strip() == _DONE:
            if not self.finish_reason:
                self.flags |= Flag.EARLY_DONE
            self.done = True
            return
        if self.done:
            self.flags |= Flag.EARLY_DONE
        document = _json(data)
        if (error := document.get("error")) and not document.get("choices"):
            message = error.get("message", error) if isinstance(error, dict) else error
            raise BrokenAnswerError(f"the server ended the answer with an error: {_shown(str(message).encode())}")
        if self._api == "responses":
            self._take_event(document, now_ns)
            return
        usage = document.get("usage")
        self._take_usage(usage)
        choice = _choice(document)
        if choice is None:
            return
        text, ids = _text(choice, self._api), choice.get("token_ids") or ()
        self._take_text(text, ids, now_ns)
        if not text and not self.frames and not choice.get("finish_reason") and not _is_role(choice):
            self._empty += 1
        if choice.get("finish_reason"):
            self.ended_ns = 0 if text else self._after_last(now_ns)
            self.finish_reason = _ENDS.get(choice["finish_reason"], str(choice["finish_reason"]))
        elif text and not usage and not ids and self._lessons < _MOST_LESSONS:
            self._learn(frame, text)

    def _take_event(self, document: dict[str, Any], now_ns: int) -> None:
        """One of the typed events of the route of responses."""
        kind = document.get("type")
        if kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            self._take_text(str(document.get("delta") or ""), (), now_ns)
        elif kind in ("response.completed", "response.incomplete"):
            self.done = True
            self.ended_ns = self._after_last(now_ns)
            self._take_response(document.get("response") or {})
        elif kind == "response.failed":
            raise BrokenAnswerError("the server reports that the answer failed")

    def _take_response(self, document: dict[str, Any]) -> None:
        self._take_usage(document.get("usage"))
        why = (document.get("incomplete_details") or {}).get("reason")
        self.finish_reason = _ENDS.get(str(why or document.get("status") or ""), str(why or ""))

    def _take_text(self, text: str, ids: Any, now_ns: int) -> None:
        now_ns = self._after_last(now_ns)
        if text:
            self._take_piece(text.encode("utf-8", "surrogatepass"), now_ns)
            if self._pieces is not None:
                self._pieces.append(text)
        if ids:
            self.token_ids += ids
            self.times.extend([now_ns] * (len(ids) - bool(text)))

    def _after_last(self, now_ns: int) -> int:
        """The time of another frame of a read at ``now_ns``."""
        return max(now_ns, self.times[-1] + 1) if self.times else now_ns

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        for name, keys in (("output_tokens", ("completion_tokens", "output_tokens")), ("input_tokens", _INPUT)):
            found = next((usage[key] for key in keys if _is_count(usage.get(key))), None)
            if found is not None:
                setattr(self, name, found)
            elif name == "output_tokens":
                stated = next((usage[key] for key in keys if usage.get(key) is not None), None)
                self.no_count = self.no_count if stated is None else _shown(json.dumps(stated).encode())
        cached = (usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}).get("cached_tokens")
        if _is_count(cached):
            self.cached_tokens = cached

    def _learn(self, frame: bytes, text: str) -> None:
        """Remembers what surrounds the text of ``frame``."""
        self._lessons += 1
        found = _PIECE.search(frame)
        if found is not None and json.loads(b'"' + found[1] + b'"') == text:
            self.head, self.tail = frame[: found.start(1)], frame[found.end(1) :]


_INPUT = ("prompt_tokens", "input_tokens")
_MOST_TOKENS = 2**31 - 1  # no answer has more: it is no count


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= _MOST_TOKENS


def _json(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except UnicodeDecodeError:
        raise BrokenAnswerError(f"not UTF-8: {_shown(data)}") from None
    except (ValueError, RecursionError):
        raise BrokenAnswerError(f"not JSON: {_shown(data)}") from None
    if not isinstance(document, dict):
        raise BrokenAnswerError(f"not a JSON object: {_shown(data)}")
    return document


def _not_of_the_api(data: bytes) -> BrokenAnswerError:
    return BrokenAnswerError(f"not an answer of the API: {_shown(data)}")


def _choice(document: dict[str, Any]) -> dict[str, Any] | None:
    choices = document.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _text(choice: dict[str, Any], api: Api) -> str:
    if api == "completions":
        return str(choice.get("text") or "")
    message = choice.get("delta") or choice.get("message") or {}
    return str(message.get("reasoning_content") or message.get("reasoning") or "") + str(message.get("content") or "")


def _is_role(choice: dict[str, Any]) -> bool:
    return bool((choice.get("delta") or {}).get("role"))


def _shown(data: bytes) -> str:
    return printable(" ".join(data[:80].decode("utf-8", "replace").split()))
