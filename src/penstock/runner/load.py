"""From a checkpoint to a `LoadedModel`, and from a plan to a KV cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.attention.select import check_backend
from penstock.config.engine import EngineConfig
from penstock.config.model import ModelConfig
from penstock.kernels import native
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.host_memory import aligned_bytes
from penstock.messages.kv_cache_spec import DTYPE_BYTES, KVCacheConfig, KVCacheSpec
from penstock.models.eagle3 import Eagle3Head
from penstock.models.interface import Model
from penstock.models.mtp import MultiTokenPredictor, build_mtp
from penstock.models.registry import build_model, check_supported
from penstock.models.weights import Weights, WeightsDigest, checkpoint_bytes, delivery_to, open_weights
from penstock.runner.memory import DeviceMemory, memory_for
from penstock.utils import logging
from penstock.utils.digest import digest
from penstock.utils.errors import ConfigError

logger = logging.get_logger(__name__)

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
DRAFT_PREFIX = "draft."


Drafter = Model | MultiTokenPredictor | Eagle3Head


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A complete model on its device, before it has any KV cache; `drafter` is the speculator's, if it has one.

    `weights_digest` [16 bytes] is of all that was read for both; of names and shapes alone where weights are made up.
    """

    model: Model
    config: ModelConfig
    device: torch.device
    weights_digest: bytes
    drafter: Drafter | None = None

    @property
    def draft_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The drafter's layers under names of their own: the two models may call theirs the same."""
        specs = {} if self.drafter is None else self.drafter.kv_cache_specs
        return {f"{DRAFT_PREFIX}{name}": spec for name, spec in specs.items()}

    @property
    def num_tokens_ahead(self) -> int:
        """How many tokens behind a position decide what the drafter's layers store there."""
        return 1 if isinstance(self.drafter, MultiTokenPredictor | Eagle3Head) else 0


@dataclass(frozen=True, slots=True)
class KVCache:
    """The allocated cache: one tensor per layer name, those of one position in their groups sharing memory."""

    config: KVCacheConfig
    tensors: dict[str, torch.Tensor]  # each [num_blocks, 2, num_kv_heads, block_size, head_size]


def arithmetic(config: EngineConfig) -> str:
    """Names the kernels that compute: with others, sums have other last bits."""
    if config.device != "cpu":
        products = "deterministic" if config.execution.deterministic else "fastest"
        return f"{torch.cuda.get_device_name()} torch {torch.__version__} {products}"
    library = native.library()
    return f"torch {torch.__version__}" if library is None else library.isa


def kernel_set(config: EngineConfig) -> str:
    """The kernels in use, for people: an instruction set of the native library, `torch`, or `triton`."""
    if has_gpu_kernels(torch.device(config.device)):
        return "triton"
    library = native.library()
    return "torch" if library is None else library.isa


def load_model(config: EngineConfig, memory: DeviceMemory) -> LoadedModel:
    """Builds the model with its weights. Raises ConfigError when checkpoint, memory or attention backend are unfit."""
    check_supported(config.model)
    device = torch.device(config.device)
    check_backend(device, config.execution)
    if config.load_format != "dummy" and device.type != "meta":
        needed, available = checkpoint_bytes(config.model.path), memory.available()
        if needed > available:
            raise ConfigError(
                f"the weights of {config.model.path} take {needed / 2**30:.1f} GiB and {device} has "
                f"{available / 2**30:.1f} GiB free: free {(needed - available) / 2**30:.1f} GiB there, or choose a "
                "smaller model or another dtype"
            )

    def advice() -> str:
        return f"it has {memory.available() / 2**30:.1f} GiB left; choose a smaller model or a narrower dtype"

    with memory_for(f"the weights of {config.model.path}", device, advice):
        digests: list[WeightsDigest] = []
        model, drafter = _build(config, device, digests)
    weights_digest = digest(*(each.value() for each in digests))
    return LoadedModel(_for_small_steps(model, config), config.model, device, weights_digest, drafter)


def _build(config: EngineConfig, device: torch.device, digests: list[WeightsDigest]) -> tuple[Model, Drafter | None]:
    """`digests` takes one of each checkpoint that is read, the target's first."""
    speculative = config.speculative
    eagle3 = None if speculative is None else speculative.eagle3
    with _weights(config, config.model.path, device, digests) as weights:
        model = build_model(config.model, weights, () if eagle3 is None else eagle3.aux_layers)
        if speculative is not None and speculative.method == "mtp":
            return model, build_mtp(config.model, weights, model)
    if eagle3 is not None:
        with _weights(config, eagle3.shape.path, device, digests) as weights:
            return model, Eagle3Head(eagle3, weights, model)
    if speculative is None or speculative.draft_model is None:
        return model, None
    check_supported(speculative.draft_model)
    with _weights(config, speculative.draft_model.path, device, digests) as weights:
        return model, _for_small_steps(build_model(speculative.draft_model, weights), config)


def _for_small_steps(model: Model, config: EngineConfig) -> Model:
    """The model with kernels of its own for steps of few tokens, where there are such and rows may know the others."""
    if not has_gpu_kernels(torch.device(config.device)) or config.execution.deterministic:
        return model
    # Only now: a CPU needs no Triton.
    from penstock.models.fused_decode import FusedDecoder

    reason = FusedDecoder.supports(model)
    if reason:
        logger.info("steps of few tokens take the kernels of all others: %s", reason)
        return model
    return FusedDecoder(model)


@contextmanager
def _weights(
    config: EngineConfig, folder: Path, device: torch.device, digests: list[WeightsDigest]
) -> Iterator[Weights]:
    digests.append(WeightsDigest(has_bytes=config.load_format != "dummy" and device.type != "meta"))
    opened = closing(open_weights(folder, config.load_format, device))
    with opened as source, delivery_to(device) as delivery, torch.inference_mode():
        dtype, exact = TORCH_DTYPES[config.model.dtype], config.execution.deterministic
        yield Weights(source, dtype, device, exact, delivery=delivery, digest=digests[-1])


def allocate_kv_cache(config: KVCacheConfig, device: torch.device) -> KVCache:
    """Allocates the cache, uninitialised: nothing may be read that was not written."""
    storages = [_allocate(config, config.groups[0].spec, device) for _ in range(config.num_tensors)]
    tensors = {
        name: storages[index].view(_shape(config, group.spec))
        for group in config.groups
        for index, name in enumerate(group.layer_names)
    }
    tensors.update((layer.name, _allocate(config, layer.spec, device)) for layer in config.attached)
    return KVCache(config, tensors)


def _allocate(config: KVCacheConfig, spec: KVCacheSpec, device: torch.device) -> torch.Tensor:
    shape, dtype = _shape(config, spec), TORCH_DTYPES[spec.dtype]
    if device.type == "cpu":
        return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


def _shape(config: KVCacheConfig, spec: KVCacheSpec) -> tuple[int, ...]:
    plane, *others = spec.planes
    assert all((p.num_heads, p.head_size) == (plane.num_heads, plane.head_size) for p in others), spec.planes
    return (config.num_blocks, len(spec.planes), plane.num_heads, config.block_size, plane.head_size)
