"""The model's byte-level BPE: 4,096 tokens, every digit a separate token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.draw import Draw
from recipe.tasks import standard_library
from recipe.tasks.table import items
from recipe.template import END_OF_TEXT, TURN_END, TURN_START

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB_SIZE = 4096
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)  # their ids are 0, 1 and 2
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(3)
CORPUS_CHARS = 8_000_000


def _corpus(seed: int, num_chars: int) -> Iterator[str]:
    """Yields generated text and a quarter as much code: the mixture that the model is trained on."""
    for text, _ in items(Draw(f"tokenizer {seed}"), num_chars):
        yield text
    room = num_chars // 4
    for source in standard_library.sources(held_out=False, every=4):
        room -= len(source)
        if room < 0:
            return
        yield source


def train_tokenizer(seed: int, num_chars: int = CORPUS_CHARS) -> Tokenizer:
    """Trains the tokenizer on about `num_chars` characters of generated text and a quarter as much code.

    Digits are separate tokens so that sums have columns, and there is no normalisation: decoding restores every byte.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, num_chars), trainer=trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json.

    Raises:
        ValueError: its special tokens do not have the recipe's token ids.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    ids = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    if ids != list(range(len(SPECIAL_TOKENS))) or tokenizer.get_vocab_size() > VOCAB_SIZE:
        raise ValueError(f"{path}: special tokens have ids {ids}, vocabulary {tokenizer.get_vocab_size()}")
    return tokenizer
