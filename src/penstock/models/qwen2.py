"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): like Llama, with biases on queries, keys and values."""

from __future__ import annotations

from functools import partial

from penstock.models.decoder import Architecture
from penstock.models.parts import GatedMLP, GroupedQueryAttention

ARCHITECTURE = Architecture(attention=partial(GroupedQueryAttention, qkv_bias=True), feed_forward=GatedMLP)
