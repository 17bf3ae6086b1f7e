"""Records which blocks enter the prefix cache and which leave it, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.core.block_pool import BlockKey
from penstock.core.request import Request
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheSpec
from penstock.messages.kv_events import BlockRemoved, BlockStored, KVEvent
from penstock.utils.held_blocks import adapter_salt


class KVEventRecorder:
    """The KV cache manager reports every change of the prefix cache to it; `take` empties it once per step.

    This one records nothing, for an engine without subscribers.
    """

    def on_stored(self, request: Request, group: int, indices: Sequence[int]) -> None:
        """Records blocks of the request, by ascending index, whose content no other block of the group had."""

    def on_removed(self, key: BlockKey) -> None:
        """Records that the last block with this content is being overwritten."""

    def take(self) -> tuple[KVEvent, ...]:
        """Returns the events since the last call, oldest first."""
        return ()


class StepKVEventRecorder(KVEventRecorder):
    """Keeps the events of a step: one per run of stored blocks, one per group for consecutive removals."""

    def __init__(self, config: KVCacheConfig) -> None:
        self._block_size = config.block_size
        self._num_tokens_ahead = config.num_tokens_ahead
        self._specs = [group.spec for group in config.groups]
        self._events: list[KVEvent] = []
        self._removed: dict[int, list[bytes]] = {}

    def on_stored(self, request: Request, group: int, indices: Sequence[int]) -> None:
        self._flush_removed()
        self._events += [self._stored(request, group, *run) for run in _runs(indices)]

    def on_removed(self, key: BlockKey) -> None:
        group, block_hash = key
        self._removed.setdefault(group, []).append(block_hash)

    def take(self) -> tuple[KVEvent, ...]:
        self._flush_removed()
        events, self._events = tuple(self._events), []
        return events

    def _flush_removed(self) -> None:
        """Ends a run of removals, because a block that is stored next may be one of them."""
        for group, hashes in self._removed.items():
            self._events.append(BlockRemoved(block_hashes=tuple(hashes), group_idx=group))
        self._removed.clear()

    def _stored(self, request: Request, group: int, first: int, end: int) -> BlockStored:
        size, hashes = self._block_size, request.block_hashes
        window = self._specs[group].sliding_window
        return BlockStored(
            block_hashes=tuple(hashes[first:end]),
            parent_block_hash=hashes[first - 1] if first else None,
            token_ids=tuple(request.token_ids[first * size : end * size]),
            block_size=size,
            extra_keys=self._extra_keys(request, first, end),
            group_idx=group,
            lora_name=None if request.data.adapter is None else request.data.adapter.name,
            kv_cache_spec_kind=_kind(self._specs[group]),
            kv_cache_spec_sliding_window=window or None,
        )

    def _extra_keys(self, request: Request, first: int, end: int) -> tuple[tuple[str, ...] | None, ...] | None:
        """Returns the inputs of each block's hash besides its tokens, or None if no block has any."""
        adapter = request.data.adapter
        salt = adapter_salt(None if adapter is None else adapter.name, request.data.cache_salt)
        keys = [
            (*((salt,) if salt is not None and index == 0 else ()), *map(str, self._tokens_ahead(request, index)))
            for index in range(first, end)
        ]
        return tuple(key or None for key in keys) if any(keys) else None

    def _tokens_ahead(self, request: Request, index: int) -> list[int]:
        start = (index + 1) * self._block_size
        return request.token_ids[start : start + self._num_tokens_ahead]


def _kind(spec: KVCacheSpec) -> str:
    """Returns vLLM's name for a group's kind of cache."""
    if spec.is_recurrent:
        return "mamba"
    return "sliding_window" if spec.sliding_window else "full_attention"


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups ascending numbers into ranges [first, end) without gaps."""
    first = 0
    for place in range(1, len(indices) + 1):
        if place == len(indices) or indices[place] != indices[place - 1] + 1:
            yield indices[first], indices[place - 1] + 1
            first = place
