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
from penstock.models.decoder import Architecture, find_decoder, has_tied_head
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
    head: HeadConfig, model: ModelConfig, weights: Weights, architecture: Architecture | EncoderArchitecture
) -> PoolingHead:
    """Reads a decoder's `score` layer, or two tokens' rows of its output head, or the two layers of an encoder.

    Raises ConfigError if the checkpoint does not have them.
    """
    weights = replace(weights, dtype=torch.float32, device=torch.device("cpu"), delivery=direct, digest=WeightsDigest())
    num_labels, hidden = len(head.labels), model.hidden_size
    if isinstance(architecture, EncoderArchitecture):
        out = _affine(weights, architecture.head_out, num_labels, hidden)
        return PoolingHead(out, _affine(weights, architecture.head_dense, hidden, hidden))
    if head.token_ids is None:
        return PoolingHead(Affine(_wide(weights.tensor("score.weight", num_labels, hidden))))
    outer, inner = find_decoder(weights, True, f"{architecture.end_norm}.weight")
    is_tied, embedding = has_tied_head(model, outer), f"{architecture.embedding_name}.weight"
    weights, name = (inner, embedding) if is_tied else (outer, "lm_head.weight")
    rows = [range(token, token + 1) for token in head.token_ids]
    rejecting, accepting = (weights.tensors({name: model.vocab_size}, hidden, own={name: each}) for each in rows)
    # A cap is refused with the configuration: it is not linear.
    return PoolingHead(Affine((_wide(accepting) - _wide(rejecting)) * model.multipliers.logits))


def _affine(weights: Weights, name: str, num_outputs: int, num_inputs: int) -> Affine:
    weight = weights.tensor(f"{name}.weight", num_outputs, num_inputs)
    return Affine(_wide(weight), _wide(weights.tensor(f"{name}.bias", num_outputs)))


def _wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().astype(np.float64)
