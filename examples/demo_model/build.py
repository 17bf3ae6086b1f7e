"""Builds the built-in model from scratch: tokenizer and data, training, export, evaluation.

    python examples/demo_model/build.py --out DIR

Each stage writes its result to the work folder (DIR.work) and is skipped if the result exists, so a stopped run
continues where it stopped. Naming one stage runs that stage again (the data stage only creates what is missing).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.bank import BankConfig, build_bank, load_bank
from recipe.tokenizer import load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    import torch
    from recipe.model import DemoModel

STAGES = ("data", "train", "export", "eval")


@dataclass(frozen=True)
class Paths:
    """Where a build keeps its files."""

    out: Path
    work: Path

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, before it is copied to `out`."""
        return self.work / "tokenizer.json"

    @property
    def bank(self) -> Path:
        """The folder of token shards."""
        return self.work / "bank"

    @property
    def weights(self) -> Path:
        """The weights in float32; the .json file beside it is written when training has ended."""
        return self.work / "weights.safetensors"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the Hugging Face files")
    add("--work", type=Path, help="folder for everything else; OUT.work if not given")
    add("--stage", choices=(*STAGES, "all"), default="all")
    add("--seed", type=int, default=0)
    add("--tokens", type=int, default=135_000_000, help="distinct generated tokens")
    add("--processes", type=int, default=os.cpu_count() or 1, help="processes that generate data")
    add("--tokenizer", type=Path, help="a tokenizer.json to use instead of training one")
    add("--init", type=Path, help="a model folder with the weights and the tokenizer to start from")
    add("--minutes", type=float, default=7.5, help="training time; the schedule is fitted to it")
    add("--steps", type=int, default=0, help="optimizer steps instead of minutes, to repeat a run exactly")
    add("--batch-rows", type=int, default=64, help="rows of 2,048 tokens per step")
    add("--code-share", type=float, default=0.16, help="share of rows that is standard-library code")
    add("--learning-rate", type=float, default=3e-3)
    add("--device", default="", help="torch device (default: the GPU if there is one)")
    add("--no-compile", action="store_true", help="train without torch.compile, which is used on a GPU only")
    add("--items", type=int, default=300, help="evaluation items per exam by teacher forcing")
    add("--free", type=int, default=16, help="evaluation items per exam by greedy generation")
    given = parser.parse_args(arguments)
    given.work = given.work or given.out.with_name(given.out.name + ".work")
    return given


def make_data(given: argparse.Namespace, paths: Paths) -> None:
    """Makes the tokenizer and the token bank."""
    paths.work.mkdir(parents=True, exist_ok=True)
    borrowed = given.init / "tokenizer.json" if given.init else given.tokenizer
    if borrowed:
        load_tokenizer(borrowed).save(str(paths.tokenizer))
    elif not paths.tokenizer.exists():
        print("data: training the tokenizer", flush=True)
        train_tokenizer(given.seed).save(str(paths.tokenizer))
    build_bank(bank_config(given), paths.tokenizer, paths.bank)


def bank_config(given: argparse.Namespace) -> BankConfig:
    """Returns the token bank's part of the command line."""
    return BankConfig(given.seed, given.tokens, given.processes)


def pick_device(given: argparse.Namespace) -> torch.device:
    """Returns the requested device, or the best one available."""
    import torch

    return torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def new_model(given: argparse.Namespace) -> DemoModel:
    """Returns a new, seeded model, or the one to start from."""
    import torch
    from recipe.export import load_exported
    from recipe.model import DemoModel, ModelConfig

    torch.manual_seed(given.seed)
    return load_exported(given.init) if given.init else DemoModel(ModelConfig())


def train(given: argparse.Namespace, paths: Paths) -> None:
    """Trains from the token bank to weights.safetensors."""
    from recipe.training import Batches, TrainConfig, Trainer

    device = pick_device(given)
    config = TrainConfig(
        seed=given.seed,
        steps=given.steps,
        minutes=given.minutes,
        batch_rows=given.batch_rows,
        code_share=given.code_share,
        learning_rate=given.learning_rate,
        compile=device.type == "cuda" and not given.no_compile,
    )
    rows, code = load_bank(bank_config(given), paths.bank)
    model = new_model(given).to(device)
    print(f"train: {rows.size / 1e6:.1f} M generated tokens, {code.size / 1e6:.1f} M of code, on {device}", flush=True)
    report = Trainer(model, Batches(rows, code, config, device), config, paths.weights).run()
    print(f"train: {json.dumps(report)}", flush=True)


def export_files(given: argparse.Namespace, paths: Paths) -> None:
    """Writes the Hugging Face folder."""
    from recipe.export import export
    from recipe.model import DemoModel, ModelConfig
    from safetensors.torch import load_file

    model = DemoModel(ModelConfig())
    model.load_state_dict(load_file(paths.weights))
    size = export(model, paths.tokenizer, given.out)
    print(f"export: {size / 1e6:.2f} MB in {given.out}", flush=True)


def evaluate_files(given: argparse.Namespace, paths: Paths) -> bool:
    """Evaluates the exported files, not the trained weights; writes evaluation.json to the work folder."""
    from recipe.evaluation import evaluate
    from recipe.export import load_exported

    model = load_exported(given.out).to(pick_device(given))
    report = evaluate(model, load_tokenizer(given.out / "tokenizer.json"), given.seed, given.items, given.free)
    text = json.dumps(report, indent=2)
    (paths.work / "evaluation.json").write_text(text + "\n")
    print(text)
    return report["passed"]


def main(arguments: list[str]) -> int:
    """Runs the stages; returns 1 if the model was evaluated and does not reach a promised threshold."""
    given = parse_arguments(arguments)
    paths = Paths(given.out, given.work)
    everything = given.stage == "all"
    if given.stage in ("data", "all"):
        make_data(given, paths)
    trained = paths.weights.with_suffix(".json").exists()
    if given.stage == "train" or (everything and not trained):
        train(given, paths)
    if given.stage in ("export", "all"):
        export_files(given, paths)
    if given.stage in ("eval", "all"):
        return 0 if evaluate_files(given, paths) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
