"""One stage of a decoder's pipeline (Huang et al. 2019, arXiv:1811.06965).

    stage before -> x, residual, kept streams -> this stage's layers -> stage after, or norm and head

A stage computes exactly what a single rank would, so the number of stages changes no bit.
"""

from __future__ import annotations

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.models.decoder import Decoder, IntermediateTensors
from penstock.models.interface import ModelOutput
from penstock.parallel.groups import TensorChannel


class PipelineStage:
    """A `Model`. On every stage but the last the return value is not the model's output, and there are no logits.

    Passes must run in the same order on all stages.
    """

    def __init__(self, decoder: Decoder, upstream: TensorChannel | None, downstream: TensorChannel | None) -> None:
        """The channels from the stage before and to the stage after, None if there is no such stage."""
        stage = decoder.stage
        assert (upstream is None, downstream is None) == (stage.is_first, stage.is_last), f"{stage} is linked otherwise"
        self.kv_cache_specs = decoder.kv_cache_specs
        self._decoder = decoder
        self._upstream = upstream
        self._downstream = downstream

    @property
    def logits_dtype(self) -> torch.dtype:
        return self._decoder.logits_dtype

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> ModelOutput:
        tensors = self._decoder.embed(input_ids) if self._upstream is None else self._receive(len(input_ids))
        tensors = self._decoder.run_layers(tensors, positions, context)
        if self._downstream is None:
            return self._decoder.finish(tensors)
        self._downstream.send(tensors.x, tensors.residual, tensors.aux_hidden, tensors.per_layer)
        return ModelOutput(tensors.residual, tensors.aux_hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.compute_logits(hidden)

    def _receive(self, num_tokens: int) -> IntermediateTensors:
        assert self._upstream is not None
        tensors = IntermediateTensors(*self._upstream.receive())
        assert len(tensors.residual) == num_tokens, f"{len(tensors.residual)} rows for {num_tokens} tokens"
        return tensors
