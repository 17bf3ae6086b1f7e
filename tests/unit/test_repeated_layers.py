"""`RepeatedLayers` compared with layers that compute every step themselves, bit for bit; and what is never recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.families import GELU_TANH, MultipliersConfig
from penstock.config.layer_heads import KVHeads, PerLayerInputs
from penstock.config.model import ModelConfig
from penstock.kernels import native, recording
from penstock.kernels.quantized import quantize_absmax
from penstock.kernels.rms_norm import rms_norm
from penstock.layers.linear import Linear
from penstock.models import repeated
from penstock.models.decoder import Decoder
from tests.unit.test_fused_decode import MODELS, VOCAB, caches_of, context_of, make

pytestmark = pytest.mark.skipif(native.library() is None, reason="the torch references are not recorded")
AUX_LAYERS = (1, 2)
# The last two layers read the keys and values of the first two, whose blocks are of two sizes.
SHARED = replace(
    MODELS["llama"],
    model_type="gemma4_text",
    num_hidden_layers=4,
    layer_windows=(7, 0, 7, 0),
    kv_sources=(0, 1, 0, 1),
    full_heads=KVHeads(1, 40),
    has_keys_as_values=True,
    per_layer_inputs=PerLayerInputs(size=8, vocab_size=VOCAB),
    activation=GELU_TANH,
    multipliers=MultipliersConfig(embedding=8.0, attention=1.0),
)


class Calls:
    """The hooks of a connector that note their calls (`LayerHooks`), and the calls of `Recording.repeat`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[str] = []
        repeat = recording.Recording.repeat

        def noting(each: recording.Recording, first: int = 0, end: int | None = None) -> torch.Tensor:
            self.noted.append("repeat")
            return repeat(each, first, end)

        monkeypatch.setattr(recording.Recording, "repeat", noting)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.noted.append(f"wait {layer_name}")

    def save_kv_layer(self, layer_name: str) -> None:
        self.noted.append(f"save {layer_name}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


class Run:
    """A model that decodes requests, with caches of its own."""

    def __init__(self, config: ModelConfig, num_requests: int, aux_layers: tuple[int, ...] = ()) -> None:
        self.model: Decoder = make(config, aux_layers)
        self.caches = caches_of(self.model, num_requests)
        self.lengths = [0] * num_requests

    @torch.inference_mode()
    def step(self, counts: Sequence[int], hooks: Calls | None = None) -> torch.Tensor:
        """Computes so many more tokens of each request; returns the hidden states and the kept streams."""
        starts = self.lengths
        self.lengths = [length + count for length, count in zip(starts, counts, strict=True)]
        positions = torch.cat([torch.arange(*each) for each in zip(starts, self.lengths, strict=True)])
        context: ForwardContext = context_of(self.caches, self.lengths, counts)
        if hooks is not None:
            context = replace(context, hooks=hooks)
        output = self.model.forward((positions * 7 + sum(counts)) % VOCAB, positions, context)
        return torch.cat((output.hidden, output.aux_hidden), -1)

    def stored(self) -> torch.Tensor:
        return torch.cat([each.nan_to_num().flatten() for each in self.caches.values()])


def check(config: ModelConfig, monkeypatch: pytest.MonkeyPatch, aux_layers: tuple[int, ...] = ()) -> None:
    """Compares steps of changing shapes with those of a model that records nothing."""
    ours, other = Run(config, 3, aux_layers), Run(config, 3, aux_layers)
    for counts in ((9, 5, 12), *((1, 1, 1),) * 3, (2, 1, 1), *((1, 1, 1),) * 3, *((2, 1, 1),) * 3):
        result = ours.step(counts)
        with monkeypatch.context() as patch:
            patch.setattr(repeated, "MAX_ROWS", 0)
            assert torch.equal(result, other.step(counts)), counts
    assert torch.equal(ours.stored(), other.stored())


@pytest.mark.parametrize("name", MODELS)
def test_the_bits_of_the_layers_themselves(name: str, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    check(MODELS[name], monkeypatch)
    # Neither the first two steps of a shape nor the prompt.
    assert calls.noted == ["repeat"] * 6


def test_streams_are_kept_between_the_layers(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    check(MODELS["llama"], monkeypatch, AUX_LAYERS)
    assert calls.noted == ["repeat"] * 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is computed on a CPU only")
def test_layers_that_read_another_s_keys_and_inputs_of_their_own(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    check(SHARED, monkeypatch)
    assert calls.noted == ["repeat"] * 6
    calls.noted.clear()
    # The streams are kept between sources and readers.
    check(SHARED, monkeypatch, (2,))
    assert calls.noted == ["repeat"] * 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is computed on a CPU only")
def test_hooks_are_not_called_for_layers_that_store_nothing(calls: Calls) -> None:
    ours, other = Run(SHARED, 2), Run(SHARED, 2)
    first, second = (f"model.layers.{layer}.self_attn" for layer in (0, 1))
    assert set(ours.caches) == {first, second}
    for run in (ours, other):
        for counts in ((9, 5), (1, 1), (1, 1)):
            run.step(counts)
    calls.noted.clear()
    assert torch.equal(ours.step((1, 1), calls), other.step((1, 1)))
    around = [f"wait {first}", "repeat", f"save {first}", f"wait {second}", "repeat", f"save {second}"]
    assert calls.noted == [*around, "repeat", "repeat", "repeat"]
    # A step that nothing repeats calls them alike.
    calls.noted.clear()
    ours.step((2, 3), calls)
    assert calls.noted == [each for each in around if each != "repeat"]


def test_hooks_are_called_around_every_layer(calls: Calls) -> None:
    ours, other = Run(MODELS["llama"], 2), Run(MODELS["llama"], 2)
    for run in (ours, other):
        for counts in ((9, 5), (1, 1), (1, 1)):
            run.step(counts)
    calls.noted.clear()
    assert torch.equal(ours.step((1, 1), calls), other.step((1, 1)))
    first, second = (f"model.layers.{layer}.self_attn" for layer in (0, 1))
    around = [f"wait {first}", "repeat", f"save {first}", f"wait {second}", "repeat", f"save {second}"]
    assert calls.noted == [*around, "repeat"]


def test_nothing_is_recorded_while_hooks_are_active(calls: Calls) -> None:
    ours, other = Run(MODELS["llama"], 2), Run(MODELS["llama"], 2)
    for hooks in (None, *(calls,) * 3, None, calls):
        counts = (1, 1) if ours.lengths[0] else (9, 5)
        assert torch.equal(ours.step(counts, hooks), other.step(counts))
        calls.noted = [each for each in calls.noted if each == "repeat"]
    # Only the other model's, and at last one for each of our layers.
    assert calls.noted == ["repeat"] * 5


@pytest.mark.parametrize(("config", "aux_layers"), [(MODELS["llama"], ()), (SHARED, (2,))])
def test_another_cache_is_read(config: ModelConfig, aux_layers: tuple[int, ...], calls: Calls) -> None:
    """Also by layers that read others' caches, in a span of their own."""
    run, repeats = Run(config, 2, aux_layers), ["repeat"] * (1 + len(aux_layers))
    for counts in ((9, 5), (1, 1), (1, 1), (1, 1)):
        expected = run.step(counts)
    assert calls.noted == repeats
    moved = {name: tensor.clone() for name, tensor in run.caches.items()}
    for tensor in run.caches.values():
        tensor.fill_(torch.nan)
    run.caches, run.lengths = moved, [length - 1 for length in run.lengths]
    assert torch.equal(run.step((1, 1)), expected)
    assert calls.noted == repeats * 2


def test_a_number_of_threads_has_its_own_recording(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    run = Run(MODELS["llama"], 2)
    for threads in (1, 1, 1, 2, 2, 2, 1):
        monkeypatch.setattr(native, "_num_threads", threads)
        run.step((1, 1))
    assert calls.noted == ["repeat"] * 3


def test_layers_that_compute_with_torch_are_never_recorded(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    check(replace(MODELS["llama"], multipliers=MultipliersConfig(residual=0.5)), monkeypatch)
    assert not calls.noted


def test_old_recordings_are_dropped(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setattr(repeated, "MAX_RECORDINGS", 2)
    run = Run(MODELS["llama"], 3)
    run.step((2, 2, 2))
    for counts in ((1, 1, 1), (1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1)):
        run.step(counts)
    assert calls.noted == ["repeat"]


def test_weights_of_several_kinds_are_recorded() -> None:
    weight = torch.randn(96, 64, dtype=torch.bfloat16)
    kinds = Linear(weight), Linear(quantize_absmax(weight[:40], 8, 64)), Linear(quantize_absmax(weight[:33], 4, 32))
    layer, x = Linear.joined(kinds), torch.randn(3, 64, dtype=torch.bfloat16)
    result, recorded = recording.record([layer], x, [x], recording.Workspace())
    assert torch.equal(result, torch.cat([each(x) for each in kinds], 1))
    assert torch.equal(layer.dense_weight(), torch.cat([each.dense_weight() for each in kinds]))
    assert recorded is not None
    other = torch.randn(3, 64, dtype=torch.bfloat16)
    recorded.set_inputs([other.data_ptr()])
    assert torch.equal(recorded.repeat(), layer(other))


def test_a_call_that_cannot_be_repeated_ends_the_recording() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    library = native.library()
    assert library is not None

    def norm(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, 1e-5)

    def with_another_call(x: torch.Tensor) -> torch.Tensor:
        library.common_function("supports", "p")(b"avx2")
        return norm(x)

    for part, is_recorded in ((norm, True), (with_another_call, False)):
        result, recorded = recording.record([norm, part], x, [x], recording.Workspace())
        assert torch.equal(result, norm(norm(x)))
        assert (recorded is not None) == is_recorded
    # After the failed recording, calls are only made.
    assert torch.equal(norm(x), rms_norm(x, weight, 1e-5))


def test_numbers_that_are_made_a_tensor_end_the_recording() -> None:
    """Its memory is used for others as soon as the tensor is gone."""
    x = torch.randn(2, 4)
    result, recorded = recording.record(
        [lambda x: rms_norm(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), 1e-5)], x, [x], recording.Workspace()
    )
    assert torch.equal(result, rms_norm(x, torch.tensor([1.0, 2.0, 3.0, 4.0]), 1e-5))
    assert recorded is None


def test_a_recording_imports_no_compiler() -> None:
    """Torch imports its own for an ordinary dispatch mode, which takes longer than a step of a large model."""
    code = """
import sys, torch
from penstock.kernels.recording import Workspace, record
x = torch.ones(4)
assert record([torch.empty_like, torch.empty_like], x, [x], Workspace())[1] is not None
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
