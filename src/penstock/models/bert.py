"""BERT (Devlin et al. 2018, arXiv:1810.04805). A classifier reads the result of BERT's pooler."""

from __future__ import annotations

from penstock.models.encoder import EncoderArchitecture

ARCHITECTURE = EncoderArchitecture(prefix="bert", head_dense="bert.pooler.dense", head_out="classifier")
