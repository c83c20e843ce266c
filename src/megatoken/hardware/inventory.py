"""The machine of a run: the contents of ``environment.json``.

Unknown facts are None. Of the environment variables only the few that control threads and visible GPUs are recorded, so
no secret can slip in.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from megatoken import __version__
from megatoken.hardware import nvml
from megatoken.hardware.host_sensors import logged_xids
from megatoken.processes import usable_cores

PACKAGES = ("torch", "numpy", "mlcommons-loadgen", "safetensors", "tokenizers", "pyarrow", "triton", "cuda-bindings")
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"),
    *("GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES"),
)
MATRIX_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
ARM_INSTRUCTIONS = ("asimd", "bf16", "i8mm", "sve", "sve2")
BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")
PRODUCT_FILES = (Path("/sys/class/dmi/id/sys_vendor"), Path("/sys/class/dmi/id/product_name"))
VIRTUAL_PRODUCTS = (
    *("virtual machine", "kvm", "qemu", "vmware", "virtualbox", "parallels", "apple virtualization", "xen", "bhyve"),
    *("amazon ec2", "google compute engine", "alibaba cloud ecs", "openstack", "kubevirt", "vserver"),
)
"""As firmware names virtual machines of ARM processors, which have no flag; others count as real machines."""


def take_inventory() -> dict[str, Any]:
    """Hardware, operating system, versions and source revision of this process, ready for JSON; takes about 50 ms."""
    found = gpus()
    return {
        "hostname": socket.gethostname(),
        "operating_system": _operating_system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpu": cpu(),
        "memory": memory(),
        "gpus": found,
        "logged_xids": logged_xids() if found else None,
        "packages": {"megatoken": __version__, **{name: _version(name) for name in PACKAGES}},
        "all_packages": dict(all_packages()),
        "source": source_revision(Path(__file__).parent),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


@cache
def all_packages() -> Mapping[str, str]:
    """Every package that is installed where this process imports from, with its version, by name; read once."""
    found = (part.metadata for part in metadata.distributions())  # each look at it parses the whole file
    return dict(sorted((str(fields["Name"]), fields["Version"]) for fields in found if fields["Name"]))


def peak_memory_bytes() -> int | None:
    """Largest resident size that this process has had; None where the kernel does not report it."""
    value = _fields(Path("/proc/self/status")).get("VmHWM")
    return int(value.split()[0]) * 1024 if value else None


def memory() -> dict[str, Any]:
    """Bytes of the machine, of those available, and of the container's limit."""
    return {
        "total_bytes": psutil.virtual_memory().total,
        "available_bytes": psutil.virtual_memory().available,
        "limit_bytes": _limit(Path("/sys/fs/cgroup/memory.max")),
    }


def cpu() -> dict[str, Any]:
    """Model, cores, those this process may use, and the instruction sets that speed up matrix products."""
    fields = _fields(Path("/proc/cpuinfo"))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or None,
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": usable_cores(),
        "quota_cores": _cpu_quota(Path("/sys/fs/cgroup/cpu.max")),
        "instruction_sets": [flag for flag in (*MATRIX_INSTRUCTIONS, *ARM_INSTRUCTIONS) if flag in flags],
        "virtual": _is_virtual(flags),
    }


def _is_virtual(flags: set[str]) -> bool:
    """Whether this is a virtual machine: by the flags of an x86 processor, else by the name of the product."""
    if "fpu" in flags:
        return "hypervisor" in flags
    product = " ".join(map(_read, PRODUCT_FILES)).lower()
    return any(name in product for name in VIRTUAL_PRODUCTS) and not product.rstrip().endswith(".metal")


def multiplies_bf16() -> bool:
    """Whether this processor has instructions for products of bf16."""
    return not set(BF16_INSTRUCTIONS).isdisjoint(cpu()["instruction_sets"])


def shares_matrix_units() -> bool:
    """Whether products of bf16 run on units (AMX) of which other virtual machines of the host may take a part."""
    facts = cpu()
    return facts["virtual"] and "amx_bf16" in facts["instruction_sets"]


def gpus() -> list[dict[str, Any]]:
    """One entry per NVIDIA GPU; empty without a GPU, a driver or the package nvidia-ml-py."""
    library = nvml.open_nvml()
    if library is None:
        return []
    driver = nvml.driver_version(library)
    return [
        {"index": index, "driver_version": driver, **gpu.facts()} for index, gpu in enumerate(nvml.all_gpus(library))
    ]


def source_revision(directory: Path) -> dict[str, Any] | None:
    """Git revision of the checkout that tracks ``directory`` and whether it differs; None for an installed package.

    Of new files only those in ``directory`` count: a file of prompts next to it changes no code.
    """
    if not _git(directory, "ls-files", "."):
        return None
    revision = _git(directory, "rev-parse", "HEAD")
    changed = _git(directory, "status", "--porcelain", "--untracked-files=no") or _git(
        directory, "status", "--porcelain", "."
    )
    return {"revision": revision, "modified": bool(changed)} if revision else None


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _fields(path: Path) -> dict[str, str]:
    """``name: value`` lines of a file of /proc; of repeated names the first."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields


def _limit(path: Path) -> int | None:
    value = _read(path).strip()
    return int(value) if value.isdigit() else None


def _cpu_quota(path: Path) -> float | None:
    quota, _, period = _read(path).strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _git(directory: Path, *arguments: str) -> str | None:
    """What git prints; without optional locks, ``git status`` leaves the index of the checkout as it is."""
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
