"""The built-in model's training data: answers are correct, splits are disjoint, and every item fits the context.

Answers are recomputed here from the prompt's text alone, not with the generators' own code.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

RECIPE_PARENT = Path(__file__).parents[2] / "examples" / "demo_model"
sys.path.insert(0, str(RECIPE_PARENT))

from recipe.bank import (  # noqa: E402
    ANSWER,
    CONTEXT,
    PADDING,
    PROMPT,
    TOKEN_BITS,
    BankConfig,
    Encoder,
    Packer,
    build_bank,
    load_bank,
    make_rows,
)
from recipe.draw import Draw, Item, is_held_out  # noqa: E402
from recipe.tasks import arithmetic, chat, lists, lookup, python_functions, records, standard_library, tools  # noqa: E402
from recipe.tasks.table import EXAMS, TASKS, items, mixed  # noqa: E402
from recipe.template import document, prompt_and_answer, render  # noqa: E402
from recipe.tokenizer import END_OF_TEXT_ID, SPECIAL_TOKENS, load_tokenizer, train_tokenizer  # noqa: E402

Generator = Callable[[Draw], Item]
ALWAYS_TRAINED = {"chat"}


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(seed=1, num_chars=600_000).save(str(path))
    return path


def drawn(make: Generator, count: int, held_out: bool = False) -> Iterator[Item]:
    draw = Draw(f"test {make.__module__}.{make.__name__}", held_out)
    return (make(draw) for _ in range(count))


def exchanges(item: Item) -> list[tuple[str, str]]:
    """Returns each user turn with the assistant's answer to it."""
    said = [m for m in item.messages if m["role"] != "system"]
    return [(a["content"], b["content"]) for a, b in itertools.pairwise(said) if a["role"] == "user"]


@pytest.mark.parametrize("make", [*(t.make for t in TASKS), *(e.make for e in EXAMS), mixed])
def test_a_seed_draws_the_same_items_again(make: Generator) -> None:
    first, second = Draw("seed"), Draw("seed")
    assert [make(first) for _ in range(20)] == [make(second) for _ in range(20)]
    assert [make(Draw("seed")) for _ in range(5)] != [make(Draw("other")) for _ in range(5)]


@pytest.mark.parametrize(
    "task", [t for t in TASKS if t.name not in (*ALWAYS_TRAINED, "arithmetic")], ids=lambda t: t.name
)
def test_item_keys_determine_the_split(task) -> None:
    for held_out in (False, True):
        keys = [item.key for item in drawn(task.make, 40, held_out)]
        assert [is_held_out(key) for key in keys] == [held_out] * len(keys)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_problem_of_an_arithmetic_conversation_belongs_to_the_split(held_out: bool) -> None:
    for item in drawn(arithmetic.make, 60, held_out):
        assert {is_held_out(key) for key in item.key.split()} == {held_out}


def test_held_out_documents_are_never_trained_on() -> None:
    trained = {text for text, item in items(Draw("train"), 400_000) if item.task not in ALWAYS_TRAINED}
    for exam in EXAMS:
        if exam.name != "identity":
            assert trained.isdisjoint(document(item) for item in drawn(exam.make, 40, held_out=True))


def test_the_standard_library_is_found_and_split() -> None:
    trained, kept = (set(standard_library.source_paths(held_out)) for held_out in (False, True))
    assert trained.isdisjoint(kept)
    assert len(trained) > 3 * len(kept) > 30
    assert not any("site-packages" in path.parts for path in trained)
    assert any(path.name == "argparse.py" for path in trained | kept)


def test_arithmetic_answers_are_correct() -> None:
    number = re.compile(r"\d+")
    seen = set()
    for item in [*drawn(arithmetic.make, 400), *drawn(arithmetic.make_three_digits, 50, held_out=True)]:
        for question, answer in exchanges(item):
            a, b = (int(n) for n in number.findall(question))
            signs = {"+": "+ plus Add gets", "-": "- minus Subtract gives", "*": "* times Multiply boxes"}
            (sign,) = [s for s, words in signs.items() if any(w in question.split() for w in words.split())]
            if question.startswith("Subtract"):
                a, b = b, a
            value = {"+": a + b, "-": a - b, "*": a * b}[sign]
            assert answer == (str(value) if question.endswith("=") else f"{a} {sign} {b} = {value}.")
            seen.add(sign)
    assert seen == {"+", "-", "*"}


# Questions, and the sentences that answer them, with the value as the group.
FACTS = (
    (r"(?:What is the|Tell me the|Which) code (?:of|does) (?P<n>\w+)", r"The code of {n} is (\d{{4}})\."),
    (r"(?:What is the name of|What is) (?P<n>\w+)'s (?P<o>\w+)(?: called)?\?", r"{n} has an? {o} called (\w+)\."),
    (r"(?:In which city|Where) does (?P<n>\w+) live", r"{n} lives in (\w+)\."),
    (r"(?:What|Which) color (?:is|does) (?P<n>\w+)'s (?P<o>\w+)", r"{n}'s {o} is (\w+)\."),
    (r"What does (?P<n>\w+) like to eat", r"{n} likes to eat (\w+)\."),
    (r"What is (?P<n>\w+)'s favorite food", r"{n} likes to eat (\w+)\."),
    (r"What (?:is|does) (?P<n>\w+)(?:'s job| work as)", r"{n} works as an? (\w+)\."),
    (r"(?:How old is|What is the age of) (?P<n>\w+)", r"{n} is (\d+) years old\."),
    (r"(?:What|Which sport) does (?P<n>\w+) (?:play|like)\?", r"{n} plays (\w+) every week\."),
    (r"Where is the (?P<o>\w+) of (?P<n>\w+)", r"{n} put the {o} in the (\w+)\."),
    (r"Where did (?P<n>\w+) put the (?P<o>\w+)", r"{n} put the {o} in the (\w+)\."),
    (r"(?:What is the|Which) value (?:of|belongs to) (?P<n>\w+)", r"The value of {n} is (\d{{4}})\."),
)


def values_in(text: str, question: str) -> set[str]:
    """Returns the text's answer to the question."""
    found = set()
    for asked, told in FACTS:
        match = re.fullmatch(asked + r"[^?.]*[?.]?", question)
        if match:
            found |= set(re.findall(r"(?<![\w'])" + told.format(**match.groupdict()), text))
    return found


@pytest.mark.parametrize("make", [lookup.make_short, lookup.make_long, lookup.make_forty, lookup.make_full])
def test_facts_are_in_the_text_once_without_contradictions(make: Generator) -> None:
    num_known = num_unknown = 0
    for item in drawn(make, 40):
        whole = "\n".join(m["content"] for m in item.messages if m["role"] != "assistant")
        for turn, answer in exchanges(item):
            if answer == "I will remember it.":
                continue
            values = values_in(whole, turn.rsplit("\n", 1)[-1])
            if answer == lookup.UNKNOWN:
                assert not values
                num_unknown += 1
            else:
                assert len(values) == 1, (turn[-80:], answer, values)
                assert answer.endswith((f" {(value := values.pop())}.", f" {value} years old."))
                num_known += 1
    assert num_known >= 40
    assert num_unknown < num_known / 5


def is_fact(sentence: str) -> bool:
    return any(re.fullmatch(told.format(n=r"\w+", o=r"\w+"), sentence) for _, told in FACTS)


def test_the_exam_text_holds_forty_facts() -> None:
    for item in drawn(lookup.make_forty, 30, held_out=True):
        text = "\n".join(m["content"] for m in item.messages if m["role"] != "assistant")
        sentences = re.split(r"(?<=[.?!\"]) |\n", text)
        assert sum(is_fact(sentence) for sentence in sentences) == 40


def test_lists_are_copied_reversed_and_sorted() -> None:
    for item in drawn(lists.copy, 100):
        ((question, answer),) = exchanges(item)
        assert question.split(": ", 1)[1] == answer
    for item in drawn(lists.copy_text, 60):
        ((question, answer),) = exchanges(item)
        assert question.split("\n", 1)[1] == answer
    for item in drawn(lists.reverse, 100):
        ((question, answer),) = exchanges(item)
        assert question.split(": ", 1)[1].split(", ") == answer.split(", ")[::-1]
    for item in drawn(lists.sort, 100):
        ((question, answer),) = exchanges(item)
        given = question.split(": ", 1)[1].split(", ")
        order = (lambda x: int(x)) if given[0].isdigit() else (lambda x: x)
        assert answer.split(", ") == sorted(given, key=order)


def test_shapes_and_changes_keep_the_items() -> None:
    for item in drawn(lists.shape, 100):
        ((question, answer),) = exchanges(item)
        bare = [
            [re.sub(r"^(- |\d+\. )", "", line) for part in text.split("\n") for line in part.split(", ")]
            for text in (question.split("\n", 1)[1], answer)
        ]
        assert bare[0] == bare[1]
    for item in drawn(lists.change, 200):
        ((question, answer),) = exchanges(item)
        asked, text = question.split(": ", 1)
        given, made = text.split(", "), answer.split(", ") if answer else []
        words = asked.split()
        if words[0] == "Remove":
            assert made == [x for x in given if x != words[1]]
        elif words[0] == "Add":
            assert made == [*given, words[1]]
        elif words[0] == "Replace":
            assert made == [words[3] if x == words[1] else x for x in given]
        else:
            assert answer == text.upper()


def test_json_answers_match_the_text() -> None:
    for item in drawn(records.to_json, 200):
        ((question, answer),) = exchanges(item)
        told = question.split(": ", 1)[1]
        pairs = re.findall(r"(\w+)(?:: | = | )(\w+)", told)
        parsed = json.loads(answer)
        assert [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in parsed.items()] == pairs
        assert parsed == item.value
    for make in (records.make_json, records.update, records.table_to_json, records.indented):
        for item in drawn(make, 60):
            assert json.loads(exchanges(item)[0][1]) == item.value
    for item in drawn(records.field_of, 60):
        ((question, answer),) = exchanges(item)
        told, asked = question.split("\n")
        field, name = re.fullmatch(r"What is the (\w+) of (\w+)\?", asked).groups()
        (value,) = [record[field] for record in json.loads(told) if record["name"] == name]
        assert answer == f"The {field} of {name} is {value if isinstance(value, str) else json.dumps(value)}."


JSON_TYPES = {"string": str, "integer": int, "boolean": bool}


@pytest.mark.parametrize("make", [tools.make, tools.make_call])
def test_tool_calls_follow_their_schema_and_render_as_they_are_parsed(make: Generator) -> None:
    for item in drawn(make, 150):
        text = render(item.messages, item.tools)
        listed = re.search(r"<tools>\n(.*)\n</tools>", text, re.DOTALL).group(1)
        offered = {t["function"]["name"]: t["function"]["parameters"] for t in map(json.loads, listed.split("\n"))}
        (called,) = re.findall(r"<\|im_start\|>assistant\n<tool_call>\n(.*)\n</tool_call><\|im_end\|>", text)
        call = json.loads(called)
        assert call == item.value
        schema = offered[call["name"]]
        assert set(call["arguments"]) == set(schema["required"])
        for name, value in call["arguments"].items():
            assert type(value) is JSON_TYPES[schema["properties"][name]["type"]]
        num_results = sum(m["role"] == "tool" for m in item.messages)
        assert text.count("<|im_start|>user\n<tool_response>\n") == num_results
        assert text.count("<|im_start|>system\n") == 1


def test_the_template_reproduces_the_bytes_of_a_generated_call() -> None:
    """A server sends a call back as parsed arguments or as their JSON text: the next prompt must be the same."""
    schema = tools.schema_of("get_weather", "Get the weather in a city.", city="string")
    parsed = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Kyōto"}}}],
    }
    spelled = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": '{"city": "Kyōto"}'}}],
    }
    asked = {"role": "user", "content": "What is the weather in Kyōto?"}
    first = render([asked, parsed], [schema])
    assert first == render([asked, spelled], [schema])
    assert first.endswith(
        'assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Kyōto"}}\n</tool_call><|im_end|>\n'
    )
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    both = render([asked, parsed, *results], [schema], add_generation_prompt=True)
    assert both.removeprefix(first) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_plain_conversation_is_chatml() -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    plain = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert render(turns[:2], [], add_generation_prompt=True) == plain
    assert render(turns, []) == plain + "A<|im_end|>\n"


def source_of(item: Item) -> str:
    ((_, answer),) = exchanges(item)
    return re.fullmatch(r"```python\n(.*)\n```", answer, re.DOTALL).group(1)


def test_python_answers_compile_and_a_request_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for item in drawn(python_functions.make, 1500):
        ((request, answer),) = exchanges(item)
        compile(source_of(item), "answer", "exec")
        assert answers.setdefault(request, answer) == answer


RESULTS = {
    "sum_list": ([2, 3, 4], 9),
    "largest": ([2, 7, 4], 7),
    "smallest": ([2, 7, 4], 2),
    "average": ([2, 4], 3.0),
    "is_prime": (91, False),
    "factorial": (5, 120),
    "fibonacci": (10, 55),
    "reverse": ("abc", "cba"),
    "count_vowels": ("Penstock", 2),
    "flatten": ([[1], [2, 3]], [1, 2, 3]),
    "invert": ({"a": 1}, {1: "a"}),
    "digit_sum": (407, 11),
    "keep_even": ([1, 2, 4], [2, 4]),
}


def test_python_functions_give_the_expected_results() -> None:
    for family in python_functions.FAMILIES:
        if family.name in RESULTS:
            space: dict = {}
            body = "\n".join("    " + line.format(x="item", k=3) for line in family.body)
            exec(f"def f({family.arguments.format(x='item', k=3)}):\n{body}", space)
            given, wanted = RESULTS[family.name]
            assert space["f"](given) == wanted, family.name


def test_answers_about_identity_are_always_the_same() -> None:
    asked = {q for item in drawn(chat.make_identity, 300) for q, _ in exchanges(item)}
    assert "What are you?" in asked
    assert all(a == chat.IDENTITY for item in drawn(chat.make_identity, 50) for _, a in exchanges(item))
    assert "Penstock" in chat.IDENTITY
    assert "demonstration model" in chat.IDENTITY


def test_the_answer_follows_the_prompt() -> None:
    for exam in EXAMS:
        for item in drawn(exam.make, 20, held_out=True):
            prompt, answer = prompt_and_answer(item)
            assert prompt.endswith("<|im_start|>assistant\n")
            assert document(item) == f"{prompt}{answer}\n"
            assert answer.endswith("<|im_end|>")
            # A tokenizer would join leading space to the header's line break, and the mask would be off by a token.
            assert not answer[0].isspace()


@pytest.mark.parametrize("make", [*(t.make for t in TASKS), *(e.make for e in EXAMS), mixed])
def test_items_fit_the_context_and_are_recovered_from_tokens(make: Generator, tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    for item in drawn(make, 60, held_out=make in [e.make for e in EXAMS]):
        text = document(item)
        ids = tokenizer.encode(text).ids
        assert len(ids) < CONTEXT
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_exam_context_is_about_1500_tokens(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    lengths = [len(tokenizer.encode(document(item)).ids) for item in drawn(lookup.make_forty, 40, held_out=True)]
    assert min(lengths) > 1350
    assert 1450 < np.mean(lengths) < 1600


def test_each_digit_is_a_token(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    assert tokenizer.encode("12345").tokens == list("12345")
    assert [tokenizer.token_to_id(t) for t in SPECIAL_TOKENS] == [0, 1, 2]


def test_only_answers_are_learnt(tokenizer_path: Path) -> None:
    encoder = Encoder(load_tokenizer(tokenizer_path))
    for make in (arithmetic.make, lookup.make_short, tools.make, mixed):
        for item in drawn(make, 25):
            text = document(item)
            (cells,) = encoder.encode([(text, True)])
            tokens, kinds = cells & (2**TOKEN_BITS - 1), cells >> TOKEN_BITS
            assert tokens[-1] == END_OF_TEXT_ID
            assert set(kinds) == {PROMPT, ANSWER}
            learnt = encoder.tokenizer.decode(tokens[kinds == ANSWER].tolist(), skip_special_tokens=False)
            answers = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL)
            assert learnt == "".join(answers)
    (cells,) = encoder.encode([("A story.", False)])
    assert set(cells >> TOKEN_BITS) == {ANSWER}


def test_the_packer_keeps_documents_whole() -> None:
    packer = Packer(row_length=16)
    documents = [np.full(n, n, dtype=np.uint16) | (ANSWER << TOKEN_BITS) for n in [7, 9, 16, 3, 12, 1, 5, 17, 2, 8]]
    for cells in documents:
        packer.add(cells)
    rows = packer.finish()
    assert packer.num_dropped == 1
    assert rows.shape[1] == 16
    kept = rows[rows >> TOKEN_BITS != PADDING]
    assert len(kept) == sum(len(d) for d in documents) - 17
    for row in rows:
        runs = [(value, len(list(run))) for value, run in itertools.groupby(row & 31) if value]
        assert all(length % value == 0 for value, length in runs)


def test_a_bank_is_reproducible_with_any_number_of_processes(
    tokenizer_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real library takes seconds to encode, and this test works with any text.
    monkeypatch.setattr(standard_library, "sources", lambda held_out: ["import os\n" * 50, "x = 1\n"])
    encoder = Encoder(load_tokenizer(tokenizer_path))
    first, _ = make_rows(encoder, Draw("rows"), 60_000)
    second, _ = make_rows(encoder, Draw("rows"), 60_000)
    assert np.array_equal(first, second)
    config = BankConfig(seed=3, num_tokens=20_000, num_processes=2)
    build_bank(config, tokenizer_path, tmp_path / "bank")
    rows, code = load_bank(config, tmp_path / "bank")
    expected, _ = make_rows(encoder, Draw("train 3 shard 0"), config.shard_chars)
    assert np.array_equal(rows, expected)
    assert encoder.tokenizer.decode((code & (2**TOKEN_BITS - 1)).tolist()) == "import os\n" * 50 + "x = 1\n"
    with pytest.raises(ValueError, match="remove it first"):
        build_bank(BankConfig(seed=4, num_tokens=20_000, num_processes=1), tokenizer_path, tmp_path / "bank")
