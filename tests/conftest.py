"""Runs every test with the checks that production omits: poisoned KV blocks, and integrity after every step.

`--executor mp` gives every engine of the test process a worker in a process of its own. Tests marked `uniproc` replace
or inspect parts of a worker, so they are skipped then; `make test-all` lists the files for which that is done.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch

from tests.within import Within

# The memory of the machine holds millions of a small model's KV blocks: checking them takes seconds after each step.
MOST_BLOCKS = 8192
# On a busy machine any example may be delayed.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")
os.environ.setdefault("PENSTOCK_DEBUG", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs in this way, and every child inherits it: no child would end at an interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # Triton reads this when it is first imported: without a GPU its kernels run in its interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executor", choices=("uniproc", "mp"), default="uniproc", help="where the engines' workers run")
    parser.addoption("--within", type=float, metavar="SECONDS", help="skip the tests that have not begun by then")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Applies `spread(count)`: keeps `count` evenly spaced cases of a test, and marks its other cases as long. With
    `--executor mp`, skips the tests marked `uniproc`.
    """
    if config.getoption("--executor") == "mp":
        for item in items:
            if item.get_closest_marker("uniproc") is not None:
                item.add_marker(pytest.mark.skip(reason="the worker is in another process"))
    cases: defaultdict[tuple[object, str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        spread = item.get_closest_marker("spread")
        if spread is not None and item.get_closest_marker("exhaustive") is None:
            cases[item.parent, getattr(item, "originalname", ""), spread.args[0]].append(item)
    for (_, _, count), found in cases.items():
        kept = {number * len(found) // count for number in range(count)}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True, scope="session")
def small_pools() -> Iterator[None]:
    """Limits the KV caches of engines in this process of which a test says no size."""
    from penstock.engine import build, cache_plan

    plan_cache, num_blocks = build.plan_cache, cache_plan._num_blocks

    def limited(config: Any, *rest: Any) -> int:
        found = num_blocks(config, *rest)
        is_set = config.num_blocks_override is not None or config.kv_cache_memory is not None
        return found if is_set else min(found, MOST_BLOCKS)

    def plan(*arguments: Any) -> Any:
        # Tests of the plan itself are not limited.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache_plan, "_num_blocks", limited)
            return plan_cache(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "plan_cache", plan)
        yield


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--within") is not None:
        config.pluginmanager.register(Within(config.getoption("--within")))
    if config.getoption("--executor") == "mp":
        from penstock.engine import build
        from penstock.executor.factory import make_executor

        build.make_executor = lambda config: make_executor(
            replace(config, parallel=replace(config.parallel, backend="mp"))
        )
