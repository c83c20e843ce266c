"""What the client can hold, and what is said when a load was too much for it."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import pytest

from megatoken.analysis.statistics import Samples
from megatoken.harness.result import saturated_client
from megatoken.runs.tables import SampleRow, to_table
from megatoken.targets.endpoint.self_test import count, frame_server, process_capacity


def test_capacity_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    capacity = process_capacity()
    assert capacity.requests_per_second > 500 and capacity.frames_per_second > 2000
    [file] = (tmp_path / "megatoken").iterdir()
    file.write_text('{"requests_per_second": 1.0, "frames_per_second": 2.0}')
    assert process_capacity().requests_per_second == 1.0
    file.write_text("{oops")
    assert process_capacity().requests_per_second > 500


def test_a_client_that_resets_its_connection_leaves_the_server_to_the_next() -> None:
    with frame_server(4, interval=0.01) as address:
        for asked in (b"", b'POST / HTTP/1.1\r\n\r\n{"stream": true}'):
            gone = socket.create_connection((address.host, address.port))
            gone.sendall(asked)
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
            gone.close()
        with socket.create_connection((address.host, address.port), timeout=10) as next_one:
            next_one.sendall(b'POST / HTTP/1.1\r\n\r\n{"stream": true}')
            received = b""
            while b"[DONE]" not in received:
                received += next_one.recv(1 << 16)
        assert received.count(b"data: ") == 5


def test_a_test_in_which_no_answer_ends_in_time_goes_on_until_one_has() -> None:
    """Else the capacity is zero, is kept, and no later run can divide by it."""
    with frame_server(8) as address:
        counts = count(address, stream=True, streams=4, frames=8, seconds=0.0)
    assert counts.requests >= 1 and counts.frames >= 8


def test_a_saturated_client_says_how_many_processes_and_hosts_the_load_takes() -> None:
    # 100 answers of 100 tokens/s offered are 10,000 frames/s: 10 processes of 1,000 frames/s, twice of them to spare.
    rows = [SampleRow(at, 0, at / 100, at / 100, at / 100 + 1, at / 100 + 2, 4, 100, "length", "n") for at in range(50)]
    client = {"processes": 1, "cores": 4, "busy_share": 0.95, "core_wait_share": 0.1, "late_share": 0.0}
    client["self_test"] = {"requests_per_second": 500.0, "frames_per_second": 1000.0}
    facts = {"scenario": "server", "client": client, "target": {"stream": True}, "offered_samples_per_second": 100.0}
    samples = Samples.of(to_table(SampleRow, rows))
    [found] = saturated_client(facts, samples, None)
    assert (found["processes_needed"], found["hosts_needed"]) == (20, 5)
    assert "share the load between 5 hosts" in found["message"]
    [late] = saturated_client(facts | {"client": client | {"busy_share": 0.2, "late_share": 0.06}}, samples, None)
    assert "6.0 % of the looks" in late["message"]
    assert saturated_client(facts | {"client": client | {"busy_share": 0.2}}, samples, None) == []


def test_a_client_that_waited_for_cores_is_told_to_free_them_before_anything_else() -> None:
    """It used next to nothing of a core: more processes of it would wait for the same cores."""
    rows = [SampleRow(at, 0, at / 100, at / 100, at / 100 + 1, at / 100 + 2, 4, 100, "length", "n") for at in range(50)]
    client = {"processes": 1, "cores": 2, "busy_share": 0.008, "core_wait_share": 0.88, "late_share": 0.06}
    facts = {"scenario": "server", "client": client, "target": {"stream": True}, "offered_samples_per_second": 100.0}
    samples = Samples.of(to_table(SampleRow, rows))
    [found] = saturated_client(facts, samples, None)
    assert (found["processes_needed"], found["free_cores"]) == (1, 1)
    assert "first. The load takes 1 (endpoint.processes) on 1 free core;" in found["message"]
    assert "88.0 % of the time in which it wanted a core: stop other work on the client's mach" in found["message"]
    [alone] = saturated_client(facts | {"client": client | {"core_wait_share": 0.01}}, samples, None)
    assert "stop other work" not in alone["message"] and "use 2 on free cores" in alone["message"]
