"""A grammar backend without a library: a spec is the transcript of the only output that its grammar allows.

A grammar that misses a token, gets one twice, or is restarted in the middle of an output forbids what follows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from penstock.messages.structured_outputs import GrammarKind, GrammarSpec
from penstock.simulation.oracle import VOCAB_SIZE
from penstock.utils.errors import GrammarError
from penstock.utils.math import cdiv


def transcript(token_ids: Sequence[int]) -> GrammarSpec:
    """Returns the spec of the grammar that allows these tokens alone."""
    return GrammarSpec(GrammarKind.GRAMMAR, json.dumps(list(token_ids)))


class Transcripts:
    """A `GrammarBackend`."""

    num_words = cdiv(VOCAB_SIZE, 32)

    def compile(self, spec: GrammarSpec) -> Transcript:
        return Transcript(json.loads(spec.text))


class Transcript:
    """A `Grammar`. Its end is that of the request's tokens, so it is never finished by itself."""

    is_finished = False

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self._num_accepted = 0

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._token_ids[self._num_accepted : self._num_accepted + 1] != [token_id]:
                raise GrammarError(f"token {token_id} is not allowed after {self._num_accepted} tokens")
            self._num_accepted += 1

    def fill(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Allows everything: the ranks sample without masks, and `accept` checks the tokens."""
        rows[:] = -1
