"""From a checkpoint to a `LoadedModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import torch

from penstock.config.engine import EngineConfig
from penstock.models.eagle3 import Eagle3Head
from penstock.models.interface import Model
from penstock.models.mtp import build_mtp
from penstock.models.registry import build_model, check_supported
from penstock.models.weights import Weights, WeightsDigest, checkpoint_bytes, compare, open_weights, trust
from penstock.runner.kv_cache import TORCH_DTYPES
from penstock.runner.loaded_model import Drafter, LoadedModel
from penstock.runner.memory import memory_for
from penstock.runner.parts import DeviceParts
from penstock.utils.digest import digest
from penstock.utils.errors import ConfigError


def load_model(config: EngineConfig, parts: DeviceParts) -> LoadedModel:
    """Builds the model with its weights. Raises ConfigError when checkpoint, memory or attention backend are unfit, or
    when the weights are checked and are not what was read.
    """
    check_supported(config.model)
    parts.check_attention(config.execution)
    device, memory = torch.device(config.device), parts.memory
    is_read = config.load_format != "dummy" and parts.has_memory
    if is_read:
        needed, available = checkpoint_bytes(config.model.path), memory.available()
        if needed > available:
            raise ConfigError(
                f"the weights of {config.model.path} take {needed / 2**30:.1f} GiB and {device} has "
                f"{available / 2**30:.1f} GiB free: free {(needed - available) / 2**30:.1f} GiB there, or choose a "
                "smaller model or another dtype"
            )

    def advice() -> str:
        return f"it has {memory.available() / 2**30:.1f} GiB left; choose a smaller model or a narrower dtype"

    digests: list[WeightsDigest] = []
    check = compare if config.check_weights and parts.has_memory else trust

    @contextmanager
    def weights_of(folder: Path) -> Iterator[Weights]:
        digests.append(WeightsDigest(has_bytes=is_read))
        opened = closing(open_weights(folder, config.load_format, device))
        with opened as source, parts.deliver_weights() as delivery, torch.inference_mode():
            dtype, exact = TORCH_DTYPES[config.model.dtype], config.execution.deterministic
            yield Weights(source, dtype, device, exact, delivery=delivery, digest=digests[-1], check=check)

    with memory_for(f"the weights of {config.model.path}", device, advice):
        model, drafter = _build(config, parts, weights_of)
    weights_digest = digest(*(each.value() for each in digests))
    return LoadedModel(parts.for_small_steps(model, config.execution), config.model, device, weights_digest, drafter)


def _build(
    config: EngineConfig, parts: DeviceParts, weights_of: Callable[[Path], AbstractContextManager[Weights]]
) -> tuple[Model, Drafter | None]:
    speculative = config.speculative
    eagle3 = None if speculative is None else speculative.eagle3
    with weights_of(config.model.path) as weights:
        model = build_model(config.model, weights, () if eagle3 is None else eagle3.aux_layers)
        if speculative is not None and speculative.method == "mtp":
            return model, build_mtp(config.model, weights, model)
    if eagle3 is not None:
        with weights_of(eagle3.shape.path) as weights:
            return model, Eagle3Head(eagle3, weights, model)
    if speculative is None or speculative.draft_model is None:
        return model, None
    check_supported(speculative.draft_model)
    with weights_of(speculative.draft_model.path) as weights:
        drafter = build_model(speculative.draft_model, weights)
    return model, parts.for_small_steps(drafter, config.execution)
