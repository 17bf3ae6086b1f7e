"""An EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) for a trained model: its layer, its training loss, its files.

The head reads the target's residual stream at a few depths and predicts one token further than the target:

    streams at t -> fc -> h        token t + 1, h -> norm each, concatenate -> layer -> norm -> target's head -> t + 2

To predict the token after that, it reads its own sum before the norm instead of the streams. Training does the same
(the paper's training-time test): the head is unrolled over its own states, and every pass counts in the loss.
Parameters have the names of the published checkpoints. Shapes as in `model.py`; N streams.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipe.model import MLP, DemoModel, ModelConfig, RMSNorm, rotary_table, rotate

LATER_PASS_WEIGHT = 0.8


class Passes:
    """The keys and values that a pass sees of earlier passes: those that drafting would have left in the cache.

    In pass i at position t, the tokens up to t - i were read with the target's streams, and the i after them with the
    head's own states, each in the pass of its distance.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []  # one for each pass: [B, H, T, C]
        self.values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Adds a pass. [B, H, T, C] each, to the same shape."""
        self.keys.append(k)
        self.values.append(v)
        last, length = len(self.keys) - 1, q.shape[2]
        behind = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)  # [T, T]
        seen = [behind >= last, *(behind == last - i for i in range(1, last + 1))]
        return F.scaled_dot_product_attention(
            q, torch.cat(self.keys, 2), torch.cat(self.values, 2), attn_mask=torch.cat(seen, 1)
        )


class Attention(nn.Module):
    """Grouped-query attention over the embedding and the hidden state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)

    def forward(self, x: Tensor, passes: Passes) -> Tensor:
        """[B, T, 2 D] to [B, T, D]."""
        c = self.config
        batch, length, _ = x.shape
        cos, sin = rotary_table(c, length, x.device)
        q = rotate(self.q_proj(x).view(batch, length, c.num_heads, c.head_dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, c.num_kv_heads, c.head_dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, c.num_kv_heads, c.head_dim).transpose(1, 2)
        group = c.num_heads // c.num_kv_heads
        out = passes.attend(q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    """The decoder layer; its residual is the normalised state (`norm_before_residual`), whose scale is known."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor, passes: Passes) -> Tensor:
        """[B, T, D] and [B, T, D] to [B, T, D]."""
        hidden = self.hidden_norm(hidden)
        x = hidden + self.self_attn(torch.cat([self.input_layernorm(embedded), hidden], -1), passes)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """The head; embedding and output head are the target's.

    Args:
        config: the target's.
        layers: those at whose inputs the target's residual stream is read; `num_layers` means after the last.
    """

    def __init__(self, config: ModelConfig, layers: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        self.layers = layers
        self.fc = nn.Linear(len(layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, streams: Tensor, embedded: Tensor, num_passes: int) -> list[Tensor]:
        """Predicts from every position, with the row's tokens in place of the previous predictions.

        Args:
            streams: [B, T, N D] of the target.
            embedded: [B, T, D], at t the embedding of token t + 1.
            num_passes: number of passes.

        Returns:
            [B, T, D] for each pass i, at t the state from which the target's head predicts token t + 2, given the
            streams up to t - i. Positions before i are meaningless.
        """
        passes = Passes()
        hidden = self.fc(streams)
        guesses: list[Tensor] = []
        for _ in range(num_passes):
            hidden = self.midlayer(embedded, hidden, passes)
            guesses.append(self.norm(hidden))
            hidden = hidden.roll(1, dims=1)
        return guesses


@torch.no_grad()
def read_target(model: DemoModel, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the target's streams at the inputs of `layers`, [B, T, N D], and its hidden states, [B, T, D]."""
    cos, sin = rotary_table(model.config, tokens.shape[1], tokens.device)
    stream = [model.model.embed_tokens(tokens)]
    for layer in model.model.layers:
        stream.append(layer(stream[-1], cos, sin))
    return torch.cat([stream[i] for i in layers], -1), model.model.norm(stream[-1])


def loss(head: Eagle3Head, target: DemoModel, tokens: Tensor, counts: Tensor, num_passes: int) -> Tensor:
    """Cross-entropy against the target's own distribution, a mean over the tokens that count, summed over the passes.

    Args:
        tokens: [B, T] int64.
        counts: [B, T] bool: whether the head learns to predict the token.
    """
    streams, hidden = read_target(target, tokens, head.layers)
    counts = counts.roll(-2, dims=1)
    counts[:, :num_passes] = counts[:, -2:] = False
    wanted = target.logits(hidden.roll(-1, dims=1)[counts]).float().softmax(-1)  # [num_counting, V]
    guesses = head(streams, target.model.embed_tokens(tokens.roll(-1, dims=1)), num_passes)
    total = torch.zeros((), device=tokens.device)
    for number, guess in enumerate(guesses):
        logits = target.logits(guess[counts].to(hidden.dtype)).float()
        total = total + LATER_PASS_WEIGHT**number * F.cross_entropy(logits, wanted, reduction="sum")
    return total / counts.sum().clamp_min(1)


@torch.inference_mode()
def right_guesses(head: Eagle3Head, target: DemoModel, tokens: Tensor, first: int, num_passes: int) -> Tensor:
    """Returns which drafts are accepted, in windows of `num_passes` drafts in a text from its token `first` on.

    A draft counts only after correct ones, so reading the text's tokens is equivalent to drafting.

    Returns:
        [num_windows, num_passes] bool.
    """
    streams, _ = read_target(target, tokens[None], head.layers)
    guesses = head(streams, target.model.embed_tokens(tokens.roll(-1)[None]), num_passes)
    starts = torch.arange(len(tokens) - 1 - num_passes)[first - 1 :]
    right = [target.logits(g[0, starts + i]).argmax(-1) == tokens[starts + i + 2] for i, g in enumerate(guesses)]
    return torch.stack(right, 1).cumprod(1).bool()


def export(head: Eagle3Head, folder: Path) -> int:
    """Writes the head in bfloat16 with its configuration; returns the weights' size in bytes."""
    from safetensors.torch import save_file

    config = head.config
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    tensors = {name: t.detach().cpu().to(torch.bfloat16).contiguous() for name, t in head.state_dict().items()}
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    told = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "eagle_aux_hidden_state_layer_ids": list(head.layers),
        "norm_before_residual": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return file.stat().st_size
