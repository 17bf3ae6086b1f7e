"""Evaluates a built-in model's folder on held-out items and prints a JSON report.

    python examples/demo_model/evaluate.py --model DIR

Any checkpoint of the recipe's architecture and special tokens can be evaluated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    """Returns 0 if every promised threshold is reached, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the Hugging Face files")
    parser.add_argument("--items", type=int, default=300, help="items per exam by teacher forcing")
    parser.add_argument("--free", type=int, default=8, help="items per exam by greedy generation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="", help="torch device (default: the GPU if there is one)")
    given = parser.parse_args()

    import torch
    from recipe.evaluation import evaluate
    from recipe.export import load_exported
    from recipe.tokenizer import load_tokenizer

    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_exported(given.model).to(device)
    tokenizer = load_tokenizer(given.model / "tokenizer.json")
    report = evaluate(model, tokenizer, given.seed, given.items, given.free)
    print(json.dumps(report, indent=2))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
