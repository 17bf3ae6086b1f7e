"""Start: a fresh process on a real checkpoint in the page cache, from exec to ready and to the first token."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_parts.common import Job
from penstock.config.model import ModelConfig, load_model_config

_SHARD_BYTES = 2 << 30
_READ_BYTES = 16 << 20
_POOL = 1 << 22  # random numbers, repeated
_STD = 0.02
_INDEX = "model.safetensors.index.json"


def start(job: Job) -> None:
    folder = make_checkpoint(Path(job.shape), Path(job.work) / "checkpoints" / job.shape_name)
    cache = Path(job.work) / "triton-cache" / job.shape_name
    shutil.rmtree(cache, ignore_errors=True)
    num_bytes = read_once(folder)
    for name, rounds in (("cold", 1), ("warm", 1 if job.quick else job.sizes.rounds)):
        runs = [_start_once(job, folder, cache) for _ in range(rounds)]
        middle = sorted(runs, key=lambda run: run["first_token_s"])[len(runs) // 2]
        for what in ("ready", "first_token"):
            times = [run[f"{what}_s"] for run in runs]
            job.report(f"start_{name}_{what}", statistics.median(times), "s", runs=times, bytes=num_bytes, **middle)


def _start_once(job: Job, folder: Path, cache: Path) -> dict:
    options = {"model": str(folder), "device": job.device, "skip_tokenizer_init": True, **job.sizes.limits}
    script = Path(__file__).parent / "start_once.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PENSTOCK_LOG_LEVEL": "INFO"}
    command = [sys.executable, str(script), repr(time.monotonic()), json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the engine did not start: {done.stderr[-2000:]}")
    log = [line for line in done.stderr.splitlines() if " penstock." in line]
    return {**json.loads(done.stdout.splitlines()[-1]), "log": log}


def make_checkpoint(shape: Path, folder: Path) -> Path:
    """Makes random weights in shards of 2 GiB, like Hugging Face's checkpoints; only once."""
    if (folder / _INDEX).exists() and (folder / "config.json").read_bytes() == (shape / "config.json").read_bytes():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(shape / "config.json", folder)
    pool = (_STD * torch.randn(_POOL, generator=torch.Generator().manual_seed(0))).bfloat16()
    file_of: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    names = dict(tensors_of(load_model_config(shape)))
    for name, sizes in names.items():
        count = math.prod(sizes)
        is_norm = len(sizes) == 1
        shard[name] = torch.ones(sizes).bfloat16() if is_norm else pool.repeat(-(-count // _POOL))[:count].view(sizes)
        if sum(tensor.nbytes for tensor in shard.values()) < _SHARD_BYTES and len(file_of) + len(shard) < len(names):
            continue
        file = f"model-{len(set(file_of.values())):05d}.safetensors"
        save_file(shard, folder / file)
        file_of.update(dict.fromkeys(shard, file))
        shard.clear()
    # Written last: a folder with an index is complete.
    (folder / _INDEX).write_text(json.dumps({"weight_map": file_of}))
    return folder


def tensors_of(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of a Qwen3 checkpoint."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    of_layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config.num_hidden_layers):
        for name, shape in of_layer.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def read_once(folder: Path) -> int:
    """Reads the files into the page cache; returns their size in bytes."""
    total, buffer = 0, bytearray(_READ_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total
