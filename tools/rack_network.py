"""Faults of a network that one machine can make: a Ray cluster whose nodes live in network namespaces of their own.

    python tools/rack_network.py [--samples N] [FAULT ...]      # root, `ip netns`, /dev/net/tun, gcc

A head and four nodes, each with an address of its own. What they send goes through a switch in a process of ours,
which loses, delays or drops frames: few kernels have `tc netem`. For each fault a run starts, the fault comes once
samples have ended, and the run folder is held against what must be true: every sample ended once, the right verdict.
Prints one line a fault; exit 0 when all held, 77 with the reason where the machine does not allow it.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from megatoken.errors import UsageError
from megatoken.runs.run import Run, read_run

SKIPPED = 77
NETWORK = "10.213.7"
NODES = ("head", "one", "two", "three", "four")
NOTICED_SECONDS = 10.0
PATIENCE_SECONDS = 600.0
SKEWED, SKEW_SECONDS = "one", 3
MONOTONIC_SKEW_SECONDS = 1_000_000  # no two machines were started at the same moment
SAMPLES = 2000  # some minutes on two cores; the fault must meet a run on its way
FRAME_BYTES = 65_536
TAP, SET_TAP = struct.pack("16sH22x", b"mt-%d", 0x0002 | 0x1000), 0x400454CA  # IFF_TAP | IFF_NO_PI, TUNSETIFF
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
    switch: int  # where to write what the switch is to do
    skew: tuple[str, ...] = ()  # what runs a command with other clocks

    def environment(self) -> dict[str, str]:
        """Of everything that runs here."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
        sources = str(Path(__file__).parents[1] / "src")
        return {**os.environ, **token, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}

    def inside(self, node: str, *command: str) -> list[str]:
        """A command line that runs another one on a node."""
        return ["ip", "netns", "exec", name_of(node), *command]

    def start_ray(self, node: str) -> None:
        """Starts Ray on a node, where it runs until all of the node is killed, and waits until it has joined."""
        address = address_of(node)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={address}"]
        command += [f"--node-name={node}", "--object-store-memory=80000000", "--disable-usage-stats"]
        if node == "head":
            command += ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
            command += [f"--temp-dir={self.folder}/ray"]
        else:
            command += [f"--address={address_of('head')}:6379", "--num-cpus=1"]
        with (self.folder / f"{node}.log").open("ab") as log:
            before = log.tell()
            self.processes[node] = subprocess.Popen(
                self.inside(node, *(self.skew if node == SKEWED else ()), *command),
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment(),
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"Ray runtime started" not in (self.folder / f"{node}.log").read_bytes()[before:]:
            if time.monotonic() > deadline or self.processes[node].poll() is not None:
                raise AssertionError(f"{node}: {(self.folder / f'{node}.log').read_text()[-500:]}")
            time.sleep(0.5)

    def stop_ray(self, node: str) -> None:
        """Kills everything of a node at once, as a power cut does."""
        for pid in subprocess.run(
            ["ip", "netns", "pids", name_of(node)], capture_output=True, text=True, check=False
        ).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if node in self.processes:
            self.processes.pop(node).wait()

    def shape(self, node: str, loss: float, delay_seconds: float) -> None:
        """Has the switch lose a share of what the node sends and is sent, and delay what it sends."""
        os.write(self.switch, f"{NODES.index(node)} {loss} {delay_seconds}\n".encode())


def run_switch(ports: list[int], commands: int) -> NoReturn:
    """Carries Ethernet frames between TAP devices until ``commands`` ends; see ``Network.shape``."""
    loss, delay_seconds = [0.0] * len(ports), [0.0] * len(ports)
    known: dict[bytes, int] = {}  # port by address
    late: list[tuple[float, int, int, bytes]] = []  # when due, order, port, frame
    order, text = count(), b""
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([*ports, commands], [], [], wait)
        while late and late[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(late)
            put(ports[port], frame)
        for source in ready:
            if source == commands:
                piece = os.read(commands, 4096)
                if not piece:
                    os._exit(0)
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    node, share, seconds = line.split()
                    loss[int(node)], delay_seconds[int(node)] = float(share), float(seconds)
                continue
            sender = ports.index(source)
            with suppress(OSError):  # the device is down
                frame = os.read(source, FRAME_BYTES)
                known[frame[6:12]] = sender
                receivers = [known[frame[:6]]] if frame[:6] in known else range(len(ports))
                for port in receivers:
                    if port == sender or random.random() < loss[sender] or random.random() < loss[port]:
                        continue
                    if delay_seconds[sender]:
                        heapq.heappush(late, (time.monotonic() + delay_seconds[sender], next(order), port, frame))
                    else:
                        put(ports[port], frame)


def put(port: int, frame: bytes) -> None:
    """Hands a frame to a device; one that is down takes none."""
    with suppress(OSError):
        os.write(port, frame)


def open_tap(node: str) -> int:
    """A node's network device, ``eth0`` in its namespace; the descriptor gives and takes frames."""
    port = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = fcntl.ioctl(port, SET_TAP, TAP)
    device = request[:16].rstrip(b"\0").decode()
    call("ip", "link", "set", device, "netns", name_of(node), "name", "eth0")
    return port


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
    built = Network(folder, {}, -1)
    try:
        ports = []
        for node in NODES:
            call("ip", "netns", "add", name_of(node))
            ports.append(open_tap(node))
            call("ip", "-n", name_of(node), "address", "add", f"{address_of(node)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", name_of(node), "link", "set", device, "up")
        commands, built.switch = os.pipe()
        if not os.fork():
            os.close(built.switch)
            run_switch(ports, commands)
        for port in (*ports, commands):
            os.close(port)
        yield built
    finally:
        for node in NODES:
            built.stop_ray(node)
        if built.switch >= 0:
            os.close(built.switch)
            os.wait()
        for node in NODES:
            subprocess.run(["ip", "netns", "del", name_of(node)], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


class Driver:
    """One run on the cluster, from the head's namespace."""

    def __init__(self, net: Network, name: str, samples: int) -> None:
        lengths = net.folder / "lengths.csv"
        lengths.write_text(LENGTHS)
        self.out = net.folder / "runs" / name
        command = [sys.executable, "-m", "megatoken", "run", "--rack", f"{address_of('head')}:6379"]
        command += ["--model", "tiny", "--lengths", str(lengths), "--samples", str(samples), "--warm-up", "1"]
        command += ["--engine.max-length", "128", "--engine.max-sequences", "2", "--out", str(self.out), "--json"]
        self.process = subprocess.Popen(
            net.inside("head", *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=net.environment()
        )

    def run(self) -> Run | None:
        """The run folder as it stands; None before there is one."""
        folders = list(self.out.glob("[!.]*")) if self.out.exists() else []
        with suppress(UsageError):
            return read_run(folders[0]) if folders else None
        return None

    def until(self, true: Callable[[Run], bool], seconds: float = PATIENCE_SECONDS) -> Run:
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
        _, messages = self.process.communicate(timeout=PATIENCE_SECONDS)
        run = self.run()
        if run is None:
            raise AssertionError(messages.decode(errors="replace")[-500:])
        return self.process.returncode, run, messages.decode(errors="replace")


def skew(net: Network, driver: Driver) -> int:
    """Nothing else: the clocks of a node are ahead in every run, the wall clock by 3 s, the monotonic one by days."""
    return 0


def loss(net: Network, driver: Driver) -> int:
    """5 % of what a node sends is lost, and of what it is sent."""
    net.shape("two", 0.05, 0.0)
    return 0


def latency(net: Network, driver: Driver) -> int:
    """What a node sends takes 200 ms longer."""
    net.shape("three", 0.0, 0.2)
    return 0


def cut(net: Network, driver: Driver) -> int:
    """Nothing comes from a node and nothing gets there until it counts as lost; then it is back."""
    driver.until(lambda run: len(run.requests) > 20)
    cut_at = time.time()
    net.shape("four", 1.0, 0.0)
    run = driver.until(lambda run: "four" in [entry["node"] for entry in run.result["rack"]["lost"]])
    net.shape("four", 0.0, 0.0)
    (lost,) = (entry for entry in run.result["rack"]["lost"] if entry["node"] == "four")
    noticed = datetime.fromisoformat(run.result["started_at"]).timestamp() + lost["at_seconds"] - cut_at
    print(f"cut: noticed after {noticed:.1f} s", flush=True)
    assert noticed < NOTICED_SECONDS, f"noticed after {noticed:.1f} s"
    return 4


def kill(net: Network, driver: Driver) -> int:
    """SIGKILL of everything on a node; the node comes back."""
    driver.until(lambda run: len(run.requests) > 20)
    net.stop_ray("two")
    net.start_ray("two")
    return 4


FAULTS: dict[str, Callable[[Network, Driver], int]] = {
    "skew": skew,
    "loss": loss,
    "latency": latency,
    "cut": cut,
    "kill": kill,
}


def check(code: int, run: Run, expected: int, samples: int, messages: str) -> str:
    """One line of what was found; AssertionError where it is not what must be."""
    ids = run.requests["sample_id"].to_pylist()
    rack: dict[str, Any] = run.result["rack"]
    assert rack["replicas"] == len(NODES) - 1, f"{rack['replicas']} replicas"
    assert sorted(ids) == list(range(samples)), f"{len(ids)} rows, {len(set(ids))} samples of {samples}"
    assert run.result["samples_completed"] == samples
    assert code == expected, f"exit {code}, {run.verdict}: {run.reasons} {messages[-300:]}"
    offsets = {entry["node"]: entry for entry in rack["clock_offsets"]}
    for node, offset in offsets.items():
        for clock, skew_seconds in (("wall", SKEW_SECONDS), ("monotonic", MONOTONIC_SKEW_SECONDS)):
            off = abs(offset[f"{clock}_seconds"] - skew_seconds * (node == SKEWED))
            assert off <= offset["uncertainty_seconds"] + 0.01, f"{node}: {clock} clock {off} s off"
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
    parser = argparse.ArgumentParser(description="Faults of a network, on one machine")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"{', '.join(FAULTS)}; all if none is named")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"of each run; default: {SAMPLES}")
    asked = parser.parse_args()
    if unknown := set(asked.faults) - set(FAULTS):
        parser.error(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("gcc"):
        print("skipped: namespaces need root, `ip` and gcc", file=sys.stderr)
        return SKIPPED
    failed = False
    try:
        with network() as net:
            library = net.folder / "skew.so"
            (net.folder / "skew.c").write_text(SKEW_SOURCE % SKEW_SECONDS)
            call("gcc", "-shared", "-fPIC", "-o", str(library), str(net.folder / "skew.c"), "-ldl")
            clocks = ("unshare", "--time", "--fork", f"--monotonic={MONOTONIC_SKEW_SECONDS}")
            net.skew = (*clocks, "env", f"LD_PRELOAD={library}")
            for node in NODES:
                net.start_ray(node)
            for name in asked.faults or FAULTS:
                driver = Driver(net, name, asked.samples)
                try:
                    expected = FAULTS[name](net, driver)
                    code, run, messages = driver.end()
                    print(f"{name}: held {check(code, run, expected, asked.samples, messages)}", flush=True)
                except (AssertionError, OSError) as error:
                    failed = True
                    print(f"{name}: FAILED {error}", flush=True)
                    driver.process.kill()
                    driver.process.communicate()
                for node in NODES:
                    net.shape(node, 0.0, 0.0)
                time.sleep(3)
    except OSError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return SKIPPED
    except AssertionError as error:
        print(f"no cluster: {error}", file=sys.stderr)
        return 1
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
