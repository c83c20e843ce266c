"""Client processes and the limit of open files, which says nothing against a server."""

from __future__ import annotations

import resource
from contextlib import ExitStack
from pathlib import Path

from endpoint_support import answered, connected, prompts
from scripted_server import scripted_server

from megatoken.targets.endpoint.clients import LocalProcess

FEW = 40  # files


def test_a_client_process_opens_more_connections_than_its_soft_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        server = stack.enter_context(scripted_server())
        few = (
            max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + FEW
        )  # the process of the tests has some of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            target = stack.enter_context(connected(server.url))  # starts the process
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        last = answered(target, prompts(*(f"ok {at}" for at in range(2 * few))))
    assert {event.error for event in last.values()} == {None}
    assert server.most_open > few


def test_a_client_process_without_files_says_so_and_no_server_is_lost() -> None:
    with scripted_server() as server, scripted_server() as other, connected(server.url, other.url) as target:
        client = target._clients.first()
        assert isinstance(client, LocalProcess)
        resource.prlimit(client.process.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
        last = answered(target, prompts(*(f"ok {at}" for at in range(2 * FEW))))
        outcome = target.outcome(0)
    assert outcome["endpoints"]["lost"] == []
    failed = [event.error for event in last.values() if event.error is not None]
    assert 0 < len(failed) < 2 * FEW
    assert all("too many open files" in error and "ulimit -n" in error for error in failed)
    assert outcome["endpoints"]["failed"]["answered"]
