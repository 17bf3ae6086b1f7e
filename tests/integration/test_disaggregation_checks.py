"""An engine uses KV of another engine only if it has the same meaning and the same bytes as when it was sent."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import penstock
from penstock import LLM
from penstock.kv_transfer.transports.stream import Stream
from penstock.runner.cpu import parts
from tests.integration.test_disaggregation import (
    complete,
    connector,
    disaggregated,
    engine,
    pair,
    prefill_for,
    requests,
    transfer_config,
)

DEMO_FOLDER = Path(penstock.__file__).parent / "demo"
PROMPT, PARAMS = requests()[1]


def with_other_weights(folder: Path) -> str:
    """Makes a checkpoint that differs from the demo model in one number."""
    shutil.copytree(DEMO_FOLDER, folder)
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def error_of(prefill: LLM, decode: LLM) -> str | None:
    asked = replace(PARAMS, kv_transfer_params=prefill_for(prefill, PROMPT, PARAMS))
    (found,) = decode.generate([PROMPT], [asked], use_tqdm=False)
    return found.error


@pytest.mark.uniproc
@pytest.mark.parametrize(
    ("differs", "is_accepted", "options"),
    [
        ("weights", False, {"allow_other_arithmetic": True}),
        ("arithmetic", False, {}),
        ("arithmetic", True, {"allow_other_arithmetic": True}),
    ],
)
def test_kv_of_other_weights_or_another_arithmetic(
    differs: str, is_accepted: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_p, for_d = (transfer_config(role, **options) for role in ("kv_producer", "kv_consumer"))
    changes: dict[str, Any] = {"kv_transfer_config": for_p}
    with engine(kv_transfer_config={**for_d, "kv_load_failure_policy": "fail"}) as decode:
        if differs == "weights":
            changes["model"] = with_other_weights(tmp_path / "other")
        else:
            monkeypatch.setattr(parts, "cpu_kernels", lambda: "other kernels")
        with engine(**changes) as prefill:
            error = error_of(prefill, decode)
        assert connector(decode, "consumer_completed") == is_accepted
    if is_accepted:
        assert error is None
    else:
        assert error is not None
        assert f"differ in {differs} (" in error


# ---- Digests ----


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes a bit of everything that a transport over TCP reads, after it was received."""
    receive_segments = Stream.receive_segments

    def receive(self: Stream, segments: np.ndarray) -> None:
        receive_segments(self, segments)
        ctypes.c_uint8.from_address(int(segments[0, 0])).value ^= 1

    monkeypatch.setattr(Stream, "receive_segments", receive)


@pytest.mark.uniproc
@pytest.mark.usefixtures("altered")
def test_without_options_altered_bytes_are_found() -> None:
    with engine() as one:
        expected = complete(one, PROMPT, PARAMS).outputs[0].token_ids
    with pair() as (prefill, decode):
        assert disaggregated(prefill, decode, PROMPT, PARAMS).outputs[0].token_ids == expected
        assert connector(decode, "consumer_bad_ranges") > 0
        assert connector(decode, "consumer_refused") == 0


@pytest.mark.uniproc
@pytest.mark.usefixtures("altered")
def test_bytes_are_not_compared_if_both_engines_have_turned_it_off() -> None:
    with pair(options={"attestation": "off"}) as (prefill, decode):
        disaggregated(prefill, decode, PROMPT, PARAMS)
        assert connector(decode, "consumer_bad_ranges") == 0
        assert connector(decode, "consumer_completed") == 1


def test_kv_without_digests_is_refused_by_an_engine_that_compares() -> None:
    config = {**transfer_config("kv_consumer"), "kv_load_failure_policy": "fail"}
    with (
        engine(kv_transfer_config=transfer_config("kv_producer", attestation="off")) as prefill,
        engine(kv_transfer_config=config) as decode,
    ):
        error = error_of(prefill, decode)
    assert error is not None
    assert "set the same attestation on both engines" in error
