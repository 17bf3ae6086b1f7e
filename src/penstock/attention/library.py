"""The layers that a third-party library's attention kernels support, and the check for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.attention.backend import AttentionHeads
from penstock.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LibraryLimits:
    backend: str
    head_sizes: Collection[int]
    block_sizes: Collection[int]
    max_group: int  # query heads per KV head
    dtypes: Collection[str] = ("bfloat16", "float16")

    def check_kind(self, heads: AttentionHeads) -> None:
        """Raises ConfigError for a layer with latents, a soft cap or sinks, which Penstock does not pass on."""
        kinds = {
            "latent attention": len(heads.spec.planes) == 1,
            "attention sinks": heads.sinks is not None,
            f"attn_logit_softcapping {heads.softcap}": heads.softcap > 0,
        }
        for kind in (kind for kind, is_asked in kinds.items() if is_asked):
            raise ConfigError(
                f"attention_backend={self.backend} does not serve {kind} here: choose attention_backend=triton"
            )

    def check(self, heads: AttentionHeads, block_size: int) -> None:
        """Raises ConfigError for a layer that the kernels do not support."""
        if heads.spec.dtype not in self.dtypes:
            raise self._refusal("dtype", heads.spec.dtype, self.dtypes)
        if block_size not in self.block_sizes:
            raise self._refusal("block_size", block_size, self.block_sizes)
        if heads.keys.head_size not in self.head_sizes:
            raise self._refusal("heads of size", heads.keys.head_size, self.head_sizes)
        if heads.num_heads // heads.keys.num_heads > self.max_group:
            raise ConfigError(
                f"attention_backend={self.backend} serves at most {self.max_group} heads per KV head, and the model "
                f"has {heads.num_heads} for {heads.keys.num_heads}: choose another attention_backend"
            )

    def _refusal(self, what: str, found: object, served: Collection[object]) -> ConfigError:
        return ConfigError(
            f"attention_backend={self.backend} does not serve {what} {found}: it serves "
            f"{', '.join(map(str, served))}; or choose attention_backend=triton"
        )
