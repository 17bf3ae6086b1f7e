"""The work of one step: the scheduler's decision as plain data, the same for every worker.

Objects created in every step are `msgspec.Struct`s: a frozen dataclass takes ten times as long to create.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.messages.adapters import AdapterLoad
from penstock.messages.experts import ExpertOrders, RowCounts
from penstock.messages.kv_transfer import KVConnectorMetadata
from penstock.messages.requests import RowRequest

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids by KV group: `block_ids[group][i]` holds the request's i-th block."""


BlockTable = Sequence[Sequence[int]]
"""Like `BlockIds`, but the table itself, which changes while the request runs: read it at once and do not keep it."""


class NewRequestData(msgspec.Struct, frozen=True, kw_only=True):
    """A request that enters the runner: for the first time, or again after a preemption.

    `token_ids` are all its known tokens: the prompt and, after a preemption, the output so far.
    """

    request: RowRequest
    token_ids: tuple[int, ...]
    block_ids: BlockIds
    num_computed_tokens: int

    @property
    def request_id(self) -> str:
        return self.request.request_id


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step. `step` counts the calls of `schedule()` from 1.

    `num_scheduled_tokens` maps a request id to how many tokens it computes in this step; its order is the order in
    which the scheduler chose them. `num_computed_tokens` is parallel to it: the scheduler's counts before this step,
    which count drafts in flight as accepted and so are upper bounds. The last `num_draft_tokens[request_id]` of a
    request's tokens are drafts, which the device holds and this step verifies. `new_block_ids` are appended to the
    block tables of requests that the runner already has.

    At the end of the step the speculator proposes `num_drafts_to_propose` drafts for each of the `num_sampling`
    requests that sample, and reports those of `grammar_request_ids`, which sample in this step and need a
    `GrammarOutput` for it. The tokens allowed for them depend on their earlier tokens: results of steps up to
    `barrier_step` are applied first (0: none). Rows of finished and preempted requests are freed before anything else.
    A warm-up step is not passed to the connector, and its experts are not counted. `expert_orders` are for the ranks
    that have that layer. `adapter_loads` come before the step's rows.

    Engines that share experts make each step together: `rows_by_engine` has the rows of all of them, in the order of
    their data parallel ranks, and an engine without tokens takes part in the passes of the others. It is empty for an
    engine by itself.
    """

    step: int
    new_requests: tuple[NewRequestData, ...] = ()
    new_block_ids: dict[str, BlockIds] = msgspec.field(default_factory=dict[str, BlockIds])
    num_scheduled_tokens: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    num_computed_tokens: tuple[int, ...] = ()
    num_draft_tokens: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    num_drafts_to_propose: int = 0
    num_sampling: int = 0
    total_num_scheduled_tokens: int = 0
    grammar_request_ids: frozenset[str] = frozenset()
    finished_request_ids: frozenset[str] = frozenset()
    preempted_request_ids: frozenset[str] = frozenset()
    kv_connector_metadata: KVConnectorMetadata | None = None
    barrier_step: int = 0
    is_warm_up: bool = False
    expert_orders: ExpertOrders | None = None
    rows_by_engine: tuple[RowCounts, ...] = ()
    adapter_loads: tuple[AdapterLoad, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no forward pass is needed; rows may still have to be freed."""
        return self.total_num_scheduled_tokens == 0

    @property
    def uses_experts(self) -> bool:
        """Whether a forward pass of this engine, or of another one with the same experts, is needed."""
        return not self.is_empty or any(each.num_tokens for each in self.rows_by_engine)

    @property
    def row_counts(self) -> RowCounts:
        """This engine's rows in the step."""
        num_drafts = self.num_drafts_to_propose if self.num_sampling else 0
        return RowCounts(self.total_num_scheduled_tokens, self.num_sampling, num_drafts)

    def with_metadata(self, metadata: KVConnectorMetadata | None) -> SchedulerOutput:
        """Returns the same step with the metadata for the connector's workers."""
        return msgspec.structs.replace(self, kv_connector_metadata=metadata)


class GrammarOutput(msgspec.Struct, frozen=True):
    """The tokens that the grammars allow: per request [1 + drafts, ceil(vocab_size / 32)] int32, a bit per token. Row j
    is for the token after the j-th draft, row 0 for the one after the last known token. Requests without an entry are
    unconstrained.
    """

    bitmasks: dict[str, np.ndarray]


NO_GRAMMARS = GrammarOutput({})
"""Every request is unconstrained."""
