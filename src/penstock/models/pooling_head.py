"""The classifier behind a pooled vector: the logits of its labels, on the CPU.

It takes one vector after the other, in float64 and with one order of additions, so that neither the batch nor the
number of ranks changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.config.model import ModelConfig
from penstock.config.pooling import HeadConfig
from penstock.models.weights import Weights, WeightsDigest, direct


@dataclass(frozen=True, eq=False)
class PoolingHead:
    weight: np.ndarray  # [labels, hidden_size] float64

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """[hidden_size] float32 -> [labels] float32."""
        return (self.weight * vector).sum(-1).astype(np.float32)


def read_pooling_head(head: HeadConfig, model: ModelConfig, weights: Weights) -> PoolingHead:
    """A decoder's `score` layer, or the rows of its output head that belong to two tokens.

    Raises ConfigError when the checkpoint does not have them.
    """
    weights = replace(weights, dtype=torch.float32, device=torch.device("cpu"), delivery=direct, digest=WeightsDigest())
    if head.token_ids is None:
        return PoolingHead(_wide(weights.tensor("score.weight", len(head.labels), model.hidden_size)))
    name = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    rejecting, accepting = (
        weights.tensors({name: model.vocab_size}, model.hidden_size, own={name: range(token, token + 1)})
        for token in head.token_ids
    )
    return PoolingHead(_wide(accepting) - _wide(rejecting))


def _wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.float64)
