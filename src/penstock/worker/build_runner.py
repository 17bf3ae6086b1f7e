"""Builds a runner from its parts."""

from __future__ import annotations

import torch

from penstock.attention.backend import AttentionBackend
from penstock.attention.forward_context import LayerCaches
from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.config.pooling import PoolingConfig
from penstock.kv_transfer.connector import WorkerConnector
from penstock.kv_transfer.kv_step import KVStep
from penstock.kv_transfer.null import NullWorkerConnector
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.models.encoder import Encoder
from penstock.parallel.groups import RankLinks
from penstock.runner.awaited_results import AwaitedResults
from penstock.runner.batch_shapes import BatchShapes
from penstock.runner.block_tables import BlockTables
from penstock.runner.encoder_pass import EncoderPass
from penstock.runner.expert_mover import ExpertStep, NoExpertStep
from penstock.runner.input_batch import InputBuilder
from penstock.runner.kv_cache import TORCH_DTYPES, KVCache
from penstock.runner.loaded_model import LoadedModel
from penstock.runner.lora_step import LoraStep
from penstock.runner.model_runner import BYTE_OF_NAN, ModelRunner
from penstock.runner.parts import DeviceParts, SamplingContext
from penstock.runner.passes import EagerPasses, ForwardPasses
from penstock.runner.pooling import PoolingEnd
from penstock.runner.request_states import RequestStates
from penstock.runner.sampling.prompt_logprobs import PromptScorer
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.select import make_speculator
from penstock.runner.step_end import EarlierStageEnd, SamplingEnd
from penstock.runner.step_results import ResultsReceiver, ResultsSender


def make_runner(
    parts: DeviceParts,
    loaded: LoadedModel,
    cache: KVCache,
    config: EngineConfig,
    connector: WorkerConnector = NullWorkerConnector(),  # noqa: B008 - it has no state
    debug: bool = False,
    experts: ExpertStep = NoExpertStep(),  # noqa: B008 - it has no state
) -> ModelRunner:
    """Raises ConfigError if the rows, the drafts' distributions or the graphs do not fit into memory, or if the
    attention backend cannot run the model.
    """
    device, limits, execution = loaded.device, config.scheduler, config.execution
    attention = parts.make_attention(limits, execution)
    poisoned = cache if debug and not attention.reads_unseen else None
    for tensor in cache.tensors.values():
        # In debug mode reads of the null block become visible. Recurrent layers have none, and no state yet.
        tensor.view(torch.uint8)[NULL_BLOCK] = BYTE_OF_NAN if poisoned else 0
    writer = parts.make_table_writer(limits.max_num_in_flight)
    links, is_last = loaded.links, loaded.links.downstream is None
    states = RequestStates(limits.max_num_seqs, limits.max_model_len, limits.max_num_drafts, device, writer)
    blocks = BlockTables(cache.config, limits.max_num_seqs, limits.max_model_len, device, writer)
    # A step's waits for other ranks cannot be captured, and prompts rarely have the same length.
    is_eager = links.has_others or config.pooling is not None
    contexts = () if is_eager else parts.graph_contexts(attention, execution, connector)
    shapes = BatchShapes(limits, contexts, attention)
    inputs = parts.make_input_builder(limits, shapes, states, blocks)
    kv_step = KVStep(connector)
    group_of = {name: number for number, group in enumerate(cache.config.groups) for name in group.layer_names}
    draft_inputs = _make_draft_inputs(cache, limits, TORCH_DTYPES[loaded.config.dtype], device)
    target = LayerCaches(cache.tensors, group_of, attention, lambda: kv_step.hooks, draft_inputs)
    if config.pooling is not None:
        if isinstance(loaded.model, Encoder):
            passes = EncoderPass(loaded.model, attention, inputs, states.rows, limits)
        else:
            passes = ForwardPasses(loaded.model, target, inputs)
        end = _make_pooling_end(parts, config.pooling, states, loaded)
    elif is_last:
        sampling = SamplingStates(limits.max_num_seqs, loaded.config.vocab_size)
        context = SamplingContext(loaded, limits, config.speculative, states, sampling, writer)
        end = _make_sampling_end(parts, context, cache, inputs, attention, target, shapes)
        passes = end.passes
    else:
        passes = ForwardPasses(loaded.model, target, inputs)
        end = _make_earlier_end(states, links, limits)
    connector.register_kv_caches(parts.make_kv_cache_view(cache))
    return ModelRunner(
        states=states,
        blocks=blocks,
        writer=writer,
        inputs=inputs,
        passes=passes,
        end=end,
        kv_step=kv_step,
        experts=experts,
        poisoned=poisoned,
        lora=None if loaded.lora is None else LoraStep(loaded.lora, states.rows),
        max_drafts_in_flight=limits.max_num_drafts * limits.max_steps_ahead if debug else None,
    )


def _make_draft_inputs(
    cache: KVCache, limits: SchedulerConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns the memory in which recurrent layers keep the inputs of drafts; none if there are never drafts."""
    return {
        name: torch.zeros(
            (limits.max_num_seqs, limits.max_num_drafts, group.spec.planes[0].num_heads * group.spec.draft_inputs),
            dtype=dtype,
            device=device,
        )
        for group in cache.config.groups
        for name in group.layer_names
        if group.spec.is_recurrent and limits.max_num_drafts
    }


def _make_sampling_end(
    parts: DeviceParts,
    context: SamplingContext,
    cache: KVCache,
    inputs: InputBuilder,
    attention: AttentionBackend,
    target: LayerCaches,
    shapes: BatchShapes,
) -> SamplingEnd:
    loaded, states, links = context.loaded, context.states, context.loaded.links
    sampler, picker = parts.make_sampling(context, parts.memory)
    speculator = make_speculator(loaded, cache, context.speculative, inputs, attention, picker, parts)
    eager = EagerPasses(loaded.model, target, inputs, sampler, speculator, states)
    return SamplingEnd(
        sampling=context.sampling,
        prompt_scorer=PromptScorer(loaded.model, states.token_ids, context.sampling, parts.score),
        sampler=sampler,
        speculator=speculator,
        passes=parts.make_passes(eager, inputs, sampler, shapes),
        states=states,
        results=ResultsSender(states, links.results_out),
        copy_to_host=parts.copy_to_host,
        is_reported=links.group.index == 0,
    )


def _make_pooling_end(
    parts: DeviceParts, pooling: PoolingConfig, states: RequestStates, loaded: LoadedModel
) -> PoolingEnd:
    is_reported = loaded.links.downstream is None and loaded.links.group.index == 0
    runs_ahead = parts.runs_ahead and is_reported
    return PoolingEnd(pooling.method, loaded.pooling_head, states, parts.copy_to_host, is_reported, runs_ahead)


def _make_earlier_end(states: RequestStates, links: RankLinks, limits: SchedulerConfig) -> EarlierStageEnd:
    assert links.results_in is not None, "an earlier stage hears of no results"
    awaited = AwaitedResults(states.rows, limits.max_num_in_flight)
    return EarlierStageEnd(states, awaited, ResultsReceiver(states, links.results_in), runs_ahead=False)
