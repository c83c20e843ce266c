"""Large tensors of a file reach a GPU as they are stored, whatever their size and type."""

import pytest
import torch
from safetensors.torch import save_file

from megatoken.engine import tensor_files
from megatoken.engine.quantized_layouts import Fp8Layout
from megatoken.engine.tensor_files import find_tensors
from megatoken.errors import CheckpointError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(tensor_files, "_AHEAD_BYTES", 3 << 20)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("shape", [(3001, 1537), (2 << 20,), (7, 3, 65537), (5, 8), ()])
@pytest.mark.usefixtures("small_chunks")
def test_what_a_gpu_gets_is_what_the_file_holds(tmp_path, dtype, shape):
    bits = torch.randint(-(2**30), 2**30, shape, dtype=torch.int32).to(BITS[dtype.itemsize])
    save_file({"one": torch.zeros(3), "two": bits.view(dtype)}, tmp_path / "model.safetensors")
    stored = find_tensors(tmp_path)[0]["two"]
    whole = stored.whole(DEVICE)
    assert whole.device.type == "cuda" and whole.dtype == dtype and whole.shape == shape
    assert torch.equal(whole.view(bits.dtype).cpu(), bits)


@pytest.mark.usefixtures("small_chunks")
def test_a_nan_in_the_last_value_is_found(tmp_path):
    values = torch.randn(4096, 4096).to(torch.float8_e4m3fn)
    files = {"m.weight": values, "m.weight_scale": torch.ones(())}
    save_file(files, tmp_path / "model.safetensors")
    layout = Fp8Layout(row_scales=False, input_scales=False)
    read = layout.read("m", (4096, 4096), find_tensors(tmp_path)[0], DEVICE)
    assert torch.equal(read.values_ND.view(torch.uint8).cpu(), values.view(torch.uint8))
    values.view(torch.uint8)[-1, -1] = 0xFF
    save_file(files, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds NaN"):
        layout.read("m", (4096, 4096), find_tensors(tmp_path)[0], DEVICE)


@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_became_shorter_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.randn(4096, 2048)}, path)
    stored = find_tensors(tmp_path)[0]["one"]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="became shorter"):
        stored.whole(DEVICE)
