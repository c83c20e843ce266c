"""One server for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from serving import Served, no_fault, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """The reference model in full precision, so that answers repeat."""
    with serving("--precision", "fp32", "--trust-request-chat-template", "true") as served:
        yield served
    assert no_fault(served.log), served.log


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened
