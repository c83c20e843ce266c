"""What the inventory tells about the machine the tests run on."""

import json
import os
import subprocess
import sys
from importlib import metadata, util

import numpy as np
import pytest

from megatoken import __version__
from megatoken.hardware import inventory
from megatoken.hardware.inventory import gpus, peak_memory_bytes, source_revision, take_inventory


def test_the_inventory_is_json_and_knows_this_machine():
    found = take_inventory()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["hostname"] == os.uname().nodename
    assert found["packages"]["megatoken"] == __version__
    assert found["packages"]["torch"] == metadata.version("torch")
    assert found["packages"]["mlcommons-loadgen"] == metadata.version("mlcommons-loadgen")
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["logical_cores"]
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]


@pytest.mark.parametrize(
    ("processor", "vendor", "product", "virtual"),
    [
        ("flags\t: fpu avx2 hypervisor", None, None, True),
        ("flags\t: fpu avx2", "Dell Inc.", "PowerEdge R760", False),
        ("Features\t: asimd bf16", "Microsoft Corporation", "Virtual Machine", True),
        ("Features\t: asimd bf16", "QEMU", "QEMU KVM Virtual Machine", True),
        ("Features\t: asimd bf16", "NVIDIA", "Grace CPU Superchip", False),
        ("Features\t: asimd bf16", None, None, False),
    ],
)
def test_a_virtual_machine_is_known_by_flags_or_product(processor, vendor, product, virtual, tmp_path, monkeypatch):
    files = [tmp_path / "sys_vendor", tmp_path / "product_name"]
    for file, text in zip(files, (vendor, product), strict=True):
        if text is not None:
            file.write_text(f"{text}\n")
    monkeypatch.setattr(inventory, "PRODUCT_FILES", files)
    monkeypatch.setattr(inventory, "_fields", lambda path: dict([processor.split("\t: ")]))
    assert inventory.cpu()["virtual"] is virtual


def test_no_secret_of_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_tell")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    found = take_inventory()
    assert "hf_do_not_tell" not in json.dumps(found)
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["variables"]["GOMP_SPINCOUNT"] == "1000"


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
    (checkout / "prompts.jsonl").write_text("{}")
    assert source_revision(checkout / "package") == clean
    (checkout / "package" / "more.py").write_text("")
    assert source_revision(checkout / "package") == clean | {"modified": True}
    (checkout / "package" / "more.py").unlink()
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
