"""The speculator that a configuration asks for."""

from __future__ import annotations

from penstock.config.engine import SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.models.mtp import MultiTokenPredictor
from penstock.runner.block_tables import BlockTables
from penstock.runner.load import DRAFT_PREFIX, KVCache, LoadedModel
from penstock.runner.speculation.draft import DraftCache, DraftModelSpeculator, MTPSpeculator
from penstock.runner.speculation.ngram import NgramSpeculator
from penstock.runner.speculation.speculator import NullSpeculator, Speculator


def make_speculator(
    loaded: LoadedModel,
    cache: KVCache,
    config: SchedulerConfig,
    speculative: SpeculativeConfig | None,
    blocks: BlockTables,
) -> Speculator:
    """`blocks` are the runner's tables, which the drafter's layers share."""
    if speculative is None:
        return NullSpeculator()
    if loaded.drafter is None:
        return NgramSpeculator(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    names = {layer.name.removeprefix(DRAFT_PREFIX): layer for layer in cache.config.attached}
    draft_cache = DraftCache(
        {name: cache.tensors[layer.name] for name, layer in names.items()},
        {name: layer.group for name, layer in names.items()},
        blocks,
        config.max_model_len,
    )
    if isinstance(loaded.drafter, MultiTokenPredictor):
        return MTPSpeculator(loaded.drafter, draft_cache)
    return DraftModelSpeculator(loaded.drafter, draft_cache)
