"""Compares the runner's kernels in Triton with the torch operations that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.prepare_inputs import expand_tokens, slot_mapping
from penstock.kernels.prepare_inputs import store_drafts as store_drafts_of_torch
from penstock.kernels.triton.prepare_inputs import (
    SamplingInputs,
    StepInputs,
    finish_step,
    prepare_inputs,
    prepare_sampling,
    store_drafts,
)
from penstock.kernels.triton.staged_writes import StagedWrites, scatter_staged
from tests.kernels.gpu_compiler import compile_for_gpu

BLOCK_SIZE, MAX_BLOCKS, ROWS = 8, 200, 9
WIDTH = BLOCK_SIZE * MAX_BLOCKS + 1
GARBAGE = -77


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Puts tensors, and thereby the kernels, on the GPU if there is one."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


class State:
    """Tables of some rows with random tokens and blocks."""

    def __init__(self, num_groups: int = 2) -> None:
        torch.manual_seed(0)
        self.num_computed = torch.zeros((ROWS, 1), dtype=torch.int64)
        self.token_ids = torch.randint(0, 1000, (ROWS, WIDTH), dtype=torch.int32)
        self.tables = torch.randint(1, 50_000, (num_groups, ROWS, MAX_BLOCKS), dtype=torch.int32)


def garbage(num_reqs: int, num_tokens: int, num_groups: int) -> StepInputs:
    """Returns views of larger buffers, full of garbage from an earlier step."""

    def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(tuple(size + 3 for size in shape), GARBAGE, dtype=dtype)

    return StepInputs(
        rows=buffer(num_tokens)[:num_tokens],
        positions=buffer(num_tokens)[:num_tokens],
        input_ids=buffer(num_tokens)[:num_tokens],
        seq_lens=buffer(num_reqs, dtype=torch.int32)[:num_reqs],
        block_tables=buffer(num_groups, num_reqs, MAX_BLOCKS, dtype=torch.int32)[:num_groups, :num_reqs, :MAX_BLOCKS],
        slot_mapping=buffer(num_groups, num_tokens)[:num_groups, :num_tokens],
    )


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 1200)), max_size=ROWS),
    padding_reqs=st.integers(0, 3),
    padding_tokens=st.integers(0, 9),
    num_groups=st.integers(1, 3),
    ahead=st.integers(0, 4),
    last_position=st.integers(100, 1600),
)
def test_prepares_the_same_inputs_as_the_torch_operations(
    steps: list[tuple[int, int]],
    padding_reqs: int,
    padding_tokens: int,
    num_groups: int,
    ahead: int,
    last_position: int,
) -> None:
    state = State(num_groups)
    rows = torch.randperm(ROWS)[: len(steps)]
    state.num_computed[rows, 0] = torch.tensor([computed for computed, _ in steps], dtype=torch.int64)
    lens = torch.tensor([0, *(length for _, length in steps)])
    starts = lens.cumsum(0).int()
    num_tokens = int(starts[-1])
    expected = expand_tokens(rows, starts, state.num_computed, state.token_ids, num_tokens)
    positions = (expected.positions + ahead).clamp(max=last_position)
    expected = replace(expected, positions=positions, input_ids=state.token_ids[expected.rows, positions].long())

    idx_mapping = torch.cat((rows, torch.full((padding_reqs,), -1)))
    padded_starts = torch.cat((starts, starts[-1:].expand(padding_reqs)))
    out = garbage(len(idx_mapping), num_tokens + padding_tokens, num_groups)
    tables = (state.num_computed, state.token_ids, state.tables)
    prepare_inputs(idx_mapping, padded_starts, *tables, BLOCK_SIZE, out, ahead, last_position)

    for name, padding in (("rows", -1), ("positions", 0), ("input_ids", 0)):
        actual = getattr(out, name)
        assert torch.equal(actual[:num_tokens], getattr(expected, name))
        assert (actual[num_tokens:] == padding).all()
    seq_lens = (state.num_computed[rows, 0] + lens[1:] + ahead).clamp(max=last_position + 1)
    assert torch.equal(out.seq_lens[: len(rows)].long(), seq_lens)
    assert (out.seq_lens[len(rows) :] == 0).all()
    for table, gathered, slots in zip(state.tables, out.block_tables, out.slot_mapping, strict=True):
        assert torch.equal(slots[:num_tokens], slot_mapping(table, expected, BLOCK_SIZE))
        assert (slots[num_tokens:] == -1).all()
        for index, row in enumerate(rows.tolist()):
            num_blocks = -(-int(seq_lens[index]) // BLOCK_SIZE)
            assert torch.equal(gathered[index, :num_blocks], table[row, :num_blocks])
            assert (gathered[index, num_blocks:] == GARBAGE).all()
        assert (gathered[len(rows) :] == 0).all()


@settings(max_examples=30)
@given(
    steps=st.lists(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=ROWS),
    padding_reqs=st.integers(0, 2),
    padding_logits=st.integers(0, 20),
)
def test_rows_of_logits_are_the_last_tokens_of_their_requests(
    steps: list[tuple[int, int]], padding_reqs: int, padding_logits: int
) -> None:
    State()
    rows = torch.randperm(ROWS)[: len(steps)]
    seq_lens = [50 + 10 * index for index in range(len(steps))]
    query_starts = torch.tensor([0, *(length for length, _ in steps)]).cumsum(0).int()
    starts = torch.tensor([0, *(window for _, window in steps)]).cumsum(0).int()
    expected = [
        (int(rows[index]), seq_lens[index] - behind, int(query_starts[index + 1]) - 1 - behind)
        for index, (_, window) in enumerate(steps)
        for behind in reversed(range(window))
    ]
    found = torch.full((3, len(expected) + padding_logits), GARBAGE)
    prepare_sampling(
        torch.cat((rows, torch.full((padding_reqs,), -1))),
        torch.cat((query_starts, query_starts[-1:].expand(padding_reqs))),
        torch.cat((starts, starts[-1:].expand(padding_reqs))),
        torch.tensor([*seq_lens, *[0] * padding_reqs], dtype=torch.int32),
        SamplingInputs(*found),
    )
    assert found.T.tolist() == [list(each) for each in expected] + [[-1, 0, 0]] * padding_logits


@settings(max_examples=30)
@given(
    windows=st.lists(
        st.integers(0, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, max(n - 1, 0)))), max_size=ROWS
    ),
    padding_reqs=st.integers(0, 2),
)
def test_a_finished_step_is_stored_where_the_next_one_reads(windows: list[tuple[int, int]], padding_reqs: int) -> None:
    state = State()
    rows = torch.randperm(ROWS)[: len(windows)]
    seq_lens = torch.randint(40, 60, (len(windows),), dtype=torch.int32)
    state.num_computed[rows, 0] = 33
    starts = torch.tensor([0, *(length for length, _ in windows)]).cumsum(0).int()
    sampled = torch.randint(1000, 2000, (int(starts[-1]),))
    tokens, computed = state.token_ids.clone(), state.num_computed.clone()
    for index, (length, accepted) in enumerate(windows):
        row, end = int(rows[index]), int(seq_lens[index])
        tokens[row, end - length + 1 : end + 1] = sampled[starts[index] : starts[index + 1]].int()
        computed[row] = end - max(length - 1, 0) + accepted

    padding = torch.full((padding_reqs,), -1)
    finish_step(
        sampled,
        torch.cat((starts, starts[-1:].expand(padding_reqs))),
        torch.cat((torch.tensor([accepted for _, accepted in windows], dtype=torch.int64), padding)),
        torch.cat((rows, padding)),
        torch.cat((seq_lens, padding.int())),
        state.num_computed,
        state.token_ids,
    )
    assert torch.equal(state.token_ids, tokens)
    assert torch.equal(state.num_computed, computed)


@settings(max_examples=30)
@given(data=st.data())
def test_staged_writes_land_in_their_tables(data: st.DataObject) -> None:
    tables = [torch.zeros((3, 40), dtype=dtype) for dtype in (torch.int32, torch.int64, torch.float32)]
    expected = [table.clone() for table in tables]
    writes = StagedWrites(capacity=4)
    for _ in range(2):
        for table, copy in zip(tables, expected, strict=True):
            bits = 63 if table.dtype == torch.int64 else 31
            value = st.floats(width=32) if table.dtype == torch.float32 else st.integers(-(2**bits), 2**bits - 1)
            for row in range(3):
                start, values = data.draw(st.tuples(st.integers(0, 20), st.lists(value, max_size=20)))
                writes.write(table, row, start, values)
                copy[row, start : start + len(values)] = torch.tensor(values, dtype=table.dtype)
        packed = writes.take()
        scatter_staged(torch.tensor(np.concatenate((packed, np.zeros((5, 2), dtype=np.int64)))))
        for table, copy in zip(tables, expected, strict=True):
            assert table.cpu().numpy().tobytes() == copy.cpu().numpy().tobytes()
    assert len(writes.take()) == 0


def test_a_write_beyond_its_row_raises_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="39, 2"):
        StagedWrites().write(torch.zeros((3, 40)), 0, 39, (1.0, 2.0))


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("num_drafts", [1, 3, 20])
def test_drafts_follow_the_known_tokens(count: int, num_drafts: int) -> None:
    proposed = torch.randint(-1, 1000, (count + 2, num_drafts))[:, :num_drafts]
    rows = torch.cat((torch.randperm(ROWS - 1)[:count], torch.full((2,), -1)))
    found = []
    for store in (store_drafts_of_torch, store_drafts):
        state = State()
        state.num_computed[:, 0] = torch.arange(ROWS) * 50
        drafts = torch.full((ROWS, 20), GARBAGE)
        store(proposed, rows, state.num_computed, drafts, state.token_ids)
        # Padding may write to the last row, which no request has.
        found.append((drafts[:-1], state.token_ids[:-1]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.long
def test_nothing_spills() -> None:
    prepare = dict.fromkeys(("num_computed_ptr", "idx_mapping_ptr", "rows_ptr", "positions_ptr"), "*i64")
    prepare |= dict.fromkeys(("input_ids_ptr", "slots_ptr"), "*i64")
    prepare |= dict.fromkeys(("starts_ptr", "token_ids_ptr", "tables_ptr", "seq_lens_ptr", "out_tables_ptr"), "*i32")
    prepare |= dict.fromkeys(("num_reqs", "num_tokens", "token_stride", "table_group_stride"), "i32")
    prepare |= dict.fromkeys(("out_group_stride", "out_row_stride", "slot_group_stride", "max_blocks"), "i32")
    prepare |= dict.fromkeys(("ahead", "last_position"), "i32")
    finish = dict.fromkeys(("sampled_ptr", "num_accepted_ptr", "idx_mapping_ptr", "num_computed_ptr"), "*i64")
    finish |= dict.fromkeys(("starts_ptr", "seq_lens_ptr", "token_ids_ptr"), "*i32") | {"token_stride": "i32"}
    store = dict.fromkeys(("proposed_ptr", "rows_ptr", "num_computed_ptr", "drafts_ptr"), "*i64")
    store |= {"token_ids_ptr": "*i32"}
    store |= dict.fromkeys(("num_drafts", "proposed_stride", "draft_stride", "token_stride"), "i32")
    scatter = {"writes_ptr": "*i64", "count": "i32"}
    folder = "penstock.kernels.triton."
    for cost in (
        compile_for_gpu(folder + "prepare_inputs", "_prepare_inputs", prepare, {"block_size": 16, "block": 1024}),
        compile_for_gpu(folder + "prepare_inputs", "_finish_step", finish, {"block": 16}, num_warps=1),
        compile_for_gpu(folder + "prepare_inputs", "_store_drafts", store, {"block": 16}, num_warps=1),
        compile_for_gpu(folder + "staged_writes", "_scatter_staged", scatter, {"block": 256}, num_warps=2),
    ):
        assert cost.spilled_bytes == 0
        assert cost.registers <= 128
