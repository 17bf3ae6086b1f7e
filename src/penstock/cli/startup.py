"""What a command prints about its engine at the start, on standard error."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.cli.dataclass_args import engine_kwargs
from penstock.utils.interrupts import interrupts_end_at_once

if TYPE_CHECKING:
    from penstock.frontend.llm import LLM
    from penstock.messages.engine_info import EngineInfo


def start_llm(args: argparse.Namespace) -> LLM:
    """Starts the engine that the flags describe, and announces it before loading and when it is ready. Raises
    ConfigError.

    An interrupt ends the process, because nothing else is running yet.
    """
    kwargs = engine_kwargs(args)
    with interrupts_end_at_once():
        # Imported here: help texts and errors in the flags need no torch.
        from penstock.frontend.llm import LLM

        announce(f"Loading {kwargs['model']} ...")
        llm = LLM(**kwargs)
    announce(describe_engine(kwargs["model"], llm.info))
    return llm


def describe_engine(model: str, info: EngineInfo) -> str:
    """Returns the lines that describe the model, the device and the KV cache."""
    threads = ""
    if info.device == "cpu":
        plural, each = "s" if info.num_threads > 1 else "", " each" if info.num_ranks > 1 else ""
        threads = f", {info.num_threads} thread{plural}{each}"
    sizes = f"tensor parallel {info.tensor_parallel_size}, pipeline parallel {info.pipeline_parallel_size}"
    device = f"{info.device} ({info.device_name})" if info.device_name else info.device
    engines = f"{info.data_parallel_size}{' that share the experts' if info.shares_experts else ''}"
    cache = "none: the model stores nothing"
    if info.num_blocks:
        tokens = f"{info.num_blocks * info.block_size:,} tokens in {info.num_blocks:,} blocks"
        cache = f"{info.kv_cache_bytes / 2**30:.2f} GiB of {info.kv_cache_dtype}, {tokens}"
    weights = f"{info.weights}, {8 * info.weight_bytes / max(1, info.num_weights):.1f} bits each"
    rows = (
        ("model", f"{model}, {info.dtype}"),
        *((("serves", f"the text part of a {info.wrapper}, without images, video and sound"),) if info.wrapper else ()),
        *((("engines", f"{engines}, each as follows"),) if info.data_parallel_size > 1 else ()),
        *((("answers", f"{info.pooling}"),) if info.pooling is not None else ()),
        *((("ranks", f"{info.num_ranks}: {sizes}"),) if info.num_ranks > 1 else ()),
        ("device", f"{device}, {info.kernels} kernels{threads}"),
        ("context", f"{info.max_model_len:,} tokens"),
        ("weights", f"{weights}, {info.weight_bytes / 2**30:.2f} GiB"),
        ("KV cache", cache),
        *(
            (("adapters", f"{info.max_loras} at once; {info.lora_bytes / 2**30:.2f} GiB reserved"),)
            if info.max_loras
            else ()
        ),
        *((("states", _describe_states(info)),) if info.num_states else ()),
        ("loaded in", f"{info.load_seconds:.1f} s"),
    )
    return "\n".join(f"  {name:<9}  {value}" for name, value in rows)


def _describe_states(info: EngineInfo) -> str:
    size = info.state_cache_bytes / info.num_states / 2**20
    return (
        f"{info.state_cache_bytes / 2**30:.2f} GiB, {info.num_states:,} of recurrent layers, of {size:.1f} MiB each; "
        f"kept every {info.checkpoint_interval:,} tokens"
    )


def announce(line: str) -> None:
    """Prints a message for the user on standard error; standard output is reserved for results."""
    print(line, file=sys.stderr, flush=True)
