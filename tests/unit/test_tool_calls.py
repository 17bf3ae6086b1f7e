"""Tool calls in an answer: their detection and their content, for any split of the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.server.openai.tool_calls.parser import MAX_TOOL_CALLS
from penstock.server.openai.tool_calls.registry import FORMATS, detect_format
from penstock.server.openai.tool_calls.tool_format import JsonObjectFormat
from penstock.tokenizer.chat_template import ChatTemplate
from tests.unit.tool_call_streams import ANY_TOOL, assert_any_split_agrees, calls_of, content_of, stream

HERMES, LLAMA3 = FORMATS["hermes"](), FORMATS["llama3_json"]()
TEMPLATE = Path(__file__).parents[2] / "examples/demo_model/recipe/chat_template.jinja"

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F = ("f", '{"a": 1}')

# Answer -> content and calls.
HERMES_CASES = {
    CALL: ("", [F]),
    f"Let me see.\n\n{CALL}": ("Let me see.", [F]),
    f"{CALL}\n{CALL}": ("", [F, F]),
    f"\n{CALL}{CALL}\n\n": ("", [F, F]),
    f"a \n{CALL}\nb\n{CALL}\nc\n": ("a \nb\nc\n", [F, F]),
    '<tool_call>{"name":"f","arguments":{}}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f"}</tool_call>': ("", [("f", "{}")]),
    '<tool_call>{"name": "f", "arguments": ""}</tool_call>': ("", [("f", "{}")]),
    # The arguments are taken literally: spaces, escapes, numbers, brackets and tags in strings.
    '<tool_call>{"name": "f", "arguments": { "a":[1.50, {"b": "}\\"]\\u00e9</tool_call>"}] } }</tool_call>': (
        "",
        [("f", '{ "a":[1.50, {"b": "}\\"]\\u00e9</tool_call>"}] }')],
    ),
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>': ("", [("f", "[1]")]),
    '<tool_call>{"name": "f", "arguments": null}</tool_call>': ("", [("f", "null")]),
    # Members in any order, unknown members, and duplicates.
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [F]),
    '<tool_call>{"id": [0, {}], "name": "f", "x": -1e3, "arguments": {"a": 1}, "y": "}"}</tool_call>': ("", [F]),
    '<tool_call>{"name": "f", "name": "g", "arguments": {"a": 1}, "arguments": 2}</tool_call>': ("", [F]),
    '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>': ("", [F]),
    # A string that holds the arguments' JSON.
    r'<tool_call>{"name": "f", "arguments": "{\"a\": \"\\n \u00e9 \ud83d\ude00 \ud83d \ude00\"}"}</tool_call>': (
        "",
        [("f", '{"a": "\\n é 😀 \ufffd \ufffd"}')],
    ),
    r'<tool_call>{"arguments": "{\"a\": 1}", "name": "\u0066"}</tool_call>': ("", [F]),
    # What only looks like a call.
    "": ("", []),
    " \n": (" \n", []),
    "no call < here\n\n": ("no call < here\n\n", []),
    "<tool_": ("<tool_", []),
    "<tool_cell> <<tool_call": ("<tool_cell> <<tool_call", []),
    "a\n</tool_call>": ("a\n</tool_call>", []),
    "x\n<tool_call>\nf(1)\n</tool_call>": ("x\n<tool_call>\nf(1)\n</tool_call>", []),
    '<tool_call>{"name": 5}</tool_call>': ('<tool_call>{"name": 5}</tool_call>', []),
    '<tool_call>{"name": ""}</tool_call>': ('<tool_call>{"name": ""}</tool_call>', []),
    '<tool_call>{"name" "f"}</tool_call>': ('<tool_call>{"name" "f"}</tool_call>', []),
    '<tool_call>{"arguments": {"a": 1}}</tool_call>': ('<tool_call>{"arguments": {"a": 1}}</tool_call>', []),
    '<tool_call>{"\\x": 1, "name": "f"}</tool_call>': ('<tool_call>{"\\x": 1, "name": "f"}</tool_call>', []),
    '<tool_call>["f"]</tool_call>': ('<tool_call>["f"]</tool_call>', []),
    f"<tool_call>\nno\n</tool_call>\n{CALL}": ("<tool_call>\nno\n</tool_call>", [F]),
    f"<tool_call>{CALL}": ("<tool_call>", [F]),
    # A call that breaks after its name ends there, and the rest is content.
    '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>\nb': ("}\nb", [F]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>': ("", [F]),
    '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>': ("", [("f", '{"a": 1')]),
    '<tool_call>{"name": "f", oops}</tool_call>': ("oops}", [("f", "")]),
    f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}\n{CALL}': ("", [F, F]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}}} </tool_call> ': ("}", [F]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> <tool_call>{"name": "g"}': ("}", [F, ("g", "{}")]),
    # Cut off by the length limit.
    "a\n<tool_call>\n": ("a\n<tool_call>\n", []),
    'a\n<tool_call>\n{"name": "f': ('a\n<tool_call>\n{"name": "f', []),
    'a\n<tool_call>\n{"name": "f"': ("a", [("f", "")]),
    'a\n<tool_call>\n{"name": "f", "argum': ("a", [("f", "")]),
    'a\n<tool_call>\n{"name": "f", "arguments": {"a": "b\\': ("a", [("f", '{"a": "b\\')]),
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\': ("", [("f", '{"a": ')]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}': ("", [F]),
    '<tool_call>{"name": "f", "arguments": {"a": 1}}\n': ("", [F]),
    f"{CALL}\n<tool_": ("\n<tool_", [F]),
    '<tool_call>{"arguments": {"a": 1}, "na': ('<tool_call>{"arguments": {"a": 1}, "na', []),
}

LLAMA3_CASES = {
    '{"name": "f", "parameters": {"a": 1}}': ("", [F]),
    '\n {"name": "f", "arguments": {"a": 1}} \n': ("", [F]),
    '<|python_tag|>{"name": "f", "parameters": {"a": 1}}': ("", [F]),
    '<|python_tag|> {"name": "f"}': ("", [("f", "{}")]),
    '{"type": "function", "name": "f", "parameters": {"a": 1}}': ("", [F]),
    '{"parameters": {"a": 1}, "name": "f"}': ("", [F]),
    '{"name": "f", "parameters": "{\\"a\\": 1}"}': ("", [F]),
    '{"name": "f", "parameters": ""}': ("", [("f", "{}")]),
    '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}};\n': ("", [F, ("g", "{}")]),
    '{"name": "f", "parameters": {"a": 1}}\n{"name": "f", "parameters": {"a": 1}}': ("", [F, F]),
    '<|python_tag|>{"name": "f", "parameters": {"a": 1}};<|python_tag|>{"name": "f"}': ("", [F, ("f", "{}")]),
    # Everything else is content, JSON or not.
    '{"city": "Paris"}\n': ('{"city": "Paris"}\n', []),
    '{"name": "Ada", "age": 36}': ('{"name": "Ada", "age": 36}', []),
    '{"name": null, "parameters": {}}': ('{"name": null, "parameters": {}}', []),
    '[{"name": "f"}]': ('[{"name": "f"}]', []),
    ' Use {"name": "f", "parameters": {}}': (' Use {"name": "f", "parameters": {}}', []),
    "; x": ("; x", []),
    "<|python_tag|>print(1)": ("<|python_tag|>print(1)", []),
    "<|python_tag|>": ("<|python_tag|>", []),
    "<|python": ("<|python", []),
    '<b>{"name": "f", "parameters": {}}': ('<b>{"name": "f", "parameters": {}}', []),
    '{"name": "f", "parameters": {"a": 1}}; {"city": 1}; {"name"': ('; {"city": 1}; {"name"', [F]),
    '{"name": "f", "parameters": {"a": 1}}\nDone; ': ("\nDone; ", [F]),
    '{"name": "f", "parameters": {"a": 1} so': ("so", [F]),
    # Cut off by the length limit.
    '{"name": "f", "para': ('{"name": "f", "para', []),
    '{"name": "f", "parameters": {"a': ("", [("f", '{"a')]),
    '{"name": "f", "parameters": {"a": 1}};<|py': (";<|py", [F]),
    '<|python_tag|>{"name": "f"': ("", [("f", "")]),
}


CASES = [(name, text) for name, cases in (("hermes", HERMES_CASES), ("llama3_json", LLAMA3_CASES)) for text in cases]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_content_and_calls_of_answers(name: str, text: str) -> None:
    content, calls = (HERMES_CASES if name == "hermes" else LLAMA3_CASES)[text]
    got = assert_any_split_agrees(name, text, [])
    assert got.content == content
    assert got.calls == calls


@settings(max_examples=150)
@given(st.sampled_from(CASES), st.sampled_from(CASES), st.integers(0), st.lists(st.integers(0), max_size=6))
def test_any_split_of_any_beginning_gives_the_same(
    first: tuple[str, str], second: tuple[str, str], end: int, cuts: list[int]
) -> None:
    text = first[1] + second[1]
    text = text[: end % (len(text) + 1)]
    got = assert_any_split_agrees(first[0], text, cuts)
    if not got.calls:
        assert got.content == text


SIGNIFICANT = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f"', '"arguments": ', '"parameters": {', '"name"',
    "<function=f>", "<parameter=a>\n", "\n</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
    "function", "\n```json\n", "\n```", "[f(a=", "'", "(", ")", "=",
    "<", ">", "{", "}", "[", "]", '"', "\\", "\\u", "d83d", ":", ",", ";", " ", "\n", "1", "a", "é",
]  # fmt: skip


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.sampled_from(SIGNIFICANT), max_size=30).map("".join),
    st.lists(st.integers(0), max_size=6),
)
def test_any_split_of_any_text_gives_the_same(name: str, text: str, cuts: list[int]) -> None:
    got = assert_any_split_agrees(name, text, cuts)
    if not got.calls:
        assert got.content == text
    rest = iter(text)
    assert all(char in rest for char in got.content), "content was invented, doubled or put out of order"


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
json_texts = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=8), values, max_size=4),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
    separators=st.sampled_from([(",", ":"), (", ", " : ")]),
)
words = st.text('ab {}[]",:\\.', min_size=1, max_size=12).map(lambda text: f"x{text}x")
parts = st.one_of(words, st.tuples(names, json_texts, st.sampled_from(["name first", "name last", "string"])))


def written(name: str, arguments: str, style: str) -> str:
    quoted = json.dumps(name)
    if style == "name last":
        return f'{{"arguments": {arguments}, "name": {quoted}}}'
    return f'{{"name": {quoted}, "arguments": {json.dumps(arguments) if style == "string" else arguments}}}'


@settings(max_examples=150)
@given(st.lists(parts, max_size=5), st.lists(st.integers(0), max_size=6))
def test_written_calls_are_read_unchanged(parts: list[str | tuple[str, str, str]], cuts: list[int]) -> None:
    content, calls, answer = "", [], ""
    for part in parts:
        if isinstance(part, str):
            content += part
            answer += part
        else:
            calls.append(part[:2])
            answer += f"\n<tool_call>\n{written(*part)}\n</tool_call>"
    got = assert_any_split_agrees("hermes", answer, cuts)
    assert (got.content, got.calls) == (content, calls)
    objects = [written(*part) for part in parts if not isinstance(part, str)]
    got = assert_any_split_agrees("llama3_json", "; ".join(objects), cuts)
    assert (got.content, got.calls) == ("", calls)


def test_name_and_arguments_are_streamed_as_they_arrive() -> None:
    parser = HERMES.parser(ANY_TOOL)
    assert calls_of(parser.feed('ok\n<tool_call>\n{"name": "f')) == []
    (begun,) = calls_of(parser.feed('"'))
    assert (begun.index, begun.name, begun.arguments, parser.num_calls) == (0, "f", "", 1)
    for piece in ("{", '"a": ', '"b', "c", '"', "}"):
        if piece == "{":
            assert calls_of(parser.feed(', "arguments": ')) == []
        (delta,) = calls_of(parser.feed(piece))
        assert delta.arguments == piece
    assert calls_of(parser.feed("}\n</tool_call>")) == []


def test_content_is_streamed_at_once_unless_a_call_may_follow() -> None:
    parser = HERMES.parser(ANY_TOOL)
    assert content_of(parser.feed("a b")) == "a b"
    assert content_of(parser.feed("\n<tool")) == ""
    assert content_of(parser.feed("box>")) == "\n<toolbox>"
    parser = LLAMA3.parser(ANY_TOOL)
    assert content_of(parser.feed("Hi ")) == "Hi "
    assert content_of(parser.feed("{\n")) == "{\n"


@pytest.mark.parametrize(
    ("name", "call", "separator"),
    [("hermes", CALL, "\n"), ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', ";")],
)
def test_calls_beyond_the_limit_are_content(name: str, call: str, separator: str) -> None:
    got = assert_any_split_agrees(name, separator.join([call] * (MAX_TOOL_CALLS + 2)), [])
    assert got.calls == [F] * MAX_TOOL_CALLS
    assert got.content == f"{separator}{call}" * 2
    exactly = assert_any_split_agrees(name, separator.join([call] * MAX_TOOL_CALLS) + "\n", [])
    assert (exactly.content.strip(), exactly.calls) == ("", got.calls)


def test_a_call_beyond_the_limit_keeps_its_tags_after_an_unclosed_one() -> None:
    got = assert_any_split_agrees("hermes", CALL.removesuffix("\n</tool_call>") * MAX_TOOL_CALLS + CALL, [])
    assert got.calls == [F] * MAX_TOOL_CALLS
    assert got.content == CALL


def test_the_cost_is_linear_in_depth_and_length() -> None:
    """Quadratic work would take minutes here, and recursion would not return."""
    size = 100_000
    deep = "[" * size + "]" * size
    late = f'<tool_call>{{"arguments": {deep}, "name": "f"}}</tool_call>'
    assert stream(HERMES.parser(ANY_TOOL), list(late)).calls == [("f", deep)]
    never = f'<tool_call>{{"arguments": {deep}}}</tool_call>'
    assert stream(HERMES.parser(ANY_TOOL), list(never)).content == never
    assert stream(HERMES.parser(ANY_TOOL), list("\n" * size + "<tool_call>" * 1000)).calls == []


@pytest.mark.parametrize("each", [HERMES, LLAMA3], ids=lambda each: each.NAME)
def test_a_forced_answer_is_a_call(each: JsonObjectFormat) -> None:
    forced = each.forced_prefix('say "hi"')
    assert stream(each.parser(ANY_TOOL), [forced, '{"a": 1}', "}"]).calls == [('say "hi"', '{"a": 1}')]
    any_call = each.forced_prefix(None) + f'f", "{each.ARGUMENTS_KEY}": {{"a": 1}}}}'
    assert stream(each.parser(ANY_TOOL), [any_call]).calls == [F]


def test_calls_written_by_the_template_are_parsed() -> None:
    """The built-in model's own turn, as the template renders it, is read back; a forced answer begins like it."""
    template = ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), {})
    calls = [{"function": {"name": name, "arguments": text}} for name, text in (F, ("g", '{"b": "é"}'))]
    turn = {"role": "assistant", "content": "Wait.", "tool_calls": calls}
    asked = [{"role": "user", "content": "?"}]
    rendered = template.render([*asked, turn], add_generation_prompt=False)
    answer = rendered.removeprefix(template.render(asked, add_generation_prompt=True)).removesuffix("<|im_end|>\n")
    assert answer.startswith("Wait.\n" + HERMES.forced_prefix("f"))
    got = assert_any_split_agrees("hermes", answer, [])
    assert (got.content, got.calls) == ("Wait.", [F, ("g", '{"b": "é"}')])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, None),
        ("", None),
        ("{{ messages[0].content }}", None),
        (TEMPLATE.read_text(encoding="utf-8"), "hermes"),
        (r"<tool_call>\n{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        (r"<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "glm45"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", "glm47"),
        ("{{- '<|tool_call_start|>[' }}", "lfm2"),
        ("{{- 'List of tools: <|tool_list_start|>[' }}", "lfm2"),
        ("{{ '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + tools }}", "granite"),
        ("{{ '<|' + message['role'] + '|>' + '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ call_id }}", "kimi_k2"),
        ("{{- '<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>' }}", "openai"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json"),
        ("""{{- 'Respond in the format {"name": function name, "parameters": dictionary of names' }}""", "llama3_json"),
        (r"\"Respond in the format {\\\"name\\\": function name, ", None),
        (r"Respond in the format {\"name\": function name, \"parameters\": dictionary of names}", "llama3_json"),
        ("{{- '[TOOL_CALLS] [' }}", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json' + '\\n'", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2)]", "pythonic"),
        ('[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "description": "d"}}]', None),
    ],
)
def test_the_format_is_detected_from_the_template(source: str | None, expected: str | None) -> None:
    assert detect_format(source) == expected
