"""A rank's part in LoRA: it loads adapters as the plans order, and tells the layers which rows have which one.

An adapter that cannot be loaded fails the requests that have it, and nothing else, also if other ranks have loaded it.
A later step that has such requests tries again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from penstock.messages.adapters import AdapterLoad
from penstock.messages.runner_output import ModelRunnerOutput
from penstock.messages.scheduler_output import SchedulerOutput
from penstock.models.lora import LoraModel
from penstock.runner.host_batch import HostBatch
from penstock.runner.outputs import PendingOutput
from penstock.runner.rows import Rows
from penstock.utils import logging

logger = logging.get_logger(__name__)


class LoraStep:
    """Lifecycle: one is built with the runner. Threading: the runner's thread."""

    def __init__(self, lora: LoraModel, rows: Rows) -> None:
        self._lora = lora
        self._rows = rows
        # The errors, and the loads that are tried again, by slot.
        self._errors: dict[int, tuple[str, AdapterLoad]] = {}
        self._failed: dict[str, str] = {}  # the requests of the current step

    def begin(self, plan: SchedulerOutput) -> None:
        """Called before the model's pass: loads the plan's adapters."""
        self._failed = {}
        for load in plan.adapter_loads:
            self._load(load)

    def set_rows(self, host: HostBatch) -> None:
        """Called when the step's rows are known."""
        slots = self._rows.adapter_slot[host.rows]
        self._lora.rows.set(np.repeat(slots, host.query_lens))
        for slot in self._errors.keys() & set(slots.tolist()):
            self._load(self._errors[slot][1])
        if self._errors:
            of_requests = zip(host.request_ids, slots.tolist(), strict=True)
            self._failed = {name: self._errors[slot][0] for name, slot in of_requests if slot in self._errors}

    def _load(self, load: AdapterLoad) -> None:
        self._errors.pop(load.slot, None)
        try:
            self._lora.load(load.slot, load.adapter)
        except Exception as error:
            logger.exception("the adapter %r cannot be loaded", load.adapter.name)
            self._lora.clear(load.slot)
            message = (
                f"the adapter {load.adapter.name!r} cannot be loaded: {error}. If the server's copy of it is damaged, "
                "load the adapter again"
            )
            self._errors[load.slot] = (message, load)

    def finish(self, output: PendingOutput) -> PendingOutput:
        """Returns the rank's output, with the errors of requests whose adapters are not here."""
        return _Failing(output, self._failed) if self._failed else output


@dataclass(frozen=True, slots=True)
class _Failing:
    output: PendingOutput
    failed: Mapping[str, str]

    def result(self) -> ModelRunnerOutput:
        found = self.output.result()
        return replace(found, failed_requests={**found.failed_requests, **self.failed})
