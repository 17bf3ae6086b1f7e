"""Training: AdamW on rows of the token bank, with a schedule that fits a number of steps or of minutes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from recipe.bank import ANSWER, CONTEXT, PADDING, TOKEN_BITS
from recipe.model import MTP_LOSS_WEIGHT, PROMPT_LOSS_WEIGHT, DemoModel

WARMUP_STEPS = 200
FLAT_UNTIL = 0.3
LAST_RATE = 0.02
TIMED_FROM = 3  # the step from which on steps are timed, after compilation
TIMED_TO = 40  # and the last timed one, unless a tenth of the time has passed before
UNDECIDED = 1_000_000  # the number of steps until it is known how many fit
REPORT_EVERY = 20
SAVE_EVERY_SECONDS = 60.0


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Attributes:
        seed: seed of the weights and of the order of rows.
        steps: optimizer steps; 0 chooses as many as fit `minutes`.
        minutes: training time, compilation included; used only if `steps` is 0.
        batch_rows: rows per step, of 2,048 tokens each.
        code_share: the share of a batch's rows that is standard-library code.
        learning_rate: the peak learning rate.
        compile: whether to compile the loss with torch.compile.
    """

    seed: int
    steps: int
    minutes: float
    batch_rows: int
    code_share: float
    learning_rate: float
    compile: bool


class Batches:
    """Batches of generated rows, each row once per epoch, and of windows of code from random places.

    The cells are on the training device; a bank of 135 M tokens takes 270 MB.
    """

    def __init__(self, rows: np.ndarray, code: np.ndarray, config: TrainConfig, device: torch.device) -> None:
        # Every device can index and widen int16; the sign bit is unused because a cell has fourteen bits.
        self.rows = torch.from_numpy(rows.view(np.int16)).to(device)  # [num_rows, CONTEXT] int16
        self.code = torch.from_numpy(code.view(np.int16)).to(device)  # [num_code_tokens] int16
        self.num_code = round(config.batch_rows * config.code_share)
        self.num_rows = min(config.batch_rows - self.num_code, len(rows))
        self.random = torch.Generator().manual_seed(config.seed)
        self.order = torch.randperm(len(rows), generator=self.random)
        self.taken = 0
        weights = torch.zeros(4)
        weights[[PADDING, ANSWER]] = torch.tensor([0.0, 1.0])
        weights[1] = PROMPT_LOSS_WEIGHT
        self.weight_of_kind = weights.to(device)  # [4] float32

    def next(self) -> tuple[Tensor, Tensor]:
        """Returns tokens [batch_rows, CONTEXT] int64 and their weights, float32."""
        if self.taken + self.num_rows > len(self.order):
            self.order = torch.randperm(len(self.order), generator=self.random)
            self.taken = 0
        chosen = self.order[self.taken : self.taken + self.num_rows].to(self.rows.device)
        self.taken += self.num_rows
        starts = torch.randint(len(self.code) - CONTEXT, (self.num_code, 1), generator=self.random)
        windows = (starts + torch.arange(CONTEXT)).to(self.code.device)
        cells = torch.cat([self.rows[chosen], self.code[windows]]).long()
        return cells & (2**TOKEN_BITS - 1), self.weight_of_kind[cells >> TOKEN_BITS]


def rate_at(step: int, num_steps: int) -> float:
    """Returns a step's learning rate as a share of the peak: warm-up, flat, then a cosine down to LAST_RATE."""
    warmup = min(WARMUP_STEPS, max(1, num_steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    flat_until = max(warmup, FLAT_UNTIL * num_steps)
    if step < flat_until:
        return 1.0
    done = (step - flat_until) / max(1.0, num_steps - flat_until)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_optimizer(model: DemoModel, learning_rate: float) -> torch.optim.AdamW:
    """Returns AdamW with weight decay for matrices and without it for norms."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)


class Trainer:
    """One training run.

    Args:
        model: already on its device; trained in place.
        batches: the training data.
        config: the training configuration.
        checkpoint: the file to which the weights are saved every minute and at the end, so that a killed run leaves a
            model.
    """

    def __init__(self, model: DemoModel, batches: Batches, config: TrainConfig, checkpoint: Path) -> None:
        self.model = model
        self.batches = batches
        self.config = config
        self.checkpoint = checkpoint
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, config.learning_rate)
        self.loss = torch.compile(model.loss) if config.compile else model.loss
        self.recent: list[Tensor] = []  # [2] each: the losses since the last report, left on the device

    def run(self) -> dict[str, float]:
        """Trains to the end of the schedule.

        Returns:
            Steps, tokens, seconds, tokens per second and the last report's losses; also written beside the checkpoint.
        """
        began = last_save = time.monotonic()
        num_steps = self.config.steps or UNDECIDED
        timed_from = began
        step = 0
        losses = [math.nan, math.nan]
        with tqdm(total=num_steps, desc="train", unit="step", mininterval=5) as progress:
            while step < num_steps:
                self._step(step, num_steps)
                step += 1
                if step == TIMED_FROM:
                    timed_from = self._now()
                if num_steps == UNDECIDED and self._is_timed(step, timed_from):
                    num_steps = self._fitting_steps(step, began, timed_from)
                    progress.total = num_steps
                progress.update()
                if step % REPORT_EVERY == 0 or step == num_steps:
                    losses = torch.stack(self.recent).mean(0).tolist()
                    self.recent.clear()
                    if num_steps != UNDECIDED and not self.config.steps:
                        # A device that became slower, so that the learning rate still falls to its end.
                        num_steps = min(num_steps, self._fitting_steps(step, began, timed_from))
                        progress.total = num_steps
                    tokens_per_second = step * self._tokens_per_step() / (time.monotonic() - began)
                    progress.set_postfix(
                        loss=f"{losses[0]:.4f}", mtp=f"{losses[1]:.4f}", tokens_per_s=f"{tokens_per_second:.3g}"
                    )
                    if time.monotonic() - last_save > SAVE_EVERY_SECONDS:
                        self.save()
                        last_save = time.monotonic()
                if self._out_of_time(began):
                    break
        seconds = self._now() - began
        self.save()
        report = {
            "steps": step,
            "tokens": step * self._tokens_per_step(),
            "seconds": round(seconds, 1),
            "tokens_per_second": round(step * self._tokens_per_step() / seconds),
            "loss": losses[0],
            "mtp_loss": losses[1],
        }
        described = {**asdict(self.config), **report, "torch": torch.__version__, "device": self.device.type}
        self.checkpoint.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n")
        return report

    def _tokens_per_step(self) -> int:
        return (self.batches.num_rows + self.batches.num_code) * CONTEXT

    def _step(self, step: int, num_steps: int) -> None:
        rate = self.config.learning_rate * rate_at(step, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, weights = self.batches.next()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            main, mtp = self.loss(tokens, weights)
        (main + MTP_LOSS_WEIGHT * mtp).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.recent.append(torch.stack([main.detach(), mtp.detach()]))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()

    def _is_timed(self, step: int, timed_from: float) -> bool:
        """Returns whether enough steps have been timed to determine how many fit."""
        slow = time.monotonic() - timed_from > 6 * self.config.minutes
        return step == TIMED_TO or (step > TIMED_FROM and slow)

    def _fitting_steps(self, step: int, began: float, timed_from: float) -> int:
        """Returns the total number of steps that fit the minutes, with a margin for saving and slower steps."""
        now = self._now()
        step_seconds = (now - timed_from) / (step - TIMED_FROM)
        left = self.config.minutes * 60 * 0.97 - (now - began)
        return step + max(1, int(left / step_seconds))

    def _out_of_time(self, began: float) -> bool:
        return not self.config.steps and time.monotonic() - began > self.config.minutes * 60

    def save(self) -> None:
        """Writes the weights in float32 with their checkpoint names, atomically."""
        from safetensors.torch import save_file

        partial = self.checkpoint.with_suffix(".partial")
        save_file({name: p.detach().cpu().contiguous() for name, p in self.model.state_dict().items()}, partial)
        partial.rename(self.checkpoint)
