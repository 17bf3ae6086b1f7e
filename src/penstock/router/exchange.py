"""One request from its arrival to its end: executes the plans of the `Dispatcher`.

An instance's failure is a `PeerError`; any other error comes from the client's side and ends the request, with all
its calls. A stream that its instance reports goes on at another one (`ReportedStream`). Every request ends in exactly
one of `refused`, `answered`, `cut` and `left` of the observer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import uuid
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.router import bodies
from penstock.router.dispatcher import Decision, Dispatcher, Phase, Plan, Refusal, Routed
from penstock.router.http_client import AnswerLostError, Call, HttpUpstream, InstanceConnection, fetch
from penstock.router.http_server import Response
from penstock.router.instances import Instance, State
from penstock.router.observer import RouterObserver
from penstock.router.pool import Member
from penstock.router.prompts import EstimatedPrompts, TokenizedPrompts
from penstock.router.reported_stream import Reason, ReportedStream
from penstock.utils.clock import Clock
from penstock.utils.errors import PeerError
from penstock.utils.logging import get_logger
from penstock.utils.stream_reports import ASK, STREAM_HEADER, name_of

logger = get_logger(__name__)

# Another instance may succeed: this one is full, drains, or its engine has died.
_RETRIED_STATUSES = (502, 503, 504)
# The usage of a streamed answer is in its last events.
_TAIL_BYTES = 4096
_LAST_EVENT = b"data: [DONE]"
_SERIAL = {"do_remote_prefill": False}


class RejectedByPrefillError(Exception):
    """The prefill instance reports an error of the request, which is forwarded to the client."""

    def __init__(self, status: int, headers: bodies.Headers, body: bytes) -> None:
        super().__init__(status)
        self.status, self.headers, self.body = status, headers, body


class _InstanceFailedError(Exception):
    """An instance failed, and another one may answer, or continue the answer. `num_lost` is how many times it may have
    died of the request.
    """

    def __init__(self, instance: Instance, message: str, num_lost: int = 0) -> None:
        super().__init__(message)
        self.instance = instance
        self.num_lost = num_lost


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits in seconds. `prefill`: for a prompt in a prefill instance; `query`: for a request of its engine id;
    `migrate`: for the next part of a stream from an unhealthy instance, if another one can continue the stream. With
    None no stream is continued elsewhere.
    """

    prefill: float = 60.0
    query: float = 5.0
    migrate: float | None = 5.0


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
    stream: ReportedStream | None
    body: dict[str, Any] | None
    """The body of the request for a completion, or for the rest of it."""

    @property
    def data(self) -> bytes:
        return self.incoming.body if self.body in (None, self.incoming.completion) else bodies.encode(self.body)


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
        self._scopes: defaultdict[str, dict[asyncio.Timeout, _Attempt | None]] = defaultdict(dict)

    async def answer(self, incoming: bodies.ClientRequest, client: Response) -> None:
        """Answers a request, exactly once. Raises the errors of the client's side."""
        model = incoming.model() if self._dispatcher.pool.has_groups else ""
        request = Routed(functools.cache(incoming.is_divisible), model, incoming.client, is_timed=incoming.is_timed)
        is_over, since, tail = False, self._clock.now(), _Tail()
        is_migrated = self._timeouts.migrate is not None and incoming.may_be_reported()
        stream = ReportedStream(incoming.num_completions, incoming.finished_choices) if is_migrated else None
        decision: Decision = None
        self._observer.arrived(incoming)
        try:
            try:
                found = await self._prompts.look_up(incoming)
                request.num_prompt_tokens, request.token_ids, request.cached = found
            except AnswerLostError as error:
                logger.warning("a prompt could not be tokenized: %s", error)
                request.num_lost = error.num_sent
                request.num_prompt_tokens = incoming.estimate_tokens()
            decision = self._dispatcher.submit(request, self._clock.now())
            while not is_over:
                if decision is None:
                    decision = await self._wait(request)
                if isinstance(decision, Refusal):
                    await self._refuse(request, incoming, decision.message, since, stream, client)
                    break
                self._observer.planned(incoming, decision, is_retry=bool(request.failed) and not client.has_begun)
                body = incoming.completion
                if body is not None and stream is not None and stream.num_events:
                    body = bodies.continued(body, stream.token_ids, stream.finished)
                try:
                    await self._answer(_Attempt(request, decision, incoming, since, tail, stream, body), client)
                    is_over = True
                except _InstanceFailedError as failure:
                    decision = self._after_failure(request, failure, stream)
                    if decision is not None:
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

    async def _refuse(
        self,
        request: Routed,
        incoming: bodies.ClientRequest,
        message: str,
        since: float,
        stream: ReportedStream | None,
        client: Response,
    ) -> None:
        """Ends a request for which there is no instance: with an error, or within the answer if that has begun."""
        if not client.has_begun:
            await client.refuse(503, message)
            self._observer.refused(incoming, self._clock.now() - since, was_tried=bool(request.failed))
            return
        logger.warning("an answer has been cut: %s", message)
        assert stream is not None and stream.reason is not None, "only an interrupted stream is refused after its start"
        self._observer.migrated(stream.reason, is_continued=False)
        client.cut()
        self._observer.cut(incoming)

    def _after_failure(self, request: Routed, failure: _InstanceFailedError, stream: ReportedStream | None) -> Decision:
        url, now = failure.instance.url, self._clock.now()
        if stream is None or stream.interruption is not Reason.DRAINED:
            self._observer.failed(failure.instance)
        if request.phase is not Phase.ANSWERING:
            logger.warning("%s failed before the answer began: %s", url, failure)
            return self._dispatcher.failed(request, url, str(failure), now, num_lost=failure.num_lost)
        assert stream is not None, "only a reported stream can be continued"
        logger.warning("a stream goes on elsewhere after %d tokens: %s: %s", stream.num_tokens, url, failure)
        others = {each.url for each in self._dispatcher.pool if each.fingerprint not in (None, stream.fingerprint)}
        stream.restart()
        return self._dispatcher.interrupted(request, {url, *others}, f"{url}: {failure}", now)

    def migrate(self) -> None:
        """Ends the streams of instances that drain or have stopped sending, if another one can continue them."""
        if self._timeouts.migrate is None:
            return
        late, num_leaving = self._clock.now() - self._timeouts.migrate, 0
        for member in self._dispatcher.pool:
            if member.state not in (State.DRAINING, State.UNHEALTHY):
                continue
            is_draining = member.state is State.DRAINING
            for scope, attempt in list(self._scopes.get(member.url, {}).items()):
                if attempt is None or attempt.request.phase is not Phase.ANSWERING:
                    continue
                stream = attempt.stream
                if stream is None or stream.name is None:
                    continue
                is_due = stream.interruption is None and (is_draining or stream.last_part_at <= late)
                if is_due and self._can_continue(attempt.request, stream.fingerprint, member.url, num_leaving):
                    stream.interruption = Reason.DRAINED if is_draining else Reason.STOPPED
                    scope.reschedule(0)
                # It has no place elsewhere before its call has ended.
                num_leaving += stream.interruption is not None

    def _can_continue(self, request: Routed, fingerprint: str, url: str, num_leaving: int) -> bool:
        """Returns whether another instance is known to give the same tokens, and has room beside others that leave."""
        same = {each.url for each in self._dispatcher.pool if each.fingerprint == fingerprint and each.url != url}
        return self._dispatcher.may_continue_at(request, same, num_leaving)

    async def list_models(self, incoming: bodies.ClientRequest, client: Response, groups: Sequence[Member]) -> None:
        """Answers with the models of all groups, or with the first error of an instance."""
        headers, models = bodies.headers_for_prefill(incoming.headers), dict[str, Any]()
        for member in groups:
            call = Call("GET", member.url + incoming.target, headers)
            try:
                status, answered, content = await fetch(self._upstream, call, self._timeouts.query)
            except PeerError as error:
                logger.warning("%s does not list its models: %s", member.url, error)
                continue
            if status != 200:
                return await client.whole(status, bodies.answer_headers(answered), content)
            for name, fields in bodies.models_of(content):
                models.setdefault(name, fields)
        if not models:
            return await client.refuse(503, "no instance lists its models")
        return await client.send_json(200, {"object": "list", "data": list(models.values())})

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
            if not scope.expired():
                scope.reschedule(0)

    async def _wait(self, request: Routed) -> Plan | Refusal:
        future = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        if request.failed or self._dispatcher.next_poll <= self._clock.now():
            self.wake()  # its failure has freed capacity, or another request has made room for it in the queue
        return await future

    # ---- The two halves of a request ----

    async def _answer(self, attempt: _Attempt, client: Response) -> None:
        """Raises _InstanceFailedError if nothing has been written."""
        prefill, incoming = attempt.plan.prefill, attempt.incoming
        try:
            if prefill is None or incoming.completion is None:
                await self._stream(attempt, attempt.data, client, None)
            elif attempt.plan.num_shared:
                data = await self._share(attempt, prefill, incoming.completion)
                await self._stream(attempt, data, client, None)
            elif prefill.bootstrap:
                await self._run_both_halves(attempt, prefill, incoming.completion, client)
            else:
                params = await self._prefill(attempt, prefill, bodies.prefill_body(incoming.completion, _SERIAL))
                self._dispatcher.prefill_ends(attempt.request, self._clock.now(), is_done=True)
                assert attempt.body is not None
                data = attempt.data if params is None else bodies.with_params(attempt.data, attempt.body, params)
                await self._stream(attempt, data, client, None)
        except RejectedByPrefillError as error:
            if client.has_begun and prefill is not None:
                raise _InstanceFailedError(prefill, f"it has answered {error.status}") from None
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
        prefill_body = bodies.prefill_body(body, {"transfer_id": transfer_id})
        prefilling = asyncio.create_task(self._prefill(attempt, prefill, prefill_body))
        try:
            assert attempt.body is not None
            data = bodies.with_params(attempt.data, attempt.body, params)
            await self._stream(attempt, data, client, prefilling)
        finally:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)

    async def _share(self, attempt: _Attempt, sibling: Instance, body: dict[str, Any]) -> bytes:
        """Returns the request for the target, with the KV parameters of another instance that has the beginning of its
        prompt; without them if that one gives none. Raises _InstanceFailedError.
        """
        # One token more, because an instance always computes the last one.
        token_ids = attempt.request.token_ids[: attempt.plan.num_shared + 1]
        headers = bodies.headers_for_prefill(attempt.incoming.headers)
        call = Call("POST", sibling.url + bodies.COMPLETIONS[0], headers, bodies.shared_prefix_body(body, token_ids))
        status, _, content = await self._fetch(sibling, call, self._timeouts.query)
        self._dispatcher.prefill_ends(attempt.request, self._clock.now(), is_done=status == 200)
        params = (bodies.parse_object(content) or {}).get("kv_transfer_params") if status == 200 else None
        if params is None or attempt.body is None:
            logger.info("%s shares no KV: it has answered %d", sibling.url, status)
            return attempt.data
        return bodies.with_params(attempt.data, attempt.body, params)

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
        incoming, target, stream = attempt.incoming, attempt.plan.target, attempt.stream
        headers = incoming.headers
        if stream is not None:
            headers = (*headers, (STREAM_HEADER, stream.header if client.has_begun else ASK))
        call, status = Call(incoming.method, target.url + incoming.target, headers, data), 0
        try:
            async with asyncio.timeout(None) as scope:
                with self._watched(target, scope, attempt):
                    if prefilling is not None:
                        prefilling.add_done_callback(functools.partial(self._on_prefilled, attempt, scope))
                    with await self._upstream.ask(call) as answer:
                        status = answer.status
                        await self._pass_on(attempt, answer, client)
        except (PeerError, TimeoutError) as error:
            # A complete answer stays complete, whatever happens to its instance before the client has read it.
            if not client.is_complete:
                failure = (prefilling and _failure_of(prefilling)) or self._failure(target, error, stream)
                if attempt.request.phase is not Phase.ANSWERING:
                    raise failure from None
                if stream is not None and stream.name is not None:
                    stream.reason = stream.interruption or Reason.DIED
                    raise failure from None
                self._observer.failed(target)
                logger.warning("an answer has been cut: %s: %s", target.url, failure)
                client.cut()
                self._observer.cut(incoming)
                return
        self._observer.answered(incoming, target, status, self._clock.now() - attempt.since, attempt.tail.data)

    async def _pass_on(self, attempt: _Attempt, answer: InstanceConnection, client: Response) -> None:
        if answer.status in _RETRIED_STATUSES:
            raise _unavailable(answer.status, answer.headers)

        stream = self._begin_report(attempt, answer, client)

        def take(part: bytes, is_last: bool) -> bool:
            now = self._clock.now()
            is_first = attempt.request.phase is not Phase.ANSWERING
            self._dispatcher.answer_goes_on(attempt.request, now)
            if is_first and not client.has_begun:
                client.begin(answer.status, bodies.answer_headers(answer.headers))
            elif is_first and stream is not None and stream.reason is not None:
                self._observer.migrated(stream.reason, is_continued=True)
            if stream is not None:
                stream.last_part_at = now
                part = stream.feed(part, is_last)
            is_ready = client.write(part, is_last)
            attempt.tail.add(part)
            return is_ready

        lease = attempt.request.target
        assert lease is not None, "an answer without a place in its instance"
        while not lease.is_sent:
            is_last = await answer.pass_to(take)
            lease.is_sent = True
            await client.drained()
            lease.is_sent = is_last
            self._dispatcher.answer_goes_on(attempt.request, self._clock.now())

    def _begin_report(self, attempt: _Attempt, answer: InstanceConnection, client: Response) -> ReportedStream | None:
        """Returns the stream if the answer is reported. Raises PeerError for an answer that does not continue it."""
        stream, lease = attempt.stream, attempt.request.target
        if stream is None:
            return None
        assert lease is not None, "an answer without a place in its instance"
        name = name_of(bodies.header_of(answer.headers, STREAM_HEADER.lower()) or "")
        if not client.has_begun and answer.status == 200 and name is not None:
            stream.name = name
            answer.headers = tuple(each for each in answer.headers if each[0].lower() != STREAM_HEADER.lower())
            lease.member.fingerprint = stream.fingerprint
            return stream
        if not client.has_begun:
            stream.name = None
            return None
        if answer.status != 200 or name is None or stream.name != msgspec.structs.replace(name, num_events=0):
            lease.member.fingerprint = None
            raise PeerError(f"it does not continue the stream: it has answered {answer.status}")
        lease.member.fingerprint = stream.fingerprint
        return stream

    def _on_prefilled(self, attempt: _Attempt, scope: asyncio.Timeout, task: asyncio.Task[Any]) -> None:
        is_done = not task.cancelled() and task.exception() is None
        self._dispatcher.prefill_ends(attempt.request, self._clock.now(), is_done=is_done)
        is_waiting = scope in self._scopes.get(attempt.plan.target.url, ()) and attempt.request.phase is Phase.PLANNED
        if is_waiting and _failure_of(task) is not None:
            scope.reschedule(0)

    def _failure(
        self, instance: Instance, error: Exception, stream: ReportedStream | None = None
    ) -> _InstanceFailedError:
        if stream is not None and stream.interruption is not None:
            return _InstanceFailedError(instance, f"it has {stream.interruption}")
        if isinstance(error, TimeoutError):
            return _InstanceFailedError(instance, "it has died or was removed", num_lost=1)
        return _InstanceFailedError(instance, str(error), error.num_sent if isinstance(error, AnswerLostError) else 0)

    @contextlib.contextmanager
    def _watched(self, instance: Instance, scope: asyncio.Timeout, attempt: _Attempt | None = None) -> Generator[None]:
        """Ends the scope with TimeoutError if the instance dies meanwhile (`cut_off`), or if the answer is to be
        continued elsewhere (`migrate`).
        """
        scopes = self._scopes[instance.url]
        scopes[scope] = attempt
        try:
            yield
        finally:
            del scopes[scope]
            if not scopes:
                # Instances come and go, each with an address of its own.
                del self._scopes[instance.url]


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
