"""The OpenAI routes as the official client uses them, against a real server on the built-in model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock import LLM, SamplingParams
from penstock.kernels import native
from penstock.messages.outputs import CompletionOutput
from penstock.server.openai import completions
from penstock.server.openai.generation import Generation
from penstock.server.openai.protocol import CompletionRequest
from tests.integration.server_process import ServerProcess, serve

MAX_MODEL_LEN = 1024
STORY = "Once upon a time"
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# Bytes, of which most are not characters by themselves.
BYTE_TOKENS = list(range(130, 260))
GREEDY, SEEDED = {"temperature": 0.0, "max_tokens": 12}, {"temperature": 1.0, "seed": 7, "max_tokens": 12}


def call(url: str, body: Any = None, method: str | None = None, kind: str = "application/json") -> tuple[int, Any]:
    """Sends a plain request; returns status and answer. A `body` that is not bytes is sent as JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": kind}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read()
    return status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    names = ("--served-model-name", "demo", "--served-model-name", "alias/two")
    with serve("--max-model-len", str(MAX_MODEL_LEN), *names) as server:
        yield server
        assert call(f"{server.admin_url}/check_integrity", b"") == (200, {"whole": True})
        assert server.terminate() == 0
        assert not [line for line in server.log if "Traceback" in line]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_model_len=MAX_MODEL_LEN)
    yield llm
    llm.shutdown()


def complete(client: OpenAI, prompt: Any = STORY, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"model": "demo", "temperature": 0, "max_tokens": 8, **fields}
    return client.completions.create(prompt=prompt, extra_body={"return_token_ids": True, **(extra or {})}, **fields)


def chat(client: OpenAI, messages: Any = None, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    fields = {"model": "demo", "temperature": 0, "max_completion_tokens": 32, **fields}
    return client.chat.completions.create(messages=messages or SUM, extra_body=extra, **fields)  # pyright: ignore


def expected(llm: LLM, prompt: Any = STORY, **params: Any) -> CompletionOutput:
    params = {"temperature": 0.0, "max_tokens": 8, **params}
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]


def merged(stream: Any) -> dict[int, dict[str, Any]]:
    """Returns the choices of a completion stream, joined."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        assert (chunk.object, chunk.model) == ("text_completion", "demo")
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"text": "", "token_ids": [], "logprobs": None, "end": None})
            assert choice["end"] is None, "something came after the last chunk"
            choice["text"] += part.text
            choice["token_ids"] += part.token_ids
            choice["end"] = part.finish_reason
            choice["stop_reason"] = part.stop_reason
            if part.logprobs is not None:
                new = part.logprobs.model_dump()
                old = choice["logprobs"] or {key: value and [] for key, value in new.items()}
                choice["logprobs"] = {key: value and old[key] + value for key, value in new.items()}
    return choices


def whole(completion: Any) -> dict[int, dict[str, Any]]:
    """Returns a completion's choices in the same form."""
    return {
        c.index: {
            "text": c.text,
            "token_ids": c.token_ids,
            "logprobs": None if c.logprobs is None else c.logprobs.model_dump(),
            "end": c.finish_reason,
            "stop_reason": c.stop_reason,
        }
        for c in completion.choices
    }


def merged_chat(stream: Any) -> list[dict[str, Any]]:
    """Returns the choices of a chat stream, joined."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for part in chunk.choices:
            is_first = part.index not in choices
            assert part.delta.role == ("assistant" if is_first else None)
            choice = choices.setdefault(part.index, {"content": "", "calls": [], "logprobs": [], "end": None})
            assert choice["end"] is None, "something came after the last chunk"
            choice["content"] += part.delta.content or ""
            choice["end"] = part.finish_reason
            choice["logprobs"] += [] if part.logprobs is None else part.logprobs.model_dump()["content"]
            for call in part.delta.tool_calls or ():
                if call.index == len(choice["calls"]):
                    assert call.id is not None
                    assert call.type == "function"
                    choice["calls"].append({"name": call.function.name, "arguments": ""})
                choice["calls"][call.index]["arguments"] += call.function.arguments
    return [choices[index] for index in sorted(choices)]


def whole_chat(completion: Any) -> list[dict[str, Any]]:
    return [
        {
            "content": c.message.content or "",
            "calls": [{"name": t.function.name, "arguments": t.function.arguments} for t in c.message.tool_calls or ()],
            "logprobs": [] if c.logprobs is None else c.logprobs.model_dump()["content"],
            "end": c.finish_reason,
        }
        for c in completion.choices
    ]


# ---- Models and other routes ----


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "alias/two"]
    for name in ("demo", "alias/two"):
        model = client.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", "penstock")
        assert model.max_model_len == MAX_MODEL_LEN  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"
    assert complete(client, model="alias/two").model == "alias/two"


def test_plain_routes(server: ServerProcess) -> None:
    assert call(f"{server.url}/health")[1] == {"status": "ok", "reason": None}
    assert call(f"{server.url}/ready")[1]["ready"] is True
    version = call(f"{server.url}/version")[1]
    assert version["version"]
    assert version["engine"]["device"] == "cpu"
    assert version["engine"]["kernels"] in (*native.PREFERENCE, "torch")
    assert version["engine"]["num_threads"] >= 1
    assert "vllm:num_requests_running" in call(f"{server.url}/metrics")[1]
    described = call(f"{server.url}/openapi.json")[1]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize"} <= described["paths"].keys()


def test_tokenize_and_detokenize(server: ServerProcess, client: OpenAI, llm: LLM) -> None:
    text = "Grüße, 世界! <|im_end|> 12"
    answer = call(f"{server.url}/tokenize", {"model": "demo", "prompt": text, "return_token_strs": True})[1]
    assert answer["tokens"] == llm.get_tokenizer().encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
    assert len(answer["token_strs"]) == answer["count"]
    assert call(f"{server.url}/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": text}
    tokens = call(f"{server.url}/tokenize", {"messages": SUM})[1]["tokens"]
    assert chat(client, extra={"return_token_ids": True}).prompt_token_ids == tokens
    with_tools = call(f"{server.url}/tokenize", {"messages": SUM, "tools": [WEATHER_TOOL]})[1]
    assert with_tools["count"] == chat(client, tools=[WEATHER_TOOL]).usage.prompt_tokens


# ---- Completions ----


@pytest.mark.spread(1)
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_in_every_form(client: OpenAI, llm: LLM, stream: bool) -> None:
    texts = [STORY, "The moon"]
    ids = [llm.get_tokenizer().encode(text) for text in texts]
    wanted = [expected(llm, text) for text in texts]
    shapes: list[tuple[Any, dict[str, Any], int]] = [
        (texts[0], {}, 1),
        (ids[0], {}, 1),
        (texts, {}, 2),
        (ids, {}, 2),
        ("", {"prompt_token_ids": ids[0]}, 1),
        ("", {"prompt_token_ids": ids}, 2),
    ]
    for prompt, extra, count in shapes:
        answer = complete(client, prompt, extra, stream=stream)
        choices = merged(answer) if stream else whole(answer)
        assert sorted(choices) == list(range(count))
        for number, choice in choices.items():
            assert (choice["text"], choice["token_ids"]) == (wanted[number].text, wanted[number].token_ids)
            assert choice["end"] == "length"


def test_format_of_a_completion(client: OpenAI) -> None:
    answer = complete(client, ["a", "b"], n=2, temperature=1, seed=1)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 32, 34)


def test_seeds_and_choices(client: OpenAI) -> None:
    first, second = (whole(complete(client, n=3, temperature=1, seed=5, max_tokens=16)) for _ in range(2))
    assert first == second == merged(complete(client, n=3, temperature=1, seed=5, max_tokens=16, stream=True))
    assert len({choice["text"] for choice in first.values()}) > 1


def test_all_interfaces_give_the_same_tokens_under_load(client: OpenAI, llm: LLM) -> None:
    load = {"temperature": 1.0, "max_tokens": 12, "extra": {"ignore_eos": True}}

    def ask(params: dict[str, Any], stream: bool) -> tuple[str, list[int]]:
        answer = complete(client, stream=stream, **params)
        choice = merged(answer)[0] if stream else whole(answer)[0]
        return choice["text"], choice["token_ids"]

    interfaces = [(params, stream) for params in (GREEDY, SEEDED) for stream in (False, True)]
    alone = [ask(*interface) for interface in interfaces]
    with ThreadPoolExecutor(20) as pool:
        others = [pool.submit(complete, client, "word " * (number + 1), **load) for number in range(16)]
        loaded = list(pool.map(lambda interface: ask(*interface), interfaces))
        assert {len(other.result().choices[0].token_ids) for other in others} == {12}
    wanted = [expected(llm, **params) for params, _ in interfaces]
    assert alone == loaded == [(output.text, output.token_ids) for output in wanted]


@pytest.mark.spread(2)
@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("extra", [{}, {"allowed_token_ids": BYTE_TOKENS}])
def test_logprobs_equal_those_of_the_engine(client: OpenAI, llm: LLM, num_top: int, extra: dict[str, Any]) -> None:
    wanted = expected(llm, logprobs=num_top, **extra)
    answer = whole(complete(client, extra=extra, logprobs=num_top))
    logprobs = answer[0]["logprobs"]
    assert wanted.logprobs is not None
    chosen = [row[token] for row, token in zip(wanted.logprobs, wanted.token_ids, strict=True)]
    assert logprobs["tokens"] == [entry.decoded_token for entry in chosen]
    assert logprobs["token_logprobs"] == [entry.logprob for entry in chosen]
    ends = [sum(len(token) for token in logprobs["tokens"][:count]) for count in range(len(chosen))]
    assert logprobs["text_offset"] == ends
    if num_top == 0:
        assert logprobs["top_logprobs"] is None
    else:
        for row, top in zip(wanted.logprobs, logprobs["top_logprobs"], strict=True):
            assert set(top) == {entry.decoded_token for entry in row.values()}
            assert max(top.values()) == max(entry.logprob for entry in row.values())
    assert merged(complete(client, extra=extra, logprobs=num_top, stream=True)) == answer


def test_offsets_do_not_depend_on_withheld_text(client: OpenAI) -> None:
    plain, held = (whole(complete(client, logprobs=0, stop=stop)) for stop in (None, "no such text"))
    assert plain[0]["logprobs"] == held[0]["logprobs"]
    assert merged(complete(client, logprobs=0, stop="no such text", stream=True)) == held


def test_the_likelier_of_alternatives_with_equal_text_is_kept(client: OpenAI, llm: LLM) -> None:
    params = {"temperature": 1.5, "seed": 3, "max_tokens": 24, "logprobs": 20}
    extra = {"allowed_token_ids": BYTE_TOKENS}
    wanted = expected(llm, **params, **extra)
    tops = whole(complete(client, extra=extra, **params))[0]["logprobs"]["top_logprobs"]
    collisions = 0
    for row, top in zip(wanted.logprobs or (), tops, strict=True):
        collisions += len(row) > len(top)
        assert all(top[entry.decoded_token or ""] >= entry.logprob for entry in row.values())
    assert collisions


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: OpenAI, llm: LLM, stream: bool) -> None:
    def ask(**fields: Any) -> Any:
        answer = complete(client, echo=True, stream=stream, **fields)
        return merged(answer)[0] if stream else whole(answer)[0]

    wanted = expected(llm)
    assert ask()["text"] == STORY + wanted.text
    assert ask(prompt=llm.get_tokenizer().encode(STORY))["text"] == STORY + wanted.text
    scored = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1), use_tqdm=False)[0]
    ids = scored.prompt_token_ids
    values = [row and row[token].logprob for row, token in zip(scored.prompt_logprobs or (), ids, strict=True)]
    logprobs = ask(logprobs=1)["logprobs"]
    assert logprobs["token_logprobs"][: len(ids)] == values
    assert len(logprobs["token_logprobs"]) == len(ids) + 8
    assert "".join(logprobs["tokens"]) == STORY + wanted.text
    offsets = [len("".join(logprobs["tokens"][:count])) for count in range(len(ids) + 8)]
    assert logprobs["text_offset"] == offsets
    only = ask(logprobs=1, max_tokens=0)
    assert (only["text"], only["token_ids"], only["end"]) == (STORY, [], "length")
    assert only["logprobs"]["token_logprobs"] == values
    assert only["logprobs"]["top_logprobs"][0] is None


def test_offsets_of_an_echo_exclude_a_token_that_the_tokenizer_puts_before_the_text(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt: Any = {"prompt": STORY, "prompt_token_ids": [min(tokenizer.special_tokens), *tokenizer.encode(STORY)]}
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    body = CompletionRequest.model_validate({"prompt": STORY, "echo": True, "logprobs": 0})
    service: Any = SimpleNamespace(llm=SimpleNamespace(get_tokenizer=llm.get_tokenizer, has_tokenizer=True))
    stream: Any = SimpleNamespace(output=output)
    (choice,) = completions._Answer(service, body, Generation((stream,)), {}).whole()["choices"]  # pyright: ignore[reportPrivateUsage]
    first, *places = choice["logprobs"]["text_offset"]
    assert first == 0
    for place, token in zip(places, choice["logprobs"]["tokens"][1:], strict=True):
        assert choice["text"].startswith(token, place)


def test_echo_without_output_counts_no_output_tokens_and_does_not_stop(client: OpenAI) -> None:
    # The engine samples one token, which is not returned; here it is a stop token.
    answer = complete(client, max_tokens=0, echo=True, extra={"stop_token_ids": [2], "allowed_token_ids": [2]})
    assert answer.usage.completion_tokens == 0
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("length", None)


def test_stop_strings(client: OpenAI, llm: LLM) -> None:
    text = expected(llm, max_tokens=24).text
    # Begins inside one token and ends inside another.
    stop = text[10:18]
    for given in (stop, ["no such text", stop]):
        answer = whole(complete(client, max_tokens=24, stop=given))
        assert answer[0]["text"] == text[: text.find(stop)]
        assert (answer[0]["end"], answer[0]["stop_reason"]) == ("stop", stop)
        assert merged(complete(client, max_tokens=24, stop=given, stream=True)) == answer
    kept = complete(client, max_tokens=24, stop=stop, extra={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.find(stop) + len(stop)]


def test_usage_in_a_stream(client: OpenAI) -> None:
    chunks = list(complete(client, ["a", "b"], stream=True, stream_options={"include_usage": True}))
    # A chunk has all tokens since the one before, which are several where this process is slow.
    assert 2 <= len(chunks[:-1]) <= 16
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert all("usage" in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 16)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == [*sorted(set(counts) & set(range(1, 9))), 8]
    assert all("usage" not in chunk.model_fields_set for chunk in complete(client, stream=True))
    chats = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chats[-1].choices == []
    assert chats[-1].usage == chat(client).usage


def test_cached_tokens(client: OpenAI) -> None:
    prompt = "One more story about a river and its mill. " * 12
    cached = [
        complete(client, prompt, {"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens for salt in "aab"
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 64


EXTRAS: list[dict[str, Any]] = [
    {"top_k": 3}, {"min_p": 0.2}, {"repetition_penalty": 1.4}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5},
    {"top_p": 0.5}, {"ignore_eos": True, "min_tokens": 12}, {"stop_token_ids": [641]}, {"priority": 3},
    {"allowed_token_ids": [270, 641, 811]}, {"bad_words": ["was", "there"]}, {"logit_bias": {"270": 100}},
    {"skip_special_tokens": False},
]  # fmt: skip


@pytest.mark.spread(5)
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: next(iter(extra)))
def test_sampling_fields_reach_the_engine(client: OpenAI, llm: LLM, extra: dict[str, Any]) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 16}
    own = {key: value for key, value in extra.items() if key != "priority"}
    if "logit_bias" in own:
        own["logit_bias"] = {int(key): value for key, value in own["logit_bias"].items()}
    wanted = expected(llm, **params, **own)
    choice = whole(complete(client, extra=extra, **params))[0]
    assert (choice["text"], choice["token_ids"]) == (wanted.text, wanted.token_ids)
    assert (choice["end"], choice["stop_reason"]) == (wanted.finish_reason, wanted.stop_reason)


def test_prompt_logprobs(client: OpenAI, llm: LLM) -> None:
    wanted = llm.generate(STORY, SamplingParams(prompt_logprobs=2, temperature=0), use_tqdm=False)[0]
    rows = complete(client, extra={"prompt_logprobs": 2}).choices[0].prompt_logprobs
    assert rows == [
        row
        and {str(k): {"logprob": v.logprob, "rank": v.rank, "decoded_token": v.decoded_token} for k, v in row.items()}
        for row in wanted.prompt_logprobs or ()
    ]
    chunks = list(complete(client, extra={"prompt_logprobs": 2}, stream=True))
    assert chunks[0].choices[0].prompt_logprobs == rows
    assert chunks[0].choices[0].prompt_token_ids == wanted.prompt_token_ids
    answer = chat(client, extra={"prompt_logprobs": 0, "return_token_ids": True})
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)


# ---- Chat ----


def test_format_of_a_chat_completion(client: OpenAI, llm: LLM) -> None:
    answer = chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "2 + 3 = 5.", "stop")
    assert choice.message.tool_calls is None
    (output,) = llm.chat(SUM, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert output.outputs[0].text == "2 + 3 = 5."
    assert merged_chat(chat(client, stream=True)) == whole_chat(answer)
    assert chat(client, max_completion_tokens=1, max_tokens=9).choices[0].finish_reason == "length"
    assert chat(client, max_completion_tokens=openai.omit, max_tokens=1).usage.completion_tokens == 1


def test_chat_content_in_parts(client: OpenAI) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]
    assert chat(client, [{"role": "user", "content": parts}]).choices[0].message.content == "2 + 3 = 5."


def test_chat_logprobs(client: OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=2, n=2, temperature=1, seed=2)
    for choice in answer.choices:
        for entry in choice.logprobs.content:
            assert bytes(entry.bytes).decode() == entry.token
            assert [top.logprob for top in entry.top_logprobs] == sorted(t.logprob for t in entry.top_logprobs)[::-1]
            assert len(entry.top_logprobs) == 2
    assert merged_chat(chat(client, logprobs=True, top_logprobs=2, n=2, temperature=1, seed=2, stream=True)) == (
        whole_chat(answer)
    )
    bare = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in bare] == [[]] * len(bare)
    assert chat(client).choices[0].logprobs is None


@pytest.mark.parametrize("extra", [{"stop_token_ids": [2]}, {"structured_outputs": {"regex": "(yes)+"}}])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_log_probabilities_of_a_chat_exclude_the_token_that_ends_it(
    client: OpenAI, extra: dict[str, Any], ignore_eos: bool
) -> None:
    (choice,) = chat(client, extra={**extra, "ignore_eos": ignore_eos}, logprobs=True).choices
    assert choice.finish_reason == "stop"
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_chat_continues_a_message(client: OpenAI) -> None:
    begun = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": STORY}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    few = {"max_completion_tokens": 8}
    plain = chat(client, begun, extra, **few)
    echoed = chat(client, begun, {**extra, "echo": True}, **few)
    assert echoed.choices[0].message.content == STORY + plain.choices[0].message.content
    assert merged_chat(chat(client, begun, {**extra, "echo": True}, stream=True, **few)) == whole_chat(echoed)
    assert plain.usage.prompt_tokens < chat(client, begun, **few).usage.prompt_tokens
    # Whitespace at its end is not in the prompt, and therefore not in the answer.
    spaced: Any = [begun[0], {**begun[1], "content": f"{STORY} \n"}]
    assert chat(client, spaced, {**extra, "echo": True}, **few).choices == echoed.choices


def test_chat_template_variables(client: OpenAI) -> None:
    answer = chat(client, extra={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer.choices[0].message.content == "2 + 3 = 5."
    with pytest.raises(openai.BadRequestError, match="must not set 'messages'"):
        chat(client, extra={"chat_template_kwargs": {"messages": []}})


@pytest.mark.spread(2)
@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED], ids=["auto", "none", "required", "named"])
def test_tools(client: OpenAI, choice: Any) -> None:
    answer = chat(client, WEATHER, tools=[WEATHER_TOOL], tool_choice=choice)
    message = answer.choices[0].message
    if choice in ("required", NAMED):
        (call,) = message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        assert message.content is None
        assert answer.choices[0].finish_reason == "tool_calls"
    if choice == "none":
        assert message.tool_calls is None
        assert message.content
    assert merged_chat(chat(client, WEATHER, tools=[WEATHER_TOOL], tool_choice=choice, stream=True)) == (
        whole_chat(answer)
    )


def test_a_tool_result_is_a_turn(client: OpenAI) -> None:
    asked = chat(client, WEATHER, tools=[WEATHER_TOOL], tool_choice=NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": '{"temperature": 21}'}
    answer = chat(client, [*WEATHER, asked.model_dump(exclude_none=True), result], tools=[WEATHER_TOOL])
    assert answer.usage.prompt_tokens > chat(client, WEATHER, tools=[WEATHER_TOOL]).usage.prompt_tokens
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


# ---- Use by clients ----


def test_streams_that_are_closed_early_free_their_requests(client: OpenAI, server: ServerProcess) -> None:
    for _ in range(3):
        with chat(client, stream=True, max_completion_tokens=900, extra={"ignore_eos": True}) as stream:
            assert next(iter(stream)).choices
    for _ in range(100):
        running = call(f"{server.admin_url}/drain")[1]["num_unfinished"]
        if running == 0:
            return
    pytest.fail(f"{running} requests still run")


def test_raw_responses_and_helpers(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=SUM)  # pyright: ignore
    assert raw.status_code == 200
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == "2 + 3 = 5."
    with client.chat.completions.with_streaming_response.create(model="demo", messages=SUM, stream=True) as response:  # pyright: ignore
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    with client.chat.completions.stream(model="demo", messages=WEATHER, tools=[WEATHER_TOOL]) as helper:  # pyright: ignore
        final = helper.get_final_completion()
    assert final.choices[0].finish_reason in ("stop", "tool_calls")


def test_request_ids_are_in_the_headers(client: OpenAI) -> None:
    whole = client.completions.create(model="demo", prompt=STORY, max_tokens=2)
    assert whole._request_id == whole.id
    with client.completions.with_streaming_response.create(
        model="demo", prompt=STORY, max_tokens=2, stream=True
    ) as response:
        assert str(response.headers["x-request-id"]).startswith("cmpl-")
        response.read()


def test_an_omitted_temperature_means_the_same_for_every_n(client: OpenAI) -> None:
    """It is the temperature of the checkpoint, which recommends greedy answers."""
    texts: list[set[str]] = []
    cases: list[tuple[int, dict[str, Any]]] = [(1, {}), (4, {}), (4, {"temperature": 0.0}), (4, {"temperature": 1.0})]
    for n, extra in cases:
        answers = client.completions.create(model="demo", prompt="a", n=n, max_tokens=8, seed=1, **extra).choices
        texts.append({answer.text for answer in answers})
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 1
    assert len(texts[3]) > 1


def test_bytes_of_partial_characters_can_be_joined(client: OpenAI, llm: LLM) -> None:
    text = "é😀"
    token_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert len(token_ids) > 2, "the characters were meant to be several tokens"
    assert b"".join(llm.get_tokenizer().token_bytes(token_id) for token_id in token_ids) == text.encode()
    answer = client.chat.completions.create(
        model="demo", messages=SUM, max_tokens=6, logprobs=True, extra_body={"allowed_token_ids": token_ids}
    )
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or []:
        assert bytes(entry.bytes or []) in {llm.get_tokenizer().token_bytes(token_id) for token_id in token_ids}


def test_a_server_without_a_tokenizer_names_tokens_by_their_ids() -> None:
    with serve("--skip-tokenizer-init") as server:

        def ask(**fields: Any) -> tuple[int, Any]:
            return call(f"{server.url}/v1/completions", {"prompt": [5, 6, 7], "temperature": 0, **fields})

        status, answer = ask(max_tokens=2, logprobs=2, return_token_ids=True)
        (choice,) = answer["choices"]
        assert (status, choice["text"], len(choice["token_ids"])) == (200, "", 2)
        assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
        assert [len(each) for each in choice["logprobs"]["top_logprobs"]] == [2, 2]
        # What needs a tokenizer is refused before the request runs.
        long: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True, "stream": True}
        for fields in ({"echo": True}, {"logprobs": 1, "output_token_ids": [9]}):
            status, answer = ask(**long, **fields)
            assert (status, answer["error"]["message"]) == (400, "the engine was built without a tokenizer")
            assert call(f"{server.admin_url}/drain")[1]["num_unfinished"] == 0
        assert server.terminate() == 0
