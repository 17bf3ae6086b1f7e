"""Moves KV blocks between a cache and the host with interpreted GPU kernels and a queue that copies late."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from penstock.kernels.triton.move_blocks import LayerTable, gather_blocks, scatter_blocks
from penstock.kv_transfer.view import Place
from penstock.messages.kv_cache_spec import AttachedLayer, KVCacheConfig, KVCacheGroup, KVCacheSpec
from penstock.runner.cpu.kv_cache_view import HostKVCacheView
from penstock.runner.gpu.block_transfers import BlockTransfers
from penstock.runner.gpu.kv_cache_view import GpuKVCacheView
from penstock.runner.kv_cache import KVCache, allocate_kv_cache
from penstock.worker.parts import make_parts
from tests.kernels.gpu_compiler import compile_for_gpu
from tests.kernels.test_staging import LateQueue

ON = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS = 12
# Two groups that share memory, and a drafter's layer of another size.
GROUPS = (
    KVCacheGroup(("a", "b", "c"), KVCacheSpec.keys_and_values(2, 16, "float32")),
    KVCacheGroup(("d", "e"), KVCacheSpec.keys_and_values(2, 16, "float32", sliding_window=8)),
)
CONFIG = KVCacheConfig(
    NUM_BLOCKS, 16, GROUPS, (AttachedLayer("draft", KVCacheSpec.keys_and_values(1, 24, "float32"), 1),)
)
PLACES: list[Place] = [(0, 3), (0, 11), (1, 2), (1, 7), (1, 0), (0, 5)]


def make_cache(device: torch.device = ON) -> KVCache:
    cache = allocate_kv_cache(CONFIG, make_parts(device).allocate)
    for number, tensor in enumerate(cache.tensors.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    return cache


def layers_of(cache: KVCache) -> list[list[torch.Tensor]]:
    view = GpuKVCacheView(cache)
    names = [[layer.name for layer in view.layout.layers_of(group)] for group in range(2)]
    return [[cache.tensors[name].view(torch.uint8).flatten(1) for name in each] for each in names]


def expected(cache: KVCache, places: Sequence[Place]) -> list[bytes]:
    layers = layers_of(cache)
    return [b"".join(bytes(layer[block].cpu().numpy()) for layer in layers[group]) for group, block in places]


@pytest.fixture(params=["small pieces", "large pieces", "no room"])
def transfers(request: pytest.FixtureRequest) -> Iterator[tuple[BlockTransfers, KVCache]]:
    piece, room = {"small pieces": (1, 1 << 20), "large pieces": (1 << 20, 1 << 20), "no room": (1, 1)}[request.param]
    cache = make_cache(torch.device("cpu"))
    return BlockTransfers(layers_of(cache), LateQueue(), piece, room), cache


def test_the_kernel_moves_bytes() -> None:
    cache = make_cache()
    for group, layers in enumerate(layers_of(cache)):
        table = LayerTable.of(layers)
        ids = torch.tensor([5, 1, 8], device=ON)
        packed = torch.zeros((3, table.block_bytes), dtype=torch.uint8, device=ON)
        gather_blocks(table, ids, packed)
        wanted = expected(cache, [(group, int(block)) for block in ids])
        assert [bytes(row.cpu().numpy()) for row in packed] == wanted
        others = [layer.clone() for layer in layers]
        scatter_blocks(table, torch.tensor([2, 9, 4], device=ON), packed)
        assert expected(cache, [(group, block) for block in (2, 9, 4)]) == wanted
        kept = [block for block in range(NUM_BLOCKS) if block not in (2, 9, 4)]
        assert all(torch.equal(layer[kept], other[kept]) for layer, other in zip(layers, others, strict=True))


def test_reads_return_the_stored_bytes(transfers: tuple[BlockTransfers, KVCache]) -> None:
    """Later writes and the time of the read make no difference."""
    many, cache = transfers
    wanted = expected(cache, PLACES)
    found: list[tuple[int, bytes]] = []
    gate = threading.Event()

    def take(number: int, parts: Sequence[memoryview]) -> None:
        assert gate.wait(10)
        assert len(parts) == 3
        found.append((number, b"".join(parts)))

    if many._room._most == 1:
        gate.set()  # the caller waits for it
    with torch.inference_mode():
        transfer = many.read_blocks(PLACES, take)
        for tensor in cache.tensors.values():
            tensor.fill_(-1)
    assert gate.is_set() or not transfer.done()
    gate.set()
    transfer.result()
    assert transfer.done()
    assert found == list(enumerate(wanted))


def cut(data: bytes) -> list[memoryview]:
    """Cuts the bytes into pieces of unequal lengths."""
    edges = [0, 40, len(data) // 2, len(data)]
    return [memoryview(data)[start:end] for start, end in itertools.pairwise(edges)]


def test_writes_are_stored_and_reported(transfers: tuple[BlockTransfers, KVCache]) -> None:
    many, cache = transfers
    before = expected(cache, [(0, block) for block in range(NUM_BLOCKS)])
    data = [bytes([number + 1]) * len(each) for number, each in enumerate(expected(cache, PLACES))]
    found: list[bytes] = []
    with torch.inference_mode():
        transfer = many.write_blocks(PLACES, [cut(each) for each in data], lambda _, p: found.append(b"".join(p)))
    transfer.result()
    assert found == data
    assert expected(cache, PLACES) == data
    untouched = [block for block in range(NUM_BLOCKS) if block not in {block for _, block in PLACES}]
    assert expected(cache, [(0, block) for block in untouched]) == [before[block] for block in untouched]


def test_failures_are_reported_and_free_their_slots(transfers: tuple[BlockTransfers, KVCache]) -> None:
    many, _ = transfers

    def fails(number: int, parts: Sequence[memoryview]) -> None:
        raise ValueError(f"block {number}")

    for _ in range(3):
        with torch.inference_mode():
            transfer = many.read_blocks(PLACES, fails)
        with pytest.raises(ValueError, match="block 0"):
            transfer.result()
    many._thread.shutdown()
    assert many._room._free == many._room._most


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_the_views_of_host_and_gpu_behave_alike(is_on_gpu: bool) -> None:
    cache = make_cache(torch.device("cpu"))
    view = GpuKVCacheView(cache) if is_on_gpu else HostKVCacheView(cache)
    wanted = expected(cache, PLACES)
    found: list[bytes] = []
    view.read_blocks(PLACES, lambda _, parts: found.append(b"".join(parts))).result()
    assert found == wanted
    view.write_blocks(PLACES[:2], [cut(each) for each in wanted[1::-1]], lambda *_: None).result()
    assert expected(cache, PLACES[:2]) == wanted[1::-1]
    (group, block), data = PLACES[2], memoryview(wanted[2][::-1])
    for layer in view.layout.layers_of(group):
        view.write_layer(layer.name, block, data[: layer.block_bytes])
        data = data[layer.block_bytes :]
    assert not data
    assert expected(cache, PLACES[2:3]) == [wanted[2][::-1]]


@pytest.mark.long
def test_the_kernel_compiles_without_spills() -> None:
    kinds = {"table_ptr": "*i64:16", "ids_ptr": "*i64", "packed_ptr": "*i64:16", "packed_words": "i32"}
    for gathers in (False, True):
        cost = compile_for_gpu(
            "penstock.kernels.triton.move_blocks",
            "_move_blocks",
            kinds,
            {"gathers": gathers, "block": 1024},
            num_warps=4,
        )
        assert cost.spilled_bytes == 0
        assert cost.shared_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_transfers_on_a_gpu_between_steps() -> None:
    """Reads and writes between launches that overwrite the blocks read."""
    cache = make_cache()
    view = GpuKVCacheView(cache)
    with torch.inference_mode():
        for _ in range(20):
            wanted, found = expected(cache, PLACES), []
            reading = view.read_blocks(PLACES, lambda _, parts, found=found: found.append(b"".join(parts)))
            for tensor in cache.tensors.values():
                tensor.mul_(-1.5)
            landed: list[bytes] = []
            writing = view.write_blocks(
                PLACES, [cut(each) for each in wanted], lambda _, parts, to=landed: to.append(b"".join(parts))
            )
            reading.result()
            writing.result()
            assert found == landed == wanted == expected(cache, PLACES)
