"""llama.cpp's own HTTP server, from the wheels of xllamacpp: ``python run_llama_cpp.py MODEL.gguf --port 8930``."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path


def main() -> None:
    """Serves until it gets SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--name", default="reference", help="of the model, as it is listed")
    parser.add_argument("--port", type=int, default=8930)
    parser.add_argument("--slots", type=int, default=8, help="sequences at once")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest sequence")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    import xllamacpp  # type: ignore[import-not-found]

    settings = xllamacpp.CommonParams()
    settings.model.path = str(options.model)
    settings.model_alias = {options.name}
    settings.port = options.port
    settings.n_parallel = options.slots
    settings.n_ctx = options.length * options.slots
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
    settings.cache_prompt = False
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
