"""Damaged HTTP requests for tests; run as a script, it sends many of them to a server of its own.

python tests/serve/raw_requests.py 100000
"""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Iterator

from servers import completion, read_until_closed, request, running

TOKENS = [
    *(b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"\xff\xfe", b"\xed\xa0\x80", b"HTTP/1.1", b"HTTP/9.9", b"chunked"),
    *(b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Host: x\r\n", b"Expect: 100-continue\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"0\r\n\r\n"),
    *(b"{" * 2000, b"[" * 2000, b'"', b"1e999999", b"9" * 5000, b"-", b"null", b"true", b"\\ud800", b"A" * 70_000),
]


def seeds() -> list[bytes]:
    body = {"model": "reference", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return [
        request("GET", "/health"),
        request("OPTIONS", "/v1/models"),
        completion(2),
        completion(2, stream=False),
        request("POST", "/v1/chat/completions", body),
        request("POST", "/tokenize", {"prompt": "hi"}),
    ]


def damaged_requests(draw: random.Random, count: int) -> Iterator[bytes]:
    """Requests with one to six places cut, doubled, overwritten or filled with what parsers dislike."""
    whole = seeds()
    for _ in range(count):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(5):
                case 0:
                    del data[at : at + draw.randint(1, 20)]
                case 1:
                    data[at:at] = draw.choice(TOKENS)
                case 2:
                    data[at : at + 1] = bytes([draw.randrange(256)])
                case 3:
                    data[at:at] = data[at : at + draw.randint(1, 60)]
                case 4:
                    data[at : at + 8] = draw.randbytes(8)
        yield bytes(data[: draw.choice([len(data), len(data), draw.randrange(len(data) + 1)])])


def main() -> None:
    count = int(sys.argv[1])
    with running(
        "--engine", "mock", "--tokens-per-second", "2000", "--head-seconds", "2", "--body-seconds", "2"
    ) as server:
        for number, data in enumerate(damaged_requests(random.Random(1), count)):
            with server.connect() as connection:
                try:
                    connection.sendall(data)
                    connection.shutdown(socket.SHUT_WR)
                except OSError:
                    pass  # refused before it was sent
                answer = read_until_closed(connection)
            if answer.startswith(b"HTTP/1.1 500") or not (not answer or answer.startswith(b"HTTP/1.1 ")):
                sys.exit(f"request {number}: {data!r} got {answer!r}")
        if server.ask("GET", "/health").status != 200 or server.metric("vllm:num_requests_running"):
            sys.exit("the server is not healthy afterwards")
        print(f"{count:,} damaged requests: no answer of 500, the server is healthy")


if __name__ == "__main__":
    main()
