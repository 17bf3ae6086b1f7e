"""What the GGUF files of several comparisons have in common, whatever their models are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf


def describe(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """Adds the sizes of a config.json, without those of keys and values, and a tokenizer that is never used."""
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_token_merges(["t 0"])


def describe_heads(writer: gguf.GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    """Adds the sizes of keys and values, unless they are latent."""
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def write(writer: gguf.GGUFWriter) -> None:
    """Writes the file with all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
