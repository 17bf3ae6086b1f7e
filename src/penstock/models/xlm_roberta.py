"""XLM-RoBERTa (Conneau et al. 2019, arXiv:1911.02116): RoBERTa with another vocabulary."""

from __future__ import annotations

from penstock.models.encoder import EncoderArchitecture

ARCHITECTURE = EncoderArchitecture(prefix="roberta", head_dense="classifier.dense", head_out="classifier.out_proj")
