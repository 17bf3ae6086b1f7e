"""The messages between the front end and the engine core's process.

The front end first sends the `EngineConfig`; the core replies with `Ready` or `Failed`. From then on the front end
sends requests and aborts, and the core sends step reports. A call has a number, which its `Reply` repeats. Each side
interprets the end of the stream as the other's death.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.config.engine import EngineConfig, SchedulerConfig
from penstock.messages.engine_info import EngineInfo
from penstock.messages.requests import EngineRequest
from penstock.messages.stats import BlockMap, ExpertMap, StepReport
from penstock.utils.child_process import Failed
from penstock.utils.wire import Codec


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded. `limits` are the scheduler's limits, as the memory permits. With several engines, one such
    message comes from each, in the order of their data parallel ranks.
    """

    info: EngineInfo
    limits: SchedulerConfig
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: tuple[str, ...]


class Refusal(enum.StrEnum):
    """Why a request was refused: it is invalid, there is no room, or the engine failed on it."""

    INVALID = "invalid"
    OVERLOADED = "overloaded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was refused. `field` is the one that is invalid, if it is known."""

    request_id: str
    message: str
    reason: Refusal
    field: str | None = None


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    call: int
    reset_connector: bool = False
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class ForgetAdapter:
    call: int
    digest: bytes
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class CheckIntegrity:
    call: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class GetBlockMap:
    call: int
    max_cells: int
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class GetExpertMap:
    call: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call; `error` is set if it failed."""

    call: int
    value: bool | BlockMap | ExpertMap = True
    error: str | None = None


CODEC = Codec(
    EngineConfig,
    EngineRequest,
    AbortRequests,
    ResetPrefixCache,
    ForgetAdapter,
    CheckIntegrity,
    GetBlockMap,
    GetExpertMap,
    Ready,
    Failed,
    Refused,
    StepReport,
    Reply,
)
