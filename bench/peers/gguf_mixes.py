"""llama.cpp's own mixes of K-quants."""

from __future__ import annotations

from pathlib import Path

import llama_cpp

MIXES = {"q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def quantized(source: Path, file: Path) -> None:
    """Writes a GGUF file in the mix that its name says, from one in bf16."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = MIXES[file.stem]
    parameters.nthread = 2
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), parameters)
    assert status == 0, status
