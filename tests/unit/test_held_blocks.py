"""Blocks that a connector reads after the end of their request are held under a name that comes only once."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.engine import SchedulerConfig
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.remote_kv import KVTransfer
from penstock.core.scheduler import Scheduler
from penstock.kv_transfer.connector import ConnectorEvent, FinishAction, Released, RequestView
from penstock.kv_transfer.null import NullSchedulerConnector
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.kv_transfer import KVConnectorOutput
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.scheduler_output import BlockIds


class HoldingConnector(NullSchedulerConnector):
    """Reads the blocks of every request for as long as the test wants."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self.to_release: list[str] = []

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> FinishAction:
        self.held.append(request.hold_id)
        return FinishAction.HOLD

    def update_connector_output(self, output: KVConnectorOutput) -> Sequence[ConnectorEvent]:
        released, self.to_release = self.to_release, []
        return [Released(hold_id) for hold_id in released]


def test_two_lives_of_a_request_id_are_held_apart() -> None:
    connector = HoldingConnector()
    cache = KVCacheConfig(10, 4, (KVCacheGroup(("layer.0",), KVCacheSpec(1, 1, "float32")),))
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)
    kv = KVCacheManager(cache, enable_prefix_caching=True)
    scheduler = Scheduler(config, kv, None, KVTransfer(connector))

    def run_and_abort(first_token: int) -> None:
        prompt = tuple(range(first_token, first_token + 4))
        scheduler.add_request(
            EngineRequest(
                request_id="again", prompt_token_ids=prompt, sampling_params=SamplingParams(), max_tokens=4, seed=0
            )
        )
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids={"again": (1,)}))
        scheduler.abort_requests(["again"])

    def step() -> None:
        scheduler.update_from_output(scheduler.schedule(), ModelRunnerOutput())

    run_and_abort(0)
    run_and_abort(100)
    step()
    both = kv.pool.num_usable - kv.pool.num_available
    assert len(set(connector.held)) == 2
    connector.to_release = [connector.held[0], connector.held[0], "nobody/hold-7"]
    step()
    assert kv.pool.num_usable - kv.pool.num_available == both // 2, "one is read no more, the other still is"
    connector.to_release = [connector.held[1]]
    step()
    assert kv.pool.num_available == kv.pool.num_usable
    scheduler.check_integrity()
