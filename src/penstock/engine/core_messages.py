"""What the front end and the engine core's process say to each other.

The front end begins with its `EngineArgs`; the core answers `Ready` or `Failed`. From then on requests and aborts go
one way and step reports the other. A call carries a number, which its `Reply` brings back. Either side takes the end of
the stream for the other's death.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.engine import EngineArgs, SchedulerConfig
from penstock.messages.engine_info import EngineInfo
from penstock.messages.requests import EngineRequest
from penstock.messages.stats import BlockMap, StepReport
from penstock.utils.wire import Codec


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `limits` are the scheduler's as the memory allows them."""

    info: EngineInfo
    limits: SchedulerConfig


@dataclass(frozen=True, slots=True)
class Failed:
    """The core ends after this: its configuration cannot be (`is_config`), or it broke."""

    message: str
    is_config: bool


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken, because of itself (`field`) or because there is no room (`is_overload`)."""

    request_id: str
    message: str
    field: str | None
    is_overload: bool


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    call: int
    reset_connector: bool = False


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    call: int


@dataclass(frozen=True, slots=True)
class GetBlockMap:
    call: int
    max_cells: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call; `error` is set when it went wrong."""

    call: int
    value: bool | BlockMap = True
    error: str | None = None


CODEC = Codec(
    EngineArgs,
    EngineRequest,
    AbortRequests,
    ResetPrefixCache,
    CheckIntegrity,
    GetBlockMap,
    Ready,
    Failed,
    Refused,
    StepReport,
    Reply,
)
