"""`--quantization` and `--quantize-head` round weights when they are read; `--quantize-activations` inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config.engine import EngineArgs, resolve
from penstock.config.load_quantization import AS_STORED, LoadQuantization
from penstock.config.quantization import QuantizationConfig
from penstock.kernels.quantized import LayerWeight, QuantizedWeight, dense, quantize_absmax
from penstock.models.sources.source import ALL, Part, WeightSource
from penstock.models.weights import Weights
from penstock.utils.errors import ConfigError


@pytest.mark.parametrize(("bits", "group", "inputs"), [(4, 32, 96), (8, 32, 96), (4, 32, 50), (8, 16, 7)])
def test_numbers_are_rounded_to_the_nearest_of_their_group(bits: int, group: int, inputs: int) -> None:
    weight = (torch.randn(40, inputs) * 0.1).bfloat16()
    weight[3] = 0
    rounded = quantize_absmax(weight, bits, group)
    assert (rounded.bits, rounded.group, rounded.shape) == (bits, group, weight.shape)
    values = rounded.dequantize().float()
    for first in range(0, inputs, group):
        part, found = weight[:, first : first + group].float(), values[:, first : first + group]
        largest = part.abs().amax(1, keepdim=True)
        step = largest / 2 ** (bits - 1)
        # The other side has one integer less; the scale is rounded to 8 bits.
        assert ((found - part).abs() <= step * 1.01 + largest * 2**-8).all()
        close = part.abs() < largest * (1 - 2 ** (2 - bits))
        assert ((found - part).abs()[close] <= (step * 0.51 + largest * 2**-8).expand_as(part)[close]).all()
    assert not values[3].any()


def test_rows_are_rounded_by_themselves() -> None:
    weight = torch.randn(8, 64).bfloat16()
    whole, part = quantize_absmax(weight, 4, 32), quantize_absmax(weight[3:5], 4, 32)
    assert torch.equal(whole.dequantize()[3:5], part.dequantize())
    # The kind of a weight is that of no rows of it.
    none = quantize_absmax(weight[:0], 4, 32)
    assert none.is_like(whole)
    assert none.shape == (0, 64)


class Stored(dict[str, LayerWeight]):
    """Tensors as a `WeightSource` (what is read of it here)."""

    def has(self, name: str) -> bool:
        return name in self

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> LayerWeight:
        assert self[name].shape == tuple(shape)
        weight = self[name]
        return weight.part(*part) if isinstance(weight, QuantizedWeight) else weight[part]


def read_layer(bits: int, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns a layer's outputs, those of the values that are stored, and its bytes. q, k and v are of three kinds."""
    torch.manual_seed(0)
    names, width = {"q_proj": 64, "k_proj": 32, "v_proj": 32}, 96
    q, k, v = (torch.randn(rows, width).bfloat16() for rows in names.values())
    found = quantize_absmax(q, 4, 32), k, quantize_absmax(v, 8, 32)
    kinds: dict[str, LayerWeight] = dict(zip(names, found, strict=True))
    biases = {f"{name}.bias": torch.randn(rows).bfloat16() for name, rows in names.items()}

    def weights_of(tensors: dict[str, LayerWeight], rounding: LoadQuantization) -> Weights:
        source = Stored({**biases, **{f"{name}.weight": weight for name, weight in tensors.items()}})
        return Weights(cast(WeightSource, source), torch.bfloat16, torch.device("cpu"), load_quantization=rounding)

    weights = weights_of(kinds, LoadQuantization(bits))
    layer = weights.linear(names, width, bias=True, order=order)
    plain = weights_of({name: dense(kind) for name, kind in kinds.items()}, AS_STORED)
    wanted = plain.linear(names, width, bias=True, order=order)
    x = torch.randn(5, width).bfloat16()
    return layer(x), wanted(x), weights.size.num_bytes


@pytest.mark.parametrize("bits", [0, 4])
def test_what_is_stored_in_several_ways_is_not_rounded_and_keeps_its_bytes_in_another_order(bits: int) -> None:
    """Heads of 16 features: halves of q change places, and v comes first. In between, every other row of q and v."""
    q, k, v = torch.arange(64).view(2, 2, 16).transpose(0, 1).flatten(), torch.arange(64, 96), torch.arange(96, 128)
    for order in (torch.cat([v, q, k]), torch.cat([q.flip(0), v, k])):
        found, wanted, num_bytes = read_layer(bits, order)
        if not bits:  # else k_proj is rounded
            assert torch.equal(found, wanted)
        else:
            others = [place for place, row in enumerate(order.tolist()) if row not in k.tolist()]
            assert torch.equal(found[:, others], wanted[:, others])
        assert num_bytes < 128 * 96 * 1.5
    alternating = torch.cat([torch.stack([q[:32], v], 1).flatten(), q[32:], k])
    found, wanted, _ = read_layer(0, alternating)
    assert torch.equal(found, wanted)


def outputs(**arguments: Any) -> Any:
    llm = LLM(max_model_len=256, num_gpu_blocks_override=64, **arguments)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    found = llm.generate(["What is 3 + 4?", "The"], params)
    llm.shutdown()
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


@pytest.mark.long
def test_each_flag_rounds_its_layers_and_ranks_change_nothing() -> None:
    kinds: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantize_head": "int8"}]
    kinds.append({"quantization": "int4", "quantize_activations": "int8"})
    found = [outputs(**kind) for kind in kinds]
    for index, each in enumerate(found):
        assert each not in found[:index], kinds[index]
    # As many bits leave the first word as it is.
    assert found[1][0][0][:1] == found[0][0][0][:1]
    for kind in (2, 4):
        assert (
            outputs(**kinds[kind], tensor_parallel_size=2, max_num_batched_tokens=16, check_weights=True) == found[kind]
        )


def test_the_flags_are_those_of_a_cpu_and_bfloat16() -> None:
    assert resolve(EngineArgs(quantization="int4", quantize_head="int8")).load_quantization == LoadQuantization(4, 8)
    refused: list[dict[str, Any]] = [
        {"quantization": "int8", "dtype": "float32"},
        {"quantize_head": "int8", "device": "cuda"},
        {"quantize_activations": "int8", "dtype": "float16"},
    ]
    for changes in refused:
        name = next(iter(changes))
        with pytest.raises(ConfigError, match=rf"{name}=int8 needs a CPU and bfloat16"):
            resolve(EngineArgs(**changes))
    with pytest.raises(ConfigError, match="need a CPU"):
        resolve(EngineArgs(quantization="int8")).on_device("cuda")
    with pytest.raises(ConfigError, match="are not quantized: set quantization"):
        resolve(EngineArgs(quantize_activations="int8"))
    rounded = {"quantization": None, "quantize_head": None, "quantize_activations": "int8"}
    for method, is_served in (("fp8", False), ("modelopt", False), ("mxfp4", True), ("gguf", True)):
        model = replace(resolve(EngineArgs()).model, quantization=QuantizationConfig(method))
        with nullcontext() if is_served else pytest.raises(ConfigError, match="are 8-bit floats"):
            assert LoadQuantization.of(rounded, model, "cpu") == LoadQuantization(activations=True)
    both = resolve(EngineArgs(quantization="int4", quantize_activations="int8")).load_quantization
    assert both == LoadQuantization(4, activations=True)
    assert both.for_head() == LoadQuantization(0, activations=True)
    with pytest.raises(ConfigError, match="quantization"):
        resolve(EngineArgs(quantization="int3"))
