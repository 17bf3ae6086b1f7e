"""Chooses an engine's attention backend on a GPU, or on Triton's interpreter."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata

import torch

from penstock.attention.backend import AttentionBackend
from penstock.config.engine import ExecutionConfig, SchedulerConfig
from penstock.utils.digest import digest
from penstock.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Library:
    """The requirements of a backend that are not Penstock's own."""

    name: str
    module: str
    install: str
    gpus: str
    capabilities: tuple[int, ...]  # major compute capabilities


_LIBRARIES = {
    "flashinfer": _Library(
        "FlashInfer from 0.6.16 on",
        "flashinfer",
        "pip install 'penstock[flashinfer]'",
        "Hopper or Blackwell",
        (9, 10, 12),
    ),
    "flash_attention": _Library(
        "FlashAttention 3",
        "flash_attn_interface",
        "its repository says how to install it (github.com/Dao-AILab/flash-attention, folder hopper)",
        "Hopper",
        (9,),
    ),
}


def check_gpu_attention(device: torch.device, execution: ExecutionConfig) -> None:
    """Raises ConfigError if the requested backend cannot run."""
    name = execution.attention_backend
    if name == "native":
        raise ConfigError(f"attention_backend=native does not run on {device}: choose auto or triton")
    if name in _LIBRARIES:
        _check_library(name, _LIBRARIES[name], device)
        if execution.deterministic:
            raise ConfigError(f"attention_backend={name} cannot be deterministic: choose attention_backend=triton")


def attention_library(execution: ExecutionConfig) -> str:
    """Names the library of the backend and its release: another one may compute other last bits."""
    name = execution.attention_backend
    if name not in _LIBRARIES:
        return "triton"
    packages = metadata.packages_distributions().get(_LIBRARIES[name].module, ())
    return " ".join([name, *map(_release, sorted(packages))])


def _release(package: str) -> str:
    """Returns its version, and a digest of the compiled files: built from a repository, they differ at one version."""
    found = metadata.distribution(package)
    files = [(file, file.hash) for file in found.files or () if file.suffix == ".so"]
    compiled = sorted(f"{file} {known.value}" for file, known in files if known is not None)
    return f"{found.version} {digest(*map(str.encode, compiled)).hex()[:12]}"


def _check_library(name: str, library: _Library, device: torch.device) -> None:
    if _capability(device) not in library.capabilities:
        raise ConfigError(f"attention_backend={name} needs a {library.gpus} GPU: choose attention_backend=triton")
    try:
        importlib.import_module(f"penstock.attention.{name}")
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"attention_backend={name} needs {library.name} ({reason}): {library.install}") from None


def _capability(device: torch.device) -> int:
    """Returns the major one."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def make_gpu_attention(device: torch.device, config: SchedulerConfig, execution: ExecutionConfig) -> AttentionBackend:
    """Builds the backend, by default Triton's. Raises ConfigError as `check_gpu_attention` does."""
    check_gpu_attention(device, execution)
    # Imported only if chosen: no installation needs all libraries.
    if execution.attention_backend == "flash_attention":
        from penstock.attention.flash_attention import FlashAttention

        return FlashAttention(config.max_model_len)
    if execution.attention_backend == "flashinfer":
        from penstock.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(config.max_num_seqs, config.max_model_len, 1 + config.max_num_drafts, device)
    from penstock.attention.triton import TritonAttention
    from penstock.kernels.triton.attention.plan import MAX_DECODE_QUERY_LEN, AttentionLimits

    # Longer windows of drafts are verified like a prefill.
    max_query_len = min(1 + config.max_num_drafts, MAX_DECODE_QUERY_LEN)
    limits = AttentionLimits(config.max_num_seqs, config.max_model_len, max_query_len)
    return TritonAttention(limits, device, execution.deterministic)
