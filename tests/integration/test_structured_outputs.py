"""Structured outputs: always valid, with the same tokens for every speculator and overlap, and over HTTP."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock import LLM, RequestOutput, SamplingParams
from penstock.messages.structured_outputs import StructuredOutputsParams
from tests.integration.server_process import ServerProcess, serve
from tests.integration.test_identity_speculation import METHODS, SMALL_POOL, config

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "blue"]
ASKED: list[StructuredOutputsParams | None] = [
    StructuredOutputsParams(json=PERSON),
    StructuredOutputsParams(regex=r"[a-z]{3}-\d{2,4}"),
    StructuredOutputsParams(choice=COLOURS),
    None,
    StructuredOutputsParams(grammar='start: "x" ("y" | "z")+ "."'),
]
MESSAGES: list[Any] = [{"role": "user", "content": "Describe a person as JSON."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        person.keys() == {"name", "age", "tags"}
        and len(person["name"]) <= 12
        and 0 <= person["age"] <= 120
        and len(person["tags"]) <= 3
        and set(person["tags"]) <= {"a", "b"}
    )


def generate(**engine_args: Any) -> tuple[list[RequestOutput], LLM]:
    params = [
        SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=80, structured_outputs=wanted)
        for number, wanted in enumerate(ASKED * 3)
    ]
    llm = LLM(**{"max_model_len": 240, "enable_prefix_caching": False, "async_scheduling": False, **engine_args})
    outputs = llm.generate(["Some text, perhaps about a person: "] * len(params), params, use_tqdm=False)
    llm.check_integrity()
    llm.shutdown()
    return outputs, llm


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return generate()[0]


def test_outputs_are_valid(plain: list[RequestOutput]) -> None:
    checks = [
        is_person,
        lambda text: re.fullmatch(r"[a-z]{3}-\d{2,4}", text),
        lambda text: text in COLOURS,
        lambda text: True,
        lambda text: re.fullmatch(r"x[yz]+\.", text),
    ]
    num_complete = 0
    for output, is_valid in zip(plain, checks * 3, strict=True):
        completion = output.outputs[0]
        assert output.error is None
        if completion.finish_reason == "stop":
            num_complete += 1
            assert is_valid(completion.text), completion.text
    assert num_complete >= 9, "most outputs were meant to end by themselves"


@pytest.mark.spread(2)
@pytest.mark.parametrize(("method", "overlap"), list(itertools.product([None, *METHODS], (False, True))))
def test_same_tokens_with_drafts_and_overlap(plain: list[RequestOutput], method: str | None, overlap: bool) -> None:
    drafts = None if method is None else config(method, 3)
    outputs, llm = generate(async_scheduling=overlap, speculative_config=drafts, **SMALL_POOL)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain]
    assert llm.stats().num_preemptions > 0
    if method == "draft_model":
        assert 0 < llm.stats().speculation.num_accepted_tokens < llm.stats().speculation.num_draft_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_is_complete_within_drafts_ends_the_request(overlap: bool) -> None:
    """After it nothing but the end of sequence is allowed, and `min_tokens` forbids that."""
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = LLM(max_model_len=256, num_gpu_blocks_override=100, async_scheduling=overlap, speculative_config=drafts)
    form = StructuredOutputsParams(regex="(ab){12}")
    params = SamplingParams(temperature=0.0, max_tokens=64, min_tokens=50, structured_outputs=form)
    [output] = llm.generate("abab" * 20, params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.error) == ("ab" * 12, "stop", None)
    assert output.num_accepted_tokens
    llm.shutdown()


@pytest.mark.parametrize(
    ("grammar", "bias", "reason"),
    [('start: ("b" | "a" <|im_end|>)+', 60.0, "length"), ('start: "b" "a" "b" <|im_end|>', 0.0, "error")],
    ids=["only after a rejected draft", "after an accepted draft"],
)
def test_a_grammar_that_fails_after_a_draft(grammar: str, bias: float, reason: str) -> None:
    """An end of sequence inside a grammar is not allowed, and nothing else may follow."""
    found: list[tuple[Any, ...]] = []
    for count in (0, 4):
        drafts = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        llm = LLM(max_model_len=128, num_gpu_blocks_override=50, speculative_config=drafts if count else None)
        (a,), (b,) = (llm.get_tokenizer().encode(letter) for letter in "ab")
        form = StructuredOutputsParams(grammar=grammar)
        params = SamplingParams(
            temperature=0.0, max_tokens=12, logprobs=0, logit_bias={b: bias}, structured_outputs=form
        )
        [output] = llm.generate({"prompt_token_ids": [b, a] * 20}, params, use_tqdm=False)
        [completion] = output.outputs
        assert (completion.finish_reason, output.is_request_error) == (reason, reason == "error")
        found.append((completion.token_ids, completion.text, completion.logprobs))
        assert not count or llm.stats().speculation.num_draft_tokens
        llm.shutdown()
    (token_ids, text, logprobs), drafted = found
    assert drafted[:2] == (token_ids, text)
    assert [list(row) for row in drafted[2]] == [list(row) for row in logprobs]


def test_an_end_of_sequence_that_is_ignored_ends_no_grammar_before_min_tokens() -> None:
    llm = LLM(max_model_len=64, num_gpu_blocks_override=20)
    eos = llm.get_tokenizer().eos_token_id
    assert eos is not None
    form = StructuredOutputsParams(regex="[a-z ]*")
    asked = SamplingParams(
        temperature=0.0, max_tokens=20, min_tokens=10, logit_bias={eos: 100.0}, structured_outputs=form
    )
    [expected], [output] = (
        llm.generate("Once upon a", replace(asked, ignore_eos=ignores), use_tqdm=False) for ignores in (False, True)
    )
    assert len(output.outputs[0].token_ids) == 11
    assert output.outputs[0] == expected.outputs[0]
    llm.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serve("--max-model-len", "1024", "--speculative-config", json.dumps(config("mtp", 2))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: OpenAI, **extra: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=120, **extra).choices[0]


@pytest.mark.long
def test_response_format(client: OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    choice = ask(client, response_format=wanted)
    assert choice.finish_reason == "stop"
    assert is_person(choice.message.content)
    anything = ask(client, response_format={"type": "json_object"}, temperature=0.7, seed=3)
    assert anything.message.content.startswith("{")
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content), dict)


def test_the_field_of_vllm(client: OpenAI) -> None:
    for wanted, pattern in (({"choice": COLOURS}, "red|green|blue"), ({"regex": "a{3,5}b"}, "a{3,5}b")):
        choice = ask(client, extra_body={"structured_outputs": wanted}, temperature=1.0, seed=5)
        assert re.fullmatch(pattern, choice.message.content), choice


@pytest.mark.spread(1)
@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool_calls_fit_their_schema(client: OpenAI, tool_choice: Any) -> None:
    tools: Any = [WEATHER, {"type": "function", "function": {"name": "get_time"}}]
    for seed in range(4):
        choice = ask(client, tools=tools, tool_choice=tool_choice, temperature=1.0, seed=seed)
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert choice.message.content is None
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert arguments.keys() == {"city", "days"}
            assert arguments["days"] <= 9
        else:
            assert tool_choice == "required"


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(unclosed"},
        {"grammar": "start: missing_rule"},
        {"json": {"type": "no-such-type"}},
        {"json": "{"},
        {"choice": []},
        {"regex": "a", "choice": ["b"]},
        {},
        {"json": {"$ref": "#/nowhere"}},
    ],
)
def test_invalid_grammars(client: OpenAI, wanted: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, extra_body={"structured_outputs": wanted})


def test_a_malicious_schema_fails_only_its_own_request(client: OpenAI, server: ServerProcess) -> None:
    """While it is being refused, others get the answers that they get alone."""
    hostile = {"regex": "(((((a{1,100}){1,100}){1,100}){1,100})b?){1,100}"}
    alone = ask(client, temperature=0).message.content

    def attack() -> str:
        try:
            return ask(client, extra_body={"structured_outputs": hostile}, temperature=0).finish_reason
        except openai.APIStatusError as error:
            return str(error.status_code)

    with ThreadPoolExecutor(6) as threads:
        attacks = [threads.submit(attack) for _ in range(3)]
        others = [threads.submit(ask, client, temperature=0) for _ in range(6)]
        assert {other.result().message.content for other in others} == {alone}
        assert {each.result() for each in attacks} <= {"400", "503", "length", "stop"}
    assert server.process.poll() is None


def test_constraints_that_allow_no_token_are_a_request_error(client: OpenAI) -> None:
    """The grammar and the allowed tokens exclude each other, which is not a failure of the server."""
    wanted = {"structured_outputs": {"choice": COLOURS}, "allowed_token_ids": [5]}
    with pytest.raises(openai.BadRequestError, match="no token can be drawn"):
        ask(client, extra_body=wanted)
