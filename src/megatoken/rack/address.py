"""Which Ray cluster a driver connects to, and whether it is any use: Ray itself would wait for minutes to find out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from megatoken.errors import UsageError

REACH_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # for a head on a busy machine to greet; Ray itself waits for minutes for one that is stopped
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # and empty SETTINGS (RFC 9113, 3.4 and 6.5)
SETTINGS_FRAME, FRAME_HEAD_BYTES = 4, 9


def find_cluster(address: str, note: Callable[[str], None]) -> str | None:
    """The cluster to connect to; None where ``auto`` finds none.

    Raises:
        UsageError: the address does not answer, or this machine has no part in the cluster.
    """
    named = os.environ.get("RAY_ADDRESS", "auto")
    asked = address if address != "auto" else named
    if asked == "local":
        return None
    if asked != "auto":
        where, mend = ("", "give --rack auto") if address != "auto" else (", the RAY_ADDRESS", "unset it")
        if not answers(asked):
            raise UsageError(f"no Ray cluster answers at {asked}{where}; start one with: ray start --head, or {mend}")
        if not has_node_here(asked):
            raise UsageError(
                f"no node of the Ray cluster at {asked}{where} runs on this machine; start one with: "
                f"ray start --address={asked}, or {mend}"
            )
        return asked
    left = _address_file()
    try:
        asked = left.read_text().strip()
    except OSError:
        return None
    if answers(asked):
        if has_node_here(asked):
            return asked
        note(f"no node of the Ray cluster at {asked}, which {left} names, runs here; takes this machine alone")
    else:
        note(f"no Ray cluster answers at {asked}, which {left} names; takes this machine alone")
    return None


def _address_file() -> Path:
    """Where `ray start` leaves the address."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(folder, "ray", "ray_current_cluster")


def answers(address: str) -> bool:
    """Whether a gRPC server greets there, as Ray's head does: a process that is stopped still takes connections."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # then it greets only those with its keys
                return True
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(GREETING)
            head = b""
            while len(head) < FRAME_HEAD_BYTES and (part := connection.recv(FRAME_HEAD_BYTES - len(head))):
                head += part
            return len(head) == FRAME_HEAD_BYTES and head[3] == SETTINGS_FRAME
    except (OSError, ValueError, OverflowError):
        return False


def has_node_here(address: str) -> bool:
    """Whether a raylet of that cluster runs on this machine: a driver needs one, and Ray waits a minute for it."""
    port = address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ()).split()
        if words and Path(words[0]).name.startswith("raylet") and process.info["status"] != psutil.STATUS_STOPPED:
            heads = [word for word in words if word.startswith("--gcs-address=")]
            if any(head.endswith(f":{port}") for head in heads):  # a host has many names
                return True
    return False
