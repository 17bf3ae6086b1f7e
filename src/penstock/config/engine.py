"""The engine's configuration: frozen data, cross-checked once. Each part receives its own small section.

`EngineArgs` is the user's input, in vLLM's names. `resolve()` turns it into an `EngineConfig`, once for a start, in the
process of the user; the engine core and the workers receive the result. A nested argument is a dictionary or its JSON
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from penstock.config.arguments import argument, check_types
from penstock.config.cache import CacheConfig
from penstock.config.expert_parallel import parse_expert_parallel
from penstock.config.kv_events import KVEventsConfig, parse_kv_events_config
from penstock.config.kv_transfer import KVTransferConfig, parse_kv_transfer_config
from penstock.config.load_quantization import AS_STORED, ROUNDINGS, LoadQuantization
from penstock.config.lora import LoraConfig, parse_lora
from penstock.config.model import KV_CACHE_DTYPES, ModelConfig, load_model_config
from penstock.config.model_path import BUILT_IN_MODEL, resolve_model_path
from penstock.config.parallel import ParallelConfig, divide, layer_counts
from penstock.config.pooling import RUNNERS, PoolingConfig, find_pooling
from penstock.config.speculative import SpeculativeConfig, parse_speculative_config
from penstock.utils.errors import ConfigError
from penstock.utils.math import round_up
from penstock.utils.names import did_you_mean

DEVICES = ("auto", "cpu", "cuda")
POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "dummy")
EXECUTOR_BACKENDS = ("uniproc", "mp", "ray")
PREFIX_AWARE = "prefix-aware"
DATA_PARALLEL_POLICIES = ("least-loaded", PREFIX_AWARE)
ATTENTION_BACKENDS = ("auto", "triton", "flashinfer", "flash_attention", "native")

# Larger steps use a GPU better.
_TOKENS_OF_A_STEP = {"cpu": 2048, "cuda": 8192}


MODEL, DEVICE, STEPS, CACHE = "model", "device and kernels", "scheduling and speculation", "KV cache"
RANKS, LORA = "ranks", "adapters"
"""Groups of arguments, as the command line's help shows them."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """The engine arguments, with what the command line's help shows of them."""

    model: str = argument(
        MODEL, BUILT_IN_MODEL, "checkpoint folder, GGUF file or Hugging Face model id", metavar="MODEL"
    )
    runner: str = argument(
        MODEL, "auto", "generate tokens, or pooling: vectors, classes, scores; auto decides by the checkpoint", RUNNERS
    )
    pooler_config: str | Mapping[str, Any] | None = argument(
        MODEL, None, 'how to pool if the checkpoint does not say: {"pooling_type": "LAST"}', metavar="JSON"
    )
    tokenizer: str | None = argument(MODEL, None, "folder with the tokenizer.json to use instead", metavar="FOLDER")
    skip_tokenizer_init: bool = argument(MODEL, False, "load no tokenizer: prompts and results are token ids")
    revision: str | None = argument(MODEL, None, "branch, tag or commit of the model id", metavar="NAME")
    load_format: str = argument(MODEL, "auto", "auto reads the checkpoint, dummy makes random weights", LOAD_FORMATS)
    check_weights: bool = argument(MODEL, False, "at the start, compare packed weights with the tensors that were read")
    dtype: str = argument(MODEL, "auto", "bfloat16, float16 or float32; auto uses the checkpoint's", metavar="DTYPE")
    quantization: str | None = argument(
        MODEL,
        None,
        "round the weights of unquantized layers when they are read (default: as stored)",
        ROUNDINGS["quantization"],
    )
    quantize_head: str | None = argument(
        MODEL, None, "round the weights of the output head as well (default: as stored)", ROUNDINGS["quantize_head"]
    )
    quantize_activations: str | None = argument(
        MODEL, None, "round the inputs of quantized layers, for speed (default: no)", ROUNDINGS["quantize_activations"]
    )
    device: str = argument(DEVICE, "auto", "auto uses CUDA where it is available, else the CPU", DEVICES)
    tensor_parallel_size: int = argument(RANKS, 1, "ranks that divide every layer among them", metavar="N")
    pipeline_parallel_size: int = argument(RANKS, 1, "stages that divide the layers among them", metavar="N")
    pipeline_layers: str | None = argument(
        RANKS, None, "layers of each stage, such as 10,12,6 (default: as equal as possible)", metavar="N,N,..."
    )
    data_parallel_size: int = argument(
        RANKS,
        1,
        "engines behind the server, each with the whole model; with --enable-expert-parallel they share the experts",
        metavar="N",
        server_only=True,
    )
    data_parallel_policy: str = argument(
        RANKS,
        "least-loaded",
        "which engine gets a request: the one with the least work, or prefix-aware, which does not count cached tokens",
        DATA_PARALLEL_POLICIES,
        server_only=True,
    )
    enable_expert_parallel: bool = argument(
        RANKS, False, "divide whole experts among the ranks of all engines, not every expert"
    )
    enable_eplb: bool = argument(RANKS, False, "move experts between the ranks so that all have equal load")
    eplb_config: str | Mapping[str, Any] | None = argument(
        RANKS, None, 'how experts are balanced: {"num_redundant_experts": 8, "step_interval": 3000}', metavar="JSON"
    )
    distributed_executor_backend: str | None = argument(
        RANKS,
        None,
        "where the ranks run: uniproc in the engine's process, mp in separate processes, ray on a cluster "
        "(default: mp if there are several, else uniproc)",
        EXECUTOR_BACKENDS,
    )
    attention_backend: str = argument(
        DEVICE, "auto", "the implementation of attention (docs/GPU.md)", ATTENTION_BACKENDS, metavar="NAME"
    )
    seed: int = argument(MODEL, 0, "seed of requests without one")
    max_model_len: int | None = argument(
        MODEL, None, "context length: maximum number of prompt plus output tokens (default: the model's)"
    )
    max_num_batched_tokens: int | None = argument(
        STEPS, None, "maximum number of tokens of a step; longer prompts are split (default: 2048, on a GPU 8192)"
    )
    max_num_seqs: int = argument(STEPS, 256, "maximum number of requests that run at once")
    block_size: int = argument(CACHE, 16, "tokens per KV block, a multiple of 8")
    kv_cache_dtype: str = argument(CACHE, "auto", "int8 stores keys and values in half the bytes", KV_CACHE_DTYPES)
    enable_prefix_caching: bool = argument(CACHE, True, "reuse the KV of prompts with a common beginning")
    gpu_memory_utilization: float = argument(
        CACHE, 0.9, "share of the device's memory that the engine may use", metavar="SHARE"
    )
    kv_cache_memory: int | None = argument(
        CACHE,
        None,
        "size of the KV cache on each device, such as 4GiB (default: by --gpu-memory-utilization)",
        unit="bytes",
    )
    num_gpu_blocks_override: int | None = argument(CACHE, None, "number of KV blocks, instead of a size")
    state_cache_share: float = argument(
        CACHE, 0.5, "share of the cache's memory for the states of recurrent layers, if there are any", metavar="SHARE"
    )
    state_checkpoint_interval: int | None = argument(
        CACHE, None, "tokens between states that are kept (default: as many as have KV of a state's size)"
    )
    scheduling_policy: str = argument(STEPS, "fcfs", "order of waiting requests", POLICIES)
    async_scheduling: bool | None = argument(
        STEPS, None, "schedule step n+1 while step n runs (default: on a GPU; docs/PERFORMANCE.md)"
    )
    num_threads: int | None = argument(
        DEVICE, None, "threads of the CPU kernels (default: OMP_NUM_THREADS, or the cores that this process may use)"
    )
    enforce_eager: bool = argument(DEVICE, False, "use no CUDA graphs: the start is quicker, the steps are slower")
    deterministic: bool = argument(
        DEVICE, False, "make results independent of the batch on a GPU, at lower speed; on a CPU they always are"
    )
    max_num_queued_requests: int = argument(STEPS, 4096, "maximum number of requests in the engine; more are refused")
    kv_events_config: str | Mapping[str, Any] | None = argument(
        CACHE, None, 'publish which KV blocks are cached: {"enable_kv_cache_events": true}', metavar="JSON"
    )
    kv_transfer_config: str | Mapping[str, Any] | None = argument(
        CACHE, None, 'connector that moves KV: {"kv_connector": "OffloadingConnector"}', metavar="JSON"
    )
    enable_lora: bool = argument(LORA, False, "serve LoRA adapters beside the model")
    max_loras: int = argument(LORA, 8, "maximum number of adapters of the requests that run at once", metavar="N")
    max_lora_rank: int = argument(LORA, 64, "maximum rank of an adapter", metavar="N")
    max_cpu_loras: int | None = argument(
        LORA, None, "adapters kept in memory; others are read again when needed (default: --max-loras)", metavar="N"
    )
    speculative_config: str | Mapping[str, Any] | None = argument(
        STEPS, None, 'speculative decoding: {"method": "mtp", "num_speculative_tokens": 3}', metavar="JSON"
    )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineArgs:
        """Builds the arguments. Raises ConfigError for a wrong type, and for an unknown name with the closest one."""
        known = [f.name for f in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"unknown engine argument {name!r}{did_you_mean(name, known)}")
        plain: dict[str, Any] = {k: str(value) if isinstance(value, Path) else value for k, value in kwargs.items()}
        args = cls(**plain)
        check_types(args)
        return args


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step. `max_num_in_flight` steps may be scheduled and not yet processed: one for each of `num_stages`,
    and one more with asynchronous scheduling.

    `drafts` gives the number of drafts per request by the number of running requests: pairs (requests up to, drafts) in
    ascending order; beyond the last pair there are none. `num_lookahead_tokens` is how many positions after a request's
    last token the speculator may write KV for.

    With `is_pooling` a request ends when its prompt is computed. With `needs_whole_prompts` a step computes all tokens
    of a prompt or none.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: str = "fcfs"
    num_stages: int = 1
    max_num_in_flight: int = 1
    max_num_queued_requests: int = 4096
    drafts: tuple[tuple[int, int], ...] = ()
    num_lookahead_tokens: int = 0
    is_pooling: bool = False
    needs_whole_prompts: bool = False

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of running requests: with one stage, every step takes all of them."""
        return 1 if self.num_stages == 1 else self.max_num_in_flight

    @property
    def max_steps_ahead(self) -> int:
        """The number of steps that may sample for a request before the token of an earlier one is known."""
        return self.max_num_in_flight - self.num_stages

    @property
    def max_num_drafts(self) -> int:
        """The maximum number of drafts that any step proposes for a request."""
        return max((count for _, count in self.drafts), default=0)

    def least_tokens(self, num_tokens: int) -> int:
        """Returns how many tokens a step must have room for to begin a request with `num_tokens` tokens."""
        return num_tokens if self.needs_whole_prompts else 1

    def num_drafts(self, num_running: int) -> int:
        """Returns the drafts per request while `num_running` requests run."""
        for limit, count in self.drafts:
            if num_running <= limit:
                return count
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How the steps are computed: `num_threads` applies to a CPU, the rest to a GPU, as a CPU has no graphs and is
    always deterministic.
    """

    num_threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The whole resolved configuration. `max_model_len_is_explicit`: it must not be shortened to fit the memory.

    Before `on_device` has been called, `device` may be "auto", and numbers in `scheduler` that depend on the device
    are 0. `pooling` is None if the engine generates. With `is_prefix_aware` the engine core reports its KV events,
    which the front end uses to choose among data parallel ranks. `dp_rank` is this engine's.
    """

    model: ModelConfig
    pooling: PoolingConfig | None
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    execution: ExecutionConfig
    cache: CacheConfig
    tokenizer_path: Path | None
    device: str
    load_format: str
    check_weights: bool
    load_quantization: LoadQuantization
    seed: int
    max_model_len_is_explicit: bool
    speculative: SpeculativeConfig | None
    kv_events: KVEventsConfig
    is_prefix_aware: bool
    kv_transfer: KVTransferConfig | None
    lora: LoraConfig | None
    dp_rank: int = 0

    @property
    def digests_weights(self) -> bool:
        """Whether weights are digested as they are read. Without KV that moves, quantized ones are not: it is slow."""
        return self.kv_transfer is not None or self.model.quantization is None

    def on_device(self, device: str) -> EngineConfig:
        """Returns the configuration with the defaults for this device, "cpu" or "cuda". Raises ConfigError if it cannot
        be used there.
        """
        limits, is_cpu = self.scheduler, device == "cpu"
        if not is_cpu and self.load_quantization != AS_STORED:
            raise ConfigError("quantization, quantize_head and quantize_activations need a CPU: set device cpu")
        if not is_cpu and self.lora is not None:
            raise ConfigError("enable_lora needs a CPU: set device cpu")
        if not is_cpu and self.model.kv_cache_dtype != "auto":
            raise ConfigError(f"kv_cache_dtype={self.model.kv_cache_dtype} needs a CPU: set device cpu")
        num_step_tokens = limits.max_num_batched_tokens or _TOKENS_OF_A_STEP[device]
        if limits.needs_whole_prompts:
            num_step_tokens = max(num_step_tokens, limits.max_model_len)
        # On a CPU the scheduler competes with the kernels for the same cores, and overlapping costs more than it saves.
        num_in_flight = limits.max_num_in_flight or limits.num_stages + (not is_cpu)
        return replace(
            self,
            device=device,
            scheduler=replace(limits, max_num_batched_tokens=num_step_tokens, max_num_in_flight=num_in_flight),
            # On GPUs, each engine has its own.
            cache=replace(self.cache, num_sharers=self.parallel.dp if is_cpu else 1),
        )


def resolve(args: EngineArgs) -> EngineConfig:
    """Checks the arguments against each other and against the checkpoint, which is downloaded if necessary.

    Needs no device: the worker chooses it, and `on_device` adds its defaults. Raises ConfigError naming the argument
    and its limit.
    """
    _check(args)
    needs_tokenizer = not args.skip_tokenizer_init and args.tokenizer is None
    model_path = resolve_model_path(args.model, args.revision, needs_tokenizer)
    model = load_model_config(model_path, args.dtype).with_kv_cache(args.kv_cache_dtype)
    pooling = find_pooling(args.runner, args.pooler_config, model)
    max_model_len = _max_model_len(args, model, pooling)
    model = model.for_length(max_model_len)
    if pooling is not None:
        _check_pooling(args, pooling, max_model_len)
    needs_whole_prompts = pooling is not None and pooling.needs_whole_prompts
    speculative = None
    if args.speculative_config is not None:
        speculative = parse_speculative_config(args.speculative_config, model).for_length(max_model_len)
    shapes = [model] if speculative is None else [model, *speculative.shapes]
    parallel = _parallel(args, shapes)
    tokenizer_path = None if args.skip_tokenizer_init else Path(args.tokenizer) if args.tokenizer else model_path
    return EngineConfig(
        model=model,
        pooling=pooling,
        scheduler=SchedulerConfig(
            max_num_batched_tokens=args.max_num_batched_tokens or 0,
            max_num_seqs=args.max_num_seqs,
            max_model_len=max_model_len,
            policy=args.scheduling_policy,
            num_stages=parallel.pp,
            max_num_in_flight=0 if args.async_scheduling is None else parallel.pp + args.async_scheduling,
            max_num_queued_requests=args.max_num_queued_requests,
            drafts=() if speculative is None else speculative.drafts,
            num_lookahead_tokens=0 if speculative is None else speculative.num_lookahead_tokens,
            is_pooling=pooling is not None,
            needs_whole_prompts=needs_whole_prompts,
        ),
        parallel=parallel,
        execution=ExecutionConfig(
            attention_backend=args.attention_backend,
            num_threads=args.num_threads,
            enforce_eager=args.enforce_eager,
            deterministic=args.deterministic,
        ),
        cache=CacheConfig(
            block_size=args.block_size,
            enable_prefix_caching=args.enable_prefix_caching and not needs_whole_prompts,
            gpu_memory_utilization=args.gpu_memory_utilization,
            kv_cache_memory=args.kv_cache_memory,
            num_blocks_override=args.num_gpu_blocks_override,
            state_share=args.state_cache_share,
            checkpoint_interval=args.state_checkpoint_interval,
        ),
        tokenizer_path=tokenizer_path,
        device=args.device,
        load_format=args.load_format,
        check_weights=args.check_weights,
        load_quantization=LoadQuantization.of({name: getattr(args, name) for name in ROUNDINGS}, model, args.device),
        seed=args.seed,
        max_model_len_is_explicit=args.max_model_len is not None,
        speculative=speculative,
        kv_events=_kv_events(args),
        is_prefix_aware=_is_prefix_aware(args),
        kv_transfer=None if args.kv_transfer_config is None else parse_kv_transfer_config(args.kv_transfer_config),
        lora=parse_lora(args.max_loras, args.max_lora_rank, args.max_cpu_loras, parallel.backend, pooling is not None)
        if args.enable_lora
        else None,
    )


def _parallel(args: EngineArgs, shapes: Sequence[ModelConfig]) -> ParallelConfig:
    parallel = divide(args.tensor_parallel_size, args.pipeline_parallel_size, args.pipeline_layers, shapes)
    ranks = (args.tensor_parallel_size, args.data_parallel_size)
    switches = {"is_enabled": args.enable_expert_parallel, "balances": args.enable_eplb}
    experts = parse_expert_parallel(shapes[0], *ranks, args.eplb_config, **switches)
    parallel = replace(parallel, dp=args.data_parallel_size, experts=experts)
    num_processes = parallel.num_joint_engines * parallel.num_ranks
    backend = args.distributed_executor_backend or ("uniproc" if num_processes == 1 else "mp")
    if backend == "ray" and parallel.num_joint_engines > 1:
        raise ConfigError(
            f"distributed_executor_backend=ray cannot be used with data_parallel_size={parallel.dp} and "
            "enable_expert_parallel: engines that share experts run on one host, with mp or uniproc"
        )
    return replace(parallel, backend=backend)


def _kv_events(args: EngineArgs) -> KVEventsConfig:
    config = parse_kv_events_config(args.kv_events_config)
    if config.is_active and not args.enable_prefix_caching:
        raise ConfigError("kv_events_config needs enable_prefix_caching: without it no block can be found again")
    return config


def _is_prefix_aware(args: EngineArgs) -> bool:
    """Returns whether placement considers the ranks' caches; one rank has no choice."""
    if args.data_parallel_policy != PREFIX_AWARE:
        return False
    if not args.enable_prefix_caching:
        raise ConfigError(
            f"data_parallel_policy={PREFIX_AWARE} needs enable_prefix_caching: without it no block can be found again"
        )
    return args.data_parallel_size > 1


def _max_model_len(args: EngineArgs, model: ModelConfig, pooling: PoolingConfig | None) -> int:
    """Returns the requested length, or that of the model and its pooling. Raises ConfigError beyond the context."""
    longest = model.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(f"max_model_len={args.max_model_len} is beyond the model's context of {longest} tokens")
    made_for = None if pooling is None else pooling.max_tokens
    return args.max_model_len or min(longest, made_for or longest)


def _check_pooling(args: EngineArgs, pooling: PoolingConfig, max_model_len: int) -> None:
    """Raises ConfigError naming an argument that a pooling engine does not support."""
    if args.speculative_config is not None:
        raise ConfigError("speculative_config needs an engine that generates: this one pools (runner=pooling)")
    if not pooling.needs_whole_prompts:
        return
    if pooling.is_encoder:
        _check_encoder(args)
    why = pooling.reason_for_whole_prompts
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens={args.max_num_batched_tokens} would split prompts of up to "
            f"max_model_len={max_model_len} tokens, and {why}: raise max_num_batched_tokens or lower max_model_len"
        )
    for name in ("kv_transfer_config", "kv_events_config"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{name} cannot be used here: {why}, so that no KV is reused")
    if args.data_parallel_policy == PREFIX_AWARE:
        raise ConfigError(f"data_parallel_policy={PREFIX_AWARE} cannot be used here: {why}, so that no KV is cached")


def _check_encoder(args: EngineArgs) -> None:
    """Raises ConfigError naming an argument that an engine with an encoder does not support either."""
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={args.pipeline_parallel_size} is not supported with an encoder: divide its layers "
            "by tensor_parallel_size, or run several engines"
        )
    for name in ("kv_cache_memory", "num_gpu_blocks_override"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{name} cannot be used here: the model is an encoder, which has no KV cache")


def _check(args: EngineArgs) -> None:
    """Checks what needs no device and no checkpoint. Raises ConfigError naming the argument and its limit."""
    at_least = {
        "max_num_batched_tokens": 1,
        "max_num_seqs": 1,
        "max_model_len": 2,
        "num_gpu_blocks_override": 2,
        "state_checkpoint_interval": 1,
        "num_threads": 1,
        "kv_cache_memory": 1,
        "max_num_queued_requests": 1,
        "block_size": 8,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }
    # More would start processes or threads without end, or fail after the model has been loaded.
    at_most = {"max_num_seqs": 65536, "num_threads": 4096, "pipeline_parallel_size": 1024, "data_parallel_size": 1024}
    for name in (each.name for each in fields(args)):
        # Messages hold integers of 64 bits.
        value, low, high = getattr(args, name), at_least.get(name, -1 << 63), at_most.get(name, (1 << 63) - 1)
        if isinstance(value, int) and not low <= value <= high:
            bound = f"between {low} and {high}" if value > high or name not in at_least else f"at least {low}"
            raise ConfigError(f"{name} must be {bound}, got {value}")
    if args.block_size != round_up(args.block_size, 8):
        raise ConfigError(f"block_size must be a multiple of 8, got {args.block_size}")
    if not 0.0 < args.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {args.gpu_memory_utilization}")
    if not 0.0 < args.state_cache_share < 1.0:
        raise ConfigError(f"state_cache_share must be above 0 and below 1, got {args.state_cache_share}")
    choices = {
        "runner": RUNNERS,
        "scheduling_policy": POLICIES,
        "load_format": LOAD_FORMATS,
        "kv_cache_dtype": KV_CACHE_DTYPES,
        **ROUNDINGS,
        "device": DEVICES,
        "attention_backend": ATTENTION_BACKENDS,
        "distributed_executor_backend": EXECUTOR_BACKENDS,
        "data_parallel_policy": DATA_PARALLEL_POLICIES,
    }
    for name, allowed in choices.items():
        value = getattr(args, name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    layer_counts(args.pipeline_layers, args.pipeline_parallel_size)
