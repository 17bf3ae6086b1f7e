"""`--quantization` and `--quantize-head` round weights when they are read; `--quantize-activations` inputs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.config.engine import EngineArgs, resolve
from penstock.config.load_quantization import LoadQuantization
from penstock.config.quantization import QuantizationConfig
from penstock.kernels.quantized import quantize_absmax
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


def outputs(**arguments: Any) -> Any:
    llm = LLM(max_model_len=256, num_gpu_blocks_override=64, **arguments)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    found = llm.generate(["What is 3 + 4?", "The"], params)
    llm.shutdown()
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in found]


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
