"""A complete model on its device, as a worker hands it to its runner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.config.model import ModelConfig
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.eagle3 import Eagle3Head
from penstock.models.interface import Model
from penstock.models.mtp import MultiTokenPredictor
from penstock.parallel.groups import NO_LINKS, RankLinks

DRAFT_PREFIX = "draft."

Drafter = Model | MultiTokenPredictor | Eagle3Head


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, or a rank's part of it, before it has any KV cache; `drafter` is the speculator's, if it has one.

    `weights_digest` [16 bytes] is of all that was read for both; of names and shapes alone where weights are made up.
    """

    model: Model
    config: ModelConfig
    device: torch.device
    weights_digest: bytes
    drafter: Drafter | None = None
    links: RankLinks = NO_LINKS

    @property
    def draft_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The drafter's layers under names of their own: the two models may call theirs the same."""
        specs = {} if self.drafter is None else self.drafter.kv_cache_specs
        return {f"{DRAFT_PREFIX}{name}": spec for name, spec in specs.items()}

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens behind a position decide what the drafter's layers store there."""
        return 1 if isinstance(self.drafter, MultiTokenPredictor | Eagle3Head) else 0
