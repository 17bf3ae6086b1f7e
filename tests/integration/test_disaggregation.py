"""Promise P4 for disaggregation: the engine that computes a prompt changes neither tokens nor accepted drafts.

Every cell runs requests on one engine, and then with their prompts in engine P and their answers in engine D.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, RequestError, SamplingParams
from penstock.config.model_path import resolve_model_path
from penstock.utils.errors import ConfigError
from tests.grids import grid

METHODS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "eagle3": {"method": "eagle3", "model": str(resolve_model_path("demo/eagle3")), "num_speculative_tokens": 3},
}
ENGINE: dict[str, Any] = {"max_model_len": 384, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 96}
CELLS = grid(list(METHODS), (False, True), ((16, 16), (16, 32), (32, 16), (32, 32)), ("sockets", "shared_memory"))
HITS = ("neither", "P", "D", "both")
FACT = "Remember this. The key of Anna is in the red box. The key of Ben is under the old bridge. "


def requests() -> list[tuple[str, SamplingParams]]:
    """Returns requests of many lengths, among them whole blocks; some greedy, some seeded."""
    made = []
    for number in range(8):
        text = FACT * (number % 3 + 1) + f"Story {number} began" + " once" * (7 * number) + ". What is 12 + 30?"
        temperature = 0.0 if number % 2 else 0.8
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=12, ignore_eos=True)
        made.append((text, params))
    return made


def transfer_config(
    role: str, transport: str = "sockets", name: str = "P2PConnector", **options: Any
) -> dict[str, Any]:
    extra = {"transport": transport, **options}
    return {"kv_connector": name, "kv_role": role, "engine_id": role, "kv_connector_extra_config": extra}


@contextlib.contextmanager
def engine(**changes: Any) -> Iterator[LLM]:
    llm = LLM(**{**ENGINE, **changes})
    try:
        yield llm
        llm.check_integrity()
    finally:
        llm.shutdown()


@contextlib.contextmanager
def pair(transport: str = "sockets", options: Any = None, **changes: Any) -> Iterator[tuple[LLM, LLM]]:
    """Starts P and D; `options` are options of their connectors."""
    with (
        engine(kv_transfer_config=transfer_config("kv_producer", transport, **(options or {})), **changes) as prefill,
        engine(kv_transfer_config=transfer_config("kv_consumer", transport, **(options or {})), **changes) as decode,
    ):
        yield prefill, decode


def complete(llm: LLM, prompt: Any, params: SamplingParams) -> Any:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.error is None, output.error
    return output


def prefill_for(llm: LLM, prompt: Any, params: SamplingParams) -> dict[str, Any]:
    """Computes the prompt in P; returns the parameters for D."""
    asked = replace(params, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    handoff = complete(llm, prompt, asked).kv_transfer_params
    assert handoff["do_remote_prefill"]
    return json.loads(json.dumps(handoff))


def disaggregated(prefill: LLM, decode: LLM, prompt: Any, params: SamplingParams) -> Any:
    handoff = prefill_for(prefill, prompt, params)
    return complete(decode, prompt, replace(params, kv_transfer_params=handoff))


def connector(llm: LLM, name: str) -> float:
    return llm.stats().connector[f"p2p_{name}"]


def counts(output: Any) -> tuple[list[int], int, int]:
    return output.outputs[0].token_ids, output.num_draft_tokens, output.num_accepted_tokens


@pytest.mark.spread(2)
@pytest.mark.parametrize(("method", "overlap", "block_sizes", "transport"), CELLS)
def test_tokens_and_acceptance_are_those_of_one_engine(
    method: str, overlap: bool, block_sizes: tuple[int, int], transport: str
) -> None:
    check_identity(method, overlap, block_sizes, transfer_config("", transport))


def check_identity(method: str, overlap: bool, block_sizes: tuple[int, int], config: dict[str, Any]) -> None:
    """Compares P and D with one engine; `config` lacks the role and the id."""
    for_p, for_d = ({**config, "kv_role": role, "engine_id": role} for role in ("kv_producer", "kv_consumer"))
    common: dict[str, Any] = {"async_scheduling": overlap}
    if METHODS[method] is not None:
        common["speculative_config"] = METHODS[method]
    with engine(**common, enable_prefix_caching=False) as one:
        expected = [counts(complete(one, prompt, params)) for prompt, params in requests()]
    p_size, d_size = block_sizes
    with (
        engine(kv_transfer_config=for_p, block_size=p_size, **common) as prefill,
        engine(kv_transfer_config=for_d, block_size=d_size, **common) as decode,
    ):
        for number, (prompt, params) in enumerate(requests()):
            hit = HITS[number % 4]
            for llm, name in ((prefill, "P"), (decode, "D")):
                assert llm.reset_prefix_cache()
                if hit in (name, "both"):
                    complete(llm, FACT, replace(params, max_tokens=1))
            before = connector(decode, "consumer_completed")
            found = disaggregated(prefill, decode, prompt, params)
            assert counts(found) == expected[number], (number, hit)
            assert connector(decode, "consumer_completed") == before + 1, (number, hit)
            assert found.num_cached_tokens == (len(found.prompt_token_ids) - 1) // d_size * d_size
        assert connector(decode, "consumer_refused") == connector(decode, "consumer_cancelled") == 0
        assert connector(prefill, "held") == 0


def test_both_engines_of_a_host_may_have_the_same_port() -> None:
    """The consumer does not listen."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = f'"kv_port": {port}, "kv_connector_extra_config": {{"transport": "sockets"}}}}'
    for_p = f'{{"kv_connector": "NixlConnector", "kv_role": "kv_producer", {shared}'
    for_d = f'{{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", {shared}'
    with engine(kv_transfer_config=for_p) as prefill, engine(kv_transfer_config=for_d) as decode:
        disaggregated(prefill, decode, *requests()[1])
        assert connector(decode, "consumer_completed") == 1


def test_both_caches_are_used_in_the_second_turn() -> None:
    """D finds in its cache what it computed; P computes only what is new to it, and D pulls only what is new to D."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with pair() as (prefill, decode):
        tokenizer = decode.get_tokenizer()
        first = tokenizer.encode(FACT * 2)
        answer = disaggregated(prefill, decode, {"prompt_token_ids": first}, params).outputs[0].token_ids
        second = [*first, *answer, *tokenizer.encode(FACT)]
        before = decode.stats().remote_kv.num_tokens
        hits = decode.stats().prefix_cache_hits, prefill.stats().prefix_cache_hits
        again = disaggregated(prefill, decode, {"prompt_token_ids": second}, params)
        known = (len(first) + len(answer) - 1) // 16 * 16
        loaded = decode.stats().remote_kv.num_tokens - before
        assert loaded == (len(second) - 1) // 16 * 16 - known
        assert decode.stats().prefix_cache_hits - hits[0] >= known
        assert prefill.stats().prefix_cache_hits - hits[1] >= len(first) // 16 * 16
    with engine() as one:
        assert complete(one, {"prompt_token_ids": second}, params).outputs[0].token_ids == again.outputs[0].token_ids


def test_p_does_not_pin_blocks_that_d_has_already() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    with pair() as (prefill, decode):
        complete(decode, FACT * 2, params)
        disaggregated(prefill, decode, FACT * 2, params)
        assert connector(decode, "consumer_loads") == 0
        assert connector(decode, "consumer_not_needed") == 1
        wait_for(prefill, "producer_not_needed", 1)
        assert connector(prefill, "held") == 0


def wait_for(llm: LLM, name: str, value: float) -> None:
    for _ in range(500):
        if connector(llm, name) == value:
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} is {connector(llm, name)} and not {value}")


# ---- Concurrent requests, as MooncakeConnector's proxies send them ----


def concurrent_params(prefill: LLM, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters for P and for D, with the engine id that P's bootstrap server returns."""
    port = prefill.config.kv_transfer.kv_connector_extra_config["bootstrap_port"]  # type: ignore[union-attr]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=10) as response:
        engine_id = json.load(response)["0"]["engine_id"]
    for_d = {
        "do_remote_prefill": True,
        "transfer_id": name,
        "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
        "remote_engine_id": engine_id,
    }
    return {"do_remote_decode": True, "transfer_id": name}, for_d


@contextlib.contextmanager
def concurrent_pair(**changes: Any) -> Iterator[tuple[LLM, LLM]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    name = "MooncakeConnector"
    with (
        engine(kv_transfer_config=transfer_config("kv_producer", name=name, bootstrap_port=port), **changes) as prefill,
        engine(kv_transfer_config=transfer_config("kv_consumer", name=name), **changes) as decode,
    ):
        yield prefill, decode


@pytest.mark.parametrize("p_waits", [0.0, 0.3], ids=["at_once", "d_first"])
def test_both_engines_receive_the_request_at_the_same_time(p_waits: float) -> None:
    prompt, params = requests()[1]
    with engine() as one:
        expected = complete(one, prompt, params).outputs[0].token_ids
    with concurrent_pair() as (prefill, decode):
        for number in range(3):
            decode.reset_prefix_cache()
            for_p, for_d = concurrent_params(prefill, f"xfer-{number}")
            asked = replace(params, max_tokens=1, kv_transfer_params=for_p)
            beside = threading.Timer(p_waits, complete, (prefill, prompt, asked))
            beside.start()
            found = complete(decode, prompt, replace(params, kv_transfer_params=for_d))
            beside.join()
            assert found.outputs[0].token_ids == expected
        assert connector(decode, "consumer_completed") == 3


def test_a_request_that_p_never_receives_is_computed_by_d() -> None:
    prompt, params = requests()[1]
    config = {**transfer_config("kv_consumer", name="MooncakeConnector"), "kv_load_timeout": 1.0}
    with concurrent_pair() as (prefill, _), engine(kv_transfer_config=config) as decode:
        expected = complete(decode, prompt, params).outputs[0].token_ids
        decode.reset_prefix_cache()
        _, for_d = concurrent_params(prefill, "xfer-never")
        found = complete(decode, prompt, replace(params, kv_transfer_params=for_d))
        assert found.outputs[0].token_ids == expected
        assert decode.stats().remote_kv.num_timeouts == 1


# ---- Faults ----


def changed(handoff: dict[str, Any], what: str) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        unused = free.getsockname()[1]
    return {
        "forged": {**handoff, "ticket": handoff["ticket"][:-8] + "AAAAAAAA"},
        "truncated": {**handoff, "ticket": handoff["ticket"][:40]},
        "other engine": {**handoff, "remote_engine_id": "somebody"},
        "unknown address": {**handoff, "remote_port": unused},
        "foreign address": {**handoff, "remote_host": "192.0.2.1"},
    }[what]


REASONS = {
    "forged": "signature is invalid",
    "truncated": "signature is invalid",
    "other engine": "not by somebody",
    "unknown address": "not in the list of peers",
    "foreign address": "not in the list of peers",
    "used twice": "read already",
    "other prompt": "another prompt",
    "gone": "not in the list of peers",
}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_refused_transfers_are_recomputed_or_an_error(policy: str) -> None:
    prompt, params = requests()[1]
    config = {**transfer_config("kv_consumer"), "kv_load_failure_policy": policy}
    with engine() as one:
        expected = [complete(one, each, params).outputs[0].token_ids for each in (prompt, FACT * 3)]
    with (
        engine(kv_transfer_config=config) as decode,
        engine(kv_transfer_config=transfer_config("kv_producer")) as prefill,
    ):

        def check(name: str, handoff: dict[str, Any], number: int = 0) -> None:
            decode.reset_prefix_cache()
            asked = replace(params, kv_transfer_params=handoff)
            (found,) = decode.generate([(prompt, FACT * 3)[number]], [asked], use_tqdm=False)
            if policy == "recompute":
                assert found.outputs[0].token_ids == expected[number], name
                return
            assert found.outputs[0].token_ids == [], name
            assert not found.is_request_error
            assert found.error is not None
            assert REASONS[name] in found.error, (name, found.error)

        for name in ("forged", "truncated", "other engine", "unknown address", "foreign address"):
            check(name, changed(prefill_for(prefill, prompt, params), name))
        handoff = prefill_for(prefill, prompt, params)
        complete(decode, prompt, replace(params, kv_transfer_params=handoff))
        check("used twice", handoff)
        check("other prompt", prefill_for(prefill, prompt, params), number=1)
        handoff = prefill_for(prefill, prompt, params)
        prefill.shutdown()
        check("gone", handoff)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32"}, "dtype"),
        ({"kv_cache_dtype": "int8"}, "KV cache dtype ("),
        ({"model": str(resolve_model_path("demo/eagle3").parent), "num_threads": 1}, ""),
        ({"speculative_config": METHODS["mtp"]}, "speculator"),
    ],
)
def test_an_engine_with_another_model_is_refused_with_the_difference(changes: dict[str, Any], named: str) -> None:
    prompt, params = requests()[1]
    config = {**transfer_config("kv_consumer"), "kv_load_failure_policy": "fail"}
    with (
        engine(kv_transfer_config=transfer_config("kv_producer"), **changes) as prefill,
        engine(kv_transfer_config=config) as decode,
    ):
        handoff = prefill_for(prefill, prompt, params)
        (found,) = decode.generate([prompt], [replace(params, kv_transfer_params=handoff)], use_tqdm=False)
    if not named:
        assert found.error is None  # the same model under another path, with another number of threads
        return
    assert found.error is not None
    assert "kv_producer" in found.error
    assert named in found.error


def test_an_engine_restarted_at_the_same_address_refuses_old_tickets() -> None:
    prompt, params = requests()[1]
    with engine() as one:
        expected = complete(one, prompt, params).outputs[0].token_ids
    with engine(kv_transfer_config=transfer_config("kv_consumer")) as decode:
        with engine(kv_transfer_config=transfer_config("kv_producer")) as prefill:
            handoff = prefill_for(prefill, prompt, params)
            complete(decode, prompt, replace(params, kv_transfer_params=prefill_for(prefill, prompt, params)))
        config = {**transfer_config("kv_producer"), "kv_port": handoff["remote_port"]}
        with engine(kv_transfer_config=config) as prefill:
            decode.reset_prefix_cache()
            found = complete(decode, prompt, replace(params, kv_transfer_params=handoff))
            assert found.outputs[0].token_ids == expected
            assert connector(decode, "consumer_refused") == 1
            decode.reset_prefix_cache()
            found = disaggregated(prefill, decode, prompt, params)
            assert found.outputs[0].token_ids == expected
            assert connector(decode, "consumer_completed") == 2


@pytest.mark.parametrize(
    ("role", "params", "named"),
    [
        ("kv_consumer", {"do_remote_decode": True}, "kv_consumer"),
        ("kv_producer", {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "h:1"}, "kv_producer"),
        ("kv_both", {"do_remote_prefill": True}, "remote_host"),
        ("kv_both", {"do_remote_prefill": True, "do_remote_decode": True}, "exclude"),
    ],
)
def test_incomplete_parameters_are_request_errors(role: str, params: dict[str, Any], named: str) -> None:
    with engine(kv_transfer_config=transfer_config(role)) as llm:
        with pytest.raises(RequestError, match=named):
            complete(llm, FACT, SamplingParams(max_tokens=1, kv_transfer_params=params))
        complete(llm, FACT, SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_ip": "0.0.0.0"}, "kv_ip"),
        (
            {"kv_ip": "prefill-0.prefill"},
            "kv_ip prefill-0.prefill can be reached from other hosts",
        ),
        ({"kv_connector_extra_config": {"transport": "pigeons"}}, "transport"),
        ({"kv_connector_extra_config": {"peers": ["nowhere"]}}, "peers"),
        ({"kv_connector_extra_config": {"cluster_key_file": "/nonexistent"}}, "cluster_key_file"),
    ],
)
def test_an_invalid_configuration_is_refused_at_the_start(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(**ENGINE, kv_transfer_config={**transfer_config("kv_both"), **changes})


def test_other_hosts_need_a_key_and_a_list_of_peers(tmp_path: Path) -> None:
    config = {**transfer_config("kv_both"), "kv_ip": "192.0.2.1"}
    with pytest.raises(ConfigError, match="cluster_key_file"):
        LLM(**ENGINE, kv_transfer_config=config)
    key = tmp_path / "key"
    key.write_bytes(b"a key that is long enough")
    key.chmod(0o600)
    config["kv_connector_extra_config"] = {"cluster_key_file": str(key)}
    with pytest.raises(ConfigError, match="peers"):
        LLM(**ENGINE, kv_transfer_config=config)


@pytest.mark.uniproc
def test_engines_find_each_other_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods do this. A name that only a request contains is not looked up; KV of an unknown address is recomputed."""
    real, looked_up = socket.getaddrinfo, list[str]()

    def look_up(host: str, *args: Any, **options: Any) -> Any:
        looked_up.append(host)
        if host != "prefill-0.prefill":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real("127.0.0.1", *args, **options)

    key = tmp_path / "key"
    key.write_bytes(b"a key that is long enough")
    key.chmod(0o600)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared: dict[str, Any] = {"cluster_key_file": str(key)}
    peers = [f"prefill-0.prefill:{port}", "prefill-1.prefill:5600"]
    for_p = {**transfer_config("kv_producer", **shared), "kv_ip": "prefill-0.prefill", "kv_port": port}
    for_d = {**transfer_config("kv_consumer", **shared, peers=peers), "kv_ip": "decode-0.decode"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with engine(kv_transfer_config=for_p) as prefill, engine(kv_transfer_config=for_d) as decode:
        expected = complete(prefill, FACT * 2, params).outputs[0].token_ids
        handoff = prefill_for(prefill, FACT * 2, params)
        assert (handoff["remote_host"], handoff["remote_port"]) == ("prefill-0.prefill", port)
        elsewhere = {**handoff, "remote_host": "prefill-0.example"}
        missing = {**handoff, "remote_host": "prefill-1.prefill", "remote_port": 5600}
        for asked, completed in ((elsewhere, 0), (missing, 0), (handoff, 1)):
            found = complete(decode, FACT * 2, replace(params, kv_transfer_params=asked))
            assert found.outputs[0].token_ids == expected
            assert connector(decode, "consumer_completed") == completed
            assert decode.reset_prefix_cache()
    assert set(looked_up) == {"prefill-0.prefill", "prefill-1.prefill"}


@pytest.mark.long
def test_tiers_and_peers_at_once() -> None:
    """D fetches from P only what its own memory tier lacks."""
    tier = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20}}

    def both(role: str) -> dict[str, Any]:
        peer = {"name": "peer", **transfer_config("kv_both"), "engine_id": role}
        children = [{"name": "tier", **tier, "kv_role": "kv_both"}, peer]
        extra = {"connectors": children}
        return {"kv_connector": "MultiConnector", "engine_id": role, "kv_connector_extra_config": extra}

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [FACT * 2 + f"Number {number}." for number in range(3)]
    with engine() as one:
        expected = [complete(one, prompt, params).outputs[0].token_ids for prompt in prompts]
    with engine(kv_transfer_config=both("p")) as prefill, engine(kv_transfer_config=both("d")) as decode:
        for _ in range(2):
            found = [disaggregated(prefill, decode, prompt, params).outputs[0].token_ids for prompt in prompts]
            assert found == expected
            assert decode.reset_prefix_cache()
        counters = decode.stats().connector
        assert counters["peer.p2p_consumer_completed"] > 0
        assert counters["peer.p2p_consumer_not_needed"] > 0
        assert prefill.stats().connector["peer.p2p_producer_offered"] == 6
