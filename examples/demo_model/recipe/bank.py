"""The token bank: all training data as packed rows of tokens, made before training by worker processes.

A cell of the bank is a uint16: the token in its low twelve bits and the token's kind (padding, prompt or answer) in the
two above. Rows hold whole items, one after another with an end-of-text token between them, so that the first item of a
row starts at position 0 as a served prompt does. Every shard has its own seed, so the bank does not depend on the
number of processes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from recipe.draw import Draw
from recipe.tasks import standard_library
from recipe.tasks.table import items
from recipe.template import ASSISTANT_HEADER
from recipe.tokenizer import END_OF_TEXT_ID, TURN_END_ID, TURN_START_ID, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT = 2048
TOKEN_BITS = 12
PADDING, PROMPT, ANSWER = 0, 1, 2
SHARD_CHARS = 3_600_000  # about a million tokens
CHARS_PER_TOKEN = 3.6
OPEN_ROWS = 48
ENCODE_BATCH = 256


@dataclass(frozen=True)
class BankConfig:
    """The inputs of a bank.

    Attributes:
        seed: first part of every shard's seed.
        num_tokens: approximate number of tokens in the generated rows.
        num_processes: worker processes; does not change the bank.
    """

    seed: int
    num_tokens: int
    num_processes: int

    @property
    def num_shards(self) -> int:
        """The number of shards of about a million tokens."""
        return max(1, round(self.num_tokens * CHARS_PER_TOKEN / SHARD_CHARS))

    @property
    def shard_chars(self) -> int:
        """Characters per shard: fewer than usual only if the whole bank is smaller than one shard."""
        return min(SHARD_CHARS, int(self.num_tokens * CHARS_PER_TOKEN))


class Encoder:
    """Converts training texts to cells."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.header = np.array(tokenizer.encode(ASSISTANT_HEADER).ids)  # [header_len]

    def cells(self, ids: list[int], is_conversation: bool) -> np.ndarray:
        """Returns the cells of one document, its end-of-text token included.

        A plain text is learnt whole, including its end; of a conversation, the text after each assistant header, up to
        and including the end of the turn.

        Returns:
            [num_tokens + 1] uint16.
        """
        tokens = np.array([*ids, END_OF_TEXT_ID], dtype=np.uint16)
        kinds = np.full(len(tokens), PROMPT if is_conversation else ANSWER, dtype=np.uint16)
        if is_conversation:
            starts = np.flatnonzero(tokens == TURN_START_ID)
            ends = np.flatnonzero(tokens == TURN_END_ID)
            for start, end in zip(starts, ends, strict=True):
                first = start + 1 + len(self.header)
                if np.array_equal(tokens[start + 1 : first], self.header):
                    kinds[first : end + 1] = ANSWER
        return tokens | (kinds << TOKEN_BITS)

    def encode(self, texts: list[tuple[str, bool]]) -> list[np.ndarray]:
        """Returns the cells of many documents; each is (text, whether it is a conversation)."""
        encoded = self.tokenizer.encode_batch_fast([text for text, _ in texts])
        return [self.cells(e.ids, talks) for e, (_, talks) in zip(encoded, texts, strict=True)]


class Packer:
    """Fills rows with whole documents, each into the fullest open row that has room."""

    def __init__(self, row_length: int = CONTEXT) -> None:
        self.row_length = row_length
        self.rooms: list[int] = []
        self.open: list[list[np.ndarray]] = []
        self.rows: list[np.ndarray] = []
        self.num_dropped = 0

    def add(self, cells: np.ndarray) -> None:
        """Packs one document; one longer than a row is dropped and counted."""
        if len(cells) > self.row_length:
            self.num_dropped += 1
            return
        fitting = [(room, at) for at, room in enumerate(self.rooms) if room >= len(cells)]
        if fitting:
            at = min(fitting)[1]
        else:
            if len(self.open) == OPEN_ROWS:
                self._close(min(range(OPEN_ROWS), key=self.rooms.__getitem__))
            self.rooms.append(self.row_length)
            self.open.append([])
            at = len(self.open) - 1
        self.open[at].append(cells)
        self.rooms[at] -= len(cells)

    def _close(self, at: int) -> None:
        padding = np.zeros(self.rooms.pop(at), dtype=np.uint16)
        self.rows.append(np.concatenate([*self.open.pop(at), padding]))

    def finish(self) -> np.ndarray:
        """Closes all rows.

        Returns:
            [num_rows, row_length] uint16 cells.
        """
        while self.open:
            self._close(0)
        return np.stack(self.rows)


def make_rows(encoder: Encoder, draw: Draw, num_chars: int) -> tuple[np.ndarray, int]:
    """Returns rows of generated items with about `num_chars` characters, and how many items were too long for a row."""
    packer = Packer()
    made = items(draw, num_chars)
    for at in range(0, len(made), ENCODE_BATCH):
        batch = [(text, bool(item.messages)) for text, item in made[at : at + ENCODE_BATCH]]
        for cells in encoder.encode(batch):
            packer.add(cells)
    return packer.finish(), packer.num_dropped


def encode_code(encoder: Encoder, held_out: bool) -> np.ndarray:
    """Returns the standard library as one stream of files with end-of-text tokens between them.

    Returns:
        [num_tokens] uint16 cells.
    """
    texts = [(source, False) for source in standard_library.sources(held_out)]
    return np.concatenate(encoder.encode(texts))


def _write_shard(tokenizer_path: Path, folder: Path, seed: str, num_chars: int, index: int) -> tuple[int, int, int]:
    """Makes one shard; returns its numbers of tokens, of rows and of items that did not fit."""
    encoder = Encoder(load_tokenizer(tokenizer_path))
    rows, num_dropped = make_rows(encoder, Draw(f"{seed} shard {index}"), num_chars)
    # A shard that a killed run left incomplete must not be mistaken for a complete one.
    partial = folder / f"shard_{index:04d}.partial.npy"
    np.save(partial, rows)
    partial.rename(folder / f"shard_{index:04d}.npy")
    return int((rows >> TOKEN_BITS != PADDING).sum()), len(rows), num_dropped


def _claim_folder(config: BankConfig, tokenizer_path: Path, folder: Path) -> None:
    """Records the inputs of the folder's shards, or checks that those of an existing bank are the same."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(tokenizer_path.read_bytes(), digest_size=8).hexdigest()
    made_of = {"seed": config.seed, "shard_chars": config.shard_chars, "tokenizer": digest}
    note = folder / "bank.json"
    if not note.exists():
        note.write_text(json.dumps(made_of))
    elif json.loads(note.read_text()) != made_of:
        raise ValueError(f"{folder} contains a bank made from {note.read_text()}, not from {made_of}: remove it first")


def build_bank(config: BankConfig, tokenizer_path: Path, folder: Path) -> None:
    """Writes the shards that are not there yet, and the code, below `folder`.

    Raises:
        ValueError: the folder contains a bank of another seed or tokenizer.
    """
    _claim_folder(config, tokenizer_path, folder)
    encoder = Encoder(load_tokenizer(tokenizer_path))
    for name, held_out in (("code", False), ("code_held_out", True)):
        if not (folder / f"{name}.npy").exists():
            np.save(folder / f"{name}.npy", encode_code(encoder, held_out))
    missing = [i for i in range(config.num_shards) if not (folder / f"shard_{i:04d}.npy").exists()]
    if not missing:
        return
    # One thread per process: there are already as many processes as cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    context = multiprocessing.get_context("spawn")
    totals = np.zeros(3, dtype=np.int64)
    with (
        ProcessPoolExecutor(min(config.num_processes, len(missing)), mp_context=context) as pool,
        tqdm(total=len(missing), desc="data", unit="shard", mininterval=2) as progress,
    ):
        seed = f"train {config.seed}"
        jobs = [pool.submit(_write_shard, tokenizer_path, folder, seed, config.shard_chars, i) for i in missing]
        for job in as_completed(jobs):
            totals += job.result()
            progress.update()
            progress.set_postfix(tokens=f"{totals[0] / 1e6:.1f}M", rows=totals[1], too_long=totals[2])


def load_bank(config: BankConfig, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Reads the bank of a configuration.

    Returns:
        [num_rows, CONTEXT] uint16 cells of generated rows, and [num_code_tokens] uint16 cells of code.

    Raises:
        FileNotFoundError: a shard is missing; the data stage has not been run to its end.
    """
    shards = [np.load(folder / f"shard_{i:04d}.npy") for i in range(config.num_shards)]
    return np.concatenate(shards), np.load(folder / "code.npy")
