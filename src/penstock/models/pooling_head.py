"""The classifier of a pooled vector: computes the logits of its labels, on the CPU.

    vector -> [ dense -> tanh ], an encoder's -> linear -> logits

It processes one vector after the other, in float64 and with one order of additions, so that neither the batch nor the
number of ranks changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.config.model import ModelConfig
from penstock.config.pooling import HeadConfig
from penstock.models.encoder import EncoderArchitecture
from penstock.models.weights import Weights, WeightsDigest, direct


@dataclass(frozen=True, eq=False)
class Affine:
    """`bias` is 0 if there is none."""

    weight: np.ndarray  # [outputs, inputs] float64
    bias: np.ndarray | float = 0.0  # [outputs] float64

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """[inputs] -> [outputs] float64."""
        return (self.weight * vector).sum(-1) + self.bias


@dataclass(frozen=True, eq=False)
class PoolingHead:
    out: Affine
    dense: Affine | None = None

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        """[hidden_size] float32 -> [labels] float32."""
        if self.dense is not None:
            vector = np.tanh(self.dense(vector))
        return self.out(vector).astype(np.float32)


def read_pooling_head(
    head: HeadConfig, model: ModelConfig, weights: Weights, encoder: EncoderArchitecture | None
) -> PoolingHead:
    """Reads a decoder's `score` layer, or two tokens' rows of its output head, or the two layers of `encoder`.

    Raises ConfigError if the checkpoint does not have them.
    """
    weights = replace(weights, dtype=torch.float32, device=torch.device("cpu"), delivery=direct, digest=WeightsDigest())
    num_labels, hidden = len(head.labels), model.hidden_size
    if encoder is not None:
        return PoolingHead(
            _affine(weights, encoder.head_out, num_labels, hidden), _affine(weights, encoder.head_dense, hidden, hidden)
        )
    if head.token_ids is None:
        return PoolingHead(Affine(_wide(weights.tensor("score.weight", num_labels, hidden))))
    name = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    rejecting, accepting = (
        weights.tensors({name: model.vocab_size}, hidden, own={name: range(token, token + 1)})
        for token in head.token_ids
    )
    # A cap is refused with the configuration: it is not linear.
    return PoolingHead(Affine((_wide(accepting) - _wide(rejecting)) * model.multipliers.logits))


def _affine(weights: Weights, name: str, num_outputs: int, num_inputs: int) -> Affine:
    weight = weights.tensor(f"{name}.weight", num_outputs, num_inputs)
    return Affine(_wide(weight), _wide(weights.tensor(f"{name}.bias", num_outputs)))


def _wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.float64)
