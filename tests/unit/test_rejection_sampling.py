"""Sampled drafts: for any distribution of the drafter, the output has the distribution of the target.

The pieces that the runner puts together (`SamplingPicker`, `RejectionVerifier`, `SyntheticVerifier`) work here on a toy
vocabulary, with 10^5 requests that differ only in their seeds. Each request verifies a window of two drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.messages.requests import EngineRequest
from penstock.messages.sampling_params import SamplingParams
from penstock.runner.cpu.drafts import (
    DraftDistributions,
    RejectionVerifier,
    SamplingPicker,
    SyntheticVerifier,
    TorchSampledStep,
    accept_or_resample,
)
from penstock.runner.cpu.sampler import draw, sample
from penstock.runner.memory import DeviceMemory
from penstock.runner.sampling.batch import SamplingBatch
from penstock.runner.sampling.noise import Purpose, uniform
from penstock.runner.sampling.states import SamplingStates
from penstock.runner.speculation.draft import allocate_draft_logits
from penstock.runner.speculation.speculator import StepResult
from penstock.runner.speculation.verifier import Verifier
from penstock.utils.errors import ConfigError
from tests.verified_steps import verified_step

NUM_DRAWS = 100_000
NUM_DRAFTS = 2
NUM_COMPUTED = 5  # so that the window's tokens stand at 6, 7 and 8
CPU = torch.device("cpu")
TARGET = torch.tensor([0.02, 0.3, 0.08, 0.2, 0.1, 0.05, 0.25, 0.0])
DRAFTERS = {
    "never": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    "sometimes": torch.tensor([0.3, 0.05, 0.2, 0.1, 0.05, 0.1, 0.1, 0.1]),
    "always": TARGET,
}
# The 99.99th percentiles of chi-square.
LIMITS = {2: 18.4, 3: 21.1, 6: 27.9}


def chi_square_is_fine(tokens: torch.Tensor, probs: torch.Tensor) -> bool:
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    possible = probs > 0
    wanted = probs[possible].double() * len(tokens)
    statistic = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
    return int(counts[~possible].sum()) == 0 and statistic < LIMITS[int(possible.sum()) - 1]


def make_requests(count: int, **params: Any) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(seed),
            prompt_token_ids=(0,),
            sampling_params=SamplingParams(max_tokens=None, **params),
            max_tokens=100,
            seed=seed,
        )
        for seed in range(count)
    ]


@pytest.fixture(scope="module")
def many_requests() -> list[EngineRequest]:
    return make_requests(NUM_DRAWS)


@dataclass
class Toy:
    """A runner reduced to drafts: all requests are at the same position, and only their seeds differ."""

    requests: list[EngineRequest]
    vocab_size: int = 8
    bitmask: np.ndarray | None = None

    def __post_init__(self) -> None:
        count = len(self.requests)
        self.states = SamplingStates(count, self.vocab_size)
        for row, request in enumerate(self.requests):
            self.states.add(row, request)
        self.rows = torch.arange(count)
        self.drafts = torch.zeros((count, NUM_DRAFTS), dtype=torch.int64)
        self.tokens = torch.zeros((count, NUM_COMPUTED + NUM_DRAFTS + 3), dtype=torch.int32)
        self.distributions = DraftDistributions(torch.empty((count, NUM_DRAFTS, self.vocab_size)))

    def propose(self, *logits: torch.Tensor) -> None:
        """Draws one draft of every request from each of `logits`, [vocab_size]."""
        every = np.arange(len(self.requests))
        batch = SimpleNamespace(host=SimpleNamespace(rows=every, sampling=every))
        num_computed = torch.full((len(every),), NUM_COMPUTED)
        step = StepResult(cast(Any, batch), torch.empty(0), self.rows, self.rows, num_computed, self.tokens)
        picker = SamplingPicker(self.states, self.distributions).of_step(step)
        for place, each in enumerate(logits):
            self.drafts[:, place] = picker(each.expand(len(every), -1), place)

    def verify(self, verifier: Verifier[TorchSampledStep], *logits: torch.Tensor) -> TorchSampledStep:
        """Verifies a window with `logits` [vocab_size] for each place; it has one draft less than places."""
        count, width = len(self.requests), len(logits)
        index = np.repeat(np.arange(count), width)
        positions = np.tile(np.arange(width), count) + NUM_COMPUTED + 1
        masks = {} if self.bitmask is None else dict.fromkeys(range(len(index)), self.bitmask)
        requests = [self.requests[i] for i in index]
        batch = SamplingBatch(
            requests, positions, torch.from_numpy(index), torch.from_numpy(positions), self.tokens, masks
        )
        all_logits, num_drafts = torch.stack(logits).repeat(count, 1), np.full(count, width - 1)
        return verified_step(verifier, all_logits, batch, self.rows, num_drafts)

    def rejection(self) -> RejectionVerifier:
        return RejectionVerifier(self.drafts, self.distributions)


def run(requests: list[EngineRequest], target: list[torch.Tensor], drafter: list[torch.Tensor], **toy: Any) -> Any:
    """Returns tokens [num_requests, width], numbers of accepted drafts [num_requests], and the toy."""
    made = Toy(requests, len(target[0]), **toy)
    made.propose(*drafter)
    step = made.verify(made.rejection(), *target)
    return step.token_ids.view(len(requests), -1), step.num_accepted, made


@pytest.mark.spread(1)
@pytest.mark.parametrize("quality", DRAFTERS)
def test_the_output_has_the_target_s_distribution(many_requests: list[EngineRequest], quality: str) -> None:
    """This holds at each place of the window, given that the drafts before it were accepted.

    Leviathan et al. 2023, theorem 3.5: a draft is accepted with probability sum(min(p, q)).
    """
    draft, second = DRAFTERS[quality], TARGET.flip(0)
    tokens, accepted, _ = run(many_requests, [TARGET.log(), second.log(), TARGET.log()], [draft.log(), draft.log()])
    assert chi_square_is_fine(tokens[:, 0], TARGET)
    for place, target in ((0, TARGET), (1, second)):
        reached = accepted >= place
        count, expected = int(reached.sum()), torch.minimum(target, draft).sum().item()
        if count == 0:
            assert quality == "never"
            return
        deviation = math.sqrt(max(expected * (1 - expected), 0) / count)
        assert abs((accepted[reached] > place).double().mean().item() - expected) <= 4 * deviation + 1e-6
        assert chi_square_is_fine(tokens[reached, place], target)
    if bool((accepted == 2).any()):
        assert chi_square_is_fine(tokens[accepted == 2, 2], TARGET)


def test_the_features_of_the_request_shape_the_target() -> None:
    """These are temperature, top_k, allowed tokens and a bias; the drafter applies only the temperature."""
    params: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "logit_bias": {2: 1.0}, "allowed_token_ids": [1, 2, 3, 4]}
    scaled = TARGET.log()
    scaled = torch.where(torch.isin(torch.arange(8), torch.tensor([1, 2, 3])), scaled, -torch.inf)
    scaled[2] += 1.0
    expected = (scaled / 0.7).softmax(-1)
    drafter = DRAFTERS["sometimes"].log()
    num_draws = NUM_DRAWS // 10
    tokens, accepted, made = run(make_requests(num_draws, **params), [TARGET.log()] * 3, [drafter] * 2)
    assert chi_square_is_fine(tokens[:, 0], expected)
    assert chi_square_is_fine(tokens[accepted > 0, 1], expected)
    q = (drafter / 0.7).softmax(-1)
    rate = torch.minimum(expected, q).sum().item()
    assert abs((accepted > 0).double().mean().item() - rate) < 4 * math.sqrt(rate * (1 - rate) / num_draws)
    observed = torch.bincount(made.drafts[:, 0], minlength=8) / num_draws
    assert torch.allclose(observed.float(), q, atol=0.02)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("shared", "with_"),
    [("RESAMPLE", "DRAFT"), ("ACCEPT", "DRAFT"), ("RESAMPLE", "ACCEPT")],
)
def test_a_random_number_used_twice_would_be_detected(
    monkeypatch: pytest.MonkeyPatch, many_requests: list[EngineRequest], shared: str, with_: str
) -> None:
    """The distributions are correct because no number serves two purposes; the tests above must detect a violation."""
    true_noise = SamplingBatch.noise
    replaced = {Purpose[shared]: Purpose[with_]}

    def noise(self: SamplingBatch, indices: Any, purpose: Purpose, ahead: int = 0) -> torch.Tensor:
        return true_noise(self, indices, replaced.get(purpose, purpose), ahead)

    monkeypatch.setattr(SamplingBatch, "noise", noise)
    draft = DRAFTERS["sometimes"].log()
    tokens, _, _ = run(many_requests[:30_000], [TARGET.log()] * 2, [draft])
    assert not chi_square_is_fine(tokens[:, 0], TARGET)


def test_noise_of_different_purposes_is_uncorrelated() -> None:
    seeds, positions = range(NUM_DRAWS), np.full(NUM_DRAWS, 3)
    noise = np.stack([uniform(seeds, positions, purpose) for purpose in Purpose])
    correlation = np.corrcoef(noise) - np.eye(len(noise))
    assert np.abs(correlation).max() < 4.5 / math.sqrt(NUM_DRAWS)


def test_greedy_requests_in_the_same_batch_are_matched_exactly() -> None:
    """Random requests get the same tokens as in a batch without greedy requests."""
    mixed = make_requests(1000)
    for i in range(0, 1000, 2):
        mixed[i] = make_requests(1, temperature=0.0)[0]
    target, draft = TARGET.log(), DRAFTERS["sometimes"].log()
    tokens, accepted, made = run(mixed, [target] * 3, [draft, TARGET.log()])
    assert tokens[::2].eq(int(TARGET.argmax())).all()
    assert made.drafts[::2, 0].eq(0).all(), "the drafter's best token"
    assert accepted[::2].eq(0).all()
    alone, alone_accepted, _ = run(make_requests(1000), [target] * 3, [draft, TARGET.log()])
    assert torch.equal(tokens[1::2], alone[1::2])
    assert torch.equal(accepted[1::2], alone_accepted[1::2])


def test_positions_without_a_draft_are_sampled_as_in_the_plain_run() -> None:
    """These are requests that opted out, and the row after the last draft."""
    made = Toy(make_requests(500))
    made.propose(DRAFTERS["sometimes"].log())
    step = made.verify(made.rejection(), TARGET.log())
    positions = np.full(500, NUM_COMPUTED + 1)
    batch = SamplingBatch(made.requests, positions, made.rows, torch.from_numpy(positions), made.tokens, {})
    plain = sample(TARGET.log().expand(500, -1), batch).token_ids
    assert torch.equal(step.token_ids, plain)
    assert step.num_accepted.eq(0).all()
    together = made.verify(made.rejection(), TARGET.log(), TARGET.log())
    behind = draw(
        TARGET.log().softmax(-1).expand(500, -1), torch.from_numpy(uniform(range(500), positions + 1, Purpose.SAMPLE))
    )
    assert torch.equal(together.token_ids.view(500, 2)[:, 1], behind)


def test_equal_distributions_leave_nothing_to_reject() -> None:
    """Rejection also works if rounding makes the target's probability of every token the smaller one."""
    probs = torch.randn((2000, 300), generator=torch.Generator().manual_seed(1)).softmax(-1)
    highest = torch.full((2000,), 1 - 2.0**-53, dtype=torch.float64)
    drafts = draw(probs, torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(accept_or_resample(probs, probs, drafts, highest, highest), drafts)
    smaller = probs * (1 - 2.0**-20)
    tokens = accept_or_resample(smaller, probs, drafts, highest, highest)
    assert not torch.equal(tokens, drafts), "rejected, and drawn from the target instead"
    assert (smaller.gather(1, tokens[:, None]) > 0).all()


def test_corner_cases() -> None:
    zero, half = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
    one_hot = torch.tensor([[0.0, 1.0, 0.0]])
    flat = torch.full((1, 3), 1 / 3)
    draft = torch.tensor([2])
    # The target allows one token: another draft is rejected, and this token accepted.
    assert accept_or_resample(one_hot, flat, draft, zero, half).tolist() == [1]
    assert accept_or_resample(one_hot, flat, torch.tensor([1]), half, half).tolist() == [1]
    # A draft whose probability has underflowed to 0 is not accepted with certainty.
    assert accept_or_resample(flat, one_hot, draft, half, zero).tolist() == [0]
    # If the drafter's distribution is NaN, the token is drawn from the target, without bias.
    nan = torch.full((1, 3), torch.nan)
    assert [accept_or_resample(flat, nan, draft, zero, zero + n / 3 + 0.1).item() for n in range(3)] == [0, 1, 2]
    # If the target's distribution is NaN, the token is any of the vocabulary, and is reported as invalid.
    assert 0 <= accept_or_resample(nan, flat, draft, half, half).item() < 3


def test_nan_logits_are_reported() -> None:
    nan = torch.full((8,), torch.nan)
    made = Toy(make_requests(20))
    made.propose(TARGET.log(), TARGET.log())
    step = made.verify(made.rejection(), nan, TARGET.log(), TARGET.log())
    assert not step.distributions.is_valid.view(20, 3)[:, 0].any()
    assert step.distributions.is_valid.view(20, 3)[:, 1:].all()
    # A drafter without finite logits does no harm.
    made.propose(nan, nan)
    step = made.verify(made.rejection(), TARGET.log(), TARGET.log(), TARGET.log())
    assert step.distributions.is_valid.all()
    assert (step.num_accepted >= 0).all()


def test_tokens_that_the_grammar_forbids_are_never_returned() -> None:
    bitmask = np.array([0b0000_1010], dtype=np.int32)  # tokens 1 and 3
    expected = torch.tensor([0.0, 0.6, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0])
    draft = DRAFTERS["sometimes"].log()
    tokens, accepted, _ = run(make_requests(NUM_DRAWS // 10), [TARGET.log()] * 3, [draft] * 2, bitmask=bitmask)
    assert torch.isin(tokens, torch.tensor([1, 3])).all()
    counts = torch.bincount(tokens[:, 0], minlength=8) / len(tokens)
    assert torch.allclose(counts, expected, atol=0.02)
    assert 0 < accepted.float().mean() < 2


def test_a_reused_row_reads_no_old_logits() -> None:
    """A draft and the logits it was drawn from are replaced together, and only for the rows that draft."""
    made = Toy(make_requests(400))
    made.propose(torch.tensor([9.0, *[-9.0] * 7]), torch.tensor([9.0, *[-9.0] * 7]))
    made.propose(TARGET.log(), TARGET.log())
    step = made.verify(made.rejection(), TARGET.log(), TARGET.log(), TARGET.log())
    assert step.num_accepted.eq(2).all(), "the drafter is the target now, and always right"


def test_the_buffer_is_refused_when_it_does_not_fit() -> None:
    memory = cast(DeviceMemory, SimpleNamespace(available=lambda: 2**30))
    model, config = SimpleNamespace(logits_dtype=torch.bfloat16), SimpleNamespace(vocab_size=256_000)
    loaded = SimpleNamespace(device=CPU, model=model, config=config)
    with pytest.raises(ConfigError, match=r"max_num_seqs=256 requests, which take 3\.9 GiB.*1\.0 GiB free"):
        allocate_draft_logits(cast(Any, loaded), 256, 32, memory)


@pytest.mark.spread(2)
@pytest.mark.parametrize("rates", [(0.8, 0.5), (0.0, 1.0), (1.0, 0.3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_has_the_configured_rates(rates: tuple[float, float], temperature: float) -> None:
    made = Toy(make_requests(20_000, temperature=temperature))
    made.drafts[:] = torch.tensor([1, 7])  # the likeliest token, and one that the target never samples
    step = made.verify(SyntheticVerifier(made.drafts, rates), *[TARGET.log()] * 3)
    tokens, accepted = step.token_ids.view(-1, 3), step.num_accepted
    for place, rate in enumerate(rates):
        reached = accepted[accepted >= place]
        if len(reached):
            deviation = math.sqrt(rate * (1 - rate) / len(reached))
            assert abs((reached > place).double().mean().item() - rate) <= 4 * deviation
        assert (tokens[accepted > place, place] == made.drafts[0, place]).all()


def test_synthetic_acceptance_respects_gaps_and_grammars() -> None:
    made = Toy(make_requests(10), bitmask=np.array([0b0000_1010], dtype=np.int32))
    made.drafts[:] = torch.tensor([3, 2])
    made.drafts[5] = torch.tensor([-1, 3])
    step = made.verify(SyntheticVerifier(made.drafts, (1.0, 1.0)), *[TARGET.log()] * 3)
    assert step.num_accepted.tolist() == [1] * 5 + [0] + [1] * 4
    assert step.num_real_drafts.tolist() == [2] * 5 + [0] + [2] * 4
    assert torch.isin(step.token_ids, torch.tensor([1, 3])).all()
