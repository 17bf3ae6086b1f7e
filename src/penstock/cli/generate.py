"""`penstock generate`: one completion, streamed to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from penstock.cli.dataclass_args import add_engine_args, engine_kwargs
from penstock.cli.sampling_args import add_sampling_args, sampling_params
from penstock.messages.outputs import RequestOutput
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.clock import SystemClock
from penstock.utils.errors import PenstockError, RequestError


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate", help="complete a prompt", description="Completes a prompt and streams the tokens."
    )
    parser.add_argument("--prompt", help="the prompt; read from standard input without it")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user message through the chat template"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    add_sampling_args(parser)
    add_engine_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    text = _read_prompt(args.prompt)
    started = SystemClock().now()
    # Imported here: the help text needs no torch, and its time belongs to the start.
    from penstock.frontend.llm import LLM

    llm = LLM(**engine_kwargs(args))
    try:
        params = sampling_params(args, llm.get_default_sampling_params())
        prompt: Any = text
        if args.chat:
            tokens = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": text}])
            prompt = {"prompt_token_ids": tokens}
        if args.json:
            (output,) = llm.generate(prompt, params)
            print(json.dumps(asdict(output)))
            _check_error(output)
        else:
            _stream(llm, prompt, params, started)
    finally:
        llm.shutdown()
    return 0


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        print("Type a prompt, then Ctrl-D:", file=sys.stderr)
    try:
        text = (sys.stdin.buffer.read().decode() if prompt is None else prompt).rstrip("\n")
    except UnicodeDecodeError:
        raise RequestError("standard input is not UTF-8 text", "prompt") from None
    if not text:
        raise RequestError("the prompt is empty: pass --prompt or pipe text in", "prompt")
    return text


def _stream(llm: Any, prompt: Any, params: SamplingParams, started: float) -> None:
    """Prints text as it comes; the figures go to standard error, so that a pipe receives the text alone."""
    clock = SystemClock()
    submitted = clock.now()
    first_token = None
    shown = 0
    output: RequestOutput | None = None
    for changed in llm.stream(prompt, params):
        output = changed
        first_token = first_token or clock.now()
        text = changed.outputs[0].text
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)
    sys.stdout.write("\n")
    sys.stdout.flush()
    assert output is not None and first_token is not None, "a stream yields at least its end"
    _check_error(output)
    print(_figures(output, started, submitted, first_token, clock.now()), file=sys.stderr)


def _check_error(output: RequestOutput) -> None:
    if output.error:
        raise PenstockError(output.error)


def _figures(output: RequestOutput, started: float, submitted: float, first_token: float, now: float) -> str:
    completion = output.outputs[0]
    count = len(completion.token_ids)
    decode = f"{(count - 1) / (now - first_token):.1f} tokens/s" if count > 1 and now > first_token else "one token"
    return (
        f"[{len(output.prompt_token_ids)} prompt tokens, {count} generated ({completion.finish_reason}): {decode}; "
        f"first token {first_token - submitted:.2f} s after the prompt, {first_token - started:.2f} s after start]"
    )
