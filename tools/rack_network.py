"""Faults of a network that one machine can make: a Ray cluster whose nodes live in network namespaces of their own.

    python tools/rack_network.py [FAULT ...]      # root, `ip netns`; about a minute a fault

A head and four nodes, each with an address of its own on one bridge. For each fault a run starts, the fault comes once
samples have ended, and the run folder is held against what must be true: every sample ended once, the right verdict.
Prints one line a fault; exit 0 when all held, 77 with the reason where the machine does not allow it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.errors import UsageError
from megatoken.results import Run, read_run

SKIPPED = 77
NETWORK = "10.213.7"
NODES = ("head", "one", "two", "three", "four")
DEAD_AFTER_SECONDS = 4.0
SKEW_SECONDS = 3
SAMPLES = 400
LENGTHS = "input_tokens,output_tokens\n" + "12,40\n20,24\n8,56\n30,32\n" * 25
SKEW_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += %d;
    return result;
}
"""


@dataclass
class Network:
    """Namespaces, one for each node, and Ray's daemons in them."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def environment(self) -> dict[str, str]:
        """Of everything that runs here."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
        sources = str(Path(__file__).parents[1] / "src")
        return {**os.environ, **token, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}

    def inside(self, node: str, *command: str, preload: str = "") -> list[str]:
        """A command line that runs another one on a node."""
        prefix = ["env", f"LD_PRELOAD={preload}"] if preload else []
        return ["ip", "netns", "exec", name_of(node), *prefix, *command]

    def start_ray(self, node: str, preload: str = "") -> None:
        """Starts Ray on a node; it runs until its process group is killed."""
        address = address_of(node)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"]
        command += [f"--node-name={node}", "--object-store-memory=80000000", "--disable-usage-stats"]
        if node == "head":
            command += ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
            command += [f"--temp-dir={self.folder}/ray"]
        else:
            command += [f"--address={address_of('head')}:6379", "--num-cpus=1"]
        with (self.folder / f"{node}.log").open("ab") as log:
            self.processes[node] = subprocess.Popen(
                self.inside(node, *command, preload=preload),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment(),
            )

    def stop_ray(self, node: str) -> None:
        """Kills everything of a node at once, as a power cut does."""
        for pid in subprocess.run(
            ["ip", "netns", "pids", name_of(node)], capture_output=True, text=True, check=False
        ).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if node in self.processes:
            self.processes.pop(node).wait()

    def shape(self, node: str, *how: str) -> None:
        """Has the node's link lose or delay what it sends."""
        call("tc", "-n", name_of(node), "qdisc", "replace", "dev", "eth0", "root", "netem", *how)

    def unshape(self, node: str) -> None:
        """Gives the link back."""
        call("tc", "-n", name_of(node), "qdisc", "del", "dev", "eth0", "root")

    def link(self, node: str, state: str) -> None:
        """Takes the node's link ``down`` or ``up``."""
        call("ip", "-n", name_of(node), "link", "set", "eth0", state)


def name_of(node: str) -> str:
    """The node's namespace."""
    return f"mt-{node}"


def address_of(node: str) -> str:
    """The node's address."""
    return f"{NETWORK}.{NODES.index(node) + 1}"


def call(*command: str) -> None:
    """Runs a command of the system; its own words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def network() -> Iterator[Network]:
    """The bridge and the namespaces, taken away afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rack-"))
    built = Network(folder, {})
    try:
        call("ip", "netns", "add", name_of("bridge"))
        call("ip", "-n", name_of("bridge"), "link", "add", "bridge0", "type", "bridge")
        call("ip", "-n", name_of("bridge"), "link", "set", "bridge0", "up")
        for node in NODES:
            call("ip", "netns", "add", name_of(node))
            pair = ("link", "add", "eth0", "netns", name_of(node), "type", "veth", "peer", "name", node)
            call("ip", *pair, "netns", name_of("bridge"))
            call("ip", "-n", name_of("bridge"), "link", "set", node, "master", "bridge0", "up")
            call("ip", "-n", name_of(node), "address", "add", f"{address_of(node)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", name_of(node), "link", "set", device, "up")
        yield built
    finally:
        for node in NODES:
            built.stop_ray(node)
        for node in (*NODES, "bridge"):
            subprocess.run(["ip", "netns", "del", name_of(node)], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


class Driver:
    """One run on the cluster, from the head's namespace."""

    def __init__(self, net: Network, name: str) -> None:
        lengths = net.folder / "lengths.csv"
        lengths.write_text(LENGTHS)
        self.out = net.folder / "runs" / name
        command = [sys.executable, "-m", "megatoken", "run", "--rack", f"{address_of('head')}:6379"]
        command += ["--model", "tiny", "--lengths", str(lengths), "--samples", str(SAMPLES), "--warm-up", "1"]
        command += ["--engine.max-length", "128", "--rack.dead-after-seconds", str(DEAD_AFTER_SECONDS)]
        command += ["--out", str(self.out), "--json"]
        self.process = subprocess.Popen(
            net.inside("head", *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=net.environment()
        )

    def run(self) -> Run | None:
        """The run folder as it stands; None before there is one."""
        folders = list(self.out.glob("[!.]*")) if self.out.exists() else []
        with suppress(UsageError):
            return read_run(folders[0]) if folders else None
        return None

    def until(self, true: Callable[[Run], bool], seconds: float = 120) -> Run:
        """Waits until something is true of the run folder."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            run = self.run()
            if run is not None and true(run):
                return run
            time.sleep(0.2)
        raise AssertionError("the run ended, or nothing came, before the fault could be made")

    def end(self) -> tuple[int, Run, str]:
        """Exit code, run folder, what was said on standard error."""
        _, messages = self.process.communicate(timeout=300)
        run = self.run()
        if run is None:
            raise AssertionError(messages.decode(errors="replace")[-500:])
        return self.process.returncode, run, messages.decode(errors="replace")


def kill(net: Network, driver: Driver) -> set[int]:
    """SIGKILL of everything on a node; the node comes back."""
    driver.until(lambda run: len(run.requests) > 20)
    net.stop_ray("one")
    net.start_ray("one")
    return {4}


def cut(net: Network, driver: Driver) -> set[int]:
    """The link of a node is down until it counts as lost, then up again."""
    driver.until(lambda run: len(run.requests) > 20)
    began = time.monotonic()
    net.link("two", "down")
    driver.until(lambda run: bool(run.result.get("rack", {}).get("lost")))
    noticed = time.monotonic() - began
    net.link("two", "up")
    print(f"  link cut noticed after {noticed:.1f} s", file=sys.stderr)
    assert noticed < 10, f"noticed after {noticed:.1f} s"
    return {4}


def loss(net: Network, driver: Driver) -> set[int]:
    """5 % of what a node sends is lost."""
    net.shape("three", "loss", "5%")
    return {0}


def latency(net: Network, driver: Driver) -> set[int]:
    """What a node sends takes 200 ms longer."""
    net.shape("four", "delay", "200ms")
    return {0}


def skew(net: Network, driver: Driver) -> set[int]:
    """The wall clock of a node is ahead by 3 s."""
    return {0}


FAULTS: dict[str, Callable[[Network, Driver], set[int]]] = {
    "kill": kill,
    "cut": cut,
    "loss": loss,
    "latency": latency,
    "skew": skew,
}


def check(name: str, code: int, run: Run, expected: set[int], messages: str) -> str:
    """One line of what was found; AssertionError where it is not what must be."""
    ids = run.requests["sample_id"].to_pylist()
    rack: dict[str, Any] = run.result["rack"]
    assert sorted(ids) == list(range(SAMPLES)), f"{len(ids)} rows, {len(set(ids))} samples of {SAMPLES}"
    assert run.result["samples_completed"] == SAMPLES
    assert code in expected, f"exit {code}, {run.verdict}: {run.reasons} {messages[-300:]}"
    offsets = {entry["node"]: entry for entry in rack["clock_offsets"]}
    ahead = {node: offset["wall_seconds"] for node, offset in offsets.items()}
    for node, seconds in ahead.items():
        truth = SKEW_SECONDS if (name, node) == ("skew", "one") else 0
        assert abs(seconds - truth) <= offsets[node]["uncertainty_seconds"] + 0.01, f"{node}: offset {seconds}"
    first, last = run.requests["first_token_seconds"].to_pylist(), run.requests["last_token_seconds"].to_pylist()
    assert all(
        0 <= one <= other <= run.result["duration_seconds"] + 1e-6 for one, other in zip(first, last, strict=True)
    )
    lost = [f"{entry['node']} ({entry['cause']}, {entry['samples_returned']} back)" for entry in rack["lost"]]
    joined = [entry["node"] for entry in rack["joined"]]
    widest = max(entry["uncertainty_seconds"] for entry in offsets.values())
    found = {"verdict": run.verdict, "samples": len(ids), "share_left": rack["share_left"], "lost": lost}
    return json.dumps(found | {"joined": joined, "offset_uncertainty_ms": round(widest * 1e3, 2)})


def main() -> int:
    """Runs the faults named on the command line, or all."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("skipped: namespaces need root, `ip` and `tc`", file=sys.stderr)
        return SKIPPED
    failed = False
    try:
        with network() as net:
            library = net.folder / "skew.so"
            (net.folder / "skew.c").write_text(SKEW_SOURCE % SKEW_SECONDS)
            call("gcc", "-shared", "-fPIC", "-o", str(library), str(net.folder / "skew.c"), "-ldl")
            for node in NODES:
                net.start_ray(node)
                time.sleep(8 if node == "head" else 1)
            time.sleep(8)
            for name in sys.argv[1:] or list(FAULTS):
                if name == "skew":
                    net.stop_ray("one")
                    net.start_ray("one", preload=str(library))
                    time.sleep(12)
                driver = Driver(net, name)
                try:
                    expected = FAULTS[name](net, driver)
                    code, run, messages = driver.end()
                    print(f"{name}: held {check(name, code, run, expected, messages)}", flush=True)
                except (AssertionError, OSError) as error:
                    failed = True
                    print(f"{name}: FAILED {error}", flush=True)
                    driver.process.kill()
                    driver.process.communicate()
                for node in ("three", "four"):
                    with suppress(OSError):
                        net.unshape(node)
                time.sleep(3)
    except OSError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
