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
from megatoken.harness.rack import open_rack

flags = {{"model": "{model}", "rack.cluster": "auto", "rack.simulated_gpu": "H200"}}
config = load_run_config(None, flags)
memory = plan_memory_of(open_model("{model}").config, EngineConfig(precision="bf16"), "cuda", 10**12)
print(prepare(config, memory).describe())
assert "torch" not in sys.modules, "PyTorch was loaded"
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRONMENT, timeout=TIMEOUT_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "threads: null" in done.stdout
