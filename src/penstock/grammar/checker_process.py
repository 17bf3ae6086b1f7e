"""Compiles grammars in a process with little memory that may crash or be killed by its owner.

    python -m penstock.grammar.checker_process FD

`FD` is an inherited stream socket. The owner first sends `Start`, and the process replies with `Ready` or `Unusable`;
then it replies to each `GrammarSpec` with a `Verdict`, in order. The process ends when the socket is closed, even
during a compilation.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.messages.structured_outputs import GrammarSpec
from penstock.utils import logging
from penstock.utils.errors import ConfigError, RequestError
from penstock.utils.wire import Codec, FrameReader

logger = logging.get_logger(__name__)

_RECEIVE_BYTES = 1 << 16
_BROKEN = 1
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
class Unusable:
    """The tokenizer cannot be constrained."""

    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is why a grammar is refused; None if it compiles."""

    reason: str | None


CODEC = Codec(Start, Ready, Unusable, GrammarSpec, Verdict)


def _judge(backend: LLGuidanceBackend, spec: GrammarSpec, cpu_seconds: float) -> Verdict:
    started = time.thread_time()
    try:
        grammar = backend.compile(spec)
    except RequestError as error:
        return Verdict(str(error))
    grammar.fill((), np.empty((1, backend.num_words), np.int32))
    # The engine core will spend this time between two steps, which delays all requests.
    if time.thread_time() - started > cpu_seconds:
        return Verdict("the grammar cannot be compiled: it is too complex")
    return Verdict(None)


def _work(connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    start: Start = inbox.get()
    try:
        backend = LLGuidanceBackend(start.tokenizer_json, start.vocab_size, start.eos_token_ids)
    except ConfigError as error:
        connection.sendall(CODEC.encode(Unusable(str(error))))
        return
    _limit_memory(start.memory_bytes)
    connection.sendall(CODEC.encode(Ready()))
    while True:
        connection.sendall(CODEC.encode(_judge(backend, inbox.get(), start.cpu_seconds)))


def _limit_memory(more_bytes: int) -> None:
    """Limits the further growth of the address space; no limit if the system does not report its size."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = size + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _work_or_die(connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        _work(connection, inbox)
    except Exception:
        logger.exception("the grammar checker stops")
        os._exit(_BROKEN)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # An abort is an expected result here, so write no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.stdout = sys.stderr
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.stack_size(_STACK_BYTES)
    threading.Thread(target=_work_or_die, args=(connection, inbox), daemon=True).start()
    reader = FrameReader(CODEC)
    try:
        while data := connection.recv(_RECEIVE_BYTES):
            for message in reader.feed(data):
                inbox.put(message)
    finally:
        # The other thread may be in a long compilation, which nothing else would end.
        os._exit(0)


if __name__ == "__main__":
    main()
