"""The tables of the tasks that the model learns, and of the exams that evaluate it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipe.draw import Draw, Item
from recipe.tasks import arithmetic, chat, lists, lookup, python_functions, records, stories, tools

Generator = Callable[[Draw], Item]


@dataclass(frozen=True)
class Task:
    """A generator, and the weight of its share of the generated text relative to the others' weights."""

    name: str
    weight: float
    make: Generator


TASKS = (
    Task("story", 18, stories.make),
    Task("lookup", 12, lookup.make_short),
    Task("lookup_long", 22, lookup.make_long),
    Task("lists", 15, lists.make),
    Task("arithmetic", 10, arithmetic.make),
    Task("records", 9, records.make),
    Task("tools", 8, tools.make),
    Task("chat", 2, chat.make),
    Task("python", 4, python_functions.make),
)

# Tasks that are short enough to be combined in one conversation.
TURNS = (lists.make, arithmetic.make, records.make, chat.make, python_functions.make, stories.make)
MIXED_SHARE = 0.1


@dataclass(frozen=True)
class Exam:
    """The items of an evaluation, and the share of exact answers that the model must reach; 0 if none is promised."""

    name: str
    make: Generator
    threshold: float


EXAMS = (
    Exam("lookup_40_facts", lookup.make_forty, 0.95),
    Exam("lookup_full_context", lookup.make_full, 0.0),
    Exam("lookup_short", lambda draw: lookup.make_sized(draw, 40, 0, 1, absent=0.0), 0.0),
    Exam("add_three_digits", arithmetic.make_three_digits, 0.95),
    Exam("arithmetic", arithmetic.make_one, 0.0),
    Exam("json", records.make_json, 0.98),
    Exam("list_copy", lists.copy, 0.90),
    Exam("lists", lists.make, 0.0),
    Exam("records", records.make, 0.0),
    Exam("tool_call", tools.make_call, 0.0),
    Exam("python", python_functions.make, 0.0),
    Exam("identity", chat.make_identity, 0.0),
)


def mixed(draw: Draw) -> Item:
    """Returns two or three short tasks in one conversation."""
    parts = [draw.pick(TURNS)(draw) for _ in range(draw.between(2, 3))]
    messages = [m for part in parts for m in part.messages if m["role"] != "system"]
    if not messages:
        return parts[0]
    return Item("mixed", " ".join(part.key for part in parts), messages)


def items(draw: Draw, num_chars: int) -> list[tuple[str, Item]]:
    """Returns training items of about `num_chars` characters in all, in proportion to the tasks' weights.

    The next item is always of the task that is furthest behind its share, so that the proportions hold in every shard
    although the items' lengths differ a hundredfold.

    Returns:
        Pairs of the item's training text and the item.
    """
    from recipe.template import document

    made: list[tuple[str, Item]] = []
    written = dict.fromkeys((task.name for task in TASKS), 0.0)
    total = 0
    while total < num_chars:
        task = min(TASKS, key=lambda t: written[t.name] / t.weight)
        short = task.make in TURNS and draw.chance(MIXED_SHARE)
        item = mixed(draw) if short else task.make(draw)
        text = document(item)
        written[task.name] += len(text)
        total += len(text)
        made.append((text, item))
    draw.rng.shuffle(made)
    return made
