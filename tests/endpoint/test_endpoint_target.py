"""Servers over HTTP as a target: times, faults, lost endpoints, findings. Client processes and sockets are real."""

from __future__ import annotations

import http.server
import json
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from endpoint_support import LONGEST_SECONDS, answered, connected, ends, prompts
from scripted_server import Server, scripted_server

from cli_support import call_here
from megatoken.config import RunConfig
from megatoken.datasets.requests import ChatRequest
from megatoken.engine.config import REFERENCE, model_folder
from megatoken.engine.request import Request
from megatoken.engine.tokenizer import Tokenizer
from megatoken.errors import MegatokenError, RequestError, UsageError
from megatoken.harness.progress import Progress
from megatoken.runs.run import Verdict, read_run
from megatoken.targets import SampleEvent
from megatoken.targets.endpoint import backend as backend_module
from megatoken.targets.endpoint.backend import EndpointBackend
from megatoken.text import precise


@pytest.fixture
def server() -> Iterator[Server]:
    with scripted_server() as one:
        yield one


@pytest.mark.timing
def test_times_are_those_at_which_the_server_sent(server: Server) -> None:
    with connected(server.url) as target:
        last = answered(target, prompts("ok", "ok again", "split", tokens=12))
    for sample, prompt in enumerate(("ok", "ok again", "split")):
        times = last[sample].token_times_ns
        assert times is not None and len(times) == 12 == last[sample].output_tokens
        late = (times - np.array(server.sent_ns[prompt])) / 1e9
        assert late.min() > 0 and np.median(late) < 0.01
        assert last[sample].sent_ns < last[sample].first_ns == times[0]
    assert last[0].input_tokens == 3 and last[0].finish_reason == "length"


@pytest.mark.timing
def test_requests_leave_when_they_are_due_and_those_cancelled_before_never(server: Server) -> None:
    with connected(server.url) as target:
        due_ns = [time.monotonic_ns() + 1_000_000 * after for after in (300, 100, 200, 0)]
        for at, due in enumerate(due_ns):
            target.submit(at, *prompts(f"quick {at}", tokens=2), due)
        sent_ns = {at: events[0].sent_ns for at, events in ends(target).items()}
        for at, due in enumerate(due_ns):
            sent = sent_ns[at]
            assert sent is not None and due <= sent < due + 20_000_000
        target.submit(4, *prompts("quick 4", tokens=2), time.monotonic_ns() + 300_000_000)
        target.poll(0.05)
        target.cancel_all()
        target.submit(5, *prompts("quick 5", tokens=2), time.monotonic_ns() + 400_000_000)
        assert list(ends(target)) == [5]
    assert server.asked["quick 4"] == 0 and server.asked["quick 5"] == 1


def test_tokens_of_answers_under_way_are_counted_and_none_twice(server: Server) -> None:
    with connected(server.url) as target:
        (request,) = prompts("ok", tokens=150)  # 3 s; a client process reports every second
        target.submit(0, request)
        deadline = time.monotonic() + LONGEST_SECONDS
        while not (seen := target.state().output_tokens):
            assert time.monotonic() < deadline
            target.poll(0.1)
        assert target.state().in_flight == 1 and seen < 150
        ends(target)
        assert target.state().output_tokens == 150


FAULTS = {
    "hang": "no whole answer in 6 s",
    "error": "HTTP 500: the engine has failed",
    "redirect": "a redirect to http://elsewhere.example/v1, which is not followed",
    "type": "content type text/html, expected text/event-stream",
    "reset": "the connection was reset",
    "close": "the connection was closed",
    "malformed": "not JSON: {oops",
    "half": "not UTF-8",
    "huge": "a frame is larger than 8 MiB",
    "unfinished": "no finish reason came",
}


def test_every_fault_fails_its_own_sample_and_no_other(server: Server) -> None:
    requests = prompts(*FAULTS, "ok", "busy", "lingers", "nodone")
    began = time.monotonic()
    with connected(server.url) as target:
        last = answered(target, requests)
        outcome, found = target.outcome(0), {one["code"]: dict(one) for one in target.findings(0)}
    assert time.monotonic() - began < LONGEST_SECONDS
    for at, (word, message) in enumerate(FAULTS.items()):
        assert message in str(last[at].error), (word, last[at].error)
    assert [last[at].error for at in range(len(FAULTS), len(requests))] == [None] * 4
    assert server.asked["busy"] == 2 and outcome["endpoints"]["requests_repeated"] == 1
    assert found["REQUESTS_REPEATED"]["requests"] == 1
    assert all(server.asked[word] == 1 for word in FAULTS)


def test_samples_of_an_endpoint_that_dies_go_to_the_others_once(server: Server) -> None:
    with scripted_server() as other, connected(server.url, other.url) as target:
        for at, request in enumerate(prompts(*(f"ok {number}" for number in range(40)), tokens=40)):
            target.submit(at, request)
        began = time.monotonic()
        events: list[SampleEvent] = []
        while time.monotonic() - began < 0.3 or not events:
            events += target.poll(0.05)
        other.stop()
        rest = ends(target)
        outcome = target.outcome(0)
    ended = [event for group in rest.values() for event in group if event.finish_reason or event.error]
    ended += [event for event in events if event.finish_reason or event.error]
    assert sorted(event.sample_id for event in ended) == list(range(40))
    assert [event.error for event in ended] == [None] * 40
    [lost] = outcome["endpoints"]["lost"]
    assert lost["endpoint"] == f"127.0.0.1:{other.port}" and lost["samples_moved"] == 20
    assert lost["back_at_seconds"] is None
    assert sum(server.asked.values()) == 40


def test_an_endpoint_that_comes_back_gets_samples_again_and_stays_in_the_record(server: Server) -> None:
    with scripted_server() as other, connected(server.url, other.url) as target:
        other.stop()
        first = answered(target, prompts(*(f"quick {number}" for number in range(10))))
        with scripted_server(other.port) as again:
            deadline = time.monotonic() + LONGEST_SECONDS
            while target.outcome(0)["endpoints"]["lost"][0]["back_at_seconds"] is None:
                assert time.monotonic() < deadline
                target.poll(0.1)
            second = answered(target, prompts(*(f"ok {number}" for number in range(10))))
            assert sum(again.asked.values()) == 5
        [lost] = target.outcome(0)["endpoints"]["lost"]
        target.begin()
        assert target.outcome(0)["endpoints"]["lost"] == []
    assert {event.error for event in [*first.values(), *second.values()]} == {None}
    assert lost["at_seconds"] < lost["back_at_seconds"] and lost["samples_moved"] >= 1


def test_lengths_are_forced_where_the_server_knows_how(server: Server) -> None:
    request = Request("short", max_tokens=8, ignore_end_token=True)
    with connected(server.url) as target:
        answered(target, [request])
    assert (
        server.bodies[-1]["ignore_eos"] is True and "min_tokens" not in server.bodies[-1]
    )  # which costs a server work
    server.asked["knows nothing"] = 1
    with connected(server.url) as target:
        answered(target, [request])
        assert target.facts()["target"]["forces_lengths"] is False
    assert "ignore_eos" not in server.bodies[-1]


def test_the_first_question_is_of_the_kind_of_the_prompts(server: Server) -> None:
    with connected(server.url):
        assert server.whole[-1]["prompt"] == "Hello"
    endpoint = {"urls": server.url, "processes": 1}
    config = RunConfig(scenario="server", model=str(model_folder(REFERENCE)), endpoint=endpoint)
    with EndpointBackend(config, Progress(quiet=True)).open() as backend, backend.load():
        assert server.whole[-1]["prompt"] == [5, 6, 7, 8]  # some servers have no tokenizer


def test_cancelled_samples_leave_no_event_and_connections_are_used_again(server: Server) -> None:
    with connected(server.url) as target:
        for at in range(4):
            target.submit(at, Request(f"ok {at}", max_tokens=500))
        while not target.poll(0.1):
            pass
        time.sleep(0.3)
        seen = {event.sample_id: event for event in target.cancel_all() if event.token_times_ns is not None}
        assert target.state().in_flight == 0
        for at in range(4):
            times_ns, tokens = seen[at].token_times_ns, seen[at].output_tokens
            sent_ns = np.array(server.sent_ns[f"ok {at}"])
            assert times_ns is not None and tokens is not None and len(times_ns) == tokens > 5
            assert len(sent_ns) - len(times_ns) < 5  # what was on its way
            assert (times_ns > sent_ns[: len(times_ns)]).all()
        last = answered(target, prompts("ok", "quick"))
        assert {event.error for event in last.values()} == {None}
    assert target.withdraw() == []


def test_a_request_that_meets_connections_closed_while_idle_is_sent_on_a_new_one(server: Server) -> None:
    with connected(server.url) as target:
        answered(target, prompts("ok 1", "ok 2", "ok 3"))
        last = answered(target, prompts("new", "new too"))
    assert {event.error for event in last.values()} == {None}
    assert server.asked["new"] == server.asked["new too"] == 1


def test_the_key_is_sent_and_appears_nowhere_else(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-secret-1\n")
    with connected(server.url, api_key_file=str(file)) as target:
        answered(target, prompts("quick"))
        assert "sk-secret-1" not in str(target.facts())
    assert sum(b"Authorization: Bearer sk-secret-1" in head for head in server.heads) > 2


def test_a_server_that_is_still_starting_is_waited_for(server: Server) -> None:
    server.starts_at = time.monotonic() + 1.0
    with connected(server.url) as target:
        assert time.monotonic() > server.starts_at
        assert answered(target, prompts("fine"))[0].finish_reason == "length"
    server.starts_at = time.monotonic() + 60.0
    with (
        pytest.raises(MegatokenError, match=r"503.*not ready after 0\.5 s.*start_seconds"),
        connected(server.url, start_seconds=0.5),
    ):
        pass


def test_a_first_question_asked_too_early_is_asked_again(server: Server) -> None:
    server.refuses_with = 429
    with (
        pytest.raises(MegatokenError, match=r"429.*not ready after 0\.5 s.*start_seconds"),
        connected(server.url, start_seconds=0.5),
    ):
        pass


def test_metrics_and_version_of_the_server(server: Server) -> None:
    with connected(server.url) as target:
        deadline = time.monotonic() + LONGEST_SECONDS
        while target.replicas()[0].state.running != 3 and time.monotonic() < deadline:
            target.poll(0.1)
        [reading] = target.replicas()
        assert (reading.state.running, reading.state.waiting) == (3, 2)
        assert reading.known is not None and "pages" not in reading.known
        assert target.facts()["servers"][0]["version"] == "7.0"


def test_an_answer_that_is_cancelled_has_as_many_tokens_a_frame_as_those_before(server: Server) -> None:
    with connected(server.url) as target:
        assert answered(target, prompts("several", tokens=16))[0].output_tokens == 16
        target.submit(1, *prompts("several again", tokens=4000))
        while not target.poll(0.1):
            pass
        time.sleep(5 * 0.02)
        *_, last = target.cancel_all()
        assert last.token_times_ns is not None and len(last.token_times_ns) > 1
        assert last.output_tokens == 4 * len(last.token_times_ns)


def test_what_cannot_be_asked_for_is_refused(server: Server, tmp_path: Path) -> None:
    with connected(server.url) as target, pytest.raises(RequestError, match="--api chat"):
        target.submit(0, ChatRequest("x", messages=(("user", "x"),)))
    for url, message in {
        "ftp://host/v1": "not the address of an API",
        "http://user:pass@host/v1": "give --api-key-file",
        "http://127.0.0.1:1/v1": "no answer",
        "http://nosuchhost.invalid/v1": "no answer \\(.*: check the host",
        "http://h:123456/v1": "--endpoint http://h:123456/v1: Port out of range",
        "http://user:pass@h:123456/v1": "--endpoint h:123456/v1: Port out of range",
        "http://h:8/v1/chat/completions/": "is one route of the API; give the address before it, http://h:8/v1$",
        "https://h/openai/v1/responses": "give the address before it, https://h/openai/v1$",
        "http://h:8/metrics": "give the address before it, http://h:8$",
        server.url.replace("/v1", "/nothing"): "--endpoint",
    }.items():
        config = RunConfig(endpoint={"urls": url, "served_model": "other"})
        with pytest.raises(UsageError, match=message) as raised:
            EndpointBackend(config, Progress(quiet=True)).served()
        assert "pass" not in str(raised.value).replace("password", "")
    config = RunConfig(endpoint={"urls": server.url, "served_model": "other"})
    with pytest.raises(UsageError, match="it serves m, not other"):
        EndpointBackend(config, Progress(quiet=True)).served()


@pytest.mark.parametrize(("status", "code"), [(401, 2), (404, 2), (500, 1)])
def test_a_first_question_that_is_refused_is_an_error_of_the_input_unless_the_server_fails(
    server: Server, tmp_path: Path, status: int, code: int
) -> None:
    server.refuses_with = status
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "quick", "max_tokens": 8}\n')
    flags = ("--endpoint", server.url, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "runs")
    for command in (("run",), ("sweep", "--concurrency", 1)):
        found, _, err = call_here(*command, *flags)
        assert found == code, err
        hint = "; give the key that it expects with --api-key-file FILE" if status == 401 else ""
        assert err.endswith(f"megatoken: --endpoint {server.url}: HTTP {status}: not this time{hint}\n")


def test_what_a_server_has_chosen_itself_is_refused_in_one_line(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "quick", "max_tokens": 8}\n')
    for flags, said in (
        (("--prompts", prompts, "--precision", "bf16"), "--precision bf16: the server at --endpoint has its own"),
        (("--api", "chat", "--samples", 1), "--api chat: that route takes messages, so it needs prompts"),
        (("--endpoint.stream", "false", "--scenario", "singlestream"), "needs times to first token"),
        (("--endpoint.stream", "false", "--find-rate", "--scenario", "server"), "needs times to first token"),
    ):
        code, _, err = call_here("run", "--endpoint", server.url, *flags, "--out", tmp_path / "runs")
        assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err


def test_a_model_without_files_is_refused_unless_the_server_serves_that_name(server: Server, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for model, why in (("nothere", "no such folder"), (str(tmp_path / "empty"), "it has no tokenizer.json")):
        code, _, err = call_here("run", "--endpoint", server.url, "--model", model, "--out", tmp_path / "runs")
        assert code == 2 and f"--model {model}: {why}" in err and "the tokenizer of m, " in err, err
        assert len(err.strip().splitlines()) == 1 and not server.bodies and not server.whole
    for model in ("m", "llama3.1-8b", str(model_folder(REFERENCE))):
        config = RunConfig(model=model, endpoint={"urls": server.url})
        assert EndpointBackend(config, Progress(quiet=True)).served().name == "m"


class WebServer(http.server.BaseHTTPRequestHandler):
    """A server of web pages: it has no route of an API, and takes no POST."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


def test_a_web_server_that_is_no_api_is_named_as_one_without_its_page(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "quick", "max_tokens": 8}\n')
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WebServer) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}/v1"
        for flags, path, status in (((), "models", 404), (("--served-model", "m"), "completions", 501)):
            command = ("run", "--endpoint", url, *flags, "--prompts", tmp_path / "prompts.jsonl", "--samples", 1)
            code, _, err = call_here(*command, "--out", tmp_path / "runs")
            assert code == 2 and err.endswith(
                f"megatoken: --endpoint {url}: no OpenAI-compatible API: it answers /v1/{path} with HTTP {status} and a"
                " web page; give an address such as http://host:8000/v1\n"
            ), err
        web.shutdown()


@pytest.mark.timing
def test_peak_memory_is_named_as_the_clients(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "quick", "max_tokens": 8}\n')
    flags = ("--prompts", prompts, "--samples", 1, "--scenario", "offline", "--warm-up", 0.1)
    code, out, err = call_here("run", "--endpoint", server.url, *flags, "--out", tmp_path / "runs")
    assert code == 0, err
    assert "Peak memory of the" in out  # the table may break the line before its last word
    [run] = (tmp_path / "runs").iterdir()
    assert "Peak memory of the client" in (run / "report.html").read_text()


def certificate(folder: Path, host: str = "IP:127.0.0.1") -> tuple[Path, ssl.SSLContext]:
    """A certificate that its own key signed, and a server's context with it."""
    folder.mkdir()
    file, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=test", "-addext", f"subjectAltName={host}", "-keyout", key, "-out", file),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file, key)
    return file, context


def test_only_a_server_whose_certificate_is_trusted_gets_a_request(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "FAST_SECONDS", 1.0)
    trusted, own = certificate(tmp_path / "own")
    other_name, strange = certificate(tmp_path / "strange", "DNS:elsewhere.example")
    began = time.monotonic()
    with scripted_server(tls=strange) as one:
        for ca_file, message in (
            (None, "its certificate is not trusted: self-signed certificate; give endpoint.ca_file"),
            (other_name, r"not trusted: IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ):
            with pytest.raises(UsageError, match=message), connected(one.url, ca_file=ca_file and str(ca_file)):
                pass
        assert not one.heads
    # A server without TLS waits for the rest of a request, and so says nothing.
    with pytest.raises(UsageError, match=r"no answer.*timed out"), connected(server.url.replace("http", "https")):
        pass
    with scripted_server(tls=own) as secure, connected(secure.url, ca_file=str(trusted)) as target:
        assert {event.error for event in answered(target, prompts("ok", "quick")).values()} == {None}
        secure.stop()
        while any(not writer.transport.is_closing() for writer in secure.writers):
            time.sleep(0.01)
        with scripted_server(secure.port, tls=strange) as changed:
            last = answered(target, prompts("ok", "quick"))
            assert not changed.heads
    for event in last.values():
        assert "no connection (its certificate is not trusted: self-signed certificate; give" in str(event.error)
    assert time.monotonic() - began < LONGEST_SECONDS


class NoTls(socketserver.BaseRequestHandler):
    """What most servers without TLS say to a handshake."""

    def handle(self) -> None:
        self.request.recv(1)
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_the_wrong_scheme_is_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "FAST_SECONDS", 1.0)
    _, own = certificate(tmp_path / "own")
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), NoTls) as plain, scripted_server(tls=own) as secure:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        for url, message in (
            (f"https://127.0.0.1:{plain.server_address[1]}/v1", "it does not speak TLS; give http://"),
            (server.url.replace("http", "https"), "timed out after 1 s; if it does not speak TLS, give http://"),
            (secure.url.replace("https", "http"), "if it speaks TLS, give https://"),
        ):
            with pytest.raises(UsageError, match=message), connected(url):
                pass
        plain.shutdown()


def test_accuracy_of_a_server_without_token_ids_takes_those_of_the_text(server: Server, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "quick", "max_tokens": 8}\n' * 3)
    flags = ("--prompts", tmp_path / "prompts.jsonl", "--scenario", "offline", "--mode", "accuracy", "--warm-up", 0.1)
    model = model_folder(REFERENCE)
    code, _, err = call_here("run", "--endpoint", server.url, "--model", model, *flags, "--out", tmp_path / "runs")
    assert code == 0, err
    [run] = [read_run(path) for path in (tmp_path / "runs").iterdir()]
    assert "IDS_FROM_TEXT" in [note["code"] for note in run.result["notes"]]
    tokenizer = Tokenizer(model / "tokenizer.json")
    ids = tokenizer.encode("a b c d", add_special=False)
    assert run.result["output_tokens"] == 3 * len(ids)
    assert run.result["tpot_seconds"]["samples"] == 0  # answers came whole
    log = json.loads((run.path / "mlperf/mlperf_log_accuracy.json").read_text())
    assert np.frombuffer(bytes.fromhex(log[0]["data"]), np.int32).tolist() == ids


@pytest.mark.timing
def test_a_neighbour_loads_the_same_server_with_its_own_key_while_each_point_runs_again(
    server: Server, tmp_path: Path
) -> None:
    for name in ("quiet", "noisy"):
        (tmp_path / name).write_text(f"sk-{name}")
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"ok {name}", "max_tokens": 4}) + "\n")
    quick = "--warm-up 0.1 --settle 0.1 --endpoint.processes 1"
    other = f"--api-key-file {tmp_path}/noisy --prompts {tmp_path}/noisy.jsonl --concurrency 3 {quick}"
    own = (*quick.split(), "--api-key-file", tmp_path / "quiet", "--prompts", tmp_path / "quiet.jsonl", "--window", 1)
    command = ("sweep", "--endpoint", server.url, *own, "--concurrency", "1", "--out", tmp_path / "runs", "--json")
    code, out, err = call_here(*command, "--neighbour", other)
    assert code == 0, (err, out)
    document = json.loads(out)
    [row], [point], [shared] = (document[key] for key in ("isolation", "points", "shared_points"))
    assert document["neighbour"] == other
    assert 0 < row["score"] <= 1 and row["score"] == pytest.approx(
        min(
            1.0,
            shared["output_tokens_per_second"] / point["output_tokens_per_second"],
            point["ttft_seconds"]["p99"] / shared["ttft_seconds"]["p99"],
            point["tpot_seconds"]["p99"] / shared["tpot_seconds"]["p99"],
        )
    )
    sweep, others = sorted(path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert others.name == f"{sweep.name}-neighbour"
    assert row["unreliable"] == ["ttft_p99", "tpot_p99"]  # of so few requests
    assert "Isolation score" in (page := (sweep / "sweep.html").read_text()) and f"{precise(row['score'])}*" in page
    [noise] = [read_run(path) for path in others.glob("*/01-*")]
    assert noise.verdict is Verdict.INTERRUPTED and len(noise.requests) > 3
    assert {key for key in ("quiet", "noisy") if any(f"Bearer sk-{key}".encode() in head for head in server.heads)} == {
        *("quiet", "noisy")
    }
    code, _, err = call_here(*command, "--neighbour", "--concurrency 1 --nonsense 3")
    assert code == 2 and "--neighbour: it ended with code 2" in err and "nonsense" in err


def test_a_sweep_of_a_server_that_ends_before_the_window_says_so(server: Server, tmp_path: Path) -> None:
    prompts_file = tmp_path / "prompts.jsonl"
    prompts_file.write_text('{"prompt": "ok", "max_tokens": 4}\n')

    def end_server() -> None:
        while len(server.bodies) < 12:
            time.sleep(0.01)
        server.stop()

    ending = threading.Thread(target=end_server)
    ending.start()
    phases = ("--warm-up", 0.1, "--settle", LONGEST_SECONDS, "--window", 1)
    code, _, err = call_here(
        *("sweep", "--endpoint", server.url, "--prompts", prompts_file, "--concurrency", 2, *phases),
        *("--endpoint.processes", 1, "--out", tmp_path / "runs"),
    )
    ending.join()
    assert code == 1
    assert "the load ended before its window" in err and "Check that the target still answers" in err
