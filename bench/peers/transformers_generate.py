"""The workload through the `generate` of transformers, which OpenVINO's models have too."""

from __future__ import annotations

from typing import Any

import torch
from workload import Generate, Report


def generate_with(model: Any) -> Generate:
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(batch: list[list[int]], num_tokens: int, report: Report) -> None:
        def after_each_token(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            report(range(len(batch)))
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(batch)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            stopping_criteria=[after_each_token],
        )

    return generate
