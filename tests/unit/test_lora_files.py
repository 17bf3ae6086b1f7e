"""What is read of an adapter's files, and what is refused, in words."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config.engine import EngineArgs, resolve
from penstock.config.lora import CONFIG, WEIGHTS, LoraConfig, check_targets, read_adapter
from penstock.config.name_patterns import ends_with_match
from penstock.config.server import ServerArgs
from penstock.frontend import adapters
from penstock.frontend.adapters import AdapterStore, LoRARequest
from penstock.messages.adapters import LoraTarget
from penstock.utils.errors import ConfigError, RequestError
from tests.lora_files import write_adapter

SIZES = {"model.layers.0.self_attn.q_proj": (8, 12), "model.layers.0.mlp.down_proj": (20, 8)}
TARGETS = {name: LoraTarget(*sizes) for name, sizes in SIZES.items()}


def scales(folder: Path) -> list[float]:
    return [each.scale for each in read_adapter(folder).tensors.values()]


def test_scales_and_patterns(tmp_path: Path) -> None:
    assert scales(write_adapter(tmp_path, SIZES)) == [2.0, 2.0]
    assert scales(write_adapter(tmp_path, SIZES, use_rslora=True)) == [4.0, 4.0]
    patterns = {r"layers\.\d+\.self_attn\.q_proj": 12}
    assert sorted(scales(write_adapter(tmp_path, SIZES, alpha_pattern=patterns))) == [2.0, 3.0]
    # A pattern matches whole parts of the name.
    assert scales(write_adapter(tmp_path, SIZES, alpha_pattern={"own_proj": 12})) == [2.0, 2.0]
    assert scales(write_adapter(tmp_path, SIZES, r=9, rank_pattern={"q_proj|down_proj": 4})) == [2.0, 2.0]
    patterns = {r"^model\.layers\.(?:0|[1-9]|1\d)\..*\.(q|k|v)_proj": 12, r"[)+*(]": 3}
    assert sorted(scales(write_adapter(tmp_path, SIZES, alpha_pattern=patterns))) == [2.0, 3.0]
    # PEFT matches the names of a multimodal model's modules as they are.
    name = "model.language_model.layers.0.mlp.up_proj"
    assert scales(write_adapter(tmp_path, {name: (4, 4)}, alpha_pattern={name: 32})) == [8.0]
    found = read_adapter(write_adapter(tmp_path, {name: (4, 4)}))
    assert list(found.tensors) == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"init_lora_weights": "lora_ga"}, "changes the model's own weights"),
        ({"r": 5}, "the rank 5, and its tensors have 4"),
        ({"r": "4"}, "r must be an integer"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": math.nan}, "is not valid JSON"),
        ({"lora_alpha": math.inf}, "lora_alpha"),
        ({"lora_alpha": True}, "lora_alpha"),
        ({"lora_alpha": "3"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": 1e308}, "lora_alpha"),
        ({"lora_alpha": None, "alpha_pattern": {"q_proj": []}}, "lora_alpha"),
        ({"rank_pattern": ["x"]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"(": 4}}, "invalid pattern"),
        ({"rank_pattern": {"(a+)+x": 4}}, "a repeated group"),
        ({"alpha_pattern": {".*" * 9 + "x": 4}}, "so many repetitions"),
        ({"alpha_pattern": {"(a|a)" * 30: 4}}, "so many repetitions"),
        ({"alpha_pattern": {"(?x)#[\n(a+)+": 4}}, "of groups that begin with"),
        ({"alpha_pattern": {"a" * 600: 4}}, "at most 512 characters"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        read_adapter(write_adapter(tmp_path, SIZES, **config))


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8), "is not supported"),
        ("base_model.model.lm_head.weight", (4, 8), "is not supported"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.weight", (8,), "is not supported"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", (4, 8), "needs lora_A and lora_B"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", (12, 3), "have ranks 4 and 3"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...], words: str) -> None:
    write_adapter(tmp_path, SIZES)
    save_file({**load_file(tmp_path / WEIGHTS), name: torch.zeros(shape)}, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match=words):
        read_adapter(tmp_path)


@pytest.mark.parametrize("again", ["x.lora_A.default.weight", "language_model.x.lora_A.weight"])
def test_two_tensors_for_one_projection(tmp_path: Path, again: str) -> None:
    write_adapter(tmp_path, {"x": (4, 4)})
    save_file({**load_file(tmp_path / WEIGHTS), f"base_model.model.{again}": torch.zeros(4, 4)}, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match="are for the same projection"):
        read_adapter(tmp_path)


def test_a_pattern_for_each_module_takes_little_time() -> None:
    """As the EVA initialization of PEFT writes them: more than the cache of `re` holds."""
    names = [f"model.layers.{layer}.{part}" for layer in range(80) for part in "abcdefg"]
    start = time.perf_counter()
    for name in names:
        assert [ends_with_match(pattern, name) for pattern in names].count(True) == 1
    assert time.perf_counter() - start < 4


def test_types_that_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SIZES)
    prefix = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {f"{prefix}.lora_{half}.weight": torch.zeros(4, 4, dtype=torch.int8) for half in "AB"}
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match="numbers of type I8"):
        read_adapter(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    """Each cut and many changed bytes of the header: read, or refused in words."""
    folder = write_adapter(tmp_path / "adapter", SIZES)
    whole = (folder / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(1)
    for length in (0, 3, 8, 9, header - 1, header, len(whole) - 1):
        (folder / WEIGHTS).write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            read_adapter(folder)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(header)] = rng.randrange(256)
        (folder / WEIGHTS).write_bytes(damaged)
        try:
            read_adapter(folder)
        except ConfigError:
            num_refused += 1
    assert num_refused > 100
    for wrong in (whole + b"1234", whole.replace(b"F32", b"I32", 1).replace(b'"F32"', b'"X32"', 1)):
        (folder / WEIGHTS).write_bytes(wrong)
        with pytest.raises(ConfigError):
            read_adapter(folder)
    (folder / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError, match="truncated"):
        read_adapter(folder)
    deep = b"[" * 100_000
    (folder / WEIGHTS).write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(ConfigError, match="not a safetensors file"):
        read_adapter(folder)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        read_adapter(tmp_path / "nowhere")
    folder = write_adapter(tmp_path / "adapter", SIZES)
    os.rename(folder / WEIGHTS, folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin, are not read"):
        read_adapter(folder)
    (folder / CONFIG).write_text("\ufeff{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_adapter(folder)


def test_targets(tmp_path: Path) -> None:
    files = read_adapter(write_adapter(tmp_path, SIZES))
    check_targets(files, TARGETS, 4)
    with pytest.raises(ConfigError, match="max_lora_rank"):
        check_targets(files, TARGETS, 3)
    with pytest.raises(ConfigError, match="which adapters cannot change here"):
        check_targets(files, {}, 4)
    with pytest.raises(ConfigError, match="made for another model"):
        check_targets(files, {**TARGETS, "model.layers.0.mlp.down_proj": LoraTarget(20, 9)}, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 513}, "max_lora_rank"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras"),
        ({"distributed_executor_backend": "ray"}, "ranks on one host"),
        ({"runner": "pooling"}, "this one pools"),
    ],
)
def test_limits(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(EngineArgs.from_kwargs(enable_lora=True, **arguments))


def test_modules_of_the_command_line() -> None:
    texts = ("sql=adapters/sql", "fr=a=b", '{"name": "de", "path": "x", "base_model_name": "demo"}')
    assert ServerArgs(lora_modules=texts).loras == [("sql", "adapters/sql"), ("fr", "a=b"), ("de", "x")]
    ServerArgs(lora_modules=texts).check()
    for wrong in ("sql", "=x", "sql=", "{", "[]", '{"name": "a"}', '{"name": 1, "path": "x"}'):
        with pytest.raises(ConfigError, match="lora_modules"):
            ServerArgs(lora_modules=(wrong,)).check()
    with pytest.raises(ConfigError, match="one name"):
        ServerArgs(lora_modules=("a=x", "a=y")).check()


def make_store(max_rank: int = 8) -> AdapterStore:
    return AdapterStore(LoraConfig(num_slots=2, max_running=2, max_rank=max_rank), TARGETS)


def test_an_adapter_of_another_model_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: object) -> None:
        raise AssertionError("it is copied")

    monkeypatch.setattr(adapters, "_copy_file", copy)
    with pytest.raises(ConfigError, match="max_lora_rank"):
        make_store(max_rank=3).load("a", str(write_adapter(tmp_path, SIZES)))


def test_copies_live_as_long_as_their_adapters(tmp_path: Path) -> None:
    store, path = make_store(), write_adapter(tmp_path / "a", SIZES)
    adapter = store.load("a", str(path))
    assert store.load("again", str(path)).digest == adapter.digest
    copy = Path(adapter.folder)
    write_adapter(path, SIZES, seed=1)  # what is served does not change
    assert store.get("a") is adapter
    assert read_adapter(copy).tensors
    assert store.resolve(LoRARequest("a", 1, str(path))) is adapter
    with pytest.raises(RequestError, match="in use for an adapter with other contents"):
        store.load("a", str(path))
    elsewhere = write_adapter(tmp_path / "b", SIZES, seed=2)
    with pytest.raises(RequestError, match="in use for an adapter with other contents"):
        store.resolve(LoRARequest("a", 1, str(elsewhere)))
    for unused in store.unused():
        store.remove(*unused)
    write_adapter(path, SIZES, seed=1)
    with pytest.raises(RequestError, match="in use"):
        store.load("a", str(path))
    assert len(store.unused()) == 1  # of the refused one
    store.remove(*store.unused()[0])
    store.unload("a")
    assert store.unused() == []  # "again" has it
    store.unload("again")
    assert store.unused() == []  # this test has it
    digest = adapter.digest
    del adapter
    (unused,) = store.unused()
    assert unused[0] == digest
    assert store.has_unserved
    store.remove(*unused)
    assert not copy.exists()
    assert not store.has_unserved
    other = store.load("a", str(path))
    assert other.digest != digest
    store.close()
    assert not copy.parent.exists()


def test_a_copy_that_was_used_meanwhile_is_not_removed(tmp_path: Path) -> None:
    store, path = make_store(), write_adapter(tmp_path / "a", SIZES)
    copies: list[Path] = []
    unused: list[tuple[bytes, object]] = []
    for _ in range(2):
        copies.append(Path(store.load("a", str(path)).folder))
        store.unload("a")
        unused += store.unused()
    first, second = unused
    store.remove(*first)
    assert copies[0] == copies[1]
    assert copies[0].exists()
    store.remove(*second)
    assert not copies[0].exists()
    store.close()


def test_what_is_checked_is_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, path = make_store(max_rank=4), write_adapter(tmp_path / "a", SIZES)
    copy_file = adapters._copy_file

    def change_and_copy(source: Path, target: Path, digest: Any) -> int:
        write_adapter(path, SIZES, rank=8)
        return copy_file(source, target, digest)

    monkeypatch.setattr(adapters, "_copy_file", change_and_copy)
    with pytest.raises(ConfigError, match="max_lora_rank"):
        store.load("a", str(path))
    assert store.names == ()
    store.close()


def test_the_digest_tells_where_one_file_ends(tmp_path: Path) -> None:
    found: list[bytes] = []
    for parts in ((b"ab", b"c"), (b"a", b"bc")):
        digest = hashlib.sha256()
        for number, part in enumerate(parts):
            (tmp_path / "from").write_bytes(part)
            size = adapters._copy_file(tmp_path / "from", tmp_path / str(number), digest)
            digest.update(size.to_bytes(8, "little"))
        found.append(digest.digest())
    assert found[0] != found[1]


def test_a_folder_that_vanished_is_made_again(tmp_path: Path) -> None:
    store, path = make_store(), write_adapter(tmp_path / "a", SIZES)
    first = store.load("a", str(path))
    folder = Path(first.folder).parent
    shutil.rmtree(folder)
    other = store.load("b", str(write_adapter(tmp_path / "b", SIZES, seed=1)))
    assert folder.stat().st_mode & 0o777 == 0o700
    # Another process takes away only what nobody has locked.
    stranger = make_store()
    stranger.load("a", str(path))
    store.load("a", str(path))
    for each in (first, other):
        assert Path(each.folder).parent == folder
        assert read_adapter(Path(each.folder)).tensors
    stranger.close()
    store.close()
    assert not folder.exists()


def test_an_adapter_loaded_again_keeps_its_copy(tmp_path: Path) -> None:
    store, path = make_store(), write_adapter(tmp_path / "a", SIZES)
    digest = store.load("a", str(path)).digest
    store.unload("a")
    (unused,) = store.unused()
    assert unused[0] == digest
    store.load("b", str(path))
    store.remove(*unused)
    assert read_adapter(Path(store.get("b").folder)).tensors  # pyright: ignore[reportOptionalMemberAccess]
    store.close()


@pytest.mark.parametrize("name", ["", "\0", "a\nb", "x" * 257, "\ud800"])
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="lora_name"):
        make_store().load(name, str(write_adapter(tmp_path, SIZES)))


def test_requests_that_are_refused(tmp_path: Path) -> None:
    store = make_store()
    with pytest.raises(RequestError, match="there is no adapter 'x'"):
        store.resolve(LoRARequest("x"))
    with pytest.raises(RequestError, match="must be a LoRARequest"):
        store.resolve("x")  # pyright: ignore[reportArgumentType]
    for path in ("a\0b", tmp_path, 5):
        with pytest.raises(RequestError, match="lora_path"):
            store.load("x", path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="lora_name"):
        store.load(7, str(tmp_path))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError):
        store.load("x", "~nosuchuser/x")
    with pytest.raises(RequestError, match="enable_lora"):
        AdapterStore(None, {}).load("x", str(write_adapter(tmp_path, SIZES)))
    with pytest.raises(RequestError, match="there is no adapter"):
        store.unload("x")
    with pytest.raises(ConfigError, match="rank"):
        make_store(max_rank=2).load("x", str(write_adapter(tmp_path, SIZES)))
    assert json.loads((tmp_path / CONFIG).read_text())["r"] == 4


def test_copies_of_a_killed_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp" / "penstock-lora-killed" / "copy").mkdir(parents=True)
    (tmp_path / "kept").mkdir()
    (tmp_path / "tmp" / "penstock-lora-link").symlink_to(tmp_path / "kept")
    source = str(write_adapter(tmp_path / "adapter", SIZES))
    stores = [make_store() for _ in range(2)]
    folders = {Path(store.load("a", source).folder).parent for store in stores}
    assert {each.name for each in folders} | {"penstock-lora-link"} == set(os.listdir(tmp_path / "tmp"))
    assert (tmp_path / "kept").is_dir()
    for store in stores:
        store.close()
    assert os.listdir(tmp_path / "tmp") == ["penstock-lora-link"]


def test_a_new_folder_that_another_process_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is locked, it looks like one that a killed process has left."""
    made: list[str] = []
    make = tempfile.mkdtemp

    def make_and_lose(*args: Any, **options: Any) -> str:
        made.append(make(*args, **options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(adapters.tempfile, "mkdtemp", make_and_lose)
    store = make_store()
    adapter = store.load("a", str(write_adapter(tmp_path / "a", SIZES)))
    assert Path(adapter.folder).parent == Path(made[1])
    store.close()
