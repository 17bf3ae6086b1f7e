"""Clients of disaggregated engines, and the proxies between them, which choose engines and parameters.

Serial: P receives the request with one output token, and the parameters of its answer are sent to D with the whole
request. Concurrent: both receive their requests in some order and some time apart, with a shared name. A conversation
continues with D's answer. A request to D that was lost or has failed is retried with its parameters, as by a proxy that
derives the shared name from the request's, or begins again at P, as with Penstock's router.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.kv_transfer.p2p.params import Address
from penstock.kv_transfer.p2p.ticket import Ticket, TicketOffice, digest_prompt
from penstock.messages.kv_transfer import TransferId
from penstock.messages.outputs import EngineOutput
from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.simulation.clients import Clients, LiveRequest
from penstock.simulation.oracle import Answers
from penstock.simulation.setup import TICK_SECONDS, Disaggregation, Setup

ROGUE = "rogue"
"""The name of the peer of `p2p_rogue.py`."""

CLUSTER_KEY = b"the key of the simulated cluster"
Params = Mapping[str, Any]

_MAX_APART = 60
"""Ticks between the two requests of a concurrent pair."""


def address_of(name: str) -> Address:
    """Returns the address of an engine, the same in all its lives."""
    return f"{name}.example", 5600


@dataclass(slots=True, eq=False)
class _Turn:
    """One prompt and its parameters; `number` counts from 1 within its conversation. Clients may reuse `name`; a turn
    keeps its `rendezvous` unless it begins again.
    """

    name: str
    rendezvous: str
    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop: frozenset[int]
    cache_salt: str | None
    prefiller: str
    decoder: str
    is_retried: bool = False


@dataclass(slots=True, eq=False)
class _Part(LiveRequest):
    """A turn's request to one of the two engines. If it `is_serial_prefill`, P's answer is passed to D."""

    turn: _Turn | None = None
    is_decode: bool = False
    is_serial_prefill: bool = False


class Proxies(Clients):
    """`names` are the engines; the first `num_prefill` of them prefill for the others."""

    def __init__(self, setup: Setup, rng: random.Random, answers: Answers, names: list[str]) -> None:
        super().__init__(setup, rng, answers, names)
        assert setup.disaggregation is not None
        self._pairs: Disaggregation = setup.disaggregation
        self._prefillers = names[: self._pairs.num_prefill]
        self._decoders = names[self._pairs.num_prefill :]
        self._num_names = self._num_rendezvous = 0

    def arrivals(self, tick: int, live: dict[str, LiveRequest]) -> list[LiveRequest]:
        if self.is_done or self._rng.random() >= self._traffic.arrival:
            return []
        self._num_drawn += 1
        rng, traffic = self._rng, self._traffic
        prompt = tuple(self._prompt())
        turn = self._make_turn(prompt, rng.choice(traffic.salts), 1, rng.choice(self._decoders))
        return self._begin(turn, tick)

    def follow_ups(self, done: LiveRequest, output: EngineOutput, tick: int) -> list[LiveRequest]:
        assert isinstance(done, _Part) and done.turn is not None
        if done.is_serial_prefill:
            if output.kv_transfer_params is None:
                assert self._pairs.hold_share < 1, f"{done.request.request_id} was answered without parameters"
                self.counters["not_held"] += 1
                return self._decodes(done.turn, {}, tick)
            return self._hand_over(done.turn, output.kv_transfer_params, tick)
        if done.is_decode and done.turn.number < self._pairs.turns:
            return self._go_on(done.turn, done.received, tick)
        return []

    def again(self, lost: LiveRequest, tick: int) -> list[LiveRequest]:
        assert isinstance(lost, _Part) and lost.turn is not None
        if not lost.is_decode:
            return [replace(lost, received=[], abort_at=self._abort_at(tick))]
        turn = replace(lost.turn, decoder=self._rng.choice(self._decoders), is_retried=True)
        if self._rng.random() < 0.5:
            self.counters["begun_again"] += 1
            return self._begin(replace(turn, rendezvous=self._rendezvous()), tick)
        self.counters["retried"] += 1
        return [self._decode(turn, lost.request.sampling_params.kv_transfer_params, tick)]

    def after_error(self, failed: LiveRequest, tick: int) -> list[LiveRequest]:
        assert isinstance(failed, _Part) and failed.turn is not None
        return self.again(failed, tick) if failed.is_decode and not failed.turn.is_retried else []

    def redirected(self, each: LiveRequest) -> list[LiveRequest]:
        """Without a prefill engine D computes the prompt; in the concurrent style D already has the request."""
        assert isinstance(each, _Part) and each.turn is not None and not each.is_decode
        return [self._decode(each.turn, None, each.not_before)] if each.is_serial_prefill else []

    # ---- Turns ----

    def _make_turn(self, prompt: tuple[int, ...], salt: str | None, number: int, decoder: str) -> _Turn:
        rng, traffic = self._rng, self._traffic
        max_tokens = min(rng.randrange(1, traffic.max_output + 1), self._setup.max_model_len - len(prompt))
        stop: frozenset[int] = frozenset()
        if rng.random() < traffic.stop:
            stop = frozenset([rng.choice(self._answers.of(prompt).output(max_tokens))])
        self._num_names += 1
        name = f"c{self._num_names}.{number}"
        if self._used_ids and rng.random() < traffic.reuse:
            name = rng.choice(self._used_ids)
        self._used_ids.append(name)
        return _Turn(
            name,
            self._rendezvous(),
            number,
            prompt,
            max_tokens,
            stop,
            salt,
            rng.choice(self._prefillers),
            decoder,
        )

    def _rendezvous(self) -> str:
        self._num_rendezvous += 1
        return f"xfer-{self._num_rendezvous}"

    def _begin(self, turn: _Turn, tick: int) -> list[LiveRequest]:
        style = self._pairs.style
        if style == "mixed":
            style = self._rng.choice(("serial", "concurrent"))
        self.counters[f"turn{turn.number}_prompt_tokens"] += len(turn.prompt)
        if style == "serial":
            return [self._begin_serially(turn, tick)]
        return self._begin_concurrently(turn, tick)

    def _begin_serially(self, turn: _Turn, tick: int) -> _Part:
        prefilled = turn
        if self._rng.random() < self._pairs.shared:
            self.counters["shared"] += 1
            prefilled = replace(turn, prompt=turn.prompt[: self._rng.randrange(1, len(turn.prompt) + 1)])
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        part = self._prefill(prefilled, params, tick, is_serial=True)
        part.turn = turn
        return part

    def _begin_concurrently(self, turn: _Turn, tick: int) -> list[LiveRequest]:
        rng, pairs = self._rng, self._pairs
        host, port = address_of(turn.prefiller)
        name = turn.rendezvous
        apart = rng.choice((0, 0, rng.randrange(_MAX_APART)))
        times = [tick, tick + apart] if rng.random() < 0.5 else [tick + apart, tick]
        fetch = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_bootstrap_addr": f"http://{host}:{port}",
            "remote_engine_id": turn.prefiller,
        }
        prefilled = turn
        if rng.random() < pairs.altered:
            self.counters["altered"] += 1
            prefilled = replace(turn, prompt=tuple(self._prompt()))
        parts = self._decodes(turn, fetch, times[0])
        if rng.random() < pairs.prefill_missing:
            self.counters["prefills_missing"] += 1
        else:
            parts.append(self._prefill(prefilled, {"do_remote_decode": True, "transfer_id": name}, times[1]))
        rng.shuffle(parts)
        return parts

    def _hand_over(self, turn: _Turn, params: Params, tick: int) -> list[LiveRequest]:
        """Sends D the parameters of P's answer; the proxy may lose, delay or alter them."""
        rng, pairs = self._rng, self._pairs
        if rng.random() < pairs.answer_lost:
            self.counters["answers_lost"] += 1
            return []
        late = 0
        if rng.random() < pairs.answer_late:
            self.counters["answers_late"] += 1
            late = rng.randrange(round(2 * pairs.hold_seconds / TICK_SECONDS))
        if rng.random() < pairs.altered:
            self.counters["altered"] += 1
            turn, params = self._altered(turn, params)
        if rng.random() < pairs.misled:
            self.counters["misled"] += 1
            params = self._misled(turn, params)
        return self._decodes(turn, params, tick + late)

    def _go_on(self, turn: _Turn, output: list[int], tick: int) -> list[LiveRequest]:
        prompt = [*turn.prompt, *output, *self._random_tokens(1 + self._rng.randrange(self._traffic.max_suffix))]
        if len(prompt) + 2 > self._setup.max_model_len:
            return []
        self.counters["further_turns"] += 1
        following = self._make_turn(tuple(prompt), turn.cache_salt, turn.number + 1, turn.decoder)
        following.prefiller = turn.prefiller
        return self._begin(following, tick)

    # ---- Requests ----

    def _prefill(self, turn: _Turn, params: Params, not_before: int, *, is_serial: bool = False) -> _Part:
        return self._part(turn, turn.prefiller, 1, params, not_before, is_serial_prefill=is_serial)

    def _decodes(self, turn: _Turn, params: Params, not_before: int) -> list[LiveRequest]:
        """Returns D's request, and the same for a second engine if the proxy repeats it."""
        parts: list[LiveRequest] = [self._decode(turn, params, not_before)]
        if self._rng.random() < self._pairs.replayed:
            self.counters["replayed"] += 1
            decoder = self._rng.choice(self._decoders)
            again = replace(turn, name=f"{turn.name}x", decoder=decoder, number=self._pairs.turns)
            later = self._rng.choice((0, 0, self._rng.randrange(_MAX_APART)))
            parts.append(self._decode(again, params, not_before + later))
        return parts

    def _decode(self, turn: _Turn, params: Params | None, not_before: int) -> _Part:
        return self._part(turn, turn.decoder, turn.max_tokens, params, not_before)

    def _part(
        self,
        turn: _Turn,
        engine: str,
        max_tokens: int,
        params: Params | None,
        not_before: int,
        is_serial_prefill: bool = False,
    ) -> _Part:
        rng, is_decode = self._rng, engine == turn.decoder
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, kv_transfer_params=params)
        request = EngineRequest(
            request_id=f"{turn.name}.{'d' if is_decode else 'p'}",
            prompt_token_ids=turn.prompt,
            sampling_params=sampling,
            max_tokens=max_tokens,
            seed=0,
            stop_token_ids=turn.stop if is_decode else frozenset(),
            priority=rng.randrange(3),
            cache_salt=turn.cache_salt,
        )
        answer = self._answers.of(turn.prompt)
        return _Part(
            request,
            answer,
            self._expected(request, answer),
            engine,
            self._abort_at(not_before),
            not_before=not_before,
            turn=turn,
            is_decode=is_decode,
            is_serial_prefill=is_serial_prefill,
        )

    def _altered(self, turn: _Turn, params: Params) -> tuple[_Turn, Params]:
        """Changes the prompt, or the parameters from P's answer."""
        rng, ticket = self._rng, params["ticket"]
        kind = rng.choice(["prompt", "truncated", "changed", "foreign", "engine", "address", "unknown", "tokens"])
        if kind == "prompt":
            return replace(turn, prompt=tuple(self._prompt())), params
        at = rng.randrange(len(ticket))
        other_host, other_port = address_of(rng.choice(self._names))
        issued = Ticket(
            turn.prefiller, f"{turn.prefiller}.1", TransferId("c1.1.p", 0), self._digest(turn), len(turn.prompt)
        )
        changes: dict[str, Params] = {
            "truncated": {"ticket": ticket[:at] or "x"},
            "changed": {"ticket": f"{ticket[:at]}{'A' if ticket[at] != 'A' else 'B'}{ticket[at + 1 :]}"},
            "foreign": {"ticket": TicketOffice(b"the key of another cluster").issue(issued)},
            "engine": {"remote_engine_id": rng.choice(self._names)},
            "address": {"remote_host": other_host, "remote_port": other_port},
            "unknown": {"remote_host": "10.9.9.9", "remote_port": 22},
            "tokens": {"remote_num_tokens": rng.choice([0, 1, len(turn.prompt) + 50])},
        }
        return turn, {**params, **changes[kind]}

    def _misled(self, turn: _Turn, params: Params) -> Params:
        """Names the rogue, with P's ticket or a valid one of its own."""
        host, port = address_of(ROGUE)
        params = {**params, "remote_host": host, "remote_port": port}
        name = f"rogue{self._rng.randrange(3)}"
        own = TicketOffice(CLUSTER_KEY).issue(
            Ticket(name, "1", TransferId("any", 0), self._digest(turn), len(turn.prompt))
        )
        return {**params, **self._rng.choice([{}, {"ticket": own, "remote_engine_id": name}])}

    @staticmethod
    def _digest(turn: _Turn) -> bytes:
        return digest_prompt(turn.prompt, (turn.cache_salt or "").encode())
