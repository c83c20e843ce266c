"""Descriptions of systems alone: memory of the host, and what the system's own name says."""

from typing import Any

import pytest

from megatoken.audit import Severity
from megatoken.audit.checks.systems import accelerator_count, host_memory, keys, part_memory, part_named_alike, software
from megatoken.audit.evidence import System
from megatoken.audit.finding import Observation
from megatoken.mlperf.rounds import rules


def system(name: str = "sys", **values: Any) -> System:
    return System(f"closed/Vendor/systems/{name}.json", values, {})


def severities(observations: list[Observation]) -> list[Severity]:
    return [one.severity for one in observations]


@pytest.mark.parametrize(
    ("capacity", "configuration", "expected"),
    [
        ("1024GB", "16 slots per socket / 64GB each / 6400 MT/s DDR5", Severity.PASS),
        ("2304GB", "24 slots per socket / 96GB each / 8800 MT/s DDR5 (MRDIMM)", Severity.PASS),
        ("1024GB", "8 DIMMs per socket / 64GB each / 6400 MT/s DDR5 RDIMM", Severity.PASS),
        ("2 TB", "32x 64GB 2Rx4 PC5-5600B-R", Severity.PASS),
        ("1 TB", "1 TB DDR5", Severity.PASS),
        ("960 GB", "for each 4-GPU node: 1.3TB LPDDR5x", Severity.WARN),
        ("1 TB", "512 GB DDR5", Severity.WARN),
        ("1 TB", "32x 128GB", Severity.NOTE),
    ],
)
def test_memory_of_the_host(capacity: str, configuration: str, expected: Severity) -> None:
    one = system(host_memory_capacity=capacity, host_memory_configuration=configuration)
    assert severities(host_memory(one)) == [expected]


@pytest.mark.parametrize(
    ("name", "accelerator", "per_node", "nodes", "expected"),
    [
        ("8xMI355X_2xEPYC_9575F", "AMD Instinct MI355X", 8, 1, Severity.PASS),
        ("8xMI355X_2xEPYC_9575F", "AMD Instinct MI355X", 4, 1, Severity.WARN),
        ("H200-SXM-141GBx8_TRT", "NVIDIA H200-SXM-141GB", 8, 1, Severity.PASS),
        ("H200-SXM-141GBx8_TRT", "NVIDIA H200-SXM-141GB", 4, 1, Severity.WARN),
        ("GB300-NVL72_GB300-288GB_aarch64x72_TRT", "NVIDIA GB300", 4, 18, None),
        ("87xMI355X_22xEPYC_9575F", "AMD Instinct MI355X", 8, 11, Severity.PASS),
        ("32xMI300X_2xEPYC_9534_16xMI325X_2xEPYC_9655", "AMD Instinct MI300X", 8, 6, Severity.PASS),
        ("sys", "NVIDIA H200-SXM-141GB", 8, 1, None),
    ],
)
def test_the_count_in_the_name(name: str, accelerator: str, per_node: int, nodes: int, expected: Severity) -> None:
    values = {"accelerator_model_name": accelerator, "accelerators_per_node": per_node, "number_of_nodes": nodes}
    assert severities(accelerator_count(system(name, **values))) == ([] if expected is None else [expected])


def test_the_count_of_a_part_that_the_table_does_not_have() -> None:
    described = {"accelerator_model_name": "Maker XQ750Z 128GB", "number_of_nodes": 1}
    assert severities(accelerator_count(system("8xXQ750Z_2xCPU", accelerators_per_node=8, **described))) == [
        Severity.PASS
    ]
    assert severities(accelerator_count(system("8xXQ750Z_2xCPU", accelerators_per_node=4, **described))) == [
        Severity.WARN
    ]


def test_the_part_in_the_name() -> None:
    """Name and memory changed together fit each other, but not the name that results refer to."""
    genuine = system("H200-SXM-141GBx8_TRT", accelerator_model_name="NVIDIA H200-SXM-141GB")
    other = system("H200-SXM-141GBx8_TRT", accelerator_model_name="NVIDIA H100", accelerator_memory_capacity="80 GB")
    assert severities(part_named_alike(genuine)) == [Severity.PASS]
    assert severities(part_memory(other)) == [Severity.PASS]
    assert severities(part_named_alike(other)) == [Severity.WARN]
    assert severities(part_named_alike(system("sys", accelerator_model_name="NVIDIA H100"))) == []


def test_a_system_without_accelerators_has_no_part() -> None:
    assert severities(part_memory(system(accelerators_per_node=0, accelerator_model_name="N/A"))) == []


def test_a_blank_value_is_a_note() -> None:
    """MLCommons' checker takes a blank for a value, and nothing for none."""
    values = dict.fromkeys(rules()["system_keys"], "x")
    blank = system(**values | {"host_networking_topology": " "})
    assert severities(keys(blank, Severity.FAIL)) == [Severity.PASS, Severity.NOTE]
    assert severities(keys(system(**values | {"host_networking_topology": ""}), Severity.FAIL)) == [Severity.FAIL]


def test_several_stacks_in_one_field_do_not_contradict_each_other() -> None:
    both = system(framework="PyTorch 2.9.1, ROCm 7.0.0; PyTorch 2.9.0, ROCm 7.1.0")
    assert severities(software(both)) == [Severity.NOTE, Severity.NOTE]
    elsewhere = system(framework="PyTorch 2.9.1", other_software_stack="PyTorch 2.8.0")
    assert severities(software(elsewhere)) == [Severity.WARN]
