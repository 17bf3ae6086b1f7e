"""Separation of reasoning and content: its beginning and end, and grammars that apply after the reasoning."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.grammar.llguidance_backend import LLGuidanceBackend
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.server.openai.reasoning import ReasoningFormat, Start
from penstock.server.openai.reasoning_formats import REASONING_FORMATS, detect_reasoning, make_reasoning_format
from penstock.tokenizer.tokenizer import AddedToken, Tokenizer
from penstock.utils.errors import GrammarError, RequestError

DEMO = Path(penstock.__file__).parent / "demo"
TOKENIZER = Tokenizer(DEMO, 4096)
BACKEND = LLGuidanceBackend((DEMO / "tokenizer.json").read_text(encoding="utf-8"), 4096, (2, 0))
QWEN3, DEEPSEEK, NONE = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"], REASONING_FORMATS["none"]
HARMONY = REASONING_FORMATS["openai_gptoss"]
SUM = "<think>\nTwo and two.\n\nFour.\n</think>\n\nIt is 4.\n"

CASES: list[tuple[Start, str, str, str]] = [
    (Start.POSSIBLE, SUM, "Two and two.\n\nFour.", "It is 4.\n"),
    (Start.EXPECTED, SUM, "Two and two.\n\nFour.", "It is 4.\n"),
    (Start.INSIDE, SUM.removeprefix("<think>"), "Two and two.\n\nFour.", "It is 4.\n"),
    (Start.OVER, SUM, "", SUM),
    # Without an opening tag, and with one that comes too late.
    (Start.POSSIBLE, "It is 4.", "", "It is 4."),
    (Start.POSSIBLE, "\n It is <think>4</think>", "", "\n It is <think>4</think>"),
    (Start.POSSIBLE, "\n <think>a</think>b", "a", "b"),
    (Start.EXPECTED, "Two.\n</think>4", "Two.", "4"),
    # Empty reasoning, or an empty answer.
    (Start.POSSIBLE, "<think>\n\n</think>\n\n4", "", "4"),
    (Start.POSSIBLE, "<think></think>", "", ""),
    (Start.INSIDE, "a</think>\n\n", "a", ""),
    (Start.POSSIBLE, "", "", ""),
    # The first closing tag counts, and what only looks like one is reasoning.
    (Start.INSIDE, "a</think>b\n</think>c", "a", "b\n</think>c"),
    (Start.INSIDE, "a </thin</think>b", "a </thin", "b"),
    # Cut off by the length limit.
    (Start.POSSIBLE, "<thi", "", "<thi"),
    (Start.EXPECTED, "<thi", "<thi", ""),
    (Start.POSSIBLE, "<think>\nTwo and\n</thi", "Two and\n</thi", ""),
    (Start.INSIDE, "\nTwo and", "Two and", ""),
]

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f"
HARMONY_CASES: list[tuple[str, str, str]] = [
    (f"{ANALYSIS}Two and two.<|end|>{FINAL}It is 4.<|return|>", "Two and two.", "It is 4."),
    (f"{ANALYSIS}Two <|and|> <b>.<|end|>{FINAL}<|4|>", "Two <|and|> <b>.", "<|4|>"),
    ("<|channel|>final<|message|>4", "", "4"),
    # Several messages of a kind.
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "a\n\nb", "c"),
    (f"<|channel|>commentary<|message|>Let me see.<|end|>{FINAL}4", "", "Let me see.\n\n4"),
    # Calls: what is between the name and the arguments, and another place of the name.
    (
        f"{ANALYSIS}a<|end|><|start|>assistant{TO_F} <|constrain|>json<|message|>{{}}<|call|>",
        "a",
        f"{TO_F}<|message|>{{}}<|call|>",
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", f"{TO_F}<|message|>{{}}<|call|>"),
    # A message begins without the end of the last one.
    (f"{ANALYSIS}a{FINAL}b", "a", "b"),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "a", "b"),
    # No channels: content as it is.
    ('{"a": 1}', "", '{"a": 1}'),
    ("\n too late", "", "\n too late"),
    ("<|channel|>final" + "x" * 600, "", "final" + "x" * 600),
    ("<|channel|>x", "", "<|channel|>x"),
    ("to= x is an equation", "", "to= x is an equation"),
    (
        "<|channel|>final<|message|>The <|start|> or <|channel|>",
        "",
        "The <|start|> or <|channel|>",
    ),
    ("<|channel|>final<|message|>a<|end|>t", "", "at"),
    # Cut off by the length limit.
    ("", "", ""),
    ("<|chan", "", "<|chan"),
    ("<|channel|>ana", "", "<|channel|>ana"),
    ("<|channel|>analysis", "", ""),
    (f"{ANALYSIS}Two <|en", "Two <|en", ""),
    (f"{ANALYSIS}a<|end|><|start|>assis", "a", ""),
]

PIECES = ["<think>", "</think>", "<", "</thi", "\n", " ", "a", "think>"]


def read(form: ReasoningFormat, start: Start, pieces: list[str]) -> tuple[str, str]:
    reader = form.reader(start)
    parts = [*map(reader.feed, pieces), reader.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content(start: Start, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(QWEN3, start, pieces) == (reasoning, content)


@pytest.mark.parametrize(("text", "reasoning", "content"), HARMONY_CASES)
def test_messages_of_gpt_oss(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), [text[start : start + 7] for start in range(0, len(text), 7)]):
        assert read(HARMONY, Start.POSSIBLE, pieces) == (reasoning, content)
    assert read(HARMONY, Start.OVER, [text]) == ("", text)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_messages_of_gpt_oss_keep_their_order(size: int) -> None:
    head = "<|start|>assistant<|channel|>"
    text = f"{ANALYSIS}a<|end|>{head}commentary<|message|>b<|end|>{head}analysis<|message|>c<|end|>{FINAL}d"
    reader = HARMONY.reader(Start.POSSIBLE)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    read = [pair for piece in pieces for pair in reader.feed_in_order(piece) if any(pair)]
    assert [*read, reader.finish()] == [
        ("a", ""),
        ("", "b"),
        ("\n\n", ""),
        ("c", ""),
        ("", "\n\n"),
        ("", "d"),
        ("", ""),
    ]


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [*(each[0] for each in HARMONY_CASES[:8]), "<|", "|>", "<|end|>", "<|message|>", "a", "\n", " "]
        ),
        max_size=8,
    ).map("".join),
    st.lists(st.integers(0), max_size=5),
)
def test_any_split_of_messages_gives_the_same(text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    whole = read(HARMONY, Start.POSSIBLE, [text])
    assert read(HARMONY, Start.POSSIBLE, list(text)) == whole
    assert read(HARMONY, Start.POSSIBLE, [text[a:b] for a, b in itertools.pairwise(borders)]) == whole


def test_constraints_of_gpt_oss_apply_to_the_last_message() -> None:
    final = "<|channel|>final<|message|>{}"
    for good in (final, f"{ANALYSIS}so [] <|en<|end|><|start|>assistant{final}"):
        assert is_accepted(HARMONY, Start.POSSIBLE, good, json_object=True)
        assert not is_accepted(HARMONY, Start.POSSIBLE, good.replace("{}", "[]]"), json_object=True)
    assert not is_accepted(HARMONY, Start.POSSIBLE, f"{ANALYSIS}so", json_object=True)
    assert not is_accepted(HARMONY, Start.POSSIBLE, "{}", json_object=True)
    assert is_accepted(HARMONY, Start.OVER, "{}", json_object=True)
    # The tokenizer here has no such tag, so another token stands in for it.
    known = HARMONY.with_tokens({"<|end|>": AddedToken(1, True)})
    assert known.needs_special_tokens(Start.POSSIBLE)
    thought = f"{ANALYSIS}so<|im_start|><|start|>assistant{final}"
    assert is_accepted(known, Start.POSSIBLE, thought, json_object=True)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "none"),
        ("{{ messages }}", "none"),
        ("{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}", "qwen3"),
        ("{{'<｜Assistant｜><think>\n'}}{{ content.split('</think>')[-1] }}", "deepseek_r1"),
        ("{% if thinking %}{{'<think>'}}{% else %}{{'</think>'}}{% endif %}{{'<｜Assistant｜>'}}", "qwen3"),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}", "openai_gptoss"),
        (
            "Write your thoughts after 'Here is my thought process:' and the rest after 'Here is my response:'",
            "granite",
        ),
    ],
)
def test_the_format_is_detected_from_the_template(template: str | None, name: str) -> None:
    assert detect_reasoning(template) == name


@settings(max_examples=300)
@given(
    st.sampled_from(list(Start)),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "\n", " ", "a", "think>"]), max_size=12).map(
        "".join
    ),
    st.lists(st.integers(0), max_size=5),
)
def test_any_split_gives_the_same(start: Start, text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    whole = read(QWEN3, start, [text])
    assert read(QWEN3, start, list(text)) == whole
    assert read(QWEN3, start, [text[a:b] for a, b in itertools.pairwise(borders)]) == whole


def test_reasoning_is_streamed_as_it_arrives() -> None:
    reader = QWEN3.reader(Start.INSIDE)
    assert reader.feed("\nTwo") == ("Two", "")
    assert reader.feed(" and <") == (" and ", "")
    assert reader.feed("b>\n") == ("<b>", "")
    assert reader.feed("two") == ("\ntwo", "")
    assert reader.feed("</think>\n") == ("", "")
    assert reader.feed("\n4") == ("", "4")


@pytest.mark.parametrize(
    ("prompt", "continued", "qwen3", "deepseek"),
    [
        ("<|im_start|>assistant\n", None, Start.POSSIBLE, Start.EXPECTED),
        ("<|im_start|>assistant\n<think>\n", None, Start.INSIDE, Start.INSIDE),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", None, Start.OVER, Start.OVER),
        ("assistant\nIt is", "It is", Start.OVER, Start.OVER),
        ("assistant\n<think>\nTwo", "<think>\nTwo", Start.INSIDE, Start.INSIDE),
        ("assistant\n<think>a</think>b", "<think>a</think>b", Start.OVER, Start.OVER),
    ],
)
def test_the_start_of_an_answer_depends_on_the_prompt(
    prompt: str, continued: str | None, qwen3: Start, deepseek: Start
) -> None:
    tokens = TOKENIZER.encode(prompt, add_special_tokens=False)
    assert QWEN3.start_of(TOKENIZER, tokens, continued) is qwen3
    assert DEEPSEEK.start_of(TOKENIZER, tokens, continued) is deepseek
    assert NONE.start_of(TOKENIZER, tokens, continued) is Start.OVER


def is_accepted(form: ReasoningFormat, start: Start, text: str, **answer: object) -> bool:
    params = StructuredOutputsParams(**answer, reasoning=form.grammar(start))  # pyright: ignore[reportArgumentType]
    state = BACKEND.compile(params.spec())
    try:
        state.accept([*TOKENIZER.encode(text, add_special_tokens=False), 2])
    except GrammarError:
        return False
    return state.is_finished


@pytest.mark.parametrize(
    "answer",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"json_object": True}, {"regex": r"\{\"a\": [0-9]\}"}, {"choice": ['{"a": 1}', "no"]},
        {"grammar": 'start: "{" body "}"\nbody: "\\"a\\": " /[0-9]/'},
        {"grammar": 'root ::= "{" body "}"\nbody ::= "\\"a\\": " [0-9]'},
    ],
    ids=lambda answer: next(iter(answer)),
)  # fmt: skip
def test_a_grammar_applies_after_the_reasoning(answer: dict[str, object]) -> None:
    good, bad = '{"a": 1}', '{"a": x}'
    thought = 'so {"a": x} < </thin\n'
    assert is_accepted(QWEN3, Start.OVER, good, **answer)
    assert is_accepted(QWEN3, Start.POSSIBLE, good, **answer)
    assert is_accepted(QWEN3, Start.POSSIBLE, f"<think>{thought}</think>\n\n{good}", **answer)
    assert not is_accepted(QWEN3, Start.POSSIBLE, f"{thought}</think>\n\n{good}", **answer)
    for start in (Start.INSIDE, Start.EXPECTED):
        assert is_accepted(QWEN3, start, f"{thought}</think>\n\n{good}", **answer)
        assert not is_accepted(QWEN3, start, good, **answer)
    assert is_accepted(QWEN3, Start.EXPECTED, f"<think>{thought}</think>{good}", **answer)
    for start in (Start.POSSIBLE, Start.INSIDE, Start.EXPECTED):
        assert not is_accepted(QWEN3, start, f"<think>{thought}</think>\n{bad}", **answer)
        assert not is_accepted(QWEN3, start, f"<think>{thought}", **answer)
        assert not is_accepted(QWEN3, start, f"<think>{thought}</think>\n{good}</think>{good}", **answer)


def test_tags_that_are_tokens_end_the_reasoning() -> None:
    """The tokenizer here has no such tags, so another token stands in for the closing one."""
    form = ReasoningFormat("x", "<think>", "</think>", Start.EXPECTED, {"</think>": AddedToken(1, True)})
    assert form.needs_special_tokens(Start.EXPECTED)
    assert not form.needs_special_tokens(Start.OVER)
    for closing in ("<|im_start|>", "</think>"):
        assert is_accepted(form, Start.EXPECTED, f"so{closing}\n\n{{}}", json_object=True)
        assert not is_accepted(form, Start.EXPECTED, f"so{closing}\n\n[]", json_object=True)


def test_an_opening_tag_that_is_a_token_is_not_spelled() -> None:
    form = ReasoningFormat("x", "<think>", "</think>", Start.POSSIBLE, {"<think>": AddedToken(1, False)})
    for start in (Start.POSSIBLE, Start.EXPECTED):
        assert is_accepted(form, start, "<|im_start|>so</think>{}", json_object=True)
    assert is_accepted(form, Start.POSSIBLE, "{}", json_object=True)
    assert not is_accepted(form, Start.POSSIBLE, "<think>so</think>{}", json_object=True)


def test_the_tokenizer_s_tags_are_looked_up() -> None:
    assert make_reasoning_format("qwen3", None) == QWEN3
    assert make_reasoning_format("qwen3", TOKENIZER) == QWEN3
    assert make_reasoning_format("auto", TOKENIZER) == NONE
    assert make_reasoning_format("auto", None) == NONE


def test_invalid_grammars_of_reasoning_are_refused() -> None:
    for bad in (5, "\ud800", "x" * 70_000):
        with pytest.raises(RequestError, match="reasoning"):
            StructuredOutputsParams(json_object=True, reasoning=bad)  # pyright: ignore[reportArgumentType]
