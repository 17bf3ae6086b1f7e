"""Evaluation on held-out items: exact answers by teacher forcing, and greedy generation for a sample of them."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from recipe.bank import CONTEXT
from recipe.draw import Draw, Item
from recipe.model import DemoModel
from recipe.tasks import standard_library, stories
from recipe.tasks.table import EXAMS, Exam
from recipe.template import prompt_and_answer
from recipe.tokenizer import END_OF_TEXT_ID, TURN_END_ID

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_TOKENS = 32_768
TEXT_WINDOW = 1024


@dataclass(frozen=True)
class Question:
    """An item in tokens."""

    item: Item
    prompt: list[int]
    answer: list[int]


@dataclass
class Score:
    """Counts over the items of one exam; an item that does not fit the context counts as asked and not as exact."""

    num_asked: int

    num_items: int = 0
    num_exact: int = 0
    num_answer_tokens: int = 0
    num_right_tokens: int = 0
    num_mtp_tokens: int = 0
    num_mtp_agree: int = 0
    num_prompt_tokens: int = 0

    def report(self) -> dict[str, float]:
        """Returns shares instead of counts."""
        return {
            "items": self.num_asked,
            "too_long": self.num_asked - self.num_items,
            "exact": round(self.num_exact / max(1, self.num_asked), 4),
            "token_accuracy": round(self.num_right_tokens / max(1, self.num_answer_tokens), 4),
            "mtp_agreement": round(self.num_mtp_agree / max(1, self.num_mtp_tokens), 4),
            "mean_prompt_tokens": round(self.num_prompt_tokens / max(1, self.num_items), 1),
        }


def questions(exam: Exam, tokenizer: Tokenizer, seed: int, count: int) -> list[Question]:
    """Draws `count` held-out items of an exam and returns those that fit the context."""
    draw = Draw(f"exam {exam.name} {seed}", held_out=True)
    drawn: list[Question] = []
    for _ in range(count):
        item = exam.make(draw)
        prompt, answer = prompt_and_answer(item)
        question = Question(item, tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids)
        if len(question.prompt) + len(question.answer) <= CONTEXT:
            drawn.append(question)
    return drawn


def _padded(sequences: list[list[int]], device: torch.device) -> Tensor:
    """Returns [len(sequences), longest] int64, padded on the right, which no other position of a causal model sees."""
    longest = max(len(s) for s in sequences)
    rows = [s + [END_OF_TEXT_ID] * (longest - len(s)) for s in sequences]
    return torch.tensor(rows, device=device)


def _batches(drawn: list[Question]) -> list[list[Question]]:
    """Batches questions of similar length, at most about BATCH_TOKENS tokens per batch."""
    ordered = sorted(drawn, key=lambda q: len(q.prompt) + len(q.answer))
    batches: list[list[Question]] = [[]]
    for question in ordered:
        length = len(question.prompt) + len(question.answer)
        if batches[-1] and (len(batches[-1]) + 1) * length > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(question)
    return [batch for batch in batches if batch]


@torch.inference_mode()
def score(model: DemoModel, drawn: list[Question], num_asked: int) -> Score:
    """Scores by teacher forcing: an item is exact if every token of its answer is the model's first choice.

    The MTP module agrees where its choice is the answer's token; it is evaluated on every token of an answer except the
    first, which it could only propose before the end of the prompt.
    """
    device = next(model.parameters()).device
    total = Score(num_asked)
    for batch in _batches(drawn):
        tokens = _padded([q.prompt + q.answer for q in batch], device)
        hidden = model.hidden(tokens)
        ahead = model.mtp_hidden(hidden, tokens.roll(-1, dims=1))
        for row, question in enumerate(batch):
            first, last = len(question.prompt), len(question.prompt) + len(question.answer)
            answer = tokens[row, first:last]
            right = model.logits(hidden[row, first - 1 : last - 1]).argmax(-1) == answer
            agree = model.logits(ahead[row, first - 1 : last - 2]).argmax(-1) == answer[1:]
            total.num_items += 1
            total.num_exact += int(right.all())
            total.num_answer_tokens += len(answer)
            total.num_right_tokens += int(right.sum())
            total.num_mtp_tokens += len(agree)
            total.num_mtp_agree += int(agree.sum())
            total.num_prompt_tokens += first
    return total


@torch.inference_mode()
def generate(model: DemoModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Returns greedy answers of at most `num_tokens` tokens, without the end-of-turn token.

    There is deliberately no KV cache: each token is computed from the whole text, so no error of a cache can matter.
    """
    device = next(model.parameters()).device
    sequences = [list(prompt) for prompt in prompts]
    running = list(range(len(prompts)))
    for _ in range(num_tokens):
        tokens = _padded([sequences[i] for i in running], device)
        ends = torch.tensor([len(sequences[i]) - 1 for i in running], device=device)
        hidden = model.hidden(tokens)[torch.arange(len(running), device=device), ends]  # [num_running, D]
        chosen = model.logits(hidden).argmax(-1).tolist()
        for i, token in zip(running, chosen, strict=True):
            sequences[i].append(token)
        running = [
            i for i in running if sequences[i][-1] not in (TURN_END_ID, END_OF_TEXT_ID) and len(sequences[i]) < CONTEXT
        ]
        if not running:
            break
    stops = (TURN_END_ID, END_OF_TEXT_ID)
    answers = [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
    return [a[:-1] if a and a[-1] in stops else a for a in answers]


def _same_json(text: str, value: Any) -> bool:
    try:
        return json.loads(text) == value
    except json.JSONDecodeError:
        return False


def _same_call(text: str, value: Any) -> bool:
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    return text.startswith(opening) and text.endswith(closing) and _same_json(text[len(opening) : -len(closing)], value)


def _is_python(text: str, value: Any) -> bool:
    """Returns whether the fenced code parses; the exact comparison checks its names."""
    try:
        ast.parse(text.removeprefix("```python\n").removesuffix("\n```"))
    except SyntaxError:
        return False
    return text.startswith("```python\n") and text.endswith("\n```")


VALUE_CHECKS: dict[str, Callable[[str, Any], bool]] = {
    "json": _same_json,
    "tool_call": _same_call,
    "python": _is_python,
}


def free_run(model: DemoModel, tokenizer: Tokenizer, exam: Exam, drawn: list[Question]) -> dict[str, Any]:
    """Answers some questions greedily; counts the answers with the expected text, and those with the expected value."""
    longest = max(len(q.answer) for q in drawn) + 8
    made = generate(model, [q.prompt for q in drawn], longest)
    texts = [tokenizer.decode(ids) for ids in made]
    wanted = [tokenizer.decode(q.answer) for q in drawn]
    report: dict[str, Any] = {"items": len(drawn), "exact": sum(t == w for t, w in zip(texts, wanted, strict=True))}
    check = VALUE_CHECKS.get(exam.name)
    if check:
        report["value_right"] = sum(check(t, q.item.value) for t, q in zip(texts, drawn, strict=True))
    wrong = [{"got": t, "wanted": w} for t, w in zip(texts, wanted, strict=True) if t != w]
    return {**report, "wrong": wrong[:2]}


@torch.inference_mode()
def text_loss(model: DemoModel, tokenizer: Tokenizer, texts: list[str], num_windows: int) -> dict[str, float]:
    """Returns the mean loss on running text, in nats per token, and how often the first choice is right."""
    device = next(model.parameters()).device
    ids = [token for text in texts for token in [*tokenizer.encode(text).ids, END_OF_TEXT_ID]]
    num_windows = min(num_windows, len(ids) // TEXT_WINDOW)
    stride = len(ids) // max(1, num_windows)
    total = {"loss": 0.0, "accuracy": 0.0, "mtp_accuracy": 0.0}
    for at in range(num_windows):
        tokens = torch.tensor([ids[at * stride : at * stride + TEXT_WINDOW]], device=device)
        hidden = model.hidden(tokens)
        logits = model.logits(hidden)[0, :-1]
        ahead = model.logits(model.mtp_hidden(hidden, tokens.roll(-1, dims=1)))[0, :-2]
        total["loss"] += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
        total["accuracy"] += float((logits.argmax(-1) == tokens[0, 1:]).float().mean())
        total["mtp_accuracy"] += float((ahead.argmax(-1) == tokens[0, 2:]).float().mean())
    return {name: round(value / max(1, num_windows), 4) for name, value in total.items()}


def evaluate(model: DemoModel, tokenizer: Tokenizer, seed: int, num_items: int, num_free: int) -> dict[str, Any]:
    """Returns the whole report.

    Args:
        model: on the device to evaluate on.
        tokenizer: the model's.
        seed: seed of the items, which are held out with every seed.
        num_items: items per exam by teacher forcing.
        num_free: items per exam by greedy generation.

    Returns:
        `exams` by name, `texts` by kind, and `passed`: whether every promised threshold is reached.
    """
    model.eval()
    exams: dict[str, Any] = {}
    passed = True
    progress = tqdm(EXAMS, desc="evaluate", unit="exam")
    for exam in progress:
        progress.set_postfix(exam=exam.name)
        drawn = questions(exam, tokenizer, seed, num_items)
        report: dict[str, Any] = score(model, drawn, num_items).report()
        if exam.threshold:
            report["threshold"] = exam.threshold
            passed = passed and report["exact"] >= exam.threshold
        if num_free and drawn:
            report["free"] = free_run(model, tokenizer, exam, drawn[:num_free])
        exams[exam.name] = report
    draw = Draw(f"exam stories {seed}", held_out=True)
    told = [stories.make(draw).text for _ in range(400)]
    texts = {
        "stories": text_loss(model, tokenizer, [text for text in told if text], 16),
        "python_held_out": text_loss(model, tokenizer, list(standard_library.sources(held_out=True)), 64),
    }
    return {"passed": passed, "exams": exams, "texts": texts}
