"""Builds a runner out of finished parts."""

from __future__ import annotations

import torch

from penstock.attention.metadata import LayerCaches
from penstock.attention.select import make_attention
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.config.speculative import SpeculativeConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.kv_step import KVStep
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.load import KVCache, LoadedModel
from penstock.runner.model_runner import ModelRunner
from penstock.runner.parts import SamplingContext
from penstock.runner.passes import EagerPasses
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.prompt_logprobs import PromptScorer
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.select import make_speculator
from penstock.worker.parts import make_parts


def make_runner(
    loaded: LoadedModel,
    cache: KVCache,
    config: SchedulerConfig,
    execution: ExecutionConfig = ExecutionConfig(),  # noqa: B008 - it is frozen
    speculative: SpeculativeConfig | None = None,
    connector: WorkerConnector = NullWorkerConnector(),  # noqa: B008 - it has no state
    debug: bool = False,
) -> ModelRunner:
    """Raises ConfigError when the rows, the drafts' distributions or the graphs do not fit into memory."""
    device, parts = loaded.device, make_parts(loaded.device)
    attention = make_attention(device, config, execution)
    poisoned = tuple(cache.tensors.values()) if debug and not attention.reads_unseen else ()
    for tensor in cache.tensors.values():
        # A read of the null block shows in debug mode.
        tensor[NULL_BLOCK] = torch.nan if poisoned else 0
    writer = parts.make_table_writer(config.max_num_in_flight)
    states = RequestStates(config.max_num_seqs, config.max_model_len, config.max_num_drafts, device, writer)
    sampling = SamplingStates(config.max_num_seqs, loaded.config.vocab_size)
    blocks = BlockTables(cache.config, config.max_num_seqs, config.max_model_len, device, writer)
    shapes = BatchShapes(config, parts.graph_contexts(attention, execution, connector), attention)
    inputs = parts.make_input_builder(config, shapes, states, blocks)
    context = SamplingContext(loaded, config, speculative, states, sampling, writer)
    sampler, picker = parts.make_sampling(context, parts.memory)
    speculator = make_speculator(loaded, cache, speculative, inputs, attention, picker, parts)
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
        max_drafts_in_flight=config.max_num_drafts * (config.max_num_in_flight - 1) if debug else None,
    )
