"""Divides the GPUs of a process among engines and ranks, in the order of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.config.parallel import ParallelConfig
from penstock.utils.errors import ConfigError


def name_gpus(visible: str | None, count: int) -> list[str]:
    """Returns the names of the first `count` GPUs, or of fewer if `visible` lists fewer. `visible` is the value of
    CUDA_VISIBLE_DEVICES, None if it is unset.
    """
    return [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]


def show_gpus(names: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a process that uses only these GPUs."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def gpus_of_ranks(
    device: str, parallel: ParallelConfig, visible: str | None, count_gpus: Callable[[], int]
) -> list[str]:
    """Returns the name of each rank's GPU on this host; nothing if the ranks run on its CPU. `device` is the argument,
    `visible` as for `name_gpus`, and `count_gpus` counts the GPUs that exist among these.

    Raises ConfigError if there are too few, or if the ranks are threads.
    """
    if device == "cpu":
        return []
    count, needed = count_gpus(), parallel.num_ranks
    if device == "auto" and count == 0:
        return []
    if parallel.backend == "uniproc":
        raise ConfigError(
            f"{needed} ranks on GPUs need a process each, and those of distributed_executor_backend=uniproc are "
            "threads: leave the argument out, choose mp or ray, or set device=cpu"
        )
    if count < needed:
        listed = "" if visible is None else f" in CUDA_VISIBLE_DEVICES={visible}"
        raise ConfigError(
            f"{needed} ranks need {needed} GPUs, and CUDA finds {count}{listed}: lower tensor_parallel_size or "
            "pipeline_parallel_size, make more GPUs visible, or set device=cpu"
        )
    return name_gpus(visible, needed)
