"""Requests that continue given output (`output_token_ids`): they end like requests that were not interrupted."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.config.model_path import resolve_model_path
from penstock.messages.structured_outputs import StructuredOutputsParams
from penstock.router.bodies import continued
from penstock.router.reported_stream import ReportedStream
from penstock.utils.errors import RequestError
from penstock.utils.stream_reports import ASK, STREAM_HEADER, ReportKind, name_of, read_event
from tests.integration.checkpoints import make_checkpoint
from tests.integration.server_process import ServerProcess, serve
from tests.quantized_formats import quantize_checkpoint

PROMPT = "Once upon a time there was"
MEMORY = 32 << 20
REGEX = StructuredOutputsParams(regex="[a-z ]{40,60}")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seed": {"temperature": 1.2, "seed": 5, "top_p": 0.95},
    "penalties": {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.4, "frequency_penalty": 0.7},
    "grammar": {"temperature": 1.0, "seed": 3, "structured_outputs": REGEX},
    "bias": {"temperature": 0.0, "logit_bias": {11: 5.0}, "bad_words": ["the"], "min_tokens": 20},
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram"},
    "mtp": {"method": "mtp"},
    "eagle3": {"method": "eagle3", "model": str(resolve_model_path("demo/eagle3"))},
}


def engine(**options: Any) -> LLM:
    return LLM(kv_cache_memory=MEMORY, max_model_len=256, num_threads=1, **options)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return engine()


def continued_by(llm: LLM, given: list[int], params: SamplingParams) -> Any:
    (done,) = llm.generate({"prompt": PROMPT, "output_token_ids": given}, params, use_tqdm=False)
    return done


def test_other_weights_are_told_apart(tmp_path: Path) -> None:
    """Checkpoints of one shape, such as two that were trained further, have one configuration."""
    path = make_checkpoint("qwen3-128", tmp_path, torch.bfloat16)
    other = shutil.copytree(path, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, other / "model.safetensors")
    quantized, _ = quantize_checkpoint(path, tmp_path, "packed with zero points")
    connector = {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}
    found: list[str] = []
    for folder, options in ((path, {}), (path, connector), (other, {}), (quantized, {}), (quantized, connector)):
        llm = engine(model=str(folder), skip_tokenizer_init=True, **options)
        found.append(llm.info.fingerprint)
        llm.shutdown()
    assert found[0] == found[1] != found[2]
    assert found[3] == ""  # its weights are not digested
    assert found[4] not in ("", found[0])


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_continued_output_equals_the_undisturbed_one(llm: LLM, speculator: str) -> None:
    config = {**SPECULATORS[speculator], "num_speculative_tokens": 3}
    other = engine(speculative_config=config) if SPECULATORS[speculator] else llm
    for case in CASES.values():
        params = SamplingParams(max_tokens=24, **case)
        (whole,) = llm.generate(PROMPT, params, use_tqdm=False)
        (expected,) = whole.outputs
        for count in (1, 7, len(expected.token_ids) - 1):
            other.reset_prefix_cache()
            found = continued_by(other, expected.token_ids[:count], params)
            (output,) = found.outputs
            assert (output.token_ids, output.text) == (expected.token_ids, expected.text), (case, count)
            assert (output.finish_reason, output.num_given_tokens) == (expected.finish_reason, count)
            assert found.prompt_token_ids == whole.prompt_token_ids
            assert found.num_cached_tokens <= len(whole.prompt_token_ids)
            if expected.logprobs is not None:
                assert output.logprobs == expected.logprobs[count:]


def test_a_stop_string_may_begin_in_the_given_output(llm: LLM) -> None:
    (free,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    tokenizer, token_ids = llm.get_tokenizer(), free.outputs[0].token_ids
    pieces = [tokenizer.decode([each]) for each in token_ids]
    stop = pieces[4][-2:] + pieces[5][:2]
    params = SamplingParams(temperature=0, max_tokens=12, stop=[stop])
    (whole,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert whole.outputs[0].stop_reason == stop
    (found,) = continued_by(llm, token_ids[:5], params).outputs
    assert (found.text, found.stop_reason, found.token_ids) == (whole.outputs[0].text, stop, token_ids[:6])
    with pytest.raises(RequestError, match="contains the stop string"):
        continued_by(llm, token_ids[:7], params)


@pytest.mark.parametrize(
    ("given", "fields", "message"),
    [
        ([5] * 9, {"max_tokens": 9}, "nothing is left to generate"),
        ([-1], {}, "must be integers from 0"),
        ([10**30], {}, "must be integers from 0"),
        (["\0"], {}, "must be integers from 0"),
        ([True], {}, "must be integers from 0"),
        ("12", {}, "must be a list of integers"),
        (7, {}, "must be a list of integers"),
        ([5, 6], {"stop_token_ids": [6]}, r"\[1\]=6 ends the output"),
        ([5, 6], {"allowed_token_ids": [6]}, r"\[0\]=5 is not among allowed_token_ids"),
        ([5], {"n": 2}, "must be 2 lists of integers with n=2"),
        ([[5]], {"n": 2}, "must be 2 lists of integers with n=2"),
        ([[5], "6"], {"n": 2}, "must be a list of integers"),
        ([[5], [-1]], {"n": 2}, "must be integers from 0"),
        ([[], [5, 6]], {"n": 2, "stop_token_ids": [6]}, r"\[1\]=6 ends the output"),
        ([5], {"prompt_logprobs": 0}, "exclude each other"),
    ],
)
def test_output_that_contradicts_the_request_is_refused(
    llm: LLM, given: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        continued_by(llm, given, SamplingParams(**{"max_tokens": 16, **fields}))


def test_output_that_its_grammar_forbids_ends_the_request_alone(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(max_tokens=8, structured_outputs=choice)
    encode = llm.get_tokenizer().encode
    for text, message in (("maybe", "contradict the request's grammar"), ("yes", "are complete")):
        found = continued_by(llm, encode(text, add_special_tokens=False), params)
        assert found.outputs[0].finish_reason == "error"
        assert found.is_request_error
        assert message in found.error
    assert continued_by(llm, encode("n", add_special_tokens=False), params).outputs[0].text == "no"


# ---- The server ----

COMPLETION = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0.9, "seed": 4, "logprobs": 2, "echo": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
THINKING = {
    "messages": [*MESSAGES, {"role": "assistant", "content": "<think>"}],
    "continue_final_message": True,
    "min_tokens": 12,
}
CHAT = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "stop": ["zzz"]}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {**COMPLETION, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1}),
    "tool": ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}),
    "json": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "reasoning": ("/v1/chat/completions", {**CHAT, **THINKING}),
    "several": ("/v1/completions", {**COMPLETION, "echo": False, "n": 3, "stop": ["g"]}),
    "several calls": (
        "/v1/chat/completions",
        {**CHAT, "tools": [TOOL], "tool_choice": "required", "n": 2, "temperature": 0.7, "seed": 1},
    ),
}
"""With the completions API's chunks."""
FUNCTION = TOOL["function"]
WHOLE = {"stream": False, "echo": False}
MESSAGE = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0.8}
RESPONSE = {"input": MESSAGES[0]["content"], "max_output_tokens": 40, "temperature": 0.8, "store": False}
TYPED_STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("/v1/messages", {**MESSAGE, "seed": 2, "presence_penalty": 0.6}),
    "message with a call": (
        "/v1/messages",
        {
            **MESSAGE,
            "tools": [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    "thoughtful message": (
        "/v1/messages",
        {**MESSAGE, "messages": THINKING["messages"], "min_tokens": 12, "stop_sequences": ["zzz"]},
    ),
    "response": ("/v1/responses", {**RESPONSE, "seed": 3}),
    "response with a call": (
        "/v1/responses",
        {**RESPONSE, "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    ),
}
"""With events that have types."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    flags = ("--max-model-len", "512", "--kv-cache-memory", "32MB", "--num-threads", "1", "--reasoning-parser", "qwen3")
    with serve(*flags, "--speculative-config", config) as server:
        yield server


def streamed(path: str, body: dict[str, Any]) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if path.endswith("completions") else {}
    return {"stream": True, **options, **body}


def stream(url: str, path: str, body: dict[str, Any], asked: str | None = ASK) -> tuple[str | None, list[bytes]]:
    """Returns the answer's name of the stream and its events."""
    data = json.dumps(streamed(path, body)).encode()
    headers = {"Content-Type": "application/json", **({} if asked is None else {STREAM_HEADER: asked})}
    with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
        blocks = answer.read().split(b"\n\n")
        assert blocks.pop() == b""
        return answer.headers.get(STREAM_HEADER), [block + b"\n\n" for block in blocks]


def without_ids(event: bytes) -> bytes:
    """Removes what is random, and what depends on caches."""
    if not event.startswith(b"data: {"):
        return event
    chunk = json.loads(event[6:])
    if chunk.get("usage"):
        del chunk["usage"]["prompt_tokens_details"]
    for choice in chunk["choices"]:
        for call in choice.get("delta", {}).get("tool_calls", ()):
            call.pop("id", None)
    return json.dumps(chunk).encode()


@pytest.mark.parametrize("case", [*STREAMS, *TYPED_STREAMS])
def test_a_stream_continues_where_it_was_cut(server: ServerProcess, case: str) -> None:
    path, body = {**STREAMS, **TYPED_STREAMS}[case]
    compared = merged if case in STREAMS else merged_typed
    name, events = stream(server.url, path, body)
    assert name is not None
    sent = [read_event(event) for event in events]
    ends = [place for place, (reports, _) in enumerate(sent) if any(each.kind is ReportKind.LAST for each in reports)]
    assert case != "several" or len(ends) > 1, "the choices end at different times"
    expected = compared([data for _, data in sent if data])
    received = ReportedStream(body.get("n", 1))
    received.name = name_of(name)
    for place in range(ends[-1]):
        passed = received.feed(events[place], False)
        if place not in (0, 1, 5, ends[0], ends[-1] // 2, ends[-1] - 1) or not passed:
            continue
        rest = continued(body, received.token_ids, received.finished)
        again, others = stream(server.url, path, rest, received.header)
        assert name_of(again or "") == name_of(received.header)
        before = b"".join(events[: place + 1]).split(b"\n\n")[:-1]
        parts = [read_event(block + b"\n\n")[1] for block in before] + [read_event(event)[1] for event in others]
        # Drafts may be accepted in other steps, so events may be divided differently.
        assert compared([data for data in parts if data]) == expected
    if case in STREAMS:
        _, reasoning, _, _, calls, *_ = expected[0]
        assert bool(reasoning) or case != "reasoning"
        assert bool(calls) == ("tools" in body)


def merged(events: list[bytes]) -> list[Any]:
    """Returns the concatenation of everything that the chunks of each choice hold, and what all chunks have."""
    chunks = [json.loads(without_ids(event)) for event in events[:-1]]
    names = {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    indices = sorted({choice["index"] for choice in choices})
    of_choices = [merged_choice([each for each in choices if each["index"] == index]) for index in indices]
    return [*of_choices, [chunk["usage"] for chunk in chunks if chunk.get("usage")], sorted(names)]


def merged_choice(choices: list[Any]) -> list[Any]:
    text, reasoning, logprobs, token_ids, calls, roles = "", "", [], [], "", 0
    for choice in choices:
        delta = choice.get("delta", {})
        roles += "role" in delta
        text += choice.get("text") or delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            calls += call["function"].get("name", "") + call["function"]["arguments"]
        token_ids += choice.get("token_ids", [])
        found = choice["logprobs"] or {}
        logprobs += found.get("content") or list(zip(*filter(None, found.values()), strict=True))
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return [text, reasoning, logprobs, token_ids, calls, roles, ends]


def merged_typed(events: list[bytes]) -> list[Any]:
    """Returns events with types: the deltas between two others as one, and ids and times by their first use."""
    known: dict[Any, str] = {}
    found: list[Any] = []
    for number, event in enumerate(events):
        kind, _, data = event.partition(b"\n")
        fields = renamed(json.loads(data.removeprefix(b"data: ")), known)
        assert kind == f"event: {fields['type']}".encode()
        assert fields.pop("sequence_number", number) == number
        last = found[-1] if found else {}
        if "delta" in fields and fields["type"] == last.get("type"):
            found[-1] = {**fields, "delta": joined(last["delta"], fields["delta"])}
        else:
            found.append(fields)
    return found


def joined(one: Any, other: Any) -> Any:
    if isinstance(one, str):
        return one + other
    return {name: value if name == "type" else value + other[name] for name, value in one.items()}


def renamed(fields: Any, known: dict[Any, str]) -> Any:
    if isinstance(fields, list):
        return [renamed(each, known) for each in fields]
    if not isinstance(fields, dict):
        return fields
    result = {name: renamed(value, known) for name, value in fields.items()}
    for name in ("id", "item_id", "call_id", "created_at"):
        if name in result:
            result[name] = known.setdefault(result[name], f"{name} {len(known)}")
    for name in ("cached_tokens", "cache_read_input_tokens", "input_tokens"):
        result.pop(name, None)
    return result


def test_a_whole_answer_includes_the_given_output(server: ServerProcess) -> None:
    def ask(path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    for path, fields in STREAMS.values():
        body = {**fields, "return_token_ids": True, "echo": False}
        whole = ask(path, body)
        each = [choice["token_ids"][:1] for choice in whole["choices"]]
        found = ask(path, {**body, "output_token_ids": each if len(each) > 1 else each[0]})
        for answer in (whole, found):
            for name in ("id", "created"):
                del answer[name]
            del answer["usage"]["prompt_tokens_details"]
            for choice in answer["choices"]:
                for call in choice.get("message", {}).get("tool_calls", ()):
                    del call["id"]
        for choice in whole["choices"]:
            for name, rows in (choice["logprobs"] or {}).items():
                choice["logprobs"][name] = rows and rows[1:]
        assert found == whole


def refusal(server: ServerProcess, path: str, body: dict[str, Any], asked: str | None = None) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        stream(server.url, path, body, asked)
    with caught.value as error:
        return error.code, json.load(error)["error"]["message"]


def test_the_server_refuses_in_words_what_it_cannot_continue(server: ServerProcess) -> None:
    path, given = "/v1/completions", {"output_token_ids": [5]}
    name, _ = stream(server.url, path, COMPLETION)
    assert name is not None
    fields = {**json.loads(name), "fingerprint": "another"}
    assert refusal(server, path, {**COMPLETION, **given}, json.dumps(fields))[0] == 409
    for asked in ("{}", "none", json.dumps({**fields, "id": "é"}), json.dumps({**fields, "created": -1}), "9" * 9999):
        assert refusal(server, path, {**COMPLETION, **given}, asked)[0] == 400
    for fields, message in (
        ({"prompt": ["a", "b"], **given}, "one prompt"),
        ({"n": 2, **given}, "must be 2 lists"),
        ({"n": 2, "output_token_ids": [[5], []], "finished_choices": [1]}, "must name choices with output"),
        ({"n": 2, "output_token_ids": [[5], [5]], "finished_choices": [2]}, "must name choices with output"),
        ({"n": 2, "output_token_ids": [[5], [5]], "finished_choices": [0, 1]}, "nothing is left"),
        ({**given, "finished_choices": [0]}, "nothing is left"),
        ({"n": 2, "output_token_ids": [[5], []], "finished_choices": [0], **WHOLE}, "must be streamed"),
        ({"output_token_ids": [1 << 31]}, "output_token_ids"),
        ({"output_token_ids": "5"}, "output_token_ids"),
        ({"max_tokens": 1, **given}, "nothing is left"),
    ):
        status, found = refusal(server, path, {**COMPLETION, **fields})
        assert (status, message in found) == (400, True), found
    assert stream(server.url, path, {**COMPLETION, "n": 2})[0] is None, "the log probabilities of the prompt are lost"
    assert stream(server.url, path, COMPLETION, None)[0] is None
