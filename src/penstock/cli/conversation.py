"""The conversation of `penstock chat`: reads messages and commands, prints answers, drops the oldest turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from penstock.cli.chat_models import CONTEXT_FULL, ChatModel, Message
from penstock.cli.startup import announce
from penstock.utils.errors import EngineDeadError, PenstockError, RequestError
from penstock.utils.names import nearest

_HELP = '''\
/help    shows this
/clear   forgets the conversation
/exit    leaves, as Ctrl-D does
Ctrl-C   stops an answer, or discards the line you are typing
A line that ends with \\ continues in the next one; """ begins and ends a message
of several lines. A message that begins with / is written with a space before it.'''
_PROMPT, _CONTINUED = "> ", ". "
_QUOTES = '"""'
# Tokens to keep free for the answer by dropping the oldest turns, at most a share of the context.
_ANSWER_TOKENS, _ANSWER_PART = 256, 4


class Conversation:
    """The messages so far, and the loop that asks and answers."""

    def __init__(self, model: ChatModel, opening: list[Message], max_tokens: int | None) -> None:
        self._model = model
        self._opening = opening
        self._max_tokens = max_tokens
        self._messages = list(opening)
        self._commands: dict[str, Callable[[], None]] = {"/help": lambda: print(_HELP), "/clear": self._clear}

    def run(self) -> None:
        """Asks and answers until the end of the input or /exit. Raises EngineDeadError."""
        while (text := read_message()) is not None:
            command = text.strip()
            if command == "/exit":
                return
            if text.startswith("/"):
                self._run_command(command)
            elif command:
                self._turn(command)

    def _run_command(self, command: str) -> None:
        if act := self._commands.get(command):
            act()
        else:
            near = nearest(command, [*self._commands, "/exit"])
            print(f"unknown command {command.split()[0]}{near or '; /help lists the commands'}")

    def _clear(self) -> None:
        self._messages = list(self._opening)
        print("The conversation is empty again.")

    def _turn(self, text: str) -> None:
        """Asks one question and prints its answer; a question without an answer is removed from the conversation."""
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            self._make_room()
            self._answer(answer)
        except EngineDeadError:
            raise
        except PenstockError as error:
            announce(f"{'' if not answer else chr(10)}penstock: {error}")
        except KeyboardInterrupt:
            print()
        if any(answer):
            self._messages.append({"role": "assistant", "content": "".join(answer)})
        else:
            self._messages.pop()

    def _make_room(self) -> None:
        """Drops the oldest turns until the prompt and an answer fit into the context.

        Raises RequestError, and drops nothing, if the newest message alone does not fit.
        """
        context = self._model.context
        if context is None:
            return
        reserved = min(self._max_tokens or _ANSWER_TOKENS, context // _ANSWER_PART)
        kept = list(self._messages)
        num_dropped = 0
        while (used := self._model.count_tokens(kept)) is not None and used + reserved > context:
            if not self._drop_oldest(kept):
                if used >= context:
                    raise RequestError(f"the message makes a prompt of {used} tokens and the context holds {context}")
                break
            num_dropped += 1
        self._messages = kept
        self._announce_dropped(num_dropped)

    def _answer(self, answer: list[str]) -> None:
        """Prints the answer and adds its pieces to `answer`. If the server reports that the prompt is too long, drops
        turns first.
        """
        while True:
            try:
                reason = self._print_answer(answer)
                break
            except RequestError as error:
                if error.code != CONTEXT_FULL or answer or not self._drop_oldest(self._messages):
                    raise
                self._announce_dropped(1)
        print()
        if reason == "length":
            announce("[the answer ends here: it has reached --max-tokens or the end of the context]")

    def _print_answer(self, answer: list[str]) -> str | None:
        with contextlib.closing(self._model.answer(self._messages)) as pieces:
            while True:
                try:
                    piece = next(pieces)
                except StopIteration as end:
                    return end.value
                answer.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()

    def _drop_oldest(self, messages: list[Message]) -> bool:
        """Drops the oldest question and its answer; returns False if only the newest question is left."""
        first = len(self._opening)
        if len(messages) <= first + 1:
            return False
        del messages[first : first + 2]
        return True

    def _announce_dropped(self, num_turns: int) -> None:
        if num_turns:
            size = "" if self._model.context is None else f" of {self._model.context:,} tokens"
            turns = "turn was" if num_turns == 1 else f"{num_turns} turns were"
            announce(f"[the context{size} is full: the oldest {turns} dropped from the conversation]")


def read_message() -> str | None:
    """Reads a message of one or more lines; None at the end of the input. Ctrl-C discards the text typed so far."""
    while True:
        try:
            return _read_lines()
        except EOFError:
            print()
            return None
        except UnicodeDecodeError:
            announce("penstock: the input is not UTF-8 text")
        except KeyboardInterrupt:
            print()


def _read_lines() -> str:
    line = input(_PROMPT)
    if line.strip().startswith(_QUOTES):
        lines = [line.strip()[len(_QUOTES) :]]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(input(_CONTINUED))
        lines[-1] = lines[-1].rstrip()[: -len(_QUOTES)]
        return "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input(_CONTINUED)}"
    return line
