"""`penstock audit` finds planted corruption, calls rounding rounding, and survives servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.cli.main import main
from tests.integration.audit_planted import FAULTS as PLANTED
from tests.integration.audit_planted import serve_planted
from tests.integration.audit_stub import FAULTS, Stub, StubServer
from tests.integration.server_process import serve
from tests.integration.test_router import route
from tests.integration.test_vllm_router import instance, metric

SMALL = ("--num-prompts", "4", "--max-tokens", "24", "--long-tokens", "300", "--pressure-tokens", "500")


def audit(url: str, file: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the JSON report."""
    file.unlink(missing_ok=True)
    code = main(["audit", url, *SMALL, "--json", str(file), *flags])
    return code, json.loads(file.read_text() or "{}")


def totals(report: dict[str, Any]) -> dict[str, int]:
    return {name: sum(row["verdicts"][name] for row in report["rows"]) for name in report["rows"][0]["verdicts"]}


def row(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in report["rows"] if each["name"] == name]
    return found


def corrupt(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in report["findings"] if each["verdict"] == "corruption"]


@pytest.mark.parametrize("form", ["lists", "llama", "chat", "none"])
def test_a_correct_server_is_clean(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub(form=form)
    with StubServer(stub) as url:
        code, report = audit(url, tmp_path / "report.json", "--concurrency", "3")
    assert code == 0, capsys.readouterr()
    assert report["findings"] == []
    assert totals(report)["equal"] == (86 if form in ("lists", "llama") else 74)
    stated = capsys.readouterr()
    planned = int(re.findall(r"(\d+) requests with about", stated.err)[0])
    sent = sum(each["num_requests"] for each in report["rows"])
    assert planned - (12 if form in ("chat", "none") else 0) == sent <= planned, "the cost is stated before the audit"
    assert sent < len(stub.bodies) < sent + 16
    assert ("no log probabilities" in stated.err) == (form == "none")
    assert stub.most_in_flight == 3


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_top", [1, 20])
def test_planted_corruption_is_found(fault: str, num_top: int, tmp_path: Path) -> None:
    with StubServer(Stub(fault, num_top=num_top)) as url:
        code, report = audit(url, tmp_path / "report.json")
    if num_top == 1 and not fault.startswith(("foreign words", "moved")):
        # What is known of the other token is only that it was less probable than the first.
        assert (code, totals(report)["rounding"]) == (2, 0)
        assert totals(report)["unclear"] > 5
        return
    assert code == 1
    assert totals(report)["rounding"] == 0
    found = corrupt(report)
    assert len(found) > 5
    wrong = "the reference" if fault == "always" else "this answer"
    assert all(each["wrong"] == wrong for each in found if each["wrong"])
    assert num_top == 1 or any(each["wrong"] for each in found)
    if fault == "always":
        assert row(report, "continued in the middle")["verdicts"]["corruption"] == len(found)
    elif fault == "stale":
        assert row(report, "repeated")["verdicts"]["corruption"] > 2
    else:
        assert row(report, "repeated")["verdicts"]["corruption"] == 0
        assert row(report, "in company")["verdicts"]["corruption"] > 5
    blamed = [each for each in found if each["blame"] and each["blame"]["name"]]
    assert bool(blamed) == fault.startswith("foreign")
    for each in blamed:
        assert each["blame"]["name"] in each["in_flight"]


def test_the_report_repeats_the_request_and_names_the_state(tmp_path: Path) -> None:
    """The prompt that is blamed is the one that the stub has read instead."""
    stub = Stub("foreign")
    with StubServer(stub) as url:
        _, report = audit(url, tmp_path / "report.json", "--api-key", "a-secret")
        assert "a-secret" not in json.dumps(report)
        for each in corrupt(report)[:2]:
            other = report["prompts"][each["blame"]["name"]]
            length = each["difference"]["position"]
            right = [text for text, _ in Stub().generate(each["body"]["prompt"], length, None)]
            assert each["difference"]["common"] == "".join(right)
            wrong = next(iter(Stub().generate(other + "".join(right), 1, None)))[0]
            assert each["difference"]["observed"]["text"] == wrong
            words = shlex.split(each["curl"])
            assert json.loads(words[words.index("-d") + 1]) == each["body"]
            assert words[2] == f"{url}/v1/completions"


@pytest.mark.parametrize("has_echo", [True, False])
def test_echo_scores_tokens_that_are_not_listed(has_echo: bool, tmp_path: Path) -> None:
    with StubServer(Stub("stale", has_echo=has_echo, num_top=1)) as url:
        code, report = audit(url, tmp_path / "report.json")
    assert code == (1 if has_echo else 2)
    assert (totals(report)["unclear"] == 0) == has_echo


@pytest.mark.parametrize("kind", ["noise", "ties", "both"])
def test_rounding_is_no_corruption(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = Stub(noise=0.0 if kind == "ties" else 0.05, draws_ties=kind != "noise")
    with StubServer(stub) as url:
        code, report = audit(url, tmp_path / "report.json")
    assert code == 0, capsys.readouterr()
    assert totals(report)["rounding"] > 20
    assert totals(report)["corruption"] == totals(report)["unclear"] == 0
    sizes = [each["size"] for each in report["findings"]]
    assert all(0 < size < 0.25 for size in sizes)
    assert max(each["largest"] for each in report["rows"]) == pytest.approx(max(sizes), abs=0.1)


def test_a_server_that_samples_is_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its choices prove nothing, and contradicting log probabilities still do."""
    with StubServer(Stub(samples=True)) as url:
        code, report = audit(url, tmp_path / "report.json")
    assert (code, totals(report)["corruption"]) == (2, 0)
    assert totals(report)["unclear"] > 20
    assert "choices prove nothing" in capsys.readouterr().out
    with StubServer(Stub("foreign", samples=True)) as url:
        code, report = audit(url, tmp_path / "report.json")
    assert code == 1
    assert {each["case"] for each in corrupt(report)}.isdisjoint({"repeated", "streamed"})


def test_a_margin_below_the_rounding_calls_it_corruption(tmp_path: Path) -> None:
    with StubServer(Stub(noise=0.05)) as url:
        code, _ = audit(url, tmp_path / "report.json", "--margin", "0.001")
    assert code == 1


def test_without_log_probabilities_only_words_tell(tmp_path: Path) -> None:
    for fault, code in (("foreign words", 1), ("stale", 2)):
        with StubServer(Stub(fault, form="none")) as url:
            found, report = audit(url, tmp_path / "report.json")
        assert found == code
        assert totals(report)["unclear"] > 0
        assert totals(report)["rounding"] == 0
        assert all(each["foreign_words"] and each["blame"]["name"] for each in corrupt(report))


def test_two_deployments(tmp_path: Path) -> None:
    with StubServer(Stub()) as url, StubServer(Stub()) as same, StubServer(Stub("stale")) as other:
        code, report = audit(url, tmp_path / "report.json", "--against", same)
        assert (code, row(report, "the second server")["verdicts"]["equal"]) == (0, 14)
        code, report = audit(url, tmp_path / "report.json", "--against", other)
        assert code == 1
        assert {each["case"] for each in corrupt(report)} == {"the second server"}
        assert other in corrupt(report)[0]["curl"]


def test_texts_are_not_compared_with_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chat's template changes the prompt, and so the answers of a correct server."""
    with StubServer(Stub()) as url, StubServer(Stub(form="chat")) as other:
        for flags in ((url, "--against", other), (other, "--against", url)):
            assert main(["audit", *flags, *SMALL]) == 2
            assert "one server completes texts and the other only chats" in capsys.readouterr().err


def test_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StubServer(Stub()) as url:
        monkeypatch.setattr("sys.stdin.readline", lambda: "\n", raising=False)
        code, report = audit(url, tmp_path / "report.json", "--pause-for-restart")
        assert (code, row(report, "after a restart")["verdicts"]["equal"]) == (0, 10)
        monkeypatch.setattr("sys.stdin.readline", lambda: "", raising=False)
        code, report = audit(url, tmp_path / "report.json", "--pause-for-restart")
    assert code == 2
    assert "standard input has ended" in report["problem"]


def test_the_rate_is_limited(tmp_path: Path) -> None:
    with StubServer(Stub()) as url:
        small = ("--num-prompts", "1", "--pressure-tokens", "0", "--max-requests-per-second", "200")
        _, report = audit(url, tmp_path / "report.json", *small)
    planned = sum(each["num_requests"] for each in report["rows"])
    assert sum(each["seconds"] for each in report["rows"]) >= (planned - 1) / 200


@pytest.mark.parametrize("fault", ["", "foreign"])
def test_a_server_that_dies_leaves_a_partial_report(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StubServer(Stub(fault, dies_after=60)) as url:
        code, report = audit(url, tmp_path / "report.json")
    assert code == (1 if fault else 2), "corruption that was found counts"
    assert "does not answer any more" in report["problem"]
    assert row(report, "repeated")["verdicts"]["equal"] == 10
    assert "the engine is dead" in capsys.readouterr().out


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def html(_: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>hello</html>", content_type="text/html")


async def redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPMovedPermanently("http://example.invalid/v1/completions")


async def missing(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "the model x does not exist"}}, status=404)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" " * (1 << 20))


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def failing(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503, text="x" * 100_000)


def with_json(body: Any) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, content_type="application/json")

    return handler


TEXT = {"index": 0, "text": "a b", "finish_reason": "length"}
BROKEN: dict[str, tuple[Handler, str]] = {
    "HTML": (html, "not an answer of the OpenAI API"),
    "another model": (missing, "the model x does not exist"),
    "redirect": (redirect, "a redirect to http://example.invalid"),
    "endless body": (endless, "larger than 16 MiB"),
    "silence": (silent, "no complete answer within"),
    "errors": (failing, "HTTP 503"),
    "an array": (with_json([1, 2]), "not an answer of the OpenAI API"),
    "no choices": (with_json({"object": "text_completion"}), "no choices"),
    "choices of another type": (with_json({"choices": {"text": "a"}}), "Expected `array"),
    "text of another type": (with_json({"choices": [{**TEXT, "text": 3}]}), "Expected `str"),
    "a choice without text": (with_json({"choices": [{"index": 0}]}), "neither"),
    "lists of different lengths": (
        with_json({"choices": [{**TEXT, "logprobs": {"tokens": ["a", "b"], "token_logprobs": [0.0]}}]}),
        "different lengths",
    ),
    "probabilities above 1": (
        with_json({"choices": [{**TEXT, "logprobs": {"tokens": ["a"], "token_logprobs": [1e300]}}]}),
        "above 0",
    ),
    "numbers that are none": (
        with_json('{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [NaN]}}]}'),
        "not an answer of the OpenAI API",
    ),
    "deep JSON": (with_json("[" * 100_000), "not an answer of the OpenAI API"),
    "control characters": (with_json({"error": {"message": "\x1b[2Jnot\nso"}}), "[2Jnot so"),
    "an error with status 200": (
        with_json({"error": {"message": "out of memory"}}),
        "the server reported: out of memory",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_servers_end_with_a_clear_error(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler, message = BROKEN[kind]
    with StubServer(Stub(), handler) as url:
        code = main(["audit", url, *SMALL, "--timeout", "0.5"])
    shown = capsys.readouterr()
    assert code == 2
    assert message in shown.err
    assert shown.err.count("\n") == 1, "one line, and no traceback"
    assert len(shown.err) < 1000
    assert "\x1b" not in shown.err


def test_a_server_that_breaks_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams that never end, or are not JSON, fail alone; the other cases are compared."""
    stub = Stub()
    count = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal count
        if not (await request.json()).get("stream"):
            return await stub.answer(request)
        count += 1
        response = web.StreamResponse()
        await response.prepare(request)
        if count % 2:
            await response.write(b"data: {nonsense\n\n")
            return response
        while True:
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            await asyncio.sleep(0.01)

    with StubServer(stub, handler) as url:
        code, report = audit(url, tmp_path / "report.json", "--timeout", "0.2")
    assert code == 2
    assert row(report, "streamed")["num_failed"] == 10
    assert {"no complete answer within 0.2 s", "not an answer"} <= {
        part
        for line in row(report, "streamed")["failures"]
        for part in (line.split(": ", 1)[1], line.split(": ")[1][:13])
    }
    assert totals(report)["equal"] == 76
    assert "failed in 'streamed'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nonsense"], "must be an address"),
        (["ftp://127.0.0.1"], "must be an address"),
        (["http://127.0.0.1:0"], "must be an address"),
        (["http://127.0.0.1:99999"], "must be an address"),
        (["http://127.0.0.1:9/\0"], "must be an address"),
        (["http://me:secret@127.0.0.1:9"], "pass a key with --api-key"),
        (["http://127.0.0.1:9", "--against", "x"], "--against must be an address"),
        (["http://127.0.0.1:9"], "is the server up?"),
        (["http://127.0.0.1:9", "--json", "/nowhere/report.json"], "--json /nowhere/report.json cannot be written"),
    ],
)
def test_bad_usage(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--margin=0", "--margin=x", "--num-prompts=1001", "--timeout=inf", "--concurrency=0"])
def test_bad_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["audit", "http://127.0.0.1:9", flag])
    assert ended.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


# ---- Penstock ----


def test_a_correct_penstock_is_clean(tmp_path: Path) -> None:
    """With evictions, chunks and drafts; not even rounding differs."""
    with serve(
        *("--num-gpu-blocks-override", "150", "--max-model-len", "1024", "--max-num-batched-tokens", "128"),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    ) as server:
        code, report = audit(server.url, tmp_path / "report.json", "--pressure-tokens", "2500")
    assert code == 0
    assert report["findings"] == []
    assert totals(report)["equal"] == 86
    assert not row(report, "after pressure")["has_reused"], "the pressure has evicted every prompt"
    assert row(report, "repeated")["has_reused"]
    assert max(each["largest"] for each in report["rows"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_penstock_is_found(fault: str, tmp_path: Path) -> None:
    with serve_planted(fault, tmp_path) as server:
        code, report = audit(server.url, tmp_path / "report.json", "--pressure-tokens", "2500")
    assert code == 1, report
    assert totals(report)["corruption"] > 1


@pytest.mark.long
def test_prefill_and_decode_instances_against_one_engine(tmp_path: Path) -> None:
    with (
        serve() as alone,
        instance("nixl", "p") as prefill,
        instance("nixl", "d") as decode,
        route("--prefill", prefill.url, "--decode", decode.url, "--max-local-prefill", "0") as router,
    ):
        file = tmp_path / "report.json"
        code, report = audit(alone.url, file, "--against", router.url, "--pressure-tokens", "2500")
        assert metric(decode, "p2p_consumer_completed") > 10
    assert code == 0
    assert report["findings"] == []
    assert row(report, "the second server")["verdicts"]["equal"] == 14


@pytest.mark.parametrize(
    ("models", "usage"),
    [
        ({"data": [{"id": "stub", "max_model_len": 1e999}]}, 1),
        ({"data": [{"id": "stub", "max_model_len": -5}]}, -7),
        ({"data": [{"id": 3}]}, 10**12),
    ],
)
def test_absurd_counts_change_nothing(models: Any, usage: int, tmp_path: Path) -> None:
    stub = Stub(form="none")

    async def listed(_: web.Request) -> web.Response:
        return web.Response(text=json.dumps(models), content_type="application/json")

    async def counted(request: web.Request) -> web.StreamResponse:
        answer = await stub.answer(request)
        if isinstance(answer, web.Response) and answer.text and answer.status == 200:
            body = json.loads(answer.text)
            body["usage"]["prompt_tokens"] = usage
            return web.json_response(body)
        return answer

    stub.models = listed  # pyright: ignore[reportAttributeAccessIssue]
    with StubServer(stub, counted) as url:
        code, report = audit(url, tmp_path / "report.json", "--num-prompts", "1", "--model", "stub")
    assert code == 0
    assert totals(report)["equal"] > 10


def test_empty_answers_are_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(Stub(), with_json({"choices": [{**TEXT, "text": ""}]})) as url:
        code, _ = audit(url, tmp_path / "report.json")
    assert code == 2
    assert "the answer is empty" in capsys.readouterr().out
