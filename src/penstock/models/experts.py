"""A mixture of experts as the feed-forward part of a decoder's layer (Shazeer et al. 2017, arXiv:1701.06538).

    x -> router -> ids and weights of top_k experts -> each expert's MLP -> sum by weights -> + shared MLP

The router's logits and weights are float32. An expert's output is rounded to the model's dtype; the sum of a token's
experts is float32, in the order of the router's choice, and rounded once; the shared MLP's output is added to it and
the result is rounded. transformers rounds in these places too, and in others: silu(gate) before it is multiplied by up
and, for Qwen3, the logits, the weights and their products with the outputs. In float32 the two agree.

The ranks of a group divide every expert (`SlicedExperts`): each computes its share of the inner features, gathers the
others', computes its share of the outputs and gathers those. Or they divide the experts (`PlacedExperts`): each
computes the pairs of rows and experts that are its own, and gathers the others' outputs. No rank adds partial sums of a
row, so neither the group's size nor the place of an expert changes a bit. Ranks of several engines may divide the
experts together: then each first gathers the other engines' rows, and adds up its own engine's outputs alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.config.expert_parallel import SPARE
from penstock.config.experts import ExpertsConfig
from penstock.config.model import ModelConfig
from penstock.kernels.dispatch import has_gpu_kernels
from penstock.kernels.experts import Biases, ExpertsShape, Formats, GroupedExperts, make_experts
from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.linear import PackedFormat
from penstock.kernels.quantized import LayerWeight, QuantizedWeight, dense, reordered
from penstock.kernels.residual import add
from penstock.kernels.router import Router
from penstock.kernels.sigmoid import sigmoid
from penstock.layers.linear import Gather, Linear
from penstock.layers.norm import RMSNorm
from penstock.models.decoder import DecoderLayer, SinglePartLayer
from penstock.models.mixed_experts import ExpertKinds, check_alike
from penstock.models.norms import rms_norm_rounded_once
from penstock.models.parts import FeedForward, GatedMLP, UngatedMLP, dense_mlp, halves_of_pairs
from penstock.models.weights import Weights
from penstock.parallel.groups import gather_rows
from penstock.parallel.topology import Share
from penstock.utils import logging
from penstock.utils.errors import ConfigError
from penstock.utils.shared_memory import SharedMemory, create_memory

logger = logging.get_logger(__name__)


def sparse_mlp(
    config: ModelConfig,
    weights: Weights,
    layer: int,
    dense: Callable[[ModelConfig, Weights, int], FeedForward] = dense_mlp,
) -> FeedForward:
    """The experts of a layer, or its MLP if it is a dense one."""
    if config.experts is None or not config.experts.is_sparse(layer):
        return dense(config, weights, layer)
    return Experts(config, weights)


@dataclass(frozen=True, slots=True)
class _Names:
    """How a checkpoint calls the part, the layers of an expert that is stored by itself, and tensors of all experts."""

    part: str
    gate: str | None  # experts may have none
    up: str
    down: str
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    scales: str = "router.per_expert_scale"
    all_gate_up: str = "experts.gate_up_proj"
    all_down: str = "experts.down_proj"
    shared: str | None = None  # the MLP of every token, if it is beside the part, with gate and up in one tensor

    def view(self, of_layer: Weights) -> Weights:
        """Returns the part's tensors; without a part they have the layer's prefix."""
        return of_layer / self.part if self.part else of_layer


# The second are Mixtral's, then LFM2's, Granite's, Nemotron-H's, and last Gemma 4's, in no part.
_LAYOUTS = (
    _Names("mlp", "gate_proj", "up_proj", "down_proj"),
    _Names("block_sparse_moe", "w1", "w3", "w2"),
    _Names("feed_forward", "w1", "w3", "w2", correction="expert_bias"),
    _Names(
        "block_sparse_moe",
        "input_linear",
        "input_linear",
        "output_linear",
        router="router.layer",
        all_gate_up="input_linear.weight",
        all_down="output_linear.weight",
        shared="shared_mlp",
    ),
    _Names("mixer", None, "up_proj", "down_proj"),
    _Names("", "gate_proj", "up_proj", "down_proj", router="router.proj"),
)
_GPT_OSS = _Names("mlp", "gate_proj", "up_proj", "down_proj", router="router")


class Experts:
    """A `FeedForward`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """`weights` has the layer's prefix. Raises ConfigError if it lacks a router or an expert."""
        if weights.device.type != "cpu" and weights.expert_parallel is not None:
            raise ConfigError(
                "enable_expert_parallel divides experts among ranks on a CPU only (--device cpu): leave it out"
            )
        experts, hidden = config.experts, config.hidden_size
        assert experts is not None
        names = _find_names(config, weights)
        of_layer, weights = weights, names.view(weights)
        self.name = weights.prefix.removesuffix(".")
        self.config = experts
        # The CPU's kernels multiply in the model's dtype and do not round the sums.
        self._router_dtype = torch.float32 if has_gpu_kernels(weights.device) else weights.dtype
        self.router_logits = _read_router(experts, hidden, weights, names.router, self._router_dtype)
        numbers = replace(weights, dtype=torch.float32)
        stored = (names.correction, experts.has_correction_bias), (names.scales, experts.has_expert_scales)
        correction, scales = (numbers.tensor(name, experts.num_experts) if has else None for name, has in stored)
        self.route = Router(experts, correction, expert_scales=scales)
        place = SlicedExperts if weights.expert_parallel is None else PlacedExperts
        self.routed = place(config, weights, names)
        self.shared = _SharedMLP(config, of_layer, names) if experts.shared_intermediate_size else None

    def __call__(self, x: torch.Tensor, routed_by: torch.Tensor | None = None) -> torch.Tensor:
        """`routed_by` [T, H] is what the router reads, by default `x`."""
        shared = None if self.shared is None else self.shared(x)  # [T, H]
        routed_by = x if routed_by is None else routed_by
        logits = self.router_logits(routed_by.to(self._router_dtype)).float()  # [T, H] -> [T, num_experts]
        ids, weights = self.route(logits)  # -> [T, top_k]
        combined = self.routed(x, ids, weights)
        return combined if shared is None else combined + shared


def experts_beside_mlp(
    config: ModelConfig, weights: Weights, layer: int, mlp: Callable[[ModelConfig, Weights, int], FeedForward]
) -> FeedForward:
    """The MLP of a layer, and experts beside it if the model has such. The input is the stream itself."""
    dense = mlp(config, weights, layer)
    return dense if config.experts is None else ExpertsBesideMLP(config, weights, dense)


class ExpertsBesideMLP:
    """A `FeedForward` of the stream itself: an MLP and experts, each with norms of its own (Gemma 4)."""

    def __init__(self, config: ModelConfig, weights: Weights, mlp: FeedForward) -> None:
        """`weights` has the layer's prefix. The norm before the MLP is part of it."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._before, self._after, self._after_mlp = (
            rms_norm_rounded_once(weights, f"{name}_feedforward_layernorm_{number}", hidden, eps)
            for name, number in (("pre", 2), ("post", 2), ("post", 1))
        )
        scales = replace(weights, dtype=torch.float32).tensor("router.scale", hidden)
        self._before_router = RMSNorm(scales * hidden**-0.5, eps)
        self._mlp = mlp
        self.experts = Experts(config, weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._after_mlp(self._mlp(x))
        add(self._after(self.experts(self._before(x), self._before_router(x))), out)
        return out


class SlicedExperts:
    """Every rank of a group has a share of each expert's features."""

    def __init__(self, config: ModelConfig, weights: Weights, names: _Names) -> None:
        experts, share = config.experts, weights.share
        assert experts is not None
        self.experts = _load_experts(config, weights, names, range(experts.num_experts))
        # An expert's slot: all experts are here, in order.
        self.slots = torch.arange(experts.num_experts, dtype=torch.int32, device=weights.device)
        self._gather_inner = Gather(weights.group, share.sizes(experts.intermediate_size))
        self._gather_outputs = Gather(weights.group, share.sizes(config.hidden_size))

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids and weights [T, top_k] -> [T, H]."""
        groups = self.experts.group(ids, self.slots)
        activated = self._gather_inner(self.experts.gate_up(x, groups))  # [T, H] -> [P, own I] -> [P, I]
        outputs = self.experts.down(activated, groups)  # -> [P, own H]
        return self._gather_outputs(self.experts.combine(outputs, groups, weights))  # -> [T, own H] -> [T, H]


class PlacedExperts:
    """Every rank of a group has some of the experts, whole, in its buffers; all are numbered rank after rank.

    An expert in several buffers is computed in one of them, chosen by the row's number. All ranks choose alike, gather
    the outputs of all pairs and combine them, so that the placement changes no bit.

    If experts move, their memory is shared with the other ranks, and the tokens of each expert are counted.

    If several engines share the experts, they have different rows, and every rank must know how many each has: `expect`
    names the rows of the next passes, and an engine without rows takes part by `run_along`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, names: _Names) -> None:
        parallel = weights.expert_parallel
        assert config.experts is not None and parallel is not None
        self._group = weights.expert_group or weights.group
        assert self._group.count == parallel.num_ranks, f"{self._group.count} ranks, and experts for {parallel}"
        self.rank, self.num_buffers = self._group.index, parallel.num_buffers
        self.memories: list[SharedMemory] = []
        # This rank's place among those of its engine, which have the same rows.
        self._share = weights.share
        self._expected: deque[tuple[int, ...]] = deque()
        self._no_rows = torch.empty((0, config.hidden_size), dtype=weights.dtype)
        self._no_choices = torch.empty((0, config.experts.top_k), dtype=torch.int64)
        self._own = slice(self.rank * self.num_buffers, (self.rank + 1) * self.num_buffers)
        self._loads: np.ndarray | None = None
        self._num_experts = config.experts.num_experts
        self.place(parallel.initial_placement())
        allocate = aligned_bytes
        if parallel.balancing is not None:
            self._loads = np.zeros(self._num_experts, np.int32)
            allocate = self._allocate_shared
        self.experts = _load_experts(config, weights.whole(), names, self.placement[self._own], allocate)
        if parallel.balancing is not None and not self.experts.arrays():
            raise ConfigError("enable_eplb needs the native library, and this process does not use it: leave it out")

    def place(self, placement: Sequence[int]) -> None:
        """`placement` is the expert of every buffer, or SPARE."""
        self.placement = tuple(placement)
        self._all_buffers = torch.arange(len(placement), dtype=torch.int32)
        buffers: list[list[int]] = [[] for _ in range(self._num_experts)]
        for buffer, expert in enumerate(placement):
            if expert != SPARE:
                buffers[expert].append(buffer)
        counts = [len(each) for each in buffers]
        self._counts = torch.tensor(counts)
        # [num_experts, most copies]: an expert's buffers, repeated.
        self._buffers = torch.tensor([(each * max(counts))[: max(counts)] for each in buffers])

    def take_loads(self) -> np.ndarray:
        """Returns how many tokens have chosen each expert since the last call, [num_experts] int32."""
        assert self._loads is not None, "experts that do not move are not counted"
        loads, self._loads = self._loads, np.zeros_like(self._loads)
        return loads

    def _allocate_shared(self, num_bytes: int) -> torch.Tensor:
        self.memories.append(create_memory(num_bytes))
        return torch.frombuffer(self.memories[-1].view, dtype=torch.uint8)

    def expect(self, passes: Iterable[tuple[int, ...]]) -> None:
        """Names the next passes, by the number of rows of each engine. Those of the last step have been made."""
        assert not self._expected, f"passes with {list(self._expected)} rows have not been made"
        self._expected.extend(passes)

    def run_along(self) -> bool:
        """Makes the next expected pass, in which this engine has no rows; returns False if there is none."""
        if not self._expected:
            return False
        self(self._no_rows, self._no_choices, self._no_choices.float())
        return True

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, H], ids and weights [T, top_k] -> [T, H]."""
        num_rows, first = len(x), 0
        if self._group.count > self._share.count:
            x, ids, first = self._gather_engines(x, ids)
        if self._loads is not None:
            self._loads += ids.view(-1).bincount(minlength=self._num_experts).numpy().astype(np.int32)
        groups = self.experts.group(self._choose(ids), self._all_buffers, len(self._all_buffers))
        bounds = groups.starts[:: self.num_buffers].tolist()  # where each rank's sorted rows begin
        own = slice(*bounds[self._group.index : self._group.index + 2])
        starts = groups.starts[self._own.start : self._own.stop + 1] - own.start
        here = replace(groups, pairs=groups.pairs[own], starts=starts)
        outputs = self.experts.down(self.experts.gate_up(x, here), here)  # [T, H] -> [own P, I] -> [own P, H]
        counts = [end - start for start, end in itertools.pairwise(bounds)]
        gathered = gather_rows(self._group, outputs, counts)  # -> [P, H]
        combined = replace(groups, rows=groups.rows[first : first + num_rows])
        return self.experts.combine(gathered, combined, weights)  # -> [T, H]

    def _gather_engines(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns the rows and choices of all engines in order, and where this one's begin.

        All ranks of an engine have its rows: each sends a share of them, with the choices as if they were features.
        """
        assert self._expected, f"a pass of {len(x)} rows that no engine expects"
        counts, size = self._expected.popleft(), self._share.count
        engine = self._group.index // size
        assert counts[engine] == len(x), f"engine {engine} has {len(x)} rows in a pass with {counts}"
        own = self._share.part(len(x))
        sent = torch.cat([part[own.start : own.stop] for part in (x, ids.int().view(x.dtype))], 1)
        gathered = gather_rows(self._group, sent, [rows for count in counts for rows in Share(0, size).sizes(count)])
        rows, choices = gathered.split([x.shape[1], sent.shape[1] - x.shape[1]], 1)
        return rows.contiguous(), choices.contiguous().view(torch.int32).long(), sum(counts[:engine])

    def _choose(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the buffer of every pair."""
        if self._buffers.shape[1] == 1:
            return self._buffers[:, 0][ids]
        copies = torch.arange(len(ids))[:, None] % self._counts[ids]
        return self._buffers[ids, copies]


def placed_experts(layers: Iterable[DecoderLayer | SinglePartLayer]) -> dict[str, PlacedExperts]:
    """Returns the experts of those layers whose experts the ranks divide, by name."""
    parts = (layer.feed_forward for layer in layers)
    found = (part.experts if isinstance(part, ExpertsBesideMLP) else part for part in parts)
    return {
        part.name: part.routed for part in found if isinstance(part, Experts) and isinstance(part.routed, PlacedExperts)
    }


class _SharedMLP:
    """The MLP of every token; with a gate its result is multiplied by a sigmoid of the token's own."""

    def __init__(self, config: ModelConfig, of_layer: Weights, names: _Names) -> None:
        experts, weights = config.experts, names.view(of_layer)
        assert experts is not None
        size = experts.shared_intermediate_size
        if names.shared is None:
            name = "shared_expert" if experts.has_shared_gate else "shared_experts"
            make = UngatedMLP if names.gate is None else GatedMLP
            self.mlp = make(config, weights / name, size)
        else:
            self.mlp = GatedMLP(config, of_layer / names.shared, size, stored_as=names.gate, down=names.down)
        self.gate: Linear | None = None
        if experts.has_shared_gate:
            weight = weights.tensor("shared_expert_gate.weight", 1, config.hidden_size)
            self.gate = weights.linear_of("shared_expert_gate", weight, is_wide=True)
        self._is_divided = weights.group.count > 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that no other layer overwrites."""
        out = self.mlp(x)
        if self.gate is not None:
            return (out.float() * sigmoid(self.gate(x).float())).to(out.dtype)
        return out.clone() if self._is_divided else out


def _find_names(config: ModelConfig, weights: Weights) -> _Names:
    if config.experts is not None and config.experts.has_biases:
        return _GPT_OSS
    for names in _LAYOUTS:
        if names.view(weights).has(f"{names.router}.weight"):
            return names
    routers = " or ".join(f"{names.view(weights).prefix}{names.router}.weight" for names in _LAYOUTS)
    raise ConfigError(f"{config.path} has no router {routers}: the checkpoint is incomplete or another model's")


def _read_router(experts: ExpertsConfig, hidden: int, weights: Weights, name: str, dtype: torch.dtype) -> Linear:
    """The values are those of the model's dtype on every device."""
    bias = weights.tensor(f"{name}.bias", experts.num_experts).to(dtype) if experts.has_router_bias else None
    weight = weights.tensor(f"{name}.weight", experts.num_experts, hidden).to(dtype)
    return replace(weights, dtype=dtype).linear_of(name, weight, bias, is_wide=True)


def _load_experts(
    config: ModelConfig,
    weights: Weights,
    names: _Names,
    chosen: Sequence[int],
    allocate: Callable[[int], torch.Tensor] = aligned_bytes,
    takes_values: bool = False,
) -> GroupedExperts:
    """Reads and packs one expert after another, so that no second copy of all of them is in memory.

    Slot i has this rank's share of expert `chosen[i]`, or nothing if that is SPARE. If they are quantized in several
    ways, all take the values that they stand for (`takes_values`).
    """
    experts, hidden, own = config.experts, config.hidden_size, weights.share.part
    assert experts is not None
    shape = ExpertsShape(
        num_slots=len(chosen),
        in_features=hidden,
        own_inner=len(own(experts.intermediate_size)),
        inner=experts.intermediate_size,
        out_features=len(own(hidden)),
        dtype=weights.dtype,
        activation=experts.activation,
    )
    of_layer = f"{config.path}: the experts of {weights.prefix.removesuffix('.')}"
    made: GroupedExperts | None = None
    read = _read_single
    if not weights.has(f"experts.0.{names.up}.weight"):
        is_fused = weights.has(names.all_gate_up)
        read = _read_interleaved if names is _GPT_OSS else _read_fused if is_fused else _read_single
    elif (parallel := weights.expert_parallel) is not None and parallel.balancing is not None:
        # One of every rank: those of this rank are compared when they are read.
        of_ranks = (
            (each, *_layer_weights(experts, hidden, weights / "experts" / each, names, has_rows=False))
            for each in parallel.initial_placement()[:: parallel.num_buffers]
        )
        check_alike(of_layer, weights, next(of_ranks), of_ranks)
    first: ExpertKinds | None = None
    size, size_before = weights.size, replace(weights.size)
    for slot, expert in enumerate(chosen):
        if expert == SPARE:
            continue
        gate_up, down, biases = read(experts, hidden, weights, names, expert)
        first = first or (expert, gate_up, down)
        if not check_alike(of_layer, weights, first, [(expert, gate_up, down)]) and not takes_values:
            logger.warning("%s are quantized in several ways: they take the memory of %s", of_layer, config.dtype)
            size.num_weights, size.num_bytes = size_before.num_weights, size_before.num_bytes
            return _load_experts(config, weights, names, chosen, allocate, takes_values=True)
        if takes_values:
            size.num_bytes -= gate_up.nbytes + down.nbytes
            gate_up, down = dense(gate_up), dense(down)
            size.num_bytes += gate_up.nbytes + down.nbytes
        if made is None:
            made = _make_grouped(shape, weights, experts.has_biases, allocate, (_format(gate_up), _format(down)))
        try:
            made.store(slot, gate_up, down, biases)
        except ValueError as error:
            raise ConfigError(f"{of_layer} cannot be packed together, experts.{expert} and others: {error}") from None
        for name, stored, weight in zip(("gate_up", "down"), made.weights(slot), (gate_up, down), strict=True):
            weights.check(f"{weights.prefix}experts.{expert}.{name}", stored, weight)
    return made or _make_grouped(shape, weights, experts.has_biases, allocate, (None, None))


def _format(weight: LayerWeight) -> PackedFormat | None:
    return PackedFormat.of(weight) if isinstance(weight, QuantizedWeight) else None


def _make_grouped(
    shape: ExpertsShape, weights: Weights, has_biases: bool, allocate: Callable[[int], torch.Tensor], formats: Formats
) -> GroupedExperts:
    if has_gpu_kernels(weights.device):
        # Imported here: a CPU needs no Triton.
        from penstock.kernels.triton.experts import TritonExperts

        return TritonExperts(shape, has_biases, device=weights.device)
    return make_experts(shape, has_biases, allocate=allocate, formats=formats)


_Expert = tuple[LayerWeight, LayerWeight, Biases | None]


def _read_single(experts: ExpertsConfig, hidden: int, weights: Weights, names: _Names, expert: int) -> _Expert:
    """Returns this rank's gate and up rows, [2 own I, H], its rows of down, [own H, I], and their biases if any."""
    inner, own = experts.intermediate_size, weights / "experts" / expert
    (gate_up, down), biases = _layer_weights(experts, hidden, own, names), None
    if experts.has_biases:
        of_gate_up = own.tensors({f"{names.gate}.bias": inner, f"{names.up}.bias": inner})
        biases = Biases(of_gate_up, own.tensors({f"{names.down}.bias": hidden}))
    return gate_up, down, biases


def _layer_weights(
    experts: ExpertsConfig, hidden: int, own: Weights, names: _Names, has_rows: bool = True
) -> tuple[LayerWeight, LayerWeight]:
    """Returns gate_up and down of the expert with these tensors, or of neither a row, which tells their kinds."""
    inner = experts.intermediate_size
    gate_up = {f"{name}.weight": inner for name in (names.gate, names.up) if name is not None}
    down = {f"{names.down}.weight": hidden}
    gate_up_rows, down_rows = ((None if has_rows else dict.fromkeys(rows, range(0))) for rows in (gate_up, down))
    return own.layer_weight(gate_up, hidden, gate_up_rows), own.layer_weight(down, inner, down_rows)


def _read_fused(experts: ExpertsConfig, hidden: int, weights: Weights, names: _Names, expert: int) -> _Expert:
    """Does the same for tensors that hold all experts, each gate first and then up."""
    count, inner = experts.num_experts, experts.intermediate_size
    gate = weights.share.part(inner)
    rows = [gate, range(inner + gate.start, inner + gate.stop)]
    gate_up = weights.of_expert(names.all_gate_up, expert, (count, 2 * inner, hidden), rows)
    own = [weights.share.part(hidden)]
    return gate_up, weights.of_expert(names.all_down, expert, (count, hidden, inner), own), None


def _read_interleaved(experts: ExpertsConfig, hidden: int, weights: Weights, names: _Names, expert: int) -> _Expert:
    """Does the same for gpt-oss' tensors of all experts, in which gate and up alternate.

    Each expert is [inputs, outputs], but [outputs, inputs] in 4-bit floats.
    """
    count, inner, share = experts.num_experts, experts.intermediate_size, weights.share
    gate, own = share.part(inner), [share.part(hidden)]
    pairs = [range(2 * gate.start, 2 * gate.stop)]
    order = halves_of_pairs(len(pairs[0]))
    is_transposed = not weights.has("experts.gate_up_proj_blocks")

    def read(name: str, width: int, num_rows: int, rows: Sequence[range]) -> tuple[LayerWeight, torch.Tensor]:
        shape = (count, width, num_rows) if is_transposed else (count, num_rows, width)
        bias = weights.of_expert(f"experts.{name}_bias", expert, (count, num_rows), rows)
        return weights.of_expert(f"experts.{name}", expert, shape, rows, is_transposed), dense(bias)

    gate_up, gate_up_bias = read("gate_up_proj", hidden, 2 * inner, pairs)
    down, down_bias = read("down_proj", inner, hidden, own)
    return reordered(gate_up, order), down, Biases(gate_up_bias[order], down_bias)
