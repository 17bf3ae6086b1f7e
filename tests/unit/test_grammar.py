"""Grammars: masks allow exactly the valid outputs, drafts do not change the state, and time and memory are bounded."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import numpy as np
import pytest

import penstock
from penstock.grammar import checker as checker_module
from penstock.grammar.backend import Grammar
from penstock.grammar.checker import GrammarChecker
from penstock.grammar.llguidance_backend import LLGuidanceBackend, LLGuidanceGrammar
from penstock.messages.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    GrammarKind,
    GrammarSpec,
    StructuredOutputsParams,
)
from penstock.tokenizer.tokenizer import Tokenizer
from penstock.utils.errors import ConfigError, GrammarError, OverloadedError, RequestError
from penstock.utils.wire import Codec, FrameReader

DEMO = Path(penstock.__file__).parent / "demo"
TOKENIZER_JSON = (DEMO / "tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer(DEMO, 4096)
# More ids than the tokenizer knows, and not a multiple of 32.
VOCAB_SIZE = 4243
EOS = (2, 0)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"c', "é"]}, "minItems": 1, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}},
}
CHOICES = ["yes", "yes, please", "no", 'q"u\\o/te', "línea\n2", "\U0001f600", "<|im_end|>"]
DATE = r"^(19|20)\d{2}-[01][0-9]( (before|after) noon)?$"
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
GBNF = 'root ::= "[" (item ("," item)*)? "]"\nitem ::= [a-z] [a-z]* | root'


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(TOKENIZER_JSON, VOCAB_SIZE, EOS)


def spec(**params: Any) -> GrammarSpec:
    return StructuredOutputsParams(**params).spec()


def masks(backend: LLGuidanceBackend, grammar: Grammar, drafts: Sequence[int] = ()) -> np.ndarray:
    """[1 + len(drafts), num_words * 32] bool"""
    rows = np.zeros((1 + len(drafts), backend.num_words), np.int32)
    grammar.fill(drafts, rows)
    return np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little").astype(bool)


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in token_ids).decode()


def walk(backend: LLGuidanceBackend, grammar: Grammar, rng: random.Random) -> list[int]:
    """Returns random allowed tokens up to an end of sequence; prefers closing characters once the output is long."""
    closing = [TOKENIZER.encode(character)[0] for character in '"}]']
    output: list[int] = []
    while len(output) < 2000:
        allowed = np.flatnonzero(masks(backend, grammar)[0]).tolist()
        near = [token_id for token_id in (*EOS, *closing) if token_id in allowed]
        token_id = rng.choice(near if near and len(output) > 12 else allowed)
        grammar.accept([token_id])
        if token_id in EOS:
            return output
        output.append(token_id)
    raise AssertionError(f"no end after {len(output)} tokens: {text_of(output)!r}")


def is_json(text: str, schema: dict[str, Any]) -> bool:
    value = json.loads(text)
    # There is only the whitespace that json.dumps writes.
    assert re.sub(r'"(\\.|[^"\\])*"', '""', text).count(" ") == text_spaces(value), text
    return jsonschema_rs.is_valid(schema, value)


def text_spaces(value: Any) -> int:
    return re.sub(r'"(\\.|[^"\\])*"', '""', json.dumps(value, ensure_ascii=False)).count(" ")


def is_sum(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,3}(\+[0-9]{1,3})*", text) is not None


def is_list(text: str) -> bool:
    return bool(json.loads(re.sub("[a-z]+", "1", text)) is not None)


VALID: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"json": PERSON}, lambda text: is_json(text, PERSON)),
    "object": ({"json_object": True}, lambda text: is_json(text, {"type": "object"})),
    "regex": ({"regex": DATE}, lambda text: re.fullmatch(DATE, text) is not None),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "lark": ({"grammar": LARK}, is_sum),
    "gbnf": ({"grammar": GBNF}, is_list),
}

EXAMPLES = {
    "schema": [
        json.dumps({"name": "Zoë \\ \n", "age": 7, "tags": ["a", "é"], "home": None}, ensure_ascii=False),
        json.dumps({"name": "", "tags": ['b"c'], "home": {"zip": "01234"}}),
    ],
    "object": ["{}", json.dumps({"a": [1, -2.5e9, True, None, {"b": "c: , d"}], "": "é"}, ensure_ascii=False)],
    "regex": ["1999-12", "2024-01 before noon"],
    "choice": CHOICES,
    "lark": ["1", "12+345+6"],
    "gbnf": ["[]", "[ab,[c,[]],d]"],
}


class TestMasks:
    @pytest.mark.parametrize("name", VALID)
    def test_every_walk_ends_in_a_valid_output(self, backend: LLGuidanceBackend, name: str) -> None:
        params, is_valid = VALID[name]
        for seed in range(25):
            text = text_of(walk(backend, backend.compile(spec(**params)), random.Random(seed)))
            assert is_valid(text), text

    @pytest.mark.parametrize("name", VALID)
    @pytest.mark.parametrize("by_characters", [False, True])
    def test_every_token_of_a_valid_output_is_allowed(
        self, backend: LLGuidanceBackend, name: str, by_characters: bool
    ) -> None:
        for text in EXAMPLES[name]:
            grammar = backend.compile(spec(**VALID[name][0]))
            # A special token's name in a text is plain text; encoded in one piece it would become the special token.
            pieces = text if by_characters or "<|" in text else [text]
            for token_id in [token_id for piece in pieces for token_id in TOKENIZER.encode(piece)]:
                allowed = masks(backend, grammar)[0]
                assert allowed[token_id], (text, token_id)
                grammar.accept([token_id])
            assert all(masks(backend, grammar)[0][token_id] for token_id in EOS), text

    def test_an_end_is_allowed_exactly_where_the_output_may_end(self, backend: LLGuidanceBackend) -> None:
        grammar = backend.compile(spec(regex="ab?"))
        (a,), (b,) = TOKENIZER.encode("a"), TOKENIZER.encode("b")
        before = masks(backend, grammar)[0]
        assert before[a]
        assert not before[list(EOS)].any()
        grammar.accept([a])
        after = masks(backend, grammar)[0]
        assert after[[b, *EOS]].all()
        assert not grammar.is_finished
        grammar.accept([b])
        assert grammar.is_finished
        assert np.flatnonzero(masks(backend, grammar)[0]).tolist() == sorted(EOS)
        grammar.accept([EOS[1], EOS[0]])
        assert grammar.is_finished
        with pytest.raises(GrammarError, match="follows the end"):
            grammar.accept([a])

    def test_an_accepted_end_of_sequence_finishes_the_grammar(self, backend: LLGuidanceBackend) -> None:
        grammar = backend.compile(spec(regex="a*"))
        grammar.accept([*TOKENIZER.encode("a"), EOS[0]])
        assert grammar.is_finished
        assert np.flatnonzero(masks(backend, grammar)[0]).tolist() == sorted(EOS)

    def test_an_end_of_sequence_inside_a_grammar_does_not_end_the_output(self, backend: LLGuidanceBackend) -> None:
        grammar = backend.compile(spec(grammar='start: "a" <|im_end|> "b"'))
        grammar.accept(TOKENIZER.encode("a"))
        with pytest.raises(GrammarError, match="no token"):
            masks(backend, grammar)

    def test_ids_that_the_tokenizer_does_not_know_are_never_allowed(self, backend: LLGuidanceBackend) -> None:
        assert not masks(backend, backend.compile(spec(regex="(?s).*")))[0][4096:].any()
        assert not masks(backend, backend.compile(spec(grammar="start: <[*]> <[*]>")))[0][4096:].any()

    def test_tokens_that_are_not_allowed_are_not_accepted(self, backend: LLGuidanceBackend) -> None:
        for wrong in (TOKENIZER.encode("b"), [EOS[0]], [4200]):
            with pytest.raises(GrammarError):
                backend.compile(spec(regex="a+")).accept(wrong)

    def test_equal_specs_do_not_share_state(self, backend: LLGuidanceBackend) -> None:
        first, second = backend.compile(spec(regex="abc")), backend.compile(spec(regex="abc"))
        start = masks(backend, second)
        first.accept(TOKENIZER.encode("ab"))
        np.testing.assert_array_equal(masks(backend, second), start)


class TestDrafts:
    @pytest.mark.parametrize("name", VALID)
    def test_masks_after_drafts_equal_those_after_accepted_tokens(self, backend: LLGuidanceBackend, name: str) -> None:
        for seed in range(5):
            rng = random.Random(seed)
            output = [*walk(backend, backend.compile(spec(**VALID[name][0])), rng), EOS[0], EOS[1]]
            one_by_one = backend.compile(spec(**VALID[name][0]))
            drafted = backend.compile(spec(**VALID[name][0]))
            expected = []
            for token_id in output:
                expected.append(masks(backend, one_by_one)[0])
                one_by_one.accept([token_id])
            expected.append(masks(backend, one_by_one)[0])
            for place in range(len(output)):
                drafts = output[place : place + rng.randrange(1, 6)]
                got = masks(backend, drafted, drafts)
                np.testing.assert_array_equal(got, expected[place : place + 1 + len(drafts)])
                np.testing.assert_array_equal(masks(backend, drafted)[0], expected[place])
                drafted.accept([output[place]])

    @pytest.mark.parametrize("wrong", [-1, 4200, VOCAB_SIZE + 1000, EOS[0], 1, "z"])
    def test_rows_after_a_wrong_draft_allow_everything(self, backend: LLGuidanceBackend, wrong: int | str) -> None:
        grammar = backend.compile(spec(regex="aaaaaa"))
        (a,) = TOKENIZER.encode("a")
        draft = TOKENIZER.encode(wrong)[0] if isinstance(wrong, str) else wrong
        plain = masks(backend, grammar, [a])
        got = masks(backend, grammar, [a, draft, a])
        np.testing.assert_array_equal(got[:2], plain)
        assert got[2:].all()
        np.testing.assert_array_equal(masks(backend, grammar, [a]), plain)
        grammar.accept([a] * 6)
        assert grammar.is_finished

    def test_a_draft_after_which_the_grammar_fails_does_not_end_the_request(self, backend: LLGuidanceBackend) -> None:
        """Without speculation the request fails only if it takes that token, and it may take another one."""
        (a,), (b,), (c,) = (TOKENIZER.encode(letter) for letter in "abc")
        grammar = backend.compile(spec(grammar='start: "c" ("a" <|im_end|> "b" | "b"+)'))
        plain = masks(backend, grammar, [c])
        got = masks(backend, grammar, [c, a, b])
        np.testing.assert_array_equal(got[:2], plain)
        assert not got[2:].any()
        grammar.accept([c])
        np.testing.assert_array_equal(masks(backend, grammar, [b])[0], plain[1])
        grammar.accept([b])
        assert masks(backend, grammar)[0][[b, *EOS]].all()

    @pytest.mark.parametrize("name", ["states", "recursion"])
    def test_a_draft_that_exceeds_a_bound_does_not_end_the_request(
        self, backend: LLGuidanceBackend, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        grammar = backend.compile(spec(**HOSTILE[name]))
        (a,) = TOKENIZER.encode("a")
        plain, compute = masks(backend, grammar, [a]), LLGuidanceGrammar._compute_mask
        num_masks = 0

        def compute_or_fail(self: LLGuidanceGrammar, row: np.ndarray) -> None:
            nonlocal num_masks
            num_masks += 1
            if num_masks > 2:
                raise GrammarError("too much")
            compute(self, row)

        monkeypatch.setattr(LLGuidanceGrammar, "_compute_mask", compute_or_fail)
        got = masks(backend, grammar, [a, a, a])
        monkeypatch.undo()
        np.testing.assert_array_equal(got[:2], plain)
        assert not got[2:].any()
        np.testing.assert_array_equal(masks(backend, grammar, [a]), plain)


REFUSED = {
    "invalid regex": ({"regex": "(a"}, "unclosed group"),
    "look-around": ({"regex": "(?=a)b"}, "look-around"),
    "unknown type": ({"json": {"type": "foo"}}, "Invalid type: foo"),
    "remote reference": ({"json": {"$ref": "http://127.0.0.1/x"}}, "not fetch"),
    "impossible": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "greater"),
    "endless reference": ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "nothing matches"),
    "bad options": ({"json": {"x-guidance": 7}}, "cannot be compiled"),
    "no rule": ({"grammar": 'root ::= "a" missing'}, "missing"),
    "no start": ({"grammar": 'begin: "a"'}, "start"),
    "open string": ({"grammar": 'start: "a'}, "lexer error"),
    "stop rule": ({"grammar": 'start: x "b"\nx[stop="q"]: /a*/'}, "rollback"),
    "llguidance's own form": ({"grammar": '{"grammars": [{"json_schema": {}}], "max_tokens": 1}'}, "expecting"),
    "too many at once": ({"json": {"type": "object", "properties": {f"k{i}": True for i in range(1500)}}}, "max is"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_give_the_reason(backend: LLGuidanceBackend, name: str) -> None:
    params, reason = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        backend.compile(spec(**params))
    assert caught.value.field == "structured_outputs"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 3}
    for _ in range(depth):
        schema = {"anyOf": [schema, {**schema, "title": "x"}]}
    return schema


def deep(count: int) -> dict[str, Any]:
    pair = {
        f"d{i}": {"properties": {"l": {"$ref": f"#/$defs/d{i + 1}"}, "r": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    return {"$defs": {**pair, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


# Each was measured with a walk of up to 2,000 tokens. The maxima were 0.5 s to compile (multipleOf), 35 ms for a mask
# (recursive rules), 30 MB while walking (dots), and 60 MB to compile.
HOSTILE: dict[str, dict[str, Any]] = {
    "alternatives": {"json": nested(10)},
    "product": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in range(9)]} for i in range(30)]}
    },
    "references": {"json": deep(60)},
    "enum": {"json": {"enum": [f"{i:x}-" + "z" * (i % 13) for i in range(3500)]}},
    "constant": {"json": {"const": "abcdefgh" * 7500}},
    "patterns": {"json": {"patternProperties": {f"^{i}.*x": {} for i in range(500)}}},
    "multiple": {"json": {"type": "integer", "multipleOf": 99991}},
    "length": {"json": {"type": "string", "minLength": 10**9}},
    "items": {"json": {"type": "array", "items": {"type": "object"}, "minItems": 10**9}},
    "repetition": {"regex": "(a{1000}){1000}"},
    "options": {"regex": "(((a?){100}){100}){100}"},
    "backtracking": {"regex": "((a|aa)+)+b"},
    "states": {"regex": "(.*a.{20}|.*b.{21}|.*c.{22}|.*d.{23}){3}"},
    "parentheses": {"regex": "(" * 30000 + "a" + ")" * 30000},
    "recursion": {"grammar": 'start: s\ns: s s | "a" | s s s | '},
    "chain": {
        "grammar": "start: r0\n" + "\n".join(f'r{i}: r{i + 1}? r{i + 1}? "x"?' for i in range(900)) + '\nr900: "q"'
    },
    "nested groups": {"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000},
    "nested GBNF": {"grammar": "root ::= " + "(" * 30000 + '"a"' + ")" * 30000},
    "empty lines": {"grammar": "\n" * 60000 + "start"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_bounded(backend: LLGuidanceBackend, name: str) -> None:
    # The CPU time of this process does not depend on other load.
    started = time.process_time()
    slowest = 0.0
    rng = random.Random(1)
    try:
        grammar = backend.compile(spec(**HOSTILE[name]))
        for _ in range(120):
            begun = time.process_time()
            allowed = [i for i in np.flatnonzero(masks(backend, grammar)[0]).tolist() if i not in EOS]
            if not allowed:
                break
            grammar.accept([rng.choice(allowed)])
            slowest = max(slowest, time.process_time() - begun)
    except (RequestError, GrammarError):
        pass
    assert slowest < 1.0
    assert time.process_time() - started < 10.0


def test_slow_masks_end_a_request(backend: LLGuidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of processor time, and 10 ms for each mask; time that fast masks leave is not saved up."""
    now, taken = 0.0, 0.0

    def thread_time() -> float:
        nonlocal now
        now += taken  # between the beginning of a mask and its end, and from there to the next
        return now

    monkeypatch.setattr(time, "thread_time", thread_time)
    grammar = backend.compile(spec(regex="a*"))
    for _ in range(300):
        masks(backend, grammar)
    taken = 0.02
    for _ in range(99):
        masks(backend, grammar)
    with pytest.raises(GrammarError, match="less ambiguous"):  # noqa: PT012 - the sums of times are rounded
        for _ in range(3):
            masks(backend, grammar)
    taken = 0.01
    grammar = backend.compile(spec(regex="a*"))
    for _ in range(300):
        masks(backend, grammar)


def test_a_request_survives_the_limit_of_a_shared_lexer(backend: LLGuidanceBackend) -> None:
    """Equal specs share a lexer. When it reaches its limit, each starts again from its own tokens and goes on."""
    hard = spec(regex=HOSTILE["states"]["regex"])
    (a,) = TOKENIZER.encode("a")
    other = backend.compile(hard)
    other.accept([a])
    before = masks(backend, other)
    grammar, rng = backend.compile(hard), random.Random(0)
    matcher = grammar._matcher
    while grammar._matcher is matcher:
        grammar.accept([rng.choice(np.flatnonzero(masks(backend, grammar)[0]).tolist())])
        assert len(grammar._tokens) < 2000
    np.testing.assert_array_equal(masks(backend, other), before)
    other.accept([a])
    np.testing.assert_array_equal(masks(backend, backend.compile(hard), [a])[1], before[0])


@pytest.mark.parametrize(
    ("tokenizer_json", "eos", "reason"),
    [(TOKENIZER_JSON, (), "end-of-sequence"), ("/etc/passwd", (0,), "tokenizer"), (TOKENIZER_JSON, (4200,), "EOS")],
)
def test_unsuitable_tokenizers_are_refused(tokenizer_json: str, eos: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLGuidanceBackend(tokenizer_json, VOCAB_SIZE, eos)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="4000 vs 4096"):
        LLGuidanceBackend(TOKENIZER_JSON, 4000, EOS)


class TestParams:
    @pytest.mark.parametrize(
        ("params", "field"),
        [
            ({}, "structured_outputs"),
            ({"json_object": False}, "structured_outputs"),
            ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
            ({"json": "{"}, "json"),
            ({"json": "[]"}, "json"),
            ({"json": "[" * 50000}, "json"),
            ({"json": {"a": float("nan")}}, "json"),
            ({"json": {"a": object()}}, "json"),
            ({"json": {"title": "\ud800"}}, "json"),
            ({"json": {"title": "x" * MAX_GRAMMAR_BYTES}}, "json"),
            ({"json": True}, "json"),
            ({"json_object": 1}, "json_object"),
            ({"regex": ""}, "regex"),
            ({"regex": 5}, "regex"),
            ({"regex": "\udfff"}, "regex"),
            ({"regex": "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, "regex"),
            ({"grammar": " \n"}, "grammar"),
            ({"grammar": {"start": "a"}}, "grammar"),
            ({"choice": "abc"}, "choice"),
            ({"choice": []}, "choice"),
            ({"choice": ["a", ""]}, "choice"),
            ({"choice": ["a", 1]}, "choice"),
            ({"choice": ["\ud800"]}, "choice"),
            ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice"),
        ],
    )
    def test_errors_name_the_field(self, params: dict[str, Any], field: str) -> None:
        with pytest.raises(RequestError) as caught:
            StructuredOutputsParams(**params)
        assert caught.value.field == field

    def test_equal_requests_have_equal_specs(self) -> None:
        assert spec(json={"type": "null"}) == spec(json='{"type": "null"}')
        assert len({spec(regex="a"), spec(regex="a"), spec(grammar="a")}) == 2

    @pytest.mark.parametrize("name", VALID)
    def test_params_and_specs_survive_the_wire(self, name: str) -> None:
        params = StructuredOutputsParams(**VALID[name][0])
        codec = Codec(GrammarSpec, StructuredOutputsParams)
        frames = codec.encode(params.spec()) + codec.encode(params)
        assert FrameReader(codec).feed(frames) == [params.spec(), params]


def stop(pid: int) -> None:
    """Returns when all threads of the child have stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def run(
    scenario: Callable[[GrammarChecker], Awaitable[None]], tokenizer_json: str = TOKENIZER_JSON, **options: Any
) -> None:
    async def main() -> None:
        checker = GrammarChecker(tokenizer_json, VOCAB_SIZE, EOS, **options)
        try:
            await scenario(checker)
        finally:
            pid = checker.pid
            await checker.shutdown()
            assert pid is None or is_gone(pid)

    asyncio.run(main())


def is_gone(pid: int | None) -> bool:
    """Returns whether the process is neither running nor a zombie."""
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class TestChecker:
    def test_results_are_remembered(self) -> None:
        async def scenario(checker: GrammarChecker) -> None:
            assert checker.pid is None
            bad = spec(regex="(a")
            answers = await asyncio.gather(
                checker.check(spec(json=PERSON)), checker.check(bad), checker.check(bad), return_exceptions=True
            )
            assert answers[0] is None
            assert all(isinstance(answer, RequestError) and "unclosed" in str(answer) for answer in answers[1:])
            await checker.shutdown()
            # Without a process, only remembered results can be returned.
            await checker.check(spec(json=PERSON))
            with pytest.raises(RequestError):
                await checker.check(bad)
            assert checker.pid is None
            await checker.check(spec(regex="b"))

        run(scenario)

    def test_a_check_that_takes_too_long_is_killed(self) -> None:
        async def scenario(checker: GrammarChecker) -> None:
            await checker.check(spec(regex="a"))
            pid = checker.pid
            assert pid is not None
            stop(pid)
            slow = spec(regex="slow")
            with pytest.raises(RequestError, match="within 1 seconds"):
                await checker.check(slow)
            assert is_gone(pid)
            with pytest.raises(RequestError):
                await checker.check(slow)
            assert checker.pid is None
            await checker.check(spec(regex="b"))
            assert checker.pid != pid

        run(scenario, deadline_seconds=1.0)

    def test_a_grammar_that_took_too_long_is_checked_again_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checker_module, "_GIVEN_UP_SECONDS", 0.2)

        async def scenario(checker: GrammarChecker) -> None:
            await checker.check(spec(regex="a"))
            assert checker.pid is not None
            stop(checker.pid)
            with pytest.raises(RequestError, match="try again"):
                await checker.check(spec(regex="slow"))
            await asyncio.sleep(0.3)
            await checker.check(spec(regex="slow"))

        run(scenario, deadline_seconds=1.0)

    def test_a_grammar_that_needs_too_much_cpu_time_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checker_module, "_CPU_SECONDS", 0.0)

        async def scenario(checker: GrammarChecker) -> None:
            with pytest.raises(RequestError, match="too complex"):
                await checker.check(spec(json=PERSON))

        run(scenario)

    def test_a_grammar_that_needs_too_much_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checker_module, "_MEMORY_BYTES", 1 << 20)

        async def scenario(checker: GrammarChecker) -> None:
            with pytest.raises(RequestError, match="kills"):
                await checker.check(spec(json={"type": "integer", "multipleOf": 1999993}))
            await checker.check(spec(regex="a"))

        run(scenario)

    def test_the_checker_survives_the_death_of_its_process(self) -> None:
        async def scenario(checker: GrammarChecker) -> None:
            await checker.check(spec(regex="a"))
            pid = checker.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await checker.check(spec(regex="b"))
            assert is_gone(pid)
            # Killed in the middle of a check as well.
            pid = checker.pid
            assert pid is not None
            check = asyncio.create_task(checker.check(spec(choice=CHOICES)))
            await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)
            await check

        run(scenario)

    def test_a_cancelled_compilation_does_not_affect_others(self) -> None:
        async def scenario(checker: GrammarChecker) -> None:
            leaving = asyncio.create_task(checker.check(spec(regex="(a")))
            staying = asyncio.create_task(checker.check(spec(regex="b")))
            await asyncio.sleep(0.01)
            leaving.cancel()
            await staying
            pid = checker.pid
            assert pid is not None
            stop(pid)
            under_way = asyncio.create_task(checker.check(spec(regex="c")))
            await asyncio.sleep(0.01)
            await checker.shutdown()
            assert is_gone(pid)
            with pytest.raises(OverloadedError, match="shutting down"):
                await under_way
            assert leaving.cancelled()

        run(scenario)

    def test_a_process_that_cannot_be_started_now_may_be_later(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(checker: GrammarChecker) -> None:
            with monkeypatch.context() as patch:
                patch.setattr(checker_module, "ChildProcess", Mock(side_effect=OSError(errno.EMFILE, "too many files")))
                with pytest.raises(OverloadedError, match=r"does not start.*too many files"):
                    await checker.check(spec(regex="a"))
            await checker.check(spec(regex="a"))

        run(scenario)

    def test_the_queue_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checker_module, "_MAX_WAITING", 3)

        async def scenario(checker: GrammarChecker) -> None:
            answers = await asyncio.gather(
                *(checker.check(spec(regex="a" * (1 + i))) for i in range(5)), return_exceptions=True
            )
            assert [type(answer) for answer in answers] == [type(None)] * 3 + [OverloadedError] * 2
            await checker.check(spec(regex="aaaaa"))

        run(scenario)

    def test_every_grammar_for_an_unsuitable_tokenizer_is_refused(self) -> None:
        async def scenario(checker: GrammarChecker) -> None:
            with pytest.raises(RequestError, match="tokenizer"):
                await checker.check(spec(regex="a"))

        run(scenario, "no tokenizer")


def test_grammar_kinds_are_named_like_their_parameters() -> None:
    assert {kind.value for kind in GrammarKind} == set(StructuredOutputsParams.__dataclass_fields__) - {"reasoning"}
