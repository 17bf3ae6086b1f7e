"""Loads a checkpoint as a `LoadedModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace

import torch

from penstock.config.engine import EngineConfig
from penstock.config.model import ModelConfig
from penstock.messages.kv_transfer import ShardId
from penstock.models.eagle3 import Eagle3Head
from penstock.models.experts import PlacedExperts, placed_experts
from penstock.models.interface import Model
from penstock.models.lora import LoraModel
from penstock.models.mtp import build_mtp
from penstock.models.pipeline import PipelineStage
from penstock.models.pooling_head import PoolingHead, read_pooling_head
from penstock.models.registry import architecture_of, build_encoder, build_model, check_supported
from penstock.models.sources.opening import loaded_bytes, open_weights
from penstock.models.weights import LoadedSize, Weights, WeightsDigest, compare, keeps_quantized, trust
from penstock.parallel.groups import NO_LINKS, RankLinks
from penstock.parallel.topology import stages
from penstock.runner.kv_cache import TORCH_DTYPES
from penstock.runner.loaded_model import DRAFT_PREFIX, Drafter, LoadedModel
from penstock.runner.memory import memory_for
from penstock.runner.parts import DeviceParts
from penstock.utils.errors import ConfigError


def load_model(
    config: EngineConfig, parts: DeviceParts, shard: ShardId = (0, 0), links: RankLinks = NO_LINKS
) -> LoadedModel:
    """Builds a rank's part of the model with its weights.

    Raises ConfigError if checkpoint, memory or attention backend are unsuitable, or if a requested check of the weights
    fails.
    """
    check_supported(config.model)
    parts.check_attention(config.execution)
    device, memory = torch.device(config.device), parts.memory
    is_read = config.load_format != "dummy" and parts.has_memory
    if is_read:
        dtype = TORCH_DTYPES[config.model.dtype]
        num_bytes = loaded_bytes(config.model, dtype, keeps_quantized(dtype, device), config.load_quantization.layers)
        # Ranks on a CPU have one memory, but Ray may place them on several hosts. Engines that share experts have
        # the other layers several times, which are small in comparison.
        part = "stage" if parts.shares_main_memory and config.parallel.backend != "ray" else "rank"
        count = config.parallel.pp if part == "stage" else config.parallel.num_ranks * config.parallel.num_joint_engines
        needed, available = num_bytes // count, memory.available()
        # No rank of the stage takes memory before all have looked at it.
        links.experts.barrier()
        if needed > available:
            of_part = f"a {part}'s part of the" if count > 1 else "the"
            raise ConfigError(
                f"{of_part} weights of {config.model.path} take {needed / 2**30:.1f} GiB and {device} has "
                f"{available / 2**30:.1f} GiB free: free {(needed - available) / 2**30:.1f} GiB there, or choose a "
                "smaller model or another dtype"
            )

    def advice() -> str:
        return f"it has {memory.available() / 2**30:.1f} GiB left; choose a smaller model or a narrower dtype"

    digests: list[WeightsDigest] = []
    size = LoadedSize()
    check = compare if config.check_weights and parts.has_memory else trust

    @contextmanager
    def weights_of(shape: ModelConfig) -> Iterator[Weights]:
        digests.append(WeightsDigest(has_bytes=is_read and config.digests_weights))
        opened = closing(open_weights(shape.path, config.load_format, device, shape.quantization))
        with opened as source, parts.deliver_weights() as delivery, torch.inference_mode():
            yield Weights(
                source,
                TORCH_DTYPES[config.model.dtype],
                device,
                config.execution.deterministic,
                delivery=delivery,
                group=links.group,
                divides_inputs=parts.divides_inputs(config.execution),
                expert_parallel=config.parallel.experts,
                expert_group=links.experts,
                digest=digests[-1],
                check=check,
                load_quantization=config.load_quantization,
                size=size,
            )

    lora: LoraModel | None = None
    if config.lora is not None:
        limit = config.scheduler.max_num_batched_tokens
        lora = LoraModel(config.lora.num_slots, limit, TORCH_DTYPES[config.model.dtype])
    with memory_for(f"the weights of {config.model.path}", device, advice):
        model, drafter, experts = _build(config, parts, shard, links, weights_of, lora)
        head = _read_head(config, shard, weights_of)
    read = tuple(rows for prefix, each in zip(("", DRAFT_PREFIX), digests, strict=False) for rows in each.rows(prefix))
    if config.pooling is None:
        model = parts.for_small_steps(model, config.execution)
    return LoadedModel(model, config.model, device, read, size, drafter, links, head, experts, lora)


def _read_head(
    config: EngineConfig, shard: ShardId, weights_of: Callable[[ModelConfig], AbstractContextManager[Weights]]
) -> PoolingHead | None:
    """Reads the classifier, on the ranks of the last stage. No KV depends on it, so its weights are not identified."""
    if config.pooling is None or config.pooling.head is None or shard[0] != config.parallel.pp - 1:
        return None
    with weights_of(config.model) as weights:
        return read_pooling_head(config.pooling.head, config.model, weights, architecture_of(config.model))


def _build(
    config: EngineConfig,
    parts: DeviceParts,
    shard: ShardId,
    links: RankLinks,
    weights_of: Callable[[ModelConfig], AbstractContextManager[Weights]],
    lora: LoraModel | None,
) -> tuple[Model, Drafter | None, dict[str, PlacedExperts]]:
    if config.model.encoder is not None:
        with weights_of(config.model) as weights:
            return build_encoder(config.model, weights), None, {}
    parallel, speculative = config.parallel, config.speculative
    stage = stages(config.model.num_hidden_layers, parallel.pp, parallel.layer_counts)[shard[0]]
    eagle3 = None if speculative is None else speculative.eagle3
    has_mtp = speculative is not None and speculative.method == "mtp"
    aux_layers = () if eagle3 is None else eagle3.aux_layers
    drafter: Drafter | None = None
    with weights_of(config.model) as weights:
        feeds_head = stage.is_last and (has_mtp or eagle3 is not None)
        has_logits = config.pooling is None
        # Adapters are for the model alone: drafts are verified by it.
        decoder = build_model(config.model, replace(weights, lora=lora), aux_layers, stage, feeds_head, has_logits)
        layers = list(decoder.layers)
        if has_mtp and stage.is_last:
            drafter = build_mtp(config.model, weights, decoder)
            layers.append(drafter.layer)
    experts = placed_experts(layers)
    model = decoder if parallel.pp == 1 else PipelineStage(decoder, links.upstream, links.downstream)
    if not stage.is_last:
        return model, None, experts
    if eagle3 is not None:
        with weights_of(eagle3.shape) as weights:
            drafter = Eagle3Head(eagle3, weights, decoder)
    if speculative is not None and speculative.draft_model is not None:
        check_supported(speculative.draft_model)
        with weights_of(speculative.draft_model) as weights:
            # The experts of another model are divided like its other layers.
            drafter = build_model(speculative.draft_model, replace(weights, expert_parallel=None))
            drafter = parts.for_small_steps(drafter, config.execution)
    return model, drafter, experts
