"""Penstock: an LLM serving engine whose KV cache moves, and whose tokens do not change when it does."""

from __future__ import annotations

from penstock.config.env import set_torch_defaults

# Type checkers know this name; to import it takes longer than the rest of this file, and Ctrl-C may come meanwhile.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from penstock.frontend.adapters import LoRARequest
    from penstock.frontend.async_llm import AsyncLLM
    from penstock.frontend.llm import LLM
    from penstock.messages.outputs import CompletionOutput, RequestOutput
    from penstock.messages.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from penstock.messages.pooling_params import PoolingParams
    from penstock.messages.sampling_params import SamplingParams
    from penstock.messages.structured_outputs import StructuredOutputsParams
    from penstock.utils.errors import ConfigError, EngineDeadError, OverloadedError, PenstockError, RequestError

set_torch_defaults()

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "LoRARequest",
    "OverloadedError",
    "PenstockError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]

# Imported on first use, so that the parts without torch can be imported without it.
_HOMES = {
    "LLM": "penstock.frontend.llm",
    "LoRARequest": "penstock.frontend.adapters",
    "AsyncLLM": "penstock.frontend.async_llm",
    "CompletionOutput": "penstock.messages.outputs",
    "ClassificationRequestOutput": "penstock.messages.pooling_outputs",
    "EmbeddingRequestOutput": "penstock.messages.pooling_outputs",
    "PoolingParams": "penstock.messages.pooling_params",
    "PoolingRequestOutput": "penstock.messages.pooling_outputs",
    "RequestOutput": "penstock.messages.outputs",
    "ScoringRequestOutput": "penstock.messages.pooling_outputs",
    "SamplingParams": "penstock.messages.sampling_params",
    "StructuredOutputsParams": "penstock.messages.structured_outputs",
    "ConfigError": "penstock.utils.errors",
    "EngineDeadError": "penstock.utils.errors",
    "OverloadedError": "penstock.utils.errors",
    "PenstockError": "penstock.utils.errors",
    "RequestError": "penstock.utils.errors",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
