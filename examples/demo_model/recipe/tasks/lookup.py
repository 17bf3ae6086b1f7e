"""Facts in a text, and questions about them: the task that shows whether the KV cache is intact.

A text holds 2 to 40 facts, each about a different pair of person and property, shuffled between sentences of stories
that use the same words. A wrong or missing part of the KV changes the answer to another person's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from recipe.draw import Draw, Item, Message, assistant, system, user
from recipe.tasks.stories import filler
from recipe.words import (
    ANIMALS,
    CITIES,
    COLORS,
    FOODS,
    JOBS,
    NAMES,
    OBJECTS,
    PLACES,
    SPORTS,
    article,
    digits,
    label,
)

UNKNOWN = "The text does not say."
_PIECES = re.compile(r"[A-Za-z]+|\d|[^\w\s]")


@dataclass(frozen=True)
class Fact:
    """A sentence, the questions it answers, and the full answer."""

    sentence: str
    questions: tuple[str, ...]
    answer: str
    value: str


def _code(draw: Draw, n: str) -> tuple[str, Fact]:
    v = digits(draw, 4)
    asked = (f"What is the code of {n}?", f"Tell me the code of {n}.", f"Which code does {n} have?")
    return f"code {n}", Fact(f"The code of {n} is {v}.", asked, f"The code of {n} is {v}.", v)


def _pet(draw: Draw, n: str) -> tuple[str, Fact]:
    animal, v = draw.pick(ANIMALS), draw.pick(NAMES)
    asked = (f"What is the name of {n}'s {animal}?", f"What is {n}'s {animal} called?")
    return f"pet {n}", Fact(f"{n} has {article(animal)} called {v}.", asked, f"{n}'s {animal} is called {v}.", v)


def _city(draw: Draw, n: str) -> tuple[str, Fact]:
    v = draw.pick(CITIES)
    asked = (f"In which city does {n} live?", f"Where does {n} live?")
    return f"city {n}", Fact(f"{n} lives in {v}.", asked, f"{n} lives in {v}.", v)


def _color(draw: Draw, n: str) -> tuple[str, Fact]:
    thing, v = draw.pick(OBJECTS), draw.pick(COLORS)
    asked = (f"What color is {n}'s {thing}?", f"Which color does {n}'s {thing} have?")
    return f"color {n} {thing}", Fact(f"{n}'s {thing} is {v}.", asked, f"{n}'s {thing} is {v}.", v)


def _food(draw: Draw, n: str) -> tuple[str, Fact]:
    v = draw.pick(FOODS)
    asked = (f"What does {n} like to eat?", f"What is {n}'s favorite food?")
    return f"food {n}", Fact(f"{n} likes to eat {v}.", asked, f"{n} likes to eat {v}.", v)


def _job(draw: Draw, n: str) -> tuple[str, Fact]:
    v = draw.pick(JOBS)
    asked = (f"What is {n}'s job?", f"What does {n} work as?")
    return f"job {n}", Fact(f"{n} works as {article(v)}.", asked, f"{n} works as {article(v)}.", v)


def _age(draw: Draw, n: str) -> tuple[str, Fact]:
    v = digits(draw, 2)
    asked = (f"How old is {n}?", f"What is the age of {n}?")
    return f"age {n}", Fact(f"{n} is {v} years old.", asked, f"{n} is {v} years old.", v)


def _sport(draw: Draw, n: str) -> tuple[str, Fact]:
    v = draw.pick(SPORTS)
    asked = (f"What does {n} play?", f"Which sport does {n} like?")
    return f"sport {n}", Fact(f"{n} plays {v} every week.", asked, f"{n} plays {v}.", v)


def _hidden(draw: Draw, n: str) -> tuple[str, Fact]:
    thing, v = draw.pick(OBJECTS), draw.pick(PLACES)
    asked = (f"Where is the {thing} of {n}?", f"Where did {n} put the {thing}?")
    sentence = f"{n} put the {thing} in the {v}."
    return f"hidden {n} {thing}", Fact(sentence, asked, f"The {thing} of {n} is in the {v}.", v)


def _key_value(draw: Draw, n: str) -> tuple[str, Fact]:
    key, v = label(draw), digits(draw, 4)
    asked = (f"What is the value of {key}?", f"Which value belongs to {key}?")
    return f"key {key}", Fact(f"The value of {key} is {v}.", asked, f"The value of {key} is {v}.", v)


KINDS: tuple[Callable[[Draw, str], tuple[str, Fact]], ...] = (
    _code, _code, _code, _pet, _city, _color, _food, _job, _age, _sport, _hidden, _key_value,
)  # fmt: skip


def draw_facts(draw: Draw, count: int) -> list[Fact]:
    """Returns `count` facts, no two about the same property of the same person.

    Texts differ in the number of people: with few people, facts differ mostly by property; with many, by name; a model
    must use both.
    """
    few_kinds = draw.chance(0.3)
    kinds = draw.some(KINDS, draw.between(2, 4)) if few_kinds else KINDS
    fewest = count if few_kinds else count // 4
    people = draw.some(NAMES, draw.between(max(2, fewest), max(3, count)))
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        key, fact = draw.pick(kinds)(draw, draw.pick(people))
        facts.setdefault(key, fact)
    return list(facts.values())


def estimated_tokens(text: str) -> int:
    """Estimates a text's tokens: words, digits and punctuation marks, nearly all of which are single tokens."""
    return len(_PIECES.findall(text))


def weave(draw: Draw, facts: list[Fact], num_tokens: int) -> str:
    """Returns a text of about `num_tokens` tokens (at least the facts) with the facts spread over all of it."""
    sentences = [fact.sentence for fact in facts]
    room = num_tokens - estimated_tokens(" ".join(sentences))
    between: list[str] = []
    while room > 40:
        story = filler(draw, 1)
        between += story
        room -= estimated_tokens(" ".join(story))
    places = sorted(draw.below(len(between) + 1) for _ in sentences)
    woven: list[str] = []
    taken = 0
    for place, sentence in zip(places, sentences, strict=True):
        woven += between[taken:place]
        woven.append(sentence)
        taken = place
    return " ".join(woven + between[taken:])


def _absent_question(draw: Draw, facts: list[Fact]) -> tuple[str, str]:
    """Returns a question about a person whom no fact names, and the answer that says so."""
    said = " ".join(fact.sentence for fact in facts)
    name = draw.pick([n for n in NAMES if n not in said])
    _, fact = draw.pick(KINDS[:9])(draw, name)
    return draw.pick(fact.questions), UNKNOWN


def _turns(draw: Draw, text: str, asked: list[tuple[str, str]]) -> list[Message]:
    """Returns the conversation, with the text in the first question, in a separate turn or in the system turn."""
    first, *others = asked
    form = draw.below(10)
    if form < 6:
        opening = draw.pick(("Read this.\n", "Here is a text.\n", "Read the text and answer.\n", ""))
        turns = [user(f"{opening}{text}\n{first[0]}"), assistant(first[1])]
    elif form < 8:
        turns = [user(f"Remember this.\n{text}"), assistant("I will remember it.")]
        turns += [user(first[0]), assistant(first[1])]
    else:
        turns = [system(text), user(first[0]), assistant(first[1])]
    for question, answer in others:
        turns += [user(question), assistant(answer)]
    return turns


def make_sized(draw: Draw, num_facts: int, num_tokens: int, num_questions: int, absent: float = 0.03) -> Item:
    """Returns one text with questions.

    Args:
        num_facts: facts in the text; also the maximum number of questions.
        num_tokens: approximate length of the text; the questions add about 25 tokens each.
        num_questions: number of turns of question and answer.
        absent: the share of questions that no fact answers.
    """
    facts = draw.owned(lambda: draw_facts(draw, num_facts), lambda fs: "lookup " + " ".join(f.sentence for f in fs))
    chosen = draw.some(facts, min(num_questions, len(facts)))
    asked = [(draw.pick(fact.questions), fact.answer) for fact in chosen]
    asked = [_absent_question(draw, facts) if draw.chance(absent) else pair for pair in asked]
    key = "lookup " + " ".join(f.sentence for f in facts)
    return Item("lookup", key, _turns(draw, weave(draw, facts, num_tokens), asked), value=chosen[-1].value)


def make_short(draw: Draw) -> Item:
    """Returns up to 40 facts in up to about 700 tokens."""
    num_facts = draw.pick((2, 3, 4, 6, 8, 12, 16, 24, 32, 40))
    return make_sized(draw, num_facts, draw.between(0, 640), draw.between(1, 8))


def make_long(draw: Draw) -> Item:
    """Returns up to 40 facts in a text that fills the context, with many questions because the text is expensive."""
    num_questions = draw.between(2, 12)
    longest = 1960 - 26 * num_questions
    num_facts = draw.pick((10, 20, 30, 40, 40))
    return make_sized(draw, num_facts, draw.between(900, longest), num_questions)


def make_forty(draw: Draw, num_tokens: int = 1460) -> Item:
    """Returns an evaluation item: a question about one of 40 facts in a context of about 1,500 tokens."""
    return make_sized(draw, 40, num_tokens, 1, absent=0.0)


def make_full(draw: Draw) -> Item:
    """Returns a question about one of 40 facts in a context of close to 2,000 tokens, nearly the maximum."""
    return make_forty(draw, 1930)
