"""A request's pooling parameters. A value outside its bound raises a `RequestError` that names the field."""

# The values come from users and may have types other than those declared.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.messages.sampling_params import MAX_COUNT
from penstock.utils.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Pooling parameters of one request; immutable.

    `dimensions` truncates a vector to its first numbers (Matryoshka) before it is normalised. `normalize` scales it to
    length 1, `use_activation` converts a classifier's logits to probabilities; None uses the checkpoint's setting.
    `prompt_name` names one of the checkpoint's texts, which is prepended to the input. `truncate_prompt_tokens`
    truncates the end of a longer input; -1 truncates to the model's maximum.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and not (_is_int(self.dimensions) and 1 <= self.dimensions <= MAX_COUNT):
            raise RequestError(f"dimensions must be an integer of at least 1, got {self.dimensions!r}", "dimensions")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"{name} must be True, False or None, got {value!r}", name)
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise RequestError(f"prompt_name must be text, got {type(self.prompt_name).__name__}", "prompt_name")
        length = self.truncate_prompt_tokens
        if length is not None and not (_is_int(length) and -1 <= length <= MAX_COUNT and length != 0):
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or at least 1, got {length!r}", "truncate_prompt_tokens"
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
