"""The executor's end of a worker in its own process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.config.engine import EngineArgs, resolve
from penstock.executor import uniproc
from penstock.utils.errors import ConfigError
from penstock.worker.messages import LoadWorker
from penstock.worker.worker import load_worker


@pytest.mark.parametrize("is_debug", [False, True])
def test_debug_mode_encodes_the_first_message_too(is_debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[LoadWorker] = []
    monkeypatch.setenv("PENSTOCK_DEBUG", str(int(is_debug)))
    monkeypatch.setattr(uniproc, "load_worker", lambda load: received.append(load) or Mock())
    load = LoadWorker(resolve(EngineArgs()), (0, 0))
    uniproc.make_local_worker(load).load()
    assert received == [load]
    assert (received[0] is load) == (not is_debug)


def test_a_rank_on_a_host_without_the_checkpoint_names_the_folder(tmp_path: Path) -> None:
    config = resolve(EngineArgs(load_format="dummy"))
    config = replace(config, model=replace(config.model, path=tmp_path / "elsewhere"))
    with pytest.raises(ConfigError, match=r"there is no folder '.*elsewhere' on the host of rank \(1, 0\)"):
        load_worker(LoadWorker(config, (1, 0)))
