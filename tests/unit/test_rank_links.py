"""Groups and channels: other ranks receive exactly the bits that a rank sends; no rank waits for one that has ended."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from penstock.kernels import rank_exchange
from penstock.kernels.native import instruction_sets, library_for
from penstock.messages.kv_transfer import ShardId
from penstock.parallel import groups, rank_memory, shared_memory
from penstock.parallel.distributed import _all_reduce, _DistributedGroup, distributed_links
from penstock.parallel.groups import FLOAT_DTYPES, NullGroup, RankLinks, TensorChannel, gather_rows
from penstock.parallel.rank_memory import Layout, abort, create_rank_memory
from penstock.parallel.shared_memory import shared_links
from penstock.utils import machine
from penstock.utils.errors import ConfigError, RanksLostError
from penstock.utils.hosts import free_port
from tests.unit.rank_harness import SOON_S, Ranks, own_part, raises_soon, random_bits, run_ranks, same_bits

BACKENDS = ["native", "reference", "gloo"]
SHARED = ["native", "reference"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the implementation of the links, as `Ranks` takes it."""
    if request.param == "native":
        if not instruction_sets():
            pytest.skip("the native kernels are not installed")
        native = library_for(instruction_sets()[0])
        monkeypatch.setattr(rank_exchange, "library", lambda: native)
    if request.param == "reference":
        monkeypatch.setattr(rank_exchange, "library", lambda: None)
    return request.param


def set_sizes(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Makes buffers or rings smaller."""
    for name, size in sizes.items():
        for module in (rank_memory, shared_memory):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, size)


def gather_all(count: int, cases: list[tuple[torch.Tensor, list[int]]], backend: str) -> None:
    """Checks that every rank gets the whole of each case by a gather."""

    def body(links: RankLinks, shard: ShardId) -> None:
        for whole, sizes in cases:
            got = links.group.gather_columns(own_part(whole, sizes, shard[1]), sizes)
            assert same_bits(got, whole), (tuple(whole.shape), sizes)

    run_ranks(1, count, body, backend)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_gather_puts_the_parts_side_by_side(count: int, dtype: torch.dtype, backend: str) -> None:
    generator, draw = torch.Generator().manual_seed(count), random.Random(count)
    cases: list[tuple[torch.Tensor, list[int]]] = []
    for rows in (1, 0, 2, 7, 33, 1):
        for sizes in ([5] * count, [0] * count, [draw.choice((0, 1, 3, 64)) for _ in range(count)]):
            cases.append((random_bits(rows, sum(sizes), dtype, generator), sizes))
    gather_all(count, cases, backend)


def test_a_part_need_not_be_contiguous(backend: str) -> None:
    whole = random_bits(6, 8, torch.float32, torch.Generator().manual_seed(0))

    def body(links: RankLinks, shard: ShardId) -> None:
        mine = own_part(whole, [3, 5], shard[1])
        for part in (mine, mine.t().contiguous().t(), mine.repeat(1, 2)[:, : mine.shape[1]], mine[:1].expand(6, -1)):
            expected = part.contiguous()
            got = links.group.gather_columns(part, [3, 5])
            assert same_bits(own_part(got, [3, 5], shard[1]), expected)

    run_ranks(1, 2, body, backend)


@pytest.mark.parametrize("backend", SHARED, indirect=True)
@pytest.mark.parametrize("count", [2, 5])
def test_a_gather_larger_than_a_buffer_goes_in_pieces(
    count: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, GATHER_BUFFER_BYTES=4096)
    generator = torch.Generator().manual_seed(1)
    columns = [0, 40, 3, 17, 4][:count]
    row = 4 * sum(columns)
    cases = [
        (random_bits(rows, sum(columns), torch.float32, generator), columns)
        for rows in (1, 4096 // row, 4096 // row + 1, 200, 2, 401, 199, 1)
    ]
    gather_all(count, cases, backend)


@pytest.mark.parametrize("most_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("counts", [(3,), (4, 0), (0, 7, 2), (0, 0, 0, 5)])
def test_rows_of_all_ranks_follow_one_another(
    counts: tuple[int, ...], most_bytes: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one gather, or in several of few rows of each rank."""
    monkeypatch.setattr(groups, "_GATHERED_BYTES", most_bytes)
    generator = torch.Generator().manual_seed(4)
    cases = [random_bits(sum(counts), 9, dtype, generator) for dtype in FLOAT_DTYPES]

    def body(links: RankLinks, shard: ShardId) -> None:
        for whole in cases:
            own = whole.split(list(counts))[shard[1]]
            assert same_bits(gather_rows(links.group, own, counts), whole)

    run_ranks(1, len(counts), body, backend)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_logits_of_many_rows_are_larger_than_a_buffer(backend: str) -> None:
    """The sizes are those of production: 64 rows of 151936 columns are 39 MB."""
    whole = random_bits(64, 151936, torch.float32, torch.Generator().manual_seed(2))
    assert whole.nbytes > rank_memory.GATHER_BUFFER_BYTES
    gather_all(2, [(whole, [100000, 51936])], backend)


@pytest.mark.spread(2)
@pytest.mark.parametrize("count", [2, 4])
def test_a_storm_of_gathers_with_delays(count: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result is valid until the second next call, also between gathers in pieces and barriers."""
    set_sizes(monkeypatch, GATHER_BUFFER_BYTES=1 << 14)
    calls = {"native": 20_000 // count, "reference": 800, "gloo": 200}[backend]
    pool = random_bits(64, 512, torch.bfloat16, torch.Generator().manual_seed(3))

    def body(links: RankLinks, shard: ShardId) -> int:
        common, mine = random.Random(count), random.Random(shard[1])
        nap = threading.Event()
        previous: tuple[torch.Tensor, torch.Tensor] | None = None
        for call in range(calls):
            cuts = sorted(common.randrange(512) for _ in range(count + 1))
            sizes = [end - begin for begin, end in pairwise(cuts)]
            row = common.randrange(64)
            whole = pool[row : row + common.choice((0, 1, 1, 2, 9, 64)), cuts[0] : cuts[-1]]
            if common.random() < 0.05:
                links.group.barrier()
            got = links.group.gather_columns(own_part(whole, sizes, shard[1]), sizes)
            assert same_bits(got, whole), call
            if mine.random() < 0.01:
                nap.wait(mine.random() * 2e-3)
            assert previous is None or same_bits(*previous), f"the result before call {call} has changed"
            previous = (got, whole)
        return calls

    assert set(run_ranks(1, count, body, backend).values()) == {calls}


@pytest.mark.parametrize("large", [False, True], ids=["small", "in pieces"])
def test_a_result_is_valid_until_the_second_next_call(
    large: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is already in that call, and has written its columns."""
    set_sizes(monkeypatch, GATHER_BUFFER_BYTES=4096)
    ahead = threading.Event()

    def body(links: RankLinks, shard: ShardId) -> None:
        gather = lambda value, rows=4: links.group.gather_columns(torch.full((rows, 8), value), [8, 8])  # noqa: E731
        for k in range(6):
            first, second = gather(3.0 * k), gather(3.0 * k + 1, 400 if large else 4)
            if shard[1] == 1:
                timer = threading.Timer(0.05, ahead.set)
                timer.start()
            else:
                assert ahead.wait(10)
                ahead.clear()
                assert (first == 3.0 * k).all()
                assert (second == 3.0 * k + 1).all()
            gather(3.0 * k + 2)

    run_ranks(1, 2, body, backend)


@pytest.mark.parametrize("backend", SHARED, indirect=True)
@pytest.mark.parametrize("count", [2, 3])
def test_gathers_with_different_shapes_are_an_assertion_error(count: int, backend: str) -> None:
    def body(links: RankLinks, shard: ShardId) -> None:
        columns = 4 + (shard[1] == 0)
        links.group.gather_columns(torch.zeros(2, columns), [columns] * count)

    ranks = Ranks(1, count, body)
    with pytest.raises(AssertionError, match="different shapes"):
        ranks.finish(10)
    assert len(ranks.errors) == count


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_sum_is_added_in_float32_in_the_order_of_the_ranks(count: int, dtype: torch.dtype, backend: str) -> None:
    """The sum is rounded once, equally on every rank, for every shape, including zero rows or columns."""
    shapes = [(1, 64), (0, 8), (33, 7), (2, 0), (5, 96), (1, 1)]
    generator = torch.Generator().manual_seed(count)
    cases = [(100 * torch.randn(count, *shape, generator=generator)).to(dtype) for shape in shapes]

    def body(links: RankLinks, shard: ShardId) -> None:
        for parts in cases:
            expected = torch.zeros(parts.shape[1:])
            for part in parts:
                expected += part.float()
            got = links.group.sum_parts(parts[shard[1]].clone())
            assert same_bits(got, expected.to(dtype)), tuple(parts.shape)

    run_ranks(1, count, body, backend)


def test_a_sum_remains_valid_after_later_calls(backend: str) -> None:
    """A sum belongs to the caller, unlike the result of a gather; the two may alternate."""

    def body(links: RankLinks, shard: ShardId) -> None:
        first = links.group.sum_parts(torch.full((3, 4), 1.0 + shard[1]))
        for number in range(5):
            links.group.gather_columns(torch.full((3, 4), 7.0), [4, 4])
            links.group.sum_parts(torch.full((3, 4), float(number)))
        first += 1
        assert (first == 4).all()

    run_ranks(1, 2, body, backend)


def test_the_all_reduce_of_gpus_works_with_gloo() -> None:
    """NCCL's groups and gloo's have the same methods."""

    def body(links: RankLinks, shard: ShardId) -> torch.Tensor:
        group = links.group
        assert isinstance(group, _DistributedGroup)
        return _all_reduce(group._host[0], torch.full((4, 3), float(shard[1])).t())

    for total in run_ranks(1, 3, body, "gloo").values():
        assert same_bits(total, torch.full((3, 4), 3.0))


def test_a_barrier_waits_for_every_rank(backend: str) -> None:
    arrived: list[int] = []

    def body(links: RankLinks, shard: ShardId) -> None:
        for turn in range(20):
            if shard[1] == turn % 3:
                threading.Event().wait(0.003)
            arrived.append(turn)
            links.group.barrier()
            assert arrived.count(turn) == 3
            links.group.barrier()

    run_ranks(1, 3, body, backend)


def test_a_stage_of_one_rank_gathers_nothing() -> None:
    part = torch.ones(2, 3)
    links = shared_links(create_rank_memory(1, 1), 1, 1, (0, 0))
    assert isinstance(links.group, NullGroup)
    assert links.group.gather_columns(part, [3]) is part
    links.group.barrier()
    assert (links.upstream, links.downstream, links.results_out, links.results_in) == (None, None, (), None)
    with pytest.raises(AssertionError):
        links.group.gather_columns(part, [4])


MESSAGES: list[tuple[torch.Tensor, ...]] = [
    (),
    (torch.tensor(7),),
    (torch.empty(0, 1024, dtype=torch.bfloat16), torch.arange(3), torch.empty(2, 0)),
    (torch.arange(60, dtype=torch.int32).reshape(3, 4, 5), torch.tensor([True, False])),
    (torch.arange(12.0).reshape(3, 4).t(), torch.arange(10, dtype=torch.int16)[::3]),
    tuple(torch.full((1, 2, 1, number), number, dtype=torch.uint8) for number in range(20)),
    (torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float16), torch.zeros(1, dtype=torch.float8_e4m3fn)),
]


def test_a_message_arrives_unchanged(backend: str) -> None:
    def body(links: RankLinks, shard: ShardId) -> None:
        for message in MESSAGES * 2:
            if links.downstream:
                links.downstream.send(*message)
            if links.upstream:
                received = links.upstream.receive()
                assert len(received) == len(message)
                assert all(same_bits(a, b) for a, b in zip(received, message, strict=True))

    run_ranks(3, 1, body, backend)


def test_every_channel_connects_the_right_ranks(backend: str) -> None:
    def body(links: RankLinks, shard: ShardId) -> None:
        stage, rank = shard
        tag = lambda *numbers: torch.tensor(numbers)  # noqa: E731
        assert (links.upstream is None, links.downstream is None) == (stage == 0, stage == 2)
        assert (len(links.results_out), links.results_in is None) == ((2, True) if stage == 2 else (0, False))
        if links.downstream:
            links.downstream.send(tag(stage, rank, 0))
        if links.upstream:
            assert links.upstream.receive()[0].tolist() == [stage - 1, rank, 0]
        for target, channel in enumerate(links.results_out):
            channel.send(tag(target, rank, 1))
        if links.results_in:
            assert links.results_in.receive()[0].tolist() == [stage, rank, 1]

    run_ranks(3, 2, body, backend)


@pytest.mark.parametrize("ring", [1 << 12, 1 << 16])
def test_messages_larger_than_the_ring_stream_through_it(
    ring: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_sizes(monkeypatch, STAGE_RING_BYTES=ring, RESULTS_RING_BYTES=ring)
    generator = torch.Generator().manual_seed(4)
    messages = [
        (random_bits(rows, 512, torch.bfloat16, generator), random_bits(rows, 3, torch.float32, generator))
        for rows in (1, 300, 3, 0, 129, 64, 1, 256)
    ]

    def body(links: RankLinks, shard: ShardId) -> None:
        for message in messages:
            if links.downstream:
                links.downstream.send(*message)
            else:
                assert links.upstream is not None
                assert all(same_bits(a, b) for a, b in zip(links.upstream.receive(), message, strict=True))

    run_ranks(2, 1, body, backend)


@pytest.mark.parametrize("backend", ["native"], indirect=True)
def test_a_large_prefill_streams_through_a_ring_of_production_size(backend: str) -> None:
    whole = random_bits(5000, 4096, torch.bfloat16, torch.Generator().manual_seed(5))
    assert whole.nbytes > rank_memory.STAGE_RING_BYTES

    def body(links: RankLinks, shard: ShardId) -> None:
        for _ in range(2):
            if links.downstream:
                links.downstream.send(whole)
            if links.upstream:
                assert same_bits(links.upstream.receive()[0], whole)

    run_ranks(2, 1, body)


def ends_of_a_channel(backend: str) -> tuple[TensorChannel, TensorChannel, Callable[[], None]]:
    """Returns a sender, its receiver, and a function that closes both."""
    address, memory = f"127.0.0.1:{free_port()}", create_rank_memory(2, 1)
    found: dict[ShardId, RankLinks] = {}

    def link(shard: ShardId) -> None:
        if backend == "gloo":
            found[shard] = distributed_links(address, 2, 1, shard, "gloo", 60.0)
        else:
            found[shard] = shared_links(memory, 2, 1, shard)

    threads = [threading.Thread(target=link, args=((stage, 0),)) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender, receiver = found[0, 0].downstream, found[1, 0].upstream
    assert sender is not None
    assert receiver is not None
    return sender, receiver, lambda: [links.close() for links in found.values()] and None


def test_send_waits_only_while_the_ring_is_full(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, STAGE_RING_BYTES=1 << 16)
    monkeypatch.setattr("penstock.parallel.distributed.BUFFERED_BYTES", 1 << 16)
    sender, receiver, close = ends_of_a_channel(backend)
    message = torch.zeros(15 << 10, dtype=torch.uint8)
    for _ in range(4):
        sender.send(message)
    sixth_sent = threading.Event()

    def send_more() -> None:
        for _ in range(3):
            sender.send(message)
        sixth_sent.set()

    thread = threading.Thread(target=send_more)
    thread.start()
    assert not sixth_sent.wait(0.2)
    for _ in range(7):
        assert len(receiver.receive()) == 1
    assert sixth_sent.wait(10)
    thread.join()
    close()


def test_poll_returns_whether_a_message_has_begun(backend: str) -> None:
    sender, receiver, close = ends_of_a_channel(backend)
    for _ in range(3):
        assert not receiver.poll()
        sender.send(torch.arange(4))
        end = time.monotonic() + 10
        while not receiver.poll():
            assert time.monotonic() < end
        assert receiver.receive()[0].tolist() == [0, 1, 2, 3]
    close()


@pytest.mark.alone
@pytest.mark.parametrize("backend", SHARED, indirect=True)
@pytest.mark.parametrize("what", ["gather", "channel", "full ring"])
def test_a_rank_that_sleeps_is_woken(what: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wake-ups each wait would take a tenth of a second, and these turns 4 seconds."""
    set_sizes(monkeypatch, STAGE_RING_BYTES=1 << 12, RESULTS_RING_BYTES=1 << 12)
    monkeypatch.setattr(rank_memory, "usable_cores", lambda: 1)
    turns, size = 40, 1 << 14 if what == "full ring" else 1

    def body(links: RankLinks, shard: ShardId) -> None:
        for turn in range(turns):
            threading.Event().wait(1e-3 * (turn % 2 == max(shard)))  # one of them is late
            if what == "gather":
                links.group.gather_columns(torch.zeros(1, 1), [1, 1])
            elif links.downstream and links.results_in:
                links.downstream.send(torch.zeros(size))
                links.results_in.receive()
            elif links.upstream:
                links.upstream.receive()
                links.results_out[0].send(torch.zeros(size))

    start = time.monotonic()
    run_ranks(*((1, 2) if what == "gather" else (2, 1)), body)
    assert time.monotonic() - start < turns * 0.1 / 2


# Ranks that end


def wait_in(what: str, links: RankLinks) -> None:
    if what == "gather":
        links.group.gather_columns(torch.zeros(1, 2), [2, 2])
    elif what == "sum":
        links.group.sum_parts(torch.zeros(1, 2))
    elif what == "a gather in pieces":
        links.group.gather_columns(torch.zeros(5000, 2), [2, 2])
    elif what == "barrier":
        links.group.barrier()
    elif what == "receive":
        assert links.results_in is not None
        links.results_in.receive()
    else:
        assert links.downstream is not None
        while True:
            links.downstream.send(torch.zeros(1 << 16))


WAITS = ["gather", "sum", "a gather in pieces", "barrier", "receive", "send"]


@pytest.mark.parametrize("backend", SHARED, indirect=True)
@pytest.mark.parametrize("what", WAITS)
def test_abort_ends_every_wait_and_every_later_call(what: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_sizes(monkeypatch, GATHER_BUFFER_BYTES=1 << 14, STAGE_RING_BYTES=1 << 20)
    memory = create_rank_memory(2, 2)
    links, raised = shared_links(memory, 2, 2, (0, 0)), threading.Event()

    def wait() -> None:
        with pytest.raises(RanksLostError, match="another rank of this engine has ended"):
            wait_in(what, links)
        raised.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not raised.wait(0.3), "it did not wait"
    abort(memory)
    assert raised.wait(SOON_S)
    thread.join()
    for later in WAITS:
        with raises_soon():
            wait_in(later, links)
    assert links.results_in is not None
    with raises_soon():
        links.results_in.poll()


def test_no_rank_waits_for_one_that_has_closed_its_links(backend: str) -> None:
    closed = threading.Event()

    def body(links: RankLinks, shard: ShardId) -> None:
        if shard == (1, 1):
            assert links.upstream is not None
            links.results_out[0].send(torch.arange(5))
            links.close()
            closed.set()
            return
        assert closed.wait(10)
        if shard == (0, 1):
            assert links.results_in is not None
            assert links.results_in.receive()[0].tolist() == [0, 1, 2, 3, 4], "sent before"
            with raises_soon():
                links.results_in.receive()
        if shard == (1, 0):
            with raises_soon():
                links.group.barrier()

    run_ranks(2, 2, body, backend)


@pytest.mark.parametrize("backend", SHARED, indirect=True)
def test_two_engines_do_not_affect_each_other(backend: str) -> None:
    go_on = threading.Event()

    def engine(value: float, calls: int) -> Callable[[RankLinks, ShardId], int]:
        def body(links: RankLinks, shard: ShardId) -> int:
            for call in range(calls):
                got = links.group.gather_columns(torch.full((2, 3), value), [3, 3])
                assert (got == value).all()
                if links.downstream:
                    links.downstream.send(torch.tensor([value]))
                if links.upstream:
                    assert links.upstream.receive()[0].item() == value
                if call == calls // 2:
                    assert go_on.wait(10)
            return calls

        return body

    calls = 2000 if backend == "native" else 100
    one, two = Ranks(2, 2, engine(1.0, calls)), Ranks(2, 2, engine(2.0, calls))
    abort(one.memory)
    go_on.set()
    assert set(two.finish().values()) == {calls}
    with pytest.raises(RanksLostError):
        one.finish()


def test_all_implementations_give_the_same_bits() -> None:
    wholes = [
        random_bits(rows, 23, dtype, torch.Generator().manual_seed(rows))
        for rows in (1, 5, 64)
        for dtype in FLOAT_DTYPES
    ]
    sizes = [9, 0, 14]

    def body(links: RankLinks, shard: ShardId) -> list[torch.Tensor]:
        return [links.group.gather_columns(own_part(whole, sizes, shard[1]), sizes).clone() for whole in wholes]

    shared, gloo = run_ranks(1, 3, body), run_ranks(1, 3, body, "gloo")
    for shard in shared:
        for ours, theirs, whole in zip(shared[shard], gloo[shard], wholes, strict=True):
            assert same_bits(ours, theirs)
            assert same_bits(ours, whole)


# The memory


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 8), (2, 1), (3, 2), (4, 4)])
def test_nothing_in_the_memory_overlaps(pp: int, tp: int) -> None:
    layout = Layout(pp, tp)
    spans = [(0, 4096)]
    for stage in range(pp):
        spans.append((layout.group_control(stage), 512 + 128 * tp))
        for turn in range(3 if tp > 1 else 0):
            spans.append((layout.gather_buffer(stage, turn), rank_memory.GATHER_BUFFER_BYTES))
    rings = [
        ring(stage, rank)
        for ring in (layout.stage_ring, layout.results_ring)
        for stage in range(pp - 1)
        for rank in range(tp)
    ]
    spans += [span for ring in rings for span in ((ring.control, 640), (ring.start, ring.size))]
    spans.sort()
    for (start, size), (following, _) in pairwise(spans):
        assert start + size <= following
    assert sum(spans[-1]) <= layout.num_bytes
    assert all(start % 128 == 0 for start, _ in spans)


def test_the_memory_is_allocated_only_as_it_is_used() -> None:
    memory = create_rank_memory(4, 8)
    assert len(memory.view) > 1 << 30
    assert os.stat(memory.name).st_blocks * 512 < 4 << 20


@pytest.mark.parametrize(("ranks", "spins"), [((1, 2), True), ((2, 2), False)])
def test_ranks_spin_only_where_each_can_have_a_core(
    ranks: tuple[int, int], spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_memory, "usable_cores", lambda: 2)
    memory = create_rank_memory(*ranks)
    assert (rank_memory.spin_nanoseconds(memory, Layout(*ranks)) > 0) == spins
    with pytest.raises(AssertionError, match="the memory is for"):
        rank_memory.spin_nanoseconds(memory, Layout(3, 1))


def test_cores_are_limited_by_affinity_and_by_the_cgroup(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert machine.usable_cores() == 4
    for quota, expected in (("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1), ("900000 100000", 4)):
        (tmp_path / "cpu.max").write_text(quota)
        assert machine.usable_cores() == expected


@pytest.mark.parametrize(("address", "backend"), [("nowhere", "gloo"), ("127.0.0.1:1", "mpi"), ("host:", "gloo")])
def test_a_wrong_address_or_backend_is_refused(address: str, backend: str) -> None:
    with pytest.raises(ConfigError):
        distributed_links(address, 1, 2, (0, 0), backend)


def test_nothing_listens_on_other_addresses_of_the_machine() -> None:
    port = free_port()

    def body(links: RankLinks, shard: ShardId) -> None:
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        links.group.barrier()

    Ranks(1, 2, body, "gloo", port=port).finish()


def test_missing_ranks_are_not_waited_for_forever() -> None:
    with raises_soon():
        distributed_links(f"127.0.0.1:{free_port()}", 1, 2, (0, 0), "gloo", timeout_s=0.5)
