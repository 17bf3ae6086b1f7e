"""Functions that `tests.kernels.test_ahead` runs in separate processes, without TRITON_INTERPRET.

    python -m tests.kernels.ahead_cases FUNCTION ARGUMENTS...

prints what the function returns, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

CAPABILITY = 90
LIMITS = {"max_model_len": 450, "max_num_batched_tokens": 64, "max_num_seqs": 20, "num_gpu_blocks_override": 60}


def in_a_new_process(function: str, *arguments: object, **environment: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Nothing is computed, so consistency checks would fail.
    kept["PENSTOCK_DEBUG"] = "0"
    command = [sys.executable, "-m", __spec__.name, function, *map(json.dumps, arguments)]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def walked(device: str, engine_args: dict[str, Any]) -> list[str]:
    """Returns the variants that a walk requests, on tensors without memory or on those of a CPU."""
    import torch

    from penstock.kernels import dispatch
    from penstock.kernels.triton.capabilities import Capabilities
    from penstock.runner.gpu.ahead import dry_run
    from penstock.worker.compile_ahead import walk

    # A CPU that stands in for a GPU, though nothing is interpreted.
    dispatch.is_interpreted = lambda: device == "cpu"
    Capabilities.of = lambda device: Capabilities(tma=True, pdl=True)
    found: list[str] = []
    with dry_run(CAPABILITY, found.append):  # which returns None: nothing is compiled here
        walk(_config(engine_args), torch.device(device))
    return found


def served(engine_args: dict[str, Any]) -> list[str]:
    """Returns the variants that a whole engine requests under some traffic, with its scheduler and warm-up.

    Its tensors have no memory either. It is told that every token is 0 and no draft is accepted.
    """
    import numpy as np

    from penstock import LLM, SamplingParams
    from penstock.config.engine import EngineConfig
    from penstock.runner.gpu.ahead import dry_run
    from penstock.runner.gpu.sampling.outputs import CopiedOutput
    from penstock.runner.outputs import SampledArrays, make_output
    from penstock.worker import worker as worker_module

    def result(self: CopiedOutput) -> Any:
        host = self.host
        count, nothing = host.num_logits, np.zeros(len(host.sampling), dtype=np.int64)
        tokens, verdicts = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int8)
        return make_output(host, SampledArrays(tokens, verdicts, nothing, host.num_drafts))

    CopiedOutput.result = result
    worker_module.arithmetic = lambda config: "without a device"
    on_device = EngineConfig.on_device
    EngineConfig.on_device = lambda config, device: replace(on_device(config, "cpu"), device="meta")
    found: list[str] = []
    kinds = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.8, "top_k": 5, "seed": 1})
    with dry_run(CAPABILITY, found.append):
        llm = LLM(device="cpu", **LIMITS, **engine_args)
        for lengths in ((1,), (3, 200, 17), (5,) * 20):
            prompts = [list(range(10, 10 + length)) for length in lengths]
            params = [SamplingParams(max_tokens=9, ignore_eos=True, **kinds[n % 3]) for n in range(len(prompts))]
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            assert all(len(output.outputs[0].token_ids) == 9 for output in outputs), outputs
        llm.shutdown()
    return found


def decoded(device: str) -> list[str]:
    """Returns the variants of the fused decoder for all its buckets."""
    import torch

    from penstock.kernels.triton.capabilities import Capabilities
    from penstock.kernels.triton.linear import decode
    from penstock.kernels.triton.linear.tiles import Role
    from penstock.runner.gpu.ahead import dry_run

    found: list[str] = []
    uses = Capabilities(tma=True, pdl=True)
    with dry_run(CAPABILITY, found.append):

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device)

        out = decode.DecodeWeight(Role.OUT, empty(256, 512), None, uses)
        gate_up = decode.DecodeWeight(Role.GATE_UP, empty(2 * 768, 256), None, uses)
        for num_tokens in (1, 2, 16, 17, 33, 64):
            ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            stream = decode.prepare(ids, empty(1000, 256), empty(256), uses)
            stream = decode.linear_residual(out, empty(num_tokens, 512), stream, empty(256))
            decode.linear_silu(gate_up, stream, 1e-6)
    return found


def compile_two() -> dict[str, int]:
    """Requests two kernels in a dry run; returns how many were compiled and how many were found in the cache."""
    import torch
    import triton

    from penstock.kernels.triton.rms_norm import rms_norm
    from penstock.kernels.triton.silu_and_mul import silu_and_mul
    from penstock.runner.gpu.ahead import dry_run

    counts = {"compiled": 0, "found": 0}

    def listener(*, cache_hit: bool, **_: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    triton.knobs.compilation.listener = listener
    with dry_run(CAPABILITY, lambda variant: True):
        for rows in (3, 16):
            x = torch.empty((rows, 256), dtype=torch.bfloat16, device="meta")
            rms_norm(x, x[0], 1e-6)
            silu_and_mul(x)
    return counts


def reads() -> dict[str, Any]:
    """Returns what reads of a tensor without memory give."""
    import torch

    from penstock.runner.gpu.ahead import dry_run

    x = torch.empty((2, 3), device="meta")
    host = torch.zeros(3)
    found: dict[str, Any] = {}
    for mode in (False, True):
        with dry_run(CAPABILITY, lambda variant: False), torch.inference_mode(mode):
            found[f"{mode}"] = [
                x.tolist(),
                x[0, 0].item(),
                bool((x > 0).any()),
                x.cpu().sum().item(),
                (x[0] > 0).nonzero().shape[0],
                host.copy_(x[0]).tolist(),
                torch.equal(x, x),
                x.to(torch.int32).to("cpu").dtype == torch.int32,
                len(x.long().unique()),
                x.to("meta", torch.float16).is_meta,
            ]
    return found


def _config(engine_args: dict[str, Any]) -> Any:
    from penstock.config.engine import EngineArgs, resolve

    return replace(resolve(EngineArgs(**LIMITS, **engine_args)).on_device("cpu"), device="cuda")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))) + "\n")
