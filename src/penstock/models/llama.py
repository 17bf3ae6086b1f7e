"""Llama 2 and 3 (Touvron et al. 2023, arXiv:2307.09288)."""

from __future__ import annotations

from penstock.models.decoder import Architecture
from penstock.models.parts import GatedMLP, GroupedQueryAttention

ARCHITECTURE = Architecture(attention=GroupedQueryAttention, feed_forward=GatedMLP)
