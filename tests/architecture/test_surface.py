"""Snapshots of the public interface: the public names, the command-line flags, the environment variables.

A new flag or name is a deliberate decision: change the snapshot here and the documentation together.
"""

from __future__ import annotations

import argparse
import ast
import re

import penstock
from penstock.cli.commands import make_parser
from penstock.config import env
from tests.architecture.sources import ROOT, imports, modules

ENGINE_FLAGS = {
    "--async-scheduling", "--attention-backend", "--block-size", "--check-weights", "--deterministic", "--device",
    "--distributed-executor-backend", "--dtype", "--enable-eplb", "--enable-expert-parallel", "--enable-lora",
    "--enable-prefix-caching", "--enforce-eager", "--eplb-config",
    "--gpu-memory-utilization", "--kv-cache-dtype", "--kv-cache-memory", "--kv-events-config", "--kv-transfer-config",
    "--load-format", "--max-cpu-loras", "--max-lora-rank", "--max-loras", "--max-model-len",
    "--max-num-batched-tokens", "--max-num-queued-requests", "--max-num-seqs", "--model", "--num-gpu-blocks-override",
    "--num-threads", "--pipeline-layers", "--pipeline-parallel-size", "--pooler-config", "--quantization",
    "--quantize-head",
    "--quantize-activations",
    "--revision", "--runner", "--scheduling-policy", "--seed", "--skip-tokenizer-init", "--speculative-config",
    "--state-cache-share", "--state-checkpoint-interval",
    "--tensor-parallel-size", "--tokenizer",
}  # fmt: skip
SERVER_FLAGS = {
    "--access-log", "--admin-api-key", "--admin-port", "--allow-unauthenticated", "--allowed-origin", "--api-key",
    "--health-timeout", "--host", "--ignore-unknown-fields", "--lora-allowed-path",
    "--lora-modules", "--max-body-bytes", "--otlp-traces-endpoint", "--port",
    "--protect-metrics", "--reasoning-parser", "--restart-on-failure", "--served-model-name", "--shutdown-timeout",
    "--ssl-certfile", "--ssl-keyfile", "--tool-call-parser",
}  # fmt: skip
SAMPLING_FLAGS = {
    "--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty", "--presence-penalty",
    "--frequency-penalty", "--stop",
}  # fmt: skip
ROUTER_FLAGS = {
    "--admin-port", "--allow-unauthenticated", "--dead-after", "--decode", "--health-interval", "--host",
    "--max-local-prefill", "--max-migrations", "--max-outstanding", "--max-queued-requests", "--max-retries",
    "--max-self-prefills", "--migrate", "--migrate-after", "--policy", "--port", "--prefill", "--prefill-timeout",
    "--queue-timeout", "--serve", "--shutdown-timeout", "--stall-after",
}  # fmt: skip
BENCH_FLAGS = {"--input-len", "--output-len", "--output-json"}
LOAD_FLAGS = {
    "--api-key", "--backend", "--base-url", "--burstiness", "--dataset-name", "--dataset-path", "--disable-tqdm",
    "--endpoint", "--frequency-penalty", "--goodput", "--host", "--ignore-eos", "--label", "--max-concurrency",
    "--metric-percentiles", "--min-p", "--model", "--num-prompts", "--num-warmups", "--percentile-metrics", "--port",
    "--presence-penalty", "--random-input-len", "--random-output-len", "--random-prefix-len", "--random-range-ratio",
    "--ready-check-timeout-sec", "--repetition-penalty", "--request-rate", "--result-dir", "--result-filename",
    "--save-detailed", "--save-result", "--seed", "--sharegpt-output-len", "--temperature", "--tokenizer", "--top-k",
    "--top-p", "--trace-scale",
}  # fmt: skip
AUDIT_FLAGS = {
    "--against", "--api-key", "--concurrency", "--json", "--long-tokens", "--margin", "--max-requests-per-second",
    "--max-tokens", "--model", "--num-prompts", "--pause-for-restart", "--pressure-tokens", "--seed", "--timeout",
}  # fmt: skip
FLAGS = {
    "serve": ENGINE_FLAGS | SERVER_FLAGS | {"--data-parallel-policy", "--data-parallel-size"},
    "route": ROUTER_FLAGS,
    "bench serve": LOAD_FLAGS,
    "audit": AUDIT_FLAGS,
    "generate": ENGINE_FLAGS | SAMPLING_FLAGS | {"--prompt", "--chat", "--json"},
    "chat": ENGINE_FLAGS | SAMPLING_FLAGS | {"--api-key", "--system", "--url"},
    "verify": ENGINE_FLAGS | {"--prompts", "--max-tokens", "--quick", "--soak"},
    "bench throughput": ENGINE_FLAGS | BENCH_FLAGS | {"--num-prompts"},
    "simulate": {"--count", "--jobs", "--list", "--scenario", "--seed"},
    "demo-pd": {"--kv-cache-memory", "--port", "--style", "--transport"},
    "bench latency": ENGINE_FLAGS | BENCH_FLAGS | {"--batch-size", "--num-iters", "--num-iters-warmup"},
}

PUBLIC = {
    "LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "CompletionOutput", "PenstockError", "ConfigError",
    "RequestError", "OverloadedError", "EngineDeadError", "StructuredOutputsParams", "PoolingParams",
    "LoRARequest",
    "EmbeddingRequestOutput", "PoolingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput",
    "__version__",
}  # fmt: skip


def _commands(parser: argparse.ArgumentParser, prefix: str = ""):
    children = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not children:
        flags = {flag for action in parser._actions for flag in action.option_strings}
        yield prefix.strip(), {flag for flag in flags if flag.startswith("--") and not flag.startswith("--no-")}
    for action in children:
        for name, child in action.choices.items():
            yield from _commands(child, f"{prefix} {name}")


def test_command_line_flags() -> None:
    found = {name: flags - {"--help"} for name, flags in _commands(make_parser())}
    assert found == FLAGS


def test_public_names() -> None:
    assert set(penstock.__all__) == PUBLIC <= set(dir(penstock))
    for name in PUBLIC:
        assert getattr(penstock, name) is not None


def test_the_environment_is_read_in_one_module() -> None:
    for module, tree in modules().items():
        reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert not reads or module == "config.env", f"{module} reads the environment"


def test_environment_names_are_documented() -> None:
    assert len(env.NAMES) <= 12
    source = (ROOT / "src/penstock/config/env.py").read_text(encoding="utf-8")
    assert set(re.findall(r"\b(?:PENSTOCK|GOMP|THP|RAY|CUDA|XDG)_[A-Z_]+", source)) == set(env.NAMES)
    documentation = (ROOT / "docs/CONFIGURATION.md").read_text(encoding="utf-8")
    for name in (*env.NAMES, *ENGINE_FLAGS, *SERVER_FLAGS):
        assert name in documentation, f"docs/CONFIGURATION.md does not mention {name}"


def test_no_code_is_run_from_data() -> None:
    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
    for module, tree in modules().items():
        assert not {name.split(".")[0] for name in imports(tree)} & banned, module
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            assert name not in ("eval", "exec", "torch.load"), f"{module} calls {name}"


def test_no_sleep() -> None:
    for module, tree in modules().items():
        sleeps = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "sleep"]
        assert not sleeps, module
        assert "time.sleep" not in imports(tree), module
