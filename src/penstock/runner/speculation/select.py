"""The speculator and the verifier that a configuration asks for."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.speculative import SpeculativeConfig
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.models.eagle3 import Eagle3Head
from penstock.models.mtp import MultiTokenPredictor
from penstock.runner.input_batch import InputBuilder
from penstock.runner.load import DRAFT_PREFIX, KVCache, LoadedModel
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.draft import DraftCache, DraftModelSpeculator, HeadSpeculator
from penstock.runner.speculation.ngram import NgramSpeculator
from penstock.runner.speculation.pick import (
    BestPicker,
    DraftDistributions,
    Picker,
    SamplingPicker,
    allocate_draft_logits,
)
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
        return _make_ngram_speculator(speculative.prompt_lookup_min, speculative.prompt_lookup_max, loaded.device)
    names = {layer.name.removeprefix(DRAFT_PREFIX): layer for layer in cache.config.attached}
    draft_cache = DraftCache(
        {name: cache.tensors[layer.name] for name, layer in names.items()},
        {name: layer.group for name, layer in names.items()},
        attention,
    )
    if isinstance(loaded.drafter, MultiTokenPredictor | Eagle3Head):
        return HeadSpeculator(loaded.drafter, draft_cache, inputs, picker)
    return DraftModelSpeculator(loaded.drafter, draft_cache, inputs, picker)


def _make_ngram_speculator(shortest: int, longest: int, device: torch.device) -> Speculator:
    if not has_gpu_kernels(device):
        return NgramSpeculator(shortest, longest)
    # Only now: a CPU needs no Triton.
    from penstock.runner.gpu.ngram import GpuNgramSpeculator

    return GpuNgramSpeculator(shortest, longest)


def make_verification(
    loaded: LoadedModel, speculative: SpeculativeConfig | None, drafts: torch.Tensor, sampling: SamplingStates
) -> tuple[Picker, Verifier]:
    """How drafts are picked and how they are judged, which belong together.

    `drafts` [max_num_reqs + 1, max_num_drafts] int64 are the runner's, of the same rows as `sampling`. Raises
    ConfigError when the drafts' distributions do not fit into the memory.
    """
    if speculative is not None and speculative.synthetic_acceptance_rates:
        return BestPicker(), SyntheticVerifier(drafts, speculative.synthetic_acceptance_rates)
    if speculative is None or not speculative.samples_drafts:
        return BestPicker(), ExactVerifier(drafts)
    distributions = DraftDistributions(allocate_draft_logits(loaded, len(drafts) - 1, drafts.shape[1]))
    return SamplingPicker(sampling, distributions), RejectionVerifier(drafts, distributions)
