"""One thread, no progress bars and no GPU, for the tests and the processes they start; set before PyTorch is loaded.

``-m gpu`` runs the tests that need a GPU. All others say what a CPU does and must not find one; Triton's kernels are
interpreted there.
"""

import functools
import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import forks
from examples import ALL, examples
from unread_files import pytest_sessionfinish as pytest_sessionfinish

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a process that has to compile our modules starts a second later
sys.dont_write_bytecode = False
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
if "gpu" not in sys.argv and "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit what was decided
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

gc.disable()  # nothing of what is imported and collected is garbage, and to look for it takes a third of that time

# How long an example takes says something about what else the machine does.
settings.register_profile(
    "any-machine",
    deadline=None,
    derandomize=not ALL,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any-machine")

LONGEST = (
    *("serve/test_load_tools.py", "rack/", "submission/", "test_cli_run.py", "audit/test_run_folder_fields.py"),
    *("harness/test_scenarios.py", "serve/test_processes.py", "serve/test_serve_rack.py", "accuracy/test_gate.py"),
    *("reference_model/", "hardware/qualify/test_session.py", "audit/test_parallel.py", "harness/test_soak.py"),
    *("accuracy/test_compliance_run.py", "test_cli_generate.py", "harness/", "audit/", "test_docs.py"),
)
"""How the paths of the files that take longest begin, the longest first."""
TOGETHER = ("tests/rack/", "tests/submission/")
"""Folders whose files share what takes long to make: a Ray cluster, submissions."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: with ``--dist loadfile`` a worker takes whole files, and none should end alone.

    A test that measures real time is run again when it fails, twice at most: other work may have held it up.
    """
    folder = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(folder).as_posix()
        return next((place for place, begin in enumerate(LONGEST) if path.startswith(begin)), len(LONGEST))

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))


def pytest_collection_finish() -> None:
    """What was imported and collected stays, and so does the checkout, which git need not look at for every run.

    A tenth of the samples shows what a client can send, here as in ``forks.py``; every run with limits measures it.
    """
    from megatoken.hardware import inventory
    from megatoken.harness import client_capacity

    client_capacity.SAMPLES = forks.CLIENT_SAMPLES
    inventory.source_revision = functools.cache(inventory.source_revision)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # as in processes that measure
    gc.enable()


def pytest_unconfigure() -> None:
    """Or libraries tell of leaks."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` a worker takes some folders whole."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))

    return Scheduling(config, log)
