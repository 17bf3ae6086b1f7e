"""A process of the soak (`soak_run`) with a fault that the quiet reference does not have: `KIND FOLDER`.

- layer: layer 3 flips the lowest bit of one number when request 2 reaches position 20;
- weight: a bit of a packed weight of layer 4 is flipped after the checks at the start;
- table: the same in the rotary table;
- token: the tokens that request 1 gets are not those that were sampled;
- loss: request 1 gets no tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.engine import engine_core
from penstock.models.decoder import Decoder, DecoderLayer
from penstock.verify import soak_run
from penstock.verify.recording import PLAN, Plan
from penstock.worker import worker


def plant_in_layer() -> None:
    make_runner, run_layer = worker.make_runner, DecoderLayer.__call__
    running: list[str] = []
    layers: list[DecoderLayer] = []

    def made(*args: Any, **kwargs: Any) -> Any:
        runner = make_runner(*args, **kwargs)
        forward = runner.passes.forward
        layers[:] = runner.passes._model.layers

        def followed(batch: Any) -> Any:
            names = zip(batch.host.request_ids, batch.host.query_lens.tolist(), strict=True)
            running[:] = [name for name, count in names for _ in range(count)]
            return forward(batch)

        runner.passes.forward = followed
        return runner

    def faulty(self: DecoderLayer, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, ctx: Any) -> Any:
        out = run_layer(self, x, residual, positions, ctx)
        for row, (name, position) in enumerate(zip(running, positions.tolist(), strict=True)):
            if self is layers[3] and (name, position) == ("2", 20):
                out[row].view(torch.int16)[7] ^= 1
        return out

    worker.make_runner = made
    DecoderLayer.__call__ = faulty


def plant_in_tensor(choose: Any) -> None:
    load_model = worker.load_model

    def loaded(*args: Any) -> Any:
        result = load_model(*args)
        assert isinstance(result.model, Decoder)
        kept = choose(result.model)
        kept.view(-1).view(torch.uint8)[1000] ^= 1
        return result

    worker.load_model = loaded


def plant_in_tokens(change: Callable[[Sequence[int]], tuple[int, ...]]) -> None:
    step = engine_core.EngineCore.step

    def wrong(self: Any) -> Any:
        report = step(self)
        outputs = [
            msgspec.structs.replace(each, new_token_ids=change(each.new_token_ids)) if each.request_id == "1" else each
            for each in report.outputs
        ]
        return msgspec.structs.replace(report, outputs=tuple(outputs))

    engine_core.EngineCore.step = wrong  # pyright: ignore[reportAttributeAccessIssue]


def main(kind: str, folder: str) -> int:
    plan = msgspec.json.decode((Path(folder) / PLAN).read_bytes(), type=Plan)
    if plan.seed is not None:
        {
            "layer": plant_in_layer,
            "weight": lambda: plant_in_tensor(
                lambda model: model.layers[4].feed_forward.down.own._apply._into._packed.packed
            ),
            "table": lambda: plant_in_tensor(lambda model: model.rotary._made[0][-1]),
            "token": lambda: plant_in_tokens(lambda token_ids: tuple(token_id ^ 1 for token_id in token_ids)),
            "loss": lambda: plant_in_tokens(lambda token_ids: ()),
        }[kind]()
    return soak_run.main([folder])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
