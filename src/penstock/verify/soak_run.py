"""One process of the soak: builds an engine, runs its rounds, and writes what it computed as digests.

    python -m penstock.verify.soak_run FOLDER [OTHER]

runs the plan in `FOLDER/plan.json` and writes the other files of a recording next to it, or all of them to `OTHER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.config.engine import EngineArgs, ExecutionConfig, resolve
from penstock.engine.build import build_engine
from penstock.engine.engine_core import EngineCore
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.models.decoder import Decoder
from penstock.utils.errors import ConfigError
from penstock.verify.matrix import Answer, drive
from penstock.verify.recording import PLAN, ROWS, START, Plan, Round, Start, save_rows
from penstock.verify.rows import Seen
from penstock.verify.watch import Watch, tensor_digests
from penstock.worker import worker
from penstock.worker.parts import make_parts


def main(arguments: list[str]) -> int:
    source, folder = Path(arguments[0]), Path(arguments[-1])
    plan_json = (source / PLAN).read_bytes()
    plan = msgspec.json.decode(plan_json, type=Plan)
    folder.mkdir(exist_ok=True)
    (folder / PLAN).write_bytes(plan_json)
    caught = _catch_parts()
    engine = build_engine(resolve(EngineArgs.from_kwargs(**plan.engine, num_threads=plan.num_start_threads)))
    model = caught["load_model"].model
    if not isinstance(model, Decoder):
        raise ConfigError(f"the soak does not support {type(model).__name__}")
    tensors, num_layers = tensor_digests(model), len(model.layers)
    watch = Watch(model, caught["make_runner"].passes)
    for each in plan.rounds:
        _run(engine.core, plan, each, watch)
    start = Start(
        arithmetic=make_parts(torch.device("cpu")).arithmetic(engine.config.execution),
        num_layers=num_layers,
        tensors=tensors,
        tensors_at_end=tensor_digests(model),
        num_rows=watch.num_rows,
        num_preemptions=engine.core.stats().num_preemptions,
    )
    engine.core.shutdown()
    save_rows(watch.rows, folder / ROWS)
    (folder / START).write_bytes(msgspec.json.format(msgspec.json.encode(start)))
    return 0


def _catch_parts() -> dict[str, Any]:
    """Collects the worker's parts as they are built, by the name of the function that made them."""
    caught: dict[str, Any] = {}

    def catch(name: str) -> None:
        make = getattr(worker, name)

        def made(*args: Any, **kwargs: Any) -> Any:
            caught[name] = make(*args, **kwargs)
            return caught[name]

        setattr(worker, name, made)

    catch("load_model")
    catch("make_runner")
    return caught


def _run(core: EngineCore, plan: Plan, each: Round, watch: Watch) -> None:
    make_parts(torch.device("cpu")).set_up(ExecutionConfig(num_threads=each.num_threads), 1)
    if each.forgets:
        assert core.reset_prefix_cache(), "blocks are held at idle"
    requests = [_request(number, plan) for number in each.order]
    answers = {request.request_id: Answer() for request in requests}
    for _ in drive(core, requests, each.num_at_once, answers, Seen()):
        pass
    core.check_integrity()
    for number in each.order:
        answer, last = answers[str(number)], len(plan.prompts[number]) - 1
        # Only what both processes have recorded is compared.
        assert len(answer.token_ids) == plan.max_tokens[number], f"request {number} ended too early: {answer.ending}"
        for offset, token_id in enumerate(answer.token_ids):
            watch.add_token(number, last + offset, token_id)


def _request(number: int, plan: Plan) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=plan.prompts[number],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=plan.max_tokens[number], ignore_eos=True),
        max_tokens=plan.max_tokens[number],
        seed=0,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
