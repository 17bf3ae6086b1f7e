"""llama.cpp (through llama-cpp-python's C interface) on the workload.

Writes a GGUF file with random weights in the shape of the given config.json (Qwen3, Qwen3-MoE, Qwen3.5, DeepSeek-V2,
GLM-4.7-Flash, Gemma 3 or Phi-4-mini) into that folder, once: in bf16, q8_0 or q4_0, of which the embedding and the head
are q8_0, or in one of llama.cpp's own mixes of K-quants, q6_k and q4_k_m, which it makes of the file in bf16.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import gguf
import gguf_header
import llama_cpp
import numpy as np
from gguf_mixes import MIXES, quantized
from workload import OUTPUT, Report, batch_sizes, measure

MOST_REQUESTS, MOST_ROWS = 32, 2048

ARCHITECTURES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "deepseek_v2": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}


class Checkpoint:
    """A GGUF file in the shape of a config.json."""

    def __init__(self, folder: Path, file: Path) -> None:
        """The file's name without its suffix is the type of its matrices."""
        self._kind = gguf.GGMLQuantizationType[file.stem.upper()]
        self.config = json.loads((folder / "config.json").read_text())
        self.is_latent = "kv_lora_rank" in self.config
        self.is_fused = self.config["model_type"] == "phi3"
        self.has_outer_norms = self.config["model_type"] == "gemma3_text"
        self.head: int = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        self.hidden: int = self.config["hidden_size"]
        # Every so many layers one has attention, and the others recurrence; 0 if all have attention.
        self.interval: int = self.config.get("full_attention_interval", 0)
        self._writer = gguf.GGUFWriter(str(file), ARCHITECTURES[self.config["model_type"]])
        self._rng = np.random.default_rng(0)

    def write(self) -> None:
        self._describe()
        self._matrix("token_embd.weight", self.config["vocab_size"], self.hidden)
        self._norm("output_norm.weight", self.hidden)
        if not self.config["tie_word_embeddings"]:
            self._matrix("output.weight", self.config["vocab_size"], self.hidden)
        for layer in range(self.config["num_hidden_layers"]):
            self._prefix = f"blk.{layer}."
            self._norm("attn_norm.weight", self.hidden)
            self._mix(layer)
            if self.has_outer_norms:
                self._norm("post_attention_norm.weight", self.hidden)
                self._norm("post_ffw_norm.weight", self.hidden)
            self._norm("post_attention_norm.weight" if self.interval else "ffn_norm.weight", self.hidden)
            has_experts = self.num_experts and layer >= self.config.get("first_k_dense_replace", 0)
            self._experts() if has_experts else self._dense("", self.config["intermediate_size"])
        gguf_header.write(self._writer)

    def _mix(self, layer: int) -> None:
        if self.interval and (layer + 1) % self.interval:
            self._gated_delta()
        else:
            self._latent_attention() if self.is_latent else self._attention()

    @property
    def num_experts(self) -> int:
        return self.config.get("num_experts") or self.config.get("n_routed_experts") or 0

    # ---- Metadata ----

    def _describe(self) -> None:
        config, writer = self.config, self._writer
        gguf_header.describe(writer, config)
        if self.is_latent:
            rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
            writer.add_head_count_kv(1)
            writer.add_key_length(latent + rope)
            writer.add_value_length(latent)
            writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
            writer.add_value_length_mla(config["v_head_dim"])
            writer.add_kv_lora_rank(latent)
            if config["q_lora_rank"]:
                writer.add_q_lora_rank(config["q_lora_rank"])
            writer.add_rope_dimension_count(rope)
        else:
            gguf_header.describe_heads(writer, config, self.head)
            part = config.get("rope_parameters", config).get("partial_rotary_factor", 1.0)
            writer.add_rope_dimension_count(int(self.head * part))
            if self.interval:
                self._describe_recurrence()
            if config.get("sliding_window"):
                writer.add_sliding_window(config["sliding_window"])
        if self.num_experts:
            writer.add_expert_count(self.num_experts)
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if self.is_latent and self.num_experts:
            writer.add_leading_dense_block_count(config["first_k_dense_replace"])
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            gating = gguf.ExpertGatingFuncType
            is_sigmoid = config["scoring_func"] == "sigmoid"
            writer.add_expert_gating_func(gating.SIGMOID if is_sigmoid else gating.SOFTMAX)

    def _describe_recurrence(self) -> None:
        config, writer = self.config, self._writer
        writer.add_full_attention_interval(self.interval)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])

    # ---- Tensors ----

    _prefix = ""

    def _matrix(self, name: str, *shape: int) -> None:
        values = self._rng.standard_normal(shape, dtype=np.float32) * 0.02
        kind = self._kind
        if kind != gguf.GGMLQuantizationType.BF16:
            kind = kind if self._prefix else gguf.GGMLQuantizationType.Q8_0
        self._writer.add_tensor(self._prefix + name, gguf.quantize(values, kind), raw_dtype=kind)

    def _norm(self, name: str, size: int) -> None:
        self._writer.add_tensor(self._prefix + name, np.ones(size, dtype=np.float32))

    def _attention(self) -> None:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        if self.is_fused:
            self._matrix("attn_qkv.weight", (heads + 2 * kv_heads) * self.head, self.hidden)
        else:
            # A gate for every query is beside it.
            for name, count in (("q", heads * 2 if self.interval else heads), ("k", kv_heads), ("v", kv_heads)):
                self._matrix(f"attn_{name}.weight", count * self.head, self.hidden)
            self._norm("attn_q_norm.weight", self.head)
            self._norm("attn_k_norm.weight", self.head)
        self._matrix("attn_output.weight", self.hidden, heads * self.head)

    def _gated_delta(self) -> None:
        config = self.config
        heads, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
        inner = heads * size
        channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + inner
        self._matrix("attn_qkv.weight", channels, self.hidden)
        self._matrix("attn_gate.weight", inner, self.hidden)
        self._matrix("ssm_beta.weight", heads, self.hidden)
        self._matrix("ssm_alpha.weight", heads, self.hidden)
        self._matrix("ssm_out.weight", self.hidden, inner)
        self._norm("ssm_norm.weight", size)
        self._numbers("ssm_conv1d.weight", channels, config["linear_conv_kernel_dim"])
        self._numbers("ssm_dt.bias", heads)
        self._numbers("ssm_a", heads)

    def _numbers(self, name: str, *shape: int) -> None:
        """Small negative numbers, in float32."""
        values = -0.1 * self._rng.random(shape, dtype=np.float32)
        self._writer.add_tensor(self._prefix + name, values)

    def _latent_attention(self) -> None:
        config = self.config
        heads, latent, rope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope, value, rank = config["qk_nope_head_dim"], config["v_head_dim"], config["q_lora_rank"]
        if rank:
            self._matrix("attn_q_a.weight", rank, self.hidden)
            self._norm("attn_q_a_norm.weight", rank)
            self._matrix("attn_q_b.weight", heads * (nope + rope), rank)
        else:
            self._matrix("attn_q.weight", heads * (nope + rope), self.hidden)
        self._matrix("attn_kv_a_mqa.weight", latent + rope, self.hidden)
        self._norm("attn_kv_a_norm.weight", latent)
        self._matrix("attn_k_b.weight", heads, latent, nope)
        self._matrix("attn_v_b.weight", heads, value, latent)
        self._matrix("attn_output.weight", self.hidden, heads * value)

    def _dense(self, kind: str, inner: int) -> None:
        if self.is_fused:
            self._matrix("ffn_up.weight", 2 * inner, self.hidden)
        else:
            self._matrix(f"ffn_gate{kind}.weight", inner, self.hidden)
            self._matrix(f"ffn_up{kind}.weight", inner, self.hidden)
        self._matrix(f"ffn_down{kind}.weight", self.hidden, inner)

    def _experts(self) -> None:
        config, inner = self.config, self.config["moe_intermediate_size"]
        router = self._rng.standard_normal((self.num_experts, self.hidden), dtype=np.float32) * 0.02
        self._writer.add_tensor(f"{self._prefix}ffn_gate_inp.weight", router)
        if config.get("scoring_func") == "sigmoid":
            self._writer.add_tensor(f"{self._prefix}exp_probs_b.bias", np.zeros(self.num_experts, np.float32))
        self._matrix("ffn_gate_exps.weight", self.num_experts, inner, self.hidden)
        self._matrix("ffn_up_exps.weight", self.num_experts, inner, self.hidden)
        self._matrix("ffn_down_exps.weight", self.num_experts, self.hidden, inner)
        if config.get("n_shared_experts"):
            self._dense("_shexp", inner * config["n_shared_experts"])


class Engine:
    def __init__(self, file: Path) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
        context = llama_cpp.llama_context_default_params()
        needed = (count * (length + 2 * OUTPUT) for _, count, length in batch_sizes())
        context.n_ctx = max([MOST_REQUESTS * 256, *needed])
        context.n_batch = context.n_ubatch = MOST_ROWS
        context.n_seq_max = MOST_REQUESTS
        context.n_threads = context.n_threads_batch = 2
        context.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def generate(self, batch: list[list[int]], num_tokens: int, report: Report) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        last = [0] * len(batch)
        rows = [(prompt[i], i, s, i == len(prompt) - 1) for s, prompt in enumerate(batch) for i in range(len(prompt))]
        for first in range(0, len(rows), MOST_ROWS):
            part = rows[first : first + MOST_ROWS]
            for row, token in zip([row for row in part if row[3]], self._decode(part), strict=True):
                last[row[2]] = token
        report(range(len(batch)))
        for step in range(num_tokens - 1):
            rows = [(last[s], len(batch[s]) + step, s, True) for s in range(len(batch))]
            last = self._decode(rows)
            report(range(len(batch)))

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
    file = folder / f"{sys.argv[2]}.gguf"
    source = folder / "bf16.gguf" if file.stem in MIXES else file
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    if not file.exists() and not source.exists():
        Checkpoint(folder, source).write()
    if not file.exists():
        quantized(source, file)
    measure("llama.cpp", Engine(file).generate)


main()
