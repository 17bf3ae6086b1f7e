"""Counts proposed and accepted drafts when the scheduler processes a step's result."""

from __future__ import annotations

from penstock.messages.stats import SpeculationStats


class SpeculationCounter:
    """Counts verifications of at most `max_num_drafts` drafts each."""

    def __init__(self, max_num_drafts: int) -> None:
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_per_position = [0] * max_num_drafts

    def count(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Records the verification of one request's drafts, the first `num_accepted` of which were accepted."""
        assert 0 <= num_accepted <= num_draft_tokens, (num_accepted, num_draft_tokens)
        self._num_drafts += num_draft_tokens > 0
        self._num_draft_tokens += num_draft_tokens
        for position in range(num_accepted):
            self._num_accepted_per_position[position] += 1

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafts, self._num_draft_tokens, tuple(self._num_accepted_per_position))
