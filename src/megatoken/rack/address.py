"""Finds the Ray cluster that a driver connects to and checks it: Ray itself would wait for minutes before it fails."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from megatoken.errors import UsageError

REACH_SECONDS = 2.0
ANSWER_SECONDS = 5.0  # a head that is silent for so long is treated as down; Ray itself waits for minutes
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # empty SETTINGS (RFC 9113, 3.4, 6.5)
SETTINGS_FRAME, FRAME_HEAD_BYTES = 4, 9
START = "RAY_AUTH_MODE=token ray start"  # named in full: whether Ray asks for its token must be the same on both sides


def find_cluster(address: str, note: Callable[[str], None]) -> str | None:
    """The address of the cluster to connect to; None if ``auto`` finds none.

    Raises:
        UsageError: the address does not answer, or no node of the cluster runs on this machine.
    """
    named = os.environ.get("RAY_ADDRESS", "auto")
    asked = address if address != "auto" else named
    if asked == "local":
        return None
    if asked != "auto":
        where, fix = ("", "give auto as the address") if address != "auto" else (" (RAY_ADDRESS)", "unset RAY_ADDRESS")
        if not answers(asked):
            raise UsageError(f"no Ray cluster answers at {asked}{where}; start one with: {START} --head, or {fix}")
        if _node_here(asked) is None:
            raise UsageError(
                f"no node of the Ray cluster at {asked}{where} runs on this machine; start one with: "
                f"{START} --address={asked}, or {fix}"
            )
        return asked
    left = _address_file()
    try:
        asked = left.read_text().strip()
    except OSError:
        return None
    if answers(asked):
        if _node_here(asked) is not None:
            return asked
        note(f"no node of the Ray cluster at {asked} (from {left}) runs here; using this machine alone")
    else:
        note(f"no Ray cluster answers at {asked} (from {left}); using this machine alone")
    return None


def _address_file() -> Path:
    """The file in which `ray start` stores the address."""
    folder = os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))
    return Path(folder, "ray", "ray_current_cluster")


def answers(address: str) -> bool:
    """Whether a gRPC server, such as Ray's head, answers there: a stopped process still accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True  # it answers only clients with its keys
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(HTTP2_PREFACE)
            head = b""
            while len(head) < FRAME_HEAD_BYTES and (part := connection.recv(FRAME_HEAD_BYTES - len(head))):
                head += part
            return len(head) == FRAME_HEAD_BYTES and head[3] == SETTINGS_FRAME
    except (OSError, ValueError, OverflowError):
        return False


def check_token(address: str) -> None:
    """Refuses a token that only one side has: Ray itself tries for 20 s and then does not report why.

    Raises:
        UsageError: ``RAY_AUTH_MODE`` is not that of the cluster's node on this machine.
    """
    node = _node_here(address)
    try:
        theirs = {} if node is None else node.environ()
    except psutil.Error:  # another user's
        return
    wants, has = (env.get("RAY_AUTH_MODE", "").lower() == "token" for env in (theirs, os.environ))
    if wants and not has:
        raise UsageError(
            f"the Ray cluster at {address} requires its token; set RAY_AUTH_MODE=token for this command too, and "
            "RAY_AUTH_TOKEN unless ~/.ray/auth_token is the cluster's"
        )
    if has and not wants:
        raise UsageError(
            f"the Ray cluster at {address} uses no token, but RAY_AUTH_MODE is token here; start it with: "
            f"{START} --head, or unset RAY_AUTH_MODE"
        )


def _node_here(address: str) -> psutil.Process | None:
    """A raylet of that cluster on this machine: a driver needs one, and Ray waits a minute for it."""
    port = address.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or ()).split()
        if words and Path(words[0]).name.startswith("raylet") and process.info["status"] != psutil.STATUS_STOPPED:
            heads = [word for word in words if word.startswith("--gcs-address=")]
            if any(head.endswith(f":{port}") for head in heads):  # a host has many names
                return process
    return None
