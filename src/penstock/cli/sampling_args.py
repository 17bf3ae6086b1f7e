"""Sampling parameters as command-line flags, for the commands that generate."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import number, whole_number

if TYPE_CHECKING:
    from penstock.messages.sampling_params import SamplingParams

NUMBERS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_tokens": (whole_number, "N", "maximum tokens to generate (default: as many as fit into the context)"),
    "temperature": (number, "X", "0 always takes the most likely token"),
    "top_k": (whole_number, "N", "sample from the N most likely tokens"),
    "top_p": (number, "X", "sample from the most likely tokens with this total probability"),
    "min_p": (number, "X", "minimum probability of a token, relative to the most likely one"),
    "repetition_penalty": (number, "X", "above 1: makes tokens of the prompt and the output less likely"),
    "presence_penalty": (number, "X", "subtracted from the logits of tokens that were generated"),
    "frequency_penalty": (number, "X", "the same, for each time that a token was generated"),
}


def add_sampling_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: those of the checkpoint)")
    for name, (kind, metavar, text) in NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling flags that were given, under their API names."""
    given = {name: getattr(args, name) for name in NUMBERS if getattr(args, name) is not None}
    return given if args.stop is None else {**given, "stop": args.stop}


def check_sampling(args: argparse.Namespace) -> None:
    """Raises RequestError for a value out of bounds, before a model is loaded."""
    from penstock.messages.sampling_params import SamplingParams

    SamplingParams(**given_sampling(args))


def sampling_params(args: argparse.Namespace, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """Returns the checkpoint's defaults, overridden by the flags. Raises RequestError for a value out of bounds."""
    return replace(defaults, **{"max_tokens": None, **given_sampling(args), **overrides})
