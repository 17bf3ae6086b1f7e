"""Invariants of an engine after every step, computed only from memory, transfers and prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from penstock.core.request import RequestStatus
from penstock.messages.kv_cache_spec import NULL_BLOCK
from penstock.messages.requests import EngineRequest
from penstock.simulation.backing import Touch
from penstock.simulation.oracle import Answer
from penstock.simulation.sim_engine import SimEngine
from penstock.simulation.trace import ViolationError, block_name


class Contents:
    """The expected content of published blocks by hash, derived from the prompts, with hashes recomputed here."""

    def __init__(self, block_size: int, num_tokens_ahead: int) -> None:
        self._block_size = block_size
        self._num_tokens_ahead = num_tokens_ahead
        self._known: dict[bytes, tuple[Answer, int]] = {}

    def add(self, answer: Answer, request: EngineRequest) -> None:
        """Adds all blocks that a request may fill."""
        tokens = answer.token_ids[: answer.num_prompt_tokens] + answer.output(request.max_tokens)
        scope = b"" if request.adapter is None else b"\xff" + request.adapter.digest
        salt = (request.cache_salt or "").encode()
        parent = hashlib.sha256(b"penstock block chain\0" + scope + salt).digest()
        size, ahead = self._block_size, self._num_tokens_ahead
        for index in range((len(tokens) - ahead) // size):
            part = tokens[index * size : (index + 1) * size + ahead]
            parent = hashlib.sha256(parent + array("q", part).tobytes()).digest()
            self._known.setdefault(parent, (answer, index))

    def find(self, group: int, block_hash: bytes, layer_name: str, head: int) -> bytes | None:
        """Returns the expected content of one head of one layer of that block; None if no request has the hash."""
        if block_hash not in self._known:
            return None
        answer, index = self._known[block_hash]
        end = (index + 1) * self._block_size
        is_recurrent = any(layer.name == layer_name and layer.is_recurrent for layer in answer.layers)
        return answer.slots(layer_name, head, end - (1 if is_recurrent else self._block_size), end)


def check_engine(engine: SimEngine, contents: Contents, touching: Iterable[Touch], *, everything: bool) -> None:
    """Raises ViolationError. With `everything`, checks all published blocks instead of only the new ones."""
    check_transfers(engine, touching)
    check_counts(engine)
    check_published(engine, contents, engine.pool.published() if everything else engine.pool.newly_published)
    engine.pool.newly_published.clear()


def check_transfers(engine: SimEngine, touching: Iterable[Touch]) -> None:
    """Checks that no transfer reads a block that can be reallocated, or writes one that another request can read."""
    for touch in touching:
        name = block_name(engine.name, touch.block_id)
        if touch.block_id == NULL_BLOCK:
            raise ViolationError(f"a transfer of {engine.name} touches the null block", name)
        if engine.pool.is_available(touch.block_id):
            raise ViolationError(f"a transfer of {engine.name} touches {name}, which is free", name)
        if touch.writes and engine.pool.is_published(touch.block_id):
            raise ViolationError(f"a transfer of {engine.name} writes {name}, which other requests may read", name)


def check_counts(engine: SimEngine) -> None:
    """Checks exact <= upper bound <= allocated slots for every running request.

    The last stage has the exact count; earlier ones may not have received it yet.
    """
    for request in engine.running_requests():
        name = request.request_id
        if request.status is not RequestStatus.RUNNING:
            raise ViolationError(f"{name} is in the running queue with status {request.status}", name)
        slots = len(engine.kv.block_ids(request)[0]) * engine.kv.block_size
        if request.num_computed_tokens > slots:
            raise ViolationError(f"{name} has {request.num_computed_tokens} computed tokens in {slots} slots", name)
        ranks = [rank for rank in engine.devices.ranks.values() if rank.is_last_stage]
        rows = [row for rank in ranks for row in rank.rows.values() if row.request_id == name]
        for row in rows if engine.devices.is_idle else ():
            exact, processed = row.num_computed, request.num_processed_tokens
            is_same = row.answer.num_prompt_tokens == request.num_prompt_tokens
            if is_same and not processed <= exact <= request.num_computed_tokens:
                counts = f"{processed} <= {exact} <= {request.num_computed_tokens}"
                raise ViolationError(f"{name} has inconsistent counts of computed tokens, not {counts}", name)


def check_published(engine: SimEngine, contents: Contents, blocks: Iterable[tuple[int, tuple[int, bytes]]]) -> None:
    """Checks that published blocks have, in every layer of every rank, the content that the prompt determines."""
    for block_id, (group, block_hash) in blocks:
        name = block_name(engine.name, block_id)
        for rank in engine.devices.ranks.values():
            for layer_name in rank.memory.layer_names(group):
                for head in rank.heads:
                    right = contents.find(group, block_hash, layer_name, head)
                    if right is None:
                        raise ViolationError(f"{name} has the hash of no known prompt", name)
                    if rank.memory.head_bytes(layer_name, block_id, head) != right:
                        raise ViolationError(f"{name} is published with wrong KV in {layer_name}", name)


def check_idle(engine: SimEngine) -> None:
    """Checks that nothing remains of any request (P3)."""
    pool = engine.pool
    if not pool.is_unused:
        missing = [block_name(engine.name, i) for i in range(1, pool.num_usable + 1) if not pool.is_available(i)]
        raise ViolationError(f"{engine.name} is idle but has not freed {len(missing)} blocks", *missing)
    for rank in engine.devices.ranks.values():
        if rank.rows:
            names = [row.request_id for row in rank.rows.values()]
            raise ViolationError(f"{engine.name} is idle but rank {rank.shard} still has rows", *names)
    if engine.num_holds:
        raise ViolationError(f"{engine.name} is idle but holds blocks of {engine.num_holds} ended requests")
    if engine.scheduler.has_transfers:
        raise ViolationError(f"{engine.name} is idle but its connector is not")
    engine.core.check_integrity()
