"""GGUF files: blocks have the values that ggml defines, and damaged files are errors."""

from __future__ import annotations

import json
import math
import random
import time
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock.config.engine import EngineArgs, SchedulerConfig, resolve
from penstock.config.gguf.architectures import read_config
from penstock.config.gguf.file import BLOCK_TYPES, GGUFFile, open_gguf
from penstock.config.gguf.folder import unpack_gguf, unpacked_file
from penstock.config.gguf.vocabulary import end_tokens, read_tokenizer
from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.pooling import find_pooling
from penstock.frontend.front_end import build_front_end
from penstock.kernels.quantized import QuantizedWeight, dense
from penstock.layers.linear import Linear
from penstock.messages.sampling_params import SamplingParams
from penstock.models.sources.gguf import GGUFSource
from penstock.models.weights import Weights
from penstock.tokenizer.tokenizer import Tokenizer, Truncation
from penstock.utils.errors import ConfigError

ROWS, INPUTS = 24, 512
WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(file: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]], **metadata: Any) -> None:
    """`metadata` names fields with __ for a point."""
    writer = gguf.GGUFWriter(file, metadata.pop("architecture", "qwen3"))
    for name, value in {"qwen3__attention__key_length": 16, "qwen3__embedding_length": 64, **metadata}.items():
        key = name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SHAPE = {
    "qwen3__attention__head_count": 4,
    "qwen3__attention__layer_norm_rms_epsilon": 1e-6,
    "qwen3__feed_forward_length": 96,
    "qwen3__block_count": 1,
    "qwen3__context_length": 128,
}


def embedding(vocab_size: int = 8) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    values = np.ones((vocab_size, 64), np.float32)
    return {"token_embd.weight": (values, gguf.GGMLQuantizationType.F32)}


def random_blocks(kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Returns random bytes [ROWS, bytes of INPUTS], but for float16 scales, which are numbers between 0.01 and 1."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * INPUTS // values, num_bytes), np.uint8)
    if kind == gguf.GGMLQuantizationType.MXFP4:
        blocks[:, 0] = rng.integers(0, 200, len(blocks))
    for at in {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}.get(
        kind.name, (0, 2) if kind.name.endswith("_K") else ()
    ):
        scales = rng.uniform(0.01, 1, len(blocks)).astype(np.float16) * rng.choice([-1, 1], len(blocks))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("name", [each.name for each in BLOCK_TYPES.values() if each.values > 1])
def test_blocks_have_the_values_that_ggml_defines(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    data = random_blocks(kind, np.random.default_rng(0))
    expected = torch.from_numpy(gguf.dequantize(data, kind)).bfloat16()
    write(tmp_path / "a.gguf", {**embedding(), "blk.0.ffn_up.weight": (data, kind)}, **SHAPE)
    with closing(GGUFSource(tmp_path / "a.gguf")) as source:
        for part in ((slice(None),), (slice(5, 9),), (slice(None), slice(256, 512))):
            found = source.read(WEIGHT, (ROWS, INPUTS), part)
            assert isinstance(found, QuantizedWeight)
            assert found.bits == (4 if name == "MXFP4" else int(name[1]))
            assert torch.equal(found.dequantize(), expected[part])


def test_codes_of_a_file_are_not_looked_through_for_some_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many bits of a block cannot be another number, and the bytes of a large model take a second."""

    def amax(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("codes are read again")

    data = (random_blocks(gguf.GGMLQuantizationType.Q4_K, np.random.default_rng(0)), gguf.GGMLQuantizationType.Q4_K)
    write(tmp_path / "a.gguf", {**embedding(), "blk.0.ffn_up.weight": data}, **SHAPE)
    with closing(GGUFSource(tmp_path / "a.gguf")) as source:
        monkeypatch.setattr(torch.Tensor, "amax", amax)
        found = source.read(WEIGHT, (ROWS, INPUTS), (slice(None), slice(256, 512)))
        assert isinstance(found, QuantizedWeight)
        QuantizedWeight.cat([found, found])
        with pytest.raises(AssertionError, match="read again"):
            replace(found, has_sound_codes=False)


def test_codes_of_a_layer_are_neighbours_and_their_memory_is_used_again(tmp_path: Path) -> None:
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_K
    data = {f"blk.0.ffn_{name}.weight": (random_blocks(kind, rng), kind) for name in ("gate", "up")}
    expected = [torch.from_numpy(gguf.dequantize(blocks, kind)).bfloat16() for blocks, _ in data.values()]
    write(tmp_path / "a.gguf", {**embedding(), **data}, **SHAPE)
    with closing(GGUFSource(tmp_path / "a.gguf")) as source:

        def read(name: str) -> QuantizedWeight:
            found = source.read(WEIGHT.replace("up", name), (ROWS, INPUTS))
            assert isinstance(found, QuantizedWeight)
            return found

        gate, up = read("gate"), read("up")
        both = QuantizedWeight.cat([gate, up])
        assert both.codes.data_ptr() == gate.codes.data_ptr(), "no copy"
        swapped = QuantizedWeight.cat([up, gate])
        assert torch.equal(swapped.dequantize(), torch.cat(expected[::-1]))
        first, rest = gate.codes.data_ptr(), both.codes[ROWS + 3 :]
        del gate, up, both
        # A part of them is still there.
        others = [read("gate") for _ in range(3)]
        assert first not in [each.codes.data_ptr() for each in others]
        assert all(torch.equal(each.dequantize(), expected[0]) for each in others)
        assert torch.equal(rest, swapped.codes[3:ROWS])
        del others, rest
        assert read("up").codes.data_ptr() == first


def test_the_codes_of_an_embedding_stay_and_those_of_layers_do_not(tmp_path: Path) -> None:
    rng, kind = np.random.default_rng(0), gguf.GGMLQuantizationType.Q4_K
    data = {name: (random_blocks(kind, rng), kind) for name in ("token_embd.weight", "blk.0.ffn_up.weight")}
    write(tmp_path / "a.gguf", data, **SHAPE)
    expected = torch.from_numpy(gguf.dequantize(*data["token_embd.weight"])).bfloat16()
    with closing(GGUFSource(tmp_path / "a.gguf")) as source:
        weights = Weights(source, torch.bfloat16, torch.device("cpu"))

        def place() -> int:
            found = source.read(WEIGHT, (ROWS, INPUTS))
            assert isinstance(found, QuantizedWeight)
            return found.codes.data_ptr()

        first = place()
        embedding = (weights / "model").embedding("embed_tokens", ROWS, INPUTS)
        assert isinstance(embedding.weight, QuantizedWeight)
        assert weights.size.num_bytes == embedding.weight.unpacked_nbytes == ROWS * INPUTS * (1 + (16 + 4) / 256)
        assert place() == first
    ids = torch.tensor([ROWS - 1, 0, 3, 3])
    assert torch.equal(embedding(ids), expected[ids])


def test_loading_takes_little_more_memory_than_the_layers(tmp_path: Path) -> None:
    """No copy of the codes, a byte each, stays with a layer, and no page of the file with the process."""
    shape = outputs, inputs = 32768, 1024
    blocks = np.zeros((outputs, inputs // 256 * 144), np.uint8)
    data = {f"blk.{layer}.ffn_up.weight": (blocks, gguf.GGMLQuantizationType.Q4_K) for layer in range(5)}
    write(tmp_path / "a.gguf", {**embedding(), **data}, **SHAPE)
    with closing(GGUFSource(tmp_path / "a.gguf")) as source:

        def layer(number: int) -> Linear:
            return Linear(source.read(WEIGHT.replace("0", str(number)), shape))

        # What the first leaves to the allocator, the others use.
        layers = [layer(0)]
        # From now on the peak is that from now on.
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        layers += [layer(number) for number in range(1, 5)]
        stored = 4 * blocks.nbytes
        after, peak = resident_bytes("VmRSS") - before, resident_bytes("VmHWM") - before
        assert after < 1.8 * stored
        # The codes of each are where those of the first were.
        assert peak < 1.8 * stored


def resident_bytes(field: str) -> int:
    """Returns a line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floats_are_read_as_they_are(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = torch.randn(ROWS, INPUTS).to(dtype)
    data = values.view(torch.int16 if dtype != torch.float32 else torch.float32).numpy()
    write(tmp_path / "a.gguf", {**embedding(), "blk.0.ffn_up.weight": (data.view(np.uint8), kind)}, **SHAPE)
    with closing(GGUFSource(tmp_path / "a.gguf")) as source:
        assert torch.equal(dense(source.read(WEIGHT, (ROWS, INPUTS), (slice(3, 7),))), values[3:7])
        with pytest.raises(ConfigError, match=r"ffn_up\.weight has shape \[24, 512\], not \[24, 256\]"):
            source.read(WEIGHT, (ROWS, 256))
        with pytest.raises(ConfigError, match=r"has no tensor blk\.0\.ffn_down\.weight"):
            source.read("model.layers.0.mlp.down_proj.weight", (ROWS, INPUTS))
        with pytest.raises(ConfigError, match=r"has no tensor model\.vision"):
            source.read("model.vision", (1,))


def test_a_file_is_a_folder_of_the_cache_and_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write(file, embedding(), **SHAPE, qwen3__rope__scaling__type="yarn", qwen3__rope__scaling__factor=4.0,
          qwen3__rope__scaling__original_context_length=32)  # fmt: skip
    folder = resolve_model_path(str(file))
    assert folder.is_relative_to(tmp_path / "cache" / "penstock")
    assert unpacked_file(folder) == file.resolve()
    config = load_model_config(folder)
    assert (config.model_type, config.vocab_size, config.head_dim, config.dtype) == ("qwen3", 8, 16, "bfloat16")
    assert (config.rope.rope_type, config.rope.scaling["factor"]) == ("yarn", 4.0)
    assert config.tie_word_embeddings
    assert unpack_gguf(file, needs_tokenizer=False) == folder
    write(file, embedding(9), **SHAPE)
    other = unpack_gguf(file, needs_tokenizer=False)
    assert other != folder
    assert load_model_config(other).vocab_size == 9
    assert list((tmp_path / "cache" / "penstock" / "gguf").iterdir()).__len__() == 2


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(), **SHAPE)
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"a\.gguf cannot be unpacked: .*: set XDG_CACHE_HOME to a folder"):
        unpack_gguf(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "the architecture 'mamba', and Penstock reads GGUF files of llama, qwen2"),
        ({"qwen3__block_count": "x"}, "num_hidden_layers"),
        ({"qwen3__context_length": [1, 2]}, "for config.json a list where one value is expected"),
        ({"qwen3__rope__freq_base": float("nan")}, "or a number that is not finite: it is damaged"),
        ({"qwen3__attention__layer_norm_rms_epsilon": float("inf")}, "or a number that is not finite"),
        ({"qwen3__rope__scaling__type": "spiral"}, "rope.scaling.type is 'spiral'"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__pre": "x"}, "tokenizer.ggml.pre is 'x'"),
        ({"tokenizer__ggml__model": "llama"}, "has no vocabulary"),
    ],
)
def test_what_is_not_read_is_refused_by_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(), **{**SHAPE, **changes})
    with pytest.raises(ConfigError, match=message):
        load_model_config(
            unpack_gguf(tmp_path / "a.gguf", needs_tokenizer="tokenizer" in message or "vocab" in message)
        )


def test_a_file_without_a_field_or_an_embedding_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(), **{key: value for key, value in SHAPE.items() if "feed" not in key})
    with pytest.raises(ConfigError, match=r"lacks the field qwen3\.feed_forward_length"):
        unpack_gguf(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf", {}, **SHAPE)
    with pytest.raises(ConfigError, match=r"has no token_embd\.weight"):
        unpack_gguf(tmp_path / "b.gguf")
    head = {"cls.output.weight": (np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.F32)}
    write(tmp_path / "r.gguf", embedding() | head, **SHAPE)
    with pytest.raises(ConfigError, match="is a reranker, whose scores are not read: use the safetensors checkpoint"):
        unpack_gguf(tmp_path / "r.gguf")
    write(tmp_path / "c.gguf", {"x": (np.zeros((4, 512 // 256 * 66), np.uint8), gguf.GGMLQuantizationType.IQ2_XXS)})
    with pytest.raises(ConfigError, match="tensor 'x' has ggml's type IQ2_XXS, and Penstock reads F32, F16, Q4_0"):
        GGUFFile(tmp_path / "c.gguf")


def test_biases_of_any_layer_count(tmp_path: Path) -> None:
    """The first one's may be missing, or have no attention: then the others must not be left out in silence."""
    file, f32 = tmp_path / "a.gguf", gguf.GGMLQuantizationType.F32
    for name in ("attn_q", "attn_qkv", "attn_kv_a_mqa", "ffn_gate", "ffn_gate_exps"):
        write(file, {**embedding(), f"blk.1.{name}.bias": (np.zeros(4, np.float32), f32)}, **SHAPE)
        config = read_config(open_gguf(file))
        assert (config["attention_bias"], config["mlp_bias"]) == ("attn" in name, name == "ffn_gate"), name


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    """Every length, count and offset may be anything: no crash, no long loop, no memory beyond the file's size."""
    file = tmp_path / "a.gguf"
    write(file, embedding(), **SHAPE, tokenizer__ggml__tokens=["a", "bc"], tokenizer__ggml__scores=[1.0, 2.0])
    whole = file.read_bytes()
    rng = random.Random(0)
    for end in [0, 3, 4, 7, *range(8, len(whole), 97)]:
        file.write_bytes(whole[:end])
        with pytest.raises(ConfigError):
            GGUFFile(file)
    header = len(whole) - 8 * 64 * 4
    started = time.monotonic()
    for _ in range(1500):
        damaged = bytearray(whole)
        at = rng.randrange(4, header)
        length = rng.choice((1, 2, 8))
        damaged[at : at + length] = rng.choice((rng.randbytes(length), b"\xff" * length, b"\0" * length))
        file.write_bytes(bytes(damaged[: len(whole)]))
        try:
            opened = GGUFFile(file)
            for name, tensor in opened.tensors.items():
                assert tensor.start + tensor.num_rows * tensor.row_bytes <= len(whole)
                opened.rows(name, 0, tensor.num_rows)
            load_model_config(unpack_gguf(file, needs_tokenizer=rng.random() < 0.5))
        except ConfigError:
            pass
    assert time.monotonic() - started < 60


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def text(data: bytes) -> bytes:
    return number(len(data)) + data


def header(tensors: int = 0, fields: int = 0) -> bytes:
    return b"GGUF" + number(3, 4) + number(tensors) + number(fields)


LARGE = (2**31, 2**32, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)
ARRAY = header(fields=1) + text(b"a") + number(9, 4)
TENSOR = header(tensors=1) + text(b"t")
# Each is a header as far as a count, which anything may be, and what follows it.
COUNTS = {
    "tensors": (header()[:8], number(0)),
    "fields": (header()[:16], b""),
    "length of a name": (header(fields=1), b"a"),
    "length of a text": (header(fields=1) + text(b"a") + number(8, 4), b"b"),
    "texts": (ARRAY + number(8, 4), text(b"") * 9),
    "numbers": (ARRAY + number(10, 4), number(1) * 9),
    "bytes": (ARRAY + number(0, 4), number(1) * 9),
    "arrays": (ARRAY + number(9, 4), (number(10, 4) + number(0)) * 9),
    "numbers of an inner array": (ARRAY + number(9, 4) + number(1) + number(12, 4), number(1) * 9),
    "length of a tensor's name": (header(tensors=1), b"t"),
    "rows": (TENSOR + number(2, 4) + number(32), number(0, 4) + number(0) + bytes(256)),
    "inputs": (TENSOR + number(2, 4), number(32) + number(0, 4) + number(0) + bytes(256)),
    "inputs in blocks": (TENSOR + number(2, 4), number(32) + number(8, 4) + number(0) + bytes(256)),
    "offset": (TENSOR + number(1, 4) + number(32) + number(0, 4), bytes(256)),
}


@pytest.mark.parametrize(("rows", "inputs", "kind"), [(0, 6, 0), (6, 0, 0), (2, 33, 8)])
def test_a_tensor_without_numbers_or_with_a_part_of_a_block_is_refused(
    rows: int, inputs: int, kind: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(TENSOR + number(2, 4) + number(inputs) + number(rows) + number(kind, 4) + number(0) + bytes(256))
    with pytest.raises(ConfigError, match=rf"tensor 't' has shape \[{rows}, {inputs}\]"):
        GGUFFile(file)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Few bytes would become many times as many of memory."""
    file = tmp_path / "a.gguf"
    places = [text(name) + number(1, 4) + number(64) + number(0, 4) + number(0) for name in (b"t", b"u")]
    file.write_bytes(header(tensors=2) + b"".join(places) + bytes(256 + 32))
    with pytest.raises(ConfigError, match=r"a\.gguf is damaged: its tensors overlap"):
        GGUFFile(file)


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_beyond_the_file_allocates_nothing(name: str, tmp_path: Path) -> None:
    before, after = COUNTS[name]
    for count in LARGE:
        file = tmp_path / f"{count}.gguf"
        file.write_bytes(before + number(count) + after)
        tracemalloc.start()
        try:
            with pytest.raises(ConfigError, match=f"{count}.gguf"):
                GGUFFile(file)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


BYTES = [chr(code) for code in range(33, 127)]


def test_byte_pairs_divide_words_as_the_family_does(tmp_path: Path) -> None:
    tokens = [*BYTES, "\u0120", "\u010a", "ab", "abc", "12", "123", "<|end|>", "<think>"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    vocabulary = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__merges": ["a b", "ab c", "1 2", "12 3"],
        "tokenizer__ggml__eos_token_id": len(tokens) - 2,
        "tokenizer__ggml__bos_token_id": 0,
        "tokenizer__chat_template": "{{ messages[0].content }}<|end|>",
    }
    found: dict[str, list[str]] = {}
    for pre, begins in (("qwen2", False), ("qwen35", False), ("llama-bpe", True), ("lfm2", True)):
        file = tmp_path / f"{pre}.gguf"
        names = {"tokenizer__ggml__pre": pre, "tokenizer__ggml__add_bos_token": begins}
        write(file, embedding(len(tokens)), **SHAPE, **vocabulary, **names)
        folder = unpack_gguf(file)
        tokenizer = Tokenizer(folder, len(tokens))
        text = "abc 123<|end|>\n<think>"
        found[pre] = [tokens[number] for number in tokenizer.encode(text)]
        assert tokenizer.eos_token_id == len(tokens) - 2
        assert tokenizer.chat_template_source == vocabulary["tokenizer__chat_template"]
        assert {n: t.is_special for n, t in tokenizer.added_tokens.items()} == {"<|end|>": True, "<think>": False}
        assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [len(tokens) - 2]}
    shared = ["<|end|>", "\u010a", "<think>"]
    assert found["qwen2"] == ["abc", "\u0120", "1", "2", "3", *shared]
    assert found["llama-bpe"] == [tokens[0], "abc", "\u0120", "123", *shared]
    assert (found["qwen35"], found["lfm2"]) == (found["qwen2"], found["llama-bpe"])


def test_a_conversation_with_tools_has_its_own_template(tmp_path: Path) -> None:
    """Files of Hermes have one."""
    tokens = [*BYTES, "ab"]
    vocabulary = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "llama-bpe",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [1] * len(tokens),
        "tokenizer__ggml__merges": ["a b"],
        "tokenizer__chat_template": "{{ messages[0].content }}",
        "tokenizer__chat_template__tool_use": "{{ tools[0].name }}",
    }
    file = tmp_path / "tools.gguf"
    write(file, embedding(len(tokens)), **SHAPE, **vocabulary)
    tokenizer = Tokenizer(unpack_gguf(file), len(tokens))
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.render_chat(messages) == "a"
    assert tokenizer.render_chat(messages, tools=[{"name": "b"}]) == "b"


def test_the_pieces_of_gemma_4_have_a_list_of_merges(tmp_path: Path) -> None:
    space = "\u2581"
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", "<bos>", *"abc\n", space, "ab", "bc", f"{space}a"]
    tokens += ["\n\n", "abc"]
    vocabulary = {
        "tokenizer__ggml__model": "gemma4",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": [6] * 256 + [2, 3] + [1] * (len(tokens) - 258),
        # By their order bc comes before ab, so that abc is never made.
        "tokenizer__ggml__merges": ["b c", f"{space} a", "a b", "\n \n", "ab c"],
        "tokenizer__ggml__bos_token_id": 257,
        "tokenizer__ggml__add_bos_token": True,
        "tokenizer__ggml__add_space_prefix": False,
    }
    write(tmp_path / "a.gguf", embedding(len(tokens)), **SHAPE, **vocabulary)
    tokenizer = Tokenizer(unpack_gguf(tmp_path / "a.gguf"), len(tokens))
    pieces = [tokens[number] for number in tokenizer.encode("abc ab\n\n\u00e9")]
    assert pieces == ["<bos>", "a", "bc", f"{space}a", "b", "\n\n", "<0xC3>", "<0xA9>"]
    write(tmp_path / "b.gguf", embedding(len(tokens)), **SHAPE, **{**vocabulary, "tokenizer__ggml__merges": 5})
    with pytest.raises(ConfigError, match=r"b\.gguf has no tokenizer\.ggml\.merges"):
        unpack_gguf(tmp_path / "b.gguf")


HYBRID = {
    "attention__head_count": 4,
    "attention__key_length": 16,
    "attention__layer_norm_rms_epsilon": 1e-6,
    "feed_forward_length": 96,
    "embedding_length": 64,
    "block_count": 1,
    "context_length": 128,
    "ssm__conv_kernel": 4,
    "ssm__state_size": 8,
    "ssm__group_count": 2,
    "ssm__time_step_rank": 4,
    "ssm__inner_size": 64,
}


def write_hybrid(file: Path, tensors: dict[str, np.ndarray], architecture: str = "qwen3next", **changes: Any) -> None:
    stored = {name: (values, gguf.GGMLQuantizationType.F32) for name, values in tensors.items()}
    fields = {f"{architecture}__{name}": value for name, value in {**HYBRID, **changes}.items()}
    write(file, {**embedding(), **stored}, architecture=architecture, **fields)


def test_files_of_qwen3_next_have_two_layouts(tmp_path: Path) -> None:
    """In older ones queries, keys, values and gates are one tensor, and rates always are, by key head."""
    name = "model.layers.0.linear_attn."
    rates = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    older = np.arange(160 * 64, dtype=np.float32).reshape(160, 64)
    write_hybrid(tmp_path / "older.gguf", {"blk.0.ssm_in.weight": older, "blk.0.ssm_ba.weight": rates})
    with closing(GGUFSource(tmp_path / "older.gguf")) as source:
        assert torch.equal(dense(source.read(f"{name}in_proj_qkvz.weight", (160, 64))), torch.from_numpy(older))
        assert torch.equal(dense(source.read(f"{name}in_proj_ba.weight", (8, 64))), torch.from_numpy(rates))
    write_hybrid(tmp_path / "newer.gguf", {"blk.0.attn_qkv.weight": older[:96], "blk.0.ssm_ba.weight": rates})
    with closing(GGUFSource(tmp_path / "newer.gguf")) as source:
        assert not source.has(f"{name}in_proj_qkvz.weight")
        found = [dense(source.read(f"{name}in_proj_{kind}.weight", (4, 64))) for kind in "ba"]
    assert torch.equal(torch.cat(found), torch.from_numpy(rates[[0, 1, 4, 5, 2, 3, 6, 7]]))


def test_a_damaged_file_of_a_hybrid_is_refused(tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.A_log"
    for number, (rates, message) in enumerate(
        (
            (np.array([-1, 0, -1, -1], np.float32), "blk.0.ssm_a cannot be used: minus the exp"),
            (np.array([-1, np.nan, -1, -1], np.float32), "blk.0.ssm_a cannot be used: minus the exp"),
            (-np.ones(5, np.float32), r"blk.0.ssm_a has shape \[5\], not \[4\]"),
        )
    ):
        write_hybrid(tmp_path / f"{number}.gguf", {"blk.0.ssm_a": rates})
        with closing(GGUFSource(tmp_path / f"{number}.gguf")) as source, pytest.raises(ConfigError, match=message):
            source.read(name, (4,))
    for architecture, changes, message in (
        ("qwen35", {"ssm__time_step_rank": 0}, "the fields qwen35.* cannot be used: .* by zero"),
        ("lfm2", {"attention__head_count_kv": [1, 0], "shortconv__l_cache": 3}, "has 2 values for 1 layers"),
        ("granitehybrid", {"ssm__inner_size": "x", "logit_scale": 1.0}, "the fields granitehybrid.* cannot be used"),
        ("nemotron_h", {"feed_forward_length": [1, 2, 3]}, "a field has 3 values for 1 layers"),
        ("gemma4", {}, "lacks the field gemma4.attention.sliding_window_pattern"),
        (
            "gemma4",
            {
                "block_count": 0,
                "attention__sliding_window_pattern": [1],
                "attention__sliding_window": 8,
                "attention__key_length_swa": 16,
            },
            "the fields gemma4.* cannot be used: list index",
        ),
    ):
        write_hybrid(tmp_path / "a.gguf", {}, architecture, **{"attention__head_count_kv": 2, **changes})
        with pytest.raises(ConfigError, match=message):
            read_config(open_gguf(tmp_path / "a.gguf"))


def test_damaged_parts_of_a_latent_are_refused(tmp_path: Path) -> None:
    """Of two heads, which have 8 numbers of keys without rotation and 32 of values."""
    fields = {name.replace("qwen3", "deepseek2"): value for name, value in SHAPE.items()}
    fields |= {"deepseek2__attention__key_length": 40, "deepseek2__embedding_length": 64}
    f32, q8_0 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0
    keys, values = np.ones((2, 64, 8), np.float32), gguf.quantize(np.ones((2, 32, 64), np.float32), q8_0)
    damaged = values.copy()
    damaged.reshape(-1, 34)[3, :2] = 0xFF
    for number, (stored, kind, message) in enumerate(
        (
            (values, q8_0, None),
            (damaged, q8_0, r"blk\.0\.attn_kv_b\.weight cannot be used: scales must be finite"),
            (np.ones(64, np.float32), f32, r"attn_k_b\.weight \[2, 64, 8\] does not fit \[64\]"),
        )
    ):
        file = tmp_path / f"{number}.gguf"
        tensors = {"blk.0.attn_k_b.weight": (keys, f32), "blk.0.attn_v_b.weight": (stored, kind)}
        write(file, {**embedding(), **tensors}, architecture="deepseek2", **fields)
        with closing(GGUFSource(file)) as source:
            if message is None:
                assert (dense(source.read("model.layers.0.self_attn.kv_b_proj.weight", (80, 64))) == 1).all()
                continue
            with pytest.raises(ConfigError, match=message):
                source.read("model.layers.0.self_attn.kv_b_proj.weight", (80, 64))


VOCABULARY = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "llama-bpe",
    "tokenizer__ggml__tokens": ["a", "b", "<|begin|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "ab"],
    "tokenizer__ggml__token_type": [1, 1, 3, 3, 1, 3, 1],
    "tokenizer__ggml__merges": ["a b"],
    "tokenizer__ggml__bos_token_id": 2,
    "tokenizer__ggml__eos_token_id": 0,
}


def test_what_a_file_does_not_name_is_what_llama_cpp_takes(tmp_path: Path) -> None:
    """The token before a Llama 3 prompt, and the control tokens that end an answer."""
    write(tmp_path / "a.gguf", embedding(7), **SHAPE, **VOCABULARY)
    folder = unpack_gguf(tmp_path / "a.gguf")
    assert Tokenizer(folder, 7).encode("a")[0] == 2
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0, 3, 5]}


def test_tokens_of_tools_end_an_answer(tmp_path: Path) -> None:
    """A Llama 3.1 calls a tool, and a GLM-4 waits for its result."""
    tokens = ["a", "b", "<|begin|>", "<|eom_id|>", "<|observation|>", "<|user|>", "ab"]
    write(tmp_path / "a.gguf", embedding(7), **SHAPE, **VOCABULARY | {"tokenizer__ggml__tokens": tokens})
    assert end_tokens(open_gguf(tmp_path / "a.gguf")) == [0, 3]
    types = {"tokenizer__ggml__token_type": [1, 1, 3, 3, 3, 3, 1]}
    write(tmp_path / "b.gguf", embedding(7), **SHAPE, **VOCABULARY | {"tokenizer__ggml__tokens": tokens} | types)
    assert end_tokens(open_gguf(tmp_path / "b.gguf")) == [0, 3, 4]


def test_the_sampling_that_a_file_recommends(tmp_path: Path) -> None:
    recommended = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.05, "mirostat": 1}
    stated = {f"general__sampling__{name}": value for name, value in recommended.items()}
    write(tmp_path / "a.gguf", embedding(7), **SHAPE, **VOCABULARY, **stated)
    config = resolve(EngineArgs(model=str(tmp_path / "a.gguf")))
    limits = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, max_num_in_flight=1)
    sampling = build_front_end(config, limits).default_sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.95, 0.0)
    assert sampling.repetition_penalty == 1.05
    greedy = {"do_sample": False, "repetition_penalty": 1.05, "temperature": 0.6, "top_k": 20}
    (config.model.path / "generation_config.json").write_text(json.dumps(greedy))
    sampling = build_front_end(config, limits).default_sampling_params
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.0, SamplingParams().top_k, 1.05)


@pytest.mark.parametrize(
    ("stored", "amplitude"),
    [(1 / (1 + 0.1 * math.log(4)), 1.0), (1.25, 1.25), (1.0, 1.0), (None, None)],
    ids=["a factor of YaRN's own", "whole", "one", "none"],
)
def test_the_amplitude_of_yarn(stored: float | None, amplitude: float | None, tmp_path: Path) -> None:
    """Converters store `attn_factor`, as DeepSeek's distillation into Qwen3 has it, in the place of the amplitude."""
    yarn: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    if stored is not None:
        yarn["yarn_attn_factor"] = stored
    stated = {f"qwen3__rope__scaling__{name}": value for name, value in yarn.items()}
    write(tmp_path / "a.gguf", embedding(), **SHAPE, **stated)
    assert read_config(open_gguf(tmp_path / "a.gguf"))["rope_scaling"].get("attention_factor") == amplitude


@pytest.mark.parametrize(
    ("stored", "factor"),
    [
        ({"rope__scaling__factor": 4.0}, 4.0),  # linear, if there is no type
        ({"rope__scale_linear": 8.0}, 8.0),  # as in the first files
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, 2.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__factor": 0.0}, None),
        ({}, None),
    ],
)
def test_a_factor_without_a_type_divides_positions(
    stored: dict[str, Any], factor: float | None, tmp_path: Path
) -> None:
    """As llama.cpp reads it (`load_hparams` in `llama-model.cpp`)."""
    write(tmp_path / "a.gguf", embedding(), **SHAPE, **{f"qwen3__{name}": value for name, value in stored.items()})
    scaling = read_config(open_gguf(tmp_path / "a.gguf"))["rope_scaling"]
    assert scaling == (None if factor is None else {"rope_type": "linear", "factor": factor})


def test_tokens_of_phi_3_take_the_spaces_after_them(tmp_path: Path) -> None:
    """But those of the text do not, nor do those of another model with such a vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "<|endoftext|>", "<|user|>"]
    words = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 8,
        "token_type": [2, 3, 3, 6, 1, 1, 3, 4],
        "bos_token_id": 1,
        "add_space_prefix": False,
    }
    stated = {f"tokenizer__ggml__{name}": value for name, value in words.items()}
    for architecture, spaces, space in (("phi3", "", ""), ("llama", "\u2581 <0x0A> ", "\u2581 ")):
        write(tmp_path / architecture, embedding(8), **stated, architecture=architecture)
        (tmp_path / "tokenizer.json").write_text(json.dumps(read_tokenizer(open_gguf(tmp_path / architecture))))
        tokenizer = Tokenizer(tmp_path, 8)
        spelled = " ".join(tokens[number] for number in tokenizer.encode("<|user|> \na<|endoftext|> </s> a"))
        assert spelled == f"<s> <|user|> {spaces}a <|endoftext|> \u2581 </s> {space}a"


def test_a_list_of_expert_counts_is_refused(tmp_path: Path) -> None:
    shape = {name.replace("qwen3", "llama"): value for name, value in SHAPE.items()}
    experts = {"llama__embedding_length": 64, "llama__expert_used_count": 2, "llama__expert_count": [4, 4]}
    write(tmp_path / "a.gguf", embedding(), **shape, **experts, architecture="llama")
    with pytest.raises(ConfigError, match="a list where one value is expected"):
        unpack_gguf(tmp_path / "a.gguf", needs_tokenizer=False)


def test_fields_of_recurrent_layers_do_not_concern_other_families(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(), **SHAPE, qwen3__ssm__time_step_rank=0)
    assert GGUFSource(tmp_path / "a.gguf").has("model.embed_tokens.weight")


def test_attention_in_both_directions_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(7), **SHAPE, **VOCABULARY, qwen3__attention__causal=False)
    with pytest.raises(ConfigError, match="is_causal of a qwen3 must be true: only encoders attend"):
        load_model_config(unpack_gguf(tmp_path / "a.gguf"))


@pytest.mark.parametrize(("stored", "method"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None)])
def test_an_embedder_pools_as_its_file_says(stored: int, method: str | None, tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", embedding(7), **SHAPE, **VOCABULARY, qwen3__pooling_type=stored)
    model = load_model_config(unpack_gguf(tmp_path / "a.gguf"))
    found = find_pooling("auto", None, model)
    assert (found and found.method) == method
    if found is not None:
        assert found.normalize
        assert find_pooling("generate", None, model) is None
        assert find_pooling("auto", '{"pooling_type": "LAST", "normalize": false}', model) == replace(
            found, method="last", normalize=False
        )


def test_the_end_token_of_texts_of_which_vectors_are_made(tmp_path: Path) -> None:
    """Embedders are trained with it, and a generated answer must not begin with it."""
    asked = {"tokenizer__ggml__eos_token_id": 3, "tokenizer__ggml__add_eos_token": True}
    write(tmp_path / "a.gguf", embedding(7), **SHAPE, **{**VOCABULARY, **asked})
    folder = unpack_gguf(tmp_path / "a.gguf")
    tokenizer = Tokenizer(folder, 7, pools=True)
    assert Tokenizer(folder, 7).encode("aab") == [2, 0, 6]
    assert tokenizer.encode("aab") == [2, 0, 6, 3]
    assert tokenizer.encode("aab", add_special_tokens=False) == [0, 6]
    assert tokenizer.encode("aab", truncation=Truncation(3, keeps_end=False)) == [2, 0, 3]
    assert tokenizer.encode("aab", truncation=Truncation(3)) == [2, 6, 3]
    assert tokenizer.encode("aab", truncation=Truncation(1)) == [3]
    assert tokenizer.encode_pair("a", "bb") == ([2, 0, 1, 1, 3], None)
    assert tokenizer.encode_pair("a", "bb", Truncation(4)) == ([2, 0, 1, 3], None)
    # A post-processor that appends it need not be completed.
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["post_processor"]["single"] += [{"SpecialToken": {"id": "<|eot_id|>", "type_id": 0}}]
    stored["post_processor"]["special_tokens"]["<|eot_id|>"] = {
        "id": "<|eot_id|>",
        "ids": [3],
        "tokens": ["<|eot_id|>"],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    assert Tokenizer(tmp_path, 7, pools=True).encode("aab") == [2, 0, 6, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer__ggml__pre": "superbpe"},
        {"tokenizer__ggml__pre": ["llama-bpe"]},
        {"tokenizer__ggml__token_type": [1]},
        {"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": ["x"] * 7},
    ],
)
def test_another_tokenizer_takes_the_place_of_one_that_is_not_read(changes: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write(file, embedding(7), **SHAPE, **{**VOCABULARY, **changes})
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tokenizer|vocabulary|score|type"):
            resolve(EngineArgs(model=str(file)))
    config = resolve(EngineArgs(model=str(file), skip_tokenizer_init=True))
    assert config.model.vocab_size == 7
    tokenizer = resolve(EngineArgs(model=str(file), tokenizer=str(tmp_path)))
    assert tokenizer.tokenizer_path == tmp_path


def test_the_numbers_of_a_file_decide_its_dtype(tmp_path: Path) -> None:
    for name, kind in (("F16", np.float16), ("F32", np.float32)):
        data = np.ones((8, 64), kind)
        stored = {"token_embd.weight": (data, gguf.GGMLQuantizationType[name])}
        write(tmp_path / f"{name}.gguf", stored, **SHAPE)
        found = load_model_config(unpack_gguf(tmp_path / f"{name}.gguf", needs_tokenizer=False))
        assert found.dtype == ("float16" if name == "F16" else "bfloat16")


PARTS = {"split__count": 2, "split__tensors__count": 2}


@pytest.mark.parametrize(
    ("names", "second", "message"),
    [
        (("a.gguf", "b.gguf"), {}, "a.gguf is one of 2 files, which are found by their names"),
        (("a-00001-of-00003.gguf", "b"), {}, r"a-00002-of-00003\.gguf is missing: .* is one of 3 files"),
        (("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"), {"split__no": 0}, "is not part 2 of 2 of"),
        (("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"), {"split__count": 3}, "is not part 2 of 2 of"),
        (("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"), {"name": "token_embd.weight"}, "the tensor .* of another"),
        (("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"), {"first": 3}, "have 2 tensors of 3"),
    ],
)
def test_parts_that_are_not_one_model_are_refused(
    names: tuple[str, str], second: dict[str, Any], message: str, tmp_path: Path
) -> None:
    paths, options = [tmp_path / name for name in names], dict(second)
    name, total = options.pop("name", "x"), options.pop("first", 2)
    write(paths[0], embedding(), **SHAPE, **{**PARTS, "split__tensors__count": total}, split__no=0)
    write(paths[1], {name: embedding()["token_embd.weight"]}, **{**PARTS, "split__no": 1, **options})
    with pytest.raises(ConfigError, match=message):
        unpack_gguf(paths[0], needs_tokenizer=False)


@pytest.mark.parametrize(("architecture", "largest"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_divides_by_another_number(architecture: str, largest: int, tmp_path: Path) -> None:
    fields = {name.replace("qwen3", architecture): value for name, value in SHAPE.items()}
    sizes = {f"{architecture}__attention__key_length": 24, f"{architecture}__embedding_length": 64}
    sizes[f"{architecture}__attention__sliding_window"] = 8
    for layers, expected in ((2, 24), (largest, 16)):
        tensors = embedding() | {f"t{i}": embedding()["token_embd.weight"] for i in range(layers)}
        file = tmp_path / f"{layers}.gguf"
        write(file, tensors, architecture=architecture, **{**fields, **sizes, f"{architecture}__block_count": layers})
        folder = unpack_gguf(file, needs_tokenizer=False)
        assert json.loads((folder / "config.json").read_text())["query_pre_attn_scalar"] == expected


def test_a_number_is_the_one_that_the_converter_has_read(tmp_path: Path) -> None:
    """0.22 in single precision is not the number 0.22, of which a layer's multiplier is made."""
    write(tmp_path / "a.gguf", embedding(), **{**SHAPE, "qwen3__attention__layer_norm_rms_epsilon": 1.1e-5})
    config = load_model_config(unpack_gguf(tmp_path / "a.gguf", needs_tokenizer=False))
    assert config.rms_norm_eps == 1.1e-5


def test_a_granite_without_rotation_is_refused(tmp_path: Path) -> None:
    fields = {name.replace("qwen3", "granite"): value for name, value in SHAPE.items()}
    fields |= {"granite__embedding_length": 64, "granite__logit_scale": 2.0, "granite__rope__scaling__finetuned": False}
    write(tmp_path / "a.gguf", embedding(), architecture="granite", **fields)
    with pytest.raises(ConfigError, match="a Granite without rotation is not served"):
        unpack_gguf(tmp_path / "a.gguf", needs_tokenizer=False)


def test_sentence_pieces_merge_by_score(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "\u2581", "a", "b", "c", "ab", "bc", "\u2581ab", "abc"]
    scores = [0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -3.0, -1.0, -2.0, -8.0]
    write(
        tmp_path / "a.gguf",
        embedding(len(tokens)),
        **SHAPE,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__token_type=[2, 3, 3, 6] + [1] * 8,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
    )
    tokenizer = Tokenizer(unpack_gguf(tmp_path / "a.gguf"), len(tokens))
    spelled = [tokens[number] for number in tokenizer.encode("ab abc\n")]
    # "bc" has the higher score, so it is merged first; then "a" + "bc".
    assert spelled == ["<s>", "\u2581ab", "\u2581", "abc", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("ab abc\n")) == "ab abc\n"
