"""Compares embeddings with those of sentence-transformers, or of transformers if it is not installed: agreement, speed.

    python bench/embeddings.py [MODEL] [--count 1000] [--rounds 5] [--pairs 500] [--dtype DTYPE] [--threads N]
                               [--large] [--vllm PYTHON]

MODEL is a folder with a sentence-transformers checkpoint of an encoder. Without it, random weights in the shape of
all-MiniLM-L6-v2, or with --large of BGE-large and E5-large (335 million weights, of which the embedding of words has
fewer here), are used, which are representative of speed but not of meaning.

Agreement: the smallest cosine between both engines' vectors of the sentences of --pairs pairs, and the rank correlation
(Spearman) of the pairs' similarities. Speed: --count texts of 16 to 256 tokens from text to vectors, in alternation, as
the median of --rounds. The other side runs as it is fastest: in batches of 32 texts of similar length. With --vllm, a
Python where vLLM's CPU build is installed, its speed is measured too, on all cores.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from penstock import LLM, PoolingParams

_BATCH = 32
_LENGTHS = (16, 256)  # tokens of a text for the speed
# Words of one group are synonyms; different groups have different meanings.
_SUBJECTS = (
    "engineer technician mechanic|cat kitten|river stream|minister politician|child kid|orchestra band|"
    "company firm|telescope instrument|baker cook|student pupil|storm hurricane|doctor physician"
)
_VERBS = (
    "repairs fixes|watches observes|crosses traverses|praises applauds|breaks destroys|finds discovers|"
    "sells offers|paints draws|measures gauges|forgets overlooks"
)
_OBJECTS = (
    "turbine engine|bird sparrow|valley plain|law bill|toy doll|symphony concert|car vehicle|galaxy nebula|"
    "bread loaf|book novel|bridge viaduct|patient invalid"
)
_ENDINGS = (
    "in the morning|before the water rises|because nobody else does|although it rains|with great care|after lunch|"
    "near the old dam|without a word|for the second time|as the news reported"
)
Encode = Callable[[list[str]], np.ndarray]
Make = Callable[[str, str, int], Encode]
Engine = Callable[[list[str]], tuple[float, np.ndarray]]


def _choices(text: str) -> list[list[str]]:
    return [group.split() for group in text.split("|")]


class Sentences:
    """Draws sentences whose meanings are more or less similar; every run draws the same ones."""

    def __init__(self) -> None:
        self._draw = random.Random(0)
        self._parts = [_choices(_SUBJECTS), _choices(_VERBS), _choices(_OBJECTS)]
        self._endings = _ENDINGS.split("|")

    @staticmethod
    def words() -> list[str]:
        """Returns all words and punctuation of the sentences."""
        texts = (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS)
        return sorted({"the", "."} | {word for text in texts for word in text.replace("|", " ").split()})

    def pair(self) -> tuple[str, str]:
        """Returns two sentences, anywhere between paraphrases and unrelated ones."""
        meaning = self._meaning()
        other = self._meaning()
        changed = self._draw.randint(0, len(meaning))
        kept = self._draw.sample(range(len(meaning)), changed)
        return self._say(meaning), self._say([each if i in kept else other[i] for i, each in enumerate(meaning)])

    def text(self, num_words: int) -> str:
        """Returns a text of exactly that many words, made of sentences."""
        words: list[str] = []
        while len(words) < num_words:
            words += self._say(self._meaning()).split()
        return " ".join(words[:num_words])

    def _meaning(self) -> list[int]:
        return [self._draw.randrange(len(part)) for part in (*self._parts, self._endings)]

    def _say(self, meaning: list[int]) -> str:
        subject, verb, thing = (
            self._draw.choice(part[number]) for part, number in zip(self._parts, meaning, strict=False)
        )
        return f"the {subject} {verb} the {thing} {self._endings[meaning[-1]]} ."


def make_random_model(path: Path, is_large: bool) -> None:
    """Writes a model in the shape of all-MiniLM-L6-v2 or BGE-large, with the sentences' words as its vocabulary."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *Sentences.words()]
    hidden, layers, heads = (1024, 24, 16) if is_large else (384, 6, 12)
    config = transformers.BertConfig(
        hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads
    )
    torch.manual_seed(0)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(path)
    tokenizer = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **specials)
    wrapped.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make_penstock(model: str, dtype: str, threads: int) -> Encode:
    llm = LLM(model, dtype=dtype, num_threads=threads, device="cpu", runner="pooling")
    params = PoolingParams(truncate_prompt_tokens=-1)
    return lambda texts: np.array([each.outputs.data for each in llm.encode(texts, params, use_tqdm=False)])


def reference_name() -> str:
    return "transformers" if importlib.util.find_spec("sentence_transformers") is None else "sentence-transformers"


def make_reference(model: str, dtype: str, threads: int) -> Encode:
    """Returns sentence-transformers' encoder, or an equivalent one made with transformers alone."""
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    if reference_name() == "transformers":
        return Transformers(Path(model), kind)
    from sentence_transformers import SentenceTransformer  # pyright: ignore

    other = SentenceTransformer(model, device="cpu", model_kwargs={"torch_dtype": kind})
    return lambda texts: other.encode(texts, batch_size=_BATCH, show_progress_bar=False)


class Transformers:
    """Encodes padded batches of similar length, the longest texts first, as sentence-transformers does."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._model = transformers.AutoModel.from_pretrained(path, dtype=dtype).eval()
        pooling = json.loads((path / "1_Pooling" / "config.json").read_text())
        self._takes_mean = bool(pooling.get("pooling_mode_mean_tokens"))
        limits = path / "sentence_bert_config.json"
        self._longest = json.loads(limits.read_text())["max_seq_length"] if limits.exists() else 512

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(order), _BATCH):
            numbers = order[start : start + _BATCH]
            batch = self._tokenizer(
                [texts[number] for number in numbers],
                padding=True,
                truncation=True,
                max_length=self._longest,
                return_tensors="pt",
            )
            hidden = self._model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][..., None].float()
            pooled = (hidden * mask).sum(1) / mask.sum(1) if self._takes_mean else hidden[:, 0]
            rows = torch.nn.functional.normalize(pooled, dim=-1).numpy()
            found.update(zip(numbers, rows, strict=True))
        return np.array([found[number] for number in range(len(texts))])


class Side:
    """Runs an engine in a separate process, so that it has its own threads and settings."""

    def __init__(self, make: Make, model: str, dtype: str, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, model, dtype, threads), daemon=True)
        self._process.start()
        other.close()

    def __call__(self, texts: list[str]) -> tuple[float, np.ndarray]:
        """Returns the time in seconds, and the vectors."""
        self._connection.send(texts)
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join()


class VllmSide:
    """Runs vLLM in its own environment, with Intel's OpenMP if that is installed, as its documentation advises."""

    def __init__(self, python: str, model: str, dtype: str) -> None:
        script = Path(__file__).parent / "peers" / "embed_vllm.py"
        openmp = next(Path(python).parent.parent.rglob("libiomp5.so"), None)
        environment = {**os.environ, **({"LD_PRELOAD": str(openmp)} if openmp else {})}
        self._process = subprocess.Popen(
            [python, str(script), model, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, texts: list[str]) -> tuple[float, np.ndarray]:
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None
        assert answers is not None
        to.write(json.dumps(texts) + "\n")
        to.flush()
        seconds, vectors = json.loads(answers.readline())
        return seconds, np.array(vectors)

    def close(self) -> None:
        self._process.communicate()


def _serve(connection: Connection, make: Make, model: str, dtype: str, threads: int) -> None:
    encode = make(model, dtype, threads)
    while True:
        try:
            texts = connection.recv()
        except EOFError:
            return
        started = time.perf_counter()
        vectors = encode(texts)
        connection.send((time.perf_counter() - started, vectors))


def ranks(values: np.ndarray) -> np.ndarray:
    """[n] -> [n]: the rank of each value, ascending; values that are equal except for rounding share the mean rank."""
    _, which, counts = np.unique(values.round(6), return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts + 1) / 2)[which]


def compare(sides: Mapping[str, Engine], num_pairs: int) -> None:
    sentences = Sentences()
    pairs = [sentences.pair() for _ in range(num_pairs)]
    texts = sorted({text for pair in pairs for text in pair})
    number = {text: i for i, text in enumerate(texts)}
    found = [side(texts)[1].astype(np.float64) for side in sides.values()]
    cosines = (found[0] * found[1]).sum(1) / np.prod([np.linalg.norm(each, axis=1) for each in found], axis=0)
    left, right = ([number[pair[i]] for pair in pairs] for i in (0, 1))
    similarities = [(each[left] * each[right]).sum(1) for each in found]
    correlation = np.corrcoef(ranks(similarities[0]), ranks(similarities[1]))[0, 1]
    low, high = similarities[1].min(), similarities[1].max()
    print(f"sentences {len(texts)}, pairs {num_pairs} with similarities from {low:.2f} to {high:.2f}")
    print(f"largest distance by cosine: {1 - cosines.min():.1e}; rank correlation of the pairs: {correlation:.6f}")


def race(sides: Mapping[str, Engine], count: int, rounds: int) -> None:
    draw, sentences = random.Random(1), Sentences()
    texts = [sentences.text(draw.randint(_LENGTHS[0] - 2, _LENGTHS[1] - 2)) for _ in range(count)]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side(texts[:_BATCH])
    for number in range(rounds):
        # The order alternates, so that a machine that slows down favours neither.
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(sides[name](texts)[0])
    print(f"\n| {count} texts of {_LENGTHS[0]} to {_LENGTHS[1]} tokens | texts/s | median s | s, best to worst |")
    print("|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {count / median:.1f} | {median:.2f} | {min(values):.2f} to {max(values):.2f} |")
    first, *others = (statistics.median(values) for values in seconds.values())
    print(f"\nPenstock is {min(others) / first:.2f} times as fast as the fastest other.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        if args.model is None:
            make_random_model(Path(scratch), args.large)
        model = args.model or scratch
        makers: dict[str, Make] = {"Penstock": make_penstock, reference_name(): make_reference}
        sides: dict[str, Engine] = {}
        for name, make in makers.items():
            sides[name] = side = Side(make, model, args.dtype, args.threads)
            stack.callback(side.close)
        print(f"{' compared with '.join(sides)}, {args.dtype}, {args.threads} threads")
        compare(sides, args.pairs)
        if args.vllm is not None:
            sides["vLLM"] = vllm = VllmSide(args.vllm, model, args.dtype)
            stack.callback(vllm.close)
        race(sides, args.count, args.rounds)


if __name__ == "__main__":
    main()
