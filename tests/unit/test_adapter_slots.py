"""The slots of adapters: who has one, who waits, and whose is taken."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.config.engine import SchedulerConfig
from penstock.config.lora import LoraConfig
from penstock.core.adapter_slots import AdapterSlots
from penstock.core.kv_cache_manager import KVCacheManager
from penstock.core.request import Request, RequestStatus
from penstock.core.scheduler import Scheduler
from penstock.core.structured_output import StructuredOutputs
from penstock.messages.adapters import NO_SLOT, Adapter, AdapterLoad
from penstock.messages.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.messages.requests import EngineRequest
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.messages.structured_outputs import GrammarSpec

ADAPTERS = {name: Adapter(name, name.encode() * 32, f"/{name}") for name in "abcd"}


class World:
    """Requests that wait and run, with checks after every change."""

    def __init__(self, num_slots: int, max_running: int) -> None:
        self.slots = AdapterSlots(LoraConfig(num_slots=num_slots, max_running=max_running, max_rank=8))
        self.requests: list[Request] = []
        self.loads: list[AdapterLoad] = []

    def add(self, name: str) -> Request:
        data = EngineRequest(
            request_id=str(len(self.requests)),
            prompt_token_ids=(1,),
            sampling_params=SamplingParams(),
            max_tokens=2,
            seed=0,
            adapter=ADAPTERS.get(name),
        )
        request = Request(data, len(self.requests), 16)
        self.slots.add(request)
        self.requests.append(request)
        self.slots.check_integrity(self.requests)
        return request

    def run(self, request: Request) -> tuple[int, str]:
        """Returns the slot, and the name of the adapter that is loaded for it."""
        self.loads.clear()
        slot = self.slots.acquire(request, self.loads)
        request.set_status(RequestStatus.RUNNING)
        self.slots.check_integrity(self.requests)
        assert all(load.slot == slot for load in self.loads)
        return slot, "".join(load.adapter.name for load in self.loads)

    def end(self, request: Request) -> None:
        self.slots.release(request)
        self.slots.remove(request)
        request.set_status(RequestStatus.FINISHED)
        self.requests.remove(request)
        self.slots.check_integrity(self.requests)


def test_the_slot_unused_for_the_longest_time_is_taken() -> None:
    world = World(num_slots=3, max_running=3)
    for slot, name in enumerate("abc"):
        request = world.add(name)
        assert world.run(request) == (slot, name)
        world.end(request)
    again = world.add("a")
    assert world.run(again) == (0, "")  # still there, and now used more recently than b
    world.end(again)
    assert world.run(world.add("d")) == (1, "d")
    assert world.run(world.add("b")) == (2, "b")


def test_a_running_adapter_keeps_its_slot() -> None:
    world = World(num_slots=2, max_running=2)
    oldest = world.add("a")
    assert world.run(oldest) == (0, "a")
    other = world.add("b")
    assert world.run(other) == (1, "b")
    world.end(other)
    assert world.run(world.add("c")) == (1, "c")
    assert world.run(world.add("a")) == (0, "")
    world.end(oldest)
    assert not world.slots.has_room(world.add("b"), object())  # the second one with "a" still runs


def test_a_request_that_waits_is_not_overtaken_by_others_with_adapters() -> None:
    world = World(num_slots=2, max_running=1)
    running = world.add("a")
    world.run(running)
    plan = object()
    assert world.slots.has_room(world.add("a"), plan)
    assert not world.slots.has_room(world.add("b"), plan)
    assert not world.slots.has_room(world.add("a"), plan)
    assert world.slots.has_room(world.add(""), plan)
    # In the next plan the order decides again.
    assert world.slots.has_room(world.add("a"), object())
    world.end(running)
    assert world.slots.has_room(world.add("b"), object())


def test_without_an_adapter_nothing_is_needed() -> None:
    slots = AdapterSlots(None)
    world = World(1, 1)
    request = world.add("")
    loads: list[AdapterLoad] = []
    assert slots.has_room(request, object())
    assert slots.acquire(request, loads) == NO_SLOT
    slots.release(request)
    assert loads == []


def test_an_adapter_is_forgotten_when_no_request_has_it() -> None:
    world = World(num_slots=1, max_running=1)
    digest = ADAPTERS["a"].digest
    waiting = world.add("a")
    assert not world.slots.forget(digest)
    world.run(waiting)
    assert not world.slots.forget(digest)
    world.end(waiting)
    assert world.slots.forget(digest)
    world.slots.check_integrity([])
    assert world.slots.forget(digest)  # nothing is left of it
    assert world.run(world.add("a")) == (0, "a")  # it is read again


def test_lost_slots_are_noticed() -> None:
    world = World(num_slots=2, max_running=1)
    world.run(world.add("a"))
    world.slots._free.clear()
    with pytest.raises(AssertionError, match="a slot is lost"):
        world.slots.check_integrity(world.requests)


def test_a_slot_that_becomes_free_is_given_in_the_next_step_that_is_made() -> None:
    """A plan of nothing is dropped while a step is in flight: it has the number of the plan that follows."""
    cache = KVCacheConfig(24, 4, (KVCacheGroup(("layer.0",), KVCacheSpec.keys_and_values(1, 1, "float32")),))
    config = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_model_len=20, max_num_in_flight=2)
    slots = AdapterSlots(LoraConfig(num_slots=1, max_running=1, max_rank=8))
    scheduler = Scheduler(config, KVCacheManager(cache, enable_prefix_caching=False), adapters=slots)
    for name in "ab":
        data = EngineRequest(
            request_id=name,
            prompt_token_ids=(1, 2, 3),
            sampling_params=SamplingParams(max_tokens=1),
            max_tokens=1,
            seed=0,
            adapter=ADAPTERS[name],
        )
        scheduler.add_request(data)
    first = scheduler.schedule()
    assert first is not None
    assert set(first.num_scheduled_tokens) == {"a"}
    assert scheduler.schedule() is None
    scheduler.update_from_output(first, ModelRunnerOutput(sampled_token_ids={"a": (1,)}))
    second = scheduler.schedule()
    assert second is not None
    assert set(second.num_scheduled_tokens) == {"b"}


def test_a_request_that_cannot_run_yet_does_not_keep_a_running_adapter_from_others() -> None:
    """Its grammar is being compiled, so that it waits for more than room for its adapter."""
    compiled = threading.Event()

    class Backend:
        num_words = 1

        def compile(self, spec: GrammarSpec) -> Any:
            compiled.wait(60)

    backend: Any = Backend()
    cache = KVCacheConfig(24, 4, (KVCacheGroup(("layer.0",), KVCacheSpec.keys_and_values(1, 1, "float32")),))
    config = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_model_len=20)
    slots = AdapterSlots(LoraConfig(num_slots=1, max_running=1, max_rank=8))
    kv = KVCacheManager(cache, enable_prefix_caching=False)
    scheduler = Scheduler(config, kv, StructuredOutputs(backend), adapters=slots)

    def add(name: str, adapter: str, grammar: GrammarSpec | None = None) -> None:
        scheduler.add_request(
            EngineRequest(
                request_id=name,
                prompt_token_ids=(1, 2, 3),
                sampling_params=SamplingParams(),
                max_tokens=4,
                seed=0,
                adapter=ADAPTERS[adapter],
                grammar=grammar,
            )
        )

    def step() -> set[str]:
        plan = scheduler.schedule()
        assert plan is not None
        names = set(plan.num_scheduled_tokens)
        scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=dict.fromkeys(names, (1,))))
        return names

    add("first", "a")
    assert step() == {"first"}
    add("compiling", "b", GrammarSpec("regex", "a"))
    add("second", "a")
    try:
        assert step() == {"first", "second"}
    finally:
        compiled.set()
