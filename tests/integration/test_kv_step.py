"""A connector's calls in every step, and their order: with tokens, without, with a drafter, with an exception."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.runner.model_runner import ModelRunner
from penstock.runner.passes import EagerPasses
from penstock.runner.step_end import SamplingEnd
from penstock.utils.errors import EngineDeadError
from tests.integration.recording_connector import CALLS

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def make(sync: bool = False, **engine_args: Any) -> LLM:
    transfer = {
        "kv_connector": "RecordingConnector",
        "kv_connector_module_path": "tests.integration.recording_connector",
        "kv_connector_extra_config": {"sync": sync},
    }
    CALLS.clear()
    return LLM(max_model_len=200, kv_transfer_config=transfer, **engine_args)


def steps() -> Iterator[list[tuple[str, object]]]:
    """Yields the worker's calls of each step."""
    worker = [call for call in CALLS if call[0] != "build"]
    while worker:
        end = [name for name, _ in worker].index("end") + 1
        yield worker[:end]
        worker = worker[end:]


@pytest.mark.spread(1)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("speculative", [None, MTP], ids=["plain", "mtp"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_connector_is_called_in_every_step(sync: bool, speculative: dict[str, Any] | None, overlap: bool) -> None:
    llm = make(sync, speculative_config=speculative, async_scheduling=overlap, max_num_batched_tokens=16)
    assert not CALLS, "the warm-up must not call a connector"
    llm.generate([[5] * 40, [6] * 3], GREEDY, use_tqdm=False)
    llm.generate([[7] * 3], GREEDY, use_tqdm=False)
    seen = list(steps())
    assert [call for call in CALLS if call[0] == "build"] == [("build", n) for n in range(1, len(seen) + 1)]
    layers = {name for step in seen for kind, name in step if kind.startswith("layer")}
    assert len(layers) == 6
    for number, step in enumerate(seen, start=1):
        names = [name for name, _ in step if not name.startswith("layer")]
        assert step[0] == ("begin", number)
        assert names == ["begin", "load", "finished", "save", "end"]
        hooks = [call for call in step if call[0].startswith("layer")]
        for (kind, name), (next_kind, next_name) in pairs(hooks):
            assert (kind, next_kind) == ("layer load", "layer save")
            assert name == next_name
        assert len(hooks) == 12
        assert (step.index(("load", None)) < step.index(hooks[0])) == sync
    finished = [ids for step in seen for kind, ids in step if kind == "finished" and ids]
    assert sorted(name for ids in finished for name in ids)[:2] == ["0", "1"]
    llm.shutdown()


def pairs(hooks: list[tuple[str, object]]) -> list[tuple[tuple[str, object], tuple[str, object]]]:
    return list(zip(hooks[::2], hooks[1::2], strict=True))


def test_saves_are_finalised_after_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's content at `wait_for_save` must not change before the next step begins."""
    propose = EagerPasses.propose

    def recorded(self: EagerPasses, *args: Any) -> None:
        propose(self, *args)
        CALLS.append(("proposed", None))

    monkeypatch.setattr(EagerPasses, "propose", recorded)
    llm = make(speculative_config=MTP, async_scheduling=False)
    CALLS.clear()
    llm.generate([[5] * 20], GREEDY, use_tqdm=False)
    assert ("proposed", None) in CALLS
    for step in steps():
        names = [name for name, _ in step]
        assert names.index("finished") < names.index("save")
        if "proposed" in names:
            assert names.index("finished") < names.index("proposed") < names.index("save")
    llm.shutdown()


@pytest.mark.parametrize(("part", "method"), [(ModelRunner, "_forward"), (SamplingEnd, "finish")])
def test_a_failing_step_is_ended(monkeypatch: pytest.MonkeyPatch, part: type, method: str) -> None:
    llm = make(async_scheduling=False)

    def fail(*args: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(part, method, fail)
    with pytest.raises(EngineDeadError, match="planted"):
        llm.generate([[5] * 20], GREEDY, use_tqdm=False)
    assert [name for name, _ in CALLS][-1] == "end"
    assert sum(name == "begin" for name, _ in CALLS) == sum(name == "end" for name, _ in CALLS) == 1
    llm.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_connector_without_metadata_is_driven_in_every_step(overlap: bool) -> None:
    """This includes steps without tokens: its load ends, and so does the save in progress at the shutdown."""
    transfer = {
        "kv_connector": "DrivenConnector",
        "kv_connector_module_path": "tests.integration.driven_connector",
    }
    llm = LLM(max_model_len=200, kv_transfer_config=transfer, async_scheduling=overlap)
    (output,) = llm.generate([[5] * 40], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 6
    stats = llm.stats().remote_kv
    assert (stats.num_loads, stats.num_failed, stats.num_timeouts) == (1, 1, 0), "the load ended before its deadline"
    started = time.perf_counter()
    llm.shutdown()
    assert not llm._core.has_transfers
    assert time.perf_counter() - started < 5, "it waited for a save that was never driven"
