"""Bugs to plant, each with a scenario that catches it; those of disaggregation are in `planted_pd.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from penstock.kv_transfer.offload.manager import OffloadingManager
from penstock.kv_transfer.offload.messages import OffloadMetadata
from penstock.kv_transfer.transports.base import TransferState
from penstock.messages.kv_transfer import KVConnectorOutput, TransferReport
from penstock.runner.awaited_results import OwnedRows
from penstock.utils.layer_hooks import NO_HOOKS
from tests.simulation.patches import Patches, bug, changes, returns, sets, skips, within

Original = Callable[..., Any]

_SCHEDULER = "core.scheduler:Scheduler"
_KV = "core.kv_cache_manager:KVCacheManager"
_REMOTE = "core.remote_kv:RemoteKV"
_REQUEST = "core.request:Request"
_STEP = "kv_transfer.kv_step:KVStep"
_LEDGER_APPLY = "kv_transfer.ledger:TransferLedger.apply"
_AWAITED = "runner.awaited_results:AwaitedResults"
_ADAPTERS = "core.adapter_slots:AdapterSlots"
_BATCHES = "core.micro_batches:MicroBatches"
_TIERS = "kv_transfer.offload.scheduler:OffloadingScheduler"
_TIER_WORKER = "kv_transfer.offload.worker:OffloadingWorker"
_MANAGER = "kv_transfer.offload.manager:OffloadingManager"
_STREAM = "router.reported_stream:ReportedStream"
_LAYER_PART = "kv_transfer.topology.chunks:_LayerPart"

_NO_DIGESTS = returns("kv_transfer.topology.chunks:RankChunks.is_right", True)
_OPTIMISTIC_COUNT = changes(f"{_REQUEST}.num_processed_tokens", lambda original, self: self.num_computed_tokens)
_NO_FENCE = changes(f"{_KV}.release", lambda original, self, request, fence: original(self, request, 0))


def _in_every_window(change: Callable[[int], int]) -> Patches:
    """Changes the count of computed tokens from which the first needed block follows."""
    return changes(
        "messages.kv_cache_spec:KVCacheSpec.first_needed_block",
        lambda original, self, num_tokens, size: original(self, change(num_tokens), size),
    )


# ---- Runner ----


def _take_all_rows(original: Original, self: Any) -> OwnedRows:
    rows = self._results[0].rows
    original(self)
    return OwnedRows(np.arange(len(rows)), rows)


def _take_newest(original: Original, self: Any) -> OwnedRows:
    self._results.rotate(1)
    return original(self)


def _add_uncounted(original: Original, self: Any, *args: Any) -> int:
    row = original(self, *args)
    self.generation[row] -= 1
    return row


def _count_twice(original: Original, plan: Any, rows: Any) -> Any:
    counts = zip(plan.num_computed_tokens, plan.num_scheduled_tokens.values(), strict=True)
    return original(msgspec.structs.replace(plan, num_computed_tokens=tuple(map(sum, counts))), rows)


# ---- Continued streams ----


def _report_twice(original: Original, self: Any, part: bytes, is_last: bool) -> bytes:
    (token_ids,) = self.token_ids
    before = len(token_ids)
    passed = original(self, part, is_last)
    token_ids += token_ids[before:][-1:]
    return passed


def _lose_report(original: Original, self: Any, part: bytes, is_last: bool) -> bytes:
    (token_ids,) = self.token_ids
    before = len(token_ids)
    passed = original(self, part, is_last)
    if len(token_ids) > max(before, 1):
        token_ids.pop()
    return passed


# ---- Where prompts are computed ----


def _compare_reversed(original: Original, self: Any, *args: Any) -> bool:
    is_sooner = original(self, *args)
    alone, divided = (self.estimates.get(name, 0.0) for name in ("decode", "prefill"))
    return not is_sooner if alone and divided else is_sooner


def _by_prefill_rate(original: Original, self: Any, member: Any, now: float) -> Any:
    """The rate of one instance for all."""
    return original(self, next(iter(self)), now)


def _load_for_nothing(original: Original, self: Any, lease: Any, num_tokens: int, since: float, now: float) -> None:
    original(self, lease, num_tokens, now, now)


ROUTING_BUGS = (
    bug(
        "a rate of a bad moment is kept for ever",
        "routing_of_halves",
        changes("router.rates:Rate.is_known", lambda original, self, now: self._measured_at > 0.0),
    ),
    bug(
        "prompts are computed on the wrong side",
        "routing_of_halves",
        changes("router.costs:CostModel.is_sooner_alone", _compare_reversed),
    ),
    bug(
        "the speed of the prefill instance counts for all",
        "routing_of_halves",
        changes("router.pool:Pool.rate_of_prompts", _by_prefill_rate),
    ),
    bug("loads take no time", "routing_of_halves", changes("router.pool:Pool.measure_load", _load_for_nothing)),
    bug(
        "a sibling that keeps others waiting is asked again",
        "routing_with_siblings",
        skips("router.dispatcher:Dispatcher._measure_share"),
    ),
    bug(
        "the rest of a prompt counts as loaded",
        "routing_with_siblings",
        changes(
            "router.pool:Pool.measure_load",
            lambda original, self, lease, num_tokens, since, now: original(self, lease, num_tokens * 100, since, now),
        ),
    ),
)


def _count_as_prompt(original: Original, data: Any, slot: int) -> Any:
    row = original(data, slot)
    return msgspec.structs.replace(row, num_prompt_tokens=row.num_prompt_tokens + len(data.output_token_ids))


def _count_new_tokens_only(original: Original, self: Any, data: Any, *args: Any) -> None:
    original(self, data, *args)
    self.max_num_tokens += len(data.output_token_ids)


# ---- Steps and reports ----


def _before_sampling(method: str) -> Patches:
    """A method of the connector is called before the step samples and drafts, and not only afterwards."""
    return changes(
        f"{_STEP}.run_sampling",
        lambda original, self, sample: original(self, lambda: (getattr(self._active, method)(), sample())[1]),
    )


def _count_reports(original: Original, self: Any, report: Any) -> Any:
    entry = self._open.get(report.transfer_id)
    if entry is not None and report.shard in entry.reports:
        report = msgspec.structs.replace(report, shard=min(entry.expected - entry.reports.keys()))
    return original(self, report)


def end_with_first_report(original: Original, self: Any, report: Any) -> Any:
    entry = self._open.get(report.transfer_id)
    if entry is not None:
        entry.expected = frozenset([report.shard])
    return original(self, report)


def _ignore_contradiction(original: Original, self: Any, report: Any) -> Any:
    entry = self._open.get(report.transfer_id)
    return None if entry is not None and report.shard in entry.reports else original(self, report)


# ---- Scheduler ----


def _take_any_slot(original: Original, self: Any) -> int:
    return self._slots.pop(next(iter(self._slots))) if self._slots else original(self)


def _keep_rejected(original: Original, self: Any, num_tokens: int, num_drafts: int, num_sampled: int) -> None:
    original(self, num_tokens, num_drafts, num_sampled)
    self.num_computed_tokens += 1 + num_drafts - num_sampled if num_sampled else 0


def _apply_to_any_admission(original: Original, self: Any, plan: Any, result: Any) -> Any:
    self._last_admissions[plan.step] = 1 << 60
    return original(self, plan, result)


def _keep_rewound_row(original: Original, self: Any, lost: Any) -> Iterator[Any]:
    before = set(self._rewound_request_ids)
    yield from original(self, lost)
    self._rewound_request_ids &= before


def _keep_finished_row(original: Original, self: Any, request: Any, reason: Any) -> Any:
    params = original(self, request, reason)
    self._finished_request_ids.discard(request.request_id)
    return params


def _announce_loads(original: Original, self: Any, request: Any, hit: Any, num_tokens: int, num_external: int) -> Any:
    block_ids = original(self, request, hit, num_tokens, num_external)
    if block_ids is not None and num_tokens <= hit.num_tokens + num_external:
        holding = self._holdings[request.request_id]
        self._being_computed.update(request.block_hashes[holding.num_to_publish :])
        holding.num_to_publish = len(request.block_hashes)
    return block_ids


def _make_pinned_available(original: Original, self: Any, block_ids: Any) -> None:
    ids = list(block_ids)
    pins = [(self._blocks[each], self._blocks[each].num_pins) for each in ids]
    for block, _ in pins:
        block.num_pins = 0
    original(self, ids)
    for block, num_pins in pins:
        block.num_pins = num_pins


def _free_running_loads(original: Original, self: Any, request: Any) -> None:
    mine = dict(self._loads_of.get(request, {}))
    original(self, request)
    for name, load in mine.items():
        if load.is_async:
            del self._loads[name]
            self._quarantined.subtract(load.num_blocks)
            self._kv.unpin(name)


def _forget_load(original: Original, self: Any, request: Any, *others: Any) -> Any:
    request.num_loaded_tokens = 0
    return original(self, request, *others)


def _end_detached(original: Original, self: Any, event: Any) -> Any:
    if event.transfer_id in self._loads:
        self._loads[event.transfer_id].is_detached = False
    return original(self, event)


# ---- Connectors ----


def _store_later(original: Original, self: Any, metadata: OffloadMetadata) -> None:
    self.late_stores = metadata.stores
    original(self, OffloadMetadata((), metadata.loads, metadata.cancelled))


def _store_now(original: Original, self: Any) -> None:
    self._jobs += map(self._store, self.late_stores)
    original(self)


def _load_without_pins(original: Original, self: Any, keys: Any) -> Any:
    chunks = original(self, keys)
    _COMPLETE_LOAD(self, keys)
    return chunks


_COMPLETE_LOAD = OffloadingManager.complete_load


def _as_first_rank(part: Any) -> Any:
    return dataclasses.replace(part, first=0, end=part.end - part.first)


def _load_first_child(original: Original, self: Any, request: Any, *args: Any) -> None:
    self._chosen[request.request_id] = next(iter(self._children))
    original(self, request, *args)


def _report_as_tiers(original: Original, self: Any, finished: Any) -> KVConnectorOutput:
    def renamed(report: TransferReport) -> TransferReport:
        transfer_id = msgspec.structs.replace(report.transfer_id, child="tiers")
        return msgspec.structs.replace(report, transfer_id=transfer_id)

    return KVConnectorOutput(tuple(map(renamed, original(self, finished).reports)))


def _publish_current_state(original: Original, self: Any, request: Any) -> tuple[int, int]:
    holding = self._holdings[request.request_id]
    last = len(holding.tables[0]) - 1
    for number, group in enumerate(self._groups):
        if group.spec.is_recurrent and last > 0 and len(holding.request.block_hashes) >= last:
            holding.tables[number][holding.num_computed - 1] = holding.tables[number][last]
    return original(self, request)


BUGS = (
    bug(
        "a prefix hit ends where there is no state",
        "recurrent",
        changes(
            f"{_KV}._longest_hit",
            lambda original, self, request, length, with_states: original(self, request, length, with_states=False),
        ),
    ),
    bug(
        "a state is published before it contains the accepted drafts",
        "recurrent",
        changes(f"{_KV}._num_stored_tokens", lambda original, self, request: request.num_processed_tokens),
    ),
    bug(
        "the state of an unfinished block is published",
        "recurrent",
        changes(f"{_KV}.publish_last_state", _publish_current_state),
    ),
    bug(
        "there is no room for the state before drafts",
        "recurrent",
        changes(
            "core.kv_cache_groups:RecurrentGroup.blocks_to_allocate",
            lambda original, self, first, end, num_tokens, checkpoints: original(
                self, first, end, num_tokens + self.num_uncertain_tokens, checkpoints
            ),
        ),
    ),
    bug(
        "a step that loads the state it begins with has no block for it",
        "offload_recurrent",
        changes(
            f"{_KV}._checkpoints",
            lambda original, self, request, hit, num_present: original(self, request, hit, hit.num_tokens),
        ),
    ),
    bug(
        "a stage applies results of a row's previous owner",
        "pipeline_row_reuse",
        changes(f"{_AWAITED}.take", _take_all_rows),
    ),
    bug("a row does not count its owners", "pipeline_row_reuse", changes("runner.rows:Rows.add", _add_uncounted)),
    bug("results are applied in the wrong order", "pipeline", changes(f"{_AWAITED}.take", _take_newest)),
    bug(
        "a stage begins a step before it knows the tokens",
        "pipeline",
        changes(f"{_AWAITED}.num_due", lambda original, self, step, rows: original(self, step, rows[:0])),
    ),
    bug(
        "a request is in two steps before its token is known",
        "pipeline",
        sets(f"{_BATCHES}.candidates", "_max_samples_in_flight", lambda self: 1 << 30),
    ),
    bug(
        "a micro-batch never gets its turn",
        "pipeline",
        changes(f"{_BATCHES}.turns", lambda original, self: list(original(self))[:-1]),
    ),
    bug("the metadata is cleared before the drafter runs", "shared_store_with_drafts", _before_sampling("end_step")),
    bug("saves are finalised before the drafter runs", "drafts", _before_sampling("wait_for_save")),
    bug(
        "only the last rank's output is kept",
        "one_of_n_shards",
        changes("kv_transfer.aggregate:aggregate", lambda original, outputs: original(list(outputs)[-1:])),
    ),
    bug(
        "synchronous loads begin after the forward pass",
        "synchronous_loads",
        returns(f"{_STEP}._has_sync_loads", False),
    ),
    bug("layer hooks are not called", "layerwise_loads", returns(f"{_STEP}.hooks", NO_HOOKS)),
    bug(
        "completions are counted instead of matched to shards",
        "repeated_completions",
        changes(_LEDGER_APPLY, _count_reports),
    ),
    bug(
        "a transfer ends with the first rank's report", "one_of_n_shards", changes(_LEDGER_APPLY, end_with_first_report)
    ),
    bug(
        "a failure that a shard reports later is ignored",
        "one_of_n_shards",
        changes(_LEDGER_APPLY, _ignore_contradiction),
    ),
    bug(
        "an unsettled failure counts as an end",
        "unsettled_failures",
        changes(
            "kv_transfer.transports.base:TransferState.is_settled",
            lambda original, self: self is not TransferState.PENDING,
        ),
    ),
    bug(
        "only the first rank's handshake is kept",
        "one_of_n_shards",
        changes(
            "executor.executor:Executor.initialize",
            lambda original, *args: [
                {shard: each if shard == (0, 0) else None for shard, each in table.items()} for table in original(*args)
            ],
        ),
    ),
    bug(
        "the runner counts again what the scheduler has counted",
        "plain",
        changes("runner.host_batch:read_plan", _count_twice),
    ),
    bug(
        "an engine without requests never sleeps",
        "plain",
        changes(f"{_SCHEDULER}.seconds_until_due", lambda original, self, now: original(self, now) or 0.0),
    ),
    bug("the optimistic count decides what is published", "plain", within(f"{_KV}.publish", _OPTIMISTIC_COUNT)),
    bug(
        "the optimistic count decides what leaves the window",
        "sliding_windows",
        within(f"{_KV}._release_behind_window", _OPTIMISTIC_COUNT),
    ),
    bug(
        "rejected drafts stay counted as computed",
        "rejections_of_every_length",
        changes(f"{_REQUEST}.on_processed", _keep_rejected),
    ),
    bug(
        "a prefix hit includes the last known token",
        "full_prefix_hits",
        within(f"{_KV}.find_prefix", changes(f"{_REQUEST}.num_tokens", lambda original, self: original(self) + 1)),
    ),
    bug(
        "the adapter is left out of the hash",
        "adapters",
        changes("messages.requests:EngineRequest.kv_scope", lambda original, self: (self.cache_salt or "").encode()),
    ),
    bug(
        "an adapter is not loaded into the slot that it takes",
        "adapters",
        changes(f"{_ADAPTERS}.acquire", lambda original, self, request, loads: original(self, request, [])),
    ),
    bug(
        "the slot of a running adapter is taken",
        "adapters",
        changes(f"{_ADAPTERS}._free_slot", _take_any_slot),
    ),
    bug(
        "the salt is left out of the hash",
        "tenants",
        changes("core.block_hash:root_hash", lambda original, scope: original(b"")),
    ),
    bug(
        "the hash of a block leaves out the tokens that its draft slots depend on",
        "drafts",
        changes(
            "core.block_hash:extend_chain",
            lambda original, chain, root, tokens, size, ahead: original(chain, root, tokens, size, 0),
        ),
    ),
    bug("a window keeps one slot too few", "sliding_windows", _in_every_window(lambda num_tokens: num_tokens + 1)),
    bug(
        "a load skips one block too many behind the window",
        "sliding_windows",
        within(f"{_KV}.admit", _in_every_window(lambda num_tokens: num_tokens + 4)),
    ),
    bug(
        "results of an earlier admission are applied",
        "tiny_pool",
        changes(f"{_SCHEDULER}.update_from_output", _apply_to_any_admission),
    ),
    bug(
        "a preempted request's blocks are free while steps are in flight",
        "loads_behind_steps",
        within(f"{_SCHEDULER}._rewind", _NO_FENCE),
    ),
    bug(
        "a finished request's blocks are free while steps are in flight",
        "abort_storm",
        within(f"{_SCHEDULER}._free", _NO_FENCE),
    ),
    bug(
        "a fence ends one step early",
        "abort_storm",
        changes("core.block_pool:BlockPool.on_step_processed", lambda original, self, step: original(self, step + 1)),
    ),
    bug(
        "blocks that are still read are freed",
        "held_blocks",
        changes(
            f"{_REMOTE}.finish",
            lambda original, self, *args: self._connector.request_finished(*args).kv_transfer_params,
        ),
    ),
    bug(
        "blocks that are no longer read stay pinned",
        "held_blocks",
        within(f"{_REMOTE}._on_released", skips(f"{_KV}.unpin")),
    ),
    bug(
        "pinned blocks become available",
        "held_blocks",
        changes("core.block_pool:BlockPool._make_available", _make_pinned_available),
    ),
    bug(
        "a deadline frees the blocks of a running load",
        "overdue_loads",
        changes(f"{_REMOTE}.detach", _free_running_loads),
    ),
    bug("a load has no deadline", "stuck_transfers", returns(f"{_REMOTE}.give_up_overdue", ())),
    bug(
        "requests wait for blocks that another one only loads", "shared_store", changes(f"{_KV}.admit", _announce_loads)
    ),
    bug(
        "the directory is queried forever",
        "slow_directory",
        sets(f"{_REMOTE}.match", "_timeout", lambda self: float("inf")),
    ),
    bug(
        "blocks that a load did not fill are published", "failing_loads", returns(f"{_REMOTE}._bad_blocks", set[Any]())
    ),
    bug(
        "a request continues after a failed synchronous load",
        "failing_loads",
        changes(f"{_REMOTE}._on_ended", lambda original, self, event: (original(self, event), None)[1]),
    ),
    bug(
        "the end of a load reaches a request that is gone",
        "abort_while_loading",
        changes(f"{_REMOTE}._on_ended", _end_detached),
    ),
    bug("a rewound request keeps its row", "failing_loads", changes(f"{_SCHEDULER}._on_lost_loads", _keep_rewound_row)),
    bug("a finished request keeps its row", "row_reuse", changes(f"{_SCHEDULER}._finish", _keep_finished_row)),
    bug(
        "loads alternate with a request that needs their blocks",
        "offload_hungry",
        # Either of two rules ends it.
        (*skips(f"{_REMOTE}.on_starved"), *changes(f"{_REMOTE}.match", _forget_load)),
    ),
    bug("a load never unpins what it has read", "offload", skips(f"{_MANAGER}.complete_load")),
    bug(
        "a block of tokens gets the chunk of a state",
        "offload_recurrent",
        changes(f"{_MANAGER}._room", lambda original, self, key: self._rooms[-1]),
    ),
    bug("a tier returns a key's bytes without comparing the digest", "offload_wrong_bytes", _NO_DIGESTS),
    bug(
        "blocks are copied out after the forward pass that reuses them",
        "offload_hungry",
        changes(f"{_TIER_WORKER}.begin_step", _store_later),
        changes(f"{_TIER_WORKER}.start_load_kv", _store_now),
    ),
    bug(
        "a tier drops a load's pins when it begins, and the digest is not checked",
        "offload_small",
        changes(f"{_MANAGER}.prepare_load", _load_without_pins),
        skips(f"{_MANAGER}.complete_load"),
        _NO_DIGESTS,
    ),
    bug(
        "every rank loads the first heads from the tiers, and the digest is not checked",
        "offload",
        changes(f"{_LAYER_PART}.pieces", lambda original, self, chunk: original(_as_first_rank(self), chunk)),
        _NO_DIGESTS,
    ),
    bug(
        "ranks overwrite each other's parts in the tiers, and the digest is not checked",
        "offload",
        changes(f"{_LAYER_PART}.in_chunk", lambda original, self, chunk: original(_as_first_rank(self), chunk)),
        _NO_DIGESTS,
    ),
    bug(
        "tiers ignore which life of the engine a report belongs to",
        "reports_of_an_old_life",
        changes(
            f"{_TIERS}.__init__",
            lambda original, self, *args, **kwargs: original(self, *args, **{**kwargs, "epoch": "epoch"}),
        ),
    ),
    bug(
        "the first of several connectors loads what another has",
        "several_connectors",
        changes("kv_transfer.multi:MultiScheduler.update_state_after_alloc", _load_first_child),
    ),
    bug(
        "reports of several connectors reach the wrong one",
        "several_connectors",
        changes("kv_transfer.multi:MultiWorker.get_finished", _report_as_tiers),
    ),
    bug("a token is reported twice", "migrated_streams", changes(f"{_STREAM}.feed", _report_twice)),
    bug("a reported token is lost", "migrated_streams", changes(f"{_STREAM}.feed", _lose_report)),
    bug("half an event is kept when a stream goes on elsewhere", "migrated_streams", skips(f"{_STREAM}.restart")),
    bug(
        "penalties take given output for a part of the prompt",
        "migrated_streams",
        changes("core.step_plan:_row_request", _count_as_prompt),
    ),
    bug(
        "a grammar is restarted within an output",
        "migrated_streams",
        changes("core.structured_output:_compile", lambda original, backend, spec, _: original(backend, spec, ())),
    ),
    bug(
        "max_tokens does not count given output",
        "migrated_streams",
        changes(f"{_REQUEST}.__init__", _count_new_tokens_only),
    ),
)
