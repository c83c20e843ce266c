"""What keeps megatoken, or its number, from this machine's best, with the command that fixes it. Changes nothing."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

import psutil

from megatoken.errors import StorageError, UsageError, install_command
from megatoken.files import check_writable, new_document
from megatoken.hardware.inventory import cpu, memory, multiplies_bf16
from megatoken.hardware.nvml import (
    HARMFUL_REASONS,
    RECOVERY_ACTION,
    RECOVERY_ACTIONS,
    NvmlGpu,
    all_gpus,
    open_nvml,
    words_of,
)
from megatoken.hardware.specification import contradictions
from megatoken.text import count_of

CPUS = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SAMPLE_SECONDS = 0.5
BUSY_SHARE, STEAL_SHARE = 0.05, 0.02
"""Of all cores' time: what other processes, and other virtual machines, may take."""
MOST_NAMED = 3
FEWEST_FILES = 4096
FREE_DISK_BYTES = 10 * 10**9
FREE_MEMORY_SHARE = 0.25
CLOCK_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2)."""
EXTRAS = {
    "serve": (("httptools", "llguidance", "uvloop"), "megatoken serve, --endpoint and grammars"),
    "report": (("duckdb",), "SQL over runs"),
    "rack": (("ray",), "runs on several machines"),
    "accuracy": (("rouge_score", "nltk"), "ROUGE scores"),
    "seal": (("cryptography",), "signatures of sealed runs"),
}
"""Modules of each extra and what it is for; those of ``gpu`` are looked for next to a GPU, which needs them."""
GPU_EXTRA = (("pynvml", "triton"), "the GPU is not used, or its sensors are not read")
HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": ("1", "makes every kernel wait for the one before"),
    "NCCL_P2P_DISABLE": ("1", "keeps GPUs from copying to each other directly"),
    "NCCL_SHM_DISABLE": ("1", "keeps processes from sharing memory"),
    "NCCL_DEBUG": ("TRACE", "writes a line for each call"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "makes every allocation a call of the driver"),
    "RAY_memory_monitor_refresh_ms": ("0", "lets a node run out of memory without a message"),
    "OMP_NUM_THREADS": ("1", "leaves all cores but one idle in products"),
}
"""Variables with the value that costs speed or hides a fault, and what it does."""
CLOCKS_SET = 0x2
CAP_TOLERANCE = 0.98
DRIVER = Path("/dev/nvidiactl")


class State(StrEnum):
    """Of what was looked at, worst first."""

    FIX = "FIX"
    UNKNOWN = "UNKNOWN"
    OPTIONAL = "OPTIONAL"
    OK = "OK"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: its state, and what to do about it."""

    code: str  # of the check; stays the same between versions
    state: State  # FIX where it costs speed, or makes a feature or a measurement fail
    message: str  # what was found, and what it costs
    command: str = ""  # what to type to fix or add it; empty if the state is OK or no command can


def ok(code: str, message: str) -> Finding:
    """Nothing to fix."""
    return Finding(code, State.OK, message)


def fix(code: str, message: str, command: str) -> Finding:
    """Something to fix."""
    return Finding(code, State.FIX, message, command)


def unknown(code: str, message: str, command: str = "") -> Finding:
    """The machine does not say."""
    return Finding(code, State.UNKNOWN, message, command)


def check_system(folder: Path, refuse: Callable[[Path], None] | None = None) -> Iterator[Finding]:
    """Findings about the machine; watches the load for half a second.

    Args:
        folder: where runs are written.
        refuse: raises the error of a run that may not write there, whatever the file system allows.
    """
    yield _governor()
    yield from _cores_and_memory()
    yield from _load()
    yield _precision()
    yield _huge_pages()
    yield _open_files()
    yield _disk(folder)
    yield _writable(folder, refuse)
    yield _clock()


def _governor() -> Finding:
    code = "cpu_governor"
    governors = [file.read_text().strip() for file in CPUS.glob("cpu[0-9]*/cpufreq/scaling_governor")]
    if not governors:
        return ok(code, "no CPU frequency governor (usual in virtual machines)")
    slow = [one for one in governors if one != "performance"]
    if not slow:
        return ok(code, "all cores use the governor performance")
    message = f"{len(slow)} of {count_of(len(governors), 'core')} use the governor {slow[0]}, which raises clocks late"
    return fix(code, message, "sudo cpupower frequency-set -g performance")


def _cores_and_memory() -> Iterator[Finding]:
    facts, all_cores = cpu(), psutil.cpu_count() or 1
    allowed = min(facts["usable_cores"] or all_cores, facts["quota_cores"] or all_cores)
    if allowed < all_cores:
        message = f"this process may use {allowed:g} of {all_cores} cores"
        yield fix("cpu_limit", message, "raise the container's --cpus or --cpuset-cpus, or leave out taskset")
    else:
        yield ok("cpu_limit", f"all {count_of(all_cores, 'core')} may be used")
    sizes = memory()
    limit, total = sizes["limit_bytes"], sizes["total_bytes"]
    if limit is not None and limit < total:
        message = f"the container may use {limit / 2**30:.1f} of {total / 2**30:.1f} GiB of memory"
        yield fix("memory_limit", message, "raise the container's --memory")
    available = sizes["available_bytes"]
    state = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB of memory are available"
    if available < FREE_MEMORY_SHARE * total:
        yield fix("memory_free", f"{state}; models may not fit", "ps aux --sort=-rss | head")
    else:
        yield ok("memory_free", state)


def _precision() -> Finding:
    code = "cpu_precision"
    if multiplies_bf16():
        return ok(
            code, "the processor has bf16 instructions: models run on it in bf16 unless --precision says otherwise"
        )
    message = "the processor has no bf16 instructions: models that fit run on it in fp32 unless --precision"
    return ok(code, f"{message} says otherwise")


def _load() -> Iterator[Finding]:
    """CPU time of other processes and of other virtual machines over a short while."""
    started, before = time.monotonic(), _process_seconds()  # looking at all processes takes time itself
    all_before = psutil.cpu_times()
    time.sleep(SAMPLE_SECONDS)
    seconds = (time.monotonic() - started) * (psutil.cpu_count() or 1)
    used = {
        process: spent - before.get(process, spent)
        for process, spent in _process_seconds().items()
        if process[0] != os.getpid()
    }
    share = sum(used.values()) / seconds
    if share > BUSY_SHARE:
        top = sorted(used.items(), key=lambda item: -item[1])[:MOST_NAMED]
        busiest = [(pid, name) for (pid, name), spent in top if spent > 0]
        names = ", ".join(f"{name} ({pid})" for pid, name in busiest)
        message = f"other processes use {share:.0%} of the cores: {names}"
        yield fix("cpu_load", message, _look_at(pid for pid, _ in busiest))
    else:
        yield ok("cpu_load", f"other processes use {share:.0%} of the cores")
    steal = getattr(psutil.cpu_times(), "steal", 0.0) - getattr(all_before, "steal", 0.0)
    if steal / seconds > STEAL_SHARE:
        message = f"other virtual machines on this host take {steal / seconds:.0%} of the cores' time"
        yield fix("cpu_steal", message, "move to a host or an instance type with dedicated cores")
    else:
        yield ok("cpu_steal", "no core is taken away by the host")


def _look_at(pids: Iterable[int]) -> str:
    """Names alone do not say whose processes they are and what for."""
    return f"ps -o pid,user,etime,args -p {','.join(map(str, pids))}   (stop those that are not needed)"


def _process_seconds() -> dict[tuple[int, str], float]:
    """CPU seconds of each process, by id and name."""
    return {
        (process.pid, process.info["name"]): times.user + times.system
        for process in psutil.process_iter(["name", "cpu_times"])
        if (times := process.info["cpu_times"]) is not None
    }


def _huge_pages() -> Finding:
    code = "huge_pages"
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return unknown(code, "the system does not say whether it has transparent huge pages")
    if chosen == "never":
        message = "transparent huge pages are off, which slows the reading of large weights"
        return fix(code, message, f"echo madvise | sudo tee {HUGE_PAGES}")
    return ok(code, f"transparent huge pages: {chosen}")


def _open_files() -> Finding:
    code = "open_files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FEWEST_FILES:
        message = f"a process may open {soft:,} files, so a server may refuse clients"
        if hard == soft:
            return fix(code, message, f"sudo prlimit --pid $$ --nofile={FEWEST_FILES}")
        return fix(code, message, f"ulimit -n {FEWEST_FILES if hard < 0 else min(hard, 16 * FEWEST_FILES)}")
    return ok(code, f"a process may open {soft:,} files" if soft >= 0 else "a process may open any number of files")


def _disk(folder: Path) -> Finding:
    code = "disk_space"
    folder = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)  # it may be made later
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return unknown(code, f"{folder}: {error.strerror}")
    if free < FREE_DISK_BYTES:
        message = f"{free / 1e9:.1f} GB are free in {folder.resolve()}; runs and checkpoints may not fit"
        return fix(code, message, f"du -xh {folder.resolve()} | sort -h | tail")
    return ok(code, f"{free / 1e9:,.0f} GB are free in {folder.resolve()}")


def _writable(folder: Path, refuse: Callable[[Path], None] | None) -> Finding:
    code = "folder_writable"
    try:
        if refuse is not None:
            refuse(folder)
        check_writable(folder)
    except UsageError as error:
        return fix(code, f"a run is refused there: {error}", "")
    except StorageError as error:
        return fix(code, str(error), f"ls -ld {quote(str(folder))}; findmnt -T {quote(str(folder))}")
    return ok(code, f"runs can be written in {folder.resolve()}")


def _clock() -> Finding:
    """Whether the kernel's clock is synchronised, which comparing the times of several nodes needs."""
    code = "clock_sync"
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # zeros: it reads only
    except (OSError, AttributeError):
        return unknown(code, "the system does not say whether its clock is synchronised")
    if state < 0:
        return unknown(code, "the system does not say whether its clock is synchronised")
    if state == CLOCK_UNSYNCHRONISED:
        message = "the clock is not synchronised, so times of several nodes cannot be compared"
        return fix(code, message, "sudo timedatectl set-ntp true")
    return ok(code, "the clock is synchronised")


def check_software(has_gpu: bool) -> Iterator[Finding]:
    """Findings about what is installed; ``has_gpu``: whether the machine has an NVIDIA GPU."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        message = f"no compiler {name}, so the processor's kernels are replaced by slower PyTorch operations"
        yield fix("compiler", message, "sudo apt-get install g++")
    else:
        yield ok("compiler", f"{name} can compile the processor's kernels")
    yield _extras()
    if has_gpu:
        modules, cost = GPU_EXTRA
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            yield fix("extra_gpu", f"{', '.join(missing)} not installed: {cost}", install_command("gpu"))
        else:
            yield ok("extra_gpu", "the extra gpu is installed")
    version = metadata.version("torch")
    if has_gpu and version.endswith("+cpu"):
        message = f"PyTorch {version} cannot use the GPU"
        yield fix("torch_build", message, "pip install --force-reinstall torch")
    found = [variable for variable, (value, _) in HARMFUL.items() if os.environ.get(variable) == value]
    for variable in found:
        yield fix(
            f"variable_{variable}", f"{variable}={HARMFUL[variable][0]} {HARMFUL[variable][1]}", f"unset {variable}"
        )
    if not found:
        yield ok("variables", "no variable of the environment slows PyTorch, NCCL or Ray")


def _extras() -> Finding:
    """A fresh install has none, and nothing is broken."""
    code = "extras"
    missing = {
        extra: purpose
        for extra, (modules, purpose) in EXTRAS.items()
        if any(find_spec(module) is None for module in modules)
    }
    if not missing:
        return ok(code, "all extras are installed")
    listed = ", ".join(f"{extra} ({purpose})" for extra, purpose in missing.items())
    return Finding(code, State.OPTIONAL, f"not installed: {listed}", install_command(",".join(missing)))


def check_gpus(gpus: Sequence[NvmlGpu]) -> Iterator[Finding]:
    """Every GPU of the machine."""
    for index, gpu in enumerate(gpus):
        found = list(_check(gpu, index))
        yield from found
        if not found:
            yield ok(f"gpu{index}", f"GPU {index} has no pending reset, partition, clock or power setting to change")


def _check(gpu: NvmlGpu, index: int) -> Iterator[Finding]:
    ask = gpu.ask
    smi = f"sudo nvidia-smi -i {index}"
    remapped = ask("nvmlDeviceGetRemappedRows")
    if remapped is not None and remapped[3]:
        message = f"GPU {index} has rows of memory that could not be replaced"
        yield fix(f"gpu{index}_memory_rows", message, "have the GPU replaced")
    elif remapped is not None and remapped[2]:
        message = f"GPU {index} replaces rows of memory at the next reset"
        yield fix(f"gpu{index}_memory_rows", message, f"{smi} --gpu-reset")
    ecc = ask("nvmlDeviceGetEccMode")
    if ecc is not None and ecc[0] != ecc[1]:
        message = f"GPU {index} changes its error correction at the next reset"
        yield fix(f"gpu{index}_ecc_pending", message, f"{smi} --gpu-reset")
    elif ecc is not None and not ecc[0]:
        message = f"GPU {index} does not correct memory errors, so results can be wrong without a message"
        yield fix(f"gpu{index}_ecc_off", message, f"{smi} -e 1")
    if (ask("nvmlDeviceGetMigMode") or [0])[0]:
        message = f"GPU {index} is partitioned (MIG), so a process gets a part of it"
        yield fix(f"gpu{index}_mig", message, f"{smi} -mig 0")
    if ask("nvmlDeviceGetPersistenceMode") == 0:
        message = f"GPU {index} is not in persistence mode, so each start of a process takes seconds longer"
        yield fix(f"gpu{index}_persistence", message, f"{smi} -pm 1")
    limit, usual = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit and usual and limit < CAP_TOLERANCE * usual:
        message = f"GPU {index} may draw {limit / 1e3:.0f} W; its default is {usual / 1e3:.0f} W"
        yield fix(f"gpu{index}_power_limit", message, f"{smi} -pl {usual / 1e3:.0f}")
    reasons = gpu.clock_reasons() or 0
    if reasons & CLOCKS_SET:
        message = f"GPU {index} has its clocks set by a user"
        yield fix(f"gpu{index}_clocks_set", message, f"{smi} -rac && {smi} -rgc")
    if causes := words_of(reasons & HARMFUL_REASONS):
        message = f"GPU {index} is slowed down right now by {' and '.join(causes)}"
        yield fix(f"gpu{index}_slow_down", message, "check its cooling and power supply")
    (action,) = gpu.fields([RECOVERY_ACTION])
    if action and (words := RECOVERY_ACTIONS.get(int(action))):
        command = f"{smi} --gpu-reset" if action == 1 else words
        yield fix(f"gpu{index}_recovery", f"the driver advises for GPU {index}: {words}", command)
    for message in contradictions(gpu.facts()):
        yield fix(f"gpu{index}_specification", f"GPU {index}: {message}", f"nvidia-smi -q -i {index}")
    others = [one for one in ask("nvmlDeviceGetComputeRunningProcesses") or [] if one.pid != os.getpid()]
    if others:
        ids = ", ".join(str(one.pid) for one in others)
        held = sum(one.usedGpuMemory or 0 for one in others) / 2**30
        message = f"GPU {index} is also used by the processes {ids}, which hold {held:.1f} GiB"
        yield fix(f"gpu{index}_shared", message, _look_at(one.pid for one in others))


def examine(folder: Path, refuse: Callable[[Path], None] | None = None) -> dict[str, Any]:
    """Look at the machine, with ``folder`` and ``refuse`` as ``check_system``; the findings to fix first."""
    has_gpu = DRIVER.exists()
    found = [*check_system(folder, refuse), *check_software(has_gpu), *(_gpus() if has_gpu else ())]
    found.sort(key=lambda finding: list(State).index(finding.state))
    return new_document("doctor", findings=[asdict(finding) for finding in found])


def _gpus() -> Iterator[Finding]:
    if find_spec("pynvml") is None:
        yield unknown("gpu", "nvidia-ml-py is not installed, so GPUs cannot be examined", install_command("gpu"))
    elif (library := open_nvml()) is None:
        yield unknown("gpu", "the driver does not answer", "nvidia-smi")
    else:
        yield from check_gpus(all_gpus(library))
