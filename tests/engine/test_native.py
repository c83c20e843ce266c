"""Getting compiled kernels, or a reason why not, and what they refuse to be given."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from megatoken.engine.ops import native

(OTHER_LIBRARY,) = Path(psutil.__file__).parent.glob("*.so")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for the kernels")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder of the test's own; what is loaded for good comes from the user's."""
    native.library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatoken"


def load() -> tuple[ctypes.CDLL | None, str | None]:
    """As a new process would."""
    return native._library_or_reason.__wrapped__()


def why_not() -> str:
    kernels, reason = load()
    assert kernels is None
    assert reason is not None
    assert "\n" not in reason
    return reason


def use_compiler(monkeypatch: pytest.MonkeyPatch, path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """A compiler that takes no ten seconds: it hands out what the real one made; returns how often it was called."""
    if native.library() is None:
        pytest.skip(str(native.status()["why_no_kernels"]))
    log = tmp_path / "log"
    log.touch()
    made = native.library()._name
    use_compiler(monkeypatch, tmp_path / "compiler", f'echo >> {log}\nfor last; do :; done\ncp {made} "$last"')
    return lambda: len(log.read_text())


# Building


@needs_compiler
def test_a_processor_without_products_of_bf16_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "PROCESSOR", tmp_path / "cpuinfo")
    native.PROCESSOR.write_text("flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n")
    assert native.status() == {"kernels": "compiled", "why_no_kernels": None, "bf16_widened": False}
    native.PROCESSOR.write_text("flags\t\t: fpu avx2 avx512f\n")
    assert native.status() == {"kernels": "compiled", "why_no_kernels": None, "bf16_widened": True}


@needs_compiler
def test_where_there_is_a_compiler_there_are_kernels() -> None:
    assert native.library() is not None
    assert native.status()["kernels"] == "compiled"


def test_it_is_known_before_whether_they_must_be_built(builds: Callable[[], int], cache: Path) -> None:
    assert native.must_build()
    assert not cache.exists()
    load()
    assert not native.must_build()
    assert builds() == 1


def test_what_cannot_be_built_need_not_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not native.must_build()


@needs_compiler
def test_only_gcc_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    use_compiler(monkeypatch, tmp_path / "clang++", 'exec g++ -D__clang__ "$@"')
    assert "the kernels need GCC" in why_not()
    assert list(cache.iterdir()) == []


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors' compilers do not know these")
@pytest.mark.parametrize("processor", ["x86-64", "haswell", "skylake-avx512", "cooperlake", "sapphirerapids"])
def test_they_compile_for_other_processors(processor: str) -> None:
    """Without AVX2, with it, with AVX-512, its bf16 products, AMX: whatever this machine has."""
    flags = [flag for flag in native.FLAGS if not flag.startswith("-march")]
    command = ["g++", *flags, f"-march={processor}", "-O0", "-S", "-o", os.devnull, str(native.SOURCE)]
    subprocess.run(command, check=True)


def test_a_compiler_that_is_not_there_or_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not() == "no compiler no-such-compiler"
    use_compiler(monkeypatch, tmp_path / "g++", "echo 'kernels.cpp:3:1: error: no room' >&2\nexit 1")
    assert why_not() == f"{tmp_path}/g++ failed: no room"
    use_compiler(monkeypatch, tmp_path / "g++", "exit 4")
    assert why_not() == f"{tmp_path}/g++ failed: exit status 4"
    assert list(cache.iterdir()) == []


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, tmp_path / "g++", f"sleep 54321 &\necho $! > {tmp_path}/child\nwait")
    monkeypatch.setattr(native, "BUILD_SECONDS", 1)
    start = time.monotonic()
    assert why_not() == f"{tmp_path}/g++ took over 1 s"
    assert time.monotonic() - start < 60
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_place_to_keep_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert str(tmp_path / "file") in why_not()

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert why_not() == "Could not determine home directory."


def test_systems_they_are_not_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(native, "PROCESSOR", tmp_path / "cpuinfo")
    assert str(tmp_path / "cpuinfo") in why_not()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert why_not() == "kernels are for Linux, this is Darwin"


# The cache


def test_they_are_built_once(builds: Callable[[], int], cache: Path) -> None:
    assert [load()[1], load()[1]] == [None, None]
    assert builds() == 1
    assert len(list(cache.iterdir())) == 1


def test_they_are_built_anew_for_a_changed_source(
    builds: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any of the files that the compiler reads."""
    load()
    assert set(native.HEADERS) == set(native.SOURCE.parent.glob("*.h"))
    for place, header in enumerate(native.HEADERS):
        changed = tmp_path / header.name
        changed.write_bytes(header.read_bytes() + b"\n")
        monkeypatch.setattr(native, "HEADERS", (*native.HEADERS[:place], changed, *native.HEADERS[place + 1 :]))
        load()
        assert builds() == place + 2


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "cut short": lambda content: content[:-1],
    "changed": lambda content: content[:9000] + bytes([content[9000] ^ 1]) + content[9001:],
    "zeros": lambda content: bytes(len(content)),
    "another library": lambda content: OTHER_LIBRARY.read_bytes(),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_built_anew(
    damage: Callable[[bytes], bytes], builds: Callable[[], int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load()[1] is None
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    damaged = damage(whole)
    file.unlink()  # a file that is mapped must not change
    file.write_bytes(damaged)
    loaded = []
    monkeypatch.setattr(native, "_load", lambda file: loaded.append(file.read_bytes()))
    assert load()[1] is None
    assert loaded == [whole]  # and the damaged one was never run
    assert builds() == 2


@pytest.mark.parametrize("content", ["", "not a library"])
def test_a_build_that_cannot_be_loaded_is_no_error(
    content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compiler(monkeypatch, tmp_path / "g++", f'for last; do :; done\nprintf "{content}" > "$last"')
    assert "kernels-" in why_not()
    assert "kernels-" in why_not()


def test_a_library_without_the_kernels_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_compiler(monkeypatch, tmp_path / "g++", f'for last; do :; done\ncp {OTHER_LIBRARY} "$last"')
    assert "undefined symbol: attention" in why_not()


def test_what_others_may_have_written_is_not_run(
    builds: Callable[[], int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load()[1] is None
    (file,) = cache.iterdir()
    for path in (file, cache):
        path.chmod(path.stat().st_mode | 0o002)
        assert why_not() == f"{path} belongs to or can be written by another user"
        path.chmod(0o700)
    assert load()[1] is None
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert why_not() == f"{cache} belongs to or can be written by another user"
    assert builds() == 1


def test_what_is_built_is_the_users_alone(builds: Callable[[], int], cache: Path) -> None:
    before = os.umask(0)
    try:
        assert load()[1] is None
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (cache, *cache.iterdir())] == [0o700, 0o700]


# Operands

needs_kernels = pytest.mark.skipif("native.library() is None", reason="no kernels")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_without_a_kernel_are_left_to_torch(dtype: torch.dtype) -> None:
    k_cache = torch.zeros(3, 2, 16, 32, dtype=dtype)
    assert native.has_attention(4, k_cache.bfloat16())
    assert not native.has_attention(4, k_cache)
    assert native.rms_norm(torch.ones(2, 32, dtype=dtype), torch.ones(32, dtype=dtype), 1e-6) is None
    rows = torch.zeros(1, dtype=torch.int32)
    table = torch.ones(8, 32, dtype=dtype)
    qkv = torch.ones(1, 8 * 32, dtype=dtype)
    assert native.rotate_and_write(qkv, table, table, rows, rows, k_cache, k_cache.clone(), 4) is None


def wrong(tensor: Tensor) -> list[Tensor]:
    """The same numbers as another dtype, another shape, another layout."""
    other = torch.int64 if tensor.dtype == torch.int32 else torch.float32
    return [tensor.to(other), tensor[:, None], tensor.repeat_interleave(2, -1)[..., ::2]]


@needs_kernels
def test_wrong_operands_are_refused() -> None:
    """Each in turn; a kernel would read or write somewhere else."""
    heads, kv_heads, head_dim, page_size, rows = 4, 2, 32, 16, 3
    cache = torch.zeros(4, kv_heads, page_size, head_dim, dtype=torch.bfloat16)
    table = torch.ones(8, head_dim, dtype=torch.bfloat16)
    x = torch.ones(rows, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
    q = torch.ones(rows, heads, head_dim, dtype=torch.bfloat16)
    ids = torch.ones(rows, dtype=torch.int32)

    def rotate(*operands: Tensor) -> Tensor | None:
        return native.rotate_and_write(*operands, heads)

    def norm(*operands: Tensor) -> Tensor | None:
        return native.rms_norm(x, *operands, 1e-6)

    calls = [
        (native.attention, [q, cache, cache.clone(), ids[:, None].contiguous(), ids, torch.arange(4).int()]),
        (norm, [torch.ones(x.shape[1], dtype=torch.bfloat16)]),
        (rotate, [x, table, table.clone(), ids, ids.clone(), cache, cache.clone()]),
    ]
    for call, operands in calls:
        assert call(*operands) is not None
        for place, operand in enumerate(operands):
            for spoilt in wrong(operand):
                with pytest.raises((TypeError, ValueError)):
                    call(*operands[:place], spoilt, *operands[place + 1 :])


THREADS = """
import os, sys, threading, torch
from megatoken.engine.ops import native

torch.set_num_threads(1)
x = torch.ones(512, 256)
native.rms_norm(x[:1], x[0], 1e-6)

def run():
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        native.rms_norm(x, x[0], 1e-6)
    sys.stdout.write(str(len(os.listdir("/proc/self/task")) - before))

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@needs_kernels
def test_they_run_on_as_many_threads_as_torch() -> None:
    """Whatever OpenMP would do by itself in a thread that torch has not prepared."""
    cache = Path(native.library()._name).parents[1]
    started = subprocess.run(
        [sys.executable, "-c", THREADS],
        env={**os.environ, "OMP_NUM_THREADS": "3", "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert started.stdout == "0", started.stderr
