"""The model in plain PyTorch: a Qwen3 with tied embeddings, and one multi-token-prediction module beside it.

Parameters have the names of the Hugging Face checkpoint (`model.*` as in Qwen3ForCausalLM, `mtp.*` in the manner of
Qwen3-Next), so a state dict is a checkpoint. Shapes in comments: B rows, T tokens, D hidden, H heads, K heads of keys
and values, C channels of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MTP_LOSS_WEIGHT = 0.3
PROMPT_LOSS_WEIGHT = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. The values are the built-in model's: 5.8 M parameters and 0.9 M in the MTP module."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    context: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def rotary_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines for positions 0 to `length` - 1, each [T, C] float32 with two equal halves of C."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)  # [C / 2]
    frequencies = config.rope_theta ** (-half / config.head_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies  # [T, C / 2]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to [B, H, T, C]; channel c is paired with c + C / 2, as Qwen3 does."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention with a norm on each head's query and key."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=False)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        c = self.config
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, c.num_heads, c.head_dim)).transpose(1, 2)  # [B, H, T, C]
        k = self.k_norm(self.k_proj(x).view(batch, length, c.num_kv_heads, c.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, c.num_kv_heads, c.head_dim).transpose(1, 2)  # [B, K, T, C]
        group = c.num_heads // c.num_kv_heads
        # Every fused kernel supports repeated keys and values; only some support grouped ones.
        k = rotate(k, cos, sin).repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Gated feed-forward with SiLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, layers and final norm: the checkpoint's `model.*`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class MultiTokenPredictor(nn.Module):
    """Computes the hidden state that predicts t + 2 from token t's final hidden state and token t + 1's embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Block(config)])
        self.norm = RMSNorm(size, eps)

    def forward(self, hidden: Tensor, next_embedding: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, D] and [B, T, D] to [B, T, D]."""
        both = [self.pre_fc_norm_embedding(next_embedding), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, dim=-1))
        return self.norm(self.layers[0](x, cos, sin))


class DemoModel(nn.Module):
    """The whole model; the output head is the transposed embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.mtp = MultiTokenPredictor(config)
        self._initialise()

    def _initialise(self) -> None:
        """Draws normal weights with standard deviation 0.02, smaller where a layer writes to the residual stream."""
        residual = 0.02 / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=residual if writes else 0.02)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 to the hidden states after the final norm, [B, T, D]."""
        cos, sin = rotary_table(self.config, tokens.shape[1], tokens.device)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def mtp_hidden(self, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """Returns the MTP module's hidden states.

        Args:
            hidden: [B, T, D] from `hidden`.
            next_tokens: [B, T] int64, at t the token t + 1.

        Returns:
            [B, T, D], at t the state that predicts token t + 2.
        """
        cos, sin = rotary_table(self.config, next_tokens.shape[1], next_tokens.device)
        return self.mtp(hidden, self.model.embed_tokens(next_tokens), cos, sin)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] to [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 to next-token logits [B, T, V]."""
        return self.logits(self.hidden(tokens))

    def loss(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weighted mean cross-entropies of the next token and, by the MTP module, of the one after it.

        Args:
            tokens: [B, T] int64.
            weights: [B, T] float32, the weight of each predicted token.

        Returns:
            Two scalars; the training loss is the first plus MTP_LOSS_WEIGHT times the second.
        """
        hidden = self.hidden(tokens)
        # Rolled rather than cut, so that T stays a multiple of the kernels' tiles; the wrapped token has no weight.
        following = tokens.roll(-1, dims=1)
        weights = weights.clone()
        weights[:, 0] = 0
        main = _mean_loss(self.logits(hidden), following, weights.roll(-1, dims=1))
        weights[:, 1] = 0
        ahead = self.mtp_hidden(hidden, following)
        mtp = _mean_loss(self.logits(ahead), tokens.roll(-2, dims=1), weights.roll(-2, dims=1))
        return main, mtp


def _mean_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean cross-entropy of [B, T, V] logits, [B, T] targets and [B, T] weights."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    weights = weights.flatten()
    return (losses * weights).sum() / weights.sum().clamp_min(1e-6)
