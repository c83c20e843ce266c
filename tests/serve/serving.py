"""Real ``megatoken serve`` processes for tests, and plain requests to them."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120
END_SECONDS = 60


@dataclass
class Reply:
    """An answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after a check of its shape."""
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and "\n" not in error["message"]
        return error

    def events(self) -> list[Any]:
        """Data of a stream's events, without the last, which is DONE."""
        data = [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(one) for one in data[:-1]]


@dataclass
class Served:
    """A server that runs."""

    process: subprocess.Popen[str]
    port: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Reply:
        return self.request("POST", path, json.dumps(body).encode())


@contextmanager
def serving(*flags: str) -> Iterator[Served]:
    """Start a server on a free port; afterwards stop it as an operator does, and expect a clean end."""
    command = [sys.executable, "-m", "megatoken", "serve", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    served = Served(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            served.log.append(line.rstrip("\n"))
            if found := re.search(r"serving \S+ on http://127\.0\.0\.1:(\d+)", line):
                served.port = int(found[1])
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_SECONDS) and served.port, served.log
        yield served
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0, served.log
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def no_fault(log: list[str]) -> bool:
    """Whether the log has no traceback and no answer of 500."""
    return not any("Traceback" in line or "status=500" in line or "failed" in line for line in log)


REFERENCE_MODEL = Path(__file__).parents[2] / "src/megatoken/data/reference_model"
