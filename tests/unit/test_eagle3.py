"""The EAGLE-3 head compared with whole-sequence arithmetic in plain torch, and its input from the target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.attention.backend import AttentionMetadata
from penstock.attention.forward_context import ForwardContext
from penstock.attention.native import NativeAttention
from penstock.config.eagle3 import load_eagle3_config
from penstock.config.kv_cache_groups import group_layers
from penstock.config.model import ModelConfig
from penstock.config.rope import RopeConfig
from penstock.messages.kv_cache_spec import KVCacheConfig
from penstock.models.decoder import Decoder
from penstock.models.eagle3 import Eagle3Head
from penstock.models.interface import DraftHead, Model
from penstock.models.registry import build_model
from penstock.models.sources.opening import open_weights
from penstock.models.weights import Weights
from penstock.runner.kv_cache import allocate_kv_cache
from penstock.utils.errors import ConfigError
from penstock.worker.parts import make_parts

CPU = torch.device("cpu")
VOCAB, DRAFT_VOCAB, HIDDEN, TARGET_HIDDEN, INNER = 97, 41, 32, 64, 80
HEADS, KV_HEADS, HEAD = 3, 1, 16
EPS, THETA = 1e-5, 500.0
LENGTH = 21
TARGET = ModelConfig(
    path=Path("nowhere"),
    model_type="llama",
    architecture="LlamaForCausalLM",
    dtype="float32",
    vocab_size=VOCAB,
    hidden_size=TARGET_HIDDEN,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=EPS,
    rope=RopeConfig(1e4, "default", {}),
    max_position_embeddings=64,
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    layer_windows=(0, 0, 0),
)


def make_target(config: ModelConfig = TARGET, aux_layers: tuple[int, ...] = (1, 3)) -> Decoder:
    return build_model(config, Weights(open_weights(config.path, "dummy"), torch.float32, CPU), aux_layers)


def write_head(folder: Path, hidden: int = HIDDEN, is_reduced: bool = True, **fields: Any) -> dict[str, torch.Tensor]:
    """Writes a random checkpoint, with an embedding of its own and a reduced vocabulary or with the target's."""
    random = torch.Generator().manual_seed(5)
    layer = "midlayer" if is_reduced else "layers.0"
    shapes = {
        "fc.weight": (hidden, 2 * TARGET_HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, HEADS * HEAD),
        f"{layer}.mlp.gate_proj.weight": (INNER, hidden),
        f"{layer}.mlp.up_proj.weight": (INNER, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, INNER),
        **{f"{layer}.{n}.weight": (hidden,) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm.weight": (hidden,),
    }
    if is_reduced:
        shapes |= {"embed_tokens.weight": (VOCAB, hidden), "lm_head.weight": (DRAFT_VOCAB, hidden)}
    tensors = {name: 0.3 * torch.randn(shape, generator=random) + (len(shape) == 1) for name, shape in shapes.items()}
    if is_reduced:
        ids = torch.randperm(VOCAB, generator=random)[:DRAFT_VOCAB].sort().values
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        fields["draft_vocab_size"] = DRAFT_VOCAB
    save_file(tensors, folder / "model.safetensors")
    shape = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "target_hidden_size": TARGET_HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": 4,  # less than it will see: the target's number applies
        "eagle_aux_hidden_state_layer_ids": [3, 1],
    }
    (folder / "config.json").write_text(json.dumps({**shape, **fields}), encoding="utf-8")
    return tensors


def load_head(folder: Path, target: Decoder) -> Eagle3Head:
    return Eagle3Head(
        load_eagle3_config(folder, TARGET), Weights(open_weights(folder, "auto"), torch.float32, CPU), target
    )


def context_of(model: Model | DraftHead) -> dict[str, torch.Tensor]:
    """Returns empty caches for one request of up to 64 tokens."""
    cache = KVCacheConfig(6, 16, group_layers(model.kv_cache_specs))
    return {
        name: tensor.fill_(torch.nan)
        for name, tensor in allocate_kv_cache(cache, make_parts(CPU).allocate).tensors.items()
    }


def of_tokens(caches: dict[str, torch.Tensor], positions: torch.Tensor) -> ForwardContext:
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
        seq_lens=positions[-1:].to(torch.int32) + 1,
        block_table=torch.tensor([[5, 3, 1, 2]], dtype=torch.int32),
        slot_mapping=torch.tensor([5, 3, 1, 2])[positions // 16] * 16 + positions % 16,
        max_query_len=len(positions),
        max_seq_len=64,
    )
    return ForwardContext(dict.fromkeys(caches, metadata), caches, NativeAttention())


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def reference(
    tensors: dict[str, torch.Tensor],
    embedded: torch.Tensor,  # [L, H] of the token after each position
    streams: torch.Tensor,  # [at most L, N * target's H]; after them the head's own states are the input
    norm_before_residual: bool,
) -> torch.Tensor:
    """Computes the state before the norm at every position, [L, H], one position after another."""
    t = {name.removeprefix("midlayer.").removeprefix("layers.0."): value for name, value in tensors.items()}
    turn = 1.0 / THETA ** (torch.arange(0, HEAD, 2) / HEAD)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    states: list[torch.Tensor] = []

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.complex(*x.view(-1, 2, HEAD // 2).unbind(1))
        turned = pairs * torch.polar(torch.ones_like(turn), position * turn)
        return torch.cat((turned.real, turned.imag), -1)

    for position, embedding in enumerate(embedded):
        hidden = t["fc.weight"] @ streams[position] if position < len(streams) else states[-1]
        normed = norm(hidden, t["hidden_norm.weight"])
        x = torch.cat((norm(embedding, t["input_layernorm.weight"]), normed))
        query = rotate(t["self_attn.q_proj.weight"] @ x, position)
        keys.append(rotate(t["self_attn.k_proj.weight"] @ x, position)[0])
        values.append(t["self_attn.v_proj.weight"] @ x)
        seen = (query @ torch.stack(keys).T / HEAD**0.5).softmax(-1) @ torch.stack(values)
        hidden = (normed if norm_before_residual else hidden) + t["self_attn.o_proj.weight"] @ seen.flatten()
        x = norm(hidden, t["post_attention_layernorm.weight"])
        gate, up = t["mlp.gate_proj.weight"] @ x, t["mlp.up_proj.weight"] @ x
        states.append(hidden + t["mlp.down_proj.weight"] @ (gate.sigmoid() * gate * up))
    return torch.stack(states)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("is_reduced", [False, True])
@torch.inference_mode()
def test_the_head_matches_its_formulas(tmp_path: Path, is_reduced: bool, norm_before_residual: bool) -> None:
    """Runs a prompt in two chunks on the target's streams, then two tokens on the head's own states."""
    hidden = HIDDEN if is_reduced else TARGET_HIDDEN
    tensors = write_head(tmp_path, hidden, is_reduced, norm_before_residual=norm_before_residual)
    target = make_target()
    head = load_head(tmp_path, target)
    ids = torch.randint(VOCAB, (LENGTH + 3,), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(LENGTH)
    output = target.forward(ids[:LENGTH], positions, of_tokens(context_of(target), positions))
    caches = context_of(head)
    states: list[torch.Tensor] = []
    for part in (positions[:9], positions[9:]):
        entered = head.enter(replace(output, aux_hidden=output.aux_hidden[part]))
        states.append(head.forward(entered, ids[part + 1], part, of_tokens(caches, part)))
    for position in (positions[-1:] + 1, positions[-1:] + 2):
        states.append(head.forward(states[-1][-1:], ids[position + 1], position, of_tokens(caches, position)))
    found = torch.cat(states)
    embedded = tensors["embed_tokens.weight"] if is_reduced else target.embedding.weight
    wanted = reference(tensors, embedded[ids[1:]], output.aux_hidden, norm_before_residual)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    logits = head.compute_logits(found)
    guesses = norm(wanted, tensors["norm.weight"])
    if is_reduced:
        known = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
        torch.testing.assert_close(logits[:, known], guesses @ tensors["lm_head.weight"].T, rtol=1e-4, atol=1e-4)
        assert logits.isneginf().sum(1).unique().tolist() == [VOCAB - DRAFT_VOCAB]
    else:
        torch.testing.assert_close(logits, target.compute_logits(guesses), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_streams_are_the_inputs_of_the_layers() -> None:
    """Dummy weights depend on their names only, so a smaller model equals the first layers of a larger one."""
    positions = torch.arange(LENGTH)
    ids = positions * 4

    def run(model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
        output = model.forward(ids, positions, of_tokens(context_of(model), positions))
        return output.hidden, output.aux_hidden

    target = make_target(aux_layers=(0, 1, 2, 3))
    hidden, streams = run(target)
    first, second, third, last = streams.split(TARGET_HIDDEN, -1)
    assert torch.equal(first, target.embedding(ids))
    for count, stream in ((1, second), (2, third)):
        shorter = replace(TARGET, num_hidden_layers=count, layer_windows=(0,) * count)
        assert torch.equal(stream, run(make_target(shorter, aux_layers=(count,)))[1])
    assert torch.equal(hidden, target.end.norm(last.contiguous()))
    plain_hidden, nothing = run(make_target(aux_layers=()))
    assert torch.equal(plain_hidden, hidden)
    assert nothing.shape == (LENGTH, 0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fc.weight", None, "no tensor 'fc.weight'"),
        ("d2t", None, "no tensor 'd2t'"),
        ("lm_head.weight", None, "no tensor 'lm_head.weight'"),
        ("embed_tokens.weight", None, "no tensor 'embed_tokens.weight'"),
        ("midlayer.hidden_norm.weight", None, "no tensor 'layers.0."),
        ("fc.weight", torch.zeros(HIDDEN, 3 * TARGET_HIDDEN), "'fc.weight' has shape"),
        ("d2t", torch.full((DRAFT_VOCAB,), VOCAB), "d2t of .* there must be 41 from 0 to 96"),
        ("d2t", -torch.arange(DRAFT_VOCAB), "1 different ones"),
    ],
)
def test_unsuitable_tensors_are_refused(tmp_path: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    tensors = write_head(tmp_path)
    del tensors[name]
    save_file(tensors if value is None else {**tensors, name: value}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_head(tmp_path, make_target())
