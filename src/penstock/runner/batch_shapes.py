"""The shapes of steps, by which a captured step is matched to one that may replay it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import SchedulerConfig
from penstock.runner.host_batch import HostBatch

# Graphs are captured for these numbers of requests, and beyond them for every quarter of a power of two.
_SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
# Mixed steps are captured for these numbers of tokens. A larger step takes longer to compute than to launch.
_MIXED_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Determines which kernels a step's forward pass and its drafts launch, and on what grids."""

    num_reqs: int  # with padding
    num_tokens: int  # with padding
    max_query_len: int  # of a request, an upper bound
    max_seq_len: int  # of a request including its drafts, an upper bound


class BatchShapes:
    """Chosen once with the runner: which shapes are captured, and the shape of every step.

    A captured step is uniform (each request decodes, or verifies its drafts, and all tokens are sampled from) or mixed:
    any tokens of up to the maximum number of requests, in contexts of any length.
    """

    def __init__(self, config: SchedulerConfig, contexts: Sequence[int], attention: AttentionBackend) -> None:
        """`contexts`: ascending maximum lengths of the graphs, the last covering all contexts; empty: no graphs."""
        self._config = config
        self._num_drafts = config.max_num_drafts
        self._captures_ragged = attention.captures_ragged
        self._contexts = contexts
        self._sizes = graph_sizes(config.max_num_seqs)
        self._query_lens = sorted({1, *(1 + count for _, count in config.drafts)})
        most = config.max_num_batched_tokens if contexts and attention.captures_mixed else 0
        self._mixed_sizes = [size for size in _MIXED_SIZES if self._query_lens[-1] < size <= most]

    @property
    def captured(self) -> list[BatchDescriptor]:
        """The captured shapes, largest first, so that smaller ones can reuse freed memory."""
        mixed = [self._mixed(size) for size in reversed(self._mixed_sizes)]
        uniform = [
            BatchDescriptor(size, size * query_len, query_len, context)
            for size in reversed(self._sizes)
            for query_len in reversed(self._query_lens)
            for context in reversed(self._contexts)
        ]
        return mixed + uniform

    @property
    def max_num_tokens(self) -> int:
        """The maximum of any step, with padding."""
        captured = self._config.max_num_seqs * self._query_lens[-1] if self._contexts else 0
        return max(self._config.max_num_batched_tokens, captured)

    def of(self, host: HostBatch) -> BatchDescriptor:
        """Returns the captured shape that fits a step best, else the step's own."""
        num_reqs, query_len = len(host.rows), host.max_query_len
        seq_len = min(host.max_seq_len + self._num_drafts, self._config.max_model_len)
        if self._contexts and query_len <= self._query_lens[-1] and host.num_logits == host.num_tokens:
            size = _smallest(self._sizes, num_reqs)
            query_len = _smallest(self._query_lens, query_len)
            if host.num_tokens == num_reqs * query_len or self._captures_ragged:
                return BatchDescriptor(size, size * query_len, query_len, _smallest(self._contexts, seq_len))
        if self._mixed_sizes and host.num_tokens <= self._mixed_sizes[-1]:
            return self._mixed(_smallest(self._mixed_sizes, host.num_tokens))
        return BatchDescriptor(num_reqs, host.num_tokens, host.max_query_len, seq_len)

    def is_mixed(self, shape: BatchDescriptor) -> bool:
        """Returns whether a captured shape is mixed."""
        return shape.max_query_len > self._query_lens[-1]

    def _mixed(self, num_tokens: int) -> BatchDescriptor:
        num_reqs = min(num_tokens, self._config.max_num_seqs)
        return BatchDescriptor(num_reqs, num_tokens, num_tokens, self._contexts[-1])


def _smallest(ascending: Sequence[int], least: int) -> int:
    """Returns the first that is not below `least`."""
    return ascending[bisect.bisect_left(ascending, least)]


def graph_sizes(max_num_reqs: int) -> list[int]:
    """Returns the numbers of requests for which steps are captured, ascending up to `max_num_reqs`."""
    sizes = [size for size in _SMALL_SIZES if size < max_num_reqs]
    size = _SMALL_SIZES[-1]
    while (size := size + (1 << size.bit_length() - 3)) < max_num_reqs:
        sizes.append(size)
    return [*sizes, max_num_reqs]
