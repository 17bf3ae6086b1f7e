"""One request from its arrival to its end: executes the plans of the `Dispatcher`.

An instance's failure is a `PeerError`; any other error comes from the client's side and ends the request, with all
its calls. Every request ends in exactly one of `refused`, `answered`, `cut` and `left` of the observer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.router import bodies
from penstock.router.dispatcher import Decision, Dispatcher, Phase, Plan, Refusal, Routed
from penstock.router.http_client import AnswerLostError, Call, HttpUpstream, InstanceConnection, fetch
from penstock.router.http_server import Response
from penstock.router.instances import Instance
from penstock.router.observer import RouterObserver
from penstock.router.prompts import EstimatedPrompts, TokenizedPrompts
from penstock.utils.clock import Clock
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger

logger = get_logger(__name__)

# Another instance may succeed: this one is full, drains, or its engine has died.
_RETRIED_STATUSES = (502, 503, 504)
# The usage of a streamed answer is in its last events.
_TAIL_BYTES = 4096
_LAST_EVENT = b"data: [DONE]"


class RejectedByPrefillError(Exception):
    """The prefill instance reports an error of the request, which is forwarded to the client."""

    def __init__(self, status: int, headers: bodies.Headers, body: bytes) -> None:
        super().__init__(status)
        self.status, self.headers, self.body = status, headers, body


class _InstanceFailedError(Exception):
    """An instance failed before the first byte of the answer. `num_lost` is how many times it may have died of it."""

    def __init__(self, instance: Instance, message: str, num_lost: int = 0) -> None:
        super().__init__(message)
        self.instance = instance
        self.num_lost = num_lost


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. `prefill`: for a prompt in a prefill instance; `query`: for a request of its engine id."""

    prefill: float = 60.0
    query: float = 5.0


@dataclass(slots=True)
class _Tail:
    """The end of the answer that the client has received so far."""

    data: bytes = b""

    def add(self, chunk: bytes) -> None:
        self.data = chunk if len(chunk) >= _TAIL_BYTES else (self.data + chunk)[-_TAIL_BYTES:]

    @property
    def is_last(self) -> bool:
        return self.data.rstrip().endswith(_LAST_EVENT)


class _Attempt(msgspec.Struct, frozen=True):
    """`since` is when the request arrived."""

    request: Routed
    plan: Plan
    incoming: bodies.ClientRequest
    since: float
    tail: _Tail


class Exchanges:
    """Processes requests. `wake` must be called after external events that may free capacity in the pool."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstream: HttpUpstream,
        prompts: EstimatedPrompts | TokenizedPrompts,
        observer: RouterObserver,
        clock: Clock,
        timeouts: Timeouts,
    ) -> None:
        self._dispatcher = dispatcher
        self._prompts = prompts
        self._upstream = upstream
        self._observer = observer
        self._clock = clock
        self._timeouts = timeouts
        self._waiting: dict[Routed, asyncio.Future[Plan | Refusal]] = {}
        self._scopes: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)

    async def answer(self, incoming: bodies.ClientRequest, client: Response) -> None:
        """Answers a request, exactly once. Raises the errors of the client's side."""
        request = Routed(incoming.is_divisible)
        is_over, since, tail = False, self._clock.now(), _Tail()
        decision: Decision = None
        self._observer.arrived(incoming)
        try:
            try:
                request.num_prompt_tokens, request.cached = await self._prompts.look_up(incoming)
            except AnswerLostError as error:
                logger.warning("a prompt could not be tokenized: %s", error)
                request.num_lost = error.num_sent
                request.num_prompt_tokens = bodies.estimate_tokens(len(incoming.body))
            decision = self._dispatcher.submit(request, self._clock.now())
            while not is_over:
                if decision is None:
                    decision = await self._wait(request)
                if isinstance(decision, Refusal):
                    await client.refuse(503, decision.message)
                    self._observer.refused(incoming, self._clock.now() - since, was_tried=bool(request.failed))
                    break
                self._observer.planned(incoming, decision, is_retry=bool(request.failed))
                try:
                    await self._answer(_Attempt(request, decision, incoming, since, tail), client)
                    is_over = True
                except _InstanceFailedError as failure:
                    self._observer.failed(failure.instance)
                    logger.warning("%s failed before the answer began: %s", failure.instance.url, failure)
                    now = self._clock.now()
                    url, num_lost = failure.instance.url, failure.num_lost
                    decision = self._dispatcher.failed(request, url, str(failure), now, num_lost=num_lost)
                    self.wake()
        except (asyncio.CancelledError, OSError):
            if tail.is_last and isinstance(decision, Plan):
                # Some clients close the connection at the last event, and do not wait for the body's end.
                self._observer.answered(incoming, decision.target, 200, self._clock.now() - since, tail.data)
            else:
                self._observer.left(incoming)
            raise
        finally:
            self._dispatcher.end(request)
            self._waiting.pop(request, None)
            self.wake()

    def wake(self) -> None:
        """Delivers decisions to waiting requests, if there are any."""
        for request, decision in self._dispatcher.poll(self._clock.now()):
            future = self._waiting.pop(request)
            # The client of a cancelled request has just left; the end of the request releases the plan's leases.
            if not future.done():
                future.set_result(decision)

    def cut_off(self, url: str) -> None:
        """Fails all calls to the instance, which has died."""
        for scope in list(self._scopes.get(url, ())):
            scope.reschedule(0)

    async def _wait(self, request: Routed) -> Plan | Refusal:
        future = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        return await future

    # ---- The two halves of a request ----

    async def _answer(self, attempt: _Attempt, client: Response) -> None:
        """Raises _InstanceFailedError if nothing has been written."""
        prefill, incoming = attempt.plan.prefill, attempt.incoming
        try:
            if prefill is None or incoming.completion is None:
                await self._stream(attempt, incoming.body, client, None)
            elif prefill.bootstrap:
                await self._run_both_halves(attempt, prefill, incoming.completion, client)
            else:
                params = await self._prefill(attempt, prefill, bodies.serial_prefill_body(incoming.completion))
                self._dispatcher.prefill_ends(attempt.request, self._clock.now(), is_done=True)
                data = (
                    incoming.body if params is None else bodies.with_params(incoming.body, incoming.completion, params)
                )
                await self._stream(attempt, data, client, None)
        except RejectedByPrefillError as error:
            await client.whole(error.status, error.headers, error.body)
            assert prefill is not None, "only a prefill instance's answer is an error"
            self._observer.answered(incoming, prefill, error.status, self._clock.now() - attempt.since, b"")

    async def _run_both_halves(
        self, attempt: _Attempt, prefill: Instance, body: dict[str, Any], client: Response
    ) -> None:
        """Runs both halves at once; a failure of the prefill instance counts only before the answer has begun."""
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        engine_id = await self._engine_id(prefill)
        params = bodies.concurrent_decode_params(transfer_id, prefill.bootstrap, engine_id)
        prefill_body = bodies.concurrent_prefill_body(body, transfer_id)
        async with _concurrently(self._prefill(attempt, prefill, prefill_body)) as prefilling:
            data = bodies.with_params(attempt.incoming.body, body, params)
            await self._stream(attempt, data, client, prefilling)

    async def _prefill(self, attempt: _Attempt, prefill: Instance, data: bytes) -> Any:
        """Returns the KV parameters for the decode instance. Raises RejectedByPrefillError and _InstanceFailedError."""
        headers = bodies.headers_for_prefill(attempt.incoming.headers)
        call = Call("POST", prefill.url + attempt.incoming.target, headers, data)
        status, answered, content = await self._fetch(prefill, call, self._timeouts.prefill)
        if 400 <= status < 500:
            raise RejectedByPrefillError(status, answered, content)
        if status != 200:
            raise self._failure(prefill, _unavailable(status, answered))
        return (bodies.parse_object(content) or {}).get("kv_transfer_params")

    async def _engine_id(self, prefill: Instance) -> Any:
        call = Call("GET", f"{prefill.bootstrap}/query")
        _, _, content = await self._fetch(prefill, call, self._timeouts.query)
        try:
            return json.loads(content)["0"]["engine_id"]
        except (ValueError, KeyError, TypeError):
            raise _InstanceFailedError(prefill, f"{call.url} does not name an engine") from None

    async def _fetch(self, instance: Instance, call: Call, timeout: float) -> tuple[int, bodies.Headers, bytes]:
        """Returns a whole answer. Raises _InstanceFailedError."""
        try:
            async with asyncio.timeout(None) as scope:
                with self._watched(instance, scope):
                    status, headers, content = await fetch(self._upstream, call, timeout)
        except (PeerError, TimeoutError) as error:
            raise self._failure(instance, error) from None
        return status, bodies.answer_headers(headers), content

    async def _stream(
        self, attempt: _Attempt, data: bytes, client: Response, prefilling: asyncio.Task[Any] | None
    ) -> None:
        """Forwards the target's answer, byte for byte, from its first byte on; before that raises as `_answer`."""
        incoming, target = attempt.incoming, attempt.plan.target
        call = Call(incoming.method, target.url + incoming.target, incoming.headers, data)
        try:
            async with asyncio.timeout(None) as scope:
                with self._watched(target, scope):
                    if prefilling is not None:
                        prefilling.add_done_callback(functools.partial(self._on_prefilled, attempt, scope))
                    with await self._upstream.ask(call) as answer:
                        await self._pass_on(attempt, answer, client)
        except (PeerError, TimeoutError) as error:
            failure = (prefilling and _failure_of(prefilling)) or self._failure(target, error)
            if attempt.request.phase is not Phase.ANSWERING:
                raise failure from None
            self._observer.failed(target)
            logger.warning("an answer has been cut: %s: %s", target.url, failure)
            client.cut()
            self._observer.cut(incoming)
            return
        self._observer.answered(incoming, target, answer.status, self._clock.now() - attempt.since, attempt.tail.data)

    async def _pass_on(self, attempt: _Attempt, answer: InstanceConnection, client: Response) -> None:
        if answer.status in _RETRIED_STATUSES:
            raise _unavailable(answer.status, answer.headers)

        def take(part: bytes, is_last: bool) -> bool:
            is_first = attempt.request.phase is not Phase.ANSWERING
            self._dispatcher.answer_goes_on(attempt.request, self._clock.now())
            if is_first:
                client.begin(answer.status, bodies.answer_headers(answer.headers))
            is_ready = client.write(part, is_last)
            attempt.tail.add(part)
            return is_ready

        while not await answer.pass_to(take):
            await client.drained()
        await client.drained()

    def _on_prefilled(self, attempt: _Attempt, scope: asyncio.Timeout, task: asyncio.Task[Any]) -> None:
        is_done = not task.cancelled() and task.exception() is None
        self._dispatcher.prefill_ends(attempt.request, self._clock.now(), is_done=is_done)
        is_waiting = scope in self._scopes[attempt.plan.target.url] and attempt.request.phase is Phase.PLANNED
        if is_waiting and _failure_of(task) is not None:
            scope.reschedule(0)

    def _failure(self, instance: Instance, error: Exception) -> _InstanceFailedError:
        if isinstance(error, TimeoutError):
            return _InstanceFailedError(instance, "it has died or was removed", num_lost=1)
        return _InstanceFailedError(instance, str(error), error.num_sent if isinstance(error, AnswerLostError) else 0)

    @contextlib.contextmanager
    def _watched(self, instance: Instance, scope: asyncio.Timeout) -> Generator[None]:
        """Ends the scope with TimeoutError if the instance dies meanwhile (`cut_off`)."""
        scopes = self._scopes[instance.url]
        scopes.add(scope)
        try:
            yield
        finally:
            scopes.discard(scope)


@contextlib.asynccontextmanager
async def _concurrently(work: Coroutine[Any, Any, Any]) -> AsyncGenerator[asyncio.Task[Any]]:
    """Runs `work` concurrently with the body, and cancels it at the body's end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _unavailable(status: int, headers: bodies.Headers) -> PeerError:
    """Returns the error of an instance that cannot answer, for another one to be tried.

    An instance that has refused a request names the time after which to send it again; one that has died does not.
    """
    kind = PeerError if bodies.header_of(headers, "retry-after") is not None else AnswerLostError
    return kind(f"it has answered {status}")


def _failure_of(prefilling: asyncio.Task[Any]) -> _InstanceFailedError | None:
    """Returns None for a task that runs, was cancelled, or found a request error, which the other half reports."""
    error = None if not prefilling.done() or prefilling.cancelled() else prefilling.exception()
    return error if isinstance(error, _InstanceFailedError) else None
