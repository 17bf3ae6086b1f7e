"""The executor's end of a worker in its own process."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.executor import uniproc
from penstock.worker.messages import LoadWorker


@pytest.mark.parametrize("is_debug", [False, True])
def test_debug_mode_encodes_the_first_message_too(is_debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[LoadWorker] = []
    monkeypatch.setenv("PENSTOCK_DEBUG", str(int(is_debug)))
    monkeypatch.setattr(uniproc, "load_worker", lambda load: received.append(load) or Mock())
    load = LoadWorker(resolve(EngineArgs()), (0, 0))
    uniproc.make_local_worker(load).load()
    assert received == [load]
    assert (received[0] is load) == (not is_debug)
