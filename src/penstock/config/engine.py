"""The engine's configuration: frozen data, cross-checked once, handed to each part in its own small piece.

`EngineArgs` is what a user types, in vLLM's names; `resolve()` turns it into an `EngineConfig`. A nested argument
is a dictionary or its JSON text.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from penstock.config.kv_events import KVEventsConfig, parse_kv_events_config
from penstock.config.kv_transfer import KVTransferConfig, parse_kv_transfer_config
from penstock.config.model import ModelConfig, load_model_config
from penstock.config.speculative import SpeculativeConfig, parse_speculative_config
from penstock.utils.errors import ConfigError
from penstock.utils.math import round_up
from penstock.utils.names import did_you_mean

BUILT_IN_MODEL = "demo"
DEVICES = ("auto", "cpu", "cuda")
POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "dummy")
EXECUTOR_BACKENDS = ("uniproc", "mp")
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer", "flash_attention", "native")


# Larger steps use a GPU better.
_TOKENS_OF_A_STEP = {"cpu": 2048, "cuda": 8192}


def _arg(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine arguments, with the help text that the command line shows."""

    model: str = _arg(BUILT_IN_MODEL, "checkpoint folder or Hugging Face model id; the built-in model without it")
    tokenizer: str | None = _arg(None, "folder with another tokenizer.json than the model's")
    skip_tokenizer_init: bool = _arg(False, "load no tokenizer: prompts and results are token ids only")
    revision: str | None = _arg(None, "branch, tag or commit of the model id")
    load_format: str = _arg("auto", "auto reads the checkpoint, dummy makes random weights", LOAD_FORMATS)
    check_weights: bool = _arg(False, "at the start, compare every packed weight with the tensor that was read")
    dtype: str = _arg("auto", "auto (the checkpoint's), bfloat16, float16 or float32")
    device: str = _arg("auto", "auto takes CUDA where there is one, else the CPU", DEVICES)
    distributed_executor_backend: str = _arg(
        "uniproc", "where the worker runs: uniproc in the engine's process, mp in one of its own", EXECUTOR_BACKENDS
    )
    attention_backend: str = _arg("auto", "what computes attention (docs/GPU.md)", ATTENTION_BACKENDS)
    seed: int = _arg(0, "seed of requests that bring none")
    max_model_len: int | None = _arg(None, "longest prompt plus output in tokens; the model's own by default")
    max_num_batched_tokens: int | None = _arg(
        None, "token budget of a step, 2048 by default and 8192 on a GPU; longer prefills are chunked"
    )
    max_num_seqs: int = _arg(256, "most requests that run at once")
    block_size: int = _arg(16, "tokens per KV block, a multiple of 8")
    enable_prefix_caching: bool = _arg(True, "reuse the KV of prompts that begin alike")
    gpu_memory_utilization: float = _arg(0.9, "part of the device's memory that the engine may use")
    kv_cache_memory: int | None = _arg(None, "bytes of KV cache; by default what gpu_memory_utilization leaves")
    num_gpu_blocks_override: int | None = _arg(None, "number of KV blocks, whatever the memory says")
    scheduling_policy: str = _arg("fcfs", "which waiting request goes first", POLICIES)
    async_scheduling: bool | None = _arg(
        None, "schedule step n+1 while step n runs; by default where a GPU runs the steps (docs/PERFORMANCE.md)"
    )
    enforce_eager: bool = _arg(False, "launch every step's kernels anew: no CUDA graphs, a quicker start, slower steps")
    deterministic: bool = _arg(
        False, "a request's bits on a GPU depend on nothing else in its batch, which costs speed; on a CPU always so"
    )
    max_num_queued_requests: int = _arg(4096, "requests in the engine beyond which new ones are refused")
    kv_events_config: str | Mapping[str, Any] | None = _arg(
        None, 'tell routers which KV blocks are held, as JSON such as {"enable_kv_cache_events": true}'
    )
    kv_transfer_config: str | Mapping[str, Any] | None = _arg(
        None, 'connector that moves KV as JSON, such as {"kv_connector": "OffloadingConnector"}'
    )
    speculative_config: str | Mapping[str, Any] | None = _arg(
        None, 'speculative decoding as JSON, such as {"method": "mtp", "num_speculative_tokens": 3}'
    )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Builds the arguments. Raises ConfigError for a wrong type, and for an unknown name with the nearest one."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"unknown engine argument {name!r}{did_you_mean(name, known)}")
        plain: dict[str, Any] = {k: str(value) if isinstance(value, Path) else value for k, value in kwargs.items()}
        args = cls(**plain)
        _check_types(args)
        return args


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. `max_num_in_flight` steps may be scheduled and not yet processed; 1 is synchronous.

    `drafts` says how many drafts per request are proposed while how many requests run: pairs (requests up to, drafts)
    in ascending order; beyond the last pair there are none. `num_lookahead_tokens` is how many positions behind a
    request's last token the speculator may write KV for.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: str = "fcfs"
    max_num_in_flight: int = 1
    max_num_queued_requests: int = 4096
    drafts: tuple[tuple[int, int], ...] = ()
    num_lookahead_tokens: int = 0

    @property
    def max_num_drafts(self) -> int:
        """Most drafts that any step proposes for a request."""
        return max((count for _, count in self.drafts), default=0)

    def num_drafts(self, num_running: int) -> int:
        """Drafts per request while so many requests run."""
        for limit, count in self.drafts:
            if num_running <= limit:
                return count
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How a GPU computes the steps; a CPU knows neither graphs nor a mode that is not deterministic."""

    attention_backend: str = "auto"
    enforce_eager: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache's budget: a number of blocks, or bytes, or a part of the device's memory, in that order."""

    block_size: int
    enable_prefix_caching: bool
    gpu_memory_utilization: float
    kv_cache_memory: int | None
    num_blocks_override: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything, resolved. `max_model_len_is_explicit` tells whether it may be shortened to fit the memory."""

    model: ModelConfig
    scheduler: SchedulerConfig
    execution: ExecutionConfig
    cache: CacheConfig
    tokenizer_path: Path | None
    device: str
    load_format: str
    check_weights: bool
    seed: int
    max_model_len_is_explicit: bool
    speculative: SpeculativeConfig | None
    kv_events: KVEventsConfig
    kv_transfer: KVTransferConfig | None


def resolve(args: EngineArgs, device: str) -> EngineConfig:
    """Checks the arguments against each other and against the checkpoint in the folder `args.model`.

    `device` is the one chosen ("cpu" or "cuda"). Raises ConfigError naming the argument and its bound.
    """
    check(args)
    model_path = Path(args.model)
    model = load_model_config(model_path, args.dtype)
    max_model_len = args.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={max_model_len} is beyond the model's context of {model.max_position_embeddings} tokens"
        )
    # On a CPU the scheduler competes with the kernels for the same cores, and overlapping costs more than it hides.
    is_async = device != "cpu" if args.async_scheduling is None else args.async_scheduling
    speculative = None
    if args.speculative_config is not None:
        speculative = parse_speculative_config(args.speculative_config, model)
    kv_events = parse_kv_events_config(args.kv_events_config)
    if kv_events.is_active and not args.enable_prefix_caching:
        raise ConfigError("kv_events_config needs enable_prefix_caching: without it no block can be found again")
    tokenizer_path = None if args.skip_tokenizer_init else Path(args.tokenizer) if args.tokenizer else model_path
    return EngineConfig(
        model=model,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=args.max_num_batched_tokens or _TOKENS_OF_A_STEP[device],
            max_num_seqs=args.max_num_seqs,
            max_model_len=max_model_len,
            policy=args.scheduling_policy,
            max_num_in_flight=2 if is_async else 1,
            max_num_queued_requests=args.max_num_queued_requests,
            drafts=() if speculative is None else speculative.drafts,
            num_lookahead_tokens=0 if speculative is None else speculative.num_lookahead_tokens,
        ),
        execution=ExecutionConfig(
            attention_backend=args.attention_backend,
            enforce_eager=args.enforce_eager,
            deterministic=args.deterministic,
        ),
        cache=CacheConfig(
            block_size=args.block_size,
            enable_prefix_caching=args.enable_prefix_caching,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory=args.kv_cache_memory,
            num_blocks_override=args.num_gpu_blocks_override,
        ),
        tokenizer_path=tokenizer_path,
        device=device,
        load_format=args.load_format,
        check_weights=args.check_weights,
        seed=args.seed,
        max_model_len_is_explicit=args.max_model_len is not None,
        speculative=speculative,
        kv_events=kv_events,
        kv_transfer=None if args.kv_transfer_config is None else parse_kv_transfer_config(args.kv_transfer_config),
    )


def _check_types(args: EngineArgs) -> None:
    for name, hint in typing.get_type_hints(EngineArgs).items():
        kinds = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint) or (hint,))
        value = getattr(args, name)
        is_bool = isinstance(value, bool)
        fits = isinstance(value, kinds) or (float in kinds and isinstance(value, int) and not is_bool)
        if not fits or (is_bool and bool not in kinds):
            wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ConfigError(f"{name} must be {wanted}, got {value!r}")


def check(args: EngineArgs) -> None:
    """What can be checked without a device and a checkpoint. Raises ConfigError naming the argument and its bound."""
    at_least = {
        "max_num_batched_tokens": 1,
        "max_num_seqs": 1,
        "max_model_len": 2,
        "num_gpu_blocks_override": 2,
        "kv_cache_memory": 1,
        "max_num_queued_requests": 1,
        "block_size": 8,
    }
    for name, low in at_least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}")
    if args.block_size != round_up(args.block_size, 8):
        raise ConfigError(f"block_size must be a multiple of 8, got {args.block_size}")
    if not 0.0 < args.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {args.gpu_memory_utilization}")
    choices = {
        "scheduling_policy": POLICIES,
        "load_format": LOAD_FORMATS,
        "device": DEVICES,
        "attention_backend": ATTENTION_BACKENDS,
        "distributed_executor_backend": EXECUTOR_BACKENDS,
    }
    for name, allowed in choices.items():
        if getattr(args, name) not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(args, name)!r}")
