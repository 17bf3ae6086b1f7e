"""Compiles grammars in a process with little memory that may crash or be killed by its owner.

    python -m penstock.grammar.checker_process SOCKET LIFELINE

Both are inherited (`utils/child_process.py`). The owner first sends `Start`, and the process replies with `Ready`, or
with `Failed` if the tokenizer cannot be constrained; then it replies to each `GrammarSpec` with a `Verdict`, in order.
It is killed when the lifeline is closed, even during a compilation.
"""

from __future__ import annotations

import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.messages.structured_outputs import GrammarSpec
from penstock.utils import logging
from penstock.utils.child_process import Failed, Parent
from penstock.utils.errors import GrammarError, RequestError
from penstock.utils.wire import Codec

logger = logging.get_logger(__name__)

# Half of what a main thread usually has: no grammar that passes here overflows the stack of the engine core.
_STACK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Start:
    """`memory_bytes` and `cpu_seconds` bound what a grammar may use in addition to the process's usage when it is
    ready.
    """

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_bytes: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Ready:
    pass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is why a grammar is refused; None if it compiles."""

    reason: str | None


CODEC = Codec(Start, Ready, Failed, GrammarSpec, Verdict)


def _judge(backend: LLGuidanceBackend, spec: GrammarSpec, cpu_seconds: float) -> Verdict:
    started = time.thread_time()
    try:
        backend.compile(spec).fill((), np.empty((1, backend.num_words), np.int32))
    except (RequestError, GrammarError) as error:
        return Verdict(str(error))
    # The engine core will spend this time between two steps, which delays all requests.
    is_slow = time.thread_time() - started > cpu_seconds
    return Verdict("the grammar cannot be compiled: it is too complex" if is_slow else None)


def _work(owner: Parent) -> None:
    messages = iter(owner)
    start = next(messages, None)
    if not isinstance(start, Start):
        return
    backend = LLGuidanceBackend(start.tokenizer_json, start.vocab_size, start.eos_token_ids)
    _limit_memory(start.memory_bytes)
    owner.send(Ready())
    for spec in messages:
        owner.send(_judge(backend, spec, start.cpu_seconds))


def _limit_memory(more_bytes: int) -> None:
    """Limits the further growth of the address space; no limit if the system does not report its size."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        wanted = int(statm.read_text().split()[0]) * resource.getpagesize() + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def main() -> None:
    owner = Parent.of_this_process(CODEC)
    threading.stack_size(_STACK_BYTES)
    working = threading.Thread(
        target=lambda: owner.live(lambda: _work(owner), lambda _: logger.exception("the grammar checker stops"))
    )
    working.start()
    working.join()


if __name__ == "__main__":
    main()
