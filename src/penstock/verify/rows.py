"""The rows of the matrix: the engine arguments that each changes, and the events that must occur for it to be
meaningful.

A new feature that schedules, moves or reuses KV adds its row here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.config.engine import EngineArgs, EngineConfig
from penstock.config.kv_transfer import parse_kv_transfer_config
from penstock.core.kv_cache_planning import blocks_for_one_request
from penstock.messages.kv_cache_spec import KVCacheGroup, KVCacheSpec
from penstock.messages.stats import SpeculationStats
from penstock.utils.math import cdiv
from penstock.verify.workload import Case

_NUM_DRAFTS = 3
# Small, and not a multiple of the block size: chunks end in the middle of blocks.
_CHUNK = 29
# The cache need not hold more tokens than this at once: requests wait, or are preempted.
_MAX_POOL_TOKENS = 32_768
_NGRAM = {"method": "ngram", "num_speculative_tokens": _NUM_DRAFTS}
_MTP = {"method": "mtp", "num_speculative_tokens": _NUM_DRAFTS}
# Always loads, so that the events do not depend on the machine's speed.
_OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"load_policy": "always"}}
# The user's arguments that a row keeps: the model and the device, nothing that schedules or moves KV.
_KEPT = (
    "model", "tokenizer", "skip_tokenizer_init", "revision", "load_format", "dtype", "quantization", "quantize_head",
    "quantize_activations",
    "device", "seed", "block_size", "max_num_seqs", "gpu_memory_utilization", "kv_cache_dtype",
)  # fmt: skip


@dataclass(slots=True)
class Seen:
    """Events that occurred while requests ran."""

    max_running: int = 0
    num_overlapped: int = 0
    num_replayed: int = 0
    num_cut: int = 0
    num_structured: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_loaded_tokens: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


Sign = Callable[[Seen], tuple[str, bool]]
"""The description of an expected event, and whether it occurred."""


def _sign(name: str, text: str, least: int = 1) -> Sign:
    """Requires at least this many of the events that `Seen` counts under the name."""
    return lambda seen: (f"{getattr(seen, name)} {text}", getattr(seen, name) >= least)


_together = _sign("max_running", "at once", 2)
_overlapped = _sign("num_overlapped", "steps overlapped")
_replayed = _sign("num_replayed", "steps from graphs")
_cut = _sign("num_cut", "prompts in chunks")
_hits = _sign("num_hit_tokens", "tokens found in the cache")
_loaded = _sign("num_loaded_tokens", "tokens loaded")
_preempted = _sign("num_preemptions", "preemptions")
_structured = _sign("num_structured", "grammars")


def _drafted(seen: Seen) -> tuple[str, bool]:
    """Requires both kinds of draft: rejected ones must be undone, and accepted ones kept."""
    right, drafts = seen.speculation.num_accepted_tokens, seen.speculation.num_draft_tokens
    return f"{right} drafts right, {drafts - right} rejected", 0 < right < drafts


@dataclass(frozen=True, slots=True)
class Row:
    """One engine. It runs the cases selected by `takes` `repeat` times, with the cache of the previous run. If it
    `forgets`, its prefix cache is cleared before each repetition.
    """

    name: str
    arguments: Mapping[str, Any]
    signs: tuple[Sign, ...]
    repeat: int = 1
    forgets: bool = False
    takes: Callable[[Case], bool] = lambda case: True


def make_rows(args: EngineArgs, config: EngineConfig, cases: Sequence[Case], has_mtp: bool) -> list[Row]:
    """Builds the table. `config` is the user's resolved configuration; each row has complete arguments."""
    plain = plain_arguments(args, config, cases)
    small = {"num_gpu_blocks_override": small_pool(config, plain)}
    drafters = _drafters(args, config, has_mtp)
    best = list(drafters.values())[-1]
    rows = [
        Row("in company", plain, (_together,)),
        Row("asynchronous scheduling", {**plain, "async_scheduling": True}, (_overlapped,)),
        Row("chunked prefill", {**plain, "max_num_batched_tokens": _CHUNK}, (_cut,)),
        Row("prefix hits", {**plain, "enable_prefix_caching": True}, (_hits,), repeat=2),
        Row("preemption", {**plain, **small}, (_preempted,)),
    ]
    if config.device != "cpu":
        replaying = {**plain, "enforce_eager": False}
        rows += [
            Row("CUDA graphs", replaying, (_replayed,)),
            Row("CUDA graphs, drafts", {**replaying, "speculative_config": best}, (_replayed, _drafted)),
        ]
    for name, connector in _connectors(args).items():
        moving = {**plain, "enable_prefix_caching": True, "kv_transfer_config": connector}
        rows += [
            Row(f"{name}: saved, loaded", moving, (_loaded,), repeat=2, forgets=True),
            Row(f"{name}: and preempted", {**moving, **small}, (_preempted, _loaded), repeat=2, forgets=True),
        ]
    rows += [
        Row(f"drafts: {name}", {**plain, "speculative_config": each}, (_drafted,)) for name, each in drafters.items()
    ]
    if any(case.is_structured for case in cases):
        drafting = {**plain, "speculative_config": best}
        rows += [
            Row("structured outputs", plain, (_structured,), takes=_is_structured),
            Row("structured outputs, drafts", drafting, (_structured, _drafted), takes=_is_structured),
        ]
    everything = _everything({**plain, **small}, best)
    elsewhere = {**everything.arguments, "distributed_executor_backend": "mp"}
    rows += [everything, replace(everything, name="everything, worker by mp", arguments=elsewhere)]
    rows += _rows_of_several_ranks(config, plain, everything)
    return [*rows, _user_row(args, config)]


def _rows_of_several_ranks(config: EngineConfig, plain: Mapping[str, Any], everything: Row) -> list[Row]:
    """Rows with several ranks, as processes. On a GPU each rank would need its own GPU."""
    model, first = config.model, config.model.first_source
    tp, pp = min(2, model.num_key_value_heads), min(2, model.num_hidden_layers)
    if config.device != "cpu" or tp * pp < 4 or first == 0:
        return []
    ranks: dict[str, Any] = {"tensor_parallel_size": tp}
    stages: dict[str, Any] = {"pipeline_parallel_size": pp}
    if first is not None:
        stages["pipeline_layers"] = f"{first},{model.num_hidden_layers - first}"
    arguments = {**everything.arguments, **ranks, **stages}
    return [
        Row("tensor parallel", {**plain, **ranks}, (_together,)),
        Row("pipeline parallel", {**plain, **stages}, (_together,)),
        replace(everything, name=f"everything, {tp} x {pp} ranks", arguments=arguments),
    ]


def _connectors(args: EngineArgs) -> dict[str, Any]:
    """Returns Penstock's memory tier and the user's connector, unless that loads only from other engines."""
    connectors: dict[str, Any] = {"KV offloaded": _OFFLOADING}
    if args.kv_transfer_config is not None and not _needs_peers(args.kv_transfer_config):
        connectors["kv_transfer_config"] = args.kv_transfer_config
    return connectors


def _needs_peers(config: Any) -> bool:
    return parse_kv_transfer_config(config).kv_connector in ("P2PConnector", "NixlConnector", "MooncakeConnector")


def _drafters(args: EngineArgs, config: EngineConfig, has_mtp: bool) -> dict[str, Any]:
    """Returns the drafters for this model, the user's last; sampled drafts are only run by `_user_row`."""
    drafters: dict[str, Any] = {"ngram": _NGRAM}
    if has_mtp:
        drafters["mtp"] = _MTP
    if config.speculative is not None and not config.speculative.samples_drafts:
        drafters["as configured"] = args.speculative_config
    return drafters


def _everything(plain: Mapping[str, Any], drafter: Any) -> Row:
    changes = {
        "async_scheduling": True,
        "enable_prefix_caching": True,
        "speculative_config": drafter,
        "kv_transfer_config": _OFFLOADING,
    }
    arguments = {**plain, **changes, "max_num_batched_tokens": _CHUNK}
    signs = (_overlapped, _cut, _hits, _preempted, _drafted, _loaded)
    return Row("everything at once", arguments, signs, repeat=2)


def _user_row(args: EngineArgs, config: EngineConfig) -> Row:
    """Returns the user's arguments without KV events, which do not affect tokens and whose address may be in use."""
    arguments = {**asdict(replace(args, kv_events_config=None)), **_exact(config)}
    speculative = config.speculative
    asked = ((_overlapped, args.async_scheduling), (_hits, args.enable_prefix_caching), (_drafted, speculative))
    signs = (_together, *(sign for sign, is_asked in asked if is_asked))
    if speculative is not None and speculative.samples_drafts:
        # Sampled drafts preserve the distribution of a sampled token, not the token.
        return Row("as configured, greedy", arguments, signs, repeat=2, takes=lambda case: case.is_greedy)
    return Row("as configured", arguments, signs, repeat=2)


def plain_arguments(args: EngineArgs, config: EngineConfig, cases: Sequence[Case]) -> dict[str, Any]:
    """Returns the reference: synchronous, unchunked, without caching, drafts or graphs, and with room for all
    requests.
    """
    size = config.cache.block_size
    longest = max(case.num_tokens for case in cases)
    num_tokens = max(longest, min(sum(case.num_tokens for case in cases), _MAX_POOL_TOKENS))
    return {
        **{name: getattr(args, name) for name in _KEPT},
        "max_model_len": longest,
        "max_num_batched_tokens": max(2048, longest),
        "enable_prefix_caching": False,
        "async_scheduling": False,
        **_exact(config),
        "enforce_eager": config.device != "cpu",
        "num_gpu_blocks_override": 1 + len(_windows(config)) * (cdiv(num_tokens, size) + 2 * len(cases)),
    }


def _exact(config: EngineConfig) -> dict[str, bool]:
    """Enables determinism on a GPU, which guarantees equal tokens only then; a CPU always does."""
    return {"deterministic": True} if config.device != "cpu" else {}


def small_pool(config: EngineConfig, plain: Mapping[str, Any]) -> int:
    """Returns a pool barely larger than the longest request, so that two long requests do not fit."""
    groups = tuple(
        KVCacheGroup((), KVCacheSpec.keys_and_values(1, 1, config.model.kv_dtype, window))
        for window in _windows(config)
    )
    in_flight = 2 * plain["max_num_batched_tokens"]
    return 2 + blocks_for_one_request(groups, config.cache.block_size, plain["max_model_len"], in_flight)


def _windows(config: EngineConfig) -> set[int]:
    """Returns the sliding windows; each has its own KV group."""
    return set(config.model.layer_windows)


def _is_structured(case: Case) -> bool:
    return case.is_structured
