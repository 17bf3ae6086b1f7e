"""A part that forwards to another part of a connector, and the two that enforce `kv_role`."""

from __future__ import annotations

from typing import Any

from penstock.kv_transfer.connector import NO_MATCH, Match, RequestView
from penstock.messages.scheduler_output import BlockTable


class Forwarding:
    """Forwards all other attributes to `inner`, such as the methods that it does not change."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SavesOnly(Forwarding):
    """`kv_producer`: a scheduler's part that never loads."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return NO_MATCH


class LoadsOnly(Forwarding):
    """`kv_consumer`: a scheduler's part that never receives blocks to save."""

    def on_blocks_complete(self, request: RequestView, block_ids: BlockTable, first: int, end: int) -> None: ...
