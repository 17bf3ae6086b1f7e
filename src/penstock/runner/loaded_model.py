"""A complete model on its device, which a worker passes to its runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from penstock.config.model import ModelConfig
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.messages.tensor_rows import TensorRows
from penstock.models.eagle3 import Eagle3Head
from penstock.models.experts import PlacedExperts
from penstock.models.interface import Model
from penstock.models.lora import LoraModel
from penstock.models.mtp import MultiTokenPredictor
from penstock.models.pooling_head import PoolingHead
from penstock.models.weights import LoadedSize
from penstock.parallel.groups import NO_LINKS, RankLinks

DRAFT_PREFIX = "draft."

Drafter = Model | MultiTokenPredictor | Eagle3Head


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of it, before it has any KV cache; `drafter` is the speculator's, if it has one.

    `experts` are those of both that the ranks divide, by layer. `read` lists what was read of the checkpoints for both,
    with digests of the bytes if a KV connector needs them; `size` is that of all their weights. `lora` are the model's
    layers that may have adapters, if the engine has any.
    """

    model: Model
    config: ModelConfig
    device: torch.device
    read: tuple[TensorRows, ...]
    size: LoadedSize = field(default_factory=LoadedSize)
    drafter: Drafter | None = None
    links: RankLinks = NO_LINKS
    pooling_head: PoolingHead | None = None
    experts: Mapping[str, PlacedExperts] = field(default_factory=dict[str, PlacedExperts])
    lora: LoraModel | None = None

    @property
    def draft_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The drafter's layers under separate names, because both models may use the same ones."""
        specs = {} if self.drafter is None else self.drafter.kv_cache_specs
        return {f"{DRAFT_PREFIX}{name}": spec for name, spec in specs.items()}

    @property
    def num_tokens_ahead(self) -> int:
        """The number of following tokens on which the drafter's KV at a position depends."""
        return 1 if isinstance(self.drafter, MultiTokenPredictor | Eagle3Head) else 0
