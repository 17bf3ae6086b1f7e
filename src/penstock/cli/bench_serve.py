"""`penstock bench serve`: load on an OpenAI-compatible server, with the flags and JSON keys of `vllm bench serve`."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import add_values, at_most, count, count_from_zero, number, positive_number, whole_number
from penstock.cli.sampling_args import NUMBERS
from penstock.loadgen import results
from penstock.utils.clock import SystemClock
from penstock.utils.errors import ConfigError
from penstock.utils.hosts import in_url

if TYPE_CHECKING:
    from penstock.loadgen.datasets import Sample
    from penstock.loadgen.runner import Run
    from penstock.loadgen.tokens import Tokenizer

_EMBEDDINGS = "openai-embeddings"
_ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", _EMBEDDINGS: "/v1/embeddings"}
_DEFAULT_NUM_PROMPTS = 1000
_DEFAULT_OUTPUT_LEN = 128
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_HEADERS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
_WIDTH = 50
_ERRORS_SHOWN = 10
DESCRIPTION = """\
Sends load to an OpenAI-compatible server and reports latencies and throughput.

The datasets random and trace send token ids (with --backend openai-chat, random
sends text of the same length; trace needs --backend openai). They set
ignore_eos, so that every output has its full length. Token ids and the lengths
of ShareGPT texts come from --tokenizer or, without it, from the server's
/tokenize and /detokenize: prompts then consist of tokens of random letters.
Output tokens are counted by the server's usage. With --backend
openai-embeddings every request is one input: there are no output tokens, and
the only latency is E2EL. Warm-up requests are the first prompts with their
tokens in reverse order: they have the same length, and a prefix cache cannot
reuse them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_server_args(parser.add_argument_group("server"))
    _add_dataset_args(parser.add_argument_group("requests"))
    _add_traffic_args(parser.add_argument_group("traffic"))
    _add_report_args(parser.add_argument_group("report"))
    sampling = parser.add_argument_group("sampling (defaults: those of the server)")
    for name in _SAMPLING:
        kind, metavar, _ = NUMBERS[name]
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar)
    parser.set_defaults(run=run)


def _add_server_args(group: Any) -> None:
    group.add_argument(
        "--backend", choices=_ENDPOINTS, default="openai", help="completions (default), chat or embeddings"
    )
    group.add_argument("--base-url", metavar="URL", help="the server's address, instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=at_most(65535), default=8000, metavar="N", help="(default: 8000)")
    group.add_argument("--endpoint", metavar="PATH", help="path of the requests (default: by --backend)")
    group.add_argument("--model", metavar="NAME", help="model to request (default: the first of /v1/models)")
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    wait = "how long to wait for /v1/models to answer (default: 0)"
    add_values(group, ("--ready-check-timeout-sec", count_from_zero, 0, "SECONDS", wait))


def _add_dataset_args(group: Any) -> None:
    group.add_argument(
        "--dataset-name", choices=("random", "sharegpt", "trace"), default="random", metavar="NAME",
        help="random (default), sharegpt or trace",
    )  # fmt: skip
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="file of sharegpt (JSON) or of a Mooncake trace (JSONL)"
    )
    group.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="a folder with tokenizer.json")
    group.add_argument(
        "--num-prompts", type=count, metavar="N", help=f"requests (default: {_DEFAULT_NUM_PROMPTS}; of a trace: all)"
    )
    group.add_argument("--random-input-len", type=count, default=1024, metavar="N", help="(default: 1024)")
    group.add_argument("--random-output-len", type=count, metavar="N", help=f"(default: {_DEFAULT_OUTPUT_LEN})")
    add_values(
        group,
        ("--random-range-ratio", ratio, 0.0, "X", "lengths vary by up to this share in both directions (default: 0)"),
        ("--random-prefix-len", count_from_zero, 0, "N", "tokens shared by all prompts (default: 0)"),
        ("--sharegpt-output-len", count, None, "N", "(default: the answers' lengths)"),
    )
    group.add_argument("--ignore-eos", action="store_true", help="sharegpt: generate up to the output length")
    add_values(group, ("--seed", whole_number, 0, "N", "of prompts, lengths and arrivals (default: 0)"))


def _add_traffic_args(group: Any) -> None:
    add_values(
        group,
        ("--request-rate", positive_number, math.inf, "X", "requests per second (default: inf, all at once)"),
        ("--burstiness", positive_number, 1.0, "X", "1 is Poisson (default), less is burstier, inf is even"),
        ("--trace-scale", positive_number, 1.0, "X", "replay a trace X times as fast"),
        ("--max-concurrency", count, None, "N", "most requests in flight (default: no limit)"),
        ("--num-warmups", count_from_zero, 0, "N", "requests sent before the measurement (default: 0)"),
    )


def _add_report_args(group: Any) -> None:
    latencies = f"latencies to report (default: {','.join(results.METRICS)}; of embeddings: e2el)"
    add_values(
        group,
        ("--percentile-metrics", metric_names, None, "NAMES", latencies),
        ("--metric-percentiles", percentages, (99.0,), "NUMBERS", "such as 50,90,99 (default: 99)"),
    )
    group.add_argument(
        "--goodput",
        type=objective,
        nargs="+",
        default=(),
        metavar="METRIC:MS",
        help="count the requests within these limits: ttft, tpot, e2el, in milliseconds",
    )
    group.add_argument("--label", metavar="TEXT", help="name of the run in the result (default: the backend)")
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument(
        "--save-detailed", action="store_true", help="the same with an entry per request; implies --save-result"
    )
    group.add_argument(
        "--result-dir", type=Path, default=Path(), metavar="FOLDER", help="(default: the current folder)"
    )
    group.add_argument("--result-filename", metavar="NAME", help="(default: made of label, rate, model and date)")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")


def ratio(text: str) -> float:
    value = number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text}")
    return value


def metric_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in names if name not in results.METRICS]:
        raise argparse.ArgumentTypeError(f"unknown metric {unknown[0]!r}; known: {', '.join(results.METRICS)}")
    return names


def percentages(text: str) -> tuple[float, ...]:
    values = tuple(number(value) for value in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must lie between 0 and 100, got {text}")
    return values


def objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in results.REQUEST_METRICS:
        raise argparse.ArgumentTypeError(f"unknown metric {name!r}; known: {', '.join(results.REQUEST_METRICS)}")
    return name, positive_number(limit)


def run(args: argparse.Namespace) -> int:
    """Returns 1 when every request failed. Raises KeyboardInterrupt after it has reported what was measured."""
    _check(args)
    # Imported here: the help text needs no event loop, no progress bar, no HTTP client and no tokenizer.
    import asyncio

    date = time.strftime("%Y%m%d-%H%M%S", time.localtime(SystemClock().wall()))
    model, num_prompts, measured = asyncio.run(_measure(args))
    objectives = dict(args.goodput)
    is_embedding = args.backend == _EMBEDDINGS
    metrics = args.percentile_metrics or (("e2el",) if is_embedding else results.METRICS)
    reported = results.without_output if is_embedding else dict[str, Any]
    result: dict[str, Any] = {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": None if args.tokenizer is None else str(args.tokenizer),
        "num_prompts": num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": "inf" if math.isinf(args.burstiness) else args.burstiness,
        "max_concurrency": args.max_concurrency,
        **reported(results.summarize(measured, objectives)),
        **results.latency_figures(measured.outcomes, metrics, args.metric_percentiles),
    }
    _print_notices(measured, num_prompts)
    _print_table(args, result, metrics)
    if args.save_result or args.save_detailed:
        extra = reported(results.details(measured.outcomes)) if args.save_detailed else {}
        _result_path(args, model, date).write_text(json.dumps({**result, **extra}) + "\n", encoding="utf-8")
    if measured.interrupted:
        raise KeyboardInterrupt
    return 1 if result["completed"] == 0 else 0


def _check(args: argparse.Namespace) -> None:
    """Refuses combinations of flags that cannot work, before anything is sent."""
    if (args.dataset_path is None) != (args.dataset_name == "random"):
        needed = "cannot be used with" if args.dataset_name == "random" else "needs"
        raise ConfigError(f"--dataset-name {args.dataset_name} {needed} --dataset-path")
    if args.backend == _EMBEDDINGS:
        _check_embeddings(args)
    if args.dataset_name == "trace" and args.backend != "openai":
        raise ConfigError("--dataset-name trace sends token ids, which no chat message can hold: use --backend openai")
    if args.dataset_name == "trace" and not math.isinf(args.request_rate):
        raise ConfigError("a trace has its own arrival times: use --trace-scale instead of --request-rate")
    if args.save_result or args.save_detailed:
        with contextlib.suppress(OSError):
            (folder := _result_path(args, "", "").parent).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"the results cannot be written to {folder}: change --result-dir or --result-filename")


def _check_embeddings(args: argparse.Namespace) -> None:
    """Refuses what needs output tokens."""
    if args.dataset_name == "trace":
        raise ConfigError(f"--dataset-name trace sets output lengths: it cannot be used with --backend {_EMBEDDINGS}")
    for name in (*_SAMPLING, "ignore_eos", "random_output_len", "sharegpt_output_len"):
        value = getattr(args, name)
        if value is not None and value is not False:
            raise ConfigError(f"--{name.replace('_', '-')} cannot be used with --backend {_EMBEDDINGS}")
    for name in (*(args.percentile_metrics or ()), *dict(args.goodput)):
        if name != "e2el":
            raise ConfigError(f"embeddings have no {name}: the only metric of --backend {_EMBEDDINGS} is e2el")


async def _measure(args: argparse.Namespace) -> tuple[str, int, Run]:
    """Returns the model's name, the number of requests to send, and their outcomes."""
    from tqdm import tqdm

    from penstock.loadgen.client import Server, ServerTokenizer, chat_body, embedding_body, request_body
    from penstock.loadgen.runner import arrivals, run_load
    from penstock.loadgen.tokens import LocalTokenizer

    async with Server(_base_url(args), args.api_key) as server:
        model = await server.find_model(args.model, args.ready_check_timeout_sec)
        tokenizer = ServerTokenizer(server, model.name) if args.tokenizer is None else LocalTokenizer(args.tokenizer)
        samples = await _samples(args, tokenizer)
        if args.backend == _EMBEDDINGS:
            samples = [replace(sample, output_len=0) for sample in samples]
        samples = _fitting(samples, model.max_model_len)
        options = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
        if args.backend != _EMBEDDINGS and (args.ignore_eos or args.dataset_name != "sharegpt"):
            options["ignore_eos"] = True
        make_body = {"openai": request_body, "openai-chat": chat_body, _EMBEDDINGS: embedding_body}[args.backend]
        send = server.embed if args.backend == _EMBEDDINGS else server.generate
        endpoint = args.endpoint or _ENDPOINTS[args.backend]

        async def load(some: Sequence[Sample], times: Sequence[float], what: str) -> Run:
            bodies = [make_body(sample, model.name, options) for sample in some]
            with tqdm(total=len(some), desc=what, unit="req", disable=args.disable_tqdm) as bar:
                return await run_load(
                    lambda index: send(endpoint, bodies[index], some[index].prompt_len),
                    times,
                    args.max_concurrency,
                    bar.update,
                )

        warmups = [samples[index % len(samples)].backwards() for index in range(args.num_warmups)]
        if warmups and (await load(warmups, [0.0] * len(warmups), "warm-up")).interrupted:
            raise KeyboardInterrupt
        times = [sample.at for sample in samples if sample.at is not None]
        times = times or arrivals(len(samples), args.request_rate, args.burstiness, args.seed)
        return model.name, len(samples), await load(samples, times, "requests")


async def _samples(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Sample]:
    from penstock.loadgen.datasets import RandomShape, random_samples, sharegpt_samples, trace_samples

    num_prompts = args.num_prompts or _DEFAULT_NUM_PROMPTS
    if args.dataset_name == "random":
        shape = RandomShape(
            num_prompts=num_prompts,
            input_len=args.random_input_len,
            output_len=args.random_output_len or _DEFAULT_OUTPUT_LEN,
            range_ratio=args.random_range_ratio,
            prefix_len=args.random_prefix_len,
        )
        return await random_samples(tokenizer, shape, args.seed, as_text=args.backend == "openai-chat")
    if args.dataset_name == "sharegpt":
        samples = await sharegpt_samples(tokenizer, args.dataset_path, num_prompts, args.sharegpt_output_len, args.seed)
    else:
        vocabulary = await tokenizer.vocabulary()
        samples = trace_samples(vocabulary, args.dataset_path, args.num_prompts, args.trace_scale, args.seed)
    if len(samples) < (args.num_prompts or 1):
        _notice(f"{args.dataset_path} holds {len(samples)} usable requests, not {args.num_prompts or 1}")
    return samples


def _fitting(samples: list[Sample], max_model_len: int | None) -> list[Sample]:
    """Returns the requests that fit into the model's context. Raises ConfigError if there are none."""
    limit = math.inf if max_model_len is None else max_model_len
    fitting = [sample for sample in samples if sample.prompt_len + sample.output_len <= limit]
    if not fitting:
        raise ConfigError(f"no request fits the model's max_model_len={max_model_len}: ask for shorter ones")
    if len(fitting) < len(samples):
        _notice(f"{len(samples) - len(fitting)} requests exceed max_model_len={max_model_len} and are left out")
    return fitting


def _base_url(args: argparse.Namespace) -> str:
    if args.base_url is not None:
        return args.base_url.rstrip("/").removesuffix("/v1")
    return f"http://{in_url(args.host)}:{args.port}"


def _result_path(args: argparse.Namespace, model: str, date: str) -> Path:
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    made = f"{Path(args.label or args.backend).name}-{args.request_rate}qps{limit}-{Path(model).name}-{date}.json"
    return args.result_dir / (args.result_filename or made)


def _notice(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr)


def _print_notices(measured: Run, num_prompts: int) -> None:
    """Warnings about the figures, and the errors of requests."""
    if measured.interrupted:
        _notice(f"interrupted: {num_prompts - len(measured.outcomes)} requests had not finished and are not counted")
    if uncounted := sum(not outcome.has_usage for outcome in measured.outcomes if not outcome.error):
        _notice(f"{uncounted} responses reported no usage: each of their chunks is counted as one output token")
    errors = Counter(outcome.error for outcome in measured.outcomes if outcome.error)
    for error, num_failed in errors.most_common(_ERRORS_SHOWN):
        _notice(f"{num_failed} failed: {error}")


def _print_table(args: argparse.Namespace, result: dict[str, Any], metrics: Sequence[str]) -> None:
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", args.max_concurrency),
        ("Request rate configured (RPS):", None if math.isinf(args.request_rate) else args.request_rate),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result.get("total_output_tokens")),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result.get("output_throughput")),
        ("Peak output token throughput (tok/s):", result.get("max_output_tokens_per_s")),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    print(" Serving Benchmark Result ".center(_WIDTH, "="))
    _print_rows([row for row in rows if row[1] is not None])
    for metric in metrics:
        short, header = _HEADERS[metric]
        print(header.center(_WIDTH, "-"))
        figures = [("Mean", "mean"), ("Median", "median")]
        figures += [(f"P{percentage:g}", f"p{percentage:g}") for percentage in args.metric_percentiles]
        _print_rows([(f"{word} {short} (ms):", result[f"{key}_{metric}_ms"]) for word, key in figures])
    print("=" * _WIDTH)


def _print_rows(rows: Sequence[tuple[str, Any]]) -> None:
    for label, value in rows:
        print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
