"""From the arguments to the configuration of this machine's device."""

from __future__ import annotations

from penstock.config.engine import EngineArgs, EngineConfig, resolve
from penstock.config.model_path import localise
from penstock.worker.parts import choose_device


def make_config(args: EngineArgs) -> EngineConfig:
    """Finds the model files, chooses the device and resolves the arguments. Raises ConfigError."""
    return resolve(localise(args), choose_device(args.device))
