"""Sampling parameters as command-line flags, for the commands that generate."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import number, whole_number

if TYPE_CHECKING:
    from penstock.messages.sampling_params import SamplingParams

_NUMBERS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_tokens": (whole_number, "N", "most tokens to generate (default: as many as the context holds)"),
    "temperature": (number, "X", "0 always takes the likeliest token"),
    "top_k": (whole_number, "N", "sample from the N likeliest tokens"),
    "top_p": (number, "X", "sample from the likeliest tokens with this total probability"),
    "min_p": (number, "X", "least probability of a token, relative to the likeliest one"),
    "repetition_penalty": (number, "X", "above 1: tokens of the prompt and the output become less likely"),
    "presence_penalty": (number, "X", "subtracted from the logits of tokens that were generated"),
    "frequency_penalty": (number, "X", "the same, for each time that a token was generated"),
}


def add_sampling_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: those of the checkpoint)")
    for name, (kind, metavar, text) in _NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, by the names of the API."""
    given = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    return given if args.stop is None else {**given, "stop": args.stop}


def check_sampling(args: argparse.Namespace) -> None:
    """Raises RequestError for a value out of bounds, before a model is loaded for it."""
    from penstock.messages.sampling_params import SamplingParams

    SamplingParams(**given_sampling(args))


def sampling_params(args: argparse.Namespace, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """The checkpoint's defaults with the flags on top. Raises RequestError for a value out of bounds."""
    return replace(defaults, **{"max_tokens": None, **given_sampling(args), **overrides})
