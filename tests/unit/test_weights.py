"""A checkpoint's tensors as a model gets them: on a CPU as they lie, on a GPU through staging into their place."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.kernels.staging import Stager
from penstock.models.weights import DIRECT, Delivery, DummySource, StagedDelivery, Weights, open_weights
from penstock.utils.errors import ConfigError
from tests.kernels.test_staging import LateQueue

CPU = torch.device("cpu")
ROWS = {"q_proj.weight": 48, "k_proj.weight": 16, "v_proj.weight": 16}


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {f"layer.{name}": (rows, 33) for name, rows in ROWS.items()}
    shapes |= {"norm.weight": (33,), "layer.q_proj.bias": (48,), "layer.k_proj.bias": (16,), "layer.ids": (5,)}
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    tensors["layer.ids"] = torch.arange(5)
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_staged", [False, True])
def test_every_tensor(stored: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype, is_staged: bool) -> None:
    source = open_weights(tmp_path, "auto")
    with closing(source), closing(Stager(LateQueue(), 64, 2)) as stager, torch.inference_mode():
        delivery: Delivery = StagedDelivery(stager) if is_staged else DIRECT
        weights = Weights(source, dtype, CPU, delivery=delivery)
        assert torch.equal(weights.tensor("norm.weight", 33), stored["norm.weight"].to(dtype))
        layer = weights / "layer"
        whole = layer.tensors(ROWS, 33)
        assert torch.equal(whole, torch.cat([stored[f"layer.{name}"] for name in ROWS]).to(dtype))
        assert whole.is_contiguous()
        assert whole.untyped_storage().nbytes() == whole.nbytes
        bias = layer.tensors({"q_proj.bias": 48, "k_proj.bias": 16})
        assert torch.equal(bias, torch.cat([stored[f"layer.{n}_proj.bias"] for n in "qk"]).to(dtype))
        assert torch.equal(layer.integers("ids", 5), stored["layer.ids"])
        with pytest.raises(ConfigError, match=r"'layer.k_proj.weight' has shape \[16, 33\], config.json asks for \[17"):
            layer.tensors({**ROWS, "k_proj.weight": 17}, 33)
        with pytest.raises(ConfigError, match=r"no tensor 'layer.o_proj.weight'"):
            layer.tensor("o_proj.weight", 33, 48)


def test_a_cpu_gets_the_pages_of_the_file(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with closing(open_weights(tmp_path, "auto")) as source:
        first, again = (Weights(source, torch.bfloat16, CPU).tensor("norm.weight", 33) for _ in range(2))
        assert first.data_ptr() == again.data_ptr()


@pytest.mark.usefixtures("stored")
def test_a_truncated_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="is truncated or no safetensors file"):
        open_weights(tmp_path, "auto")


def test_dummy_weights_are_the_names_alone() -> None:
    pool = 1 << 22
    for shape in ((3, 5), (2, pool + 7)):
        a, b = (DummySource(CPU).read("w", shape) for _ in range(2))
        other = DummySource(CPU).read("v", shape)
        assert a.shape == shape
        assert torch.equal(a, b)
        assert not torch.equal(a, other)
    assert a.untyped_storage().nbytes() == a.nbytes
    assert torch.equal(a.view(-1)[:15], DummySource(CPU).read("w", (3, 5)).view(-1))
    assert torch.equal(a.view(-1)[pool:][:14], a.view(-1)[:14])
    assert abs(float(a.float().std()) - 0.02) < 1e-4
    source = DummySource(CPU)
    assert source.read("x.bias", (4,)).tolist() == [0.0] * 4
    assert source.read("norm.weight", (4,)).tolist() == [1.0] * 4
