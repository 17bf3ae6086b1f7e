"""The interface of grammar backends, which compile grammars and follow them token by token.

A `GrammarBackend` is built once per process from the tokenizer. It compiles a `GrammarSpec` into a `Grammar`, the state
of one request: at the beginning of its output, then advanced by `accept`. `fill` writes which tokens may follow.

Masks are rows of int32 words, one bit per token id, lowest bit first; a set bit allows the token. End-of-sequence
tokens are allowed exactly where the output may end, and only they are allowed where it must end. Ids that the model has
and the tokenizer does not are never allowed.

`compile` may be called on any thread; a grammar belongs to one thread at a time. The cost of a grammar is bounded, in
`compile` and in every later call; a grammar that exceeds a bound raises `GrammarError`, which fails only its request,
and must not be used after that. Compiling still takes tens of milliseconds, and an adversarial grammar may reach the
bounds of the process itself, so a server lets `GrammarChecker` compile it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.messages.structured_outputs import GrammarSpec


class Grammar(Protocol):
    """The state of one request's output in its grammar."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that have become final. Raises GrammarError if one is not allowed or a bound was exceeded."""
        ...

    def fill(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Writes the mask of the next token, then the mask after each draft.

        `rows` is [1 + len(drafts), num_words] int32, each row contiguous. The row after a draft that is not allowed (or
        is -1, no draft), and all rows after it, allow everything: such a draft is never accepted, so these rows are
        never used. If the grammar fails after a draft, the row after it and all later ones allow nothing: only an
        output that takes the draft ends there. The state is the same afterwards. Raises GrammarError if a bound was
        exceeded before the drafts.
        """
        ...

    @property
    def is_finished(self) -> bool:
        """True if only an end-of-sequence token may follow the accepted tokens."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer."""

    num_words: int
    """The length of a mask: vocab_size / 32, rounded up."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Returns a grammar at the beginning of the output. Raises RequestError with a reason for the client."""
        ...
