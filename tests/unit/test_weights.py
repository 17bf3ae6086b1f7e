"""A checkpoint's tensors as a model gets them: on a CPU as the file's pages, on a GPU through staging buffers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.config.engine import EngineArgs, ExecutionConfig, resolve
from penstock.config.model import ModelConfig
from penstock.config.rope import RopeConfig
from penstock.engine.rank_identity import digest_weights
from penstock.kernels.staging import Stager
from penstock.models.parts import GatedMLP, GroupedQueryAttention
from penstock.models.registry import build_model
from penstock.models.sources.dummy import DummySource
from penstock.models.sources.opening import open_weights
from penstock.models.sources.source import ALL, Part, WeightSource
from penstock.models.weights import Weights, WeightsDigest, direct, staged
from penstock.parallel.groups import NullGroup
from penstock.utils.errors import ConfigError
from penstock.worker.load import load_model
from penstock.worker.messages import WorkerFacts
from penstock.worker.parts import make_parts
from tests.kernels.test_staging import LateQueue
from tests.unit.rank_fakes import make_rank

CPU = torch.device("cpu")


class Member(NullGroup):
    """One of `count` ranks, without the others."""

    def __init__(self, index: int = 0, count: int = 1) -> None:
        self.index, self.count = index, count


WHOLE = Member()
ROWS = {"q_proj.weight": 48, "k_proj.weight": 16, "v_proj.weight": 16}


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {f"layer.{name}": (rows, 33) for name, rows in ROWS.items()}
    shapes |= {"norm.weight": (33,), "layer.q_proj.bias": (48,), "layer.k_proj.bias": (16,), "layer.ids": (5,)}
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    tensors["layer.ids"] = torch.arange(5)
    save_file(tensors, tmp_path / "model.safetensors")
    return tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_staged", [False, True])
def test_tensors_are_read_joined_and_converted(
    stored: dict[str, torch.Tensor], tmp_path: Path, dtype: torch.dtype, is_staged: bool
) -> None:
    source = open_weights(tmp_path, "auto")
    with closing(source), closing(Stager(LateQueue(), 64, 2)) as stager, torch.inference_mode():
        delivery = partial(staged, stager) if is_staged else direct
        weights = Weights(source, dtype, CPU, delivery=delivery)
        assert torch.equal(weights.tensor("norm.weight", 33), stored["norm.weight"].to(dtype))
        layer = weights / "layer"
        whole = layer.tensors(ROWS, 33)
        assert torch.equal(whole, torch.cat([stored[f"layer.{name}"] for name in ROWS]).to(dtype))
        assert whole.is_contiguous()
        assert whole.untyped_storage().nbytes() == whole.nbytes
        bias = layer.tensors({"q_proj.bias": 48, "k_proj.bias": 16})
        assert torch.equal(bias, torch.cat([stored[f"layer.{n}_proj.bias"] for n in "qk"]).to(dtype))
        assert torch.equal(layer.integers("ids", 5), stored["layer.ids"])
        with pytest.raises(ConfigError, match=r"'layer.k_proj.weight' has shape \[16, 33\], config.json asks for \[17"):
            layer.tensors({**ROWS, "k_proj.weight": 17}, 33)
        with pytest.raises(ConfigError, match=r"no tensor 'layer.o_proj.weight'"):
            layer.tensor("o_proj.weight", 33, 48)


def test_a_cpu_uses_the_pages_of_the_file(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with closing(open_weights(tmp_path, "auto")) as source:
        first, again = (Weights(source, torch.bfloat16, CPU).tensor("norm.weight", 33) for _ in range(2))
        assert first.data_ptr() == again.data_ptr()


@pytest.mark.usefixtures("stored")
def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="is truncated or not a safetensors file"):
        open_weights(tmp_path, "auto")


def test_dummy_weights_depend_only_on_their_names() -> None:
    pool = 1 << 22
    for shape in ((3, 5), (2, pool + 7)):
        a, b = (DummySource(CPU).read("w", shape) for _ in range(2))
        other = DummySource(CPU).read("v", shape)
        assert a.shape == shape
        assert torch.equal(a, b)
        assert not torch.equal(a, other)
    assert a.untyped_storage().nbytes() == a.nbytes
    assert torch.equal(a.view(-1)[:15], DummySource(CPU).read("w", (3, 5)).view(-1))
    assert torch.equal(a.view(-1)[pool:][:14], a.view(-1)[:14])
    assert abs(float(a.float().std()) - 0.02) < 1e-4
    source = DummySource(CPU)
    assert source.read("x.bias", (4,)).tolist() == [0.0] * 4
    assert source.read("norm.weight", (4,)).tolist() == [1.0] * 4


class CountingSource:
    """Wraps a source, and counts the elements that are read from it."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.num_elements = 0

    def read(self, name: str, shape: Sequence[int], part: Part = ALL) -> torch.Tensor:
        tensor = self.source.read(name, shape, part)
        self.num_elements += tensor.numel()
        return tensor

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def close(self) -> None:
        self.source.close()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.usefixtures("stored")
def test_a_shard_is_its_rows_of_the_whole(tmp_path: Path, count: int, is_staged: bool, load_format: str) -> None:
    """Five shares of 48 and 16 rows are uneven."""
    source = CountingSource(open_weights(tmp_path, load_format))
    with closing(source), closing(Stager(LateQueue(), 64, 2)) as stager, torch.inference_mode():
        whole = Weights(source, torch.bfloat16, CPU) / "layer"
        expected = [whole.tensors({name: rows}, 33) for name, rows in ROWS.items()]
        source.num_elements = 0
        shards: list[list[torch.Tensor]] = []
        for index in range(count):
            delivery = partial(staged, stager) if is_staged else direct
            weights = Weights(source, torch.bfloat16, CPU, delivery=delivery, group=Member(index, count)) / "layer"
            shards.append([weights.tensors({name: rows}, 33) for name, rows in ROWS.items()])
            assert torch.equal(weights.tensors(ROWS, 33), torch.cat(shards[-1]))
            start, end = 6 * index // count, 6 * (index + 1) // count
            heads = weights.linear({"q_proj": 48}, 33, bias=True, own={"q_proj": range(8 * start, 8 * end)})
            assert torch.equal(heads.dense_weight(), expected[0][8 * start : 8 * end])
            assert heads.bias is not None
            assert heads.bias.shape == (8 * (end - start),)
        for rows, parts in zip(expected, zip(*shards, strict=True), strict=True):
            assert torch.equal(torch.cat(parts), rows)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert source.num_elements == 2 * 80 * 33 + 48 * 33 + 48


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.usefixtures("stored")
def test_a_layer_divided_by_inputs(tmp_path: Path, count: int, is_staged: bool, load_format: str) -> None:
    """Each rank has its columns in memory that holds nothing else, and only the first rank has the bias."""
    widths = {1: [33], 2: [20, 13], 3: [5, 1, 27]}[count]
    source = CountingSource(open_weights(tmp_path, load_format))
    with closing(source), closing(Stager(LateQueue(), 64, 2)) as stager, torch.inference_mode():
        delivery = partial(staged, stager) if is_staged else direct
        whole = (Weights(source, torch.bfloat16, CPU) / "layer").linear({"q_proj": 48}, 33, bias=True)
        source.num_elements = 0
        found: list[torch.Tensor] = []
        for index, width in enumerate(widths):
            weights = Weights(
                source, torch.bfloat16, CPU, delivery=delivery, group=Member(index, count), divides_inputs=True
            )
            own = (weights / "layer").joining_linear("q_proj", 48, widths, bias=True).own
            found.append(own.dense_weight())
            assert found[-1].shape == (48, width)
            assert (own.bias is None) == (index > 0)
            if own.bias is not None:
                assert whole.bias is not None
                assert torch.equal(own.bias, whole.bias)
        assert torch.equal(torch.cat(found, dim=1), whole.dense_weight())
    assert source.num_elements == 48 * 33 + 48
    assert {id_of_inputs(tmp_path, widths)} == {id_of_inputs(tmp_path, [33])}


def id_of_inputs(folder: Path, widths: list[int]) -> bytes:
    """Returns the digest of the engine core when the ranks have read these columns."""
    facts: list[WorkerFacts] = []
    for index in range(len(widths)):
        found = WeightsDigest(has_bytes=True)
        with closing(open_weights(folder, "auto")) as source:
            weights = Weights(
                source, torch.bfloat16, CPU, group=Member(index, len(widths)), divides_inputs=True, digest=found
            )
            (weights / "layer").joining_linear("q_proj", 48, widths, bias=True)
        facts.append(make_rank((0, index), found.rows()))
    return digest_weights(facts)


def test_the_digest_of_columns_covers_every_byte(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    name = "layer.q_proj.weight"
    found = {id_of_inputs(tmp_path, [20, 13])}
    for number, (row, column) in enumerate(((0, 0), (47, 32), (13, 20))):
        folder = tmp_path / str(number)
        folder.mkdir()
        changed = stored[name].clone()
        changed[row, column] += 1
        save_file({**stored, name: changed}, folder / "model.safetensors")
        found.add(id_of_inputs(folder, [20, 13]))
    swapped = stored[name][:, [1, 0, *range(2, 33)]].contiguous()
    save_file({**stored, name: swapped}, tmp_path / "0" / "model.safetensors")
    found.add(id_of_inputs(tmp_path / "0", [20, 13]))
    assert len(found) == 5


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_gpu_without_deterministic_execution_divides_inputs(device: str) -> None:
    """The meta device has a GPU's parts."""
    parts = make_parts(torch.device(device))
    for is_exact in (False, True):
        execution = ExecutionConfig(deterministic=is_exact)
        assert parts.divides_inputs(execution) == (device == "meta" and not is_exact)


def test_a_slice_of_a_file_uses_its_pages(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A slice of rows is not copied: nothing before it and nothing after it is read."""
    name, shape = "layer.q_proj.weight", (48, 33)
    with closing(open_weights(tmp_path, "auto")) as source:
        whole, part = source.read(name, shape), source.read(name, shape, (slice(7, 20),))
        assert part.data_ptr() == whole.data_ptr() + 7 * 33 * 2
        assert torch.equal(part, stored[name][7:20])
        assert torch.equal(source.read(name, shape, (slice(None), slice(5, 9))), stored[name][:, 5:9])
        with pytest.raises(ConfigError, match=r"has shape \[48, 33\], config.json asks for \[47, 33\]"):
            source.read(name, (47, 33), (slice(2),))


def test_a_slice_of_dummy_weights() -> None:
    shape = (7, (1 << 20) + 5)
    source = DummySource(CPU)
    whole = source.read("w", shape)
    for part in (ALL, (slice(3, 6),), (slice(1, 5), slice(2, 9))):
        assert torch.equal(source.read("w", shape, part), whole[part])
    assert source.read("norm.weight", (4,), (slice(1, 3),)).tolist() == [1.0] * 2


def digest_of(folder: Path, *names: str, load_format: str = "auto", count: int = 1, width: int = 33) -> bytes:
    """Returns the digest of the engine core when `count` ranks have read their shares."""
    facts: list[WorkerFacts] = []
    for index in range(count):
        found = WeightsDigest(has_bytes=load_format == "auto")
        with closing(open_weights(folder, load_format)) as source:
            weights = Weights(source, torch.bfloat16, CPU, group=Member(index, count), digest=found) / "layer"
            for name in names:
                weights.tensors({name: ROWS[name]}, width)
        facts.append(make_rank((0, index), found.rows()))
    return digest_weights(facts)


def test_the_digest_covers_exactly_the_tensors_that_are_read(stored: dict[str, torch.Tensor], tmp_path: Path) -> None:
    q, k, v = ROWS
    first = digest_of(tmp_path, q, k)
    assert len(first) == 16
    assert first == digest_of(tmp_path, k, q)
    assert {digest_of(tmp_path, q, k, count=count) for count in (2, 3, 5, 20)} == {first}
    assert len({first, digest_of(tmp_path, q), digest_of(tmp_path, k), digest_of(tmp_path, q, v)}) == 4
    other = tmp_path / "other"
    other.mkdir()
    changed = {**stored, f"layer.{q}": stored[f"layer.{q}"].clone()}
    changed[f"layer.{q}"][30, 30] += 1
    save_file(changed, other / "model.safetensors")
    assert digest_of(other, q, k) != first
    assert digest_of(other, q, k, count=3) == digest_of(other, q, k)
    assert digest_of(other, k, v) == digest_of(tmp_path, k, v)


def test_the_digest_distinguishes_a_target_from_its_drafter(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, inner in zip(folders, (32, 48), strict=True):
        folder.mkdir()
        shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 64}
        fields = {
            "model_type": "llama",
            "intermediate_size": inner,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
        }
        (folder / "config.json").write_text(json.dumps({**shape, **fields}))

    def load(target: Path, drafter: Path | None) -> bytes:
        speculative = drafter and {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 2}
        args = EngineArgs(model=str(target), load_format="dummy", speculative_config=speculative)
        loaded = load_model(resolve(args).on_device("cpu"), make_parts(torch.device("cpu")))
        return digest_weights([make_rank((0, 0), loaded.read)])

    one, other = folders
    assert load(one, other) == load(one, other)
    assert len({load(one, other), load(other, one), load(one, None), load(other, None)}) == 4


def test_the_digest_of_dummy_weights_covers_names_and_shapes(tmp_path: Path) -> None:
    q, k, v = ROWS
    first = digest_of(tmp_path, q, k, load_format="dummy")
    assert first == digest_of(tmp_path / "other", q, k, load_format="dummy")
    assert first != digest_of(tmp_path, q, v, load_format="dummy")
    assert first != digest_of(tmp_path, q, k, load_format="dummy", width=34)


@pytest.mark.parametrize("divides_inputs", [False, True])
@pytest.mark.parametrize(("model_type", "count"), [("qwen2", 2), ("qwen3", 3)])
def test_the_shards_of_a_model_add_up_to_the_whole(model_type: str, count: int, divides_inputs: bool) -> None:
    """The model has three KV heads with two query heads each; a KV head stays whole, with its query heads."""
    config = ModelConfig(
        path=Path("nowhere"),
        model_type=model_type,
        architecture="",
        dtype="float32",
        vocab_size=101,
        hidden_size=48,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(1e4, "default", {}),
        max_position_embeddings=64,
        tie_word_embeddings=model_type == "qwen2",
        attention_bias=False,
        mlp_bias=False,
        layer_windows=(0, 0),
    )

    def parts_of(group: Member) -> dict[str, tuple[torch.Tensor, ...]]:
        weights = Weights(DummySource(CPU), torch.float32, CPU, group=group, divides_inputs=divides_inputs)
        model = build_model(config, weights)
        attention, mlp = model.layers[1].attention, model.layers[1].feed_forward
        assert isinstance(attention, GroupedQueryAttention)
        assert isinstance(mlp, GatedMLP)
        planes = attention.attend.spec.planes
        num_kv = {plane.num_heads for plane in planes}.pop()
        rows = attention.qkv.dense_weight().split([2 * num_kv * 8, num_kv * 8, num_kv * 8])
        return {
            "embedding": (model.embedding.weight,),
            "head": (model.head.own.dense_weight(),),
            "qkv": rows,
            "out": (attention.out.own.dense_weight(),),
            "gate_up": mlp.gate_up.dense_weight().chunk(2),
            "down": (mlp.down.own.dense_weight(),),
        }

    whole = parts_of(WHOLE)
    shards = [parts_of(Member(index, count)) for index in range(count)]
    for name, tensors in whole.items():
        for number, tensor in enumerate(tensors):
            parts = [shard[name][number] for shard in shards]
            assert max(part.numel() for part in parts) < tensor.numel()
            dimension = 1 if divides_inputs and name in ("out", "down") else 0
            assert torch.equal(torch.cat(parts, dimension), tensor)
    if count == 3:
        # The heads are divided equally, the rest almost equally: in both cases a rank has a third.
        sizes = [sum(part.numel() for parts in shard.values() for part in parts) for shard in shards]
        assert max(sizes) <= sum(part.numel() for parts in whole.values() for part in parts) / count + 3 * 48
