"""The division of the model among ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config.expert_parallel import ExpertParallelConfig
from penstock.config.model import ModelConfig
from penstock.utils.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """`tp` ranks hold a share of every layer of each of `pp` stages, and each of `dp` engines has that many ranks.

    `layer_counts` are the stages' layers; if empty, they are as equal as possible. `backend` is where the ranks run,
    one of EXECUTOR_BACKENDS. With `experts` the ranks of a stage have whole experts, those of all engines together.
    """

    tp: int = 1
    pp: int = 1
    layer_counts: tuple[int, ...] = ()
    dp: int = 1
    backend: str = "uniproc"
    experts: ExpertParallelConfig | None = None

    @property
    def num_ranks(self) -> int:
        """The ranks of one engine."""
        return self.tp * self.pp

    @property
    def num_joint_engines(self) -> int:
        """The engines that one engine core drives, because they share experts."""
        return 1 if self.experts is None else self.dp


def divide(tp: int, pp: int, layers: str | None, shapes: Sequence[ModelConfig]) -> ParallelConfig:
    """`shapes` are the model's and those of its drafters. Raises ConfigError if they cannot be divided in this way."""
    model = shapes[0]
    for shape in shapes:
        if tp > shape.num_attention_heads:
            raise ConfigError(
                f"tensor_parallel_size={tp} is more than the {shape.num_attention_heads} attention heads of "
                f"{shape.path}: lower it"
            )
    if pp > model.num_hidden_layers:
        raise ConfigError(
            f"pipeline_parallel_size={pp} is more than the {model.num_hidden_layers} layers of {model.path}: lower it"
        )
    counts = layer_counts(layers, pp)
    if counts and sum(counts) != model.num_hidden_layers:
        raise ConfigError(
            f"pipeline_layers={layers} has {sum(counts)} layers, and {model.path} has {model.num_hidden_layers}: name "
            "all of them"
        )
    return ParallelConfig(tp=tp, pp=pp, layer_counts=counts)


def layer_counts(layers: str | None, num_stages: int) -> tuple[int, ...]:
    """Parses the argument `pipeline_layers`. Raises ConfigError if it is not a list of `num_stages` numbers."""
    if layers is None:
        return ()
    parts = [part.strip() for part in layers.split(",")]
    if not all(re.fullmatch("0*[1-9][0-9]{0,5}", part) for part in parts) or len(parts) != num_stages:
        raise ConfigError(
            f"pipeline_layers must be the number of layers of each of the {num_stages} stages, each at least 1, such "
            f"as {','.join(['4'] * num_stages)}, got {layers!r}"
        )
    return tuple(map(int, parts))
