"""RoBERTa (Liu et al. 2019, arXiv:1907.11692): like BERT, with positions counted from the padding token's id, which the
configuration states, and a classifier of its own."""

from __future__ import annotations

from penstock.models.encoder import EncoderArchitecture

ARCHITECTURE = EncoderArchitecture(prefix="roberta", head_dense="classifier.dense", head_out="classifier.out_proj")
