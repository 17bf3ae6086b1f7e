"""A request's changes of logits before sampling: biases, penalties, and forbidden tokens. Defined in
`token_rules` and `penalties` of `penstock.runner.sampling`, in the order of `features.LOGITS`. One launch writes
float32 logits with all changes; a row without changes is only copied. If a row has penalties, a launch before it counts
the row's tokens, so that no counts are kept between steps.

    counts    [n, vocab_size] int32: bit 0 says whether the prompt has the token, the others count it in the output.
              Added by integer atomics, in any order; the program that reads a count resets it to 0.

A program owns a tile of one row. Lists of tokens (`pack_rules`) are as long as a request makes them, so rows hold their
address. Each program goes through its row's lists and uses the entries in its own tile: it stores the tile, changes it
in place and loads it again. Forbidden logits stay at minus infinity whatever penalties follow. Every element is changed
by one program, from integer counts: bits depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.kernels.triton.sampling.tiles import TILE, TILE_WARPS, load_tile

_COUNTED = 1024  # tokens of a request per program
_COUNT_WARPS = 4
_ENTRIES = 32 * TILE_WARPS  # of a list at a time: one per thread, as none may be changed twice
_BITS = 32  # of a word
_LAST_POSITION = 2**31 - 1
RULE_COLUMNS = 5
PENALTY_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class AdjustTables:
    """The logit changes of the rows' requests."""

    rules: torch.Tensor  # [max_num_reqs, RULE_COLUMNS] int64: `PackedRules.columns`
    penalties: torch.Tensor  # [max_num_reqs, PENALTY_COLUMNS] float32: repetition (1 is none), presence, frequency (0)


@dataclass(frozen=True, slots=True)
class PackedRules:
    """A request's lists of tokens in one array.

    First the bitmask of allowed tokens, if any are named; then of the edits all tokens, biases and the positions below
    which they are forbidden; then of the bad words all last tokens, starts of their prefixes, and lengths of these;
    then the prefixes.
    """

    words: np.ndarray  # [n] int32
    num_edits: int
    num_bad_words: int
    num_mask_words: int

    def columns(self, address: int, prompt_len: int) -> tuple[int, int, int, int, int]:
        """Returns the row's entries in the table, if `words` are on the device at `address`."""
        return address, self.num_edits, self.num_bad_words, self.num_mask_words, prompt_len


def pack_rules(
    bias: Mapping[int, float],
    ends: Collection[int],  # tokens that are forbidden below `min_len`
    min_len: int,
    bad_words: Iterable[Sequence[int]],
    allowed: Collection[int],  # empty: all are allowed
    vocab_size: int,
) -> PackedRules:
    mask = pack_bits(allowed, vocab_size) if allowed else np.zeros(0, dtype=np.int32)
    tokens = sorted({*bias, *ends})
    biases = np.array([bias.get(token, 0.0) for token in tokens], dtype=np.float32)
    until = [min(min_len, _LAST_POSITION) if token in ends else 0 for token in tokens]
    lasts = [word[-1] for word in bad_words]
    lengths = [len(word) - 1 for word in bad_words]
    heads = [token for word in bad_words for token in word[:-1]]
    starts = np.cumsum([0, *lengths[:-1]])[: len(lasts)]
    lists = (mask, tokens, biases.view(np.int32), until, lasts, starts, lengths, heads)
    words = np.concatenate([np.asarray(each, dtype=np.int32) for each in lists])
    return PackedRules(words, len(tokens), len(lasts), len(mask))


def pack_bits(tokens: Collection[int], vocab_size: int) -> np.ndarray:
    """[ceil(vocab_size / 32)] int32: bit t % 32 of word t // 32 is set for each of the tokens."""
    bits = np.zeros(-(-vocab_size // _BITS) * _BITS, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def count_tokens(
    rows: torch.Tensor,  # [n] int64: the request's tokens before it count
    positions: torch.Tensor,  # [n] int64: the request's tokens below it count
    token_ids: torch.Tensor,  # [max_num_reqs, width] int32
    longest: int,  # no position is larger
    tables: AdjustTables,
    counts: torch.Tensor,  # [at least n, vocab_size] int32, all 0, written if a row has a penalty
) -> None:
    num_rows, vocab_size = len(rows), counts.shape[1]
    assert rows.shape == positions.shape and num_rows <= len(counts), f"{rows.shape} {positions.shape} {counts.shape}"
    assert token_ids.dtype == torch.int32 and token_ids.stride(1) == 1, f"{token_ids.dtype} {token_ids.stride()}"
    assert counts.dtype == torch.int32 and counts.is_contiguous(), f"counts are {counts.dtype} {counts.stride()}"
    _count_tokens[(num_rows, triton.cdiv(longest, _COUNTED))](
        rows, positions, token_ids, tables.rules, tables.penalties, counts, token_ids.stride(0), vocab_size,
        RULE_COLUMNS, PENALTY_COLUMNS, _COUNTED,
        num_warps=_COUNT_WARPS,
    )  # fmt: skip


def adjust_logits(
    logits: torch.Tensor,  # [n, vocab_size] float32, bfloat16 or float16, unchanged
    rows: torch.Tensor,  # [n] int64: state rows; nothing is written for padding, -1
    positions: torch.Tensor,  # [n] int64: the sampled token's position
    token_ids: torch.Tensor,  # [max_num_reqs, width] int32
    tables: AdjustTables,
    counts: torch.Tensor,  # [at least n, vocab_size] int32 of `count_tokens`; undefined if no row has a penalty
    mask_of_row: torch.Tensor,  # [n] int32: index of the bitmask, -1 for none; empty if none has one
    bitmasks: torch.Tensor,  # [m, words] int32: as `pack_bits`
    out: torch.Tensor,  # [n, vocab_size] float32, written
) -> None:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 and out.is_contiguous(), f"strides are {logits.stride()} and {out.stride()}"
    assert out.shape == logits.shape and out.dtype == torch.float32, f"{out.shape} {out.dtype} for {logits.shape}"
    assert rows.shape == positions.shape == (num_rows,), f"{rows.shape} {positions.shape} for {num_rows} rows"
    assert mask_of_row.shape in ((0,), (num_rows,)), f"{mask_of_row.shape} for {num_rows} rows"
    assert bitmasks.is_contiguous() and token_ids.stride(1) == 1, f"{bitmasks.stride()} {token_ids.stride()}"
    has_bitmasks = len(mask_of_row)
    words = bitmasks.shape[1]
    assert not has_bitmasks or words * _BITS >= vocab_size, f"{words} words for {vocab_size} tokens"
    _adjust_logits[(num_rows, triton.cdiv(vocab_size, TILE))](
        logits, rows, positions, token_ids, tables.rules, tables.penalties, counts, mask_of_row, bitmasks, out,
        token_ids.stride(0), has_bitmasks, words, vocab_size, logits.stride(0), RULE_COLUMNS, PENALTY_COLUMNS, TILE,
        _ENTRIES,
        num_warps=TILE_WARPS,
    )  # fmt: skip


@triton.jit
def _load_penalties(penalties_ptr, row, columns: tl.constexpr):
    """Returns (repetition, presence, frequency, whether there is any)."""
    source = penalties_ptr + row * columns
    repetition, presence, frequency = tl.load(source), tl.load(source + 1), tl.load(source + 2)
    return repetition, presence, frequency, (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit(do_not_specialize=["token_stride"], do_not_specialize_on_alignment=["rows_ptr", "positions_ptr"])
def _count_tokens(
    rows_ptr, positions_ptr, token_ids_ptr, rules_ptr, penalties_ptr, counts_ptr, token_stride,
    vocab: tl.constexpr, rule_columns: tl.constexpr, penalty_columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    index, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * block
    row = tl.load(rows_ptr + index)
    if row >= 0:
        known = tl.load(positions_ptr + index)
        _, _, _, is_penalised = _load_penalties(penalties_ptr, row, penalty_columns)
        if is_penalised & (first < known):
            prompt_len = tl.load(rules_ptr + row * rule_columns + 4)
            place = first + tl.arange(0, block)
            token = tl.load(token_ids_ptr + row * token_stride + place, mask=place < known, other=0)
            target = counts_ptr + index * vocab + token
            one = tl.full([block], 1, tl.int32)
            is_prompt = place < prompt_len
            tl.atomic_or(target, one, mask=(place < known) & is_prompt, sem="relaxed")
            tl.atomic_add(target, one + one, mask=(place < known) & (place >= prompt_len), sem="relaxed")


@triton.jit(
    do_not_specialize=["token_stride", "has_bitmasks", "words"],
    do_not_specialize_on_alignment=["rows_ptr", "positions_ptr", "mask_of_row_ptr", "bitmasks_ptr"],
)
def _adjust_logits(
    logits_ptr, rows_ptr, positions_ptr, token_ids_ptr, rules_ptr, penalties_ptr, counts_ptr, mask_of_row_ptr,
    bitmasks_ptr, out_ptr, token_stride, has_bitmasks, words,
    vocab: tl.constexpr, stride: tl.constexpr, rule_columns: tl.constexpr, penalty_columns: tl.constexpr,
    tile: tl.constexpr, entries: tl.constexpr,
):  # fmt: skip
    index, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    if row >= 0:
        place = number * tile + tl.arange(0, tile)
        in_vocab = place < vocab
        logits = load_tile(logits_ptr, index, number, vocab, stride, tile)
        out = out_ptr + index * vocab
        rules = rules_ptr + row * rule_columns
        list_ptr = tl.load(rules).to(tl.pointer_type(tl.int32))
        num_edits, num_bad_words = tl.load(rules + 1), tl.load(rules + 2)
        num_mask_words = tl.load(rules + 3)
        if num_edits + num_bad_words > 0:
            position = tl.load(positions_ptr + index)
            edits = list_ptr + num_mask_words
            tl.store(out + place, logits, mask=in_vocab)
            tl.debug_barrier()
            _edit(out, edits, num_edits, position, number, vocab, tile, entries)
            tl.debug_barrier()
            tokens = token_ids_ptr + row * token_stride
            _forbid_words(out, edits + 3 * num_edits, num_bad_words, tokens, position, number, tile, entries)
            tl.debug_barrier()
            logits = tl.load(out + place, mask=in_vocab, other=-float("inf"))
        repetition, presence, frequency, is_penalised = _load_penalties(penalties_ptr, row, penalty_columns)
        if is_penalised:
            target = counts_ptr + index * vocab + place
            count = tl.load(target, mask=in_vocab, other=0)
            tl.store(target, 0, mask=count != 0)
            in_output = count >> 1
            penalised = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
            logits = tl.where(count > 0, penalised, logits)
            logits -= frequency * in_output.to(tl.float32)
            logits -= tl.where(in_output > 0, presence, 0.0)
        if num_mask_words > 0:
            logits = _within(logits, list_ptr, place, in_vocab)
        if has_bitmasks > 0:
            mask_index = tl.load(mask_of_row_ptr + index)
            if mask_index >= 0:
                logits = _within(logits, bitmasks_ptr + mask_index.to(tl.int64) * words, place, in_vocab)
        tl.store(out + place, logits, mask=in_vocab)


@triton.jit
def _edit(out, edits, count, position, number, vocab: tl.constexpr, tile: tl.constexpr, entries: tl.constexpr):
    """Adds biases and forbids tokens that must not end the request yet; a token is named once."""
    offset = tl.zeros_like(count)
    while offset < count:
        entry = offset + tl.arange(0, entries)
        token = tl.load(edits + entry, mask=entry < count, other=vocab)
        is_here = (token < vocab) & (token // tile == number)
        bias = tl.load(edits + count + entry, mask=is_here, other=0).to(tl.float32, bitcast=True)
        until = tl.load(edits + 2 * count + entry, mask=is_here, other=0)
        logit = tl.load(out + token, mask=is_here, other=0.0) + bias
        tl.store(out + token, tl.where(position < until, -float("inf"), logit), mask=is_here)
        offset += entries


@triton.jit
def _forbid_words(out, words, count, tokens, position, number, tile: tl.constexpr, entries: tl.constexpr):
    """Forbids the last token of each word whose other tokens are the last ones before the position."""
    offset = tl.zeros_like(count)
    while offset < count:
        entry = offset + tl.arange(0, entries)
        last = tl.load(words + entry, mask=entry < count, other=-1)
        is_here = (last >= 0) & (last // tile == number)
        start = tl.load(words + count + entry, mask=is_here, other=0)
        length = tl.load(words + 2 * count + entry, mask=is_here, other=0)
        is_there = is_here & (length <= position)
        longest = tl.max(length, 0)
        step = tl.zeros_like(longest)
        while step < longest:
            is_head = is_there & (step < length)
            wanted = tl.load(words + 3 * count + start + step, mask=is_head, other=0)
            found = tl.load(tokens + position - length + step, mask=is_head, other=0)
            is_there = is_there & (wanted == found)
            step += 1
        tl.store(out + last, -float("inf"), mask=is_there)
        offset += entries


@triton.jit
def _within(logits, mask_ptr, place, in_vocab):
    word = tl.load(mask_ptr + place // 32, mask=in_vocab, other=-1)
    return tl.where(((word >> (place % 32)) & 1) == 0, -float("inf"), logits)
