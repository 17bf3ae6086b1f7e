"""Tool calls of each family of models: the distinction of calls and content, and the form of forced answers."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.config.server import REASONING_PARSERS, TOOL_CALL_PARSERS
from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.server.openai.reasoning_formats import REASONING_FORMATS
from penstock.server.openai.tool_calls.parser import MAX_TOOL_CALLS
from penstock.server.openai.tool_calls.registry import FORMATS, make_format
from penstock.tokenizer.tokenizer import AddedToken, Tokenizer
from penstock.utils.errors import GrammarError, RequestError
from tests.unit.tool_call_streams import assert_any_split_agrees, calls_of

DEMO = Path(penstock.__file__).parent / "demo"
TOKENIZER = Tokenizer(DEMO, 4096)
BACKEND = LLGuidanceBackend((DEMO / "tokenizer.json").read_text(encoding="utf-8"), 4096, (2, 0))

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["celsius", "kelvin"]},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
            "exact": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "string"}},
    },
    "ns.g-1": {"type": "object", "properties": {}},
}
G = ("ns.g-1", "{}")


def xml(name: str, *arguments: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


PARIS = xml("f", ("city", "Paris"))
PARIS_CALL = ("f", '{"city": "Paris"}')
NO_END = "</parameter>\n"
END_OF_CALL = f"\n{NO_END}</function>\n</tool_call>"
QWEN3_CODER = {
    PARIS: ("", [PARIS_CALL]),
    f"Let me see.\n\n{PARIS}\n{PARIS}\n": ("Let me see.", [PARIS_CALL, PARIS_CALL]),
    f"{PARIS}\nDone": ("\nDone", [PARIS_CALL]),
    "<function=f>\n<parameter=city>\nParis\n</parameter>\n</function>": ("", [PARIS_CALL]),
    "<tool_call><function=f><parameter=city>Paris</parameter></function></tool_call>": ("", [PARIS_CALL]),
    xml("ns.g-1"): ("", [G]),
    # Text is taken literally; only one line break at either end belongs to the tags.
    xml("f", ("city", 'a "b"\n\\c\n'), ("note", "x")): ("", [("f", '{"city": "a \\"b\\"\\n\\\\c\\n", "note": "x"}')]),
    xml("f", ("city", "12")): ("", [("f", '{"city": "12"}')]),
    xml("f", ("city", "a </param> <b")): ("", [("f", '{"city": "a </param> <b"}')]),
    xml("f", ("city", "")): ("", [("f", '{"city": ""}')]),
    xml("f", ("unknown", "1")): ("", [("f", '{"unknown": "1"}')]),
    # Other values are parsed by their types.
    xml("f", ("days", " 3 "), ("tags", '["x", "y"]'), ("exact", "True")): (
        "",
        [("f", '{"days": 3, "tags": ["x", "y"], "exact": true}')],
    ),
    xml("f", ("note", "null"), ("days", "many"), ("exact", "NaN")): (
        "",
        [("f", '{"note": null, "days": "many", "exact": "NaN"}')],
    ),
    xml("f", ("note", "12")): ("", [("f", '{"note": "12"}')]),
    xml("f", ("city", "a"), ("city", "b")): ("", [("f", '{"city": "a"}')]),
    # Not a call.
    xml("h", ("city", "Paris")): (xml("h", ("city", "Paris")), []),
    "<tool_call>\nf(1)\n</tool_call>": ("<tool_call>\nf(1)\n</tool_call>", []),
    "<function=>": ("<function=>", []),
    "a < b": ("a < b", []),
    # Truncated, and malformed.
    "<tool_call>\n<function=f": ("<tool_call>\n<function=f", []),
    "<tool_call>\n<function=f>\n<parameter=city>\nPar": ("", [("f", '{"city": "Par')]),
    "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\noh": ("oh", [PARIS_CALL]),
    "<tool_call>\n<function=f>\nParis</function>": ("Paris</function>", [("f", "{}")]),
    # A value without its closing tag ends with its call, and later calls are calls.
    f"{PARIS.replace(NO_END, '')}\n{PARIS}\nDone": ("\nDone", [PARIS_CALL, PARIS_CALL]),
    f"{xml('f', ('days', '3')).replace(NO_END, '')}{xml('ns.g-1')}": ("", [("f", '{"days": 3}'), G]),
    f"{xml('f', ('city', 'a'), ('city', 'b')).removesuffix(END_OF_CALL)}</function></tool_call>b": (
        "b",
        [("f", '{"city": "a"}')],
    ),
    xml("f", ("city", "the tag </function> ends it")): ("", [("f", '{"city": "the tag </function> ends it"}')]),
}

ARRAY = '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Paris"}}'
MISTRAL = {
    f"{ARRAY}]": ("", [PARIS_CALL]),
    f'{ARRAY}, {{"name": "ns.g-1", "arguments": {{}}}}]': ("", [PARIS_CALL, G]),
    'Hi\n[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Paris"}, "id": "x"}] so': ("Hi so", [PARIS_CALL]),
    '[TOOL_CALLS]f{"city": "Paris"}': ("", [PARIS_CALL]),
    '[TOOL_CALLS]f[ARGS]{"city": "Paris"}[TOOL_CALLS]ns.g-1[ARGS]{}\n': ("", [PARIS_CALL, G]),
    '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"city": "Paris"}': ("", [PARIS_CALL]),
    # Not a call.
    '[TOOL_CALLS]h{"city": "Paris"}': ('[TOOL_CALLS]h{"city": "Paris"}', []),
    '[TOOL_CALLS][{"name": "h", "arguments": {}}]': ('[TOOL_CALLS][{"name": "h", "arguments": {}}]', []),
    '[{"name": "f", "arguments": {}}]': ('[{"name": "f", "arguments": {}}]', []),
    "[TOOL_CALLS] and": ("[TOOL_CALLS] and", []),
    "[TOOL_": ("[TOOL_", []),
    "[TOOL_CALLS]f[ARGS]1": ("[TOOL_CALLS]f[ARGS]1", []),
    '[TOOL_CALLS]f{"city": "Par': ("", [("f", '{"city": "Par')]),
    f"{ARRAY} x": (" x", [PARIS_CALL]),
}


def v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


PARIS_JSON = '{"city": "Paris"}'
ROME_JSON = '{"city": "Rome", "days": 2}'
V3, V31 = v3("f", PARIS_JSON), v31("f", PARIS_JSON)
V3_H = v3("h", PARIS_JSON)
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_V3 = {
    f"{BEGIN}{V3}{END}": ("", [PARIS_CALL]),
    f"Hi\n\n{BEGIN}{V3}\n{v3(*G)}{END}": ("Hi", [PARIS_CALL, G]),
    f"{V3}": ("", [PARIS_CALL]),
    f"{BEGIN}{V3}{V3_H}{END}": (f"{V3_H}{END}", [PARIS_CALL]),
    f"{BEGIN}{V3.removesuffix('<｜tool▁call▁end｜>')}": ("", [PARIS_CALL]),
    f"{BEGIN}{V3}{END}x": ("x", [PARIS_CALL]),
    f"{BEGIN}{V3_H}": (f"{BEGIN}{V3_H}", []),
    f"{BEGIN}none": (f"{BEGIN}none", []),
    f"{BEGIN}{V3[:30]}": (f"{BEGIN}{V3[:30]}", []),
}
DEEPSEEK_V31 = {
    f"{BEGIN}{V31}{END}": ("", [PARIS_CALL]),
    f"{BEGIN}{V31}{V31}{END}": ("", [PARIS_CALL, PARIS_CALL]),
    f"{BEGIN}{V3}{END}": (f"{BEGIN}{V3}{END}", []),
}

PYTHONIC = {
    "[f(city='Paris')]": ("", [PARIS_CALL]),
    ' [ f( city = "Paris" ) , ns.g-1() ] ': ("", [PARIS_CALL, G]),
    "<|python_start|>[f(city='Paris')]<|python_end|>": ("", [PARIS_CALL]),
    "[f(city='a, (b\\'', days=-3, tags=['x', \"y\"], exact=True, note=None)]": (
        "",
        [("f", '{"city": "a, (b\'", "days": -3, "tags": ["x", "y"], "exact": true, "note": null}')],
    ),
    "[f(tags=[], exact=true, note={'a': [1.5, None]})]": (
        "",
        [("f", '{"tags": [], "exact": true, "note": {"a": [1.5, null]}}')],
    ),
    "[f(city='Paris')] Done": (" Done", [PARIS_CALL]),
    # Not a call, including a call with a valid beginning.
    "[h(city='Paris')]": ("[h(city='Paris')]", []),
    "[f('Paris')]": ("[f('Paris')]", []),
    "[f(city=Paris)]": ("[f(city=Paris)]", []),
    "[f(city={1, 2})]": ("[f(city={1, 2})]", []),
    "[f(city='\\ud800')]": ("[f(city='\\ud800')]", []),
    "[f(city=1e999)]": ("[f(city=1e999)]", []),
    "[f(city='Paris'": ("[f(city='Paris'", []),
    "[1, 2]": ("[1, 2]", []),
    "See [f(city='Paris')]": ("See [f(city='Paris')]", []),
    "[f(city='Paris'), h()]": (", h()]", [PARIS_CALL]),
}


def lfm2(calls: str) -> str:
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


LFM2 = {
    lfm2("f(city='Paris')"): ("", [PARIS_CALL]),
    f"""Let me see.\n{lfm2("f(city='Paris'), ns.g-1()")} Done""": ("Let me see. Done", [PARIS_CALL, G]),
    lfm2("f(city='Paris')") * 2: ("", [PARIS_CALL, PARIS_CALL]),
    # Not a call, including a call with a valid beginning.
    lfm2("h(city='Paris')"): (lfm2("h(city='Paris')"), []),
    "<|tool_call_start|>f()": ("<|tool_call_start|>f()", []),
    "[f(city='Paris')]": ("[f(city='Paris')]", []),
    lfm2("f(city='Paris'), h()"): (", h()]", [PARIS_CALL]),
    "<|tool_call_start|>[f(city='Par": ("<|tool_call_start|>[f(city='Par", []),
}


def glm45(name: str, *arguments: tuple[str, str]) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>{name}\n{inner}</tool_call>"


def glm47(name: str, *arguments: tuple[str, str]) -> str:
    return glm45(name, *arguments).replace("\n", "")


GLM45_PARIS = glm45("f", ("city", "Paris"))
GLM45 = {
    GLM45_PARIS: ("", [PARIS_CALL]),
    f"Let me see.\n{GLM45_PARIS}\n{glm47('f', ('city', 'Paris'))}": ("Let me see.", [PARIS_CALL, PARIS_CALL]),
    f"{GLM45_PARIS}\nDone": ("\nDone", [PARIS_CALL]),
    glm45("ns.g-1"): ("", [G]),
    "<tool_call>ns.g-1</tool_call>": ("", [G]),
    # Text is taken literally, with its line breaks.
    glm45("f", ("city", '\na "b" </arg_key> <c\n')): ("", [("f", '{"city": "\\na \\"b\\" </arg_key> <c\\n"}')]),
    glm45("f", ("city", "12"), ("days", " 3"), ("tags", '["x"]'), ("exact", "true")): (
        "",
        [("f", '{"city": "12", "days": 3, "tags": ["x"], "exact": true}')],
    ),
    glm45("f", ("city", "a"), ("city", "b")): ("", [("f", '{"city": "a"}')]),
    # Not a call.
    glm45("h", ("city", "Paris")): (glm45("h", ("city", "Paris")), []),
    "<tool_call>\n</tool_call>": ("<tool_call>\n</tool_call>", []),
    # Truncated, and malformed.
    "<tool_call>f": ("<tool_call>f", []),
    "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Par": ("", [("f", '{"city": "Par')]),
    "<tool_call>f\n<arg_key>city</arg_key>Paris": ("Paris", [("f", "{}")]),
    "<tool_call>f\nParis</tool_call>": ("Paris", [("f", "{}")]),
    "<tool_call>f\n<arg_key>city<arg_value>": ("arg_value>", [("f", "{}")]),
}

GRANITE_PARIS = '<|tool_call|>[{"name": "f", "arguments": {"city": "Paris"}}'
GRANITE = {
    f"{GRANITE_PARIS}]": ("", [PARIS_CALL]),
    f'Hi\n{GRANITE_PARIS}, {{"name": "ns.g-1", "arguments": {{}}}}] so': ("Hi so", [PARIS_CALL, G]),
    # Not a call.
    '<|tool_call|>[{"name": "h", "arguments": {}}]': ('<|tool_call|>[{"name": "h", "arguments": {}}]', []),
    '<|tool_call|>{"name": "f"}': ('<|tool_call|>{"name": "f"}', []),
    "<|tool_call|>[]": ("<|tool_call|>[]", []),
    "<|tool_ca": ("<|tool_ca", []),
    f"{GRANITE_PARIS} x": (" x", [PARIS_CALL]),
    GRANITE_PARIS[:-6]: ("", [("f", '{"city": "Pa')]),
}
PHI = {
    text.replace("<|tool_call|>", "functools").replace("<|tool_ca", "functo"): (
        content.replace("<|tool_call|>", "functools").replace("<|tool_ca", "functo"),
        calls,
    )
    for text, (content, calls) in GRANITE.items()
}


def kimi(name: str, arguments: str, number: int = 0) -> str:
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f"{head}{arguments}<|tool_call_end|>"


KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_PARIS = kimi("f", PARIS_JSON)
KIMI = {
    f"{KIMI_BEGIN}{KIMI_PARIS}{KIMI_END}": ("", [PARIS_CALL]),
    f"Hi{KIMI_BEGIN}{KIMI_PARIS}{kimi(*G, number=1)}{KIMI_END}": ("Hi", [PARIS_CALL, G]),
    f"{KIMI_BEGIN} {KIMI_PARIS} {KIMI_END}x": ("x", [PARIS_CALL]),
    # Not a call.
    f"{KIMI_BEGIN}{kimi('h', '{}')}": (f"{KIMI_BEGIN}{kimi('h', '{}')}", []),
    "<|tool_call_begin|>f<|tool_call_argument_begin|>{}": ("<|tool_call_begin|>f<|tool_call_argument_begin|>{}", []),
    f"{KIMI_BEGIN}{KIMI_PARIS[:40]}": (f"{KIMI_BEGIN}{KIMI_PARIS[:40]}", []),
    KIMI_PARIS[:-20]: ("", [("f", '{"city": "Pari')]),
}


def harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


HARMONY_PARIS = harmony("f", PARIS_JSON)
HARMONY = {
    HARMONY_PARIS: ("", [PARIS_CALL]),
    HARMONY_PARIS.replace(" <|constrain|>json", ""): ("", [PARIS_CALL]),
    f"Let me see.\n{HARMONY_PARIS}{harmony(*G)}": ("Let me see.", [PARIS_CALL, G]),
    HARMONY_PARIS.removesuffix("<|call|>"): ("", [PARIS_CALL]),
    # Not a call.
    harmony("h", "{}"): (harmony("h", "{}"), []),
    HARMONY_PARIS.replace("json", "code"): (HARMONY_PARIS.replace("json", "code"), []),
    "<|channel|>commentary<|message|>a": ("<|channel|>commentary<|message|>a", []),
    HARMONY_PARIS[:50]: (HARMONY_PARIS[:50], []),
    HARMONY_PARIS[:-12]: ("", [("f", '{"city": "Par')]),
}
HERMES = {
    '<tool_call>{"name": "h", "arguments": {}}</tool_call>': (
        '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
        [],
    ),
    '<tool_call>{"arguments": {}, "name": "h"}</tool_call>\n<tool_call>{"name": "ns.g-1"}</tool_call>': (
        '<tool_call>{"arguments": {}, "name": "h"}</tool_call>',
        [G],
    ),
}
LLAMA3 = {
    '{"name": "h", "parameters": {}}': ('{"name": "h", "parameters": {}}', []),
    '<|python_tag|>{"name": "h"}': ('<|python_tag|>{"name": "h"}', []),
}

FAMILIES: dict[str, dict[str, tuple[str, list[tuple[str, str]]]]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "qwen3_coder": QWEN3_CODER,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "pythonic": PYTHONIC,
    "lfm2": LFM2,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "phi4_mini_json": PHI,
    "kimi_k2": KIMI,
    "openai": HARMONY,
}
CASES = [(name, text) for name, cases in FAMILIES.items() for text in cases]


def test_every_family_has_a_flag_and_cases() -> None:
    assert set(FORMATS) == set(FAMILIES) == set(TOOL_CALL_PARSERS) - {"auto", "none"}
    assert set(REASONING_FORMATS) == set(REASONING_PARSERS) - {"auto"}


@pytest.mark.parametrize(("name", "text"), CASES)
def test_content_and_calls_of_answers(name: str, text: str) -> None:
    content, calls = FAMILIES[name][text]
    got = assert_any_split_agrees(name, text, [], TOOLS)
    assert (got.content, got.calls) == (content, calls)


@settings(max_examples=200)
@given(st.sampled_from(CASES), st.sampled_from(CASES), st.integers(0), st.lists(st.integers(0), max_size=6))
def test_any_split_of_any_beginning_gives_the_same(
    first: tuple[str, str], second: tuple[str, str], end: int, cuts: list[int]
) -> None:
    text = first[1] + second[1]
    text = text[: end % (len(text) + 1)]
    got = assert_any_split_agrees(first[0], text, cuts, TOOLS)
    assert all(name in TOOLS for name, _ in got.calls)
    if not got.calls:
        assert got.content == text


def test_mistral_s_ids_have_the_form_that_its_templates_accept() -> None:
    got = assert_any_split_agrees("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}', [], TOOLS)
    assert got.ids == ["abcdefgh1"]
    got = assert_any_split_agrees("mistral", '[TOOL_CALLS]f[CALL_ID]no good[ARGS]{"a": 1}', [], TOOLS)
    assert got.ids != ["no good"]
    assert len(got.ids[0]) == 9


def test_text_arguments_are_streamed_as_they_arrive() -> None:
    parser = FORMATS["qwen3_coder"]().parser(TOOLS)
    assert calls_of(parser.feed("<tool_call>\n<function=f>\n"))[0].name == "f"
    assert calls_of(parser.feed("<parameter=city>\nPa"))[0].arguments == '{"city": "Pa'
    assert calls_of(parser.feed("ris\n"))[0].arguments == "ris"
    assert calls_of(parser.feed("</parameter>"))[0].arguments == '"'


@pytest.mark.parametrize("name", ["qwen3_coder", "mistral", "deepseek_v3", "deepseek_v31", "pythonic"])
def test_calls_beyond_the_limit_are_content(name: str) -> None:
    calls = {
        "qwen3_coder": [xml("ns.g-1")] * (MAX_TOOL_CALLS + 2),
        "mistral": ["[TOOL_CALLS]ns.g-1{}"] * (MAX_TOOL_CALLS + 2),
        "deepseek_v3": [V3] * (MAX_TOOL_CALLS + 2),
        "deepseek_v31": [V31] * (MAX_TOOL_CALLS + 2),
        "pythonic": ["[" + ", ".join(["ns.g-1()"] * (MAX_TOOL_CALLS + 2)) + "]"],
    }[name]
    got = assert_any_split_agrees(name, "".join(calls), [], TOOLS)
    assert len(got.calls) == MAX_TOOL_CALLS
    assert got.content == (", ns.g-1()" * 2 + "]" if name == "pythonic" else "".join(calls[-2:]))


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_cost_is_linear_in_depth_and_length(name: str) -> None:
    size = 20_000
    deep = "[" * size + "]" * size
    for head in (f"[f(city={deep}", xml("f", ("tags", deep)), f"[TOOL_CALLS]f{{{deep}", "<" * size, "\n" * size):
        got = assert_any_split_agrees(name, head, [], TOOLS)
        assert got.calls or got.content == head


# ---- Forced calls ----

FORCED = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"city": "Rome", "days": 2}}',
    "qwen3_coder": xml("f", ("city", "Rome"), ("days", "2")),
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Rome", "days": 2}}]',
    "deepseek_v3": BEGIN + v3("f", ROME_JSON) + END,
    "deepseek_v31": BEGIN + v31("f", ROME_JSON) + END,
    "pythonic": '[f(city="Rome", days=2)]',
    "lfm2": lfm2('f(city="Rome", days=2)'),
    "glm45": glm45("f", ("city", "Rome"), ("days", "2")),
    "glm47": glm47("f", ("city", "Rome"), ("days", "2")),
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"city": "Rome", "days": 2}}]',
    "phi4_mini_json": 'functools[{"name": "f", "arguments": {"city": "Rome", "days": 2}}]',
    "kimi_k2": KIMI_BEGIN + kimi("f", ROME_JSON) + KIMI_END,
    "openai": harmony("f", ROME_JSON),
}
TEXT_ARGUMENTS = ("qwen3_coder", "glm45", "glm47")
WRONG = [("Rome", '"Rome'), ("2", '"x"'), ("2", "2.5"), ("city", "town"), ("days", "hours")]


def is_accepted(grammar: str, text: str, reasoning: str | None = None) -> bool:
    """Returns whether the grammar accepts exactly this text."""
    state = BACKEND.compile(StructuredOutputsParams(grammar=grammar, reasoning=reasoning).spec())
    try:
        state.accept([*TOKENIZER.encode(text, add_special_tokens=False), 2])
    except GrammarError:
        return False
    return state.is_finished


@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_forced_answer_is_one_call_that_fits_the_schema(name: str, named: bool) -> None:
    form = FORMATS[name]()
    tools = {"f": TOOLS["f"]} if named else TOOLS
    prefix = form.forced_prefix("f" if named else None)
    text = FORCED[name]
    assert text.startswith(prefix)
    for with_prefix, rest in ((False, text.removeprefix(prefix)), (True, text)):
        grammar = form.forced_grammar(tools, "f" if named else None, with_prefix=with_prefix)
        assert is_accepted(grammar, rest), grammar
        assert not is_accepted(grammar, rest + rest)
        for right, wrong in WRONG:
            if right != "Rome" or name not in TEXT_ARGUMENTS:
                assert not is_accepted(grammar, rest.replace(right, wrong)), wrong
    got = assert_any_split_agrees(name, text, [], TOOLS)
    assert [(each, json.loads(arguments)) for each, arguments in got.calls] == [("f", {"city": "Rome", "days": 2})]
    if not named:
        assert not is_accepted(form.forced_grammar({"ns.g-1": TOOLS["ns.g-1"]}, None, with_prefix=True), text)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {*TEXT_ARGUMENTS, "pythonic", "lfm2"}))
def test_forced_json_allows_no_extra_whitespace(name: str) -> None:
    form = FORMATS[name]()
    grammar = form.forced_grammar({"f": TOOLS["f"]}, "f", with_prefix=True)
    assert is_accepted(grammar, FORCED[name])
    for right, wrong in (('": "Rome', '":  "Rome'), (', "days', ',\n"days')):
        assert not is_accepted(grammar, FORCED[name].replace(right, wrong))


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ("city='x'", False), ('city="x"', True), ('city="x", unit="kelvin"', True), ('city="x", unit="x"', False),
        ('city="x", exact=True', True), ('city="x", tags=["a"]', True), ('city="x", tags=[1]', False), ("", False),
        ('city="x", days=1, exact=False, note=null', True), ('days=1, city="x"', False),
    ],
)  # fmt: skip
def test_forced_arguments_of_pythonic_calls(arguments: str, accepted: bool) -> None:
    grammar = FORMATS["pythonic"]().forced_grammar({"f": TOOLS["f"]}, "f")
    assert is_accepted(grammar, f"{arguments})]") == accepted


def test_optional_arguments_of_pythonic_calls_may_all_be_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}}
    grammar = FORMATS["pythonic"]().forced_grammar({"f": schema}, "f")
    assert [is_accepted(grammar, f"{each})]") for each in ("", "a=1", "b=True", "a=1, b=False", "b=True, a=1")] == [
        True, True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        ((("city", 'a "b"\n<c>'),), True), ((("city", "x"), ("unit", "kelvin")), True),
        ((("city", "x"), ("unit", "x")), False), ((("unit", "kelvin"),), False),
        ((("city", "x"), ("exact", "true")), True),
        ((("city", "x"), ("exact", "maybe")), False), ((("city", "x"), ("tags", '["a"]')), True),
        ((("city", "x"), ("tags", "[1]")), False),
    ],
)  # fmt: skip
def test_forced_arguments_of_qwen3_coder_calls(arguments: tuple[tuple[str, str], ...], accepted: bool) -> None:
    form = FORMATS["qwen3_coder"]()
    text = xml("f", *arguments).removeprefix(form.forced_prefix("f"))
    assert is_accepted(form.forced_grammar({"f": TOOLS["f"]}, "f"), text) == accepted


MANY = {f"a{number}": {"type": "integer"} for number in range(1200)}
LARGE: dict[str, dict[str, Any]] = {
    "definitions repeated for each argument": {"properties": MANY, "$defs": {"a": {"description": "d" * 30_000}}},
    "optional arguments that may follow each other": {"properties": MANY},
}


@pytest.mark.parametrize("schema", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "lfm2"])
def test_a_grammar_that_is_too_large_is_refused_before_it_is_made(name: str, schema: dict[str, Any]) -> None:
    """The rules for one such tool are up to hundreds of megabytes, and a request may have a hundred of them."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="grammar must be at most 65536 bytes"):
            FORMATS[name]().forced_grammar(dict.fromkeys(map(str, range(3)), schema), None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000


class CountedLookups(dict[str, Any]):
    count = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.count += 1
        return super().get(key, default)


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_a_long_chain_of_references_is_not_followed_for_every_argument(name: str) -> None:
    chain = CountedLookups({str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(300)})
    schema = {"properties": {f"a{number}": {"$ref": "#/$defs/0"} for number in range(6)}, "$defs": chain}
    FORMATS[name]().forced_grammar({"f": schema}, "f")
    assert 0 < chain.count < 6 * 100


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_schema_whose_required_arguments_are_no_list_is_no_failure(name: str) -> None:
    FORMATS[name]().forced_grammar({"f": {**TOOLS["f"], "required": 5}}, "f")


REFERENCES = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"allOf": [{"$ref": "#/$defs/count"}]},
        "unit": {"$ref": "#/$defs/unit"},
        "name": {"anyOf": [{"$ref": "#/$defs/name"}, {"$ref": "#/$defs/name"}]},
        "kind": {"const": 5},
    },
    "$defs": {
        "place": {"type": "object", "properties": {"street": {"type": "string"}, "in": {"$ref": "#/$defs/place"}}},
        "count": {"type": "integer"},
        "unit": {"enum": ["celsius", "kelvin"]},
        "name": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/name"}]},
    },
}
REFERRING = (
    ("place", '{"street": "x"}', {"street": "x"}), ("days", "5", 5), ("unit", "kelvin", "kelvin"),
    ("name", "007", "007"), ("kind", "5", 5),
)  # fmt: skip


def test_text_arguments_have_the_types_of_references() -> None:
    tools = {"f": REFERENCES}
    text = xml("f", *((key, value) for key, value, _ in REFERRING))
    [(_, arguments)] = assert_any_split_agrees("qwen3_coder", text, [], tools).calls
    assert json.loads(arguments) == {key: value for key, _, value in REFERRING}
    form = FORMATS["qwen3_coder"]()
    grammar = form.forced_grammar(tools, "f")
    assert is_accepted(grammar, text.removeprefix(form.forced_prefix("f")))
    for key, wrong in (("place", "x"), ("days", "x"), ("unit", "rankine"), ("kind", "6")):
        assert not is_accepted(grammar, xml("f", (key, wrong)).removeprefix(form.forced_prefix("f"))), key


def test_mistral_s_newer_templates_put_the_name_first() -> None:
    form = FORMATS["mistral"]({}, "... [TOOL_CALLS]name[ARGS]{...}")
    assert form.forced_prefix("f") == "[TOOL_CALLS]f[ARGS]"
    assert is_accepted(form.forced_grammar({"f": TOOLS["f"]}, "f"), '{"city": "x"}')
    assert is_accepted(form.forced_grammar(TOOLS, None, with_prefix=True), '[TOOL_CALLS]f[ARGS]{"city": "x"}')
    assert not is_accepted(form.forced_grammar(TOOLS, None, with_prefix=True), '[TOOL_CALLS]h[ARGS]{"city": "x"}')


def test_tags_that_are_tokens_may_be_generated_as_tokens() -> None:
    """The tokenizer here has no such tag, so an end of sequence stands in for one."""
    form = FORMATS["hermes"]({"</tool_call>": AddedToken(1, True), "other": AddedToken(0, True)})
    assert form.needs_special_tokens
    assert not FORMATS["hermes"]({"</tool_call>": AddedToken(1, False)}).needs_special_tokens
    grammar = form.forced_grammar({"f": TOOLS["f"]}, "f")
    for end in ("</tool_call>", "<|im_start|>"):
        assert is_accepted(grammar, f' {{"city": "x"}}}}\n{end}')


def test_the_format_of_a_tokenizer() -> None:
    automatic = make_format("auto", TOKENIZER)
    assert automatic is not None
    assert automatic.NAME == "hermes"
    assert make_format("none", TOKENIZER) is None
    assert make_format("auto", None) is None
    named = make_format("mistral", None)
    assert named is not None
    assert named.NAME == "mistral"


# ---- Strict calls, and answers without calls ----

WITH_TRIGGERS = sorted(set(FORMATS) - {"llama3_json", "pythonic", "openai"})


@pytest.mark.parametrize("name", WITH_TRIGGERS)
def test_a_strict_answer_has_only_calls_that_fit(name: str) -> None:
    form = FORMATS[name]()
    text = FORCED[name]
    one, many = (form.strict_grammar(TOOLS, several=several) for several in (False, True))
    assert one is not None
    assert many is not None
    for grammar in (one, many):
        for good in ("", "Hello <b>, [1]", text, f"Let me see.\n{text}", f"{text} Done."):
            assert is_accepted(grammar, good), good
        for bad in (
            text[:-2],
            text.replace("Rome", "x").replace("days", "hours"),
            form.TRIGGERS[0],
            text + text[: len(form.TRIGGERS[0]) + 3],
        ):
            assert not is_accepted(grammar, bad), bad
    assert is_accepted(many, f"{text}\n{text}")
    assert not is_accepted(one, f"{text}\n{text}")


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(WITH_TRIGGERS)))
def test_formats_without_triggers_have_no_such_grammars(name: str) -> None:
    form = FORMATS[name]()
    assert form.strict_grammar(TOOLS, several=True) is None
    assert form.no_call_grammar() is None
    assert form.trigger_tokens == []


@pytest.mark.parametrize("name", WITH_TRIGGERS)
def test_the_grammar_of_answers_without_calls(name: str) -> None:
    form = FORMATS[name]()
    grammar = form.no_call_grammar()
    assert grammar is not None
    for good in ("", "Hello <b>, [1]", "{}"):
        assert is_accepted(grammar, good), good
    for bad in (FORCED[name], f"Hi {FORCED[name]}", form.TRIGGERS[0], form.TRIGGERS[0][0], f"a{form.TRIGGERS[-1]}"):
        assert not is_accepted(grammar, bad), bad
    known = FORMATS[name]({form.TRIGGERS[0]: AddedToken(1, False)})
    assert known.trigger_tokens == [form.TRIGGERS[0]]
    assert known.no_call_grammar() is None
    strict = known.strict_grammar(TOOLS, several=True)
    assert strict is not None
    assert is_accepted(strict, f"a<|im_start|>{FORCED[name].removeprefix(form.TRIGGERS[0])}")
    assert not is_accepted(strict, "a<|im_start|>b")


def test_a_repeated_id_is_replaced() -> None:
    """Results refer to calls by their ids."""
    text = '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}' * 2
    got = assert_any_split_agrees("mistral", text, [3, 40], TOOLS)
    assert got.ids[0] == "abcdefgh1"
    assert got.ids[1] != "abcdefgh1"
