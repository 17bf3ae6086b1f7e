"""A step is the same on every device: the runner's shared modules do not ask for the device; only the worker does."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.sources import imports, modules

RUNNER = [module for module in sorted(modules()) if module.split(".")[0] == "runner"]
DEVICE_FOLDERS = ("runner.cpu", "runner.gpu")
SHARED = [module for module in RUNNER if not module.startswith(DEVICE_FOLDERS)]
# Names by which a module could ask for the device.
DEVICE_QUERIES = ("has_gpu_kernels", "uses_triton", "is_interpreted", "is_cpu", "is_cuda", "is_meta", "is_available")


def _imports_in_runner(module: str) -> set[str]:
    """Returns the modules of the runner that a module imports."""
    names = {name.removeprefix("penstock.") for name in imports(modules()[module]) if name.startswith("penstock.")}
    return {name for name in names if name in RUNNER and name != module}


def _asks_for_the_device(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in DEVICE_QUERIES:
                return True
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side.endswith(".type") for side in sides):
                return True
    return False


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
    imported = [name for name in _imports_in_runner(module) if name.startswith(DEVICE_FOLDERS)]
    assert not [name for name in imported if own is None or own not in name]


def test_no_circular_imports() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"{' -> '.join(path[path.index(module) :])} -> {module}"
        if module not in done:
            for name in sorted(_imports_in_runner(module)):
                visit(name, (*path, module))
            done.add(module)

    for module in RUNNER:
        visit(module, ())
