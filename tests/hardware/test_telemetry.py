"""Sensors: GPUs through a stand-in for NVML, processors through this machine's own kernel, meters as files."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megatoken.errors import UsageError
from megatoken.hardware import host_sensors
from megatoken.hardware.host_sensors import PowerMeter, package_watts, read_host, read_meter, stalled_shares
from megatoken.hardware.inventory import take_inventory
from megatoken.hardware.power import PowerSampler
from megatoken.hardware.specification import contradictions
from megatoken.hardware.telemetry import Sensors, Telemetry
from stand_in_nvml import NVMLError, StandInNvml

UUIDS = ["GPU-0", "GPU-1"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    library = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def reading_after(sensors: Sensors, seconds: float) -> Telemetry:
    sensors.read()
    time.sleep(seconds)
    return sensors.read()


@pytest.mark.timing
@pytest.mark.parametrize("counters", [True, False])
def test_gpus_that_share_a_model_are_read_together(library: StandInNvml, counters: bool) -> None:
    if not counters:
        library.answers["TotalEnergyConsumption"] = NVMLError
    with Sensors(UUIDS, 0.01, 0.0) as sensors:
        reading = reading_after(sensors, 0.2)
    assert reading.power_watts == pytest.approx(700, rel=0.02)
    assert (reading.clock_mhz, reading.temperature_celsius) == (1500, 65)
    assert (reading.memory_clock_mhz, reading.memory_temperature_celsius) == (2619, 50)
    assert reading.pcie_sent_bytes_per_second == 2e6
    assert reading.clock_reasons == 4
    assert (reading.xid_errors, reading.last_xid, reading.nvlink_errors) == (0, None, None)


@pytest.mark.timing
def test_errors_are_counted_from_the_start_and_a_short_slow_down_is_not_missed(library: StandInNvml) -> None:
    library.answers["TotalEccErrors"] = lambda gpu, kind, counter: 7
    library.fields[(162, 3)] = 5  # recoveries of the fourth link
    library.xids = [31]  # before the run
    with Sensors(UUIDS, 0.01, 0.0) as sensors:
        reading = reading_after(sensors, 0.1)
        assert (reading.ecc_corrected_errors, reading.nvlink_errors, reading.xid_errors) == (0, 0, 1)
        library.answers |= {
            "TotalEccErrors": lambda gpu, kind, counter: 7 + kind,
            "CurrentClocksEventReasons": lambda gpu: 0x44 if gpu else 0x4,
        }
        library.fields[(162, 3)] = 6
        library.xids = [79]
        time.sleep(0.05)
        library.answers["CurrentClocksEventReasons"] = 0x4
        time.sleep(0.1)
        later = sensors.read().since(reading)
    assert later.clock_reasons == 0x44
    assert (later.ecc_corrected_errors, later.ecc_uncorrected_errors) == (0, 2)
    assert (later.nvlink_errors, later.xid_errors, later.last_xid) == (2, 1, 79)


@pytest.mark.timing
def test_readings_in_quick_succession_repeat_the_one_before(library: StandInNvml) -> None:
    with Sensors(UUIDS, 0.01, 0.3) as sensors:
        first = reading_after(sensors, 0.4)
        assert sensors.read() is first


@pytest.mark.timing
def test_the_thread_costs_next_to_nothing() -> None:
    with Sensors([]) as sensors:
        time.sleep(1.5)
        assert 0 < sensors.core_share() < 0.01


def test_without_a_gpu_the_node_is_still_read() -> None:
    if not Path("/proc/pressure/cpu").exists():
        pytest.skip("this kernel has no pressure stall information")
    with Sensors([], 0.02, 0.0) as sensors:
        reading = reading_after(sensors, 0.2)
    assert reading.power_watts is None
    assert all(
        share is not None and 0 <= share <= 1
        for share in (reading.cpu_stalled_share, reading.memory_stalled_share, reading.disk_stalled_share)
    )


def test_energy_of_the_processors_survives_a_counter_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_sensors, "POWERCAP", tmp_path)
    monkeypatch.setattr(host_sensors, "PRESSURE", tmp_path / "none")

    def write(zone: str, name: str, microjoules: int) -> None:
        folder = tmp_path / zone
        folder.mkdir(exist_ok=True)
        for file, text in (("name", name), ("energy_uj", str(microjoules)), ("max_energy_range_uj", "1000000000")):
            (folder / file).write_text(text + "\n")

    write("intel-rapl:0", "package-0", 100_000_000)
    write("intel-rapl:1", "package-1", 990_000_000)
    write("intel-rapl:0:0", "dram", 5)
    before = read_host()
    write("intel-rapl:0", "package-0", 160_000_000)
    write("intel-rapl:1", "package-1", 30_000_000)
    assert package_watts(before, read_host(), 2.0) == pytest.approx((60 + 40) / 2)
    (tmp_path / "intel-rapl:1/energy_uj").unlink()
    assert package_watts(before, read_host(), 2.0) is None
    assert stalled_shares(before, before, 1.0) == {}


def test_a_power_meter_is_a_file_or_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sensors, "METER_PERIOD_SECONDS", 0.02)
    file = tmp_path / "watts"
    file.write_text("812.5 W\n")
    meter = PowerMeter(str(file))
    assert meter.watts == 812.5
    file.write_text("900")
    deadline = time.monotonic() + 60
    while meter.watts != 900 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert meter.watts == 900
    assert read_meter("echo Power reading: 1.2e3 W") == 1200
    for bad in (str(tmp_path / "none"), "echo nothing", "false"):
        with pytest.raises(UsageError, match=r"power_meter: .*a command that prints them"):
            read_meter(bad)


def test_the_inventory_says_what_contradicts_the_data_sheet(library: StandInNvml) -> None:
    machine = take_inventory()
    assert [gpu["uuid"] for gpu in machine["gpus"]] == UUIDS
    assert not list(contradictions(machine["gpus"][0]))
    library.answers |= {
        "Name": "NVIDIA GB300",
        "MemoryInfo": type("Memory", (), {"total": 189_471 * 2**20})(),
        "CurrPcieLinkWidth": 8,
    }
    memory, lanes = contradictions(take_inventory()["gpus"][0])
    assert memory.startswith("NVIDIA GB300 reports 189,471 MiB of memory; by its data sheet it has about 284,208 MiB")
    assert "GB200" in memory
    assert "8 of 16 PCIe lanes" in lanes


def test_critical_errors_before_a_run_are_read_from_the_kernels_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    log.write_text("4,100,5000000,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n")
    monkeypatch.setattr(host_sensors, "KERNEL_LOG", log)
    assert host_sensors.logged_xids() == [{"seconds": 5.0, "device": "PCI:0000:1b:00", "xid": 79}]
    monkeypatch.setattr(host_sensors, "KERNEL_LOG", tmp_path / "none")
    assert host_sensors.logged_xids() is None


@pytest.mark.timing
def test_power_over_a_time_is_from_the_energy_counter(library: StandInNvml) -> None:
    with PowerSampler("GPU-1", 0.02) as sampler:
        began = time.monotonic()
        time.sleep(0.2)
        found = sampler.between(began, time.monotonic())
    assert found.watts == pytest.approx(400, rel=0.02)
    assert (found.clock_mhz, found.temperature_celsius) == (1500, 65)


def test_without_a_driver_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(StandInNvml):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NVMLError("driver not loaded")

    for module in (Broken(), None):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert take_inventory()["gpus"] == []
        with Sensors(UUIDS, 0.01, 0.0) as sensors:
            assert reading_after(sensors, 0.05).clock_mhz is None
