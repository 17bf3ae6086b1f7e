"""llama.cpp (through llama-cpp-python's C interface) on the workload.

Writes a GGUF file with random bfloat16 weights in the shape of the given config.json, once, and keeps it in the folder
for temporary files.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from workload import measure

MAX_TOKENS = 32 * 256


def write_gguf(folder: Path, file: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    vocab = config["vocab_size"]
    writer = gguf.GGUFWriter(str(file), "qwen3")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_merges(["t 0"])
    rng = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = (rng.standard_normal((rows, columns), dtype=np.float32) * 0.02).view(np.uint32) >> 16
        data = values.astype(np.uint16).view(np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    matrix("token_embd.weight", vocab, hidden)
    norm("output_norm.weight", hidden)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        norm(prefix + "attn_norm.weight", hidden)
        matrix(prefix + "attn_q.weight", heads * head, hidden)
        matrix(prefix + "attn_k.weight", kv_heads * head, hidden)
        matrix(prefix + "attn_v.weight", kv_heads * head, hidden)
        norm(prefix + "attn_q_norm.weight", head)
        norm(prefix + "attn_k_norm.weight", head)
        matrix(prefix + "attn_output.weight", hidden, heads * head)
        norm(prefix + "ffn_norm.weight", hidden)
        matrix(prefix + "ffn_gate.weight", inner, hidden)
        matrix(prefix + "ffn_up.weight", inner, hidden)
        matrix(prefix + "ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Engine:
    def __init__(self, file: Path) -> None:
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, None)
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = MAX_TOKENS
        context.n_batch = context.n_ubatch = 2048
        context.n_seq_max = 32
        context.n_threads = context.n_threads_batch = 2
        context.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, batch: list[list[int]], num_tokens: int) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        last = [0] * len(batch)
        per_call = max(1, 2048 // len(batch[0]))
        for first in range(0, len(batch), per_call):
            part = range(first, min(first + per_call, len(batch)))
            rows = [(batch[s][i], i, s, i == len(batch[s]) - 1) for s in part for i in range(len(batch[s]))]
            for sequence, token in zip(part, self._decode(rows), strict=True):
                last[sequence] = token
        for step in range(num_tokens - 1):
            rows = [(last[s], len(batch[s]) + step, s, True) for s in range(len(batch))]
            last = self._decode(rows)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (token, position, sequence, wants logits) rows; returns the greedy tokens of those that want them."""
        batch = llama_cpp.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wants
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, status
        chosen = []
        for i, row in enumerate(rows):
            if row[3]:
                logits = llama_cpp.llama_get_logits_ith(self._context, i)
                array = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))
                chosen.append(int(array.argmax()))
        llama_cpp.llama_batch_free(batch)
        return chosen


def main() -> None:
    folder = Path(sys.argv[1])
    file = Path(tempfile.gettempdir()) / f"penstock-bench-{folder.name}.gguf"
    if not file.exists():
        write_gguf(folder, file)
    measure("llama.cpp", Engine(file).generate)


main()
