"""The parameters that a connector returns for the next engine when a request ends, and the fields that it can read."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.config.kv_transfer import parse_kv_transfer_config
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import KVTransfer
from penstock.core.scheduler import Scheduler
from penstock.kv_transfer.connector import FREED, FinishAction, FinishResult, RequestView, SchedulerConnector
from penstock.kv_transfer.factory import ConnectorContext, make_scheduler_connector
from penstock.kv_transfer.multi import MultiScheduler
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_transfer import TransferId
from penstock.messages.outputs import EngineOutput, FinishReason
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import BlockIds
from penstock.utils.errors import ConfigError

CONFIG = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)
CACHE = KVCacheConfig(10, 4, (KVCacheGroup(("layer.0",), KVCacheSpec.keys_and_values(1, 1, "float32")),))


class ReportingConnector(NullSchedulerConnector):
    """Returns the fields of the request that it has read, under its own key."""

    def __init__(self, key: str = "seen") -> None:
        self._key = key

    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        seen: list[Any] = [request.request_id, reason.value, list(request.prompt_token_ids), request.kv_scope.decode()]
        return FinishResult(FinishAction.FREE, {self._key: seen, "of": {self._key: [[1, 2], None]}})


def make_scheduler(connector: SchedulerConnector) -> Scheduler:
    return Scheduler(CONFIG, KVCacheManager(CACHE, enable_prefix_caching=True), None, KVTransfer(connector))


def add(scheduler: Scheduler, request_id: str, max_tokens: int = 2) -> None:
    request = EngineRequest(
        request_id=request_id,
        prompt_token_ids=(5, 6, 7),
        sampling_params=SamplingParams(),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset({9}),
        cache_salt="salt",
    )
    scheduler.add_request(request)


def step(scheduler: Scheduler, **result: Any) -> list[EngineOutput]:
    return scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput(**result))


def test_the_last_output_carries_the_parameters_of_the_connector() -> None:
    scheduler = make_scheduler(ReportingConnector())
    add(scheduler, "r")
    (first,) = step(scheduler, sampled_token_ids={"r": (1,)})
    assert (first.finish_reason, first.kv_transfer_params) == (None, None)
    (last,) = step(scheduler, sampled_token_ids={"r": (2,)})
    assert last.finish_reason is FinishReason.LENGTH
    assert last.kv_transfer_params == {
        "seen": ["r", "length", [5, 6, 7], "salt"],
        "of": {"seen": [[1, 2], None]},
    }


def test_a_connector_knows_how_a_request_ended() -> None:
    scheduler = make_scheduler(ReportingConnector())
    for name in ("aborted", "stopped", "failed"):
        add(scheduler, name)
    outputs = scheduler.abort_requests(["aborted"])
    outputs += step(scheduler, sampled_token_ids={"stopped": (9,)}, failed_requests={"failed": "broken"})
    ends = {output.request_id: (output.kv_transfer_params or {})["seen"][1] for output in outputs}
    assert ends == {"aborted": "abort", "stopped": "stop", "failed": "error"}


def test_an_engine_without_a_connector_returns_no_parameters() -> None:
    scheduler = make_scheduler(NullSchedulerConnector())
    add(scheduler, "r", max_tokens=1)
    (last,) = step(scheduler, sampled_token_ids={"r": (1,)})
    assert last.finish_reason is FinishReason.LENGTH
    assert last.kv_transfer_params is None


class HoldingConnector(ReportingConnector):
    def request_finished(self, request: RequestView, block_ids: BlockIds, reason: FinishReason) -> FinishResult:
        return FinishResult(FinishAction.HOLD, {self._key: 1})


def test_parameters_of_several_connectors_are_merged() -> None:
    request: Any = type("View", (), {"request_id": "r", "hold_id": TransferId("r", 0)})
    multi = MultiScheduler(
        {"one": HoldingConnector("a"), "silent": NullSchedulerConnector(), "two": HoldingConnector("b")}
    )
    result = multi.request_finished(request, ((1,),), FinishReason.STOP)
    assert result == FinishResult(FinishAction.HOLD, {"a": 1, "b": 1})
    silent = MultiScheduler({"silent": NullSchedulerConnector()})
    assert silent.request_finished(request, (), FinishReason.STOP) == FREED
    twins = MultiScheduler({"one": HoldingConnector("a"), "two": HoldingConnector("a")})
    with pytest.raises(AssertionError, match=r"two and another child both answer \['a'\]"):
        twins.request_finished(request, ((1,),), FinishReason.STOP)


# ---- Configuration ----


def test_the_listening_address_is_checked() -> None:
    config = parse_kv_transfer_config({"kv_connector": "X"})
    assert (config.kv_ip, config.kv_port) == ("127.0.0.1", 0)
    for ip in ("10.0.0.7", "::1", "prefill-0.penstock.svc", "prefill_1"):
        assert parse_kv_transfer_config({"kv_connector": "X", "kv_ip": ip, "kv_port": 65535}).kv_ip == ip
    for ip in ("", "10.0.0.300", "a b", "-x", "http://host", 7, "x" * 254):
        with pytest.raises(ConfigError, match="kv_ip in kv_transfer_config must be an IP address or a host name"):
            parse_kv_transfer_config({"kv_connector": "X", "kv_ip": ip})
    for port in (-1, 65536, "80", True):
        with pytest.raises(ConfigError, match="kv_port in kv_transfer_config must be a port"):
            parse_kv_transfer_config({"kv_connector": "X", "kv_port": port})


def test_keys_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    given = {"kv_connector": "OffloadingConnector", "kv_rank": 0, "kv_buffer_size": 1e9, "kv_buffer_device": None}
    config = parse_kv_transfer_config(given)
    assert config.keys_without_effect == ("kv_rank", "kv_buffer_size")
    context = ConnectorContext(config=config, cache=CACHE, fingerprint=b"f", shards=frozenset({(0, 0)}))
    with caplog.at_level("INFO", "penstock"):
        make_scheduler_connector(context)
    assert [record.getMessage() for record in caplog.records] == [
        "kv_transfer_config: kv_rank, kv_buffer_size have no effect here"
    ]
    with pytest.raises(ConfigError, match="unknown key 'keys_without_effect'"):
        parse_kv_transfer_config({"kv_connector": "X", "keys_without_effect": ["kv_rank"]})
