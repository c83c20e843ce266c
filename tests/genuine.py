"""Genuine logs: the real LoadGen against a system that answers fast, in a process of its own (one test a process).

python genuine.py FOLDER SCENARIO MODE MODEL ROWS CONFIGURATION
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_support import ENVIRONMENT, TIMEOUT_SECONDS
from forks import forked

Make = Callable[..., Path]

CONFIGURATION = """*.*.min_duration = 200
*.Server.target_qps = 4000
*.SingleStream.target_latency = 0.2
*.MultiStream.target_latency = 1
*.Offline.target_qps = 4000
*.*.min_query_count = 700
*.*.performance_sample_count_override = 64
"""


def run(folder: Path, scenario: str, mode: str, model: str, rows: int, configuration: str) -> None:
    """Runs LoadGen in this process; ``folder`` gets its logs and the user.conf."""
    import mlperf_loadgen as lg
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    user_conf = folder / "user.conf"
    user_conf.write_text(configuration)
    settings = lg.TestSettings()
    code = settings.FromConfig(str(user_conf), model, scenario)
    assert code == 0, code
    settings.scenario = getattr(lg.TestScenario, scenario)
    settings.mode = getattr(lg.TestMode, mode)
    logs = lg.LogSettings()
    logs.enable_trace = False
    logs.log_output.outdir = str(folder)
    logs.log_output.copy_summary_to_stdout = False
    timed = mode == "PerformanceOnly"

    def issue(samples: list[lg.QuerySample]) -> None:
        for place, sample in enumerate(samples):
            if scenario == "Offline" and place == 1 and timed:  # the rest of the query takes as long as is asked for
                time.sleep(settings.min_duration_ms / 1e3)
            elif scenario == "SingleStream" and timed:
                time.sleep(0.0003)
            tokens = np.arange(50 + sample.index % 7, dtype="<i4")
            if settings.use_token_latencies and scenario != "Offline":
                lg.FirstTokenComplete([lg.QuerySampleResponse(sample.id, tokens.ctypes.data, 4)])
            response = (sample.id, tokens.ctypes.data, tokens.nbytes)
            if settings.use_token_latencies:
                response = (*response, len(tokens))
            lg.QuerySamplesComplete([lg.QuerySampleResponse(*response)])

    sut = lg.ConstructSUT(issue, lambda: None)
    library = lg.ConstructQSL(rows, rows, lambda _: None, lambda _: None)
    lg.StartTestWithLogSettings(sut, library, settings, logs, str(user_conf / "audit"))


def make(
    folder: Path,
    scenario: str = "Offline",
    mode: str = "PerformanceOnly",
    model: str = "llama2-70b",
    rows: int = 64,
    configuration: str = CONFIGURATION,
) -> Path:
    """The same in a process of its own."""
    command = (__file__, folder, scenario, mode, model, rows, configuration)
    with forked(*command, environment=ENVIRONMENT) as process:
        _, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    return folder


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Genuine logs of the installed LoadGen, each kind made once a session."""
    made: dict[tuple[str | int, ...], Path] = {}

    def original(
        scenario: str = "Offline",
        mode: str = "PerformanceOnly",
        model: str = "llama2-70b",
        more: str = "",
        rows: int = 64,
    ) -> Path:
        key = (scenario, mode, model, more, rows)
        if key not in made:
            folder = tmp_path_factory.mktemp("genuine") / "logs"
            made[key] = make(folder, scenario, mode, model, rows, CONFIGURATION + more)
        return made[key]

    return original


if __name__ == "__main__":
    run(Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]), sys.argv[6])
