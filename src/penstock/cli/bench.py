"""`penstock bench`: measurements with the JSON keys that `vllm bench` uses."""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from penstock.cli import bench_serve
from penstock.cli.dataclass_args import add_engine_args, add_model_argument
from penstock.cli.parser import count, count_from_zero
from penstock.cli.startup import start_llm
from penstock.loadgen.results import percentile
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError

_PERCENTAGES = (10, 25, 50, 75, 90, 99)
_OUTPUT_LEN = 128

DESCRIPTION = "Measures an engine of this process, or a server under load."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock bench KIND [flags]"
    kinds = parser.add_subparsers(title="kinds", prog="penstock bench", dest="kind", required=True, metavar="KIND")
    throughput = kinds.add_parser(
        "throughput",
        help="many requests at once: tokens per second",
        description="Runs many requests at once and reports tokens per second, as JSON.\n"
        "A pooling engine computes prompts only; there are no output tokens.",
        usage="penstock bench throughput [MODEL] [flags]",
    )
    load = throughput.add_argument_group("load")
    load.add_argument("--num-prompts", type=count, default=64, metavar="N", help="requests (default: 64)")
    throughput.set_defaults(run=run_throughput)
    latency = kinds.add_parser(
        "latency",
        help="one batch, repeated: seconds per batch",
        description="Runs one batch several times and reports seconds per batch, as JSON.",
        usage="penstock bench latency [MODEL] [flags]",
    )
    batch = latency.add_argument_group("load")
    batch.add_argument("--batch-size", type=count, default=8, metavar="N", help="requests in the batch (default: 8)")
    batch.add_argument("--num-iters", type=count, default=10, metavar="N", help="measured batches (default: 10)")
    batch.add_argument("--num-iters-warmup", type=count_from_zero, default=2, metavar="N", help="warm-ups (default: 2)")
    latency.set_defaults(run=run_latency)
    for command, group in ((throughput, load), (latency, batch)):
        add_model_argument(command)
        group.add_argument("--input-len", type=count, default=128, metavar="N", help="prompt tokens (default: 128)")
        group.add_argument("--output-len", type=count, metavar="N", help=f"output tokens (default: {_OUTPUT_LEN})")
        group.add_argument("--output-json", type=Path, metavar="FILE", help="also write the result to this file")
        add_engine_args(command)
    serve = kinds.add_parser(
        "serve",
        help="load on a running server: latencies, goodput, tokens per second",
        description=bench_serve.DESCRIPTION,
        usage="penstock bench serve [flags]",
    )
    bench_serve.add_arguments(serve)


def run_throughput(args: argparse.Namespace) -> int:
    llm = _make_llm(args)
    prompts = _random_prompts(llm, args.num_prompts, args.input_len)
    _run(llm, prompts[:1], 2, use_tqdm=False)
    llm.reset_prefix_cache()
    clock = SystemClock()
    started = clock.now()
    num_output = _run(llm, prompts, args.output_len or _OUTPUT_LEN)
    elapsed = clock.now() - started
    num_total = num_output + args.num_prompts * args.input_len
    result = {
        "elapsed_time": elapsed,
        "num_requests": args.num_prompts,
        "total_num_tokens": num_total,
        "requests_per_second": args.num_prompts / elapsed,
        "tokens_per_second": num_total / elapsed,
    }
    if not _pools(llm):
        result["output_tokens_per_second"] = num_output / elapsed
    llm.shutdown()
    return _report(result, args.output_json)


def run_latency(args: argparse.Namespace) -> int:
    # Imported here: the help text needs no progress bar.
    from tqdm import tqdm

    llm = _make_llm(args)
    clock = SystemClock()
    latencies: list[float] = []
    prompts = _random_prompts(llm, args.batch_size, args.input_len)
    for iteration in tqdm(range(args.num_iters_warmup + args.num_iters), desc="batches", delay=2.0):
        # Otherwise the prefix cache would hold the prompts from the second batch on.
        llm.reset_prefix_cache()
        started = clock.now()
        _run(llm, prompts, args.output_len or _OUTPUT_LEN, use_tqdm=False)
        if iteration >= args.num_iters_warmup:
            latencies.append(clock.now() - started)
    llm.shutdown()
    result = {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in _PERCENTAGES},
    }
    return _report(result, args.output_json)


def _make_llm(args: argparse.Namespace) -> Any:
    _check_output_file(args.output_json)
    llm = start_llm(args)
    if _pools(llm):
        if args.output_len is not None:
            raise ConfigError("--output-len cannot be used with a pooling engine: it generates no tokens")
        if args.input_len > llm.max_model_len:
            raise ConfigError(f"--input-len {args.input_len} exceeds max_model_len={llm.max_model_len}")
    elif args.input_len + (output_len := args.output_len or _OUTPUT_LEN) > llm.max_model_len:
        raise ConfigError(
            f"--input-len {args.input_len} and --output-len {output_len} exceed max_model_len={llm.max_model_len}"
        )
    return llm


def _pools(llm: Any) -> bool:
    return llm.info.pooling is not None


def _run(llm: Any, prompts: list[list[int]], output_len: int, use_tqdm: bool = True) -> int:
    """Runs the prompts and returns the number of output tokens: 0 of a pooling engine."""
    if _pools(llm):
        llm.encode(prompts, use_tqdm=use_tqdm)
        return 0
    outputs = llm.generate(prompts, _exactly(output_len), use_tqdm=use_tqdm)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _check_output_file(path: Path | None) -> None:
    """Fails before the measurement, not after it."""
    try:
        if path is not None:
            path.touch()
    except OSError as error:
        raise ConfigError(f"--output-json {path} cannot be written: {error.strerror}") from None


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def _random_prompts(llm: Any, count: int, length: int) -> list[list[int]]:
    """Prompts that share no prefix, the same for every run."""
    rng = random.Random(0)
    vocab_size = llm.config.model.vocab_size
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _report(result: dict[str, Any], path: Path | None) -> int:
    text = json.dumps(result, indent=4)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    return 0
