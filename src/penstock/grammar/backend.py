"""What compiles grammars and follows them token by token.

A `GrammarBackend` is built once per process from the tokenizer. It compiles a `GrammarSpec` into a `Grammar`, the
state of one request: at the beginning of its output, then moved on by `accept`. `fill` says which tokens may come next.

Masks are rows of int32 words, one bit per token id, lowest bit first; a set bit allows the token. End-of-sequence
tokens are allowed exactly where the output may end, and nothing else is once it must. Ids that the model knows and the
tokenizer does not are never allowed.

`compile` may be called on any thread; a grammar belongs to one thread at a time. What a grammar costs is bounded, in
`compile` and in every later call; a request whose grammar exceeds a bound fails alone, with a `GrammarError`, and the
grammar that raised it is good for nothing more. Compiling is still the work of tens of milliseconds, and an adversary's
grammar may reach the bounds of the process itself, so a server lets `GrammarChecker` compile it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.messages.structured_outputs import GrammarSpec


class Grammar(Protocol):
    """Where one request's output stands in its grammar."""

    def accept(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that have become final. Raises GrammarError when one is not allowed or a bound was hit."""
        ...

    def fill(self, drafts: Sequence[int], rows: np.ndarray) -> None:
        """Writes the mask of the next token, and after it the mask behind each draft.

        `rows` is [1 + len(drafts), num_words] int32, each row contiguous. The row behind a draft that is not allowed
        (or is -1, no draft), and all rows after it, allow everything: such a draft is never accepted, so no token is
        ever taken from them. The state is the same afterwards. Raises GrammarError when a bound was hit, be it behind
        a draft.
        """
        ...

    @property
    def is_finished(self) -> bool:
        """True when accepted tokens have brought the output to where nothing may follow but an end of sequence."""
        ...


class GrammarBackend(Protocol):
    """Compiles grammars for one tokenizer."""

    num_words: int
    """The length of a mask: vocab_size / 32, rounded up."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        """A grammar at the beginning of the output. Raises RequestError with a reason for the client."""
        ...
