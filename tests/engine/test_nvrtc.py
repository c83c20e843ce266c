"""What kernels in CUDA C++ are given and what a failure says; where CUDA is needed, a driver that only takes notes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatoken.engine.ops import gated_product, nvrtc
from megatoken.errors import CapacityError

DEVICE = torch.device("cuda", 0)
GOOD, BAD = SimpleNamespace(value=0), SimpleNamespace(value=6, name="NVRTC_ERROR_COMPILATION")


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts functions of CUDA in place of those of cuda-bindings."""

    def replaced(**modules: dict[str, object]) -> None:
        package = ModuleType("cuda.bindings")
        for name, functions in modules.items():
            setattr(package, name, SimpleNamespace(**functions))
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)

    return replaced


def test_a_kernel_gets_its_arguments(bindings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    tensor, tensor_map, described = torch.arange(3), ctypes.c_uint64(99), []

    def launch(function: object, *numbers: int) -> tuple[object]:
        *shape, stream, addresses, _ = numbers
        pointers = (ctypes.c_void_p * 5).from_address(addresses)
        types = ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32
        values = [kind.from_address(pointer).value for kind, pointer in zip(types, pointers, strict=True)]
        described.append((function, shape, stream, values))
        return (GOOD,)

    bindings(driver={"cuLaunchKernel": launch})
    described_map = SimpleNamespace(getPtr=lambda: ctypes.addressof(tensor_map))
    nvrtc.launch("kernel", (5, 6), 128, 512, (described_map, tensor, None, 17, -3), DEVICE)
    assert described == [("kernel", [5, 6, 1, 128, 1, 1, 512], 7, [99, tensor.data_ptr(), 0, 17, -3])]


def test_a_kernel_that_may_overlap_with_those_before_it(
    bindings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    launched = []

    def launch(config: SimpleNamespace, function: object, addresses: int, _: int) -> tuple[object]:
        value = ctypes.c_int32.from_address(ctypes.c_void_p.from_address(addresses).value or 0).value
        launched.append((vars(config), function, value))
        return (GOOD,)

    bindings(
        driver={
            "cuLaunchKernelEx": launch,
            "CUlaunchAttributeID": SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6),
            "CUlaunchAttribute": lambda: SimpleNamespace(value=SimpleNamespace()),
            "CUlaunchConfig": SimpleNamespace,
        }
    )
    nvrtc.launch("kernel", (5, 6), 128, 512, (17,), DEVICE, overlapping=True)
    attribute = SimpleNamespace(value=SimpleNamespace(programmaticStreamSerializationAllowed=1), id=6)
    grid, block = {"gridDimX": 5, "gridDimY": 6, "gridDimZ": 1}, {"blockDimX": 128, "blockDimY": 1, "blockDimZ": 1}
    config = {**grid, **block, "sharedMemBytes": 512, "hStream": 7, "attrs": [attribute], "numAttrs": 1}
    assert launched == [(config, "kernel", 17)]


def test_a_failed_launch_is_one_line(bindings: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    failed = SimpleNamespace(value=1, name="CUDA_ERROR_INVALID_VALUE")
    bindings(driver={"cuLaunchKernel": lambda *arguments: (failed,)})
    with pytest.raises(CapacityError, match="CUDA_ERROR_INVALID_VALUE from a kernel; please report it"):
        nvrtc.launch("kernel", (1, 1), 32, 0, (), DEVICE)


def test_source_that_is_not_compiled_says_why_in_one_line(bindings: Callable[..., None]) -> None:
    log = b'kernel.cu(3): error: identifier "x" is undefined\n\n1 error detected.\n\0'

    def read_log(program: object, buffer: bytes) -> tuple[object]:
        ctypes.memmove(buffer, log, len(log))
        return (GOOD,)

    bindings(
        nvrtc={
            "nvrtcCreateProgram": lambda *arguments: (GOOD, "program"),
            "nvrtcCompileProgram": lambda *arguments: (BAD,),
            "nvrtcGetProgramLogSize": lambda program: (GOOD, len(log)),
            "nvrtcGetProgramLog": read_log,
        }
    )
    with pytest.raises(CapacityError) as error:
        nvrtc.machine_code("source", "kernel.cu", "sm_90", {"ROWS": 4})
    assert str(error.value) == 'kernel.cu was not compiled: kernel.cu(3): error: identifier "x" is undefined'


@pytest.mark.parametrize("columns", [176, 256])
def test_products_of_a_tile_name_its_sums(columns: int) -> None:
    source = nvrtc.hopper_source(gated_product.__file__, columns)
    assert "@" not in source.replace("@!done", "")
    assert f"m64n{columns}k32.f32.e4m3.e4m3 {{%0, " in source
    last = columns // 2
    assert f", %{last - 1}}}, %{last}, %{last + 1}, add" in source and f"setp.ne.b32 add, %{last + 2}, 0" in source
    assert source.count('"+f"(sum[') == last + 1  # and those that `keep` names
    assert source.index("copy_piece(const TensorMap") < source.index("activated(const float")


def test_a_device_that_does_not_take_a_kernel_is_one_line(bindings: Callable[..., None]) -> None:
    """Here there is none."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    bindings(driver={})
    with pytest.raises(CapacityError, match="the kernel gated_product cannot be loaded: "):
        nvrtc.load(b"", "gated_product", 0)
