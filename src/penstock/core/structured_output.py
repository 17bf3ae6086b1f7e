"""The requests' grammars: compiled in parallel with steps, advanced by final tokens, and asked for masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from penstock.core.containment import contained
from penstock.grammar.backend import Grammar, GrammarBackend
from penstock.messages.scheduler_output import GrammarOutput, SchedulerOutput
from penstock.messages.structured_outputs import GrammarSpec
from penstock.utils.errors import GrammarError, RequestError, RequestFailedError

_COMPILE_THREADS = 1


class StructuredOutputs:
    """Belongs to the scheduler; only compilation runs on other threads. `backend` is None if there is no tokenizer."""

    def __init__(self, backend: GrammarBackend | None) -> None:
        self._backend = backend
        self._compiling: dict[str, Future[Grammar]] = {}
        self._grammars: dict[str, Grammar] = {}
        self._drafts: dict[str, Sequence[int]] = {}
        self._failed: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="penstock-grammar")

    def add(self, request_id: str, spec: GrammarSpec, output_token_ids: Sequence[int] = ()) -> None:
        """Starts compilation, after which the grammar is advanced by the output that the request continues; the request
        must not run until then (`collect`).
        """
        if self._backend is None:
            raise RequestError("structured outputs need a tokenizer, and the engine has none", "structured_outputs")
        self._compiling[request_id] = self._threads.submit(_compile, self._backend, spec, output_token_ids)

    def is_compiling(self, request_id: str) -> bool:
        return request_id in self._compiling

    def collect(self) -> dict[str, str]:
        """Collects compiled grammars; returns the errors of requests whose grammar is invalid or exceeds a limit."""
        if not self._compiling and not self._failed:
            return {}
        failed, self._failed = self._failed, {}
        for request_id in [request_id for request_id, future in self._compiling.items() if future.done()]:
            try:
                with contained(request_id):
                    self._grammars[request_id] = self._compiling.pop(request_id).result()
            except (RequestError, RequestFailedError) as error:
                failed[request_id] = str(error)
        return failed

    @property
    def num_compiling(self) -> int:
        """Returns the number of requests that cannot run yet."""
        return len(self._compiling)

    def wait(self, seconds: float) -> None:
        """Waits until a grammar is compiled, if any is being compiled."""
        if self._compiling:
            wait(self._compiling.values(), seconds, FIRST_COMPLETED)

    def advance(self, request_id: str, token_id: int) -> bool:
        """Advances the grammar by a final token; returns whether the output is complete. Raises GrammarError."""
        grammar = self._grammars[request_id]
        grammar.accept((token_id,))
        return grammar.is_finished

    def set_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Stores the drafts that the device will verify in the next step of these requests."""
        if self._grammars:
            self._drafts.update((request_id, ids) for request_id, ids in drafts.items() if request_id in self._grammars)

    def masks(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Returns the masks of the plan's requests, or None. Steps up to its `barrier_step` must be processed."""
        if not plan.grammar_request_ids:
            return None
        masks: dict[str, np.ndarray] = {}
        for request_id in plan.grammar_request_ids:
            grammar = self._grammars.get(request_id)
            # A request that has ended since it was scheduled has no grammar any more.
            if grammar is not None:
                num_drafts = plan.num_draft_tokens.get(request_id, 0)
                drafts = list(self._drafts.get(request_id, ()))[:num_drafts]
                assert len(drafts) == num_drafts, f"{request_id}: {drafts} for {num_drafts} drafts"
                try:
                    masks[request_id] = self._fill(grammar, drafts)
                except GrammarError as error:
                    # A token sampled without a mask is never used, because the request ends first.
                    self._failed[request_id] = str(error)
        return GrammarOutput(masks)

    def _fill(self, grammar: Grammar, drafts: Sequence[int]) -> np.ndarray:
        assert self._backend is not None, "a grammar without a backend"
        rows = np.empty((1 + len(drafts), self._backend.num_words), dtype=np.int32)
        grammar.fill(drafts, rows)
        return rows

    def remove(self, request_id: str) -> None:
        self._grammars.pop(request_id, None)
        self._drafts.pop(request_id, None)
        self._failed.pop(request_id, None)
        future = self._compiling.pop(request_id, None)
        if future is not None:
            future.cancel()

    def shutdown(self) -> None:
        self._threads.shutdown(cancel_futures=True)


def _compile(backend: GrammarBackend, spec: GrammarSpec, output_token_ids: Sequence[int]) -> Grammar:
    """Returns the grammar after these tokens. Raises RequestError, also if they contradict it."""
    grammar = backend.compile(spec)
    try:
        grammar.accept(output_token_ids)
    except GrammarError as error:
        raise RequestError(f"output_token_ids contradict the request's grammar: {error}", "output_token_ids") from None
    if output_token_ids and grammar.is_finished:
        raise RequestError("output_token_ids are complete: the grammar allows nothing after them", "output_token_ids")
    return grammar
