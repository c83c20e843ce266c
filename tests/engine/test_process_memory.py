"""What the operating system does with the advice it gets, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import sys
import torch
from megatoken.engine import process_memory

def kilobytes(file, key):
    return sum(int(line.split()[1]) for line in open(file) if line.startswith(key + ":"))

if sys.argv[1] == "code":
    before = kilobytes("/proc/self/status", "RssFile")
    process_memory.return_idle_code()
    after = kilobytes("/proc/self/status", "RssFile")
    assert torch.ones(3).sum() == 3  # comes back when it is called
    print(before, after)
else:
    weights = torch.ones(64 << 20, dtype=torch.uint8)
    before = kilobytes("/proc/self/smaps", "AnonHugePages")
    process_memory.use_huge_pages()
    print(before, kilobytes("/proc/self/smaps", "AnonHugePages"))
    assert weights.sum() == 64 << 20
"""


def kilobytes_before_and_after(what: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", CHILD, what], capture_output=True, text=True, check=True, timeout=200)
    before, after = map(int, done.stdout.split())
    return before, after


def test_idle_code_is_given_back() -> None:
    before, after = kilobytes_before_and_after("code")
    assert after < before - 30_000  # importing PyTorch touches 60 MB


def test_large_pages_are_taken_where_the_kernel_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file():
        pytest.skip("this kernel has no transparent huge pages")
    before, after = kilobytes_before_and_after("pages")
    if before >= 60_000:
        pytest.skip("this kernel gives large pages without being asked")
    if after == before:
        pytest.skip("this kernel does not move memory to large pages on request (Linux 6.1 and later do)")
    assert after >= before + 50_000
