"""vLLM's server with random weights over the full range of their format, which draw the power of real ones.

PYTHONPATH=benchmarks python -m peers.run_vllm_server FOLDER --port 8000 [flags of `vllm serve`]
"""

from __future__ import annotations

import os
import sys

from peers.vllm_random_weights import environment

FLAGS = ["--load-format", "dummy", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]


def main() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *sys.argv[1:], *FLAGS]
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main()
