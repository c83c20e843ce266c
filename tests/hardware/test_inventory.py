"""What the inventory tells about the machine the tests run on."""

import json
import os
import subprocess
import sys
from importlib import metadata, util

import numpy as np
import pytest

from megatoken import __version__
from megatoken.hardware.inventory import gpus, peak_memory_bytes, source_revision, take_inventory


def test_the_inventory_is_json_and_knows_this_machine():
    inventory = take_inventory()
    assert json.loads(json.dumps(inventory, allow_nan=False)) == inventory
    assert inventory["hostname"] == os.uname().nodename
    assert inventory["packages"]["megatoken"] == __version__
    assert inventory["packages"]["torch"] == metadata.version("torch")
    assert inventory["packages"]["mlcommons-loadgen"] == metadata.version("mlcommons-loadgen")
    assert 1 <= inventory["cpu"]["usable_cores"] <= inventory["cpu"]["logical_cores"]
    assert 0 < inventory["memory"]["available_bytes"] <= inventory["memory"]["total_bytes"]


def test_no_secret_of_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_tell")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    inventory = take_inventory()
    assert "hf_do_not_tell" not in json.dumps(inventory)
    assert inventory["variables"]["OMP_NUM_THREADS"] == "3"
    assert inventory["variables"]["GOMP_SPINCOUNT"] == "1000"


def test_peak_memory_grows_with_what_is_touched_and_never_shrinks():
    before = peak_memory_bytes()
    block = np.ones(64 * 2**20 // 8)
    after = peak_memory_bytes()
    assert after - before > 32 * 2**20 or after > 2 * block.nbytes
    del block
    assert peak_memory_bytes() > after - 2**20  # the kernel counts pages in batches per core


@pytest.fixture
def checkout(tmp_path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    package = tmp_path / "package"
    package.mkdir()
    (package / "module.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_the_revision_of_a_checkout(checkout):
    clean = source_revision(checkout / "package")
    assert len(clean["revision"]) == 40
    assert clean["modified"] is False
    (checkout / "package" / "module.py").write_text("2")
    assert source_revision(checkout / "package") == clean | {"modified": True}


def test_the_index_of_a_checkout_is_only_read(checkout):
    os.utime(checkout / "package" / "module.py", (1, 1))  # git status would write the new time into the index
    before = (checkout / ".git" / "index").read_bytes()
    assert source_revision(checkout / "package")["modified"] is False
    assert (checkout / ".git" / "index").read_bytes() == before


def test_a_package_installed_inside_a_checkout_is_not_the_checkout(checkout, tmp_path_factory):
    installed = checkout / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "module.py").write_text("1")
    assert source_revision(installed) is None
    assert source_revision(tmp_path_factory.mktemp("bare")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not util.find_spec("pynvml"), reason="nvidia-ml-py is not installed")
def test_gpus_are_told_with_their_facts():
    found = gpus()
    if not found:
        pytest.skip("no NVIDIA GPU")
    for index, gpu in enumerate(found):
        assert gpu["index"] == index
        assert gpu["memory_bytes"] > 2**30
        assert gpu["name"]
        assert gpu["driver_version"]
        assert gpu["uuid"].startswith("GPU-")


def test_without_nvidia_ml_py_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == []
