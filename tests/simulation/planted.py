"""Bugs to plant: each is a piece of the real source exchanged for a wrong one, as a change by hand would do it."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` in the source of `target`, "module:Class.method"."""

    target: str
    old: str
    new: str

    def function(self) -> FunctionType:
        module, _, path = self.target.partition(":")
        found = importlib.import_module(f"penstock.{module}")
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        return found.fget if isinstance(found, property) else found

    def code(self) -> CodeType:
        """The function's code with the bug in it; it takes the place of the real one wherever that was imported."""
        function = self.function()
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.target} no longer has {self.old!r}"
        tree = ast.parse(source.replace(self.old, self.new))
        assert isinstance(tree.body[0], ast.FunctionDef)
        tree.body[0].decorator_list.clear()
        scope: dict[str, FunctionType] = {}
        exec(compile(tree, f"<planted in {self.target}>", "exec"), function.__globals__, scope)
        return scope[function.__name__].__code__


@dataclass(frozen=True)
class Bug:
    """`scenario` is one that catches it."""

    name: str
    scenario: str
    edits: tuple[Edit, ...]


def _bug(name: str, scenario: str, *edit: str) -> Bug:
    """`edit` is target, old, new, once or several times."""
    edits = tuple(Edit(*edit[start : start + 3]) for start in range(0, len(edit), 3))
    return Bug(name, scenario, edits)


BUGS = (
    _bug(
        "the metadata is cleared before the drafter runs",
        "shared_store_with_drafts",
        "kv_transfer.kv_step:KVStep.run_sampling",
        "result = sample_and_draft()",
        "self._active.end_step(); result = sample_and_draft()",
    ),
    _bug(
        "only the last rank's output is kept",
        "one_of_n_shards",
        "kv_transfer.aggregate:aggregate",
        "for output in outputs:",
        "for output in list(outputs)[-1:]:",
    ),
    _bug(
        "synchronous loads begin behind the forward pass",
        "synchronous_loads",
        "kv_transfer.kv_step:KVStep._begin",
        "if self._has_sync_loads:",
        "if False:",
        "kv_transfer.kv_step:KVStep._on_forward_launched",
        "if not self._has_sync_loads:",
        "if True:",
    ),
    _bug(
        "completions are counted",
        "repeated_completions",
        "kv_transfer.ledger:TransferLedger.apply",
        "if report.shard in entry.reports:",
        "if report.shard in entry.reports:\n"
        "        entry.reports[min(entry.expected - entry.reports.keys())] = report\n"
        "    if False:",
    ),
    _bug(
        "a transfer ends with the first rank's report",
        "one_of_n_shards",
        "kv_transfer.ledger:TransferLedger.apply",
        "if len(entry.reports) < len(entry.expected):",
        "if not entry.reports:",
    ),
    _bug(
        "an unsettled failure counts as an end",
        "unsettled_failures",
        "kv_transfer.transports.base:TransferState.is_settled",
        "return self in (TransferState.DONE, TransferState.FAILED_SETTLED)",
        "return self is not TransferState.PENDING",
    ),
    _bug(
        "the optimistic count decides what is published",
        "plain",
        "core.kv_cache_manager:KVCacheManager.publish",
        "request.num_processed_tokens",
        "request.num_computed_tokens",
    ),
    _bug(
        "the optimistic count decides what leaves the window",
        "sliding_windows",
        "core.kv_cache_manager:KVCacheManager._release_behind_window",
        "request.num_processed_tokens",
        "request.num_computed_tokens",
    ),
    _bug(
        "rejected drafts stay counted as computed",
        "rejections_of_every_length",
        "core.request:Request.on_processed",
        "self.num_computed_tokens -= 1 + num_drafts - num_sampled",
        "pass",
    ),
    _bug(
        "the last known token is found in the cache",
        "full_prefix_hits",
        "core.kv_cache_manager:KVCacheManager.find_prefix",
        "(request.num_tokens - 1) // self.block_size",
        "request.num_tokens // self.block_size",
    ),
    _bug(
        "the salt is left out of the hash",
        "tenants",
        "core.block_hash:root_hash",
        '(cache_salt or "")',
        '""',
    ),
    _bug(
        "a window keeps one slot too few",
        "sliding_windows",
        "messages.kv_cache_spec:KVCacheSpec.first_needed_block",
        "num_computed_tokens - self.sliding_window + 1",
        "num_computed_tokens - self.sliding_window + 2",
    ),
    _bug(
        "a load skips one block too many behind the window",
        "sliding_windows",
        "core.kv_cache_manager:KVCacheManager.admit",
        "group.first_needed_block(num_present)",
        "group.first_needed_block(num_present + self.block_size)",
    ),
    _bug(
        "results of an earlier admission are taken",
        "tiny_pool",
        "core.scheduler:Scheduler.update_from_output",
        "request.admission > last_admission",
        "False",
    ),
    _bug(
        "a preempted request's blocks are free while steps are in flight",
        "preemption_during_loads",
        "core.scheduler:Scheduler._rewind",
        "self._kv.release(request, last_step)",
        "self._kv.release(request, 0)",
    ),
    _bug(
        "a finished request's blocks are free while steps are in flight",
        "abort_storm",
        "core.scheduler:Scheduler._free",
        "self._kv.release(request, self._step)",
        "self._kv.release(request, 0)",
    ),
    _bug(
        "a fence falls one step early",
        "preemption_during_loads",
        "core.scheduler:Scheduler.update_from_output",
        "self._kv.pool.on_step_processed(plan.step)",
        "self._kv.pool.on_step_processed(plan.step + 1)",
    ),
    _bug(
        "blocks that are still read are freed",
        "held_blocks",
        "core.remote_kv:RemoteKV.finish",
        "if result.action is FinishAction.HOLD and block_ids:",
        "if False:",
    ),
    _bug(
        "blocks that are read no more stay held",
        "held_blocks",
        "core.remote_kv:RemoteKV.on_released",
        "self._kv.drop_hold(event.transfer_id)",
        "pass",
    ),
    _bug(
        "the hold of a finished request has the name of its id",
        "id_reuse",
        "core.request:Request.hold_id",
        'f"{self.request_id}/hold-{self.arrival_index}"',
        "self.request_id",
    ),
    _bug(
        "blocks with a holder become available",
        "held_blocks",
        "core.block_pool:BlockPool._make_available",
        "if block.num_holders:",
        "if False:",
    ),
    _bug(
        "a deadline frees the blocks under a load",
        "overdue_loads",
        "core.remote_kv:RemoteKV.detach",
        "for load in self._loads_of.pop(request, {}).values():",
        "mine = self._loads_of.pop(request, {})\n"
        "    for name in [n for n, load in mine.items() if load.is_async]:\n"
        "        del self._loads[name], mine[name]\n"
        "        self._num_waiting -= 1\n"
        "        self._kv.drop_hold(name)\n"
        "    for load in mine.values():",
    ),
    _bug(
        "a load has no deadline",
        "stuck_transfers",
        "core.remote_kv:RemoteKV.give_up_overdue",
        "load.deadline <= now",
        "False",
    ),
    _bug(
        "the directory is asked for ever",
        "slow_directory",
        "core.remote_kv:RemoteKV.match",
        "if self._clock.now() - since < self._timeout:",
        "if True:",
    ),
    _bug(
        "a load is tried for ever",
        "wrong_bytes",
        "core.remote_kv:RemoteKV.match",
        "request.num_failed_loads >= MAX_FAILED_LOADS",
        "False",
    ),
    _bug(
        "what a load did not bring is published",
        "failing_loads",
        "core.remote_kv:RemoteKV.on_ended",
        "bad = self._bad_blocks(event.bad_ranges)",
        "bad = set()",
    ),
    _bug(
        "a request goes on behind a failed synchronous load",
        "failing_loads",
        "core.remote_kv:RemoteKV.on_ended",
        "return request if event.bad_ranges else None",
        "return None",
    ),
    _bug(
        "the end of a load reaches a request that has gone",
        "abort_while_loading",
        "core.remote_kv:RemoteKV.on_ended",
        "if load.is_detached:",
        "if False:",
    ),
    _bug(
        "a rewound request keeps its row",
        "failing_loads",
        "core.scheduler:Scheduler._on_lost_kv",
        "self._rewound_request_ids.add(request.request_id)",
        "pass",
    ),
    _bug(
        "a finished request keeps its row",
        "row_reuse",
        "core.scheduler:Scheduler._finish",
        "self._finished_request_ids.add(request.request_id)",
        "pass",
    ),
    _bug(
        "a load writes into the block before it, which others read",
        "shared_store",
        "simulation.store:StoreScheduler.update_state_after_alloc",
        "range(num_computed_tokens // size, end // size)",
        "range(max(0, num_computed_tokens // size - 1), end // size)",
    ),
    _bug(
        "the engine's life is left out of transfers' names",
        "reports_of_an_old_life",
        "simulation.store:StoreScheduler._on_wire",
        'f"{self._life}:{transfer_id}"',
        'f"{self._life[:-2]}:{transfer_id}"',
        "simulation.store:StoreScheduler.update_connector_output",
        "life != self._life",
        "life != self._life[:-2]",
    ),
    _bug(
        "the drafter's layers stay at home",
        "shared_store_with_drafts",
        "simulation.store_worker:StoreWorker._parts",
        "for head in self._view.heads)",
        'for head in self._view.heads if not name.startswith("draft"))',
        "simulation.store:BlockStore.parts",
        "return self._parts[group]",
        'return frozenset(part for part in self._parts[group] if not part[0].startswith("draft"))',
        "simulation.store:BlockStore.end_save",
        "self._parts[entry.key[0]]",
        "self.parts(entry.key[0])",
        "simulation.store:BlockStore.check_digests",
        "sorted(self._parts[group])",
        "sorted(self.parts(group))",
    ),
    _bug(
        "what has landed is not compared with its digest",
        "wrong_bytes",
        "simulation.store_worker:StoreWorker._is_right",
        "return all(",
        "return True or all(",
    ),
    _bug(
        "a block is copied for its save when the step has written",
        "preemption_during_saves",
        "simulation.store_worker:StoreWorker.begin_step",
        "for job in metadata.saves:",
        "for job in ():",
        "simulation.store_worker:StoreWorker.wait_for_save",
        "for job in self._metadata.saves:",
        "kept = self._metadata\n"
        "    for job in kept.saves:\n"
        "        save = _Open(job, is_load=False, started=self._clock.now())\n"
        "        if job.is_staged:\n"
        "            self._stage(save)\n"
        "        save.digests = [digest(self._part(c, part)) for c in job.copies for part in self._parts(c)]\n"
        "        self._staged[job.transfer_id] = save\n"
        "    for job in self._metadata.saves:",
    ),
    _bug(
        "a load never lets go of what it has read",
        "shared_store",
        "simulation.store:StoreScheduler._end_load",
        "self._store.unpin(entry, self._life)",
        "pass",
    ),
    _bug(
        "a block with a part missing is taken over",
        "one_of_n_shards",
        "simulation.store:BlockStore.end_save",
        "if digests.keys() == self._parts[entry.key[0]]:",
        "if digests:",
    ),
    _bug(
        "a tier takes bytes for what their key says without looking at the digest",
        "offload_wrong_bytes",
        "kv_transfer.offload.worker:OffloadingWorker._load",
        "block.digest is not None and block.digest != digest(*parts)",
        "False",
    ),
    _bug(
        "blocks are copied out behind the forward pass that reuses them",
        "offload_small",
        "kv_transfer.offload.worker:OffloadingWorker.begin_step",
        "self._jobs += map(self._store, metadata.stores)",
        "self._stores = metadata.stores",
        "kv_transfer.offload.worker:OffloadingWorker.start_load_kv",
        "self._jobs += map(self._load, self._new_loads)",
        "self._jobs += [*map(self._store, self._stores), *map(self._load, self._new_loads)]",
    ),
    _bug(
        "a tier drops a load's pins when it begins, and the digest is not checked",
        "offload_small",
        "kv_transfer.offload.scheduler:OffloadingScheduler.update_state_after_alloc",
        "chunks = self._manager.prepare_load(keys)",
        "chunks = self._manager.prepare_load(keys); self._manager.complete_load(keys)",
        "kv_transfer.offload.scheduler:OffloadingScheduler._on_loaded",
        "self._manager.complete_load(tuple(load.index_of))",
        "pass",
        "kv_transfer.offload.worker:OffloadingWorker._load",
        "block.digest is not None and block.digest != digest(*parts)",
        "False",
    ),
    _bug(
        "tiers forget which life of the engine a report is about",
        "offload_crash",
        "kv_transfer.offload.scheduler:OffloadingScheduler._take_stores",
        'f"{self._epoch}/store/{self._num_stores}"',
        'f"store/{self._num_stores}"',
    ),
    _bug(
        "layer hooks are not called",
        "layerwise_loads",
        "kv_transfer.kv_step:KVStep.hooks",
        "self._active.layer_hooks or self._no_hooks",
        "self._no_hooks",
    ),
    _bug(
        "of several connectors the first loads what another has",
        "several_connectors",
        "kv_transfer.multi:MultiScheduler.update_state_after_alloc",
        "self._children[self._chosen.pop(request.request_id)]",
        "next(iter(self._children.values()))",
    ),
    _bug(
        "of several connectors each hears the others' reports",
        "several_connectors",
        "kv_transfer.multi:MultiWorker.get_finished",
        'f"{name}{_SEPARATOR}{report.transfer_id}"',
        'f"store{_SEPARATOR}{report.transfer_id}"',
    ),
    _bug(
        "loads take turns with a request that needs their blocks",
        "offload_hungry",
        "core.remote_kv:RemoteKV.on_starved",
        "if self._loads:",
        "if False:",
    ),
    _bug(
        "saves are finalised before the drafter runs",
        "drafts",
        "kv_transfer.kv_step:KVStep.run_sampling",
        "sample_and_draft()\n        self._advance(KVStepState.FINALIZED)\n        self._active.wait_for_save()",
        "None\n        self._active.wait_for_save()\n        result = sample_and_draft()",
    ),
    _bug(
        "the runner counts for itself what the scheduler has counted",
        "plain",
        "runner.host_batch:read_plan",
        "np.fromiter(plan.num_computed_tokens, np.int64, count)",
        "np.fromiter(plan.num_computed_tokens, np.int64, count) + query_lens",
    ),
    _bug(
        "a rank's handshake is dropped",
        "one_of_n_shards",
        "executor.executor:Executor.initialize",
        "each.shard: each.handshake for",
        "each.shard: each.handshake if each.shard == (0, 0) else None for",
    ),
    _bug(
        "a connector without pipeline ranks takes the handshakes of several stages",
        "stages_refused",
        "kv_transfer.null:set_handshakes_of_one_stage",
        "if any(pp_rank > 0 for pp_rank, _ in payloads):",
        "if False:",
    ),
    _bug(
        "a shard's first report counts, whatever it says later",
        "one_of_n_shards",
        "kv_transfer.ledger:TransferLedger.apply",
        "if report.status is TransferStatus.FAILED and",
        "if False and",
    ),
    _bug(
        "the hash of a block leaves out the tokens that its draft slots depend on",
        "drafts",
        "core.block_hash:extend_chain",
        "length = block_size + num_tokens_ahead",
        "length = block_size",
    ),
)
