"""The doctor: settings that cost speed are found, and each finding has a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cli_support import call_here
from megatoken.errors import install_command
from megatoken.hardware import doctor
from megatoken.hardware.doctor import Finding, State, examine
from megatoken.hardware.nvml import all_gpus


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SAMPLE_SECONDS", 0.05)


def by_code(findings: Iterator[Finding]) -> dict[str, Finding]:
    found = {finding.code: finding for finding in findings}
    assert all(finding.command for finding in found.values() if finding.state == State.FIX)
    assert not any(finding.command for finding in found.values() if finding.state == State.OK)
    return found


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_governor_that_saves_power_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CPUS", tmp_path)
    assert by_code(doctor.check_system(tmp_path))["cpu_governor"].state == State.OK
    for core, governor in enumerate(["performance", "powersave"]):
        write(tmp_path / f"cpu{core}/cpufreq/scaling_governor", governor + "\n")
    found = by_code(doctor.check_system(tmp_path))["cpu_governor"]
    assert found.state == State.FIX
    assert "1 of 2 cores use the governor powersave" in found.message


@pytest.mark.parametrize(("text", "state"), [("always [madvise] never", "OK"), ("always madvise [never]", "FIX")])
def test_huge_pages_that_are_off_are_found(
    text: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    assert by_code(doctor.check_system(tmp_path))["huge_pages"].state == State.UNKNOWN
    write(tmp_path / "enabled", text)
    assert by_code(doctor.check_system(tmp_path))["huge_pages"].state == state


def test_limits_of_a_container_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu", lambda: {"usable_cores": 4, "quota_cores": 1.5})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    sizes = {"limit_bytes": 2**32, "total_bytes": 2**36, "available_bytes": 2**33}
    monkeypatch.setattr(doctor, "memory", lambda: sizes)
    found = by_code(doctor.check_system(tmp_path))
    assert "1.5 of 8 cores" in found["cpu_limit"].message
    assert "4.0 of 64.0 GiB" in found["memory_limit"].message
    assert found["memory_free"].state == State.FIX


def test_a_busy_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SAMPLE_SECONDS", 0.3)
    monkeypatch.setattr(doctor, "BUSY_SHARE", 0.01)
    monkeypatch.setattr(doctor, "MOST_NAMED", 10_000)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            found = by_code(doctor.check_system(tmp_path))["cpu_load"]
        finally:
            busy.kill()
    assert found.state == State.FIX
    assert str(busy.pid) in found.command.split()[4].split(",")


def test_few_open_files_and_a_full_disk_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 2048))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    found = by_code(doctor.check_system(tmp_path))
    assert found["open_files"].command == "ulimit -n 2048"
    assert "1.0 GB are free" in found["disk_space"].message
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (100, 100))
    assert by_code(doctor.check_system(tmp_path))["open_files"].command == "sudo prlimit --pid $$ --nofile=4096"
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "SAMPLE_SECONDS", 0.05)
    assert by_code(doctor.check_system(tmp_path / "none" / "later"))["disk_space"].state == State.OK


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    assert by_code(doctor.check_system(tmp_path / "new"))["folder_writable"].state == State.OK
    assert not list(tmp_path.iterdir())
    found = by_code(doctor.check_system(Path("/proc")))["folder_writable"]  # not even root can make a folder there
    assert found.state == State.FIX and "cannot write in /proc" in found.message


@pytest.mark.parametrize(("answer", "state"), [(0, "OK"), (5, "FIX"), (-1, "UNKNOWN")])
def test_a_clock_that_is_not_synchronised_is_found(
    answer: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(adjtimex=lambda buffer: answer)
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: library)
    assert by_code(doctor.check_system(tmp_path))["clock_sync"].state == state


def test_missing_compilers_extras_and_harmful_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module == "ray" else object())
    monkeypatch.setattr(doctor.metadata, "version", lambda package: "2.13.0+cpu")
    found = by_code(doctor.check_software(has_gpu=True))
    assert {code for code, one in found.items() if one.state == State.FIX} - {"variable_OMP_NUM_THREADS"} == {
        "compiler",
        "torch_build",
        "variable_NCCL_P2P_DISABLE",
    }
    assert "torch_build" not in by_code(doctor.check_software(has_gpu=False))


def test_extras_that_are_not_installed_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"ray", "cryptography", "triton"}
    monkeypatch.setattr(doctor, "find_spec", lambda module: None if module in absent else object())
    found = by_code(doctor.check_software(has_gpu=True))
    extras = found["extras"]
    assert extras.state == State.OPTIONAL
    assert extras.message == "not installed: rack (runs on several machines), seal (signatures of sealed runs)"
    assert extras.command == install_command("rack,seal")
    assert found["extra_gpu"].state == State.FIX and "triton not installed" in found["extra_gpu"].message
    absent.clear()
    found = by_code(doctor.check_software(has_gpu=True))
    assert found["extras"].state == found["extra_gpu"].state == State.OK


class Nvml:
    """pynvml with one GPU; a question that has no answer raises, as the driver's library does."""

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, **answers: Any) -> None:
        self._answers = {f"nvmlDeviceGet{name}": value for name, value in answers.items()}

    def nvmlInit(self) -> None:  # noqa: N802
        """Ready."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        """One."""
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        """Its number."""
        return index

    def __getattr__(self, name: str) -> Any:
        def answer(*arguments: object) -> Any:
            if name not in self._answers:
                raise Nvml.NVMLError("not supported")
            return self._answers[name]

        return answer


HEALTHY = {
    "RemappedRows": (3, 0, 0, 0),
    "EccMode": (1, 1),
    "MigMode": (0, 0),
    "PersistenceMode": 1,
    "PowerManagementLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "CurrentClocksEventReasons": 0x4,
    "ComputeRunningProcesses": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=1)],
}


@pytest.mark.parametrize(
    ("question", "answer", "code", "words"),
    [
        ("RemappedRows", (0, 1, 1, 0), "memory_rows", "--gpu-reset"),
        ("RemappedRows", (0, 1, 1, 1), "memory_rows", "replaced"),
        ("EccMode", (1, 0), "ecc_pending", "--gpu-reset"),
        ("EccMode", (0, 0), "ecc_off", "-e 1"),
        ("MigMode", (1, 1), "mig", "-mig 0"),
        ("PersistenceMode", 0, "persistence", "-pm 1"),
        ("PowerManagementLimit", 500_000, "power_limit", "-pl 700"),
        ("CurrentClocksEventReasons", 0x6, "clocks_set", "-rgc"),
        ("CurrentClocksEventReasons", 0x44, "slow_down", "cooling"),
        ("ComputeRunningProcesses", [SimpleNamespace(pid=77, usedGpuMemory=2**31)], "shared", "-p 77"),
    ],
)
def test_each_setting_of_a_gpu_is_found_with_its_command(question: str, answer: object, code: str, words: str) -> None:
    (found,) = by_code(doctor.check_gpus(all_gpus(Nvml(**HEALTHY | {question: answer})))).values()
    assert (found.code, found.state) == (f"gpu0_{code}", State.FIX)
    assert words in found.command


def test_a_healthy_gpu_has_nothing_to_fix_and_a_silent_one_is_no_fault() -> None:
    for nvml in (Nvml(**HEALTHY), Nvml()):
        assert [finding.state for finding in doctor.check_gpus(all_gpus(nvml))] == [State.OK]


def test_a_machine_with_a_driver_and_no_nvml_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    findings = {one["code"]: one for one in examine(tmp_path)["findings"]}
    assert findings["gpu"]["command"].endswith("[gpu]'")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(**HEALTHY))
    assert "gpu0" in {one["code"] for one in examine(tmp_path)["findings"]}


def test_the_command_prints_what_to_fix_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    code, out, err = call_here("doctor", "--out", tmp_path, "--json")
    assert (code, err) == (0, "")
    findings = json.loads(out)["findings"]
    states = [one["state"] for one in findings]
    assert states == sorted(states, key=["FIX", "UNKNOWN", "OPTIONAL", "OK"].index)
    assert {"FIX", "OPTIONAL", "OK"} <= set(states)
    _, out, _ = call_here("doctor", "--out", tmp_path)
    assert out.count("pip install") == 1 and "\nOPTIONAL not installed: serve (megatoken serve" in out
    assert out.splitlines()[-1].startswith("OK ")


def test_a_sealed_folder_is_named_as_one_that_runs_cannot_be_written_in(tmp_path: Path) -> None:
    seal = {"files": {}, "sealed_at": "2026-11-20T09:12:33Z"}
    (tmp_path / "seal.json").write_text(json.dumps(seal))
    for folder in (tmp_path, tmp_path / "new"):
        _, out, _ = call_here("doctor", "--out", folder, "--json")
        [finding] = [one for one in json.loads(out)["findings"] if one["code"] == "folder_writable"]
        assert finding["state"] == "FIX"
        assert "a run is refused there" in finding["message"] and "breaks the seal" in finding["message"]


def test_a_run_takes_no_folder_to_examine(tmp_path: Path) -> None:
    code, _, err = call_here("doctor", tmp_path, "--out", tmp_path)
    assert code == 2 and "give RUN or --out, not both" in err
