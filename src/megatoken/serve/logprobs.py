"""Log probabilities as OpenAI's two APIs write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatoken.engine.request import TokenLogprobs
from megatoken.engine.text_stream import TextStream
from megatoken.engine.tokenizer import Tokenizer

LOWEST = -9999.0  # in place of minus infinity, which JSON does not have


class TokenNames:
    """The text of single tokens; their ids for a model without a tokenizer, or ``as_ids``."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._decoder = tokenizer

    def data(self, token_id: int) -> bytes:
        """The bytes of a token, which need not be whole characters."""
        if self._tokenizer is None:
            return f"token_id:{token_id}".encode()
        texts = self._tokenizer.token_texts(keep_special=True)
        text = self._tokenizer.decode([token_id], keep_special=True) if texts is None else texts[token_id]
        return text.encode() if isinstance(text, str) else text

    def text(self, token_id: int) -> str:
        """The text of a token, with replacement characters where it is no text."""
        return self.data(token_id).decode(errors="replace")

    def count(self, text: str) -> int:
        """How many tokens a text has by itself."""
        return 0 if self._decoder is None or not text else len(self._decoder.encode(text, add_special=False))

    def offsets(self, token_ids: Iterable[int]) -> list[int]:
        """Where in the text of a prompt each of its tokens begins; special tokens are no part of it."""
        stream = None if self._decoder is None else TextStream(self._decoder)
        offsets, offset = [], 0
        for one in token_ids:
            offsets.append(offset)
            offset += len(f"{one} " if stream is None else stream.add((one,)))
        return offsets


def chat_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames) -> dict[str, Any]:
    """The field ``logprobs`` of a chat's choice."""
    return {
        "content": [
            _chat_entry(entry.token_id, entry.logprob, names)
            | {"top_logprobs": [_chat_entry(token_id, value, names) for token_id, value in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    data = names.data(token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob, LOWEST), "bytes": list(data)}


def ranked_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames, most: int) -> list[dict[str, Any] | None]:
    """The field ``prompt_logprobs`` in vLLM's form: by token id. Nothing is known of the first token."""
    return [None, *(_ranked(entry, names, most) for entry in entries)]


def _ranked(entry: TokenLogprobs, names: TokenNames, most: int) -> dict[str, Any]:
    best = [(token_id, value, rank) for rank, (token_id, value) in enumerate(entry.top[:most], 1)]
    return {
        str(token_id): {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": names.text(token_id)}
        for token_id, value, rank in [(entry.token_id, entry.logprob, entry.rank), *best]
    }


def echoed_logprobs(
    token_ids: Sequence[int], entries: Iterable[TokenLogprobs], names: TokenNames, most: int
) -> dict[str, Any]:
    """What ``completion_logprobs`` has for the tokens of an echoed prompt, of which the first has no logprob."""
    fields = completion_logprobs([entry._replace(top=entry.top[:most]) for entry in entries], names, 0)
    return {
        "text_offset": names.offsets(token_ids),
        "token_logprobs": [None, *fields["token_logprobs"]],
        "tokens": [names.text(token_ids[0]), *fields["tokens"]],
        "top_logprobs": [None, *fields["top_logprobs"]],
    }


def completion_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames, offset: int) -> dict[str, Any]:
    """The field ``logprobs`` of a completion's choice; ``offset``: characters of text before the first entry."""
    fields: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for entry in entries:
        text = names.text(entry.token_id)
        best = {names.text(token_id): max(value, LOWEST) for token_id, value in entry.top}
        fields["text_offset"].append(offset)
        fields["token_logprobs"].append(max(entry.logprob, LOWEST))
        fields["tokens"].append(text)
        fields["top_logprobs"].append({text: max(entry.logprob, LOWEST)} | best)
        offset += len(text)
    return fields
