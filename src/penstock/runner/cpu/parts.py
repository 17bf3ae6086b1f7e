"""A CPU's parts of the runner."""

from __future__ import annotations

import torch

from penstock.runner.cpu.buffers import HostTableWriter
from penstock.runner.cpu.inputs import TorchInputBuilder
from penstock.runner.cpu.kv_cache_view import HostKVCacheView
from penstock.runner.cpu.ngram import NgramSpeculator
from penstock.runner.cpu.step_sampler import make_torch_sampling
from penstock.runner.memory import HostMemory
from penstock.runner.parts import DeviceParts
from penstock.runner.sampling.logprobs import PendingLogprobs, token_logprobs


def cpu_parts() -> DeviceParts:
    return DeviceParts(
        memory=HostMemory(),
        make_table_writer=lambda depth: HostTableWriter(),
        make_input_builder=TorchInputBuilder,
        make_sampling=make_torch_sampling,
        score=_score,
        make_ngram_speculator=NgramSpeculator,
        graph_contexts=lambda attention, execution, connector: (),
        make_passes=lambda eager, inputs, sampler, shapes: eager,
        make_kv_cache_view=HostKVCacheView,
        copy_to_host=lambda tensor: tensor.clone().numpy,
    )


def _score(logits: torch.Tensor, chosen: torch.Tensor, num_top: int) -> PendingLogprobs:
    rows = token_logprobs(logits, chosen, [num_top] * len(chosen))
    return lambda: rows
