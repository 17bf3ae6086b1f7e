"""The built-in model's training ends in time, with its learning rate at the end of its schedule."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo_model"))

from recipe.bank import ANSWER, CONTEXT, TOKEN_BITS
from recipe.training import LAST_RATE, Batches, TrainConfig, Trainer

MINUTES = 1.0
RATE = 1e-3


class TimedModel(torch.nn.Module):
    """A model whose steps take no time, but advance the clock."""

    def __init__(self, clock: list[float], seconds: tuple[float, float]) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(4, 2))
        self.clock, self.seconds = clock, seconds
        self.num_steps = 0

    def loss(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, later = self.seconds
        self.clock[0] += first if self.num_steps < 100 else later
        self.num_steps += 1
        loss = (self.embedding - 1).square().sum() + 0 * (tokens.sum() + weights.sum())
        return loss, loss


@pytest.mark.parametrize("seconds", [(0.1, 0.1), (0.1, 0.4), (0.1, 0.05)], ids=["even", "slower", "faster"])
def test_a_training_ends_in_its_minutes(
    seconds: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    config = TrainConfig(0, 0, MINUTES, batch_rows=2, code_share=0.5, learning_rate=RATE, compile=False)
    cells = np.full((8, CONTEXT), 3 | ANSWER << TOKEN_BITS, dtype=np.uint16)
    model = TimedModel(clock, seconds)
    batches = Batches(cells, np.tile(cells.reshape(-1), 2), config, torch.device("cpu"))
    trainer = Trainer(model, batches, config, tmp_path / "weights.safetensors")  # pyright: ignore[reportArgumentType]
    report = trainer.run()
    assert report["steps"] == model.num_steps
    assert clock[0] <= 60 * MINUTES
    # Nothing is left of the time but a margin, unless steps become faster.
    assert seconds[1] < seconds[0] or clock[0] > 0.9 * 60 * MINUTES
    last_rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert max(last_rates) == pytest.approx(RATE * LAST_RATE, rel=0.1)
    assert json.loads((tmp_path / "weights.json").read_text())["steps"] == report["steps"]
