"""Bugs to plant in disaggregation: sessions, tickets, leases, reads, digests and the plan of transfers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.kv_transfer.p2p.consumer import LoadState
from penstock.kv_transfer.p2p.messages import DoneAck
from penstock.kv_transfer.p2p.producer import HoldState
from penstock.kv_transfer.p2p.session import Send
from penstock.kv_transfer.p2p.ticket import digest_prompt
from penstock.messages.kv_transfer import TransferId
from penstock.utils.errors import PeerError
from tests.simulation.patches import Patches, bug, changes, returns, sets, skips, within
from tests.simulation.planted import end_with_first_report

Original = Callable[..., Any]

_PRODUCER = "kv_transfer.p2p.producer:Producer"
_CONSUMER = "kv_transfer.p2p.consumer:Consumer"
_EXCHANGE = "kv_transfer.p2p.exchange:Exchange"
_WORKER = "kv_transfer.p2p.worker:P2PWorker"
_MOVER = "kv_transfer.p2p.moves:Mover"
_JOBS = "kv_transfer.p2p.jobs:WorkerJobs"

_NEVER = float("inf")
_NEVER_IDLE = changes(
    f"{_EXCHANGE}.has_pending_work", lambda original, self: bool(self._producer.num_held) or original(self)
)


# ---- The engine that has prefilled ----


def _confirm(original: Original, self: Any, key: Any, now: float) -> None:
    original(self, key, now)
    self._actions[-1] = Send(key[0], DoneAck(key[1], True))


def _offer_again(original: Original, self: Any, fetch: Any) -> Any:
    hold = original(self, fetch)
    if hold is not None and hold.state is HoldState.GRANTED:
        hold.state = HoldState.HELD
    return hold


def _accept_any_prompt(original: Original, self: Any, reader: Any, now: float) -> None:
    try:
        hold = self._find(reader.fetch)
        offers = [] if hold is None or hold.offer is None else [hold.offer]
    except PeerError:
        offers = []
    for offer in offers:
        fetch = msgspec.structs.replace(reader.fetch, prompt_digest=offer.prompt_digest)
        reader = dataclasses.replace(reader, fetch=fetch)
    original(self, reader, now)


def _compare_whole(original: Original, self: Any, request: Any) -> None:
    exchange, want = self._exchange, self._exchange.want
    digest = digest_prompt(request.prompt_token_ids, request.kv_scope)
    exchange.want = lambda name, asked, _: want(name, asked, digest)
    try:
        original(self, request)
    finally:
        del exchange.want


def _match_whole(original: Original, self: Any, request: Any, num_computed_tokens: int) -> Any:
    match = original(self, request, num_computed_tokens)
    if not match.num_tokens:
        return match
    size = self._block_size
    return dataclasses.replace(match, num_tokens=(request.num_prompt_tokens - 1) // size * size - num_computed_tokens)


def _endless(state: HoldState) -> Patches:
    """Holds in this state have no deadline."""

    def poll(original: Original, self: Any, now: float) -> None:
        for hold in self._state.holds.values():
            if hold.state is state:
                hold.deadline = _NEVER
        original(self, now)

    return changes(f"{_PRODUCER}.poll", poll)


def _park_forever(original: Original, self: Any, now: float) -> None:
    for parked in self._state.parked.values():
        parked.deadline = _NEVER
    original(self, now)


# ---- The engine that decodes ----


def _end_unconfirmed(original: Original, self: Any, load: Any, *args: Any) -> None:
    original(self, load, *args)
    if load.state is LoadState.CONFIRMING:
        self._on_confirmed(load, is_valid=True)


def _end_while_reading(original: Original, self: Any, load: Any, reason: str) -> None:
    if load.state is LoadState.READING:
        self._end(load, reason)
    else:
        original(self, load, reason)


def _end_failed(original: Original, self: Any, read: Any) -> None:
    original(self, read)
    read.is_checked |= read.has_failed


def _cut_all(original: Original, self: Any) -> None:
    for peer in self._unwanted_peers():
        for each in (each for read in self.reads for each in read.transfers if each.peer == peer):
            each.is_cut = True
        self._dialler.hang_up(peer)


def _compare_in_vain(original: Original, self: Any, read: Any) -> Iterator[int]:
    yield from original(self, read)
    read.bad_ranges.clear()


def _keep_connections(original: Original, self: Any, shards: Any) -> None:
    for shard in shards:
        self._dialler.forget(shard.descriptor)


def _unexpected(original: Original, *args: Any) -> Any:
    try:
        return original(*args)
    except PeerError as error:
        raise AssertionError(str(error)) from error


def _without_drafter(original: Original, local: Any, *args: Any) -> Any:
    layers = tuple(each for each in local.layers if not each.name.startswith("draft"))
    return original(msgspec.structs.replace(local, layers=layers), *args)


PD_BUGS = (
    bug(
        "a read is confirmed after its lease has ended",
        "pd_lease_ends_while_reading",
        changes(f"{_PRODUCER}._on_done", _confirm),
    ),
    bug(
        "the reader does not wait for the confirmation",
        "pd_lease_ends_while_reading",
        changes(f"{_CONSUMER}.on_read", _end_unconfirmed),
    ),
    bug(
        "a denied confirmation counts as a confirmation",
        "pd_stopped",
        changes(
            f"{_CONSUMER}._on_confirmed", lambda original, self, load, *, is_valid: original(self, load, is_valid=True)
        ),
    ),
    bug(
        "the whole prompt is compared with a shared beginning",
        "pd_shared_prefix",
        changes("kv_transfer.p2p.scheduler:P2PScheduler.on_new_request", _compare_whole),
    ),
    bug(
        "more than the shared beginning is requested",
        "pd_shared_prefix",
        changes("kv_transfer.p2p.scheduler:P2PScheduler.get_num_new_matched_tokens", _match_whole),
    ),
    bug("a ticket can be used twice", "pd_tickets", changes(f"{_PRODUCER}._find", _offer_again)),
    bug("the prompts are not compared", "pd_tickets", changes(f"{_PRODUCER}._answer", _accept_any_prompt)),
    bug("a hold whose reader never comes does not expire", "pd_tickets", _endless(HoldState.HELD)),
    bug("a lease never ends", "pd_garbage", _endless(HoldState.GRANTED)),
    bug(
        "the blocks of a disconnected reader are never released",
        "pd_garbage",
        skips(f"{_PRODUCER}.on_lost"),
        _endless(HoldState.GRANTED),
    ),
    bug("a fetch waits for its request forever", "pd_garbage", changes(f"{_PRODUCER}.poll", _park_forever)),
    bug(
        "a reader that cancels closes its rendezvous to waiting readers",
        "pd_parked",
        within(f"{_PRODUCER}._close", returns(f"{_PRODUCER}._waiting_at", [])),
    ),
    bug(
        "a prefill that is not needed is not released",
        "pd_prefix_hits",
        within(f"{_PRODUCER}._answer", skips(f"{_PRODUCER}._release")),
    ),
    bug(
        "requests with the same id have the same name towards other engines",
        "pd_prefix_hits",
        changes("core.request:Request.hold_id", lambda original, self: TransferId(self.request_id, 0)),
    ),
    bug(
        "a load writes into the block before it, which others read",
        "pd_prefix_hits",
        changes(
            "kv_transfer.p2p.scheduler:P2PScheduler.update_state_after_alloc",
            lambda original, self, request, name, ids, first, end: original(
                self, request, name, ids, max(0, first - self._block_size), end
            ),
        ),
    ),
    bug("a cancelled read ends while bytes still move", "pd_late_bytes", changes(f"{_WORKER}._watch", _end_failed)),
    bug(
        "a load ends with its connection while bytes still move",
        "pd_connections",
        changes(f"{_CONSUMER}._stop", _end_while_reading),
    ),
    bug(
        "a read is not cancelled in the step that begins it",
        "pd_late_bytes",
        sets(f"{_WORKER}._make_read", "_metadata", lambda self: msgspec.structs.replace(self._metadata, cancelled=())),
    ),
    bug(
        "the abort of a load ends the other loads from the same engine",
        "pd_aborts",
        changes(f"{_MOVER}.cut_unwanted", _cut_all),
    ),
    bug(
        "a load that nobody waits for is not cancelled",
        "pd_stopped",
        within(f"{_CONSUMER}.cancel", skips(f"{_CONSUMER}._fail")),
    ),
    bug("a wrong digest has no effect", "pd_late_bytes", changes(f"{_WORKER}._compare", _compare_in_vain)),
    bug(
        "KV without digests is accepted",
        "pd_garbage",
        sets(
            f"{_EXCHANGE}._read", "_settings", lambda self: dataclasses.replace(self._settings, requires_digests=False)
        ),
    ),
    bug(
        "the bad ranges that ranks report are ignored",
        "pd_late_bytes",
        within(f"{_JOBS}.apply", returns("kv_transfer.ledger:bad_ranges", ())),
    ),
    bug("blocks that the sender has released count as read", "pd_block_sizes", returns(f"{_JOBS}._find_missing", ())),
    bug(
        "the engine's epoch is left out of the names of its workers' jobs",
        "pd_restart_same_address",
        changes(
            f"{_JOBS}._on_wire", lambda original, self, name: msgspec.structs.replace(original(self, name), epoch="")
        ),
    ),
    bug(
        "a job ends with the first rank's report",
        "pd_late_reports",
        changes("kv_transfer.ledger:TransferLedger.apply", end_with_first_report),
    ),
    bug(
        "an engine that runs another model is accepted",
        "pd_garbage",
        returns("kv_transfer.p2p.session:find_differences", list[str]()),
    ),
    bug("the ranks that a peer declares are not checked", "pd_garbage", skips("kv_transfer.p2p.session:check_shards")),
    bug(
        "a peer may declare an order without digests",
        "pd_garbage",
        skips("kv_transfer.topology.pieces:check_order"),
        changes("kv_transfer.p2p.worker:_advance", _unexpected),
    ),
    bug("engines that are gone are kept", "pd_crash", skips(f"{_JOBS}._forget")),
    bug("connections to engines that are gone are kept", "pd_crash", changes(f"{_MOVER}.forget", _keep_connections)),
    bug("digests are ordered for a peer that is gone", "pd_connections", changes(f"{_JOBS}.digest", _unexpected)),
    bug(
        "holds take more than their share of the pool",
        "pd_tiny_pools",
        sets(f"{_PRODUCER}.offer", "_rules", lambda self: dataclasses.replace(self._rules, max_held_blocks=1 << 30)),
    ),
    bug(
        "digests cover the larger of two block sizes",
        "pd_block_sizes",
        changes("kv_transfer.topology.pieces:digest_unit", lambda original, one, other: max(one, other)),
    ),
    bug(
        "the first head of a rank is sent instead of the requested one",
        "pd_splits",
        changes(
            "kv_transfer.topology.planner:SliceShape.token_offsets",
            lambda original, self, *args: original(dataclasses.replace(self, first_head=0), *args),
        ),
    ),
    bug(
        "the drafter's layers are not transferred",
        "pd_drafts",
        changes("kv_transfer.topology.planner:sources", _without_drafter),
    ),
    bug("an engine with leases is never idle", "pd_serial", _NEVER_IDLE),
    bug("an engine with leases and tiers is never idle", "several_connectors", _NEVER_IDLE),
)
