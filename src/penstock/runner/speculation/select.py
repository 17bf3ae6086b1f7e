"""The speculator and the verifier that a configuration asks for."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.speculative import SpeculativeConfig
from penstock.models.eagle3 import Eagle3Head
from penstock.models.mtp import MultiTokenPredictor
from penstock.runner.input_batch import InputBuilder
from penstock.runner.load import DRAFT_PREFIX, TORCH_DTYPES, KVCache, LoadedModel
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.draft import DraftCache, DraftModelSpeculator, HeadSpeculator
from penstock.runner.speculation.ngram import NgramSpeculator
from penstock.runner.speculation.pick import BestPicker, DraftDistributions, Picker, SamplingPicker
from penstock.runner.speculation.rejection import RejectionVerifier
from penstock.runner.speculation.speculator import NullSpeculator, Speculator
from penstock.runner.speculation.synthetic import SyntheticVerifier
from penstock.runner.speculation.verify import ExactVerifier, Verifier


def make_speculator(
    loaded: LoadedModel,
    cache: KVCache,
    speculative: SpeculativeConfig | None,
    inputs: InputBuilder,
    attention: AttentionBackend,
    picker: Picker,
) -> Speculator:
    """`inputs` and `attention` are the runner's, which the drafter shares."""
    if speculative is None:
        return NullSpeculator()
    if loaded.drafter is None:
        return NgramSpeculator(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    names = {layer.name.removeprefix(DRAFT_PREFIX): layer for layer in cache.config.attached}
    draft_cache = DraftCache(
        {name: cache.tensors[layer.name] for name, layer in names.items()},
        {name: layer.group for name, layer in names.items()},
        attention,
    )
    if isinstance(loaded.drafter, MultiTokenPredictor | Eagle3Head):
        return HeadSpeculator(loaded.drafter, draft_cache, inputs, picker)
    return DraftModelSpeculator(loaded.drafter, draft_cache, inputs, picker)


def make_verification(
    loaded: LoadedModel, speculative: SpeculativeConfig | None, drafts: torch.Tensor, sampling: SamplingStates
) -> tuple[Picker, Verifier]:
    """How drafts are picked and how they are judged, which belong together.

    `drafts` [max_num_reqs, max_num_drafts] int64 are the runner's, of the same rows as `sampling`. Raises ConfigError
    when the drafts' distributions do not fit into the memory.
    """
    if speculative is not None and speculative.synthetic_acceptance_rates:
        return BestPicker(), SyntheticVerifier(drafts, speculative.synthetic_acceptance_rates)
    if speculative is None or not speculative.samples_drafts:
        return BestPicker(), ExactVerifier(drafts)
    model, (max_num_reqs, max_num_drafts) = loaded.config, drafts.shape
    distributions = DraftDistributions(
        max_num_reqs, max_num_drafts, model.vocab_size, TORCH_DTYPES[model.dtype], loaded.device
    )
    return SamplingPicker(sampling, distributions), RejectionVerifier(drafts, distributions)
