"""Sampling parameters as command-line flags, for the commands that generate."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from penstock.messages.sampling_params import SamplingParams

_NUMBERS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate; without it, as many as the context holds"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "draw from the k likeliest tokens"),
    "top_p": (float, "draw from the likeliest tokens that reach this mass"),
    "min_p": (float, "draw from tokens at least this part as likely as the likeliest"),
    "repetition_penalty": (float, "above 1 discourages tokens already there"),
    "presence_penalty": (float, "subtracted from tokens already generated"),
    "frequency_penalty": (float, "subtracted for every time a token was generated"),
}


def add_sampling_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults: what the checkpoint recommends)")
    for name, (kind, text) in _NUMBERS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar=name.upper(), help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")


def sampling_params(args: argparse.Namespace, defaults: SamplingParams, **overrides: Any) -> SamplingParams:
    """The checkpoint's defaults with the flags on top. Raises RequestError for a value out of bounds."""
    given = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    given.setdefault("max_tokens", None)
    return replace(defaults, **given, stop=args.stop, **overrides)
