"""Whole experts on the ranks, and how they are balanced: `--enable-expert-parallel`, `--enable-eplb`, `--eplb-config`.

The keys of `eplb_config` are vLLM's: `window_size`, `step_interval`, `num_redundant_experts`, `log_balancedness`; and
`num_nodes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from penstock.config.model import ModelConfig
from penstock.config.options import Limits, convert_options, read_object
from penstock.utils.errors import ConfigError

SPARE = -1
_SLOTS_PER_SPARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EPLBConfig:
    """Expert parallelism load balancing: every `step_interval` steps, from the load of the last `window_size` steps.

    `num_redundant_experts` slots of a layer hold second copies. The ranks are on `num_nodes` machines, as many on each.
    """

    window_size: Annotated[int, Limits(ge=1)] = 1000
    step_interval: Annotated[int, Limits(ge=1)] = 3000
    num_redundant_experts: Annotated[int, Limits(ge=0)] = 0
    log_balancedness: bool = False
    num_nodes: Annotated[int, Limits(ge=1)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallelConfig:
    """Each rank of a stage has `num_slots` experts of every layer, whole; `balancing` is None if they stay there.

    These are the ranks of all data parallel engines, `num_ranks` of them. The router chooses from `num_groups`
    groups of experts.

    The numbers are a layer's. Without redundant slots there are as many slots as experts. A rank that balances has
    memory for more experts than it has: `num_buffers`. A placement is the expert of every buffer, rank after rank, or
    SPARE; no rank has two copies of one expert.
    """

    num_experts: int
    num_redundant: int
    num_ranks: int
    num_groups: int = 1
    balancing: EPLBConfig | None = None

    @property
    def num_slots(self) -> int:
        """Slots of one rank."""
        return (self.num_experts + self.num_redundant) // self.num_ranks

    @property
    def num_buffers(self) -> int:
        """Buffers of one rank: one for each slot, and spare ones for experts that are being copied to it."""
        return self.num_slots + (0 if self.balancing is None else -(-self.num_slots // _SLOTS_PER_SPARE))

    def initial_placement(self) -> tuple[int, ...]:
        """Returns the placement in which the experts follow one another, and then redundant copies do."""
        placement: list[int] = []
        for first in range(0, self.num_slots * self.num_ranks, self.num_slots):
            placement += (slot % self.num_experts for slot in range(first, first + self.num_slots))
            placement += [SPARE] * (self.num_buffers - self.num_slots)
        return tuple(placement)


def parse_expert_parallel(
    model: ModelConfig,
    tp: int,
    dp: int,
    eplb_config: str | Mapping[str, Any] | None,
    *,
    is_enabled: bool,
    balances: bool,
) -> ExpertParallelConfig | None:
    """Checks the arguments against the model and the number of ranks; None if experts are divided like other layers.

    Raises ConfigError naming the argument and what to change.
    """
    if balances and not is_enabled:
        raise ConfigError("enable_eplb needs enable_expert_parallel: without it every rank has a share of all experts")
    if eplb_config is not None and not balances:
        raise ConfigError("eplb_config needs enable_eplb")
    if not is_enabled:
        return None
    if model.experts is None:
        raise ConfigError(f"enable_expert_parallel needs a model with experts, and {model.path} has none: leave it out")
    ranks = tp * dp
    if balances and ranks == 1:
        raise ConfigError(
            "enable_eplb needs tensor_parallel_size or data_parallel_size of at least 2: a single rank has all experts"
        )
    sizes = f"tensor_parallel_size={tp}" if dp == 1 else f"tensor_parallel_size={tp} x data_parallel_size={dp}"
    given: Mapping[str, Any] = {} if eplb_config is None else read_object("eplb_config", eplb_config)
    balancing = convert_options(EPLBConfig, given, "in eplb_config") if balances else None
    redundant = 0 if balancing is None else balancing.num_redundant_experts
    if balancing is not None and ranks % balancing.num_nodes:
        raise ConfigError(
            f"num_nodes={balancing.num_nodes} in eplb_config does not divide the {ranks} ranks of {sizes}: every "
            "node has as many ranks"
        )
    experts = model.experts.num_experts
    if (experts + redundant) % ranks:
        missing = ranks - (experts + redundant) % ranks
        with_redundant = f" and num_redundant_experts={redundant}" if redundant else ""
        raise ConfigError(
            f"the {experts} experts of a layer{with_redundant} cannot be divided equally among "
            f"{sizes} ranks: set num_redundant_experts in eplb_config to {redundant + missing} with "
            "enable_eplb, or another tensor_parallel_size"
        )
    num_nodes = 1 if balancing is None else balancing.num_nodes
    most = experts * (ranks // num_nodes - 1)
    if redundant > most:
        of_nodes = f" on {num_nodes} nodes" if num_nodes > 1 else ""
        raise ConfigError(
            f"num_redundant_experts={redundant} in eplb_config leaves more slots on a rank than there are experts: use "
            f"at most {most} with {experts} experts and {sizes}{of_nodes}"
        )
    return ExpertParallelConfig(
        num_experts=experts,
        num_redundant=redundant,
        num_ranks=ranks,
        num_groups=model.experts.num_groups,
        balancing=balancing,
    )
