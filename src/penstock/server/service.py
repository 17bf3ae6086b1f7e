"""State shared by the routes: the engine, the model's names, authentication, and whether new requests are accepted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from penstock.config.server import ServerArgs
from penstock.frontend.async_llm import AsyncLLM
from penstock.messages.adapters import Adapter
from penstock.messages.sampling_params import SamplingParams
from penstock.metrics.prometheus import PrometheusMetrics
from penstock.metrics.rates import RecentRates
from penstock.server.errors import NotFoundError
from penstock.server.openai.reasoning import ReasoningFormat
from penstock.server.openai.responses_api.store import ResponseStore
from penstock.server.openai.tool_calls.tool_format import ToolCallFormat
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError, OverloadedError, RequestError
from penstock.utils.held_blocks import scoped_salt


@dataclass(slots=True)
class Service:
    """One engine behind one HTTP server.

    While `is_draining`, new requests are refused, permanently once the server `is_stopping`; `closing` ends endless
    streams.
    """

    llm: AsyncLLM
    args: ServerArgs
    model_names: tuple[str, ...]
    tool_format: ToolCallFormat | None
    reasoning: ReasoningFormat
    metrics: PrometheusMetrics
    rates: RecentRates
    clock: SystemClock
    started: int
    closing: asyncio.Event
    stored_responses: ResponseStore = field(default_factory=ResponseStore)
    is_draining: bool = False
    is_stopping: bool = False

    @property
    def default_sampling_params(self) -> SamplingParams:
        return self.llm.get_default_sampling_params()

    def admit(self, model: str | None) -> str:
        """Returns the name under which the model generates tokens.

        Raises what `check_model` does, RequestError for a pooling model, and OverloadedError when draining.
        """
        if self.llm.config.pooling is not None:
            raise RequestError(
                "this model generates no tokens: use /v1/embeddings, /classify, /score, /rerank or /pooling, or start "
                "the server with --runner generate"
            )
        return self._admit(model)

    def admit_pooling(self, model: str | None) -> str:
        """Returns the name under which the model pools. Raises the errors of `admit`, and for a generative model."""
        if self.llm.config.pooling is None:
            raise RequestError(
                "this model generates tokens and does not pool: use /v1/chat/completions or /v1/completions, or start "
                "the server with --runner pooling"
            )
        return self._admit(model)

    def _admit(self, model: str | None) -> str:
        if self.is_draining:
            raise OverloadedError("the server is draining or shutting down, and accepts no new requests")
        return self.check_model(model)

    def check_model(self, model: str | None) -> str:
        """Returns the model's name, by default the first one. Raises NotFoundError for an unknown model."""
        if model is not None and model not in self.model_names and self.llm.lora(model) is None:
            names = (*self.model_names, *self.llm.loras)
            raise NotFoundError(f"there is no model {model!r} here; there is {', '.join(names)}")
        return model or self.model_names[0]

    def adapter(self, model: str | None) -> Adapter | None:
        """Returns the adapter that a model's name stands for, None if it is the model's own. Raises NotFoundError."""
        name = self.check_model(model)
        return None if name in self.model_names else self.llm.lora(name)

    async def load_lora(self, name: str, path: str) -> None:
        """Serves an adapter as a model. Raises RequestError if it cannot be loaded under this name."""
        if name in self.model_names:
            raise RequestError(f"{name!r} is the model's own name: choose another one", "lora_name")
        try:
            await self.llm.load_lora(name, path)
        except ConfigError as error:
            raise RequestError(str(error), "lora_path") from None

    def cache_scope(self, request: Request, salt: str | None) -> str | None:
        """Returns the cache salt of a request: its own, scoped to its API key if there is one."""
        key: bytes | None = request.scope.get("api_key")
        return salt if key is None else scoped_salt(key, salt)


def service_of(request: Request) -> Service:
    """Returns the service of this request's app."""
    return request.app.state.service
