"""What stands before a run: it takes no longer than what it looks at."""

import subprocess
import sys

import pytest

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS
from megatoken.engine.config import REFERENCE


@pytest.mark.parametrize("model", ["llama2-70b", REFERENCE])
def test_a_plan_for_gpus_that_are_not_here_needs_no_pytorch(model: str) -> None:
    program = f"""
import sys
from megatoken.config import load_run_config
from megatoken.engine.checkpoint import open_model
from megatoken.engine.config import EngineConfig
from megatoken.engine.memory import plan_memory_of
from megatoken.harness.prepare import prepare
from megatoken.targets.backend import engine_model, model_files, tokenizer_of
from megatoken.targets.factory import open_backend

flags = {{"model": "{model}", "rack.cluster": "auto", "rack.simulated_gpu": "H200"}}
config = load_run_config(None, flags)
source = open_model("{model}")
memory = plan_memory_of(source.config, EngineConfig(precision="bf16"), "cuda", 10**12)

class Backend:
    def served(self): return engine_model(config, source, memory, model_files(config, source))
    def tokenizer(self): return tokenizer_of(config.model)

print(prepare(config, Backend()).describe())
assert "torch" not in sys.modules, "PyTorch was loaded"
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "threads: null" in done.stdout
