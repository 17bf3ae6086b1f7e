"""Qwen3, dense (Yang et al. 2025, arXiv:2505.09388): like Llama, with a norm on every query and key head."""

from __future__ import annotations

from functools import partial

from penstock.models.decoder import Architecture
from penstock.models.parts import GatedMLP, GroupedQueryAttention

ARCHITECTURE = Architecture(attention=partial(GroupedQueryAttention, head_norms=True), feed_forward=GatedMLP)
