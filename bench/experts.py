"""Layers of experts: the time of one layer for a batch of tokens, beside the memory floor.

    python bench/experts.py [--model bench/shapes/qwen3-30b-a3b] [--layers 2] [--batches 1 2 4 8 32] [--rounds 40]

The layers have random weights and the tokens are random, so a batch chooses its experts evenly. The floor is the time
in which the weights of the experts that a batch chooses are read from memory, at the bandwidth that the same process
measures before and after; "of floor" is the floor divided by the median time. Figures are medians over calls that take
the layers in turn, each call with other tokens.

With `--parts` the time of each part of a layer is printed too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.config.model import load_model_config
from penstock.kernels import native
from penstock.models.experts import Experts, SlicedExperts
from penstock.models.sources.dummy import DummySource
from penstock.models.weights import Weights

CPU = torch.device("cpu")
DTYPE = torch.bfloat16


def read_bandwidth(megabytes: int) -> float:
    """Returns bytes per second: the median of several sums over float32 in memory."""
    data = torch.ones(megabytes << 18)
    return data.nbytes / statistics.median(seconds(data.sum) for _ in range(7))


def make_layers(path: Path, count: int) -> list[Experts]:
    config = load_model_config(path, "bfloat16")
    source = DummySource(CPU)
    layers = []
    for number in range(count):
        weights = Weights(source, DTYPE, CPU) / "model" / "layers" / number
        layers.append(Experts(config, weights))
    return layers


def expert_bytes(layer: Experts, hidden: int) -> int:
    return 3 * hidden * layer.config.intermediate_size * DTYPE.itemsize


def parts_of(layer: Experts, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Returns the steps of a layer's call, each to be called by itself."""
    logits = layer.router_logits(x)
    ids, weights = layer.route(logits)
    routed = layer.routed
    assert isinstance(routed, SlicedExperts), "one rank has all experts"
    experts, slots = routed.experts, routed.slots
    groups = experts.group(ids, slots)
    activated = experts.gate_up(x, groups)
    outputs = experts.down(activated, groups)
    return {
        "logits": lambda: layer.router_logits(x),
        "route": lambda: layer.route(logits),
        "group": lambda: experts.group(ids, slots),
        "gate_up": lambda: experts.gate_up(x, groups),
        "down": lambda: experts.down(activated, groups),
        "combine": lambda: experts.combine(outputs, groups, weights),
    }


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(layers: list[Experts], hidden: int, batch: int, rounds: int) -> tuple[float, float]:
    """Returns the median seconds of a call, and the mean number of different experts of a call."""
    calls = [(layers[number % len(layers)], torch.randn(batch, hidden).to(DTYPE)) for number in range(rounds)]
    chosen = [len(layer.route(layer.router_logits(x))[0].unique()) for layer, x in calls]
    # Nothing but the layers runs here: torch's threads would still spin for a moment after any product of theirs.
    taken = [seconds(lambda layer=layer, x=x: layer(x)) for layer, x in calls]
    return statistics.median(taken[rounds // 5 :]), statistics.mean(chosen)


def measure_parts(layers: list[Experts], hidden: int, batch: int, rounds: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {}
    for number in range(rounds):
        # The parts' inputs are those of another call, whose weights are no longer in the cache.
        made = parts_of(layers[number % len(layers)], torch.randn(batch, hidden).to(DTYPE))
        layers[number % len(layers)](torch.randn(4, hidden).to(DTYPE))
        for name, call in made.items():
            taken.setdefault(name, []).append(seconds(call))
    return {name: statistics.median(found) for name, found in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("bench/shapes/qwen3-30b-a3b"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 32])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    parser.add_argument("--megabytes", type=int, default=1024, help="that a measurement of the bandwidth reads")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        layers = make_layers(options.model, options.layers)
        hidden = len(layers[0].router_logits.dense_weight()[0])
        size, lines = expert_bytes(layers[0], hidden), []
        for batch in options.batches:
            before = read_bandwidth(options.megabytes)
            median, chosen = measure(layers, hidden, batch, options.rounds)
            bandwidth = max(before, read_bandwidth(options.megabytes))
            parts = measure_parts(layers, hidden, batch, options.rounds // 2) if options.parts else {}
            lines.append((batch, median, chosen, bandwidth, parts))
    library = native.library()
    print(f"{options.model.name}, {library.isa if library else 'torch'}, {options.threads} threads")
    print(f"{size / 1e6:.1f} MB an expert")
    for batch, median, chosen, bandwidth, parts in lines:
        floor, operations = chosen * size / bandwidth, batch * layers[0].config.top_k * size
        print(
            f"batch {batch:>3}: {median * 1e3:8.2f} ms, {chosen:5.1f} experts, floor {floor * 1e3:7.2f} ms "
            f"at {bandwidth / 1e9:.1f} GB/s, "
            f"{floor / median:.2f} of floor, {operations / median / 1e9:6.1f} GFLOP/s"
        )
        if parts:
            print("    " + ", ".join(f"{name} {taken * 1e3:.3f}" for name, taken in parts.items()) + " ms")


if __name__ == "__main__":
    main()
