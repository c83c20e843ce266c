"""HTTP/1.1 as clients, careless clients and attackers speak it, over real sockets to a real server."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator

import pytest
from raw_requests import damaged_requests
from servers import ANSWER_SECONDS, Running, answers, completion, read_until_closed, request, running, wait_until

HEALTH = request("GET", "/health")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Impatient, so that tests of patience are short."""
    limits = ["--head-seconds", "1", "--body-seconds", "1", "--idle-seconds", "2", "--stalled-seconds", "1"]
    with running("--engine", "mock", "--tokens-per-second", "500", *limits, "--max-body-bytes", "100000") as server:
        yield server


def close(data: bytes) -> bytes:
    return data.replace(b"Host: test", b"Host: test\r\nConnection: close", 1)


def test_a_connection_serves_one_request_after_another(server: Running) -> None:
    with server.connect() as connection:
        for _ in range(3):
            connection.sendall(HEALTH)
            assert answers(connection.recv(65536))[0].status == 200
        connection.sendall(close(HEALTH))
        assert answers(read_until_closed(connection))[0].headers["connection"] == "close"


def test_requests_sent_ahead_are_answered_in_order(server: Running) -> None:
    ids = [f"id-{number}" for number in range(20)]
    data = b"".join(request("GET", "/health", headers={"X-Request-Id": one}) for one in ids)
    found = answers(server.raw(data + completion(5) + close(HEALTH)))
    assert [one.headers["x-request-id"] for one in found[:20]] == ids
    assert found[20].body.endswith(b"data: [DONE]\n\n")
    assert found[21].status == 200


def test_more_requests_ahead_than_a_client_needs_are_refused(server: Running) -> None:
    found = answers(server.raw(completion(500) + HEALTH * 200))
    assert found[0].body.endswith(b"data: [DONE]\n\n")
    assert found[-1].status == 429


def test_a_request_may_come_byte_by_byte(server: Running) -> None:
    with server.connect() as connection:
        for byte in close(HEALTH):
            connection.sendall(bytes([byte]))
        assert answers(read_until_closed(connection))[0].status == 200


def test_a_body_may_come_in_chunks(server: Running) -> None:
    body = json.dumps({"model": "reference", "prompt": [5], "max_tokens": 2, "stream": True}).encode()
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, body[at : at + 1]) for at in range(len(body))) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    (answer,) = answers(server.raw(head + chunks))
    assert answer.status == 200 and answer.body.endswith(b"data: [DONE]\n\n")


def test_a_client_that_asks_is_told_to_go_on(server: Running) -> None:
    head, _, body = completion(2).partition(b"\r\n\r\n")
    with server.connect() as connection:
        connection.sendall(head + b"\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert answers(read_until_closed(connection))[0].status == 200


def test_a_large_body_that_is_announced_is_refused_before_it_is_sent(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100001\r\nExpect: 100-continue\r\n\r\n"
    assert [one.status for one in answers(server.raw(head))] == [413]


def test_head_has_no_body(server: Running) -> None:
    data = server.raw(close(request("HEAD", "/version")))
    assert data.startswith(b"HTTP/1.1 200") and data.endswith(b"\r\n\r\n")
    assert b"content-length: 0" not in data


def test_options_names_the_methods(server: Running) -> None:
    answer = server.ask("OPTIONS", "/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (204, "POST, OPTIONS")
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_http_1_0_streams_end_with_the_connection(server: Running) -> None:
    body = json.dumps({"model": "reference", "prompt": [5], "max_tokens": 3, "stream": True}).encode()
    data = server.raw(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    assert b"transfer-encoding" not in data and data.endswith(b"data: [DONE]\n\n")


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
REFUSED = [
    (400, b"rubbish\r\n\r\n"),
    (400, b"GET /health HTTP/1.1\r\n\r\n"),
    (400, b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"),
    (400, b"GET /health HTTP/1.1\r\nHost: a\r\nBad Header: b\r\n\r\n"),
    (400, POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc"),
    (400, POST + b"Content-Length: -1\r\n\r\n"),
    (400, POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    (400, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n"),
    (404, b"GET /nothing HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
    (405, b"DELETE /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"),
    (411, POST + b"\r\n"),
    (400, b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"),
    (400, b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    (413, POST + b"Content-Length: 100001\r\n\r\n"),
    (400, POST + b"Content-Length: 99999999999999999999999\r\n\r\n"),
    (413, POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"a" * 65536 + b"\r\n10000\r\n" + b"a" * 65536),
    (414, b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    (414, b"GET /" + b"a" * 90_000),
    (415, POST + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}"),
    (415, POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}"),
    (417, POST + b"Expect: a miracle\r\nContent-Length: 2\r\n\r\n{}"),
    (431, b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n"),
    (431, b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 90_000),
    (431, b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X: aaaaaaaa\r\n" * 9000),
    (431, POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX: " + b"a" * 1_000_000),
    (431, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: aaaaaaaa\r\n" * 90_000),
    (431, POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 1_000_000),
    (501, b"FETCH /health HTTP/1.1\r\nHost: a\r\n\r\n"),
    (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    (505, b"GET /health HTTP/3.0\r\nHost: a\r\n\r\n"),
    (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
]


@pytest.mark.parametrize(("status", "data"), REFUSED, ids=[f"{status}-{at}" for at, (status, _) in enumerate(REFUSED)])
def test_what_is_wrong_gets_its_status_in_the_usual_shape(server: Running, status: int, data: bytes) -> None:
    (answer,) = answers(server.raw(data))
    assert answer.status == status
    assert answer.error["message"] and "Traceback" not in answer.error["message"]
    assert server.ask("GET", "/health").status == 200


def test_a_refusal_waits_for_the_answers_before_it(server: Running) -> None:
    found = answers(server.raw(completion(5) + b"rubbish\r\n\r\n"))
    assert found[0].body.endswith(b"data: [DONE]\n\n")
    assert [one.status for one in found] == [200, 400]


def test_a_slow_head_and_a_slow_body_are_ended(server: Running) -> None:
    for start in (b"GET /health HT", completion(2)[:-5]):
        with server.connect() as connection:
            connection.sendall(start)
            began = time.monotonic()
            (answer,) = answers(read_until_closed(connection))
            assert answer.status == 408 and 0.9 < time.monotonic() - began < ANSWER_SECONDS


def test_a_trickle_does_not_keep_a_request_alive(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: ")
        connection.settimeout(0.2)
        data = b""
        for _ in range(100):
            try:
                connection.sendall(b"a")
                data += connection.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                break
            if data:
                break
        assert data.startswith(b"HTTP/1.1 408")


def test_an_idle_connection_is_closed(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(HEALTH)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert connection.recv(65536) == b""
    with server.connect() as connection:  # never asked anything
        assert read_until_closed(connection) == b""


def test_a_client_that_closes_its_side_before_the_answer_is_told_so(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(completion(500, stream=False))
        wait_until(lambda: server.metric("vllm:num_requests_running") == 1, "it runs")
        connection.shutdown(socket.SHUT_WR)
        (answer,) = answers(read_until_closed(connection))
    assert answer.status == 400 and "keep it open" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "it has ended")


@pytest.mark.parametrize("length", [1, 20, 60, 150])
def test_a_half_open_client_is_answered_or_closed(server: Running, length: int) -> None:
    with server.connect() as connection:
        connection.sendall(completion(2)[:length])
        connection.shutdown(socket.SHUT_WR)
        data = read_until_closed(connection)
        assert data == b"" or answers(data)[0].status == 400


def test_a_client_that_does_not_read_is_given_up_and_its_request_cancelled(server: Running) -> None:
    with server.connect(receive_bytes=4096) as connection:
        body = {"model": "reference", "prompt": [5], "max_tokens": 1900, "n": 32, "stream": True, "ignore_eos": True}
        connection.sendall(request("POST", "/v1/completions", body))
        wait_until(lambda: server.metric("vllm:num_requests_running") > 0, "the request runs")
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "the request is cancelled")
        wait_until(lambda: any("status=499" in line for line in server.log), "the log says so")


def test_a_client_that_reads_slowly_but_steadily_gets_everything(server: Running) -> None:
    """It reads for longer than a client may read nothing, and data waits for it all the time."""
    with server.connect(receive_bytes=4096) as connection:
        body = {"model": "reference", "prompt": [5], "max_tokens": 700, "n": 12, "stream": True, "ignore_eos": True}
        connection.sendall(request("POST", "/v1/completions", body, headers={"Connection": "close"}))
        data = bytearray()
        while piece := connection.recv(1 << 14):
            data += piece
            time.sleep(0.01)
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_leaves_cancels_its_request(server: Running) -> None:
    aborted = server.metric("vllm:request_success_total")
    server.stream(1900).close()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "cancelled")
    assert server.metric("vllm:request_success_total") == aborted + 1


def test_a_request_id_is_returned_unless_it_could_forge_a_log_line(server: Running) -> None:
    for given, kept in (("abc-123", True), ("a b", False), ("x" * 200, False)):
        (answer,) = answers(server.raw(close(request("GET", "/health", headers={"X-Request-Id": given}))))
        assert (answer.headers["x-request-id"] == given) is kept


def test_damaged_requests_never_harm_the_server(server: Running) -> None:
    """A few thousand; ``python tests/serve/raw_requests.py`` sends more."""
    for data in damaged_requests(random.Random(18), 3000):
        with server.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = read_until_closed(connection)
        assert not answer or (answer.startswith(b"HTTP/1.1 ") and not answer.startswith(b"HTTP/1.1 500")), data
    assert server.ask("GET", "/health").status == 200
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0, "no request is left")
    assert not any("Traceback" in line or "failed" in line for line in server.log)
