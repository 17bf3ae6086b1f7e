"""The import direction: lower folders never import higher ones, and the control plane imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.sources import imports, modules, own_imports

# Folder -> folders that it may import, besides itself.
ALLOWED = {
    "utils": set(),
    "messages": {"utils"},
    "config": {"utils", "messages"},
    "kernels": {"config", "messages", "utils"},
    "parallel": {"kernels", "config", "messages", "utils"},
    "attention": {"parallel", "kernels", "config", "messages", "utils"},
    "layers": {"attention", "parallel", "kernels", "config", "messages", "utils"},
    "models": {"layers", "attention", "parallel", "kernels", "config", "messages", "utils"},
    "grammar": {"config", "messages", "utils"},
    "kv_transfer": {"config", "messages", "utils"},
    "core": {"grammar", "kv_transfer", "config", "messages", "utils"},
    "runner": {"kv_transfer", "models", "layers", "attention", "parallel", "kernels", "config", "messages", "utils"},
    "worker": {"runner", "kv_transfer", "models", "attention", "parallel", "kernels", "config", "messages", "utils"},
    "executor": {"worker", "kv_transfer", "parallel", "config", "messages", "utils"},
    "metrics": {"config", "messages", "utils"},
    "tokenizer": {"config", "messages", "utils"},
    "engine": {
        "tokenizer",
        "executor",
        "worker",
        "core",
        "kv_transfer",
        "grammar",
        "config",
        "messages",
        "utils",
    },
    "frontend": {"engine", "tokenizer", "grammar", "metrics", "config", "messages", "utils"},
    "verify": {"frontend", "engine", "worker", "core", "models", "config", "messages", "utils"},
    "simulation": {
        "engine",
        "executor",
        "worker",
        "runner",
        "core",
        "router",
        "kv_transfer",
        "config",
        "messages",
        "utils",
    },
    "server": {"frontend", "tokenizer", "metrics", "config", "messages", "utils"},
    "loadgen": {"messages", "utils"},
    "audit": {"loadgen", "utils"},
    "router": {"messages", "metrics", "utils"},
    "cli": {
        "server",
        "router",
        "verify",
        "loadgen",
        "audit",
        "simulation",
        "frontend",
        "tokenizer",
        "engine",
        "config",
        "messages",
        "utils",
    },
}

WITHOUT_TORCH = (
    "utils",
    "messages",
    "config",
    "core",
    "kv_transfer",
    "engine",
    "frontend",
    "grammar",
    "metrics",
    "tokenizer",
    "server",
    "loadgen",
    "audit",
    "router",
    "simulation",
)

# Modules outside these folders that the simulation uses, or that the executor needs in the engine core's process.
MODULES_WITHOUT_TORCH = (
    "runner.rows",
    "runner.host_batch",
    "runner.awaited_results",
    "executor.executor",
    "executor.remote",
    "executor.ray",
    "worker.messages",
    "parallel.rank_memory",
)

# The only modules of `models` that models may import.
MODEL_BASES = {"sources", "interface", "lora", "recurrent", "repeated", "weights", "norms", "parts"} | {
    "decoder",
    "encoder",
    "mixed_experts",
}

# Third-party package -> the only modules that import it.
IMPORTERS = {
    "safetensors": {"models.sources.checkpoint", "config.lora"},
    "huggingface_hub": {"config.model_path"},
    "jinja2": {"tokenizer.chat_template"},
    "zmq": {"engine.kv_events", "router.kv_subscriptions"},
    "aiohttp": {"loadgen.client"},
    "httptools": {"router.http_client", "router.http_server", "server.connections"},
    "llguidance": {"grammar.llguidance_backend"},
    "flashinfer": {"attention.flashinfer"},
    "flash_attn_interface": {"attention.flash_attention"},
    "uvicorn": {"server.run", "server.connections"},
    "xxhash": {"utils.digest"},
    "nixl_cu12": {"kv_transfer.transports.nixl_agent"},
    "nixl_cu13": {"kv_transfer.transports.nixl_agent"},
    "mooncake": {"kv_transfer.transports.mooncake_agent"},
    "ray": {"executor.ray"},
    "prometheus_client": {"metrics.families"},
    "opentelemetry": {"metrics.tracing"},
}


def _folder(module: str) -> str:
    return module.split(".")[0]


def _runs_without_torch(module: str) -> bool:
    return _folder(module) in WITHOUT_TORCH or module in MODULES_WITHOUT_TORCH


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_follow_the_layers(module: str) -> None:
    if not module:
        return
    folder = _folder(module)
    assert folder in ALLOWED, f"{module} is in a folder that ALLOWED does not list"
    for name in imports(modules()[module]):
        if name.startswith("penstock.") and name.count(".") >= 1:
            target = name.split(".")[1]
            if target in ALLOWED:
                assert target == folder or target in ALLOWED[folder], f"{module} imports {name}"


def test_no_circles() -> None:
    """Types count too: two modules that need each other's types are one thought in two files."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"{' -> '.join(path[path.index(module) :])} -> {module}"
        if module not in done:
            for name in sorted(own_imports(module, with_types=True)):
                visit(name, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in sorted(modules()) if _folder(m) == "models" and "." in m])
def test_models_share_only_named_bases(module: str) -> None:
    if module == "models.registry":
        return
    for name in imports(modules()[module]):
        if name.startswith("penstock.models."):
            assert name.split(".")[2] in MODEL_BASES, f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in sorted(modules()) if _runs_without_torch(m)])
def test_no_torch_in_the_source(module: str) -> None:
    heavy = {name for name in imports(modules()[module]) if name.split(".")[0] in ("torch", "triton", "transformers")}
    assert not heavy, f"{module} imports {heavy}"


def test_the_control_plane_runs_without_torch() -> None:
    names = [f"penstock.{m}" for m in modules() if _runs_without_torch(m)]
    code = f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", sorted(IMPORTERS))
def test_third_party_packages_are_imported_only_where_listed(package: str) -> None:
    users = {m for m, tree in modules().items() if any(n.split(".")[0] == package for n in imports(tree))}
    assert users == IMPORTERS[package]
