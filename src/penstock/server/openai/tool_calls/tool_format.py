"""The interface of tool call formats: parsing calls, and constraining an answer to be a call."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from penstock.messages.structured_outputs import MAX_GRAMMAR_BYTES
from penstock.server.openai.tool_calls.parser import MakeId, ToolCallParser, Tools, random_id
from penstock.tokenizer.tokenizer import AddedToken
from penstock.utils.errors import RequestError


class ToolCallFormat(ABC):
    """How a family of models writes calls, with one tokenizer. Stateless: `parser` makes one for each completion.

    `TAGS` are the texts of the format that may be single tokens. `added_tokens` has those that are. `TRIGGERS` are the
    tags that a call begins with, the first of them in forced calls too; a format without any cannot tell a call from
    text before it is complete. `template` is the text of the chat template, for formats that come in variants.
    `TERMINALS` are the lines of Lark that define the terminals which the rules of calls share.
    """

    NAME: ClassVar[str]
    PARSER: ClassVar[type[ToolCallParser]]
    TAGS: ClassVar[tuple[str, ...]] = ()
    TRIGGERS: ClassVar[tuple[str, ...]] = ()
    TERMINALS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, added_tokens: Mapping[str, AddedToken] | None = None, template: str = "") -> None:
        self.template = template
        self._tokens = {tag: token for tag, token in (added_tokens or {}).items() if tag in self.TAGS}
        self._tag = re.compile("|".join(map(re.escape, sorted(self._tokens, key=len, reverse=True))) or "(?!)")

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a tag is a special token, which is visible only in text that shows special tokens."""
        return any(token.is_special for token in self._tokens.values())

    def parser(self, tools: Tools, make_id: MakeId = random_id) -> ToolCallParser:
        """Returns a parser for one completion in which only these functions can be called. `make_id` takes the number
        of a call.
        """
        return self.PARSER(tools, make_id)

    @abstractmethod
    def forced_prefix(self, function: str | None) -> str:
        """Returns the text with which a call of `function`, or of any function, begins. It does not end with a space,
        because most tokenizers attach the space to the following text.
        """

    @abstractmethod
    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        """Returns the Lark expression that must follow `forced_prefix(function)` to form a call of the function `name`.

        A right-hand side, which may be followed by further rules on lines of their own. Their names begin with `RULE`,
        which is replaced by the name of the function's rule, so that rules of several functions do not collide.
        """

    def forced_grammar(self, tools: Tools, function: str | None, *, with_prefix: bool = False) -> str:
        """Returns a Lark grammar of the text that must follow `forced_prefix(function)`: one call, with arguments that
        match their schema.

        `tools` are the functions that may be called. With `with_prefix` the grammar includes the prefix.
        """
        prefix = self.literal(self.forced_prefix(function)) if with_prefix else ""
        return "\n".join([f"start: {prefix} call", *self._call_rules(tools, function)])

    def strict_grammar(self, tools: Tools, *, several: bool) -> str | None:
        """Returns a Lark grammar of text in which every trigger begins a call that matches its schema, `several` or at
        most one. None if the format has no trigger.
        """
        if not self.TRIGGERS:
            return None
        rest = self.literal(self.forced_prefix(None).removeprefix(self.TRIGGERS[0]))
        token = self._tokens.get(self.TRIGGERS[0])
        # One terminal that includes the tag, because the text must not continue past it.
        before = "TEXT_AND_TAG" if token is None else f"(TEXT_AND_TAG | TEXT <[{token.id}]>)"
        lines = [
            f"start: ({before} {rest} call){'*' if several else '?'} TEXT",
            f"TEXT_AND_TAG: TEXT {lark_string(self.TRIGGERS[0])}",
            f"TEXT: {self._without_triggers}",
        ]
        return "\n".join([*lines, *self._call_rules(tools, None)])

    @property
    def trigger_tokens(self) -> list[str]:
        """Returns the triggers that are single tokens, without which no call can begin."""
        return [trigger for trigger in self.TRIGGERS if trigger in self._tokens]

    def no_call_grammar(self) -> str | None:
        """Returns a Lark grammar of text without triggers; None if the triggers are tokens, or the format has none. A
        model that spells its tags would begin one and be stopped in the middle, so the answer must not begin with the
        first character of a tag either.
        """
        if not self.TRIGGERS or self.trigger_tokens:
            return None
        first = re.escape(self.TRIGGERS[0][0])
        return f"start: TEXT?\nTEXT: /[^{first}](?s:.*)/ & {self._without_triggers}"

    @property
    def _without_triggers(self) -> str:
        """Returns the pattern of a Lark terminal for any text without a trigger."""
        triggers = "|".join(re.escape(trigger).replace("/", r"\/") for trigger in self.TRIGGERS)
        return f"/(?s:.*)/ & ~/(?s:.*)({triggers})(?s:.*)/"

    def _call_rules(self, tools: Tools, function: str | None) -> list[str]:
        """Returns the rule `call` for the text after `forced_prefix(function)`, and the rules that it needs. Raises
        RequestError if they are too large for a grammar.
        """
        names = {name: f"call_{number}" for number, name in enumerate(tools)}
        calls = (f"{rule}: {self._forced_call(name, tools[name], function)}" for name, rule in names.items())
        rules = [call.replace(RULE, rule) for call, rule in zip(bounded(calls), names.values(), strict=True)]
        return [f"call: {' | '.join(names.values())}", *rules, *self.TERMINALS]

    def literal(self, text: str) -> str:
        """Returns this text in Lark, where a tag may be its token or be spelled out."""
        pieces: list[str] = []
        end = 0
        for match in self._tag.finditer(text):
            if match.start() > end:
                pieces.append(lark_string(text[end : match.start()]))
            token = self._tokens[match.group()]
            pieces.append(f"(<[{token.id}]> | {lark_string(match.group())})")
            end = match.end()
        if end < len(text):
            pieces.append(lark_string(text[end:]))
        return " ".join(pieces)


RULE = "@RULE@"
"""Placeholder for the name of a function's rule in the rules from `_forced_call`."""


def bounded(rules: Iterable[str]) -> list[str]:
    """Returns rules that are made one by one. Raises RequestError as soon as they are larger than a grammar may be: the
    rules for schemas of kilobytes can take gigabytes.
    """
    kept, size = list[str](), 0
    for rule in rules:
        size += len(rule)
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(f"grammar must be at most {MAX_GRAMMAR_BYTES} bytes", "grammar")
        kept.append(rule)
    return kept


def lark_string(text: str) -> str:
    """A Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Returns a Lark expression for a JSON value of this schema, with the whitespace of `json.dumps` only. If any
    amount were allowed, a model could generate whitespace forever.
    """
    return f"%json {json.dumps({'x-guidance': _JSON_OPTIONS, **schema})}"


_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def definitions_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the definitions that references in a part of this schema may use."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


class JsonObjectFormat(ToolCallFormat):
    """A format whose call is `OPENING{"name": NAME, ARGUMENTS_KEY: {...}}CLOSING`."""

    OPENING: ClassVar[str] = ""
    CLOSING: ClassVar[str] = ""
    ARGUMENTS_KEY: ClassVar[str] = "arguments"

    def forced_prefix(self, function: str | None) -> str:
        if function is None:
            return f'{self.OPENING}{{"name": "'
        return f'{self.OPENING}{{"name": {json.dumps(function, ensure_ascii=False)}, "{self.ARGUMENTS_KEY}":'

    def _forced_call(self, name: str, schema: Mapping[str, Any], function: str | None) -> str:
        head = "" if function is not None else lark_string(f'{name}", "{self.ARGUMENTS_KEY}":') + " "
        end = self.literal("}" + self.CLOSING)
        return f"{head}/[ ]?/ {RULE}_arguments {end}\n{RULE}_arguments: {json_rule(schema)}"
