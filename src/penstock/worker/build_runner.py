"""Builds a runner out of finished parts."""

from __future__ import annotations

import torch

from penstock.attention.metadata import LayerCaches
from penstock.config.engine import EngineConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.kv_step import KVStep
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.kv_cache import KVCache
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.model_runner import ModelRunner
from penstock.runner.parts import DeviceParts, SamplingContext
from penstock.runner.passes import EagerPasses
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.prompt_logprobs import PromptScorer
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.select import make_speculator


def make_runner(
    parts: DeviceParts,
    loaded: LoadedModel,
    cache: KVCache,
    config: EngineConfig,
    connector: WorkerConnector = NullWorkerConnector(),  # noqa: B008 - it has no state
    debug: bool = False,
) -> ModelRunner:
    """Raises ConfigError when the rows, the drafts' distributions or the graphs do not fit into memory."""
    device, limits, execution = loaded.device, config.scheduler, config.execution
    attention = parts.make_attention(limits, execution)
    poisoned = tuple(cache.tensors.values()) if debug and not attention.reads_unseen else ()
    for tensor in cache.tensors.values():
        # A read of the null block shows in debug mode.
        tensor[NULL_BLOCK] = torch.nan if poisoned else 0
    writer = parts.make_table_writer(limits.max_num_in_flight)
    states = RequestStates(limits.max_num_seqs, limits.max_model_len, limits.max_num_drafts, device, writer)
    sampling = SamplingStates(limits.max_num_seqs, loaded.config.vocab_size)
    blocks = BlockTables(cache.config, limits.max_num_seqs, limits.max_model_len, device, writer)
    shapes = BatchShapes(limits, parts.graph_contexts(attention, execution, connector), attention)
    inputs = parts.make_input_builder(limits, shapes, states, blocks)
    context = SamplingContext(loaded, limits, config.speculative, states, sampling, writer)
    sampler, picker = parts.make_sampling(context, parts.memory)
    speculator = make_speculator(loaded, cache, config.speculative, inputs, attention, picker, parts)
    kv_step = KVStep(connector)
    group_of = {name: number for number, group in enumerate(cache.config.groups) for name in group.layer_names}
    target = LayerCaches(cache.tensors, group_of, attention, lambda: kv_step.hooks)
    eager = EagerPasses(loaded.model, target, inputs, sampler, speculator, states)
    passes = parts.make_passes(eager, inputs, sampler, shapes)
    connector.register_kv_caches(parts.make_kv_cache_view(cache))
    return ModelRunner(
        states=states,
        sampling=sampling,
        blocks=blocks,
        writer=writer,
        inputs=inputs,
        prompt_scorer=PromptScorer(loaded.model, states.token_ids, sampling, parts.score),
        sampler=sampler,
        speculator=speculator,
        passes=passes,
        kv_step=kv_step,
        copy_to_host=parts.copy_to_host,
        poisoned=poisoned,
        max_drafts_in_flight=limits.max_num_drafts * (limits.max_num_in_flight - 1) if debug else None,
    )
