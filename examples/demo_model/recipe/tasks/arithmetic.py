"""Sums and differences up to three digits, a few small products, and word problems made of them."""

from __future__ import annotations

from recipe.draw import Draw, Item, assistant, user
from recipe.words import FOODS, NAMES

Sum = tuple[int, str, int]
_PHRASES = {
    "+": ("What is {a} + {b}?", "{a} + {b} =", "Add {a} and {b}.", "How much is {a} plus {b}?"),
    "-": ("What is {a} - {b}?", "{a} - {b} =", "Subtract {b} from {a}.", "How much is {a} minus {b}?"),
    "*": ("What is {a} * {b}?", "{a} * {b} =", "Multiply {a} by {b}.", "How much is {a} times {b}?"),
}


def solve(problem: Sum) -> int:
    """Returns the value of one problem."""
    a, sign, b = problem
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def draw_problem(draw: Draw) -> Sum:
    """Returns a problem of the split; differences are never negative, products have a factor below ten."""

    def once() -> Sum:
        sign = draw.pick("+++---*")
        if sign == "*":
            return draw.between(2, 99), sign, draw.between(2, 9)
        a, b = (draw.between(0, 10 ** draw.pick((1, 2, 2, 3, 3, 3)) - 1) for _ in range(2))
        return (max(a, b), sign, min(a, b)) if sign == "-" else (a, sign, b)

    return draw.owned(once, key_of)


def key_of(problem: Sum) -> str:
    """Returns the problem's key: a + b and b + a are one item."""
    a, sign, b = problem
    return f"{min(a, b)}{sign}{max(a, b)}"


def _word_problem(draw: Draw, problem: Sum) -> tuple[str, str]:
    a, sign, b = problem
    name, food = draw.pick(NAMES), draw.pick(FOODS)
    if sign == "+":
        question = f"{name} has {a} coins and gets {b} more. How many coins does {name} have now?"
    elif sign == "-":
        question = f"{name} has {a} coins and gives away {b}. How many coins are left?"
    else:
        question = f"{name} has {a} boxes of {food} with {b} in each. How many is that in total?"
    return question, f"{a} {sign} {b} = {solve(problem)}."


def _pose(draw: Draw, problem: Sum) -> tuple[str, str]:
    """Returns a question and its answer, which repeats the problem unless the question ends with '='."""
    if draw.chance(0.15):
        return _word_problem(draw, problem)
    a, sign, b = problem
    question = draw.pick(_PHRASES[sign]).format(a=a, b=b)
    value = str(solve(problem))
    return question, value if question.endswith("=") else f"{a} {sign} {b} = {value}."


def _conversation(draw: Draw, problems: list[Sum]) -> Item:
    messages = []
    for problem in problems:
        question, answer = _pose(draw, problem)
        messages += [user(question), assistant(answer)]
    return Item("arithmetic", " ".join(key_of(p) for p in problems), messages, value=solve(problems[-1]))


def make(draw: Draw) -> Item:
    """Returns a conversation of one to eight problems."""
    return _conversation(draw, [draw_problem(draw) for _ in range(draw.between(1, 8))])


def make_one(draw: Draw) -> Item:
    """Returns an evaluation item: one problem of any kind."""
    return _conversation(draw, [draw_problem(draw)])


def make_three_digits(draw: Draw) -> Item:
    """Returns an evaluation item: the sum of two three-digit numbers."""
    problem = draw.owned(lambda: (draw.between(100, 999), "+", draw.between(100, 999)), key_of)
    a, _, b = problem
    return Item("add3", key_of(problem), [user(f"What is {a} + {b}?"), assistant(f"{a} + {b} = {a + b}.")], value=a + b)
