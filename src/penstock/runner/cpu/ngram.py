"""Prompt lookup (Saxena 2023): proposes the tokens that followed an earlier occurrence of the last few tokens."""

from __future__ import annotations

import numpy as np
import torch

from penstock.runner.buffers import to_device
from penstock.runner.speculation.speculator import StepResult


class NgramSpeculator:
    """Finds the longest suffix of `shortest` to `longest` tokens, and its latest earlier occurrence."""

    leaves_gaps = True
    is_capturable = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest

    def propose(self, step: StepResult, num_drafts: int) -> torch.Tensor:
        drafts = np.full((len(step.rows), num_drafts), -1, dtype=np.int64)
        if num_drafts:
            rows, lengths = step.rows.tolist(), (step.num_computed_exact + 1).tolist()
            for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                found = self._lookup(step.token_ids[row, :length].cpu().numpy(), num_drafts)
                drafts[index, : len(found)] = found
        return to_device(drafts, step.rows.device)

    def _lookup(self, tokens: np.ndarray, num_drafts: int) -> np.ndarray:
        """Returns the tokens after the match [at most num_drafts]."""
        # Ends of earlier occurrences of ever longer suffixes: a match of n + 1 tokens extends one of n.
        ends = np.nonzero(tokens[:-1] == tokens[-1])[0] + 1
        best = ends[:0]
        for length in range(1, self._longest + 1):
            if length > 1:
                ends = ends[ends >= length]
                ends = ends[tokens[ends - length] == tokens[-length]] if length <= len(tokens) else ends[:0]
            if not len(ends):
                break
            if length >= self._shortest:
                best = ends
        return tokens[best[-1] :][:num_drafts] if len(best) else tokens[:0]
