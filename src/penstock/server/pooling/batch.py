"""The inputs of one HTTP request in a pooling engine, and the common parts of their responses."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from penstock.frontend.input_processor import Prompt
from penstock.messages.pooling_outputs import PoolingOutput, PoolingRequestOutput
from penstock.messages.pooling_params import PoolingParams
from penstock.server.errors import JSONResponse
from penstock.server.openai.generation import RequestNames, data_parallel_rank, make_usage, name_request, prompt_fields
from penstock.server.openai.protocol import Usage
from penstock.server.pooling.protocol import PoolingBody
from penstock.server.service import Service, service_of
from penstock.server.sse import REQUEST_ID_HEADER, unless_disconnected
from penstock.utils.errors import RequestError

_T = TypeVar("_T")
Encoded = list[PoolingRequestOutput[PoolingOutput]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One HTTP request. `field` is the name of an input in its errors."""

    service: Service
    request: Request
    body: PoolingBody
    model: str
    names: RequestNames
    field: str

    def params(self, *names: str) -> PoolingParams:
        """Returns the pooling parameters that all requests have, and those in `names`. Raises RequestError."""
        fields = ("prompt_name", "truncate_prompt_tokens", *names)
        return PoolingParams(**{name: getattr(self.body, name) for name in fields})

    async def encode(self, prompts: Sequence[tuple[Prompt, PoolingParams]]) -> Encoded:
        """Returns the engine's results, in the order of the prompts. Raises RequestError if one is refused."""
        salt = self.service.cache_scope(self.request, self.body.cache_salt)
        salted = [({**prompt_fields(prompt), "cache_salt": salt}, params) for prompt, params in prompts]
        work = self.service.llm.encode_all(
            salted,
            self.names.engine_id,
            priority=self.body.priority or 0,
            trace=self.request.headers.get("traceparent"),
            data_parallel_rank=data_parallel_rank(self.request),
        )
        return await self.wait(work)

    async def wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Returns its result, unless the client disconnects; errors about a prompt name the input."""
        try:
            return await unless_disconnected(self.request, work)
        except RequestError as error:
            if error.field not in ("prompt", "prompt_token_ids"):
                raise
            raise RequestError(str(error), self.field, error.code) from None

    def usage(self, encoded: Encoded) -> Usage:
        """Returns the tokens that the engine has processed."""
        num_prompt = sum(len(output.prompt_token_ids) for output in encoded)
        return make_usage(num_prompt, 0, sum(output.num_cached_tokens for output in encoded))

    def answer(self, fields: dict[str, Any]) -> Response:
        content = {"id": self.names.answer_id, "model": self.model, **fields}
        return JSONResponse(content, headers={REQUEST_ID_HEADER: self.names.header})

    def list_answer(self, data: list[dict[str, Any]], encoded: Encoded) -> Response:
        """Returns a response in OpenAI's format."""
        created = int(self.service.clock.wall())
        return self.answer({"object": "list", "created": created, "data": data, "usage": self.usage(encoded)})


def begin(request: Request, body: PoolingBody, kind: str, field: str) -> Batch:
    """Raises RequestError if the model does not pool, and the errors of `Service.admit_pooling`."""
    service = service_of(request)
    model = service.admit_pooling(body.model)
    return Batch(service, request, body, model, name_request(request, body, kind), field)
