"""The tiers of models with recurrent layers: a restarted engine continues where a stored state is, and nowhere else."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import ConfigError, SamplingParams
from penstock.core.block_hash import BlockHash, extend_chain, root_hash
from tests.architecture.sources import ROOT
from tests.integration.checkpoints import COMMON, make_checkpoint
from tests.integration.test_disaggregation import complete, disaggregated, transfer_config
from tests.integration.test_identity_families import HYBRIDS, MAX_TOKENS, Answer, answer, engine
from tests.integration.test_kv_connectors import offloading

FAMILY = "qwen3.5"
BLOCK = 16
NUM_PROMPT_TOKENS = 70
# States are stored at the last whole block of the prompt, and at that of the answer, whose last token is not computed.
AFTER_PROMPT, AFTER_ANSWER = 64, 80
assert (NUM_PROMPT_TOKENS + MAX_TOKENS - 1) // BLOCK * BLOCK == AFTER_ANSWER
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0, logprobs=3)


@dataclass
class Conversation:
    """The first turn's KV is in `folder`; `wanted` is the answer to the second one without any cache."""

    path: Path
    folder: Path
    first: list[int]
    second: list[int]
    wanted: Answer


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    return converse(FAMILY, tmp_path_factory.mktemp("hybrid"))


def converse(family: str, made: Path) -> Conversation:
    path, folder = made / family, made / "kv"
    make_checkpoint(family, made, torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    first, question = (
        torch.randint(COMMON["vocab_size"], (length,), generator=generator).tolist()
        for length in (NUM_PROMPT_TOKENS, 9)
    )
    llm = engine(path, enable_prefix_caching=True, kv_transfer_config=offloading(disk_path=str(folder)))
    second = [*first, *complete(llm, first, PARAMS).outputs[0].token_ids, *question]
    llm.check_integrity()
    llm.shutdown()
    plain = engine(path)
    wanted = answer(complete(plain, second, PARAMS))
    plain.shutdown()
    return Conversation(path, folder, first, second, wanted)


def state_files(folder: Path, tokens: Sequence[int]) -> list[Path]:
    """Returns the files of states in the order of the tokens, some of which are theirs."""
    chain: list[BlockHash] = []
    extend_chain(chain, root_hash(b""), tokens, BLOCK)
    of_hash = {file.stem.partition("-")[2]: file for file in folder.glob("*-states/*.kv")}
    return [of_hash[each.hex()] for each in chain if each.hex() in of_hash]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_states_and_blocks_of_tokens_have_files_of_their_own_sizes(conversation: Conversation) -> None:
    states = state_files(conversation.folder, conversation.second)
    blocks = [file for file in conversation.folder.glob("*/*.kv") if file not in states]
    assert (len(blocks), len(states)) == (AFTER_ANSWER // BLOCK, 2)
    (block_bytes,) = {file.stat().st_size for file in blocks}
    (state_bytes,) = {file.stat().st_size for file in states}
    assert state_bytes > block_bytes


@pytest.mark.parametrize(
    ("change", "num_bad", "num_cached", "arguments"),
    [
        (None, 0, AFTER_ANSWER, {}),
        (None, 0, AFTER_ANSWER, {"tensor_parallel_size": 2, "async_scheduling": True}),
        (Path.unlink, 1, AFTER_PROMPT, {}),
        (flip_a_bit, 1, AFTER_PROMPT, {"async_scheduling": True}),
        (Path.unlink, 2, 0, {}),
        (flip_a_bit, 2, 0, {}),
    ],
    ids=["intact", "ranks", "one is missing", "one is damaged", "all are missing", "all are damaged"],
)
def test_a_restarted_engine_continues_at_the_last_stored_state(
    conversation: Conversation,
    tmp_path: Path,
    change: Callable[[Path], None] | None,
    num_bad: int,
    num_cached: int,
    arguments: dict[str, Any],
) -> None:
    folder = tmp_path / "kv"
    shutil.copytree(conversation.folder, folder)
    for file in state_files(folder, conversation.second)[::-1][:num_bad]:
        assert change is not None
        change(file)
    connector = offloading(disk_path=str(folder))
    llm = engine(conversation.path, enable_prefix_caching=True, kv_transfer_config=connector, **arguments)
    found = complete(llm, conversation.second, PARAMS)
    assert answer(found) == conversation.wanted
    assert found.num_cached_tokens == num_cached
    stats = llm.stats()
    assert stats.remote_kv.num_tokens == num_cached
    assert stats.connector["num_loads"] == (num_cached // BLOCK + 1 if num_cached else 0)
    assert stats.connector["STORAGE.num_corrupted"] == (num_bad if change is flip_a_bit else 0)
    llm.check_integrity()
    llm.shutdown()


_STORES_UNTIL_KILLED = """
import itertools, json, sys
from tests.integration.test_disaggregation import complete, disaggregated, transfer_config
from tests.integration.test_identity_families import engine
from tests.integration.test_kv_connectors import offloading
from tests.integration.test_tiers_of_hybrids import PARAMS
path, folder, first = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = engine(path, enable_prefix_caching=True, kv_transfer_config=offloading(disk_path=folder))
complete(llm, first, PARAMS)
for number in itertools.count():
    complete(llm, [number % 90 + 1, *first[1:]], PARAMS)
    print(number, flush=True)
"""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("granite4", "lfm2") else pytest.mark.long) for name in HYBRIDS[1:]],
)
def test_every_family_continues_after_a_restart(family: str, tmp_path: Path) -> None:
    conversation = converse(family, tmp_path)
    check_second_turn(conversation, conversation.folder)


@pytest.mark.long
@pytest.mark.parametrize("family", [FAMILY, "granite4", "lfm2"])
def test_an_engine_that_was_killed_left_whole_states_alone(family: str, tmp_path: Path) -> None:
    conversation, folder = converse(family, tmp_path), tmp_path / "killed"
    arguments = [str(conversation.path), str(folder), json.dumps(conversation.first)]
    process = subprocess.Popen(
        [sys.executable, "-c", _STORES_UNTIL_KILLED, *arguments], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline()
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    check_second_turn(conversation, folder)


def check_second_turn(conversation: Conversation, folder: Path) -> None:
    """A new engine loads what is in the folder, and answers as without a cache."""
    llm = engine(conversation.path, enable_prefix_caching=True, kv_transfer_config=offloading(disk_path=str(folder)))
    found = complete(llm, conversation.second, PARAMS)
    assert answer(found) == conversation.wanted
    assert found.num_cached_tokens == AFTER_ANSWER
    assert llm.stats().connector["STORAGE.num_corrupted"] == 0
    llm.check_integrity()
    llm.shutdown()


def test_a_memory_tier_that_is_too_small_for_a_state(conversation: Conversation) -> None:
    with pytest.raises(ConfigError, match=r"at least \d+, one KV block and one state"):
        engine(conversation.path, enable_prefix_caching=True, kv_transfer_config=offloading(cpu_bytes_to_use=1 << 12))


STAGES: dict[str, Any] = {"pipeline_parallel_size": 3, "pipeline_layers": "1,1,3"}
"""The second layer of the small Nemotron-H is experts alone: its rank has no part of the cache."""


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    folder = tmp_path_factory.mktemp("nemotron")
    make_checkpoint("nemotron-h", folder, torch.bfloat16)
    plain = engine(folder / "nemotron-h")
    wanted = answer(complete(plain, list(range(NUM_PROMPT_TOKENS)), PARAMS))
    plain.shutdown()
    return folder / "nemotron-h", wanted


def test_a_rank_that_stores_nothing_has_a_tier(nemotron: tuple[Path, Answer]) -> None:
    path, wanted = nemotron
    llm = engine(path, enable_prefix_caching=True, kv_transfer_config=offloading(), **STAGES)
    for num_cached in (0, AFTER_PROMPT):
        found = complete(llm, list(range(NUM_PROMPT_TOKENS)), PARAMS)
        assert (answer(found), found.num_cached_tokens) == (wanted, num_cached)
        assert llm.reset_prefix_cache()
    llm.check_integrity()
    llm.shutdown()


@pytest.mark.parametrize("transport", ["sockets", "shared_memory"])
@pytest.mark.parametrize("divided", ["kv_producer", "kv_consumer", "both"])
def test_a_rank_that_stores_nothing_sends_and_receives(
    nemotron: tuple[Path, Answer], divided: str, transport: str
) -> None:
    path, wanted = nemotron
    prefill, decode = (
        engine(
            path,
            enable_prefix_caching=True,
            kv_transfer_config=transfer_config(role, transport=transport),
            **(STAGES if divided in (role, "both") else {}),
        )
        for role in ("kv_producer", "kv_consumer")
    )
    found = disaggregated(prefill, decode, list(range(NUM_PROMPT_TOKENS)), PARAMS)
    assert (answer(found), found.num_cached_tokens) == (wanted, AFTER_PROMPT)
    for llm in (prefill, decode):
        llm.check_integrity()
        llm.shutdown()
