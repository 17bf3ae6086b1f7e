"""Builds the configured speculator."""

from __future__ import annotations

from penstock.attention.backend import AttentionBackend
from penstock.attention.forward_context import LayerCaches
from penstock.config.speculative import SpeculativeConfig
from penstock.models.eagle3 import Eagle3Head
from penstock.models.mtp import MultiTokenPredictor
from penstock.runner.input_batch import InputBuilder
from penstock.runner.kv_cache import KVCache
from penstock.runner.loaded_model import DRAFT_PREFIX, LoadedModel
from penstock.runner.parts import DeviceParts
from penstock.runner.speculation.draft import DraftModelSpeculator, HeadSpeculator, Picker
from penstock.runner.speculation.speculator import NullSpeculator, Speculator


def make_speculator(
    loaded: LoadedModel,
    cache: KVCache,
    speculative: SpeculativeConfig | None,
    inputs: InputBuilder,
    attention: AttentionBackend,
    picker: Picker,
    parts: DeviceParts,
) -> Speculator:
    """`inputs` and `attention` are the runner's, which the drafter shares."""
    if speculative is None:
        return NullSpeculator()
    if loaded.drafter is None:
        return parts.make_ngram_speculator(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    names = {layer.name.removeprefix(DRAFT_PREFIX): layer for layer in cache.config.attached}
    draft_cache = LayerCaches(
        {name: cache.tensors[layer.name] for name, layer in names.items()},
        {name: layer.group for name, layer in names.items()},
        attention,
    )
    if isinstance(loaded.drafter, MultiTokenPredictor | Eagle3Head):
        return HeadSpeculator(loaded.drafter, draft_cache, inputs, picker)
    return DraftModelSpeculator(loaded.drafter, draft_cache, inputs, picker)
