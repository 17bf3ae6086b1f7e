"""A connector that needs KV memory which other processes can map."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from penstock import LLM, SamplingParams
from penstock.kv_transfer.factory import ConnectorContext
from penstock.kv_transfer.multi import MultiWorker
from penstock.kv_transfer.null import NullSchedulerConnector, NullWorkerConnector
from penstock.kv_transfer.view import KVCacheView
from penstock.messages.kv_transfer import ConnectorSetup, ShardId
from penstock.utils.errors import ConfigError
from penstock.worker.parts import make_parts

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
VIEWS: list[KVCacheView] = []


class SharingConnector:
    """A connector that moves nothing; its option `share` tells whether its workers need shared memory."""

    @staticmethod
    def make_scheduler_connector(context: ConnectorContext) -> NullSchedulerConnector:
        return NullSchedulerConnector()

    @staticmethod
    def make_worker_connector(context: ConnectorContext, shard: ShardId, setup: ConnectorSetup | None) -> SharingWorker:
        return SharingWorker(bool(context.config.kv_connector_extra_config["share"]))


class SharingWorker(NullWorkerConnector):
    def __init__(self, share: bool) -> None:
        self.needs_shared_memory = share

    def register_kv_caches(self, view: KVCacheView) -> None:
        VIEWS.append(view)


def make(share: bool, **arguments: Any) -> LLM:
    transfer = {
        "kv_connector": "SharingConnector",
        "kv_connector_module_path": "tests.integration.test_shared_kv_memory",
        "kv_connector_extra_config": {"share": share},
    }
    VIEWS.clear()
    return LLM(max_model_len=200, kv_transfer_config=transfer, **arguments)


@pytest.mark.parametrize("speculative", [None, {"method": "mtp", "num_speculative_tokens": 2}], ids=["plain", "mtp"])
def test_another_process_maps_the_cache_and_finds_the_blocks_in_it(speculative: dict[str, Any] | None) -> None:
    tokens: list[list[int]] = []
    for share in (False, True):
        llm = make(share, speculative_config=speculative)
        (output,) = llm.generate([[5] * 40], GREEDY, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
        (view,) = VIEWS
        assert all((region.path is not None) == share for region in view.layout.regions)
    assert tokens[0] == tokens[1]
    regions = {region.name: region for region in view.layout.regions}
    for group in {layer.group for layer in view.layout.layers}:
        for layer, part in zip(view.layout.layers_of(group), view.block_parts(group, 1), strict=True):
            region, start = regions[layer.region], layer.offset + layer.block_bytes
            code = (
                "from penstock.utils.shared_memory import attach_memory; import sys;"
                f"view = attach_memory({region.path!r}, {region.num_bytes}).view;"
                f"sys.stdout.buffer.write(view[{start}:{start + layer.block_bytes}])"
            )
            found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
            assert any(found)
            assert found == bytes(part)


def test_shared_memory_that_does_not_fit_names_the_argument() -> None:
    with pytest.raises(ConfigError, match=r"lower num_gpu_blocks_override to \d+ "):
        make(share=True, num_gpu_blocks_override=1 << 46)


def test_a_gpu_refuses_shared_memory_with_advice() -> None:
    with pytest.raises(ConfigError, match="choose another transport"):
        make_parts(torch.device("meta")).allocate_shared(1)


def test_memory_is_shared_if_one_of_several_connectors_needs_it() -> None:
    for needs, expected in (((False, False), False), ((False, True), True)):
        parts = {str(number): SharingWorker(share) for number, share in enumerate(needs)}
        assert MultiWorker(parts).needs_shared_memory is expected
