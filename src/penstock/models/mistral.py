"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with a sliding window, which the configuration carries."""

from __future__ import annotations

from penstock.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
