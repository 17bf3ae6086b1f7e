"""Counts the outcomes of requests, for metrics and the status page."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

from penstock.metrics.router import InstanceView, RouterMetrics, route_of
from penstock.router.bodies import ClientRequest
from penstock.router.dispatcher import Computing, Dispatcher, Plan
from penstock.router.health import HealthChecks
from penstock.router.instances import Instance, Role, State
from penstock.router.kv_subscriptions import KVSubscriptions
from penstock.router.reported_stream import Reason
from penstock.utils.clock import Clock

_REFUSED = 503
# Quotation marks inside JSON strings are escaped, so generated text cannot match.
_USAGE = re.compile(rb'[{,]\s*"usage"\s*:\s*(?=\{)')


class RouterObserver:
    def __init__(self, dispatcher: Dispatcher, checks: HealthChecks, views: KVSubscriptions, clock: Clock) -> None:
        self._clock = clock
        self._dispatcher = dispatcher
        self._checks = checks
        self._views = views
        self._metrics = RouterMetrics()
        self.num_prompts = Counter[Computing]()
        self._hits: dict[str, tuple[int, int]] = {}

    # ---- Calls from `Exchanges` ----

    def arrived(self, incoming: ClientRequest) -> None:
        self._metrics.count("vllm_router_requests", 1, route_of(incoming.path))

    def planned(self, incoming: ClientRequest, plan: Plan, *, is_retry: bool) -> None:
        count = self._metrics.count
        route = route_of(incoming.path)
        if is_retry:
            count("vllm_router_retries", 1, route)
        count("vllm_router_processed_requests", 1, plan.target.url)
        if plan.target.role is Role.DECODE:
            count("vllm_router_pd_decode_requests", 1, plan.target.url)
        count("penstock_router_prompts", 1, plan.computing.value)
        self.num_prompts[plan.computing] += 1
        computing = plan.target
        if plan.prefill is not None and plan.computing is Computing.PREFILL:
            computing = plan.prefill
            count("vllm_router_pd_requests", 1, route)
            count("vllm_router_pd_prefill_requests", 1, computing.url)
        if plan.computing is Computing.FALLBACK:
            count("penstock_router_self_prefills")
        if plan.num_cached:
            count("penstock_router_expected_cached_tokens", plan.num_cached, computing.url)

    def failed(self, instance: Instance) -> None:
        """Called when an instance has failed on a request, before the answer's first byte or later."""
        if instance.role is not Role.SERVE:
            half = "prefill" if instance.role is Role.PREFILL else "decode"
            self._metrics.count(f"vllm_router_pd_{half}_errors", 1, instance.url)
        self._checks.check_soon(instance.url)

    def refused(self, incoming: ClientRequest, seconds: float, *, was_tried: bool) -> None:
        """Called when no instance could answer; `was_tried`: at least one request was sent."""
        if was_tried:
            self._metrics.count("vllm_router_retries_exhausted", 1, route_of(incoming.path))
        self._metrics.on_answer(incoming.path, _REFUSED, seconds)
        self._metrics.on_error(incoming.path, "no_instance")

    def answered(self, incoming: ClientRequest, instance: Instance, status: int, seconds: float, tail: bytes) -> None:
        """`tail` is the end of the answer's body, including its usage if it has one."""
        self._metrics.on_answer(incoming.path, status, seconds)
        usage = usage_of(tail)
        if usage is not None:
            self._metrics.count("penstock_router_prompt_tokens", usage.num_prompt, instance.url)
            self._metrics.count("penstock_router_cached_tokens", usage.num_cached, instance.url)
            self._metrics.count("penstock_router_generation_tokens", usage.num_output, instance.url)
            prompt, cached = self._hits.get(instance.url, (0, 0))
            self._hits[instance.url] = (prompt + usage.num_prompt, cached + usage.num_cached)

    def hit_rate(self, url: str) -> float | None:
        """Returns the share of an instance's prompt tokens that were cached or loaded, by the usage of its answers."""
        prompt, cached = self._hits.get(url, (0, 0))
        return cached / prompt if prompt else None

    def migrated(self, reason: Reason, *, is_continued: bool) -> None:
        """Called when another instance has continued a stream, or when none could."""
        self._metrics.count("penstock_router_migrations", 1, reason.value, "continued" if is_continued else "failed")

    def cut(self, incoming: ClientRequest) -> None:
        self._metrics.on_error(incoming.path, "cut")

    def left(self, incoming: ClientRequest) -> None:
        """Called when the client has disconnected before its answer was complete."""
        self._metrics.on_error(incoming.path, "client_left")

    # ---- Metrics and page ----

    def instances(self) -> list[InstanceView]:
        num_blocks, now = self._views.num_blocks, self._clock.now()
        return [
            InstanceView(
                member.url,
                member.instance.role,
                member.state,
                member.state is State.READY,
                member.num_outstanding,
                member.load,
                num_blocks.get(member.url),
                *(one.line() if one.is_known(now) else None for one in (member.prompts, member.loads, member.shares)),
            )
            for member in self._dispatcher.pool
        ]

    def render(self, accept: str) -> tuple[bytes, str]:
        dispatcher = self._dispatcher
        return self._metrics.render(accept, self.instances(), dispatcher.num_queued, dispatcher.costs.estimates)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts tokens. `num_cached` of the prompt's tokens were found in the instance's prefix cache, or were loaded."""

    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0


def usage_of(tail: bytes) -> Usage | None:
    """Returns the last usage in the end of a body, streamed or whole; None if it has none.

    The instance that answers counts the whole prompt, so of two halves only its usage is read.
    """
    starts = list(_USAGE.finditer(tail)) if b'"usage"' in tail else ()
    if not starts:
        return None
    try:
        found, _ = json.JSONDecoder().raw_decode(tail[starts[-1].end() :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    details = found.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(found.get("prompt_tokens")), _count(found.get("completion_tokens")), _count(cached))


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 63 else 0
