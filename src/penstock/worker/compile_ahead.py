"""Compiles an engine's kernels while its weights load, in processes without a GPU that run through its steps.

    python -m penstock.worker.compile_ahead < a Job

Each runs through all of them on tensors without memory, and compiles kernels that no other process has started on, into
Triton's disk cache (`penstock.runner.gpu.ahead`). If all succeed, the cache is marked as complete for these arguments,
this code and this GPU, and the next start skips them.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

import penstock
from penstock.config.engine import EngineConfig
from penstock.config.kv_cache_groups import cache_of_one_rank
from penstock.messages.scheduler_output import NO_GRAMMARS, SchedulerOutput
from penstock.runner.kv_cache import allocate_kv_cache
from penstock.utils import logging
from penstock.utils.machine import usable_cores
from penstock.utils.wire import Codec, FrameReader
from penstock.worker.build_runner import make_runner
from penstock.worker.load import load_model
from penstock.worker.parts import make_parts
from penstock.worker.synthetic_steps import KINDS, SyntheticSteps

logger = logging.get_logger(__name__)

_MAX_PROCESSES = 16
_PROGRESS_DELAY_SECONDS = 2.0
_POLL_SECONDS = 0.1
_SHORTEST_CONTEXT = 1024
_COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Job:
    """`claims` is an empty folder that all processes share, `capability` the GPU's, 90 for 9.0."""

    config: EngineConfig
    capability: int
    claims: Path


_CODEC = Codec(Job)


@contextlib.contextmanager
def compiling_ahead(config: EngineConfig, capability: int | None) -> Iterator[Callable[[], None]]:
    """Starts compiling for a GPU (`DeviceParts.compute_capability`); yields a function that waits until it is done.

    After a failure the engine compiles by itself. Without a GPU nothing is compiled.
    """
    if capability is None:
        yield lambda: None
        return
    # The ranks of a host do this at the same time.
    num_processes = (usable_cores() - 1) // config.parallel.num_ranks
    with compiling(config, capability, max(1, min(_MAX_PROCESSES, num_processes))) as wait:
        yield wait


@contextlib.contextmanager
def compiling(config: EngineConfig, capability: int, num_processes: int) -> Iterator[Callable[[], None]]:
    """The same for any GPU, whether present or not."""
    from triton.runtime.cache import get_cache_manager

    mark = get_cache_manager(_key(config, capability))
    if mark.get_file(_COMPLETE) is not None:
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder, contextlib.ExitStack() as stack:
        claims = Path(folder, "claims")
        claims.mkdir()
        log = stack.enter_context(Path(folder, "log").open("w+b"))
        frame = _CODEC.encode(Job(config, capability, claims))
        processes = [stack.enter_context(_process(frame, log.fileno())) for _ in range(num_processes)]

        def wait() -> None:
            if _wait(processes, claims):
                mark.put("", _COMPLETE, binary=False)
                return
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            logger.warning("kernels could not be compiled ahead: %s", lines[-1] if lines else "no reason given")

        yield wait


@contextlib.contextmanager
def _process(frame: bytes, log: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "penstock.worker.compile_ahead"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log) as process:
        try:
            assert process.stdin is not None
            # It may already have died; its log has the reason.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(frame)
                process.stdin.close()
            yield process
        finally:
            process.kill()


def _wait(processes: list[subprocess.Popen[bytes]], claims: Path) -> bool:
    """Waits for the processes; returns whether all succeeded."""
    codes: list[int] = []
    with tqdm(desc="compiling kernels", unit="kernel", delay=_PROGRESS_DELAY_SECONDS) as progress:
        for process in processes:
            while process.poll() is None:
                progress.update(sum(1 for _ in claims.iterdir()) - progress.n)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
            codes.append(process.returncode)
    return not any(codes)


def _key(config: EngineConfig, capability: int) -> str:
    """Returns a key of everything that determines the kernels' variants, and possibly more."""
    from triton import __version__ as triton_version
    from triton._C.libtriton import get_cache_invalidating_env_vars

    versions = f"{torch.__version__} {triton_version} {sorted(get_cache_invalidating_env_vars().items())}"
    digest = hashlib.sha256(versions.encode())
    digest.update(_CODEC.encode(Job(config, capability, Path())))
    for file in sorted(Path(penstock.__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def walk(config: EngineConfig, device: torch.device) -> None:
    """Runs a step of every kind, and of every distinguishable size and context, without reading the results. On the
    device "meta" it needs no memory. It uses the engine's own runner, so a step launches the engine's kernels.
    """
    # Libraries ship compiled kernels, and cannot be loaded without a GPU.
    config = replace(config, execution=replace(config.execution, attention_backend="auto"))
    parts = make_parts(device)
    loaded = load_model(replace(config, device=device.type), parts)
    specs, draft_specs, ahead = loaded.model.kv_cache_specs, loaded.draft_kv_cache_specs, loaded.num_tokens_ahead
    cache = cache_of_one_rank(specs, draft_specs, ahead, config.cache.block_size)
    runner = make_runner(parts, loaded, allocate_kv_cache(cache, parts.allocate), config)
    for plan in _steps(config, len(cache.groups)):
        runner.execute_model(plan)
        runner.sample_tokens(NO_GRAMMARS)
    if config.kv_transfer is not None:
        # Imported here: a CPU needs no Triton.
        from penstock.runner.gpu.block_transfers import launch_all

        launch_all(device)


def _steps(config: EngineConfig, num_groups: int) -> Iterator[SchedulerOutput]:
    limits = config.scheduler
    steps = SyntheticSteps(limits, num_groups, config.cache.block_size)
    num_drafts = limits.max_num_drafts
    longest = max(1, limits.max_model_len - 1 - num_drafts)
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    counts = [1, *range(2, num_drafts + 1)]
    for kind in KINDS:
        for num_reqs in {1, min(most, limits.max_num_batched_tokens // (2 + num_drafts)) or 1}:
            yield steps.prefill([min(2 + num_drafts, longest)] * num_reqs, kind)
            yield steps.decode(num_reqs, longest, kind)
            for count in counts if num_drafts else ():
                yield steps.verify(count)
    for num_tokens in _steps_up(1, min(limits.max_num_batched_tokens, longest), 2):
        yield steps.prefill([num_tokens], KINDS[0])
    for num_reqs in _steps_up(1, most, 2):
        for context in _steps_up(min(_SHORTEST_CONTEXT, longest), longest, 4):
            yield steps.decode(num_reqs, context, KINDS[0])
            if num_drafts:
                yield steps.verify(num_drafts)


def _steps_up(first: int, last: int, factor: int) -> list[int]:
    """first, factor * first, factor^2 * first, ..., last."""
    found = [first]
    while factor * found[-1] < last:
        found.append(factor * found[-1])
    return [*found, last] if last > first else found


def main() -> None:
    # Imported only if there is something to compile: a CPU needs no Triton.
    from penstock.runner.gpu.ahead import claim_in, dry_run

    (job,) = FrameReader(_CODEC).feed(sys.stdin.buffer.read())
    with dry_run(job.capability, claim_in(job.claims)):
        walk(job.config, torch.device("meta"))


if __name__ == "__main__":
    main()
