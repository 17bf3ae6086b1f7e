"""Trains an EAGLE-3 head for the built-in model, or for another model of its recipe.

    python examples/demo_model/eagle3.py --out DIR

The data are the recipe's; the head learns the model's own distribution over their answers. Afterwards it drafts for the
model's greedy answers to held-out prompts, and the share of accepted drafts is printed by position.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from recipe.bank import ANSWER, TOKEN_BITS, BankConfig, build_bank, load_bank
from recipe.tokenizer import load_tokenizer
from tqdm import tqdm

if TYPE_CHECKING:
    from recipe.eagle3 import Eagle3Head
    from recipe.model import DemoModel

BUILT_IN = Path(__file__).parents[2] / "src/penstock/demo"
WARMUP_SHARE = 0.03
REPORT_EVERY = 20
MEASURED = ("list_copy", "lists", "json", "records", "tool_call", "python")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, default=BUILT_IN, help="folder of the model to draft for")
    add("--out", type=Path, required=True, help="folder for model.safetensors and config.json")
    add("--bank", type=Path, help="folder of the token bank; OUT.work/bank if not given")
    add("--tokens", type=int, default=12_000_000, help="distinct generated tokens")
    add("--processes", type=int, default=os.cpu_count() or 1, help="processes that generate data")
    add("--minutes", type=float, default=12.0, help="training time; the schedule is fitted to it")
    add("--layers", type=int, nargs="+", default=[2, 4, 6], help="layers whose inputs the head reads")
    add("--passes", type=int, default=3, help="number of passes of the head in training and measurement")
    add("--batch-rows", type=int, default=2, help="rows per step")
    add("--row-length", type=int, default=512, help="tokens per row: a divisor of the bank's 2,048")
    add("--learning-rate", type=float, default=2e-3)
    add("--items", type=int, default=8, help="held-out prompts per task to measure on")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="torch device")
    return parser.parse_args()


def batches(rows: np.ndarray, num_rows: int, seed: int) -> Iterator[np.ndarray]:
    """Yields [num_rows, row_length] uint16 cells, in a new order every epoch."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(rows))
        for at in range(0, len(rows) - num_rows + 1, num_rows):
            yield rows[order[at : at + num_rows]]


def train(head: Eagle3Head, target: DemoModel, rows: np.ndarray, given: argparse.Namespace) -> None:
    """Trains with AdamW over the given minutes: a short warm-up, then a linear decay to zero."""
    import torch
    from recipe.eagle3 import loss

    optimizer = torch.optim.AdamW(head.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01)
    is_narrow = target.model.norm.weight.dtype == torch.bfloat16
    recent: list[float] = []
    began = time.monotonic()
    with tqdm(desc="train", unit="step", mininterval=5) as progress:
        for batch in batches(rows, given.batch_rows, given.seed):
            done = (time.monotonic() - began) / (60 * given.minutes)
            if done >= 1:
                return
            optimizer.param_groups[0]["lr"] = given.learning_rate * min(1.0, done / WARMUP_SHARE, 1 - done)
            cells = torch.from_numpy(batch.astype(np.int64)).to(given.device)
            with torch.autocast(cells.device.type, torch.bfloat16, enabled=is_narrow):
                value = loss(head, target, cells & (2**TOKEN_BITS - 1), cells >> TOKEN_BITS == ANSWER, given.passes)
            value.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            recent.append(value.item())
            progress.update()
            if len(recent) == REPORT_EVERY:
                progress.set_postfix(loss=f"{np.mean(recent):.4f}", done=f"{done:.0%}")
                recent.clear()


def measure(head: Eagle3Head, target: DemoModel, given: argparse.Namespace) -> dict[str, list[float]]:
    """Returns task -> share of drafts accepted at each position, with drafting started after every token."""
    import torch
    from recipe.eagle3 import right_guesses
    from recipe.evaluation import generate, questions
    from recipe.tasks.table import EXAMS

    tokenizer = load_tokenizer(given.model / "tokenizer.json")
    accepted: dict[str, list[float]] = {}
    for exam in tqdm([exam for exam in EXAMS if exam.name in MEASURED], desc="measure", unit="task"):
        prompts = [q.prompt for q in questions(exam, tokenizer, given.seed, given.items)]
        answers = generate(target, prompts, 64)
        texts = [(torch.tensor(p + a, device=given.device), len(p)) for p, a in zip(prompts, answers, strict=True)]
        right = torch.cat([right_guesses(head, target, text, first, given.passes) for text, first in texts])
        accepted[exam.name] = [round(share, 3) for share in right.float().mean(0).tolist()]
    return accepted


def main() -> None:
    """Makes the data, trains the head, writes its files and measures it."""
    given = parse_arguments()
    bank = BankConfig(given.seed, given.tokens, given.processes)
    folder = given.bank or given.out.with_name(given.out.name + ".work") / "bank"
    build_bank(bank, given.model / "tokenizer.json", folder)

    import torch
    from recipe.eagle3 import Eagle3Head, export
    from recipe.export import load_exported

    torch.manual_seed(given.seed)
    rows, _ = load_bank(bank, folder)
    # Without instructions for bfloat16, a CPU takes about ten times as long for it as for float32.
    found = torch.cpu.get_capabilities()
    is_slow = given.device == "cpu" and not (found.get("avx512_bf16") or found.get("bf16"))
    dtype = torch.float32 if is_slow else torch.bfloat16
    target = load_exported(given.model).to(given.device, dtype).requires_grad_(requires_grad=False)
    head = Eagle3Head(target.config, tuple(given.layers)).to(given.device)
    train(head, target, rows.reshape(-1, given.row_length), given)
    size = export(head, given.out)
    print(f"{size / 1e6:.2f} MB in {given.out}")
    print(json.dumps(measure(head.to(dtype), target, given), indent=2))


if __name__ == "__main__":
    main()
