"""Divides the running requests into micro-batches, so that pipeline stages compute different ones at the same time.

A request whose sampled token is not known yet cannot be computed by the first stage. A step therefore takes one
micro-batch and the next step another, and while the last stage samples for the first, earlier stages compute the
second. Their number is the number of steps that may be in flight, and steps take them in turn. With one stage there is
one, and every step takes all requests.

They are balanced by the tokens that their requests take per step while they decode. A request stays where it is unless
the imbalance is large, and it never moves while one of its tokens is in flight. During its prompt, when nothing is
sampled, a request may run in any step, so that one long prompt keeps all stages busy; it joins the micro-batch of the
step that samples its first token.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.engine import SchedulerConfig
from penstock.core.request import Request
from penstock.core.request_queue import RequestQueue

# Requests move when the lightest micro-batch has less than this share of the heaviest one's tokens.
_BALANCED = 0.75


class MicroBatches(RequestQueue):
    """The running requests in the order in which they are served. A micro-batch is a number from 0 on."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config.policy)
        self._count = config.num_micro_batches
        self._max_samples_in_flight = 1 + config.max_steps_ahead
        self._max_num_drafts = config.max_num_drafts
        self._batch_of: dict[Request, int] = {}
        self._num_tokens = [0] * self._count  # per step, while decoding
        self._leaving: set[Request] = set()
        self._last = self._count - 1

    def add(self, request: Request, batch: int = 0) -> None:
        """Adds a request that begins to run."""
        super().add(request)
        self._put(request, batch)

    def remove(self, request: Request) -> None:
        """Removes a request that no longer runs."""
        super().remove(request)
        self._take(request)

    def turns(self) -> Iterator[int]:
        """Yields all micro-batches, starting with the next in turn."""
        return ((self._last + offset) % self._count for offset in range(1, self._count + 1))

    def end_turn(self, batch: int) -> None:
        """Called when a step has taken this micro-batch."""
        self._last = batch

    def candidates(self, batch: int) -> list[Request]:
        """Returns the requests that a step of this micro-batch may compute, in their order."""
        members = self.snapshot()
        if self._count > 1:
            members = [each for each in members if self._batch_of[each] == batch or each.is_prefilling]
        limit = self._max_samples_in_flight
        return [each for each in members if each.num_samples_in_flight < limit and each not in self._leaving]

    def has_room(self, batch: int, num_waiting: int) -> bool:
        """Returns whether a step of this micro-batch may admit one of `num_waiting` admissible requests.

        It may until it has its share of all requests, so that a burst of short prompts is divided. The lightest
        micro-batch always may.
        """
        tokens_per_step = 1 + self._max_num_drafts
        num_tokens = sum(self._num_tokens) + num_waiting * tokens_per_step
        mine = self._num_tokens[batch]
        return mine == min(self._num_tokens) or (mine + tokens_per_step) * self._count <= num_tokens

    def on_scheduled(self, request: Request, batch: int) -> None:
        """Called when a step of this micro-batch computes the request, which joins it at the end of its prompt."""
        if self._batch_of[request] != batch and not request.is_prefilling:
            self._take(request)
            self._put(request, batch)

    def balance(self) -> None:
        """Moves requests from the heaviest to the lightest micro-batch when these differ much, last in line first.

        A request with a token in flight moves in a later step, and does not run before.
        """
        self._leaving.clear()
        light, heavy = min(self._num_tokens), max(self._num_tokens)
        if light > _BALANCED * heavy:
            return
        source, target = self._num_tokens.index(heavy), self._num_tokens.index(light)
        gap = heavy - light
        for request in reversed(self.snapshot()):
            change = 2 * self._tokens_per_step(request)
            if self._batch_of[request] != source or change > gap:
                continue
            gap -= change
            if request.num_samples_in_flight:
                self._leaving.add(request)
            else:
                self._take(request)
                self._put(request, target)

    def _tokens_per_step(self, request: Request) -> int:
        """Returns the tokens per step of a decoding request: one, and its drafts."""
        return 1 + min(self._max_num_drafts, request.max_drafts)

    def _put(self, request: Request, batch: int) -> None:
        self._batch_of[request] = batch
        self._num_tokens[batch] += self._tokens_per_step(request)

    def _take(self, request: Request) -> None:
        self._num_tokens[self._batch_of.pop(request)] -= self._tokens_per_step(request)

    def check_integrity(self) -> None:
        """Recomputes the contents of the micro-batches from the running requests."""
        num_tokens = [0] * self._count
        for request in self:
            num_tokens[self._batch_of[request]] += self._tokens_per_step(request)
            in_flight = request.num_samples_in_flight
            assert in_flight <= self._max_samples_in_flight, f"{request.request_id} is sampled in {in_flight} steps"
        assert num_tokens == self._num_tokens, (num_tokens, self._num_tokens)
        assert len(self._batch_of) == len(self), "a request that does not run is in a micro-batch"
