"""Requests through client processes of two hosts: how late each token's time is against the server's own record.

``python host_times.py CLUSTER`` prints it as JSON. Ray keeps threads in a process that uses it.
The server is in this process, so that its clock is the driver's.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from scripted_server import scripted_server

from megatoken.config import RunConfig
from megatoken.engine.request import Request
from megatoken.harness.progress import Progress
from megatoken.targets.endpoint.backend import EndpointBackend

REQUESTS, TOKENS = 24, 60
TIMEOUT_SECONDS = 60.0

with scripted_server() as server:
    endpoint = {"urls": server.url, "hosts": sys.argv[1], "processes": 2, "timeout_seconds": TIMEOUT_SECONDS}
    config = RunConfig(scenario="server", endpoint=endpoint)
    with EndpointBackend(config, Progress(quiet=True)).open() as backend, backend.load() as target:
        target.begin()
        given, ended = {}, {}
        for at in range(REQUESTS):
            given[at] = time.monotonic_ns()
            target.submit(at, Request(f"ok {at}", max_tokens=TOKENS))
        first = {}
        while target.state().in_flight:
            for event in target.poll(0.05):
                assert event.error is None, event.error
                if event.first_ns is not None:
                    first.setdefault(event.sample_id, event.first_ns)
                if event.finish_reason is not None:
                    ended[event.sample_id] = event
        client = target.outcome(0)["client"]
late = []
for at, event in ended.items():
    times, sent = event.token_times_ns, np.array(server.sent_ns[f"ok {at}"])
    assert len(times) == TOKENS and first[at] == event.first_ns == times[0], at
    assert given[at] <= event.sent_ns <= times[0], at
    late += ((times - sent) / 1e9).tolist()
print(json.dumps({"late": late, "client": client}))
