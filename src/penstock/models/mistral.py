"""Mistral (Jiang et al. 2023, arXiv:2310.06825): like Llama, with a sliding window, which the configuration gives."""

from __future__ import annotations

from penstock.models.decoder import Architecture
from penstock.models.parts import GatedMLP, GroupedQueryAttention

ARCHITECTURE = Architecture(attention=GroupedQueryAttention, feed_forward=GatedMLP)
