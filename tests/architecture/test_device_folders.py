"""A step is the same on every device: the runner's shared modules do not ask for the device; only the worker does."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import imports, modules, own_imports

RUNNER = [module for module in sorted(modules()) if module.split(".")[0] == "runner"]
DEVICE_FOLDERS = ("runner.cpu", "runner.gpu")
SHARED = [module for module in RUNNER if not module.startswith(DEVICE_FOLDERS)]
# Names by which a module could ask for the device.
DEVICE_QUERIES = ("has_gpu_kernels", "uses_triton", "is_interpreted", "is_cpu", "is_cuda", "is_meta", "is_available")
DEVICES = ("cpu", "cuda", "meta")


def _asks_for_the_device(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in DEVICE_QUERIES:
                return True
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(ast.unparse(side).endswith(".type") or _names_a_device(side) for side in sides):
                return True
    return False


def _names_a_device(tree: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and node.value in DEVICES for node in ast.walk(tree))


@pytest.mark.parametrize("module", SHARED)
def test_shared_modules_do_not_ask_for_the_device(module: str) -> None:
    assert not _asks_for_the_device(modules()[module])
    assert not {name for name in imports(modules()[module]) if name.split(".")[0] == "triton"}


def test_one_module_of_the_worker_asks_for_the_device() -> None:
    asking = {name for name in modules() if name.split(".")[0] == "worker" and _asks_for_the_device(modules()[name])}
    assert asking == {"worker.parts"}


@pytest.mark.parametrize("module", RUNNER)
def test_device_folders_are_imported_only_from_within(module: str) -> None:
    own = next((folder for folder in DEVICE_FOLDERS if module.startswith(folder)), None)
    imported = [name for name in own_imports(module) if name.startswith(DEVICE_FOLDERS)]
    assert not [name for name in imported if own is None or own not in name]
