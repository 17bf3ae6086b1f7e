"""`penstock chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from penstock.cli.dataclass_args import add_engine_args, engine_kwargs
from penstock.cli.sampling_args import add_sampling_args, sampling_params
from penstock.messages.sampling_params import SamplingParams
from penstock.utils.errors import RequestError

_HELP = "Ctrl-C stops an answer, /clear forgets the conversation, /exit or Ctrl-D leaves."


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "chat", help="talk to a model in the terminal", description=f"Talk to a model. {_HELP}"
    )
    parser.add_argument("--system", help="a system message to begin with")
    add_sampling_args(parser)
    add_engine_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    # Imported here: the help text needs no torch.
    from penstock.frontend.llm import LLM

    llm = LLM(**engine_kwargs(args))
    try:
        params = sampling_params(args, llm.get_default_sampling_params())
        _enable_line_editing()
        print(_HELP, file=sys.stderr)
        _converse(llm, params, [] if args.system is None else [{"role": "system", "content": args.system}])
    finally:
        llm.shutdown()
    return 0


def _enable_line_editing() -> None:
    """Makes `input` editable with the arrow keys, where the platform has readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return


def _converse(llm: Any, params: SamplingParams, opening: list[dict[str, str]]) -> None:
    messages = list(opening)
    while (line := _ask()) is not None:
        if line == "/exit":
            return
        if line == "/clear":
            messages = list(opening)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, messages, params)
        except RequestError as error:
            # The conversation goes on without the message that did not fit.
            messages.pop()
            print(f"penstock: {error} (/clear forgets the conversation)", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str | None:
    """One line; None at the end of input. Ctrl-C at the prompt clears the line."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except UnicodeDecodeError:
            print("penstock: the input is not UTF-8 text", file=sys.stderr)
        except KeyboardInterrupt:
            print()


def _answer(llm: Any, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Streams the answer; Ctrl-C ends it where it is."""
    prompt = {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(messages)}
    text, shown = "", 0
    stream = llm.stream(prompt, params)
    try:
        for output in stream:
            text = output.outputs[0].text
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
            if output.error:
                print(f"penstock: {output.error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()
    print()
    return text
