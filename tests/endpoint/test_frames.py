"""Frames that are taken apart together give what parsing them one by one gives, whatever a server sends."""

from __future__ import annotations

import json
from array import array

import httptools
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import chunk, frame

from megatoken.targets.endpoint.answers import Answer, BrokenAnswerError
from megatoken.targets.endpoint.frames import take_apart

READ_NS = 1000  # from one read to the next
PIECES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=12)


def encoded(piece: str, *, ascii_only: bool) -> bytes:
    """A frame with this piece, as servers that escape and servers that do not escape write it."""
    document = json.loads(frame("@")[6:])
    document["choices"][0]["text"] = piece
    return f"data: {json.dumps(document, ensure_ascii=ascii_only)}\n\n".encode()


def state(answer: Answer) -> tuple[object, ...]:
    return (list(answer.times), answer.frames, answer.text, answer.text_hash, answer.first_piece_hash, answer.done)


def one_by_one(reads: list[bytes], *, chunked: bool) -> Answer | None:
    """The answer by the parsers of HTTP and JSON; None where they refuse it."""
    answer, now = Answer("completions", keep_text=True), 0

    class Body:
        def on_body(self, body: bytes) -> None:
            answer.feed(body, now)

    parser = httptools.HttpResponseParser(Body())
    parser.feed_data(b"HTTP/1.1 200 OK\r\n" + b"Transfer-Encoding: chunked\r\n" * chunked + b"\r\n")
    try:
        for number, read in enumerate(reads):
            now = number * READ_NS
            parser.feed_data(read)
    except (BrokenAnswerError, httptools.HttpParserError):
        return None
    return answer if answer.between_frames else None


@given(PIECES, st.data(), st.booleans(), st.booleans())
def test_taken_apart_is_the_same_as_parsed(
    pieces: list[str], data: st.DataObject, chunked: bool, escaped: bool
) -> None:
    wrap = chunk if chunked else bytes
    frames = [wrap(encoded(piece, ascii_only=escaped)) for piece in pieces]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(frames)))) | {len(frames)})
    reads = [b"".join(frames[begin:end]) for begin, end in zip([0, *cuts], cuts, strict=False)]
    if data.draw(st.booleans()):  # something in them is not as it was learnt
        which = data.draw(st.integers(0, len(reads) - 1))
        at = data.draw(st.integers(0, len(reads[which]) - 1))
        other = data.draw(st.binary(max_size=3))
        reads[which] = reads[which][:at] + other + reads[which][at + data.draw(st.integers(0, 3)) :]
    first = wrap(frame("first"))
    answer = one_by_one([first], chunked=chunked)
    assert answer is not None
    tail = answer.tail + (b"\n\n\r\n" if chunked else b"\n\n")
    if not all(read.endswith(tail) for read in reads):
        return  # the client parses such reads
    found = take_apart(reads, answer.head, answer.tail, chunked=chunked)
    parsed = one_by_one([first, *reads], chunked=chunked)
    if found is None:
        whole = b"".join(frames)
        assert parsed is None or b"".join(reads) != whole, "frames as they were learnt were not taken apart"
        return
    answer.take_pieces(found, array("q", range(READ_NS, (len(reads) + 1) * READ_NS, READ_NS)))
    assert parsed is not None and state(answer) == state(parsed)


def test_text_that_is_no_json_string_is_refused_at_once() -> None:
    """A pattern that can match one run of characters in several ways would try for years."""
    answer = one_by_one([frame("first")], chunked=False)
    assert answer is not None
    for piece in ("é" * 60 + "\\x", "a" * 60 + "\\", "\\n" * 40 + 'é"'):
        read = answer.head + piece.encode() + answer.tail + b"\n\n"
        assert take_apart([read] * 3, answer.head, answer.tail, chunked=False) is None
