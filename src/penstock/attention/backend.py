"""The interface of attention on the paged KV cache: one backend per engine, chosen when it is built.

Contract: a call rotates the queries and keys of its tokens, stores their keys and values, and then attends; it never
waits, except as a backend's docstring says. Threading: the runner's thread. A row's result must not depend on the other
rows of the call, except for its last bits if a backend chooses tiles by the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.kernels.paged_attention import Softmax
from penstock.kernels.recurrent import StateRows
from penstock.messages.kv_cache_spec import KVCacheSpec, KVPlane


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One KV group's view of the batch. Padding: query length 0, `seq_lens` 0, block row 0, slot -1.

    Every step has a new one, even if it is written into the tensors of the last: a backend may cache what it derives
    from one until it gets another.
    """

    query_start_loc: Tensor  # [num_reqs + 1] int32: request r owns rows query_start_loc[r] .. [r + 1]
    seq_lens: Tensor  # [num_reqs] int32: tokens in the cache once this step's are stored
    block_table: Tensor  # [num_reqs, max_blocks] int32
    slot_mapping: Tensor  # [num_tokens] int64: block_id * block_size + offset, where a token's KV is stored
    max_query_len: int  # of a request, an upper bound
    max_seq_len: int  # an upper bound
    states: StateRows | None = None  # of recurrent layers, whose table has vectors as `StateRequests` counts them


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """A layer's constants: heads, rotation, and the norms that some models have on queries and keys. Its cache has two
    planes of one shape, keys and values, or one of latents: keys whose dimensions after the rotated ones are the value.
    """

    spec: KVCacheSpec
    num_heads: int
    scale: float
    rotary: Tensor  # [max_position, number of rotated dimensions] float32: cos, sin; width 0: no rotation
    q_norm: Tensor | None = None  # [head_size]
    k_norm: Tensor | None = None  # [head_size]
    v_norm: Tensor | None = None  # [head_size]
    has_own_kv: bool = True  # else there are only queries, and the cache is another layer's
    eps: float = 1e-6
    is_causal: bool = True  # else a token attends to all tokens of its request, as in an encoder
    softcap: float = 0.0  # as in `Softmax`
    sinks: Tensor | None = None  # [num_heads] float32, as in `Softmax`

    @property
    def keys(self) -> KVPlane:
        return self.spec.planes[0]

    @property
    def softmax(self) -> Softmax:
        return Softmax(self.scale, self.spec.sliding_window, self.softcap, self.sinks)

    @property
    def value_size(self) -> int:
        rotated = 0 if len(self.spec.planes) == 2 else self.rotary.shape[1]
        return self.keys.head_size - rotated


class AttentionBackend(Protocol):
    graph_contexts: tuple[int, ...]
    """Ascending context lengths, the last one the maximum: steps with few queries are launched identically for all
    contexts up to one of them, and may be captured in a CUDA graph for each. Empty: nothing can be captured."""
    captures_ragged: bool
    """Whether a captured step may be replayed for requests with fewer queries than its maximum, in sequence."""
    captures_mixed: bool
    """Whether a captured step with more queries per request than drafts are verified may be replayed for any division
    of as many tokens into as many requests, each with any context."""
    reads_unseen: bool
    """Whether it multiplies values before a sliding window by zero: all of them must then be finite."""

    runs_encoders: bool
    """Whether it supports attention that is not causal and heads without rotation (`AttentionHeads`)."""

    def attend(
        self, qkv: Tensor, positions: Tensor, heads: AttentionHeads, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """[num_tokens, (num_heads + planes * num_kv_heads) * head_size] -> [num_tokens, num_heads * value_size].

        Without keys and values of its own a layer has [num_tokens, num_heads * head_size].
        `positions` is [num_tokens] int64, `kv_cache` [num_blocks, planes, num_kv_heads, block_size, head_size]. `qkv`
        may be overwritten.
        """
        ...
