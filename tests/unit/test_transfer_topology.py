"""Registration of engines, checks of their declarations, and the ranks that each rank reads from."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from msgspec.structs import replace

from penstock.kv_transfer.topology.planner import sources
from penstock.kv_transfer.topology.tables import EngineTransferInfo, TransferTopology, engine_infos
from penstock.utils.errors import PeerError
from tests.grids import grid
from tests.unit.kv_memory_fakes import TOKEN_MAJOR, FakeEngine, FakeLayer, model, split_at, split_evenly

LAYERS = model(num_heads=4)


def engine(pp: int = 1, tp: int = 1, layers: tuple[FakeLayer, ...] = LAYERS, block_size: int = 4) -> FakeEngine:
    return FakeEngine(split_evenly(layers, pp), tp, block_size)


def topology(of: FakeEngine, name: str = "d", *peers: tuple[str, FakeEngine]) -> TransferTopology:
    made = TransferTopology(name, of.block_size, of.shards)
    for peer, other in peers:
        for info in engine_infos(peer, other.block_size, other.shards):
            made.register(info)
    return made


def stages(pp: int, tp: int = 1, name: str = "p") -> tuple[EngineTransferInfo, ...]:
    return engine_infos(name, 4, engine(pp, tp).shards)


# ---- Registration ----


def test_each_stage_is_declared_completely() -> None:
    first, second = engine_infos("p", 8, FakeEngine(split_at(LAYERS, [4]), 2, 4, TOKEN_MAJOR).shards)
    assert (first.remote_pp_rank, first.start_layer, first.end_layer, len(first.layouts)) == (0, 0, 4, 2)
    assert (second.remote_pp_rank, second.start_layer, second.end_layer, second.pp_size) == (1, 4, 6, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=EngineTransferInfo) == first


def test_registration_is_idempotent() -> None:
    known = topology(engine())
    first, second = stages(2)
    known.register(first)
    known.register(msgspec.msgpack.decode(msgspec.msgpack.encode(first), type=EngineTransferInfo))
    known.register(second)
    assert known.get_engine_info("p") == first
    assert known.get_engine_info("p", 1) == second
    assert known.shards("p") == engine(2).shards


def test_another_declaration_under_the_same_key_is_refused() -> None:
    known = topology(engine())
    first, _ = stages(2)
    known.register(first)
    for other in (stages(2, tp=2)[0], replace(first, block_size=8)):
        with pytest.raises(PeerError, match="forget the engine"):
            known.register(other)
    assert known.get_engine_info("p") == first
    with pytest.raises(PeerError, match="unique engine_id"):
        known.register(stages(2, name="d")[0])


def test_an_engine_is_known_when_all_its_stages_are() -> None:
    known = topology(engine())
    first, second = stages(2)
    with pytest.raises(PeerError, match="stage 0 of engine 'p' is not known"):
        known.get_engine_info("p")
    known.register(second)
    with pytest.raises(PeerError, match="stage 0"):
        known.sources("p", (0, 0))
    known.register(first)
    assert tuple(known.sources("p", (0, 0))) == ((0, 0), (1, 0))


def test_a_forgotten_engine_may_return_with_another_declaration() -> None:
    known = topology(engine(), "d", ("p", engine(2)), ("q", engine()))
    assert tuple(known.sources("p", (0, 0))) == ((0, 0), (1, 0))
    known.forget("p")
    known.forget("p")
    with pytest.raises(PeerError, match="'p' is not known"):
        known.shards("p")
    for info in stages(1, tp=2):
        known.register(info)
    assert tuple(known.sources("p", (0, 0))) == ((0, 0), (0, 1))
    assert tuple(known.sources("q", (0, 0))) == ((0, 0),)


FIRST, SECOND = stages(2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(SECOND, remote_pp_rank=2), "impossible"),
        (replace(SECOND, remote_pp_rank=-1), "impossible"),
        (replace(SECOND, layouts=()), "impossible"),
        (replace(SECOND, start_layer=-1), "impossible"),
        (replace(SECOND, engine_id=""), "impossible"),
        (replace(SECOND, block_size=6), "not a whole number of memory blocks"),
        (replace(SECOND, block_size=0), "not a whole number of memory blocks"),
        (replace(SECOND, block_size=8), "differ in pp_size or block size"),
        (replace(SECOND, pp_size=3), "differ in pp_size or block size"),
        (replace(SECOND, start_layer=3), "begins at layer 3, but stage 0 ends at 2"),
        (replace(SECOND, layouts=(FIRST.layouts[0],)), "layer 'layer.0' is on two stages"),
        (replace(SECOND, layouts=(SECOND.layouts[0], FIRST.layouts[0])), "differ in layers or block size"),
        (replace(SECOND, layouts=(replace(SECOND.layouts[0], regions=()),)), "no region"),
        (replace(SECOND, layouts=(replace(SECOND.layouts[0], block_size=2),)), "4 tokens and not 2"),
    ],
)
def test_impossible_stages_are_refused_and_change_nothing(wrong: EngineTransferInfo, message: str) -> None:
    known = topology(engine())
    known.register(FIRST)
    with pytest.raises(PeerError, match=message):
        known.register(wrong)
    known.register(SECOND)
    assert known.shards("p") == engine(2).shards


def test_the_first_stage_begins_with_the_first_layer() -> None:
    with pytest.raises(PeerError, match="begins at layer 1 and not 0"):
        topology(engine()).register(replace(FIRST, start_layer=1))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (model(num_heads=8), "4 KV heads here and 8"),
        (model(num_heads=2), "4 KV heads here and 2"),
        (model(num_heads=4, dim=3), "head size is 2 here and 3"),
        (model(num_heads=4, num_planes=1), "kv planes is 2 here and 1"),
    ],
)
def test_engines_of_other_models_are_refused(layers: tuple[FakeLayer, ...], message: str) -> None:
    known = topology(engine(pp=2))
    with pytest.raises(PeerError, match=message):
        known.register(engine_infos("p", 4, engine(layers=layers).shards)[0])


def test_a_layer_that_the_other_engine_lacks_is_named() -> None:
    known = topology(engine(), "d", ("p", FakeEngine([LAYERS[:-1]], 1, 4)))
    with pytest.raises(PeerError, match=r"draft\.0"):
        known.sources("p", (0, 0))
    # In the other direction it is not needed.
    without = topology(FakeEngine([LAYERS[:-1]], 1, 4), "d", ("p", engine()))
    assert tuple(without.sources("p", (0, 0))) == ((0, 0),)


# ---- Sources ----


@pytest.mark.parametrize(
    ("remote_pp", "remote_tp", "local_pp", "local_tp"), grid(range(1, 5), range(1, 5), range(1, 5), range(1, 5))
)
def test_every_rank_reads_every_head_once(remote_pp: int, remote_tp: int, local_pp: int, local_tp: int) -> None:
    for num_heads in (1, 2, 4):
        layers = model(num_heads)
        prefill, decode = engine(remote_pp, remote_tp, layers), engine(local_pp, local_tp, layers, block_size=6)
        at_decode = topology(decode, "d", ("p", prefill))
        for shard, layout in decode.shards.items():
            assert at_decode.sources("p", shard) == sources(layout, prefill.shards, shard)
            check_every_head_once(at_decode, shard)


def check_every_head_once(known: TransferTopology, shard: tuple[int, int]) -> None:
    wanted = [(layer.name, head) for layer in known.shards("d")[shard].layers for head in range(*layer.heads)]
    sent = [
        (each.name, head)
        for source, slices in known.sources("p", shard).items()
        for each in slices
        for head in range(*each.heads)
        if each.name in {layer.name for layer in known.shards("p")[source].layers}
    ]
    assert sorted(sent) == sorted(wanted)


def test_a_shard_without_layers_reads_nothing() -> None:
    known = topology(FakeEngine([LAYERS, ()], 1, 4), "d", ("p", engine()))
    assert tuple(known.sources("p", (0, 0))) == ((0, 0),)
    assert tuple(known.sources("p", (1, 0))) == ()


def test_stages_read_from_different_replicas() -> None:
    """One stage with four copies of a head serves four stages: each reads from a rank of its own."""
    layers = model(num_heads=1)
    known = topology(engine(pp=4, layers=layers), "d", ("p", engine(tp=4, layers=layers)))
    targets = itertools.chain.from_iterable(known.sources("p", (stage, 0)) for stage in range(4))
    assert sorted(targets) == [(0, rank) for rank in range(4)]
