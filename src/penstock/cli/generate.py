"""`penstock generate`: one completion, streamed to the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli.dataclass_args import add_engine_args, add_model_argument
from penstock.cli.sampling_args import add_sampling_args, check_sampling, sampling_params
from penstock.cli.startup import start_llm
from penstock.utils.clock import SystemClock
from penstock.utils.errors import PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.messages.outputs import RequestOutput
    from penstock.messages.sampling_params import SamplingParams

DESCRIPTION = """\
Completes a prompt and prints the text as it is generated. All other
output goes to standard error, so that a pipe receives only the text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "penstock generate [MODEL] --prompt TEXT [flags]"
    add_model_argument(parser)
    group = parser.add_argument_group("prompt and output")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    group.add_argument("--chat", action="store_true", help="send the prompt as a user message, by the chat template")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_sampling_args(parser)
    add_engine_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_sampling(args)
    text = _read_prompt(args.prompt)
    started = SystemClock().now()
    llm = start_llm(args)
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
        print("Type a prompt and end it with Ctrl-D on an empty line:", file=sys.stderr)
    try:
        text = (sys.stdin.buffer.read().decode() if prompt is None else prompt).rstrip("\n")
    except UnicodeDecodeError:
        raise RequestError("standard input is not UTF-8 text", "prompt") from None
    if not text:
        raise RequestError("the prompt is empty: pass --prompt TEXT, or pipe text to standard input", "prompt")
    return text


def _stream(llm: Any, prompt: Any, params: SamplingParams, started: float) -> None:
    """Prints the text as it is generated, then statistics on standard error."""
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
    assert output is not None and first_token is not None, "a stream yields at least one output"
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
