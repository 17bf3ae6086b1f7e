"""What balancing experts changes: the time of a step under a skewed load, before, after and while experts move.

    python bench/balancing.py [--layers 4] [--batch 32] [--prompt 256] [--steps 60] [--rounds 6]
                             [--interval 40]

A mixture of experts with random weights, whose router prefers the first half of the experts, is served by two engines
with two ranks each, of one thread: one keeps its experts where they are, so that the first rank computes nearly
everything; the other one balances. They take turns. "peak" is the highest load of a rank in proportion to the mean.
The last lines compare steps in which ranks reported moved experts with those of the other engine at the same time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock import LLM, SamplingParams

HIDDEN, INNER, EXPERTS, TOP_K, VOCAB = 1024, 512, 64, 8, 512
PREFERENCE = 4.0


def make_checkpoint(folder: Path, num_layers: int) -> None:
    """Writes a Qwen3-MoE whose router chooses only experts of the first half."""
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN) * 50, "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(num_layers):
        name = f"model.layers.{layer}"
        for norm, size in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", 128),
            ("self_attn.k_norm", 128),
        ):
            tensors[f"{name}.{norm}.weight"] = torch.ones(size)
        for part, rows, columns in (("q", 1024, HIDDEN), ("k", 256, HIDDEN), ("v", 256, HIDDEN), ("o", HIDDEN, 1024)):
            tensors[f"{name}.self_attn.{part}_proj.weight"] = weight(rows, columns)
        router = weight(EXPERTS, HIDDEN)
        router[: EXPERTS // 2] *= PREFERENCE
        tensors[f"{name}.mlp.gate.weight"] = router
        for expert in range(EXPERTS):
            for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
                tensors[f"{name}.mlp.experts.{expert}.{part}_proj.weight"] = weight(rows, columns)
    save_file({name: each.to(torch.bfloat16) for name, each in tensors.items()}, folder / "model.safetensors")


Step = tuple[float, int, bool]
"""Seconds, tokens, and whether the ranks reported moved experts."""


class Engine:
    """An engine whose steps are timed."""

    def __init__(self, folder: Path, batch: int, prompt: int, **options: Any) -> None:
        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            enable_expert_parallel=True,
            distributed_executor_backend="mp",
            async_scheduling=False,
            num_threads=1,
            max_model_len=1024,
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, prompt),
            enable_prefix_caching=False,
            **options,
        )
        self.steps: list[Step] = []
        self._step = self.llm._core.step
        self.llm._core.step = self._timed_step

    def _timed_step(self, **options: Any) -> Any:
        before, started = self.llm.stats().experts.num_moved, time.perf_counter()
        report = self._step(**options)
        is_moving = self.llm.stats().experts.num_moved > before
        self.steps.append((time.perf_counter() - started, report.num_tokens, is_moving))
        return report

    def run(self, count: int, length: int, num_tokens: int) -> list[Step]:
        """Generates, and returns the steps."""
        rng = random.Random(0)
        prompts = [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(count)]
        self.steps = []
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self.llm.generate(prompts, params, use_tqdm=False)
        return self.steps

    def peak(self, which: str) -> float:
        return statistics.mean(getattr(self.llm._core.expert_map(), which).peaks)


def taken_by(steps: list[Step], num_tokens: int) -> list[float]:
    """Returns the seconds of the steps with so many tokens."""
    return [seconds for seconds, count, _ in steps if count == num_tokens]


def median_ms(steps: list[float]) -> float:
    return 1e3 * statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="of a round's decoding")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--interval", type=int, default=40, help="steps between two plans")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), args.layers)
        fixed = Engine(Path(folder), args.batch, args.prompt)
        balancing = {"window_size": args.interval, "step_interval": args.interval}
        moving = Engine(Path(folder), args.batch, args.prompt, enable_eplb=True, eplb_config=balancing)
        still: list[Step] = []
        balanced: list[Step] = []
        while len(balanced) < 3 * args.interval or any(is_moving for _, _, is_moving in balanced[-args.interval :]):
            still += fixed.run(args.batch, 4, 20)
            balanced += moving.run(args.batch, 4, 20)
        decode: dict[Engine, list[float]] = {fixed: [], moving: []}
        prefill: dict[Engine, list[float]] = {fixed: [], moving: []}
        for _ in range(args.rounds):
            for engine in (fixed, moving):
                decode[engine] += taken_by(engine.run(args.batch, 4, args.steps), args.batch)
                prefill[engine] += taken_by(engine.run(1, args.prompt, 1), args.prompt)
        print(f"peak {moving.peak('before'):.2f} before balancing, {moving.peak('now'):.2f} after")
        for name, found in (("decode", decode), ("prefill", prefill)):
            old, new = median_ms(found[fixed]), median_ms(found[moving])
            print(f"{name}: {old:.2f} ms a step, balanced {new:.2f} ms: {old / new:.2f} times as fast")
        moves = taken_by([step for step in balanced if step[2]], args.batch)
        others = taken_by(still, args.batch)
        print(
            f"{moving.llm.stats().experts.num_moved} experts moved, {len(moves)} steps: median {median_ms(moves):.2f}, "
            f"highest {1e3 * max(moves):.2f} ms"
        )
        print(f"steps without moves: median {median_ms(others):.2f}, highest {1e3 * max(others):.2f} ms")
        fixed.llm.shutdown()
        moving.llm.shutdown()


if __name__ == "__main__":
    main()
